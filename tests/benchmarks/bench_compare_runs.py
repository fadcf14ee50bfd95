"""How often `dpmon compare` is wrong with real runs: groups of five are taken from many short runs of one script.

    python tests/benchmarks/bench_compare_runs.py [--work wait] [--turns 60] [--state DIRECTORY]

A turn is two runs of the script, and one in which each step does `factor` times the work. The work of a step is a
wait, as for a GPU, or multiplications, which other programs on the same processors slow down. A comparison takes five
turns, one after the other, and from each of them a run for either side: both equal (a difference is a false alarm), or
an equal one and the slower one (no difference is a miss). Which of the equal runs is taken is left to chance. The
comparisons share turns, so they are not independent. With --state, the runs are kept there, and those that are there
already are not run again.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from dpmon.model.compared_run import ComparedRun
from dpmon.model.run_comparison import RunComparison, judge_metric
from dpmon.report.comparison_report import read_compared_run
from dpmon.run.run_registry import list_runs

SCRIPT = """\
import os
import time
import torch
torch.set_num_threads(1)
work = float(os.environ["WORK"])
model, weight = torch.nn.Linear(64, 64), torch.randn(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for step in range(int(os.environ["STEPS"])):
    optimizer.zero_grad()
    found = torch.randn(64, 256)
    if os.environ["KIND"] == "wait":
        time.sleep(float(os.environ["WAIT"]) * work)
    else:
        for _ in range(round(40 * work)):
            found = torch.tanh(found @ weight)
    model(found[:, :64]).mean().backward()
    optimizer.step()
"""
SIDE = 5
LIMIT = 0.05
FIGURES = ("step", "median_step", "fast_step", "cpu_step")
NAMES = ("first", "second", "slow")
Turn = tuple[ComparedRun, ComparedRun, ComparedRun]


def make(place: Path, kind: Mapping[str, str], turns: int, factor: float) -> None:
    """Run the script in turns; runs that exist are not run again."""
    script = place / "train.py"
    script.write_text(SCRIPT)
    there = {info.name for _, info in list_runs()}
    loads = []
    for turn in range(turns):
        # The order changes, so that no place in a turn is always the slower run's.
        for at in range(3):
            which = NAMES[(turn + at) % 3]
            name = f"{which}-{turn}"
            if name in there:
                continue
            environment = {**os.environ, **kind, "WORK": str(factor if which == "slow" else 1.0)}
            command = [sys.executable, "-m", "dpmon", "--headless", "--name", name, str(script)]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
            loads.append(os.getloadavg()[0])
        print(f"\r{turn + 1} of {turns}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if loads:
        print(f"load of the machine: {min(loads):.1f} to {max(loads):.1f}, median {median(loads):.1f}")


def compared(chance: random.Random, turns: Sequence[Turn], slower: bool, times: int) -> dict[str, Counter[str]]:
    """Return the outcomes of comparisons by figure."""
    found: dict[str, Counter[str]] = {figure: Counter() for figure in FIGURES}
    for _ in range(times):
        start = chance.randrange(len(turns) - SIDE + 1)
        before, after = [], []
        for turn in turns[start : start + SIDE]:
            equal = chance.sample(turn[:2], 2)
            before.append(equal[0])
            after.append(turn[2] if slower else equal[1])
        result = RunComparison((before, after))
        for figure, counted in found.items():
            row = result.compared.get(figure)
            sign = 0 if row is None or row.change is None else row.change.sign
            counted[judge_metric(result, figure, LIMIT).outcome] += 1
            counted[{1: "interval above 0", -1: "interval below 0", 0: "interval around 0"}[sign]] += 1
    return found


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", choices=("wait", "multiply"), default="wait", help="the work of a step (default: wait)")
    add("--wait", type=float, default=0.01, help="seconds of the wait in a step (default: 0.01)")
    add("--turns", type=int, default=60, help="turns of two equal runs and a slower one (default: 60)")
    add("--factor", type=float, default=1.1, help="work of a step of the slower runs (default: 1.1)")
    add("--steps", type=int, default=200, help="steps of a run (default: 200)")
    add("--times", type=int, default=1000, help="comparisons (default: 1000)")
    add("--state", type=Path, help="where the runs are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = (options.state or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_STATE_HOME"] = str(place)
        kind = {"KIND": options.work, "WAIT": str(options.wait), "STEPS": str(options.steps)}
        make(place, kind, options.turns, options.factor)
        runs = {info.name: read_compared_run(directory) for directory, info in list_runs()}
        turns = []
        for turn in range(options.turns):
            one, other, slow = (runs[f"{which}-{turn}"] for which in NAMES)
            turns.append((one, other, slow))
        chance = random.Random(1)
        for title, slower in (("equal runs", False), (f"work times {options.factor:g}", True)):
            for figure, found in compared(chance, turns, slower, options.times).items():
                shares = ", ".join(f"{name} {count / options.times:.1%}" for name, count in sorted(found.items()))
                print(f"{title}, {figure}: {shares}")
        for figure in FIGURES:
            for title, ranks in (("equal", (0, 1)), ("slower", (2,))):
                sides = [RunComparison(([turn[at]], [turn[at]])).compared for turn in turns for at in ranks]
                values = [side[figure].typical_value(0) or 0.0 for side in sides if figure in side]
                if not values:
                    continue
                text = f"{min(values) / 1e6:.2f} to {max(values) / 1e6:.2f} ms, median {median(values) / 1e6:.2f} ms"
                print(f"{figure} of {len(values)} {title} runs: {text}")


if __name__ == "__main__":
    main()
