"""The three kinds of steps: which kind a turn of a loop has, how steps are numbered, and what describes a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dpmon.record.record_types import Call
from dpmon.record.schema import EVALUATION, FORWARD_ONLY, TRAINING
from support.script_simulator import DecodedRows, Script, assemble_script

T, E, F = TRAINING, EVALUATION, FORWARD_ONLY
LOOPS: dict[str, tuple[str, list[tuple[int, int]], Sequence[tuple[int, int | None, int]]]] = {
    "a test pass without eval()": (
        "m " + ("d l " * 2 + "D " + "d f " * 2 + "D ") * 2,
        [(T, 1), (T, 2), (F, 1), (F, 2), (T, 3), (T, 4), (F, 3), (F, 4)],
        [(T, n, 1) for n in (1, 2, 3, 4)] + [(F, n, 1) for n in (1, 2, 3, 4)],
    ),
    "a test call without gradients after each update": (
        "m " + "l n " * 3,
        [(T, 1), (T, 2), (T, 3)],
        [(T, 1, 1), (T, 2, 2), (T, 3, 2), (E, None, 1)],
    ),
    "sampling after the training": (
        "m " + "l " * 3 + "f " * 20,
        [(T, n) for n in (1, 2, 3)] + [(F, n) for n in range(1, 21)],
        [(T, n, 1) for n in (1, 2, 3)] + [(F, n, 1) for n in range(1, 21)],
    ),
    "sampling without gradients after the training": (
        "m " + "l " * 3 + "n " * 4,
        [(T, n) for n in (1, 2, 3)] + [(E, n) for n in (1, 2, 3, 4)],
        [(T, n, 1) for n in (1, 2, 3)] + [(E, n, 1) for n in (1, 2, 3, 4)],
    ),
    "evaluation of the bare model": (
        "m " + "lW " * 2 + "eV " * 3,
        [(T, 1), (T, 2), (E, 1), (E, 2), (E, 3)],
        [(T, 1, 1), (T, 2, 1), (E, 1, 1), (E, 2, 1), (E, 3, 1)],
    ),
    "one call of the bare model after each update": (
        "m " + "lW eV " * 2,
        [(T, 1), (T, 2)],
        [(T, 1, 1), (T, 2, 1), (E, None, 2)],
    ),
    "a call before the loop": (
        "m f w300 " + "d l " * 2,
        [(T, 1), (T, 2)],
        [(F, None, 1), (T, 1, 1), (T, 2, 1)],
    ),
    "a batch that is skipped": (
        "m d l d f d l d l",
        [(T, 1), (F, 1), (T, 2), (T, 3)],
        [(T, 1, 1), (F, 1, 1), (T, 2, 1), (T, 3, 1)],
    ),
    "training in eval mode": (
        "m " + "d e b o " * 2,
        [(T, 1), (T, 2)],
        [(T, 1, 1), (T, 2, 1)],
    ),
    "accumulation with a loader": (
        "m " + "d f b d f b o " * 2,
        [(T, 1), (T, 2), (T, 3), (T, 4)],
        [(T, n, 1) for n in (1, 2, 3, 4)],
    ),
}


def assembled(loop: str) -> DecodedRows:
    """Return the rows of a loop (`Script.play`)."""
    script = Script().play(loop)
    script.line(end=True, uncaught=False)
    return assemble_script(script)


def calls_by_step(calls: list[Call]) -> set[tuple[int, int | None, int]]:
    """Return (kind, step, number of calls) of each step with calls."""
    keys = [(call.kind, call.step) for call in calls]
    return {(kind, step, keys.count((kind, step))) for kind, step in keys}


@pytest.mark.parametrize("name", LOOPS)
def test_kinds_and_numbers(name: str) -> None:
    loop, steps, calls = LOOPS[name]
    found = assembled(loop)
    assert [(step.kind, step.step) for step in found.steps if step.step] == steps
    assert calls_by_step(found.calls) == set(calls)
