"""Writes spans and their lines as a training process does, for tests that need no training.

    python spans.py RING THREADS

THREADS threads write spans that show any damage, as fast as possible, until the process is killed.

    python spans.py RING

One thread writes the spans of a typical training, with an event every 20 steps, until the process is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, SITE_AT, THREAD_AT, Flag, Kind, Span
from dpmon.span_reader import SpanReader, lines_path
from dpmon.span_ring import SLOTS, HeaderWord, SpanRing

_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def head(kind: int, *, flags: int = 0, inside: int = 0, thread: int = 0, site: int = 0) -> int:
    """Return the first word of a span."""
    return kind | flags << FLAGS_AT | inside << INSIDE_AT | thread << THREAD_AT | site << SITE_AT


def put(ring: SpanRing, span: Span) -> None:
    """Write a span into a ring."""
    word = head(span.kind, flags=span.flags, inside=span.inside, thread=span.thread, site=span.site)
    ring.put(word, span.start, span.took, span.inputs | span.outputs << 32)


def numbered(number: int, thread: int = 0) -> tuple[int, int, int, int]:
    """Return the words of span `number` of a thread, in which `own_number` finds any wrong word."""
    return head(Kind.CALL, thread=thread), number, number * _PRIME & _MASK, (number + 1) * _PRIME & _MASK


def own_number(span: Span) -> int:
    """Return the number of a span made by `numbered`, after a check of all its words."""
    words = (head(span.kind, thread=span.thread), span.start, span.took, span.inputs | span.outputs << 32)
    assert words == numbered(span.start, span.thread)
    return span.start


@contextmanager
def opened(path: Path | str, **place: int) -> Iterator[SpanReader]:
    """Open a reader that continues at a position."""
    reader = SpanReader(str(path))
    for name, value in place.items():
        setattr(reader, name, value)
    try:
        yield reader
    finally:
        reader.close()


def everything(reader: SpanReader, **options: Any) -> list[Span]:
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


def write(path: str, threads: int) -> None:
    ring = SpanRing(path, process=0)
    print("ready", flush=True)

    def write_on(thread: int) -> None:
        for number in count():
            ring.put(*numbered(number, thread))

    for number in range(threads):
        threading.Thread(target=write_on, args=(number,)).start()


class Training:
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
        layout = {"root": "Model", "via": None, "devices": ["cpu:0"], "absent": {}, "module": 1, "dim": 0, "first": 0}
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
        self.ring.put(head(kind, **parts), began, now - began, sizes)
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


def train(path: str) -> None:
    """Write steps, but no more than the ring holds, so that none is overwritten; go on until killed."""
    training = Training(path, int(Path(path).stem.partition("-")[2]))
    print("ready", flush=True)
    while True:
        if training.steps < SLOTS // 8:
            training.step()
            if training.steps % 20 == 0:
                training.warn()
        time.sleep(0.0003)


if __name__ == "__main__" and len(sys.argv) == 2:
    train(sys.argv[1])
elif __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
