"""A fault of ours never reaches the script: every function of the tracer is broken, one at a time."""

from __future__ import annotations

from typing import Any

import pytest
from tracing import Traced, text_of, traced

FEW = 8
"""Warnings that one broken function may cause, those of calls that could not be split included."""

GUARDS = {
    "tracer.calls.Calls._before",
    "tracer.calls.Calls._begin",
    "tracer.calls.Calls._run_root",
    "tracer.calls.Calls._run_wrapper",
    "tracer.calls.Calls._take_back",
    "tracer.calls.Calls._worked",
    "tracer.calls.Calls.again",
    "tracer.calls.Calls.end",
    "tracer.calls.Calls.fall_back",
    "tracer.calls.Calls.root_call",
    "tracer.calls.Calls.taken_over",
    "tracer.frames.drop_frames",
    "tracer.roots.Roots._slow",
    "tracer.roots._RootCall.__get__",
    "tracer.session.Session.inputs",
    "tracer.steps.Steps.at_exit",
    "tracer.virtual._Broadcast.backward",
    "tracer.virtual._Gather.backward",
}
"""What torch or the script calls directly, and what holds the faults of others back: nobody stands outside it."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory.mktemp("containment"), text_of("containment"), limit=280)


def same(found: Any, expected: Any) -> bool:
    """Equal, but for the last bits of a sum that is added up in another order when dp is given up."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) < 1e-5
    return bool(found == expected)


def leaks(run: Traced) -> dict[str, str]:
    """What was seen of broken functions, by their names; what they should have been is nothing."""
    references = {plain: run.said["nothing in a plain loop" if plain else "nothing"] for plain in (False, True)}
    for status, result, err, _ in references.values():
        assert (status, err) == (0, "")
        assert len(result) > 8
    assert references[False][1].count("a bad batch") == 3
    found: dict[str, str] = {}
    warned: dict[int, list[str]] = {}
    for event in run.events("warning"):
        warned.setdefault(event.data["process"], []).append(event.data["text"])
    processes = {event.data["pid"]: event.data["process"] for event in run.events("process")}
    for name, (status, result, err, pid) in run.said.items():
        texts = warned.get(processes.get(pid, -1), [])
        failed, gave_up = (sum(f"tracer {what}" in text for text in texts) for what in ("failed", "gave up"))
        if status or err:
            found[name] = f"ended with {status}: {err.strip().splitlines()[-1:]}"
        elif not same(result, references[name.endswith("plain loop")][1]):
            found[name] = f"changed what was computed: {result}"
        elif len(texts) > FEW or failed > 1 or gave_up > 1:
            found[name] = f"gave {len(texts)} warnings: {texts}"
    return found


def function(name: str) -> str:
    return name.partition(" ")[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_fault_of_ours_reaches_the_script(run: Traced) -> None:
    found = {name: why for name, why in leaks(run).items() if function(name) not in GUARDS}
    assert not found, "\n".join(f"{name}: {why}" for name, why in found.items())


@pytest.mark.slow
def test_that_it_was_tried(run: Traced) -> None:
    """Most functions of the tracer run in these trainings; the names above are names of functions that do."""
    broken = {function(name) for name in run.said}
    assert len(broken) > 80
    assert broken >= GUARDS
    for module in ("calls", "modes", "replicas", "roots", "session", "sizes", "steps", "virtual"):
        assert sum(name.startswith(f"tracer.{module}.") for name in broken) >= 3
    assert len(run.warnings) + len(run.events("warning")) > 50
