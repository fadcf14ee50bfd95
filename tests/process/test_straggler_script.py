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
STEPS, MS = 20, 40


def lines_of(dpmon: Dpmon, *words: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the lines of the script about the run, and about each step of each rank."""
    outcome = unless_aborted(lambda _: SideBySide(dpmon).alone(SCRIPT, *words), lambda ended: ended.stderr.decode())
    assert outcome.status == 0, outcome.stderr
    run, *steps = map(json.loads, outcome.stdout.splitlines())
    assert run["kind"] == "run"
    assert {step["kind"] for step in steps} == {"step"}
    return run, steps


@pytest.mark.parametrize(
    ("ranks", "phase"), [(2, "data"), (2, "forward"), (2, "backward"), (4, "forward"), (8, "data")]
)
def test_one_rank_is_slow_in_one_phase(dpmon: Dpmon, ranks: int, phase: str) -> None:
    run, steps = lines_of(dpmon, "--ranks", ranks, "--steps", STEPS, "--phase", phase, "--ms", MS)
    assert (run["world"], run["slow_ms"], run["balanced_ms"]) == (ranks, MS, None)
    assert [(step["rank"], step["step"]) for step in steps] == [
        (r, n) for r in range(ranks) for n in range(1, STEPS + 1)
    ]
    assert {(step["slow_rank"], step["slow_phase"], step["slow_ms"]) for step in steps} == {(1, phase, MS)}
    assert {(step["synchronised"], step["unsynchronised"]) for step in steps} == {(1, 0)}

    for rank in range(ranks):
        mine = [step for step in steps if step["rank"] == rank]
        spent = {each: median(step[f"{each}_ms"] for step in mine) for each in ("data", "forward")}
        spent["backward"] = median(step["passes"][0]["last_gradient_ms"] for step in mine)
        assert [each for each in PHASES if spent[each] >= MS] == ([phase] if rank == 1 else [])
        for step in mine:
            (only,) = step["passes"]
            assert only["last_gradient_ms"] + only["tail_ms"] == pytest.approx(only["backward_ms"], abs=1e-5)
    tails = [median(step["tail_ms"] for step in steps if step["rank"] == rank) for rank in range(ranks)]
    assert tails.index(min(tails)) == 1
    assert all(tail > MS / 2 for rank, tail in enumerate(tails) if rank != 1)


def test_the_slow_rank_changes_and_all_ranks_agree_on_it(dpmon: Dpmon) -> None:
    words = ("--steps", 30, "--balanced-steps", 12, "--share", 2, "--switch-every", 6, "--phase", "data", "--rank", 0)
    run, steps = lines_of(dpmon, *words)
    assert run["slow_ms"] == pytest.approx(2 * run["balanced_ms"])
    truth = [(step["slow_rank"], step["slow_phase"]) for step in steps if step["rank"] == 0]
    assert truth == [(None, None)] * 12 + [(0, "data")] * 6 + [(1, "forward")] * 6 + [(0, "backward")] * 6
    assert truth == [(step["slow_rank"], step["slow_phase"]) for step in steps if step["rank"] == 1]


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
