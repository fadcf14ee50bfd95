"""A training process that does nothing but record: writes calls and steps into a ring of the run it is in.

    python writer.py RECORDS PER_SECOND [REPLICAS]

PER_SECOND 0: as fast as it can. Prints how many records it wrote and how many it could not (the definitions and the
process event included), so that a test can compare what was sent with what was seen.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dpmon.record.wire import pack_call, pack_definition, pack_event, pack_step
from dpmon.ring import Ring
from dpmon.ring_reader import RingReader

BURST_S = 0.01


def _open() -> tuple[Ring, str]:
    """A new ring of the run, with the definitions that all records refer to."""
    directory, start = os.environ["DPMON_RUN"], int(os.environ["DPMON_START_NS"])
    for process in range(64):
        path = f"{directory}/process-{process}.ring"
        try:
            ring = Ring(path, process=process, start_ns=start)
        except FileExistsError:
            continue
        ring.write(pack_event("process", {"process": process, "rank": None, "pid": os.getpid(), "t_s": 0.0}))
        return ring, path
    raise SystemExit("no ring is free")


def _define(ring: Ring, replicas: int) -> None:
    devices = [f"cpu:{index}" for index in range(replicas)]
    layout = {"root": "Model", "via": "DataParallel", "virtual": True, "devices": devices, "absent": {}}
    ring.write(pack_definition(1, layout))
    ring.write(pack_definition(2, [["0", [8 * replicas, 5], "float32", 160 * replicas]]))
    ring.write(pack_definition(3, [["0", [8, 5], "float32", 160]]))
    ring.write(pack_definition(4, [["", [8, 2], "float32", 64]]))


def main(records: int, rate: float, replicas: int, after: Callable[[int], object] = int) -> None:
    """Write `records` calls and steps in turn, `rate` a second; `after` is called with the number of each."""
    ring, path = _open()
    _define(ring, replicas)
    written, renew_at = 5, ring.capacity // 4
    shares = [3, 4, 20_000, 25_000] * replicas
    began = time.monotonic()
    for number in range(records):
        if rate:
            ahead = number / rate - (time.monotonic() - began)
            if ahead > BURST_S:
                time.sleep(ahead)
        now, step = time.monotonic_ns(), number // 2 + 1
        if number % 2:
            wall = 100_000 + step % 1000
            ring.write(pack_step(1, step, now, wall, 8 * replicas, (1000, 50_000, 40_000, 5000)))
        else:
            phases = [0, 5000, 5000, 15_000, 20_000, 25_000, 45_000, 5000]
            ring.write(pack_call(1, 7, 1, step, step, now, 50_000, 2, 4, phases, shares))
        written += 1
        after(number)
        if ring.head >= renew_at:
            _define(ring, replicas)
            written, renew_at = written + 4, ring.head + ring.capacity // 4
    # In one write: other threads of the tests' scripts print, too.
    print(f"{written} {RingReader(path).lost()}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 8)
