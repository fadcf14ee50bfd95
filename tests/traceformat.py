"""A strict reader of Chrome's trace event format. It rejects what Perfetto silently drops or repairs.

Perfetto's own trace processor is not used, because its Python package downloads it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

_COMMON = {"ph", "name", "pid", "tid", "args"}
_MEMBERS = {"X": {"ts", "dur"}, "C": {"ts"}, "i": {"ts", "s"}, "M": set()}
_META = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name",
         "thread_sort_index": "sort_index"}  # fmt: skip


class Trace:
    """Contents of a trace: slices by track name, counters by process and name, instants."""

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self.slices: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self.counters: dict[tuple[str, str], list[tuple[float, dict[str, float]]]] = defaultdict(list)
        self.instants: list[dict[str, Any]] = []

    def tracks(self, process: str) -> list[str]:
        """Return the names of the tracks of one process with slices."""
        return sorted(track for name, track in self.slices if name == process)


def read(text: str) -> Trace:
    """Return the trace in `text`. AssertionError if it violates the format, or a viewer could not place an event."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    events = json.loads(text, parse_constant=refuse)
    assert isinstance(events, list)
    trace = Trace()
    owners: dict[int, int] = {}
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        _check(event)
        pid, tid = event["pid"], event["tid"]
        if event["ph"] == "M":
            _meta(trace, event)
            continue
        assert pid in trace.processes, f"process {pid} has no name yet"
        if event["ph"] == "C":
            assert event["args"], "a counter without a value"
            assert all(_number(value) for value in event["args"].values()), event
            trace.counters[trace.processes[pid], event["name"]].append((event["ts"], event["args"]))
            continue
        assert (pid, tid) in trace.threads, f"track {tid} has no name yet"
        assert owners.setdefault(tid, pid) == pid, "one thread id in two processes"
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            trace.instants.append(event)
        else:
            found[pid, tid].append(event)
    for (pid, tid), slices in found.items():
        _nested(slices)
        trace.slices[trace.processes[pid], trace.threads[pid, tid]] += slices
    return trace


def _check(event: Any) -> None:
    assert isinstance(event, dict)
    assert event["ph"] in _MEMBERS, event
    assert set(event) == _COMMON | _MEMBERS[event["ph"]], event
    assert isinstance(event["name"], str)
    assert event["name"]
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    assert 0 <= event["pid"] < 1 << 31
    assert 0 <= event["tid"] < 1 << 31
    assert isinstance(event["args"], dict)
    for member in ("ts", "dur"):
        assert member not in event or (_number(event[member]) and event[member] >= 0), event


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _meta(trace: Trace, event: dict[str, Any]) -> None:
    member = _META[event["name"]]
    value = event["args"][member]
    if event["name"] == "process_name":
        assert event["pid"] not in trace.processes
        trace.processes[event["pid"]] = value
    elif event["name"] == "thread_name":
        assert event["pid"] in trace.processes
        trace.threads[event["pid"], event["tid"]] = value
    else:
        assert type(value) is int


def _ns(us: float) -> int:
    """Convert µs to ns as Perfetto does: cut off the fraction (CoerceToTs in its json_utils.cc)."""
    return int(us * 1000.0)


def _nested(slices: list[dict[str, Any]]) -> None:
    """Check that slices of a track are nested or separate, and that of slices with one start the outer comes first.

    Perfetto drops a slice that ends after its outer one (slice_drop_overlapping_complete_event).
    """
    open_until: list[int] = []
    for event in sorted(slices, key=lambda event: _ns(event["ts"])):
        begin = _ns(event["ts"])
        end = begin + _ns(event["dur"])
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{event['name']} reaches out of the slice it began in"
        open_until.append(end)
