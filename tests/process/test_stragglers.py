"""The slow rank and its phase are named correctly, according to the ranks' own times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dpmon.model.rank_stats import RANK_S, RANK_STEPS
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.stragglers import MIN_STEPS
from support.baseline_comparison import records_of_kind, run_unless_aborted
from support.history_builders import snapshot_of_directory
from support.run_harness import Dpmon

SCRIPT = Path(__file__).resolve().parent / "scripts" / "straggler.py"
STOOD_STILL_MS = 2000
"""Time of a step that only a process that stood still takes, in any of these runs."""
Times = dict[int, list[Any]]


@dataclass(frozen=True)
class Run:
    """The ranks' own times, their records (both by rank), and the final state."""

    own: Times
    steps: Times
    state: RunAnalysis

    @property
    def ranks(self) -> list[int]:
        return sorted(self.own)


def run_of(dpmon: Dpmon, *words: object, tries: int = 4) -> Run:
    """Run the script until no rank stood still in a step, which would be a delay that the test did not ask for."""
    for _ in range(tries):
        result = run_unless_aborted(
            lambda _: dpmon.run(*dpmon.warm(), "--headless", SCRIPT, *words), lambda ended: ended.errors
        )
        assert result.status == 0, result.errors
        said = [json.loads(line) for line in result.text.splitlines() if line.startswith("{")]
        own, steps = (
            {rank: [one for one in each if one["rank"] == rank] for rank in sorted({one["rank"] for one in each})}
            for each in (said, records_of_kind(dpmon.records(), "step"))
        )
        run = Run(own, steps, snapshot_of_directory(dpmon.last(), over=True))
        if max(step["step_ms"] for of_rank in own.values() for step in of_rank) < STOOD_STILL_MS:
            break
    return run


def check_joined(
    run: Run, tail_of: Callable[[Any], float] = lambda step: step["tail_ms"], most_ms: float = 0.3
) -> None:
    """Check exposed communication and waits against the ranks' own tails."""
    lengths = {len(steps) for steps in (*run.own.values(), *run.steps.values())}
    assert len(lengths) == 1
    off = []
    for at in range(3, lengths.pop()):
        tails = {rank: tail_of(run.own[rank][at]) for rank in run.ranks}
        for rank in run.ranks:
            step = run.steps[rank][at]
            assert step["exposed_ms"] + step["wait_ms"] == pytest.approx(step["phases"]["sync"])
            off.append(abs(step["exposed_ms"] - min(tails.values())))
            off.append(abs(step["wait_ms"] - (tails[rank] - min(tails.values()))))
        assert sorted(run.steps[rank][at]["wait_ms"] for rank in run.ranks)[0] == 0
        assert len({run.steps[rank][at]["exposed_ms"] for rank in run.ranks}) == 1
    assert median(off) < most_ms


@pytest.mark.parametrize("phase", [*(pytest.param(p, marks=pytest.mark.slow) for p in ("data", "forward")), "backward"])
def test_the_slow_rank_and_its_phase_are_named(dpmon: Dpmon, phase: str) -> None:
    run = run_of(dpmon, "--steps", 70, "--phase", phase, "--ms", 80)
    check_joined(run)
    found = run.state.straggler
    assert found is not None
    assert (found.rank, found.phase) == (1, phase)
    assert found.excess_ns == pytest.approx(80e6, rel=0.4)
    assert found.slowest is not None
    assert found.slowest > 0.9 * found.steps
    # The seconds of RANK_STEPS mean steps, at least RANK_S. Of the newest one, only a part may have passed.
    steps_s = [step["wall_ms"] / 1000 for of_rank in run.steps.values() for step in of_rank[3:]]
    least, most = (max(math.ceil(RANK_STEPS * step_s), RANK_S) for step_s in (min(steps_s), max(steps_s)))
    ends_s = {rank: [int(step["start_s"] + step["wall_ms"] / 1000) for step in run.steps[rank]] for rank in run.ranks}
    newest_s = max(seconds[-1] for seconds in ends_s.values())
    counts = [sum(end_s > newest_s - seconds for end_s in ends_s[1]) for seconds in range(least, most + 1)]
    assert MIN_STEPS < found.steps in counts
    assert (found.own_ns or 0) - (found.others_ns or 0) == pytest.approx(80e6, rel=0.4)


@pytest.mark.slow
def test_one_slow_rank_of_four(dpmon: Dpmon) -> None:
    run = run_of(dpmon, "--ranks", 4, "--steps", 60, "--rank", 3, "--phase", "forward", "--ms", 80)
    check_joined(run)
    found = run.state.straggler
    assert found is not None
    assert (found.rank, found.phase) == (3, "forward")
    assert [one.rank for one in run.state.ranks] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--two-models",), ("--find-unused",), ("--accumulate", 3)])
def test_recorded_passes_equal_those_counted_by_the_ranks(dpmon: Dpmon, words: tuple[object, ...]) -> None:
    run = run_of(dpmon, "--steps", 20, "--phase", "none", *words)
    for rank in run.ranks:
        steps = [(step.get("synced", 0), step.get("unsynced", 0)) for step in run.steps[rank]]
        own = [(one["synchronized"], one["unsynchronized"]) for one in run.own[rank]]
        if len(steps) == len(own):
            assert steps == own
        else:  # a step of the record is a batch of the loader
            assert [sum(counts) for counts in zip(*steps, strict=True)] == [
                sum(counts) for counts in zip(*own, strict=True)
            ]
    if len(run.steps[0]) == len(run.own[0]):
        # Of several calls in a step, the tail begins after the last bucket was launched, not with the last gradient.
        usual_ms = median(one["step_ms"] for rank in run.ranks for one in run.own[rank])
        most_ms = max(2.0, usual_ms / 3) if len(run.own[0][0]["passes"]) > 1 else 0.3
        check_joined(run, lambda step: sum(one["tail_ms"] for one in step["passes"] if one["synchronized"]), most_ms)


def test_ranks_with_less_data_leave_the_others_joined(dpmon: Dpmon) -> None:
    run = run_of(dpmon, "--steps", 14, "--uneven", "--phase", "none")
    assert [len(run.steps[rank]) for rank in run.ranks] == [14, 11]
    for rank in run.ranks:
        assert all(step["wait_ms"] is not None for step in run.steps[rank][:11])
    # In its last steps, the longer rank waits for no other.
    assert [step["wait_ms"] for step in run.steps[0][11:]] == [None] * 3
    assert all("exposed_ms" in step["absent"] for step in run.steps[0][11:])
