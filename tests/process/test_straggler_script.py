"""The script with a slow rank, without dpmon, measures the delays that were requested. Other tests rely on this."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from running import Dpmon
from sidebyside import SideBySide
from torch_aborts import unless_aborted

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parent / "scripts" / "straggler.py"
PHASES = ["data", "forward", "backward"]
EVERY, MS = 20, 40
SLOW = [(0, "data"), (1, "forward"), (0, "backward")]


def lines_of(dpmon: Dpmon, *words: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the lines of the script about the run, and about each step of each rank."""
    outcome = unless_aborted(lambda _: SideBySide(dpmon).alone(SCRIPT, *words), lambda ended: ended.stderr.decode())
    assert outcome.status == 0, outcome.stderr
    run, *steps = map(json.loads, outcome.stdout.splitlines())
    assert run["kind"] == "run"
    assert {step["kind"] for step in steps} == {"step"}
    return run, steps


def test_each_rank_is_slow_in_its_turn_and_phase(dpmon: Dpmon) -> None:
    words = ("--steps", 72, "--balanced-steps", 12, "--ms", MS, "--switch-every", EVERY, "--phase", "data", "--rank", 0)
    run, steps = lines_of(dpmon, *words)
    assert (run["world"], run["slow_ms"]) == (2, MS)
    assert run["balanced_ms"] > 0
    for rank in (0, 1):
        mine = [step for step in steps if step["rank"] == rank]
        assert [step["step"] for step in mine] == list(range(1, 73))
        assert {(step["synchronised"], step["unsynchronised"]) for step in mine} == {(1, 0)}
        truth = [(step["slow_rank"], step["slow_phase"]) for step in mine]
        assert truth == [(None, None)] * 12 + [slow for slow in SLOW for _ in range(EVERY)]
        for step in mine:
            (only,) = step["passes"]
            assert only["last_gradient_ms"] + only["tail_ms"] == pytest.approx(only["backward_ms"], abs=1e-5)
        for number, (who, phase) in enumerate(SLOW):
            part = mine[12 + number * EVERY : 12 + (number + 1) * EVERY]
            spent = {each: median(step[f"{each}_ms"] for step in part) for each in ("data", "forward")}
            spent["backward"] = median(step["passes"][0]["last_gradient_ms"] for step in part)
            assert [each for each in PHASES if spent[each] >= MS] == ([phase] if rank == who else [])
            assert (median(step["tail_ms"] for step in part) > MS / 2) == (rank != who)


def test_the_amount_can_be_a_share_of_the_balanced_step(dpmon: Dpmon) -> None:
    run, _ = lines_of(dpmon, "--steps", 14, "--balanced-steps", 12, "--share", 2, "--phase", "data")
    assert run["slow_ms"] == pytest.approx(2 * run["balanced_ms"])


def test_passes_are_counted_by_model_and_synchronisation(dpmon: Dpmon) -> None:
    words = ("--steps", 8, "--accumulate", 3, "--two-models", "--find-unused", "--phase", "none")
    run, steps = lines_of(dpmon, *words)
    assert run["slow_ms"] == 0
    for step in steps:
        assert (step["synchronised"], step["unsynchronised"], step["slow_rank"]) == (2, 4, None)
        assert [(one["model"], one["synchronised"]) for one in step["passes"]] == [
            (0, False), (1, False), (0, False), (1, False), (0, True), (1, True),
        ]  # fmt: skip


def test_ranks_of_different_lengths_join(dpmon: Dpmon) -> None:
    _, steps = lines_of(dpmon, "--steps", 14, "--uneven", "--ms", 1)
    assert [sum(step["rank"] == rank for step in steps) for rank in (0, 1)] == [14, 11]
