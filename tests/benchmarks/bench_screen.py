"""The cost of the screen and its response times, with generated records, in a real terminal (a pty) of 120x40.

    python tests/benchmarks/bench_screen.py [--seconds 20] [--rounds 20] [--only cost,nodes,quiet,keys,memory,attach]

cost: 8 GPUs, 8 replicas, 100 steps a second: share of a core and bytes to the terminal, at 1 and 2 pictures a second,
the first one twice; and 64 and 256 ranks, of which one is slow, at 10 and 4 steps a second
nodes: 1,000 ranks on 125 nodes, one rollup a second, as a mirror writes them: share of a core and bytes, after 40 s and
after as long again; and when another rank becomes the slowest: from its first record to its name on the screen
quiet: the same run after its end: bytes to the terminal when nothing changes
keys: 5,000 records and 1,000 lines of output a second: from a key to its answer on the terminal; `esc` apart, since it
may be the beginning of another key's sequence, which is waited for
memory: a hundred thousand steps, 2,500 a second: the largest resident memory of the screen on the way
attach: from the command to the first panel, for a run of a day at ten steps a second; and how much later all panels are
there

Figures are given as measured on this machine, and scaled to the reference by processor time (see yardstick.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import random
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from dpmon.record.history_rows import Row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
from bench_store import Live
from yardstick import Yardstick, peak_mib, processor_s

from dpmon.run import proc
from dpmon.run.lifecycle import build_exit_info
from dpmon.run.mirror_state import STATE_FILE, activities_by_word
from dpmon.run.run_directory import write_info
from dpmon.run.safe_files import write_atomically
from dpmon.store.ring_drain import RingDrain
from support.history_builders import make_live_run
from support.rank_builders import EXPOSED_MS, MS, USUAL_PHASES_MS, ManyNodes, ddp_rank_steps, make_ranks, startup_rows
from support.record_builders import Training, device_event, host_event
from support.ring_writers import RowRing, use_row_rings

WIDTH, HEIGHT = 120, 40
_STEP_MS = sum(USUAL_PHASES_MS.values()) + EXPOSED_MS + 6.0
"""A step of `joined_steps` with a slow rank."""
_SHOW = """
import sys
from pathlib import Path
from dpmon.ui.app import run_screen
run_screen(Path(sys.argv[1]), refresh=float(sys.argv[2]))
"""


class Generated:
    """A run with ring, device samples and output written by this process at a given rate."""

    def __init__(self, directory: Path, steps_per_s: float, lines_per_s: float, ranks: int = 1) -> None:
        self.directory = directory
        self.info = make_live_run(
            directory, supervisor_pid=os.getpid(), supervisor_started=proc.start_time_s(os.getpid())
        )
        self.rates = steps_per_s, lines_per_s
        self.over = threading.Event()
        self.writers: list[tuple[RowRing, Training]] = []
        use_row_rings(pytest.MonkeyPatch())
        step_ns = int(0.98e9 / steps_per_s)
        self.steps: Iterator[list[list[Row]]]
        usual: dict[str, Any] = {"batch": 256, "start_ns": self.info.start_ns}
        if ranks == 1:
            alone = Training(devices=[f"cuda:{n}" for n in range(8)], virtual=False, step_ns=step_ns, **usual)
            started, self.steps = {alone: alone.begin()}, ([alone.step()] for _ in count())
        else:
            together = make_ranks(ranks, **usual)
            started = {one: startup_rows(one, ranks, {}) for one in together}
            self.steps = ddp_rank_steps(together, slow=1, times=step_ns / MS / _STEP_MS)
        for training, rows in started.items():
            ring = RowRing(directory / f"process-{training.process}.ring", 8000)
            ring.write(*rows)
            self.writers.append((ring, training))
        self.drain = RingDrain(directory, self.info)
        self.thread = threading.Thread(target=self._write)

    def __enter__(self) -> Generated:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.over.is_set():
            self.over.set()
            self.thread.join()
            self.drain.flush(command_ended=True)
            self.drain.close()

    def end(self) -> None:
        """Stop writing, and record the exit."""
        self.__exit__()
        write_info(self.directory, build_exit_info(self.info, 0, "supervisor"))

    def _write(self) -> None:
        steps_per_s, lines_per_s = self.rates
        began, lines, sampled = time.monotonic(), 0, 0
        chance = random.Random(1)
        with (self.directory / "output.log").open("ab", buffering=0) as log:
            while not self.over.wait(0.02):
                spent = time.monotonic() - began
                while self.writers[0][1].steps < spent * steps_per_s:
                    for (ring, _), rows in zip(self.writers, next(self.steps), strict=True):
                        ring.write(*rows)
                due = int(spent * lines_per_s)
                log.write(b"".join(b"line %d loss 0.4119 of the epoch\n" % i for i in range(lines, due)))
                lines = max(lines, due)
                if spent > sampled:
                    sampled += 1
                    for index in range(8):
                        values = {"util_pct": chance.randint(40, 99), "power_w": chance.uniform(400, 700)}
                        values |= {
                            "temperature_c": chance.randint(60, 70),
                            "mem_used_bytes": chance.randint(60, 80) << 30,
                        }
                        self.drain.emit("device", device_event(spent, index, **values).data)
                    self.drain.emit("host", host_event(spent, chance.uniform(20, 90), None).data)
                self.drain.poll(time.monotonic())


class Shown:
    """The screen in a pty, which counts the bytes that it writes."""

    def __init__(
        self,
        directory: Path,
        refresh: float,
        *,
        size: tuple[int, int] = (HEIGHT, WIDTH),
        command: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the screen, or another program with further environment variables, in `size` rows and columns."""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            command or [sys.executable, "-c", _SHOW, str(directory), str(refresh)],
            stdin=slave, stdout=slave, stderr=slave, env={**env, **(variables or {})}, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = bytearray()

    def pump(self, seconds: float) -> None:
        """Read the output for `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 1 << 16)

    def until(self, text: bytes, start: int = 0, limit: float = 30.0) -> float:
        """Wait until `text` is written; return the time, s."""
        began = time.monotonic()
        while text not in self.seen[start:]:
            if time.monotonic() - began > limit:
                raise SystemExit(f"never came: {text!r}")
            if select.select([self.master], [], [], 1)[0]:
                self.seen += os.read(self.master, 1 << 16)
        return time.monotonic() - began

    def press(self, key: bytes) -> None:
        """Type."""
        os.write(self.master, key)

    def close(self) -> None:
        """End the screen."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):
            while self.process.poll() is None:
                if select.select([self.master], [], [], 0.1)[0]:
                    os.read(self.master, 1 << 16)
        self.process.wait()
        os.close(self.master)


@contextlib.contextmanager
def screen(refresh: float, steps: float = 100, lines: float = 2, ranks: int = 1) -> Iterator[tuple[Generated, Shown]]:
    """Start a run and its screen."""
    with tempfile.TemporaryDirectory() as place, Generated(Path(place), steps, lines, ranks) as run:
        shown = Shown(run.directory, refresh)
        try:
            shown.until(b"samples/s")
            shown.pump(4)
            yield run, shown
        finally:
            shown.close()


def cost(seconds: float) -> None:
    """Processor and bytes."""
    yardstick = Yardstick()
    for hertz, ranks, steps, budget in (
        (1, 1, 100, 2),
        (1, 1, 100, 2),
        (2, 1, 100, 4),
        (1, 64, 10, 2),
        (2, 64, 10, 4),
        (1, 256, 4, 2),
    ):
        with screen(1 / hertz, steps, ranks=ranks) as (_, shown):
            used, written = processor_s(shown.process.pid), len(shown.seen)
            shown.pump(seconds)
            used, written = processor_s(shown.process.pid) - used, len(shown.seen) - written
        percent, slow = used / seconds * 100, yardstick.since()
        print(
            f"cost at {hertz} Hz, {ranks:3} processes: {percent:6.2f}% of a core as measured, {percent / slow:6.2f}"
            f" scaled (1/{slow:.1f}), budget {budget}; {written / seconds / 1000:5.2f} kB/s, budget 5",
            flush=True,
        )


class Mirrored:
    """A mirror's run, written by this process."""

    def __init__(self, directory: Path, nodes: int) -> None:
        own = {"supervisor_pid": os.getpid(), "supervisor_started": proc.start_time_s(os.getpid())}
        self.directory, names = directory, tuple(f"gpu-{number}" for number in range(nodes))
        self.info = make_live_run(directory, nodes=names, **own)
        self.run = ManyNodes(nodes, slow=11, directory=directory)
        self.over = threading.Event()
        self.next = 11
        """The rank that is slow from the next second on."""
        self.slow_since = 0.0
        """When the first record of a slow rank was written."""
        self.thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        for second in range(1 << 20):
            due = self.info.start_ns / 1e9 + second + 1
            if self.over.wait(max(due - time.monotonic(), 0)):
                return
            fresh, self.run.slow = self.run.slow != self.next, self.next
            self.run.second(second)
            self.slow_since = time.monotonic() if fresh else self.slow_since
            doing = activities_by_word(dict.fromkeys(range(self.run.ranks), ("backward", second * 10**9)))
            write_atomically(
                self.directory / STATE_FILE, json.dumps({"doing": doing, "connected": [*range(self.run.nodes)]})
            )


def nodes(seconds: float) -> None:
    """Processor, bytes and delay with many nodes."""
    yardstick = Yardstick()
    with tempfile.TemporaryDirectory() as place:
        mirrored = Mirrored(Path(place), 125)
        mirrored.thread.start()
        shown = Shown(Path(place), 1.0)
        try:
            shown.until(b"125 nodes")
            for warm in (40.0, seconds):
                shown.pump(warm)
                used, written = processor_s(shown.process.pid), len(shown.seen)
                yardstick.since()
                shown.pump(seconds)
                used, written = processor_s(shown.process.pid) - used, len(shown.seen) - written
                percent, slow = used / seconds * 100, yardstick.since()
                peak, per_s = peak_mib(shown.process.pid), written / seconds / 1000
                print(
                    f"1,000 ranks: {percent:.2f}% of a core as measured, {percent / slow:.2f} scaled (1/{slow:.1f}),"
                    f" budget 2; {per_s:.2f} kB/s, budget 5; {peak:.0f} MiB at most",
                    flush=True,
                )
            delays = []
            for rank in (506, 980, 184):
                shown.pump(3)
                start, mirrored.slow_since, mirrored.next = len(shown.seen), 0.0, rank
                while not mirrored.slow_since:
                    shown.pump(0.01)
                shown.until(str(rank).encode(), start)
                delays.append(time.monotonic() - mirrored.slow_since)
            print(f"another rank is the slowest: shown after {', '.join(f'{one:.1f}' for one in delays)} s, budget 2")
        finally:
            mirrored.over.set()
            mirrored.thread.join()
            shown.close()


def quiet(seconds: float) -> None:
    """Bytes when nothing changes."""
    with screen(1.0) as (run, shown):
        run.end()
        shown.until("● finished".encode())
        shown.pump(2)
        written = len(shown.seen)
        shown.pump(seconds)
        written = len(shown.seen) - written
    print(f"quiet: {written / seconds:.0f} B/s", flush=True)


def keys(rounds: int) -> None:
    """From a key to its answer, under load."""
    yardstick = Yardstick()
    with screen(1.0, steps=2500, lines=1000) as (_, shown):
        took: list[float] = []
        alone: list[float] = []
        for _ in range(rounds):
            for key, answer in ((b"?", b"Panels"), (b"\x1b", b"Devices"), (b" ", b"FROZEN"), (b" ", b"freeze")):
                shown.pump(random.uniform(0.15, 0.5))  # an esc and a key soon after it are one key
                start = len(shown.seen)
                shown.press(key)
                (alone if key == b"\x1b" else took).append(shown.until(answer, start) * 1000)
    slow = yardstick.since()
    for name, found in (("keys but esc", took), ("esc", alone)):
        found.sort()
        tail = found[round(0.95 * (len(found) - 1))]
        print(
            f"{name}: median {statistics.median(found):.0f} ms, p95 {tail:.0f}, longest {found[-1]:.0f} as measured; "
            f"scaled (1/{slow:.1f}) p95 {tail / slow:.0f}, budget 100"
            + ("" if name != "esc" else " (of which the wait for a sequence is not)"),
            flush=True,
        )


def memory() -> None:
    """Resident memory of the screen over many steps."""
    with screen(1.0, steps=2500, lines=1000) as (run, shown):
        (_, training), found = run.writers[0], []
        for steps in (10_000, 20_000, 50_000, 100_000):
            while training.steps < steps:
                shown.pump(0.1)
            found.append(f"{peak_mib(shown.process.pid):.1f} MiB at {steps:,} steps")
    print("memory: " + ", ".join(found), flush=True)


def attach(rounds: int) -> None:
    """To a run of a day at ten steps a second."""
    with tempfile.TemporaryDirectory() as place:
        live = Live(Path(place), 1)
        yardstick = Yardstick()
        first, figures = [], []
        for _ in range(rounds):
            live.go_on()
            began = time.monotonic()
            shown = Shown(live.directory, 1.0)
            shown.until(b"Devices")
            first.append((time.monotonic() - began) * 1000)
            figures.append(shown.until(b"steps seen") * 1000)
            shown.close()
    slow = yardstick.since()
    for name, took in (("first panel", sorted(first)), ("all panels after that", sorted(figures))):
        middle, tail = statistics.median(took), took[round(0.95 * (len(took) - 1))]
        print(
            f"attach, {name}: median {middle:.0f} ms, p95 {tail:.0f} as measured; "
            f"scaled (1/{slow:.1f}) {middle / slow:.0f} and {tail / slow:.0f}, budget 300",
            flush=True,
        )


def main() -> None:
    """Run the chosen measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="cost,nodes,quiet,keys,memory,attach")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    print(Yardstick().state(), flush=True)
    takes: dict[str, Callable[[], None]] = {
        "cost": lambda: cost(options.seconds),
        "nodes": lambda: nodes(options.seconds),
        "quiet": lambda: quiet(options.seconds),
        "keys": lambda: keys(options.rounds),
        "memory": memory,
        "attach": lambda: attach(options.rounds),
    }
    for name in options.only.split(","):
        takes[name]()


if __name__ == "__main__":
    main()
