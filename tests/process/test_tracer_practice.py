"""Typical training loops compute the same as without dpmon, are recorded correctly, and can be toggled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from alternatives import as_alone
from tracing import Script, Traced, text_of

from dpmon.record.kinds import Call, Step

TRAIN = {"forward", "backward", "optimizer", "other"}
FETCH = {"data", *TRAIN}
BY_HAND = FETCH - {"optimizer"}
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "alone": ((), {"run": False}),
    "script": ((), {"mode": "script"}),
    "toggle": (("toggle",), {}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traced]:
    """All loops without dpmon, with --mode script, and with requests for dp (second step) and single (fourth step)."""
    place = tmp_path_factory.mktemp("practice")
    scripts = {name: Script(place, text_of("practice"), *words, **more) for name, (words, more) in WAYS.items()}
    found = {name: script.end() for name, script in scripts.items()}
    for run in found.values():
        assert (run.status, run.err, run.missed, run.warnings, run.unreadable) == (0, "", 0, (), ())
    return found


def process_of(run: Traced, name: str) -> int | None:
    pid, status, _ = run.printed[name]
    assert status == 0
    processes = [event.data["process"] for event in run.events("process") if event.data["pid"] == pid]
    assert len(processes) <= 1
    return processes[0] if processes else None


def recorded(run: Traced, name: str) -> tuple[list[Step], list[Call]]:
    process = process_of(run, name)
    assert process is not None
    return run.steps(process), run.calls(process=process)


def warnings(run: Traced, name: str) -> list[str]:
    process = process_of(run, name)
    return [] if process is None else [event.data["text"] for event in run.events("warning", process)]


def alike(found: Any, expected: Any) -> bool:
    """Return whether results are equal except for the effects of another order of sums."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(alike, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) < 1e-2 * max(1.0, abs(expected))
    return bool(found == expected)


EVERY = [(30, FETCH, 1)] * 4
NO_CALL = "no call of a module was seen"
LOOPS: dict[str, list[tuple[int, set[str], int]] | None] = {
    "mixed_precision": [(30, FETCH, 1), (30, FETCH, 1), (30, BY_HAND, 1), (30, FETCH, 1)],  # the third is skipped
    "closures": [(30, FETCH, 3)] * 4,
    "two_optimizers": [(30, FETCH, 4)] * 4,
    "accumulation": [(10, FETCH, 3)] * 4,
    "no_loader_no_end": [(12, TRAIN, 1)] * 5,
    "two_loaders": [(30, FETCH, 2)] * 4,
    "no_optimizer": [(30, BY_HAND, 1)] * 4,
    "checkpoints": EVERY,
    "checkpoints_reentrant": EVERY,
    "checkpoints_wrapped": EVERY,
    "checkpoints_wrapped_reentrant": EVERY,
    "evaluation_within_a_step": [(30, FETCH, 1), (30, FETCH, 2)] * 2,
    "evaluation_without_a_loader": ([(12, TRAIN, 1)] * 3 + [(50, {"forward", "other"}, 1)] * 5) * 2,
    "evaluation_in_a_loop_within_the_loop": [
        *[(30, FETCH, 1)] * 2,
        *[(20, {"data", "forward", "other"}, 1)] * 2,
        *[(30, FETCH, 1)] * 2,
    ],
    "teacher": [(30, FETCH, 2)] * 4,
    "forward_called": EVERY,
    "forward_called_of_a_module_without_parts": None,
    "forward_called_without_a_loader": None,
    "forward_called_of_a_wrapper": EVERY,
    "another_directory": [(12, TRAIN, 1)] * 5,
    "another_stdout": [(12, TRAIN, 1)] * 5,
    "everything_swallowed": [(20, TRAIN, 1)] * 3 + [(20, TRAIN, 4), (20, TRAIN, 1)],
    # Calls of the other thread belong to the steps of the first one; its last call belongs to the last step.
    "two_threads": [(30, TRAIN, 1), (30, TRAIN, 2), (30, TRAIN, 2), (30, TRAIN, 3)],
    "saved_and_copied": [(30, FETCH, 3)] * 8,
    "devices_hidden_late": EVERY,
}
"""Per step: samples, the phases that ran, number of calls; None where dpmon can see nothing."""


def test_every_loop_is_among_the_expected_ones(runs: dict[str, Traced]) -> None:
    assert set(LOOPS) == set(runs["alone"].printed)


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_computes_the_same_as_without_dpmon(runs: dict[str, Traced], name: str, tmp_path: Path) -> None:
    def again() -> Any:
        return Script(tmp_path, text_of("practice"), run=False).end().printed[name][1:]

    expected = runs["alone"].printed[name]
    assert expected[1] == 0
    as_written = runs["script"].printed[name][1:]
    assert as_written == as_alone(as_written, expected[1:], again)  # to the last bit
    found = runs["toggle"].printed[name]
    assert found[1] == 0
    assert alike(found[2], expected[2])


@pytest.mark.parametrize("name", LOOPS)
def test_steps_of_each_loop(runs: dict[str, Traced], name: str) -> None:
    expected = LOOPS[name]
    for way in ("script", "toggle"):
        if expected is None:
            assert runs[way].calls(process=process_of(runs[way], name)) == []
            assert runs[way].steps(process_of(runs[way], name)) == []
            continue
        steps, calls = recorded(runs[way], name)
        counts = Counter(call.step for call in calls)
        assert [(step.samples, set(step.phases), counts[step.step]) for step in steps] == expected
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        assert [call.call for call in calls] == list(range(1, len(calls) + 1))
        for step in steps:
            assert sum(step.phases.values()) == step.wall_ns


UNTOGGLED = {"devices_hidden_late"}
"""Loops that request no mode."""


@pytest.mark.parametrize("name", [name for name, steps in LOOPS.items() if steps and name not in UNTOGGLED])
def test_the_toggle_works_in_each_loop(runs: dict[str, Traced], name: str) -> None:
    """The second and third steps have mode dp, and so do all calls in them."""
    steps, calls = recorded(runs["toggle"], name)
    process = process_of(runs["toggle"], name)
    asked = [e.data for e in runs["toggle"].events("mode", process) if e.data["requested_by"] == "user"]
    assert [event["refused"] for event in asked] == [None] * len(asked)
    assert list(dict.fromkeys(event["mode"] for event in asked)) == ["dp", "single"]
    began = [min(call.step for call in calls if call.call == event["call"]) for event in asked[:1]]
    for event in asked:
        assert calls[event["call"] - 1].mode == event["mode"]
    first = {"saved_and_copied": 6}.get(name, 2)
    assert began == [first]
    assert steps[first - 1].mode == "dp"
    assert steps[-1].mode == "single"
    for call in calls:
        assert len(call.replicas) == (2 if call.mode == "dp" else 1)
        assert set(call.phases) == (
            {"scatter", "replicate", "parallel_apply", "gather"} if call.mode == "dp" else set()
        )


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_dpmon_cannot_trace_gives_one_warning(runs: dict[str, Traced], name: str) -> None:
    for way in ("script", "toggle"):
        found = warnings(runs[way], name)
        if LOOPS[name] is None:
            assert len(found) == 1
            assert NO_CALL in found[0]
        elif name == "forward_called":
            assert len(found) == 1
            assert "Net.forward() is called directly" in found[0]
        else:
            assert found == []


# ------------------------------------------------------------------------------------------------ one by one


def test_mixed_precision_is_visible_in_the_sizes(runs: dict[str, Traced]) -> None:
    _, calls = recorded(runs["toggle"], "mixed_precision")
    assert calls
    for call in calls:
        assert call.inputs is not None
        assert call.outputs is not None
        assert (call.inputs[0].dtype, call.outputs[0].dtype) == ("float32", "bfloat16")
        assert {share.outputs[0].dtype for share in call.replicas if share.outputs} == {"bfloat16"}


def test_recomputation_by_a_checkpoint_is_not_recorded_as_a_call(runs: dict[str, Traced]) -> None:
    for name in (name for name in LOOPS if name.startswith("checkpoints")):
        for way in ("script", "toggle"):
            _, calls = recorded(runs[way], name)
            assert [call.root for call in calls] == ["Deep"] * 4
            assert {call.via for call in calls} == {"DataParallel" if "wrapped" in name else None}


def test_an_evaluation_does_not_count_in_the_samples_of_a_training_step(runs: dict[str, Traced]) -> None:
    """Its calls are recorded with their rows, and marked as an evaluation."""
    for name, rows in (("evaluation_within_a_step", 100), ("teacher", 60)):
        _, calls = recorded(runs["script"], name)
        looks = [call for call in calls if not call.training and not call.grad]
        assert {call.rows for call in looks} == {rows}
        assert {call.rows for call in calls if call not in looks} == {30}


def test_for_a_forward_called_directly_its_parts_are_recorded(runs: dict[str, Traced]) -> None:
    _, calls = recorded(runs["script"], "forward_called")
    assert {(call.root, call.via) for call in calls} == {("Sequential", None)}
    _, calls = recorded(runs["script"], "forward_called_of_a_wrapper")
    assert {(call.root, call.via) for call in calls} == {("Net", "DataParallel")}


def test_two_threads_at_once(runs: dict[str, Traced]) -> None:
    """The thread with the first call is the training thread; the other's calls are recorded, but not its steps."""
    steps, calls = recorded(runs["toggle"], "two_threads")
    assert [call.root for call in calls] == ["Net", "Critic"] * 4
    for step in steps:
        (mine,) = [call for call in calls if call.step == step.step and call.root == "Net"]
        assert step.phases["forward"] == mine.wall_ns


def test_nothing_of_dpmon_is_saved_with_a_model(runs: dict[str, Traced]) -> None:
    for way in ("script", "toggle"):
        told = runs[way].printed["saved_and_copied"][2]
        assert [found for found in told if isinstance(found, list) and found[0] in (True, False)] == [[False, True]] * 8
        assert told[-2:] == [False, True]


def test_the_script_can_hide_devices_because_dpmon_does_not_ask_first(runs: dict[str, Traced]) -> None:
    assert runs
    for run in runs.values():
        early, available, count, _ = run.printed["devices_hidden_late"][2]
        assert (early, available, count) == ([0, False], False, 0)
