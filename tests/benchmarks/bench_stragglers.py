"""How often the slow rank and its phase are named, in windows of fifty steps.

    python tests/benchmarks/bench_stragglers.py [--ranks 2 4 8] [--windows 30] [--work-ms 10]

Ranks under DistributedDataParallel (tests/process/scripts/straggler.py) run under dpmon. In each window one rank is
slow in one phase, another one each time: by 30 ms, or by 10 % of the step. In balanced windows no rank is slow, so any
name is wrong. The script's own lines are the truth; the records of dpmon are judged in the same way as on the screen.

`--work-ms`: how long each rank sleeps in each phase. Ranks that compute all the time on fewer processors wait for
processors more than for each other: then 10 % of a step makes no rank slow.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from running import Dpmon
from steps import StepFacts

from dpmon.export import history
from dpmon.model.stragglers import RankTimes, rank_times, straggler
from dpmon.record.kinds import Step
from dpmon.record.schema import EXPOSED, HELD, PHASES, QUANTITIES, WAIT
from dpmon.store.tally import Tally

SCRIPT = Path(__file__).resolve().parents[1] / "process" / "scripts" / "straggler.py"
WINDOW, BALANCED = 50, 40
"""Steps of a window, and those before the first one in which the script measures the balanced step."""
AMOUNTS = {"30 ms": ("--ms", 30), "10 % of the step": ("--share", 0.1), "nobody": ("--phase", "none")}


def times_of(steps: list[Step], held: dict[int, int]) -> RankTimes:
    """Return the mean times of one rank in a window; `held`: by how much (ns) it was the slowest, by step."""
    tally = Tally()
    for step in steps:
        phases = [step.phases.get(phase.name) for phase in PHASES]
        counted = [step.quantity(quantity.name) for quantity in QUANTITIES]
        facts = StepFacts(step.step, step.wall_ns, counted, phases, None, 1)
        tally.add([facts.row(step.start_ns)])
        if step.exposed_ns is not None and step.wait_ns is not None:
            late = {EXPOSED: step.exposed_ns, WAIT: step.wait_ns}
            tally.add([], (late | {HELD: held[step.step]} if step.step in held else late).items())
    return rank_times(steps[0].process, steps[0].rank, tally)


def judged(steps: list[Step], first: int) -> tuple[int | None, str | None] | None:
    """Return the rank and phase that are named for the window beginning at a step, or None."""
    window = [step for step in steps if first <= step.step < first + WINDOW]
    waits: dict[int, list[int]] = {}
    for step in window:
        if step.wait_ns is not None:
            waits.setdefault(step.step, []).append(step.wait_ns)
    ranks = []
    for rank in sorted({step.rank for step in window if step.rank is not None}):
        mine = [step for step in window if step.rank == rank]
        ranks.append(times_of(mine, {step.step: sorted(waits[step.step])[1] for step in mine if step.wait_ns == 0}))
    found = straggler(ranks)
    return None if found is None else (found.rank, found.phase)


def run(dpmon: Dpmon, ranks: int, amount: str, options: argparse.Namespace) -> tuple[list[Step], dict[int, Any]]:
    """Return the recorded steps of a run, and by step the slow rank and phase according to rank 0."""
    steps = BALANCED + WINDOW * options.windows
    words = ("--ranks", ranks, "--steps", steps, "--balanced-steps", BALANCED, "--switch-every", WINDOW)
    words = (*words, "--work-ms", options.work_ms, "--phase", "data", *AMOUNTS[amount])
    result = dpmon.run("--headless", SCRIPT, *words, limit=3600.0)
    if result.status:
        raise SystemExit(result.errors)
    said = [json.loads(line) for line in result.text.splitlines() if line.startswith("{")]
    truth = {one["step"]: (one["slow_rank"], one["slow_phase"]) for one in said if one.get("rank") == 0}
    return [record for record in history(dpmon.last()) if isinstance(record, Step)], truth


def main() -> None:
    """Print a line for each number of ranks and amount."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--work-ms", type=float, default=10.0)
    options = parser.parse_args()
    print(f"windows of {WINDOW} steps in which a rank is slow, and how they are judged")
    for ranks in options.ranks:
        for amount in AMOUNTS:
            with tempfile.TemporaryDirectory() as place:
                root = Path(place)
                (root / "cwd").mkdir()
                steps, truth = run(Dpmon(root / "state", root / "cwd"), ranks, amount, options)
            counts: Counter[str] = Counter()
            for number in range(options.windows):
                first = BALANCED + 1 + WINDOW * number
                named, true = judged(steps, first), truth[first]
                if true[0] is None:
                    counts["nobody" if named is None else "a false name"] += 1
                elif named is None:
                    counts["nobody"] += 1
                elif named[0] != true[0]:
                    counts["another rank"] += 1
                else:
                    counts["rank and phase" if named[1] == true[1] else "rank, phase " + str(named[1])] += 1
            step = sum(one.wall_ns for one in steps) / max(len(steps), 1) / 1e6
            found = ", ".join(f"{what} {count}" for what, count in counts.most_common())
            print(f"{ranks} ranks, {amount:>16} (mean step {step:5.1f} ms): {found}", flush=True)


if __name__ == "__main__":
    main()
