"""Measures the cost of virtual replicas: the step in dp over 2 replicas against single, on idle or busy cores.

    python tests/benchmarks/bench_virtual.py [--steps 1500] [--rounds 7] [--busy]

Each measurement is one process, `dpmon --headless --mode MODE examples/linear.py`, in random order within a round.
"single" is measured twice (A/A): the ratio of the two is the noise. `--busy` also runs one process per core that never
sleeps. The result is the median of the rounds' ratios of median steps, with their quartiles. The load average at the
beginning and the end shows what else the machine did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_IDLE, LIMIT_BUSY = 3.0, 6.0
WARM_UP = 100
"""Number of first steps that do not count."""


def measure(mode: str, steps: int) -> list[float]:
    """Return the step times of one run in order, ms."""
    with tempfile.TemporaryDirectory() as state:
        environment = os.environ | {"XDG_STATE_HOME": state}
        dpmon = [sys.executable, "-m", "dpmon"]
        script = [str(ROOT / "examples" / "linear.py"), "--steps", str(steps + WARM_UP)]
        run = [*dpmon, "--headless", "--replicas", "2", "--mode", mode, *script]
        subprocess.run(run, env=environment, capture_output=True, check=True)
        export = subprocess.run(
            [*dpmon, "export", "last", "--kind", "step"],
            env=environment, capture_output=True, check=True,
        )  # fmt: skip
    records = [json.loads(line) for line in export.stdout.splitlines()]
    return [record["wall_ms"] for record in records][WARM_UP:]


def main() -> int:
    """Run the benchmark; status 1 if dp takes more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="one process per core that never sleeps runs beside it")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    limit = LIMIT_BUSY if options.busy else LIMIT_IDLE
    rounds: list[dict[str, list[float]]] = []
    load = [os.getloadavg()[0]]
    with ExitStack() as beside:
        for _ in range(cores if options.busy else 0):
            process = beside.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            beside.callback(process.kill)
        for _ in range(options.rounds):
            variants = ["single", "single-again", "dp"]
            random.shuffle(variants)
            rounds.append({name: sorted(measure(name.partition("-")[0], options.steps)) for name in variants})
    load.append(os.getloadavg()[0])
    print(f"{cores} cores, {'busy' if options.busy else 'idle'}, load average {load[0]:.1f} to {load[1]:.1f}")
    for name in ("single", "single-again", "dp"):
        medians = statistics.median(found[name][len(found[name]) // 2] for found in rounds)
        tails = statistics.median(found[name][int(len(found[name]) * 0.95)] for found in rounds)
        print(f"{name:>12}  step median {medians:6.2f} ms   p95 {tails:6.2f} ms")
    ratios = {
        name: sorted(statistics.median(found[name]) / statistics.median(found["single"]) for found in rounds)
        for name in ("single-again", "dp")
    }
    for name, found in ratios.items():
        quartiles = f"{found[len(found) // 4]:.2f} to {found[-1 - len(found) // 4]:.2f}"
        print(f"{name:>12}  {statistics.median(found):.2f} times single (quartiles {quartiles})")
    verdict = statistics.median(ratios["dp"]) <= limit
    print(f"limit {limit:.0f}: {'within' if verdict else 'OVER'}")
    return 0 if verdict else 1


if __name__ == "__main__":
    raise SystemExit(main())
