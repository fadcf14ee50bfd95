"""Writes rings as a training process does, for tests that need no training: of spans, or of rows in their place.

    python ring_writers.py --spans RING THREADS

THREADS threads write spans that show any damage, as fast as possible, until the process is killed.

    python ring_writers.py --spans RING

One thread writes the spans of a typical training, with an event every 20 steps, until the process is killed.

    python ring_writers.py --run RECORDS PER_SECOND [REPLICAS [HOLD]]

Writes the spans of RECORDS calls and steps, alternately, into a ring of the run DPMON_RUN: PER_SECOND of them a second
(0: as fast as possible). After record HOLD (counted from 0) it waits until the file `go` exists. Prints the number of
spans, so that a test can compare it with the number that was read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpmon.record.history_rows import Row
from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, SITE_AT, THREAD_AT, Flag, Kind, Span
from dpmon.span_reader import SpanReader, lines_path
from dpmon.span_ring import SLOTS, HeaderWord, RingError, SpanRing
from dpmon.store.rings import RingRow

if TYPE_CHECKING:
    import pytest

    from support.run_harness import Dpmon

TESTS = Path(__file__).resolve().parents[1]
"""The folder from which scripts import `support`."""
WRITE_SPANS = (Path(__file__).resolve(), "--spans")
WRITE_RUN = (Path(__file__).resolve(), "--run")
"""First words of the command lines above."""

_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def first_word(kind: int, *, flags: int = 0, inside: int = 0, thread: int = 0, site: int = 0) -> int:
    """Return the first word of a span."""
    return kind | flags << FLAGS_AT | inside << INSIDE_AT | thread << THREAD_AT | site << SITE_AT


def write_span(ring: SpanRing, span: Span) -> None:
    """Write a span into a ring."""
    word = first_word(span.kind, flags=span.flags, inside=span.inside, thread=span.thread, site=span.site)
    ring.put(word, span.start, span.took, span.inputs | span.outputs << 32)


def checkable_words(number: int, thread: int = 0) -> tuple[int, int, int, int]:
    """Return the words of span `number` of a thread, in which `own_number` finds any wrong word."""
    return first_word(Kind.CALL, thread=thread), number, number * _PRIME & _MASK, (number + 1) * _PRIME & _MASK


def check_words(span: Span) -> int:
    """Return the number of a span made by `checkable_words`, after a check of all its words."""
    words = (first_word(span.kind, thread=span.thread), span.start, span.took, span.inputs | span.outputs << 32)
    assert words == checkable_words(span.start, span.thread)
    return span.start


@contextmanager
def open_reader(path: Path | str, **place: int) -> Iterator[SpanReader]:
    """Open a reader that continues at a position."""
    reader = SpanReader(str(path))
    for name, value in place.items():
        setattr(reader, name, value)
    try:
        yield reader
    finally:
        reader.close()


def read_all_spans(reader: SpanReader, **options: Any) -> list[Span]:
    """Return all spans that can be read now."""
    found: list[Span] = []
    while not reader.at_end:
        part = reader.read(0, **options)
        found += part
        if not part:
            break
    return found


class Lines:
    """The file of lines beside a ring."""

    def __init__(self, ring: Path | str) -> None:
        self._fd = os.open(lines_path(str(ring)), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def put(self, **line: Any) -> None:
        """Append a line."""
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def define(self, number: int, value: Any) -> None:
        """Append a definition."""
        self.put(define=number, value=value)

    def close(self) -> None:
        os.close(self._fd)


class Children:
    """Processes started by a test; `end` kills all of them."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a Python with these arguments, and wait until it prints "ready"."""
        child = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True)
        self._started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def kill(self, child: subprocess.Popen[str]) -> None:
        """Kill a process, if it still runs."""
        if child.returncode is None:
            child.kill()
            child.communicate()

    def end(self) -> None:
        for child in self._started:
            self.kill(child)


def write_checkable_spans(path: str, threads: int) -> None:
    ring = SpanRing(path, process=0)
    print("ready", flush=True)

    def write_on(thread: int) -> None:
        for number in count():
            ring.put(*checkable_words(number, thread))

    for number in range(threads):
        threading.Thread(target=write_on, args=(number,)).start()


class SpanTraining:
    """A typical loop: fetch, call, backward, optimizer."""

    def __init__(
        self, path: str, process: int = 0, slots: int = SLOTS, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.ring = SpanRing(path, process=process, slots=slots)
        self.lines = Lines(path)
        self._process = process
        self._clock = clock
        now = clock()
        event = {"process": process, "rank": None, "pid": os.getpid() + process, "t_s": now / 1e9}
        self.lines.put(kind="process", at=now, **event)
        layout: dict[str, Any] = {
            "root": "Model",
            "via": None,
            "devices": ["cpu:0"],
            "absent": {},
            "module": 1,
            "dim": 0,
        }
        self.lines.define(1, layout)
        self.lines.define(2, [["0", [4, 5], "float32", 80]])
        self.lines.define(3, [["", [4, 2], "float32", 32]])
        self.lines.put(optimizer=0)
        self.steps = 0

    def now(self) -> int:
        return self._clock()

    def phase(self, kind: int, sizes: int = 0, **parts: int) -> None:
        """Write a phase."""
        began = self._clock()
        self.ring.words[HeaderWord.SPAN_START] = began
        self.ring.kinds[0] = kind
        now = self._clock()
        self.ring.put(first_word(kind, **parts), began, now - began, sizes)
        self.ring.kinds[0] = 0

    def step(self, phases: int = 4) -> None:
        """Write a step, or only its first phases."""
        each = (
            lambda: self.phase(Kind.FETCH),
            lambda: self.phase(Kind.CALL, 2 | 3 << 32, site=1, flags=Flag.TRAINING | Flag.GRAD | Flag.SINGLE),
            lambda: self.phase(Kind.BACKWARD),
            lambda: self.phase(Kind.OPTIMIZER, site=0),
        )
        for write_phase in each[:phases]:
            write_phase()
        self.steps += phases == len(each)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def warn(self, fill: str = "last") -> None:
        """Write an event that names a step."""
        now = self._clock()
        data = {"process": self._process, "t_s": now / 1e9, "text": f"warning {self.steps} in {{step}}", "step": None}
        self.lines.put(kind="warning", at=now, fill=fill, **data)

    def end(self) -> None:
        """Write the normal end of the process."""
        self.lines.put(end=True, uncaught=False)
        self.ring.words[HeaderWord.ENDED] = 1


def write_training_spans(path: str) -> None:
    """Write steps, but no more than the ring holds, so that none is overwritten; go on until killed."""
    training = SpanTraining(path, int(Path(path).stem.partition("-")[2]))
    print("ready", flush=True)
    while True:
        if training.steps < SLOTS // 8:
            training.step()
            if training.steps % 20 == 0:
                training.warn()
        time.sleep(0.0003)


# ------------------------------------------------------------------------------------------------ rows


class RowRing:
    """A ring that holds the newest `capacity` rows. Its file is empty."""

    made: ClassVar[dict[Path, RowRing]] = {}

    def __init__(self, path: Path, capacity: int = 1 << 20) -> None:
        path.touch()
        self.made[path] = self
        self.process = int(path.stem.removeprefix("process-"))
        self.capacity = capacity
        self.rows: list[Row] = []
        self.first = 0
        """Number of the first row that is still there."""

    def write(self, *rows: Row) -> None:
        self.rows += rows
        gone = max(len(self.rows) - self.capacity, 0)
        self.first += gone
        del self.rows[:gone]

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


class _RowSource:
    """Takes the place of dpmon.store.span_source.SpanSource."""

    def __init__(self, path: Path, row: RingRow | None) -> None:
        if path not in RowRing.made:
            raise RingError(f"{path}: not a ring")
        self._ring = RowRing.made[path]
        self.row = RingRow(path.name, self._ring.process, None, os.getpid(), missed=0 if row is None else row.missed)
        if row is not None and row.pid == os.getpid():
            self.row = replace(row)
        self.over = False
        self.unreadable = 0
        self._at = self.row.position
        self._missed = self.row.missed

    def read_rows(self, now_ns: int, gone: bool) -> tuple[list[Row], bool]:
        first = max(self._at, self._ring.first)
        self._missed += first - self._at
        self._at = self._ring.end
        self.over = self.over or gone
        return self._ring.rows[first - self._ring.first :], False

    def update_position(self) -> None:
        row = self.row
        row.position, row.ended, row.missed = self._at, self.over, self._missed + self.unreadable

    def close(self) -> None:
        pass


def _count_unread_rows(path: Path, row: RingRow | None) -> int:
    return RowRing.made[path].end - (0 if row is None else row.position)


def use_row_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let supervisors and readers of this process read rings of rows in place of spans."""
    monkeypatch.setattr(RowRing, "made", {})
    monkeypatch.setattr("dpmon.store.ring_drain.SpanSource", _RowSource)
    monkeypatch.setattr("dpmon.store.store_opening.count_unread_spans", _count_unread_rows)


def make_row_ring(path: Path, rows: Iterable[Row]) -> RowRing:
    """Make a ring that holds `rows`."""
    found = RowRing(path)
    found.write(*rows)
    return found


# ------------------------------------------------------------------------------------------------ a whole run

BURST_S = 0.01
SPANS_PER_STEP = 4
"""Spans of a step: fetch (with the number of the step), call, backward pass and optimizer."""


def _create_ring() -> tuple[SpanRing, Lines]:
    """Make a new ring in the run."""
    directory, start = os.environ["DPMON_RUN"], int(os.environ["DPMON_START_NS"])
    for process in range(64):
        path = f"{directory}/process-{process}.ring"
        try:
            ring = SpanRing(path, process=process, start_ns=start)
        except FileExistsError:
            continue
        lines = Lines(path)
        event = {"process": process, "rank": None, "pid": os.getpid(), "t_s": 0.0}
        lines.put(kind="process", at=monotonic_ns(), **event)
        return ring, lines
    raise SystemExit("no ring is free")


def _define_module(lines: Lines, replicas: int) -> None:
    devices = [f"cpu:{index}" for index in range(replicas)]
    layout = {"root": "Model", "via": "DataParallel", "devices": devices, "absent": {}, "module": 1}
    lines.define(1, layout)
    lines.define(2, [["0", [8 * replicas, 5], "float32", 160 * replicas]])
    lines.define(3, [["", [8 * replicas, 2], "float32", 64 * replicas]])


def write_run(records: int, rate: float, replicas: int, after: Callable[[int], object] = int) -> None:
    """Write spans for `records` calls and steps, `rate` a second; call `after` with the number of each."""
    ring, lines = _create_ring()
    _define_module(lines, replicas)
    put, written = ring.put, 0
    fetch, backward, optimizer = first_word(Kind.FETCH), first_word(Kind.BACKWARD), first_word(Kind.OPTIMIZER, site=1)
    call = first_word(Kind.CALL, flags=Flag.TRAINING | Flag.GRAD | Flag.DP | Flag.VIRTUAL, site=1)
    began, now = time.monotonic(), monotonic_ns()
    for number in range(records):
        if rate:
            ahead = number / rate - (time.monotonic() - began)
            if ahead > BURST_S:
                time.sleep(ahead)
        before, now = now, monotonic_ns()
        if number % 2:
            put(backward, before, now - before, 0)
            before, now = now, monotonic_ns()
            written = put(optimizer, before, now - before, 0)
        else:
            put(fetch, before, now - before, number // 2 + 1)
            before, now = now, monotonic_ns()
            written = put(call, before, now - before, 2 | 3 << 32)
        ring.words[HeaderWord.SPAN_START] = now  # as the tracer does; else the process seems to stand still
        after(number)
    lines.put(end=True, uncaught=False)
    ring.words[HeaderWord.ENDED] = 1
    # In one write, because other threads of the script also print.
    print(f"sent {written + 1}", flush=True)


def calls_and_steps_in(records: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return kind and number of every step and its calls in order, without a call of a step that was lost."""
    return [(r["kind"], r["step"]) for r in records if r["kind"] in ("call", "step") and r["step"]]


def has_written(dpmon: Dpmon, count: int) -> bool:
    """Return whether the writer has written `count` calls and steps, including overwritten ones."""
    path = dpmon.last() / "process-0.ring"
    if not path.exists():
        return False
    try:
        reader = SpanReader(str(path))
    except RingError:  # being created
        return False
    begun = 0
    while spans := reader.read(time.monotonic_ns()):
        begun = max(begun, *(span.inputs for span in spans if span.kind == Kind.FETCH), 0)
    reader.close()
    return 2 * (begun - 1) >= count


def calls_and_steps_of_writer(count: int) -> list[tuple[str, int]]:
    """Return the records of the writer: a call and a step for every step."""
    return [("step" if n % 2 else "call", n // 2 + 1) for n in range(count)]


WRITE_RUN_AND_STAY = *WRITE_RUN, 16_000, 6000, 8, 15_999
"""Writes no more than its ring can hold, so that no record is overwritten, and stays until it is killed."""


def _main(option: str, *words: str) -> None:
    if option == "--spans" and len(words) == 1:
        write_training_spans(words[0])
    elif option == "--spans":
        write_checkable_spans(words[0], int(words[1]))
    else:
        replicas = int(words[2]) if len(words) > 2 else 8
        hold = int(words[3]) if len(words) > 3 else None

        def wait_after_hold(number: int) -> None:
            while number == hold and not Path("go").exists():
                time.sleep(0.01)

        write_run(int(words[0]), float(words[1]), replicas, int if hold is None else wait_after_hold)


if __name__ == "__main__":
    _main(*sys.argv[1:])
