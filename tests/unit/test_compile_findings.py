"""Findings about torch.compile, and the usual compilations about which there is none."""

from __future__ import annotations

from typing import Any

import pytest

from dpmon.model.findings.all_findings import find_all
from dpmon.model.run_analysis import RunAnalysis
from support.analysis_builders import HEALTHY_RUN
from support.history_builders import with_changes
from support.record_builders import SECOND

LINE = ["model.py:14", "k == 7", 8]


def compiling(*again: list[Any], **more: Any) -> RunAnalysis:
    """Return a healthy run of 110 s whose process 0 compiled these lines again."""
    newest = {
        "process": 0,
        "compilations": 14,
        "seconds": 33.0,
        "seconds_again": 22.0,
        "graph_breaks": [],
        "absent": {},
    }
    events = {**HEALTHY_RUN.memory_events, "compiles": [{**newest, "again": list(again), **more}]}
    return with_changes(HEALTHY_RUN, memory_events=events, time_by_activity={"training": 100 * SECOND})


def test_a_function_that_is_compiled_again_and_again() -> None:
    (found,) = find_all(compiling(LINE))
    assert found.text == "torch.compile compiled model.py:14 again 8 times after a guard like `k == 7` had failed."
    assert found.ground == (
        "14 compilations took 33.0 s; among the last 64, repeated ones took 22.0 s, 20% of the elapsed time"
    )
    assert found.gain_text == "saves at most 22.0 s of 1 min 50 s"
    assert "mark_dynamic" in found.advice


@pytest.mark.parametrize(
    "run",
    [
        compiling(),
        compiling([*LINE[:2], 3]),
        compiling(LINE, seconds=0.2, seconds_again=1.9),
        compiling(absent={"again": "this version of torch"}),
    ],
)
def test_usual_compilations_are_not_reported(run: RunAnalysis) -> None:
    assert find_all(run) == []


def test_a_line_that_breaks_a_graph() -> None:
    (found,) = find_all(compiling(graph_breaks=[["model.py:14", "Tensor.item()"], ["train.py:8", "print"]]))
    assert found.text == "torch.compile breaks its graph at train.py:8 (print)."
    assert found.ground == "2 found: model.py:14 (Tensor.item()); train.py:8 (print)"
    assert found.saves_s is None
