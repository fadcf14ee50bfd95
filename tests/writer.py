"""Simulates a training process: writes spans into a ring of its run.

    python writer.py RECORDS PER_SECOND [REPLICAS [HOLD]]

The spans result in RECORDS calls and steps, alternately, PER_SECOND of them a second (0: as fast as possible). After
record HOLD (counted from 0) it waits until the file `go` exists. Prints the number of spans, so that a test can compare
it with the number that was read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spans import Lines, head

from dpmon.record.span_format import Flag, Kind
from dpmon.span_ring import HeaderWord, SpanRing

BURST_S = 0.01
SPANS = 4
"""Spans of a step: fetch (with the number of the step), call, backward pass and optimizer."""


def _open() -> tuple[SpanRing, Lines]:
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


def _define(lines: Lines, replicas: int) -> None:
    devices = [f"cpu:{index}" for index in range(replicas)]
    layout = {"root": "Model", "via": "DataParallel", "devices": devices, "absent": {}, "module": 1}
    lines.define(1, layout)
    lines.define(2, [["0", [8 * replicas, 5], "float32", 160 * replicas]])
    lines.define(3, [["", [8 * replicas, 2], "float32", 64 * replicas]])


def main(records: int, rate: float, replicas: int, after: Callable[[int], object] = int) -> None:
    """Write spans for `records` calls and steps, `rate` a second; call `after` with the number of each."""
    ring, lines = _open()
    _define(lines, replicas)
    put, written = ring.put, 0
    fetch, backward, optimizer = head(Kind.FETCH), head(Kind.BACKWARD), head(Kind.OPTIMIZER, site=1)
    call = head(Kind.CALL, flags=Flag.TRAINING | Flag.GRAD | Flag.DP | Flag.VIRTUAL, site=1)
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


def hold(number: int) -> None:
    """Wait after record HOLD."""
    while number == int(sys.argv[4]) and not Path("go").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    replicas = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    main(int(sys.argv[1]), float(sys.argv[2]), replicas, hold if len(sys.argv) > 4 else int)
