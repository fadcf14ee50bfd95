"""How often `dpmon compare` is wrong with real runs: groups of five are drawn from many short runs of one script.

    python tests/benchmarks/bench_compare_runs.py [--work wait] [--runs 24] [--slower 12] [--state DIRECTORY]

Runs of the script, and runs in which each step does `factor` times the work, take turns. The work of a step is a wait,
as for a GPU, or multiplications, which other programs on the same processors slow down. Then pairs of groups
are drawn: both of equal runs (a difference is a false alarm), and one of each (no difference is a miss). A group has
runs from any time, as if its runs had taken turns with those of the other. The draws overlap, so they are not
independent. With --state, the runs are kept there, and those that are there already are not run again.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from dpmon.model.compare_gate import Threshold, judge
from dpmon.model.compare_runs import compare_runs
from dpmon.model.compared_run import ComparedRun
from dpmon.report.comparison import read
from dpmon.run.runs import list_runs

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


def make(place: Path, kind: Mapping[str, str], runs: int, slower: int, factor: float) -> None:
    """Run the script `runs` times, and `slower` times with more work, in turn; those that exist are not run again."""
    script = place / "train.py"
    script.write_text(SCRIPT)
    there = Counter(info.name for _, info in list_runs())
    ratio = runs / max(slower, 1)
    for number in range(runs):
        turns = [("equal", 1.0, number)]
        if int((number + 1) / ratio) > int(number / ratio):
            turns.append(("slow", factor, int(number / ratio)))
        for name, work, at in turns:
            if there[f"{name}-{at}"]:
                continue
            environment = {**os.environ, **kind, "WORK": str(work)}
            command = [sys.executable, "-m", "dpmon", "--headless", "--name", f"{name}-{at}", str(script)]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
        print(f"\r{number + 1} of {runs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def drawn(
    chance: random.Random, first: list[ComparedRun], second: list[ComparedRun] | None, times: int
) -> Counter[str]:
    """Return the outcomes of comparisons of groups; `second` None: both groups are of `first`."""
    found: Counter[str] = Counter()
    for _ in range(times):
        if second is None:
            both = chance.sample(first, 2 * SIDE)
            before, after = both[:SIDE], both[SIDE:]
        else:
            before, after = chance.sample(first, SIDE), chance.sample(second, SIDE)
        result = compare_runs(before, after)
        step = result.compared["step"]
        assert step.change is not None
        found[judge(result, Threshold("step", LIMIT)).outcome] += 1
        found[{1: "shown slower", -1: "shown faster", 0: "not shown"}[step.change.sign]] += 1
    return found


def main() -> None:
    """Run, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", choices=("wait", "multiply"), default="wait", help="the work of a step (default: wait)")
    add("--wait", type=float, default=0.05, help="seconds of the wait in a step (default: 0.05)")
    add("--runs", type=int, default=24, help="equal runs (default: 24)")
    add("--slower", type=int, default=12, help="slower runs (default: 12)")
    add("--factor", type=float, default=1.1, help="work of a step of the slower runs (default: 1.1)")
    add("--steps", type=int, default=100, help="steps of a run (default: 100)")
    add("--draws", type=int, default=1000, help="pairs of groups (default: 1000)")
    add("--state", type=Path, help="where the runs are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = (options.state or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_STATE_HOME"] = str(place)
        kind = {"KIND": options.work, "WAIT": str(options.wait), "STEPS": str(options.steps)}
        make(place, kind, options.runs, options.slower, options.factor)
        every = [read(directory) for directory, _ in list_runs()]
        equal, slow = ([one for one in every if one.name.startswith(name)] for name in ("equal", "slow"))
        chance = random.Random(1)
        for title, sides in (("equal runs", (equal, None)), (f"work times {options.factor:g}", (equal, slow))):
            found = drawn(chance, *sides, options.draws)
            print(f"{title}, five against five, {options.draws} draws: {dict(sorted(found.items()))}")
        for title, group in (("equal", equal), ("slower", slow)):
            steps = [compare_runs([one], [one]).compared["step"].typical(0) or 0.0 for one in group]
            print(f"{title}: {len(steps)} runs, median step {min(steps) / 1e6:.2f} to {max(steps) / 1e6:.2f} ms,")
            print(f"  median of all {median(steps) / 1e6:.2f} ms; load {os.getloadavg()[0]:.1f} now")


if __name__ == "__main__":
    main()
