"""What the tracer costs a step in instructions of the processor, counted by Valgrind's callgrind.

    python tests/benchmarks/bench_instructions.py [--cases usual calls deep dp2 dp8] [--steps 64]

Times of some microseconds need an idle machine and many blocks (bench_inside.py); instructions are the same on a busy
one. From run to run a step's differ by half a percent and the tracer's part by a tenth (whether it looked for new roots
meanwhile), so that a change of the hot path shows in one run of minutes. What they do not show is that code which the
training has driven out of the processor's caches runs several times slower than code that has just run: the tracer's
share of a step's time is up to two and a half times its share of the instructions. The same loops as in
bench_inside.py, with the patches in and out in one process; needs `valgrind` and `callgrind_control`, which come
together.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_inside import CASES, WARM_STEPS, installed, traced_run

SETTLE_STEPS = 64


def control(*command: str) -> None:
    """Send a command to the callgrind that runs this process."""
    done = subprocess.run(["callgrind_control", *command, str(os.getpid())], capture_output=True, text=True)
    if "OK" not in done.stdout:
        raise SystemExit(f"callgrind_control: {done.stdout or done.stderr}")


def child(case: str, steps: int) -> None:
    """Run one case under callgrind; it writes three dumps: nothing but the control, with patches, without."""
    patches, loop, alone = installed(case)
    loop.run(loop.model, SETTLE_STEPS)
    gc.collect()
    gc.disable()
    control("-i", "on")
    control("-z")
    control("-d")
    loop.run(loop.model, SETTLE_STEPS)
    control("-z")
    loop.run(loop.model, steps)
    control("-d")
    control("-i", "off")
    patches.take_all_out()
    loop.run(alone, WARM_STEPS)
    control("-i", "on")
    loop.run(alone, SETTLE_STEPS)
    control("-z")
    loop.run(alone, steps)
    control("-d")


def measure(case: str, steps: int) -> None:
    """Measure one case in a separate process; print its line."""
    with tempfile.TemporaryDirectory() as run:
        command = [
            "env",
            "PYTHONHASHSEED=0",
            "valgrind",
            "-q",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={run}/out",
        ]
        command += [sys.executable, __file__, "--child", case, "--steps", str(steps)]
        traced_run(case, run, command)
        nothing, traced, bare = (_total(Path(run) / f"out.{number}") for number in (1, 2, 3))
    base, cost = (bare - nothing) / steps, (traced - bare) / steps
    print(
        f"{case:>6}  step {base / 1e6:6.3f} million instructions   tracer {cost / 1e3:+6.1f} thousand "
        f"({cost / base:+.1%})",
        flush=True,
    )


def _total(dump: Path) -> int:
    found = re.search(r"^summary: (\d+)", dump.read_text(errors="replace"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"callgrind wrote no summary in {dump.name}")
    return int(found[1])


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--child", choices=CASES)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.steps)
        return 0
    for case in options.cases:
        measure(case, options.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
