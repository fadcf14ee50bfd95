"""How long dpmon takes to start: until the script's first line, until the first picture, and over a whole run.

    python tests/benchmarks/bench_start.py [--rounds 15]

Each round runs all ways in random order; "alone" runs twice, and the difference between its two results is the noise.
"smallest Textual app" is what any screen takes; the difference to it is dpmon's own part.
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

from yardstick import Yardstick, processor_s

from support.run_harness import Dpmon, Terminal

_SCRIPT = "import time; print(time.monotonic_ns(), flush=True)"
_SMALLEST = """
from textual.app import App
from textual.widget import Widget
class Smallest(App):
    CSS = "Screen { overflow: hidden; }"
    def compose(self):
        yield Words()
class Words(Widget):
    def render(self):
        return "Devices"
Smallest().run()
"""
"""What no screen can do without: the interpreter, and the import and the start of Textual."""


def first_line(dpmon: Dpmon, words: list[str]) -> tuple[float, float]:
    """Return the times until the script's first line and until the end, ms."""
    began = time.monotonic_ns()
    done = subprocess.run(
        words, cwd=dpmon.cwd, env=dpmon.environment(), stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    ended = time.monotonic_ns()
    return (int(done.stdout.split()[0]) - began) / 1e6, (ended - began) / 1e6


def first_picture(dpmon: Dpmon, *words: object, argv: list[str] | None = None) -> tuple[float, float]:
    """Return the time until a screen has drawn a panel, and its processor time until then, ms; then kill it."""
    began = time.monotonic_ns()
    terminal = Terminal(dpmon, *words, argv=argv, TERM="xterm-256color")
    while b"Devices" not in terminal.take():
        time.sleep(0.001)
    took = (time.monotonic_ns() - began) / 1e6
    spent = processor_s(terminal.process.pid) * 1000
    terminal.process.kill()
    terminal.wait()
    return took, spent


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

        def picture(name: str, *words: object, argv: list[str] | None = None) -> Callable[[], None]:
            def take() -> None:
                took, spent = first_picture(dpmon, *words, argv=argv)
                found.setdefault(f"{name}: first picture", []).append(took)
                found.setdefault(f"{name}: its processor", []).append(spent)

            return take

        def screen() -> None:
            picture("with a screen", "wait.py")()
            picture("attach", "attach", "last")()
            dpmon.run("stop", "last")

        def help_text() -> None:
            began = time.monotonic_ns()
            dpmon.run("--help")
            found.setdefault("--help", []).append((time.monotonic_ns() - began) / 1e6)

        ways = [
            run("alone", [sys.executable, "script.py"]),
            run("alone again", [sys.executable, "script.py"]),
            run("headless", dpmon.words("script.py")),
            screen,
            picture("smallest Textual app", argv=[sys.executable, "-c", _SMALLEST]),
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
