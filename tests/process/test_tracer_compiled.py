"""Compiled models run as written: dpmon never splits them, and causes no further compilation.

The interpreters are fresh, because the results of torch._dynamo depend on when it was imported.
"""

from __future__ import annotations

import pytest
import torch

from support.tracer_harness import TRACED_SCRIPTS_PATH, TracedRun, TracedScript, traced_script_text

LIMIT_S = 800
"""Two scripts that compile for minutes on a busy machine."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 100)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, TracedRun]:
    """Many ways to compile, each until the tracer has searched for roots twice; traced and without the tracer.

    In the traced run, dp is requested meanwhile.
    """
    place = tmp_path_factory.mktemp("counted")
    text = traced_script_text("recompiling")
    traced = TracedScript(place, text, "toggle", env=TRACED_SCRIPTS_PATH, fresh=True)
    scripts = traced, TracedScript(place, text, env=TRACED_SCRIPTS_PATH, run=False, fresh=True)
    found, expected = (script.end(LIMIT_S) for script in scripts)
    return found, expected


def test_compiled_models_print_the_same_as_without_dpmon(counted: tuple[TracedRun, TracedRun]) -> None:
    found, expected = ([line.partition("]")[2] for line in run.err.splitlines()] for run in counted)
    assert found == expected


WAYS = {
    "the_model": ("Net", None, "compile"),
    "its_forward": ("Net", None, "compile"),
    "in_place": ("Net", None, "compile"),
    "a_function_that_calls_it": None,
    "a_function_that_calls_it_after_it_was_called": None,
    "a_part": ("Net", None, "compile"),
    "a_part_of_a_wrapped_model": ("Net", "DataParallel", "compile"),
    "wrapped_in_place": ("Net", "DataParallel", "compile"),
    "wrapped": ("Net", "DataParallel", "compile"),
    "wrapped_forward": ("Net", "DataParallel", "compile"),
    "a_wrapper": ("Net", None, "compile"),
    "with_a_break": ("Prints", None, "compile"),
    "a_whole_step": None,
    "the_optimizer": ("Net", None, None),
}
"""Root and via of recorded calls, and why dp is refused. Calls inside a compiled function are part of it."""


AT_OPTIMIZERS = {"a_whole_step", "the_optimizer"}
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Before 2.12, torch itself breaks the graph at each optimizer step. It counts that differently in a wrapper."""


@pytest.mark.parametrize("way", WAYS)
def test_no_graph_break_and_no_compilation_is_due_to_us(counted: tuple[TracedRun, TracedRun], way: str) -> None:
    (_, status, found), (_, alone_status, expected) = (run.printed[way] for run in counted)
    assert status == alone_status == 0, counted[0].err
    if way not in AT_OPTIMIZERS or TORCH >= (2, 12):
        for what in ("graphs", "breaks", "stats"):
            assert found[what] == expected[what], what
    assert found["recompiled"] == expected["recompiled"]
    assert found["parameters"] == expected["parameters"]
    assert found["frames"]["total"] <= expected["frames"]["total"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_compile_has_its_calls_and_its_answer_to_the_toggle(
    counted: tuple[TracedRun, TracedRun], way: str
) -> None:
    run, _ = counted
    pid = run.printed[way][0]
    processes = [event.data["process"] for event in run.events("process") if event.data["pid"] == pid]
    (process,) = processes
    calls = [call for call in run.calls(process=process) if call.root != "Later"]
    seen = WAYS[way]
    if seen is None:
        assert len(calls) <= 1  # before it was compiled
        return
    root, via, refusal = seen
    assert {(call.root, call.via) for call in calls} == {(root, via)}
    assert len(calls) == 330
    asked = [e.data for e in run.events("mode", process) if e.data["requested_by"] == "user" and e.data["root"] == root]
    assert [event["mode"] for event in asked] == ["dp" if refusal is None else "single", "single"]
    assert (asked[0]["refused"] is None) if refusal is None else refusal in asked[0]["refused"]
    modes = ["single"] * 40 + [asked[0]["mode"]] * 40 + ["single"] * 250
    assert [call.mode for call in calls] == modes
