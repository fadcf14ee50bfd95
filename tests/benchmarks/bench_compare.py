"""How often `dpmon compare` is wrong, on simulated runs with known differences; and how long it takes.

    python tests/benchmarks/bench_compare.py

Steps have a duration with noise of 5%, which depends on the step before (an AR(1) process), and one in fifty is much
longer. The mean steps of equal runs differ by a normal distribution.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from math import exp, sqrt
from pathlib import Path
from statistics import fmean, median

from dpmon.model.compared_run import STEP_METRICS
from dpmon.model.comparison_stats import estimate_change
from dpmon.model.run_comparison import ComparedMetric, RunComparison, judge_metric

NOISE, SLOW_STEPS, STRETCHES, RESAMPLED = 0.05, 0.02, 20, 400


def steps(chance: random.Random, count: int, rho: float, center: float) -> list[float]:
    """Return the durations of the steps of a run."""
    at, found = chance.gauss(0, 1), []
    for _ in range(count):
        at = rho * at + chance.gauss(0, sqrt(1 - rho * rho))
        late = chance.expovariate(2) if chance.random() < SLOW_STEPS else 0.0
        found.append(center * exp(NOISE * at + late))
    return found


def stretches(values: list[float], count: int) -> list[float]:
    """Return the means of equal parts."""
    size = len(values) // count
    return [fmean(values[at * size : (at + 1) * size]) for at in range(count)]


def pair(chance: random.Random, count: int, rho: float, parts: int, factor: float) -> tuple[list[float], list[float]]:
    """Return the stretches of two single runs, of which the second is slower by `factor`."""
    before, after = (stretches(steps(chance, count, rho, center), parts) for center in (1.0, factor))
    return before, after


def sign(before: list[float], after: list[float]) -> int:
    """Return 1, -1 or 0: the second run is slower, faster, or neither."""
    return estimate_change(before, after, fmean(after) / fmean(before), in_order=True).sign


def bootstrapped(chance: random.Random, before: list[float], after: list[float]) -> int:
    """Return the same by a circular block bootstrap, for comparison."""

    def again(values: list[float]) -> float:
        size = max(round(len(values) ** (1 / 3)), 1)
        starts = [chance.randrange(len(values)) for _ in range(-(-len(values) // size))]
        taken = [values[(start + at) % len(values)] for start in starts for at in range(size)]
        return median(taken[: len(values)])

    ratios = sorted(again(after) / again(before) for _ in range(RESAMPLED))
    return (ratios[RESAMPLED // 40] > 1) - (ratios[-RESAMPLED // 40] < 1)


def runs(chance: random.Random, count: int, spread: float, center: float) -> list[float]:
    """Return the mean steps of equal runs."""
    return [center * exp(chance.gauss(0, spread)) for _ in range(count)]


def of_pairs(chance: random.Random, times: int) -> None:
    """Print false alarms and power of one run a side."""
    print("| steps | correlation of steps | stretches | false alarms | 5% slower found | false alarms of a bootstrap |")
    print("|---|---|---|---|---|---|")
    for count, rho, parts in product((200, 1000), (0.0, 0.8, 0.95), (6, STRETCHES)):
        equal = [pair(chance, count, rho, parts, 1.0) for _ in range(times)]
        alarms = sum(abs(sign(*each)) for each in equal) / times
        others = sum(abs(bootstrapped(chance, *each)) for each in equal) / times
        power = sum(sign(*pair(chance, count, rho, parts, 1.05)) > 0 for _ in range(times)) / times
        print(f"| {count} | {rho:g} | {parts} | {alarms:.1%} | {power:.0%} | {others:.1%} |", flush=True)


def of_groups(chance: random.Random, times: int) -> None:
    """Print how often each outcome of a gate at 5% comes, for several runs a side."""
    head = ("runs a side", "equal runs differ by", "really slower by", "slower", "not slower", "inconclusive")
    print(f"| {' | '.join((*head, '95% interval not around 0'))} |")
    print("|---|---|---|---|---|---|---|")
    for count, spread, slower in product((3, 5), (0.01, 0.02, 0.04), (0.0, 0.05, 0.1)):
        outcomes: Counter[str] = Counter()
        signs = 0
        for _ in range(times):
            told = estimate_change(runs(chance, count, spread, 1.0), runs(chance, count, spread, 1 + slower))
            row = ComparedMetric(STEP_METRICS[0], ([1.0], [1.0]), told)
            found = RunComparison(([], []))
            vars(found).update(compared={"step": row}, per_sample=False)
            outcomes[judge_metric(found, "step", 0.05).outcome] += 1
            signs += told.sign != 0
        shares = [f"{outcomes[name] / times:.1%}" for name in ("slower", "not slower", "inconclusive")]
        off = f"{signs / times:.1%}" if count > 3 else "never"
        print(f"| {count} | {spread:.0%} | {slower:.0%} | {' | '.join(shares)} | {off} |", flush=True)


def of_time(count: int) -> None:
    """Print how long it takes to compare two runs of `count` steps."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_STATE_HOME"] = place
        from dpmon.report.comparison_report import compare_directories, comparison_as_json
        from support.history_builders import write_run_directory
        from support.record_builders import SECOND, Training

        directories = []
        for seed in (1, 2):
            training = Training(mode="single", step_ns=SECOND // 100, seed=seed)
            directories.append(
                write_run_directory({0: [*training.begin(), *training.run(count)]}, seconds=training.now / SECOND)
            )
        began = time.perf_counter()
        comparison_as_json(compare_directories(*([directory] for directory in directories)))
        print(f"comparing two runs of {count:,} steps takes {time.perf_counter() - began:.2f} s")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="simulated comparisons a row (default: 1000)")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the timed runs (default: 100,000)")
    options = parser.parse_args()
    of_pairs(random.Random(1), options.times)
    of_groups(random.Random(2), 4 * options.times)
    of_time(options.steps)


if __name__ == "__main__":
    main()
