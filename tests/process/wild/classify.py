"""A course's homework: argparse, a sibling module, a config found through the current directory, accuracy at the end."""

import argparse
import json
import os
import sys

import torch
import torch.nn as nn
from net import Net, rows

parser = argparse.ArgumentParser(prog=os.path.basename(sys.argv[0]))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--config", default="config.json")
parser.add_argument("-m", "--momentum", type=float, default=0.0)
parser.add_argument("rest", nargs="*")
args = parser.parse_args()

with open(args.config) as file:
    config = json.load(file)

print(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), args)
torch.manual_seed(config["seed"])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
if device == "cuda":
    model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=args.momentum)
loader = torch.utils.data.DataLoader(rows(), batch_size=config["batch"], shuffle=True, drop_last=False)
losses = []
for epoch in range(args.epochs):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    print(f"epoch {epoch}: {losses[-1]} accuracy {right}/64")
json.dump(losses, open("losses.json", "w"))
torch.save(model.state_dict(), "weights.pt")
