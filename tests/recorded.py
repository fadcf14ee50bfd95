"""Reads a real run: 190 steps of examples/linear.py over two virtual replicas, with two switches of mode.

It was run with `--hidden 1024 --batch-size 2048` on a busy machine without a GPU, so steps take up to two seconds. The
file has the start of the run (monotonic ns), then, compressed, the source (0: training, 1: supervisor), length and
bytes of each payload.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

from synthetic import decoded

from dpmon.record.kinds import Call, Event, PhaseSpan, Record, Step

_FILE = Path(__file__).parent / "data" / "linear.records"


def linear_run() -> list[Record]:
    """Return its records in the order in which a screen would have read them."""
    data = _FILE.read_bytes()
    (start_ns,) = struct.unpack_from("<Q", data)
    body = zlib.decompress(data[8:])
    payloads: tuple[list[bytes], list[bytes]] = ([], [])
    at = 0
    while at < len(body):
        source, length = struct.unpack_from("<BI", body, at)
        payloads[source].append(body[at + 5 : at + 5 + length])
        at += 5 + length
    records = [record for each in payloads for record in decoded(each, origin_ns=start_ns)]
    calls = {record.step: record for record in records if isinstance(record, Call)}
    with_spans = (_with_spans(one, calls[one.step]) if isinstance(one, Step) else one for one in records)
    return sorted(with_spans, key=_end_ns)


def _with_spans(step: Step, call: Call) -> Step:
    """Add the spans that steps have today: backward and optimizer follow the call."""
    at = call.start_ns - step.start_ns
    spans = [PhaseSpan("data", 0, step.phases["data"])]
    for name in ("forward", "backward", "optimizer"):
        spans.append(PhaseSpan(name, at, step.phases[name]))
        at += step.phases[name]
    return replace(step, spans=tuple(spans))


def _end_ns(record: Record) -> float:
    if isinstance(record, Event):
        return float(record.data.get("t_s", 0.0)) * 1e9
    assert isinstance(record, (Call, Step))
    return record.start_ns + record.wall_ns
