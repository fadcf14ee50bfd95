"""Losses and gradients of several models under DataParallel; prints them as JSON."""

import json

import torch
from torch import nn

torch.manual_seed(7)
said = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x, weight=None):
        y = self.second(torch.tanh(self.norm(self.first(x)))) * self.scale + self.shift * self.frozen
        return y if weight is None else y * weight


def grads(model):
    return {name: p.grad.flatten().tolist() for name, p in model.named_parameters() if p.grad is not None}


inner = Net()
model = nn.DataParallel(inner)
x = torch.randn(11, 6, requires_grad=True)
target = torch.randn(11, 3)
loss = nn.functional.mse_loss(model(x), target)
loss.backward()
said["loss"] = loss.item()
said["gradients"] = grads(model)
said["input gradient"] = x.grad.flatten().tolist()
nn.functional.mse_loss(model(x), target).backward()
said["gradients of two steps"] = grads(model)

# One step down, then the loss again.
with torch.no_grad():
    for p in model.parameters():
        if p.grad is not None:
            p -= 0.1 * p.grad
said["loss after a step"] = nn.functional.mse_loss(model(x), target).item()

# A gradient penalty: the gradient's norm is part of the loss (double backward).
model.zero_grad()
x.grad = None
out = model(x)
(gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
(gradient.norm(2, dim=1) - 1).pow(2).mean().backward()
said["penalty"] = grads(model)

# Part of it frozen, as in fine-tuning.
model.zero_grad()
inner.first.weight.requires_grad_(False)
model(x).pow(2).sum().backward()
said["frozen in part"] = grads(model)
inner.first.weight.requires_grad_(True)

# Keyword tensors, doubles, and no gradients at all.
model.zero_grad()
weight = torch.rand(11, 3, requires_grad=True)
model(x, weight=weight).sum().backward()
said["by keyword"] = [grads(model), weight.grad.flatten().tolist()]
with torch.no_grad():
    said["no_grad"] = [model(x).flatten().tolist(), model(x).requires_grad]
with torch.inference_mode():
    said["inference_mode"] = model(x).flatten().tolist()
model.eval()
said["eval"] = model(x).flatten().tolist()
model.train()
model.double()
said["double"] = model(x.detach().double()).flatten().tolist()
model.float()


# One weight in two places, a list of layers, an embedding with integers in, an RNN.
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.table = nn.ParameterDict({"a": torch.ones(4)})
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, lengths=None):
        h, _ = self.rnn(self.embed(tokens))
        for layer in self.layers:
            h = h + layer(h) * self.table["a"]
        return self.head(h)


tied = nn.DataParallel(Tied())
tied(torch.arange(20).view(5, 4) % 9).logsumexp(-1).mean().backward()
said["tied"] = grads(tied)


# A loss computed inside, one scalar a replica; the mean of means over shares of one size is the mean.
class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x):
        return self.layer(x).pow(2).mean().view(1)


inside = nn.DataParallel(WithLoss())
inside(x[:6]).mean().backward()
said["loss inside"] = grads(inside)
print(json.dumps(said))
