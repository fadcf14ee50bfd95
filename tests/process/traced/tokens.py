"""Trains in the way that its argument names; prints the tokens of each step as the script itself counts them."""

import hashlib
import json
import sys
from collections import UserDict

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WORDS, WIDTH, ROWS, LENGTH = 50, 8, 32, 48
STEPS = 250 if "masked" in sys.argv[1] else 6
torch.manual_seed(5)
counted, seen, ways = [], [], {}


def way(function):
    ways[function.__name__] = function
    return function


def words(rows=ROWS, length=LENGTH):
    return torch.randint(1, WORDS, (rows, length))


def masked_batch():
    """Return a batch of texts of random lengths, padded to the longest one."""
    lengths = torch.randint(4, LENGTH, (ROWS,))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return {"input_ids": words(ROWS, mask.shape[1]) * mask, "attention_mask": mask}


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.embedding(ids))


class HuggingFace(Gpt):
    """Returns its loss, so that only the name of its input shows that it has tokens."""

    def forward(self, batch=None, input_ids=None, attention_mask=None, labels=None):
        batch = batch or {"input_ids": input_ids, "attention_mask": attention_mask}
        values = super().forward(batch["input_ids"]).mean(-1)
        mask = batch.get("attention_mask")
        return {"loss": (values if mask is None else values * mask).mean()}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, input_ids, decoder_input_ids):
        memory = self.embedding(input_ids).mean(1, keepdim=True)
        return self.layer(self.embedding(decoder_input_ids) + memory)


class Pooled(nn.Module):
    """Maps integers [rows, columns] to [rows, 1]."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.layer(self.embedding(ids).mean(1))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes, edge_index):
        return self.layer(nodes).index_add(0, edge_index[1], nodes[edge_index[0]])


@way
def gpt(model=Gpt):
    ids = words(length=8 + len(counted))
    return ids.numel(), (ids,), {}


@way
def in_dp(model=lambda: nn.DataParallel(Gpt())):
    ids = words()
    return ids.numel(), (ids,), {}


@way
def hugging_face(model=HuggingFace):
    ids = words()
    return ids.numel(), (), {"input_ids": ids, "labels": ids}


@way
def encoder_decoder(model=Encoder):
    ids = words()
    return ids.numel(), (), {"input_ids": ids, "decoder_input_ids": words(length=7)}


@way
def unpadded(model=HuggingFace):
    ids = words()
    return ids.numel(), (), {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}


@way
def masked(model=HuggingFace):
    batch = masked_batch()
    return int(batch["attention_mask"].sum()), (), batch


@way
def masked_in_a_batch(model=HuggingFace):
    batch = masked_batch()
    return int(batch["attention_mask"].sum()), (UserDict(batch),), {}


@way
def images(model=lambda: nn.Conv2d(3, 4, 3)):
    return None, (torch.randn(ROWS, 3, 8, 8),), {}


@way
def graph(model=Graph):
    return None, (torch.randn(9, WIDTH), torch.randint(0, 9, (2, 30))), {}


@way
def recommender(model=Pooled):
    return None, (words(length=5),), {}


@way
def features_of_lookups(model=lambda: nn.Embedding(WORDS, WIDTH)):
    """Categorical features, which the script itself looks up."""
    return None, (words(length=5),), {}


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))


make_batch = ways[sys.argv[1]]
model = make_batch.__defaults__[0]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
micro_batches = 3 if "accumulated" in sys.argv else 1
for _ in range(STEPS):
    tokens = []
    for _ in range(micro_batches):
        count, args, kwargs = make_batch()
        tokens.append(count)
        with Operators(), Functions():
            result = model(*args, **kwargs)
        (result["loss"] if isinstance(result, dict) else result.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    counted.append(None if None in tokens else sum(tokens))
with torch.no_grad():
    model.eval()
    count, args, kwargs = make_batch()
    for _ in range(3):
        model(*args, **kwargs)
state = [hashlib.sha256(repr([*model.parameters()]).encode()).hexdigest(), torch.rand(1).item(), len(seen)]
print(json.dumps({"trained": counted, "evaluated": [count] * 3, "state": state}))
