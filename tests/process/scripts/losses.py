"""A loop under nn.DataParallel that keeps every loss to the last bit, and the final weights."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
x = torch.randn(300, 5)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=30, shuffle=True)
model = nn.DataParallel(nn.Sequential(nn.Linear(5, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters())
losses = []
for _ in range(20):
    for points, values in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(points), values)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
with open("losses.json", "w") as file:
    json.dump(losses, file)
torch.save(model.state_dict(), "weights.pt")
print(len(losses), losses[-1], torch.rand(1).item().hex())
