"""A loader that gives its first batches again and again: each batch is loaded once, and epochs keep their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import dataloader as torch_loader

from dpmon.tracer.steps.replay import replaying


class Rows(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count, self.loaded = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        return torch.tensor([index])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([number]) for number in range(self.count))


@pytest.fixture(autouse=True)
def replay(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch_loader._BaseDataLoaderIter
    monkeypatch.setattr(kind, "__next__", replaying(kind.__next__, 3))


def epoch(loader: DataLoader[Any]) -> list[int]:
    return [int(batch[0]) for batch in loader]


def test_the_first_batches_are_loaded_once_and_given_again() -> None:
    rows = Rows(8)
    loader = DataLoader(rows, batch_size=1)
    assert epoch(loader) == epoch(loader) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rows.loaded == 3


def test_workers_that_stay_give_every_epoch_its_batches() -> None:
    loader = DataLoader(Rows(5), batch_size=1, num_workers=1, persistent_workers=True)
    assert [int(batch[0]) for batch, _ in zip(loader, range(3), strict=False)] == [0, 1, 2]  # the script leaves it
    assert epoch(loader) == epoch(loader) == [0, 1, 2, 0, 1]


def test_an_epoch_shorter_than_the_kept_batches_keeps_its_length() -> None:
    rows = Rows(2)
    loader = DataLoader(rows, batch_size=1)
    assert epoch(loader) == epoch(loader) == [0, 1]
    assert rows.loaded == 2


def test_two_loaders_of_one_dataset_have_batches_of_their_own() -> None:
    rows = Rows(4)
    sizes = [[len(batch) for batch in DataLoader(rows, batch_size=size)] for size in (1, 4)]
    assert sizes == [[1, 1, 1, 1], [4]]


def test_a_stream_ends_where_it_was_seen_to_end() -> None:
    loader = DataLoader(Stream(2), batch_size=None)
    assert epoch(loader) == epoch(loader) == [0, 1]
    endless = iter(DataLoader(Stream(5), batch_size=None))
    assert [int(next(endless)[0]) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
