"""Findings about torch.compile, and the usual compilations about which there is none."""

from __future__ import annotations

from typing import Any

import pytest

from dpmon.model.findings.all_findings import find_all
from dpmon.model.run_analysis import RunAnalysis
from support.analysis_builders import HEALTHY_RUN
from support.history_builders import with_changes
from support.record_builders import SECOND

FUNCTION = {"function": "forward", "place": "model.py:12", "count": 8, "guard": "k == 7", "guard_place": "model.py:14"}


def compiling(*functions: dict[str, Any], **more: Any) -> RunAnalysis:
    """Return a healthy run of 110 s whose process 0 compiled these functions again."""
    newest = {"process": 0, "compilations": 14, "seconds": 33.0, "seconds_again": 22.0, "graph_breaks": [], **more}
    events = {"growth": [], "host": [], "exit": [], "compiles": [{**newest, "functions": list(functions)}]}
    return with_changes(HEALTHY_RUN, memory_events=events, time_by_activity={"training": 100 * SECOND})


def test_a_function_that_is_compiled_again_and_again() -> None:
    (found,) = find_all(compiling(FUNCTION))
    assert found.text == (
        "torch.compile compiled 14 times in 33.0 s, 30% of the elapsed time: forward (model.py:12) was compiled again 8"
        " times because of a guard like `k == 7` (model.py:14)."
    )
    assert found.gain_text == "saves at most 22.0 s of 1 min 50 s"
    assert "mark_dynamic" in found.advice


@pytest.mark.parametrize(
    "run",
    [
        compiling(),
        compiling({**FUNCTION, "count": 3}),
        compiling(FUNCTION, seconds=0.2, seconds_again=1.9),
        compiling(compilations=None, absent={"compilations": "this version of torch"}),
    ],
)
def test_usual_compilations_are_not_reported(run: RunAnalysis) -> None:
    assert find_all(run) == []


def test_a_line_that_breaks_a_graph() -> None:
    (found,) = find_all(compiling(graph_breaks=[["model.py:14", "Tensor.item()"], ["train.py:8", "print"]]))
    assert found.text == "torch.compile breaks its graph at train.py:8 (print)."
    assert found.ground == "2 found: model.py:14 (Tensor.item()); train.py:8 (print)"
    assert found.saves_s is None
