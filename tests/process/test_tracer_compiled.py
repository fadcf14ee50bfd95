"""Compiled models run as written: dpmon never splits them, and causes no further compilation.

The interpreters are fresh, because the results of torch._dynamo depend on when it was imported.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tracing import Script, Traced, text_of

from dpmon.record.names import mode_number

pytestmark = pytest.mark.slow

KINDS = ("Half", "inside", "a_part", "in_place", "outside", "bare", "bare_in_place")
STEPS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Traced, dict[str, Any]]]:
    """Each kind of model is called four times, traced and not; dp is requested after two calls of the first."""
    place = tmp_path_factory.mktemp("compiled")
    scripts = {
        name: Script(place, text_of("compiling"), *KINDS, run=name == "traced", fresh=True)
        for name in ("alone", "traced")
    }
    found = {}
    for name, script in scripts.items():
        told = {}
        for kind in KINDS:
            for number in range(STEPS):
                if (name, kind, number) == ("traced", "Half", 2):
                    reader = script.ring()
                    reader.request(mode_number("dp"))
                    reader.close()
                script.go_on()
                assert script.line() == str(number + 1), script.end().err
            told[kind] = json.loads(script.line())
        found[name] = (script.end(), told)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "Half",
        "inside",
        "a_part",
        "in_place",
        "outside",
        "bare",
        "bare_in_place",
    ],
)
def test_a_compiled_model(runs: dict[str, tuple[Traced, dict[str, Any]]], kind: str) -> None:
    """Results, number of compilations, and parameters are the same as without dpmon."""
    expected, found = runs["alone"][1][kind], runs["traced"][1][kind]
    assert expected[0] == [[6, 3]] * STEPS
    assert found == expected


def test_calls_of_compiled_models_are_recorded(runs: dict[str, tuple[Traced, dict[str, Any]]]) -> None:
    run, _ = runs["traced"]
    assert run.complaints == []
    assert [(call.via, call.mode, call.failed) for call in run.calls()] == [
        *[(None, "single", False)] * STEPS,
        *[("DataParallel", "single", False)] * 3 * STEPS,
        *[(None, "single", False)] * 3 * STEPS,
    ]
    refused = [event.data["refused"] for event in run.events("mode") if event.data["refused"]]
    assert all("compile" in reason for reason in refused)
    assert len(refused) >= 4


def test_compiled_models_print_the_same_as_without_dpmon(runs: dict[str, tuple[Traced, dict[str, Any]]]) -> None:
    def lines(text: str) -> list[str]:
        return [line.partition("]")[2] for line in text.splitlines()]

    assert lines(runs["traced"][0].err) == lines(runs["alone"][0].err)


# ------------------------------------------------------------------------------------------------ counted by torch


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Traced, Traced]:
    """Many ways to compile, each until the tracer has searched for roots twice; traced and without the tracer.

    In the traced run, dp is requested meanwhile.
    """
    place = tmp_path_factory.mktemp("counted")
    text = text_of("recompiling")
    scripts = Script(place, text, "toggle", fresh=True), Script(place, text, run=False, fresh=True)
    found, expected = (script.end(250) for script in scripts)
    return found, expected


WAYS = {
    "the_model": ("Net", None, "compile"),
    "its_forward": ("Net", None, "compile"),
    "in_place": ("Net", None, "compile"),
    "a_function_that_calls_it": None,
    "a_function_that_calls_it_after_it_was_called": None,
    "a_part": ("Net", None, "compile"),
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_no_graph_break_and_no_compilation_is_due_to_us(counted: tuple[Traced, Traced], way: str) -> None:
    (_, status, found), (_, alone_status, expected) = (run.printed[way] for run in counted)
    assert status == alone_status == 0, counted[0].err
    if way not in AT_OPTIMIZERS or TORCH >= (2, 12):
        for what in ("graphs", "breaks", "stats"):
            assert found[what] == expected[what], what
    assert found["recompiled"] == expected["recompiled"]
    assert found["frames"]["total"] <= expected["frames"]["total"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_compile_has_its_calls_and_its_answer_to_the_toggle(
    counted: tuple[Traced, Traced], way: str
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
