"""A loader that gives its first batches again and again: each batch is loaded once, and epochs keep their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import dataloader as torch_loader

from dpmon.tracer.steps.replay import wrap_next_with_replay


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
    monkeypatch.setattr(kind, "__next__", wrap_next_with_replay(kind.__next__, 3))


def epoch(loader: DataLoader[Any]) -> list[int]:
    return [int(batch[0]) for batch in loader]


def test_the_first_batches_are_loaded_once_and_given_again() -> None:
    rows = Rows(8)
    loader = DataLoader(rows, batch_size=1)
    assert epoch(loader) == epoch(loader) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rows.loaded == 3


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


def test_persistent_workers_give_every_epoch_its_length() -> None:
    loader = DataLoader(Rows(5), batch_size=1, num_workers=1, persistent_workers=True)
    whole = [0, 1, 2, 0, 1]
    assert epoch(loader) == whole
    assert int(next(iter(loader))[0]) == 0, "an epoch that is left early"
    assert epoch(loader) == epoch(loader) == whole


def test_a_list_of_batches_is_replayed_too() -> None:
    rows = Rows(4)
    loader = DataLoader(rows, batch_sampler=[[0], [1], [2], [3]])
    assert epoch(loader) == [0, 1, 2, 0]
    assert rows.loaded == 3


def test_a_loader_made_again_for_each_epoch_keeps_few_batches() -> None:
    rows = Rows(4)
    for _ in range(20):
        assert epoch(DataLoader(rows, batch_size=1)) == [0, 1, 2, 0]
    assert rows.loaded == 20 * 3
