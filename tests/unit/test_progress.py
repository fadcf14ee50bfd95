"""Epochs from the loops over loaders, the time left in an epoch, and their words."""

from __future__ import annotations

import random

import pytest

from dpmon.assemble.boundaries import Fetches
from dpmon.model.progress import Progress, left_words, words
from dpmon.record.kinds import Batches
from dpmon.record.spans import Kind, Span
from dpmon.store.answers import LoopStep
from dpmon.store.loops import Loop, Loops, time_left

SECOND = 1_000_000_000
MINUTE = 60 * SECOND


class Process:
    """The loops of a process; each of its steps takes a second."""

    def __init__(self, known: Loops | None = None) -> None:
        self.loops = known or Loops(0)
        self.rows: dict[int, Loop] = {}
        self.number = 0
        self.loop = 0

    def start(self, length: int | None, dataset: int = 1) -> int:
        """Start a loader; return the number of the loop."""
        self.loop += 1
        self.rows[self.loop] = Loop(0, self.loop, dataset, length, 0)
        return self.loop

    def step(self, loop: int | None, fetched: int = 1, *, evaluation: bool = False, over: bool = False) -> int | None:
        """Add a step with batches of a loop; return how many batches of it are used."""
        self.number += 1
        batches = None
        if loop is not None:
            batches = Batches(loop, self.rows[loop].dataset, self.rows[loop].length, fetched, over or not fetched)
        begin = self.number * SECOND
        found = self.loops.step(self.number, batches, begin, begin + SECOND, evaluation, SECOND * evaluation)
        self.rows.update(self.loops.changed)
        self.loops.changed.clear()
        return None if found is None else found.batch

    def read(self, length: int, dataset: int = 1, *, evaluation: bool = False) -> list[int | None]:
        """Loop over a loader to its end; return the batches used after each step."""
        loop = self.start(length, dataset)
        return [self.step(loop, evaluation=evaluation) for _ in range(length)]

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """Loop and number of each epoch."""
        return [(number, row.epoch) for number, row in self.rows.items() if row.epoch is not None]


def test_each_loop_that_trains_is_an_epoch_and_evaluations_belong_to_the_epoch_before() -> None:
    process = Process()
    process.read(3, 2, evaluation=True)  # a sanity check
    assert process.read(4) == [1, 2, 3, 4]
    process.read(3, 2, evaluation=True)
    train = process.start(6)
    assert [process.step(train) for _ in range(3)] == [1, 2, 3]
    process.read(2, 2, evaluation=True)
    assert [process.step(train) for _ in range(3)] == [4, 5, 6]
    assert process.epochs == [(2, 1), (4, 2)]
    first, second = process.rows[2], process.rows[4]
    assert (first.evaluation_ns, first.after_ns) == (0, 3 * SECOND)
    assert (second.evaluation_ns, second.after_ns) == (2 * SECOND, 0)
    assert (second.end_ns - second.begin_ns, second.trained) == (8 * SECOND, 6)


def test_a_loop_that_reads_ahead_uses_its_last_batch_after_the_loaders_end() -> None:
    process = Process()
    for first in (None, 1):  # as accelerate does
        loop = process.start(4)
        used = [process.step(loop, 2), process.step(loop), process.step(loop), process.step(loop, 0)]
        assert used == [first, 2, 3, 4]
        assert process.step(loop, 0) is None  # later steps use no batch of it
    assert process.epochs == [(1, 1), (2, 2)]


def test_batches_read_in_groups() -> None:
    process = Process()
    for first in (None, 4):  # as transformers' Trainer does with gradient accumulation
        loop = process.start(11)
        assert [process.step(loop, 5), process.step(loop, 4), process.step(loop, 2, over=True)] == [first, 8, 11]
    assert process.epochs == [(1, 1), (2, 2)]


def test_skipped_batches_count_and_a_skipped_first_one_is_not_taken_for_one_read_ahead_twice() -> None:
    process = Process()
    loop = process.start(30)  # as a training that resumes
    assert [process.step(loop, 21), process.step(loop)] == [None, 22]
    for expected in ([None, 2, 3], [None, 3, 4]):  # the first time, it looks as if one batch was read ahead
        loop = process.start(4)
        assert [process.step(loop, 2), process.step(loop), process.step(loop)] == expected
    assert process.rows[2].batch == 4


def test_a_loader_made_anew_for_each_epoch_goes_on_and_another_dataset_begins_at_1() -> None:
    process = Process()
    for dataset in (1, 1, 7, 7, 7):
        process.read(2, dataset)
    assert process.epochs == [(1, 1), (2, 2), (3, 1), (4, 2), (5, 3)]


def test_two_loaders_read_in_turn_are_one_epoch() -> None:
    process = Process()
    for _ in range(3):
        first, second = process.start(3), process.start(3, 2)
        for _ in range(3):
            process.step(first)
            process.step(second)
    assert process.epochs == [(1, 1), (3, 2), (5, 3)]


def test_single_batches_of_loaders_are_no_epochs() -> None:
    process = Process()
    for _ in range(5):  # next(iter(loader)) in each step
        process.step(process.start(10))
    assert process.epochs == []
    assert process.read(3) == [1, 2, 3]
    assert process.epochs == [(6, 1)]


@pytest.mark.parametrize("length", [1, 2])
def test_a_loader_of_few_batches_has_epochs(length: int) -> None:
    process = Process()
    for _ in range(3):
        process.read(length)
    assert process.epochs == [(1, 1), (2, 2), (3, 3)]


def test_a_step_after_the_end_of_the_loader_belongs_to_no_epoch() -> None:
    process = Process()
    process.read(3)
    assert process.step(1, 0) is None  # itertools.cycle repeats the batches
    assert process.step(None) is None
    assert process.rows[1].batch == 3


def test_another_supervisor_goes_on() -> None:
    process = Process()
    process.read(4)
    loop = process.start(4)
    process.step(loop)
    again = Loops(0)
    again.resume(process.rows.values())
    process.loops = again
    assert [process.step(loop) for _ in range(3)] == [2, 3, 4]
    process.read(4)
    assert process.epochs == [(1, 1), (2, 2), (3, 3)]


# ------------------------------------------------------------------------------------------------ several loaders


def fetch(fetches: Fetches, loop: int, length: int = 10, *, failed: bool = False) -> None:
    fetches.take(Span(0, Kind.FETCH, 0, 0, 0, loop, 0, 0, loop, length + 1), failed)


@pytest.mark.parametrize(
    ("order", "lengths", "driver"),
    [
        pytest.param((1, 2), (10, 10), 2, id="zip"),
        pytest.param((1, 2), (5, 10), 1, id="zip ends with the shorter loader"),
        pytest.param((2, 1), (5, 10), 2, id="the body of the loop reads a loader that was started before"),
    ],
)
def test_one_of_several_loaders_drives_the_steps(order: tuple[int, ...], lengths: tuple[int, int], driver: int) -> None:
    fetches = Fetches()
    for _ in range(3):
        for loop in order:
            fetch(fetches, loop, lengths[loop - 1])
        assert fetches.of_step() == Batches(driver, driver, lengths[driver - 1], 1)


def test_only_the_end_of_the_loop_itself_lets_a_step_without_a_batch_belong_to_it() -> None:
    fetches = Fetches()
    fetch(fetches, 1)
    assert fetches.of_step() == Batches(1, 1, 10, 1)
    assert fetches.of_step() is None
    fetch(fetches, 2, failed=True)
    assert fetches.of_step() is None
    fetch(fetches, 1, failed=True)
    assert fetches.of_step() == Batches(1, 1, 10, 0, over=True)
    fetch(fetches, 3)
    fetch(fetches, 3, failed=True)
    assert fetches.of_step() == Batches(3, 3, 10, 1, over=True)


# ------------------------------------------------------------------------------------------------ time left


def steps(times: list[int], batches: int = 1) -> list[LoopStep]:
    """Return steps that end after these times (ns), the newest first."""
    found, at = [], 0
    for number, took in enumerate(times, start=1):
        at += took
        found.append(LoopStep(number, 1, number * batches, at - took // 2, took // 2))
    return found[::-1]


def test_equal_batches_have_no_uncertainty() -> None:
    assert time_left(steps([SECOND] * 9), 20) == (20 * SECOND, 0)
    assert time_left(steps([SECOND] * 9, batches=4), 20) == (5 * SECOND, 0)


def test_a_wait_that_returns_counts_and_an_evaluation_in_the_middle_does_not() -> None:
    found = time_left(steps([SECOND, SECOND, SECOND, 5 * SECOND] * 32), 40)
    assert found is not None
    assert found.left_ns == pytest.approx(80 * SECOND, rel=0.01)
    found = time_left(steps([*[SECOND] * 60, 500 * SECOND, *[SECOND] * 60]), 40)
    assert found == (40 * SECOND, 0)


def test_too_few_batches_give_no_time() -> None:
    assert time_left(steps([SECOND] * 3), 20) is None
    assert time_left([], 20) is None


def test_uneven_batches_make_the_time_uncertain() -> None:
    chance = random.Random(3)
    times = [int(chance.uniform(1, 3) * SECOND) for _ in range(250)]
    few, many = (time_left(steps(times[:count]), 100) for count in (8, 250))
    assert few is not None
    assert many is not None
    assert few.error_ns > many.error_ns > 0
    assert abs(many.left_ns - 200 * SECOND) < 3 * many.error_ns


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(), ""),
        (Progress(epoch=3, batch=412, batches=1563, left_ns=130 * SECOND, error_ns=SECOND),
         "epoch 3 · 412/1,563 · 2 min 10 s left"),
        (Progress(epoch=3, batch=412, batches=1563, left_ns=130 * SECOND, error_ns=40 * SECOND),
         "epoch 3 · 412/1,563 · 2 min 10 s ± 40 s left"),
        (Progress(epoch=1, batch=12), "epoch 1 · batch 12"),
        (Progress(epoch=1, batches=10), "epoch 1"),
        (Progress(epoch=12, batch=10, batches=10), "epoch 12 · 10/10"),
    ],
)  # fmt: skip
def test_the_words(progress: Progress, text: str) -> None:
    assert words(progress) == text


def test_the_words_of_a_time_left() -> None:
    assert left_words(0, 0) == "0 s"
    assert left_words(99.4 * SECOND, None) == "99 s"
    assert left_words(3 * 60 * MINUTE, 11 * MINUTE) == "3 h 00 min"
