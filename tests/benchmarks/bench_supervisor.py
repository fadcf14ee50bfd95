"""The cost of the supervisor: share of a core and memory while a process records at a given rate, and under a flood.

    python tests/benchmarks/bench_supervisor.py [--seconds 20] [--rates 0,100,1000,10000,100000,max]

Each rate is a run of its own: the real supervisor with its samplers, started by the real command line, over a process
that writes calls of 8 replicas and steps alternately. The processor time of the supervisor is read from the kernel
twice while the writer is busy. The records are counted afterwards: seen + dropped = sent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from yardstick import peak_mib, processor_s  # noqa: E402

from support.ring_writers import WRITE_RUN  # noqa: E402
from support.run_harness import Dpmon, wait_for  # noqa: E402

_BUDGET = "budget: 3% of a core at 1,000 records/s, 60 MB"


def measure(rate: float, seconds: float, state: Path) -> str:
    """Measure a run at `rate` records a second (0: none, inf: as fast as possible); return a line of figures."""
    dpmon = Dpmon(state, state)
    try:
        if rate == 0:
            words: tuple[object, ...] = ("sleep", seconds + 3)
        else:
            records = int((seconds + 3) * (rate if rate != float("inf") else 150_000))
            words = (*WRITE_RUN, records, 0 if rate == float("inf") else rate)
        dpmon.run("--detach", *words)
        info = dpmon.info()
        pid = info["supervisor_pid"]
        if rate:
            wait_for((dpmon.last() / "process-0.ring").exists)
        time.sleep(1.5)  # do not measure its start
        cpu, began, peak = processor_s(pid), time.monotonic(), peak_mib(pid)
        while time.monotonic() - began < seconds and not (dpmon.last() / "exit.json").exists():
            time.sleep(0.05)
            peak = peak_mib(pid)
        share = (processor_s(pid) - cpu) / (time.monotonic() - began) * 100
        dpmon.exit(limit=60)
        return f"{rate:>9,.0f}  {share:6.2f}%  {peak:5.1f} MiB  {counted(dpmon) if rate else ''}"
    finally:
        dpmon.clean_up()


def counted(dpmon: Dpmon) -> str:
    """Return sent, seen and dropped of the last run, with a note if they do not add up."""
    import sqlite3

    sent = int((dpmon.last() / "output.log").read_text().removeprefix("sent "))
    with sqlite3.connect(dpmon.last() / "history.sqlite") as db:
        seen, missed = db.execute("SELECT position, missed FROM rings WHERE name = 'process-0.ring'").fetchone()
        pruned = db.execute("SELECT value FROM meta WHERE key = 'pruned'").fetchone()[0]
    verdict = "" if seen == sent else "  DOES NOT ADD UP"
    return f"sent {sent:,}  seen {seen - missed:,}  dropped {missed:,}  pruned {pruned:,}{verdict}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rates", default="0,100,1000,10000,100000,max")
    options = parser.parse_args()
    print(json.dumps({"python": sys.version.split()[0], "cores": os.cpu_count(), "seconds": options.seconds}))
    print(f"{'records/s':>9}  {'of a core':>8}  {'peak':>9}     ({_BUDGET})")
    for text in options.rates.split(","):
        with tempfile.TemporaryDirectory() as state:
            print(measure(float("inf" if text == "max" else text), options.seconds, Path(state)), flush=True)


if __name__ == "__main__":
    main()
