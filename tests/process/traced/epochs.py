"""Training loops of many shapes. Each returns the epoch and the batch of each of its training steps as it counts them.

Both count from 1, as such scripts print them; None stands for a step that is in no epoch.
"""

import itertools
import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

LOOPS = {}


def loop(function):
    LOOPS[function.__name__] = function
    return function


class Own(Dataset):
    """A dataset with a length of its own."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(torch.ones(self.rows, 4))


class Training:
    def __init__(self):
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.said = []

    def learn(self, batch, *said, steps=True):
        """Train on a batch; `said`: epoch and batch."""
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.model(x).mean().backward()
        if steps:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.said.append(list(said) if said else None)

    def evaluate(self, loader):
        self.model.eval()
        with torch.no_grad():
            for batch in loader:
                self.model(batch[0] if isinstance(batch, (list, tuple)) else batch)
        self.model.train()


def rows(count):
    return TensorDataset(torch.ones(count, 4))


def epochs(loader, count=3, **options):
    found = Training()
    for epoch in range(1, count + 1):
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number)
    return found.said


@loop
def plain():
    return epochs(DataLoader(Own(23), batch_size=5, shuffle=True))


@loop
def last_dropped():
    return epochs(DataLoader(rows(23), batch_size=5, drop_last=True))


@loop
def workers():
    return epochs(DataLoader(Own(12), batch_size=3, num_workers=2), 2)


@loop
def persistent_workers():
    return epochs(DataLoader(Own(12), batch_size=3, num_workers=2, persistent_workers=True), 2)


@loop
def iterable():
    return epochs(DataLoader(Stream(12), batch_size=3))


@loop
def a_rank():
    return epochs(DataLoader(rows(23), batch_size=5, sampler=DistributedSampler(rows(23), num_replicas=2, rank=1)))


@loop
def one_batch():
    return epochs(DataLoader(rows(4), batch_size=4))


@loop
def a_list():
    return epochs(DataLoader([torch.ones(4)] * 6, batch_size=2))


@loop
def evaluations():
    """A sanity check, an evaluation in the middle of each epoch and one after it."""
    loader, other, found = DataLoader(Own(20), batch_size=4), DataLoader(rows(8), batch_size=4), Training()
    found.evaluate(other)
    for epoch in range(1, 4):
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number)
            if number == 2:
                found.evaluate(other)
        found.evaluate(other)
    return found.said


@loop
def evaluations_of_the_training_data():
    data, found = rows(20), Training()
    loader, again = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=10)
    for epoch in range(1, 4):
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number)
        found.evaluate(again)
    return found.said


@loop
def evaluations_by_many_loaders():
    loader, found = DataLoader(rows(20), batch_size=4), Training()
    for epoch in range(1, 4):
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number)
        for _ in range(150):
            found.evaluate(DataLoader(rows(2), batch_size=2))
    return found.said


@loop
def broken_off():
    loader, found = DataLoader(rows(40), batch_size=4), Training()
    for epoch in range(1, 4):
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number)
            if number == 3:
                break
    return found.said


@loop
def resumed():
    loader, found = DataLoader(rows(80), batch_size=4), Training()
    for epoch in range(1, 3):
        for number, batch in enumerate(loader, 1):
            if epoch == 1 and number <= 12:
                continue
            found.learn(batch, epoch, number)
    return found.said


@loop
def accumulated():
    loader, found = DataLoader(rows(32), batch_size=4), Training()
    for epoch in range(1, 3):
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number, steps=number % 4 == 0)
    return found.said


def ahead(loader):
    """Read as accelerate's loaders, which must know the last batch."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


@loop
def in_groups():
    """Accumulate as transformers' Trainer, which first reads all batches of a step of its optimizer."""
    loader, found = DataLoader(rows(44), batch_size=4), Training()
    for epoch in range(1, 4):
        batches = ahead(loader)
        for used in (4, 8, 11):
            group = list(itertools.islice(batches, used - (used - 1) // 4 * 4))
            for batch in group:
                found.model(batch[0]).mean().backward()
            found.optimizer.step()
            found.said.append([epoch, used])
    return found.said


@loop
def one_ahead():
    loader, other, found = DataLoader(rows(20), batch_size=4), DataLoader(rows(8), batch_size=4), Training()
    for epoch in range(1, 4):
        for number, batch in enumerate(ahead(loader), 1):
            found.learn(batch, epoch, number)
        found.evaluate(ahead(other))
    return found.said


@loop
def zipped():
    loader, other, found = DataLoader(rows(20), batch_size=4), DataLoader(Own(28), batch_size=4), Training()
    for epoch in range(1, 4):
        for number, (batch, _) in enumerate(zip(loader, other, strict=False), 1):
            found.learn(batch, epoch, number)
    return found.said


@loop
def another_loader_within():
    loader, other, found = DataLoader(rows(20), batch_size=4), DataLoader(Own(8), batch_size=4), Training()
    others = iter(other)
    for epoch in range(1, 4):
        for number, batch in enumerate(loader, 1):
            try:
                next(others)
            except StopIteration:
                others = iter(other)
                next(others)
            found.learn(batch, epoch, number)
    return found.said


@loop
def read_in_turn():
    """Two models, each with its loader: the second one's steps are in no epoch."""
    loader, other, found = DataLoader(rows(20), batch_size=4), DataLoader(Own(20), batch_size=4), Training()
    for epoch in range(1, 4):
        others = iter(other)
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number)
            found.learn(next(others))
    return found.said


@loop
def by_hand():
    loader, found = DataLoader(rows(20), batch_size=4), Training()
    batches, epoch, number = iter(loader), 1, 0
    for _ in range(12):
        try:
            batch = next(batches)
        except StopIteration:
            batches, epoch, number = iter(loader), epoch + 1, 0
            batch = next(batches)
        number += 1
        found.learn(batch, epoch, number)
    return found.said


@loop
def cycled():
    found = Training()
    for number, batch in enumerate(itertools.islice(itertools.cycle(DataLoader(rows(12), batch_size=4)), 30), 1):
        found.learn(batch, *((1, number) if number <= 3 else ()))
    return found.said


@loop
def made_anew():
    data, found = rows(20), Training()
    for epoch in range(1, 4):
        for number, batch in enumerate(DataLoader(data, batch_size=4, shuffle=True), 1):
            found.learn(batch, epoch, number)
    return found.said


@loop
def a_new_dataset_each_epoch():
    found = Training()
    for epoch in range(1, 5):
        for number, batch in enumerate(DataLoader(rows(4 * epoch), batch_size=4, shuffle=True), 1):
            found.learn(batch, epoch, number)
    return found.said


@loop
def a_new_dataset_held_until_the_next_batch():
    """As Keras, which starts the next loop while it still holds the last one."""
    found, batches = Training(), None
    for epoch in range(1, 4):
        batches = iter(DataLoader(rows(12), batch_size=4))
        for number, batch in enumerate(batches, 1):
            found.learn(batch, epoch, number)
    return found.said


@loop
def tasks_in_turn():
    loaders, found = [DataLoader(rows(count), batch_size=4) for count in (20, 12)], Training()
    for epoch in range(1, 4):
        for loader in loaders:
            for number, batch in enumerate(loader, 1):
                found.learn(batch, epoch, number)
    return found.said


@loop
def folds():
    """A new dataset and several epochs for each fold."""
    found = Training()
    for _ in range(3):
        loader = DataLoader(rows(12), batch_size=4)
        for epoch in range(1, 3):
            for number, batch in enumerate(loader, 1):
                found.learn(batch, epoch, number)
    return found.said


@loop
def a_batch_a_start():
    loader, found = DataLoader(rows(20), batch_size=4), Training()
    for _ in range(8):
        found.learn(next(iter(loader)))
    return found.said


@loop
def without_a_loader():
    found = Training()
    for _ in range(8):
        found.learn(torch.ones(4, 4))
    return found.said


@loop
def a_look_at_the_first_batch():
    loader, found = DataLoader(rows(20), batch_size=4), Training()
    for epoch in range(1, 4):
        next(iter(loader))
        for number, batch in enumerate(loader, 1):
            found.learn(batch, epoch, number)
    return found.said


def main():
    """Run each loop in a process of its own. Print, for each, its pid and what it said."""
    found = {}
    for name, function in LOOPS.items():
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            torch.manual_seed(1)
            said = json.dumps(function())
            with os.fdopen(writes, "w") as file:
                file.write(said)
            sys.exit()
        os.close(writes)
        with os.fdopen(reads) as file:
            found[name] = [pid, json.loads(file.read())]
        os.waitpid(pid, 0)
    print(json.dumps(found))
