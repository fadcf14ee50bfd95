"""Loops of many forms count for themselves what they do, and the record says exactly the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tracing import Traced, text_of, traced

TEXT = text_of("counting")
NAMES = re.findall(r"^@loop\ndef (\w+)", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    found = traced(tmp_path_factory.mktemp("counting"), TEXT, mode="script")
    assert found.status == 0, found.err
    assert (found.err, found.missed, found.complaints) == ("", 0, [])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_what_the_loop_counted(run: Traced, name: str) -> None:
    """Of each step the samples, the phases that ran and the number of calls; of each call its root and its flags."""
    pid, counted_steps, counted_calls = run.said[name]
    process = run.process_of(pid)
    steps, calls = run.steps(process), run.calls(process=process)
    within: dict[int, int] = {step.step: 0 for step in steps}
    for call in calls:
        within[call.step] += 1
    recorded: list[Any] = [
        [step.samples, sorted(phase for phase in step.phases if phase != "other"), within[step.step]] for step in steps
    ]
    assert recorded == counted_steps
    assert [[call.root, call.training, call.grad] for call in calls] == counted_calls


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_trains_is_called_an_evaluation(run: Traced, name: str) -> None:
    """As the summary and the report have it."""
    pid, counted_steps, _ = run.said[name]
    trains = [bool({"backward", "optimizer"} & set(phases)) for _, phases, _ in counted_steps]
    assert [not step.evaluation for step in run.steps(run.process_of(pid))] == trains
