"""How long dpmon takes to start: until the script's first line, until the first picture, and over a whole run.

    python tests/benchmarks/bench_start.py [--rounds 15]

Each round runs all ways in random order; "alone" runs twice, and the difference between its two results is the noise.
On a shared machine, only processor time ("its processor") and ratios to a bare Python ("alone") are meaningful.
Median and 95th percentile over the rounds, in ms; as measured, and scaled to the reference (yardstick.py).
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from running import Dpmon, Terminal
from yardstick import Yardstick, processor_s

_SCRIPT = "import time; print(time.monotonic_ns(), flush=True)"


def first_line(dpmon: Dpmon, words: list[str]) -> tuple[float, float]:
    """Return the times until the script's first line and until the end, ms."""
    began = time.monotonic_ns()
    done = subprocess.run(
        words, cwd=dpmon.cwd, env=dpmon.environment(), stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    ended = time.monotonic_ns()
    return (int(done.stdout.split()[0]) - began) / 1e6, (ended - began) / 1e6


def first_picture(dpmon: Dpmon, spent: list[float] | None = None) -> float:
    """Return the time until the screen has drawn a panel, ms; append its processor time until then to `spent`."""
    began = time.monotonic_ns()
    terminal = Terminal(dpmon, "wait.py", TERM="xterm-256color")
    while b"Devices" not in terminal.take():
        time.sleep(0.001)
    took = (time.monotonic_ns() - began) / 1e6
    if spent is not None:
        spent.append(processor_s(terminal.process.pid) * 1000)
    dpmon.run("stop", "last")
    terminal.process.kill()
    terminal.wait()
    return took


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    yardstick = Yardstick()
    print(yardstick.state())
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        dpmon = Dpmon(Path(place), Path(place))
        dpmon.script(_SCRIPT)
        dpmon.script("import time; time.sleep(600)", "wait.py")

        def run(name: str, words: list[str]) -> Callable[[], None]:
            def take() -> None:
                line, whole = first_line(dpmon, words)
                found.setdefault(f"{name}: first line", []).append(line)
                found.setdefault(f"{name}: whole run", []).append(whole)

            return take

        def picture() -> None:
            spent = found.setdefault("with a screen: its processor", [])
            found.setdefault("with a screen: first picture", []).append(first_picture(dpmon, spent))

        def help_text() -> None:
            began = time.monotonic_ns()
            dpmon.run("--help")
            found.setdefault("--help", []).append((time.monotonic_ns() - began) / 1e6)

        ways = [
            run("alone", [sys.executable, "script.py"]),
            run("alone again", [sys.executable, "script.py"]),
            run("headless", dpmon.words("script.py")),
            picture,
            help_text,
        ]
        try:
            for _ in range(rounds):
                for way in random.sample(ways, len(ways)):
                    way()
        finally:
            dpmon.clean_up()
    slow = yardstick.since()
    for name, values in sorted(found.items()):
        tail = sorted(values)[min(len(values) - 1, round(0.95 * len(values)))]
        middle = statistics.median(values)
        print(
            f"{name:<32} as measured: median {middle:7.1f}   p95 {tail:7.1f}"
            f"   scaled (1/{slow:.1f}): median {middle / slow:7.1f}   p95 {tail / slow:7.1f}"
        )


if __name__ == "__main__":
    main()
