"""The number of batches of a loader."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from dpmon.tracer.core.session import Session, TracerConfig
from dpmon.tracer.steps.loaders import LoaderTracer, SeenObject
from dpmon.tracer.steps.span_recorder import SpanRecorder

ROWS = TensorDataset(torch.ones(23, 2))


class Shuffled(SequentialSampler):
    asked = 0

    def __len__(self) -> int:
        Shuffled.asked += 1
        random.shuffle(numbers := torch.randperm(8).tolist())
        return len(numpy.random.permutation(numbers))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.ones(3))

    def __len__(self) -> int:
        pytest.fail("torch warns if anybody asks")


class Watching(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def tracer() -> LoaderTracer:
    session = Session(TracerConfig("", 0, "auto", None, ()))
    return LoaderTracer(session, SpanRecorder(session))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(ROWS, batch_size=5),
        DataLoader(ROWS, batch_size=5, drop_last=True),
        DataLoader(ROWS, batch_size=None),
        DataLoader(list(range(7)), batch_size=2),  # type: ignore[arg-type]
        DataLoader(ROWS, batch_sampler=[[0, 1], [2, 3]]),
    ],
)
def test_the_length_is_that_of_the_loader(tracer: LoaderTracer, loader: DataLoader[Any]) -> None:
    assert tracer.length_of(iter(loader), SeenObject()) == len(loader)


def test_an_iterable_dataset_is_not_asked(tracer: LoaderTracer) -> None:
    loader = DataLoader(Stream())
    assert "does not ask" in str(tracer.length_of(iter(loader), SeenObject()))


def test_a_sampler_that_shuffles_to_count_is_asked_once_and_unnoticed(tracer: LoaderTracer) -> None:
    def states() -> list[str]:
        return [str(random.getstate()), str(torch.get_rng_state().tolist()), str(numpy.random.get_state())]

    loader = DataLoader(ROWS, batch_size=2, sampler=Shuffled(ROWS))
    found, seen = iter(loader), SeenObject()
    before, Shuffled.asked = states(), 0
    with Watching() as mode:
        assert [tracer.length_of(found, seen) for _ in range(2)] == [4, 4]
    assert states() == before
    assert (Shuffled.asked, mode.seen) == (1, [])
