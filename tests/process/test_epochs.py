"""Epoch and batch of real loops are those that the loop itself counts (traced/epochs.py)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dpmon.record.schema import TRAINING
from dpmon.store.loops import LoaderLoop, LoaderLoopTracker
from support.tracer_harness import TRACED_SCRIPTS_PATH, TracedRun, run_traced, traced_script_text

NAMES = re.findall(r"^@loop\ndef (\w+)", traced_script_text("epochs"), re.M)
UNKNOWN = {"one_ahead": (0,), "in_groups": (0,), "resumed": (0,)}
"""By loop: the steps after which it is not known yet how many batches were read ahead."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    found = run_traced(tmp_path_factory.mktemp("epochs"), "from epochs import main\nmain()\n", env=TRACED_SCRIPTS_PATH)
    assert (found.status, found.missed, found.complaints) == (0, 0, [])
    return found


def followed(run: TracedRun, process: int) -> tuple[list[tuple[LoaderLoop | None, int | None]], list[LoaderLoop]]:
    """Return the loop and the batch of each training step, and all loops as they are at the end."""
    loops, steps, found = LoaderLoopTracker(process), [], {}
    for step in run.steps(process):
        end = step.start_ns + step.wall_ns
        evaluation = step.kind != TRAINING
        loop = loops.add_step(step.step, step.batches, step.start_ns, end, evaluation, step.wall_ns * evaluation)
        found.update(loops.changed)
        if not evaluation:
            steps.append((loop, None if loop is None else loop.batches_used))
    return steps, list(found.values())


@pytest.mark.parametrize("name", NAMES)
def test_epoch_and_batch_are_those_that_the_loop_counts(run: TracedRun, name: str) -> None:
    pid, said = run.printed[name]
    steps, loops = followed(run, run.process_of(pid))
    recorded: list[Any] = [None if loop is None or loop.epoch is None else [loop.epoch, batch] for loop, batch in steps]
    for place in UNKNOWN.get(name, ()):  # the first step of a loop that took several batches
        assert recorded[place] == [said[place][0], None]
        recorded[place] = said[place]
    assert recorded == said
    evaluated = sum(loop.evaluation_ns for loop in loops), sum(loop.after_ns for loop in loops)
    evaluates = name.startswith("evaluations") or name == "one_ahead"
    assert [ns > 0 for ns in evaluated] == [name == "evaluations", evaluates]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("plain", {5}), ("last_dropped", {4}), ("workers", {4}), ("a_rank", {3}), ("iterable", {None}), ("a_list", {3})],
)
def test_the_length_is_that_of_the_loader(run: TracedRun, name: str, lengths: set[int | None]) -> None:
    process = run.process_of(run.printed[name][0])
    assert {loop.length for loop in followed(run, process)[1]} == lengths
    assert {event.data["distributed"] for event in run.events("loader", process)} == {name == "a_rank"}
