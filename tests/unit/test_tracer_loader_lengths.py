"""The number of batches of a loader, without running code of the script."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from weakref import ref

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from dpmon.tracer.core.session import Session, TracerConfig
from dpmon.tracer.steps.loaders import LoaderTracer, _KnownLoader, _loader_length
from dpmon.tracer.steps.span_recorder import SpanRecorder

ROWS = TensorDataset(torch.ones(23, 2))


class Own(TensorDataset):
    def __len__(self) -> int:
        pytest.fail("the script's own code was run")


class Chatty(SequentialSampler):
    def __len__(self) -> int:
        pytest.fail("the script's own code was run")


class Shuffled(Chatty):
    def __len__(self) -> int:
        random.shuffle(numbers := torch.randperm(8).tolist())
        return len(numpy.random.permutation(numbers))


class Watching(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def batches(loader: DataLoader[Any]) -> int | str | None:
    return _loader_length(iter(loader).__dict__)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(ROWS),
        DataLoader(ROWS, batch_size=5),
        DataLoader(ROWS, batch_size=5, drop_last=True),
        DataLoader(ROWS, batch_size=5, shuffle=True),
        DataLoader(ROWS, batch_size=None),
        DataLoader(list(range(7)), batch_size=2),  # type: ignore[arg-type]
        DataLoader(range(7), batch_size=2),  # type: ignore[arg-type]
        DataLoader(Subset(ROWS, [1, 2, 3]), batch_size=2),
        DataLoader(random_split(ROWS, [20, 3])[0], batch_size=6),
        DataLoader(ConcatDataset([ROWS, ROWS]), batch_size=5),
        DataLoader(ROWS, batch_size=5, sampler=RandomSampler(ROWS, num_samples=11)),
        DataLoader(ROWS, batch_size=5, sampler=SubsetRandomSampler(range(9))),
        DataLoader(ROWS, batch_size=5, sampler=WeightedRandomSampler([1.0] * 23, 17)),
        DataLoader(ROWS, batch_size=5, sampler=DistributedSampler(ROWS, num_replicas=2, rank=1)),
        DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, True)),
        DataLoader(ROWS, batch_sampler=[[0, 1], [2, 3]]),
    ],
)
def test_the_length_of_torchs_own_loaders(loader: DataLoader[Any]) -> None:
    assert batches(loader) == len(loader)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Own(torch.ones(3, 2))),
        DataLoader(ROWS, sampler=Chatty(ROWS)),
        DataLoader(ROWS, batch_sampler=iter([[0, 1]])),
    ],
)
def test_a_length_that_runs_code_of_the_script_is_not_read_again_and_again(loader: DataLoader[Any]) -> None:
    assert batches(loader) is None


def test_a_dataset_within_itself_ends() -> None:
    nested = Subset(ROWS, [0])
    nested.indices = nested  # type: ignore[assignment]
    assert batches(DataLoader(ROWS, sampler=SequentialSampler(nested))) is None


def test_a_function_mode_of_the_script_sees_nothing() -> None:
    found: Iterator[Any] = iter(DataLoader(ROWS))
    with Watching() as mode:
        assert _loader_length(found.__dict__) == 23
    assert mode.seen == []


def test_a_sampler_that_shuffles_to_count_changes_no_random_numbers() -> None:
    def states() -> list[str]:
        return [str(random.getstate()), str(torch.get_rng_state().tolist()), str(numpy.random.get_state())]

    session = Session(TracerConfig("", 0, "auto", None, ()))
    loader, before = DataLoader(ROWS, batch_size=2, sampler=Shuffled(ROWS)), states()
    with Watching() as mode:
        assert LoaderTracer(session, SpanRecorder(session))._reported_length(loader, _KnownLoader(ref(loader))) == 4
    assert states() == before
    assert mode.seen == ["randperm", "tolist"]
