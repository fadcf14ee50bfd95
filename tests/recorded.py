"""Reads a real run: 190 steps of examples/linear.py over two virtual replicas, with two switches of mode.

It was run with `--hidden 1024 --batch-size 2048` on a busy machine without a GPU, so steps take up to two seconds. The
file is compressed JSON: the start of the run (monotonic ns), then the source (0: training, 1: supervisor), class and
members of each row.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from synthetic import decoded, with_other

from dpmon.record.history_rows import CallParts, CallRow, Definition, Row
from dpmon.record.record_types import Call, Event, Record, Step
from dpmon.record.schema import SPAN_PHASES

_FILE = Path(__file__).parent / "data" / "linear.records"
_ROWS = {"CallRow": CallRow, "Definition": Definition, "Event": Event}


def linear_run() -> list[Record]:
    """Return its records in the order in which a screen would have read them."""
    data = json.loads(zlib.decompress(_FILE.read_bytes()))
    rows: tuple[list[Row], list[Row]] = ([], [])
    for source, kind, members in data["rows"]:
        rows[source].append(_row(kind, members))
    records = [record for each in rows for record in decoded(each, origin_ns=data["start_ns"])]
    calls = {record.step: record for record in records if isinstance(record, Call)}
    with_spans = (_with_spans(one, calls[one.step]) if isinstance(one, Step) else one for one in records)
    return sorted(with_spans, key=_end_ns)


def _row(kind: str, members: list[Any]) -> Any:
    if kind == "CallRow":
        return CallRow(*members[:-1], CallParts(*members[-1]))
    if kind == "StepRow":
        step, mode, start, wall, phases, counts, *rest = members
        samples = counts.pop("samples", None)
        return Step(0, None, step, mode, start, wall, samples, with_other(phases, wall), counts, *rest)
    return _ROWS[kind](*members)


def _with_spans(step: Step, call: Call) -> Step:
    """Add the spans that steps have today: backward and optimizer follow the call."""
    at = call.start_ns - step.start_ns
    runs = [(0, 0, step.phases["data"])]
    for name in ("forward", "backward", "optimizer"):
        runs.append((SPAN_PHASES.index(name), at, step.phases[name]))
        at += step.phases[name]
    return step._replace(runs=runs)


def _end_ns(record: Record) -> float:
    if isinstance(record, Event):
        return float(record.data.get("t_s", 0.0)) * 1e9
    assert isinstance(record, (Call, Step))
    return record.start_ns + record.wall_ns
