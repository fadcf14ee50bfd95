"""No fault of dpmon reaches the script: each function of the tracer is broken, one at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from support.tracer_harness import TRACED_SCRIPTS_PATH, TracedRun, TracedScript, traced_script_text

pytestmark = pytest.mark.slow

LIMIT_S = 800.0
"""Hundreds of trainings: a minute of processor time."""
FEW = 8
"""Largest number of warnings from one broken function, including those about calls that could not be split."""

GUARDS = {
    "tracer.calls.primitives.PrimitiveTracer._run_composed",
    "tracer.calls.call_wrapper.CallTracer._begin_call",
    "tracer.calls.call_wrapper.CallTracer._bind_arguments",
    "tracer.calls.call_wrapper.CallTracer._end_call",
    "tracer.calls.call_wrapper.CallTracer._end_failed_call",
    "tracer.core.hidden_frames.drop_frames",
    "tracer.modes.replica_threads.ReplicaThread.run",
    "tracer.steps.optimizers.OptimizerTracer._run_closure",
    "tracer.steps.optimizers.PreHooks.values",
    "tracer.modes.mode_decision.ModeDecider.composed_devices",
    "tracer.steps.span_recorder.SpanRecorder._handle_fetch_error",
    "tracer.steps.span_recorder.SpanRecorder.write_failed",
    "tracer.steps.span_recorder.SpanRecorder.run_in_span",
    "tracer.calls.roots._RootCall.__get__",
    "tracer.core.session.TracerErrorGuard.__enter__",
    "tracer.core.session.TracerErrorGuard.__exit__",
    "tracer.core.session.Session.output_definition",
    "tracer.core.session.Session.guard",
    "tracer.core.session.Session.input_definition",
    "tracer.calls.split_calls.SplitRunner._fall_back",
    "tracer.calls.split_calls.SplitRunner._save_state",
    "tracer.calls.split_calls.SplitRunner._run_root",
    "tracer.calls.split_calls.SplitRunner._copy_back_attributes",
    "tracer.calls.split_calls.SplitRunner._note_success",
    "tracer.calls.split_calls.SplitRunner._run_wrapper",
    "tracer.calls.split_calls.SplitRunner.run",
    "tracer.calls.stages.StageTracer.begin",
    "tracer.calls.stages.StageTracer.end",
    "tracer.modes.virtual_devices._Broadcast.backward",
    "tracer.modes.virtual_devices._Gather.backward",
}
"""Functions that torch or the script calls directly, or that contain faults; nothing contains their own faults."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedRun]:
    """Common scripts and calls composed by the script, in parallel."""
    place = tmp_path_factory.mktemp("containment")
    scripts = {
        words: TracedScript(place, traced_script_text("containment"), *words.split(), env=TRACED_SCRIPTS_PATH)
        for words in ("", "by hand")
    }
    return {words: script.end(LIMIT_S) for words, script in scripts.items()}


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """Code that runs only with GPUs."""
    env = {**TRACED_SCRIPTS_PATH, "PLAYS_CUDA": str(Path(__file__).parent / "scripts" / "plays_cuda.py")}
    return TracedScript(
        tmp_path_factory.mktemp("devices"), traced_script_text("containment"), "on", "devices", env=env
    ).end(280)


def same(found: Any, expected: Any) -> bool:
    """Return whether two results are equal except for the last bits of sums, whose order changes when dp is disabled.

    NaN stands for operations that torch refuses on this machine, also without the tracer.
    """
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float) and (
            math.isnan(found) or math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-5)
        )
    return bool(found == expected)


def leaks(run: TracedRun) -> dict[str, str]:
    """Return effects of broken functions on the script, by their names; there should be none."""
    references = {name: result for name, (_, result, _, _) in run.printed.items() if name.startswith("nothing")}
    for name, result in references.items():
        status, _, err, _ = run.printed[name]
        assert (status, err) == (0, "")
        assert len(result) > 8
    found: dict[str, str] = {}
    warned: dict[int, list[str]] = {}
    for event in run.events("warning"):
        warned.setdefault(event.data["process"], []).append(event.data["text"])
    processes = {event.data["pid"]: event.data["process"] for event in run.events("process")}
    for name, (status, result, err, pid) in run.printed.items():
        texts = warned.get(processes.get(pid, -1), [])
        failed, gave_up = (sum(f"tracer {what}" in text for text in texts) for what in ("failed", "gave up"))
        if status or err:
            found[name] = f"ended with {status}: {err.strip().splitlines()[-1:]}"
        elif not same(result, references["nothing in a plain loop" if name.endswith("plain loop") else "nothing"]):
            found[name] = f"changed what was computed: {result}"
        elif len(texts) > FEW or failed > 1 or gave_up > 1:
            found[name] = f"gave {len(texts)} warnings: {texts}"
    return found


def function(name: str) -> str:
    return name.partition(" ")[0]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("words", ["", "by hand"])
def test_no_fault_of_ours_reaches_the_script(runs: dict[str, TracedRun], words: str) -> None:
    found = {name: why for name, why in leaks(runs[words]).items() if function(name) not in GUARDS}
    assert not found, "\n".join(f"{name}: {why}" for name, why in found.items())


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
def test_the_injected_faults_covered_most_functions_of_the_tracer(runs: dict[str, TracedRun]) -> None:
    """Most functions of the tracer run in these trainings, and so do all functions listed above."""
    run, by_hand = runs[""], runs["by hand"]
    broken = {function(name) for name in run.printed}
    assert run.printed["nothing"][1].count("a bad batch") == 3
    assert len(broken) > 80
    for module in (
        "calls.call_wrapper",
        "steps.loaders",
        "modes.mode_decision",
        "steps.span_recorder",
        "calls.replicas",
        "calls.roots",
        "core.session",
        "calls.traced_modules",
        "core.tensor_sizes",
        "calls.split_calls",
        "modes.virtual_devices",
    ):
        assert sum(name.startswith(f"tracer.{module}.") for name in broken) >= 3
    assert len(run.warnings) + len(run.events("warning")) > 50
    by_hand_broken = {function(name) for name in by_hand.printed}
    assert not any(math.isnan(number) for number in by_hand.printed["nothing"][1])
    for module in ("calls.primitives", "memory.measurement", "steps.pause", "calls.stages", "memory.storages"):
        assert sum(name.startswith(f"tracer.{module}.") for name in by_hand_broken) >= 3
    assert broken | by_hand_broken >= GUARDS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_fault_of_what_times_devices_reaches_the_script(on_devices: TracedRun) -> None:
    found = {name: why for name, why in leaks(on_devices).items() if function(name) not in GUARDS}
    assert not found, "\n".join(f"{name}: {why}" for name, why in found.items())
    broken = {function(name) for name in on_devices.printed}
    for module in ("devices.device_timing", "devices.cuda_events"):
        assert sum(name.startswith(f"tracer.{module}.") for name in broken) >= 4
