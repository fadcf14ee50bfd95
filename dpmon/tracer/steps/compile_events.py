"""Reads what torch.compile has compiled from the statistics that dynamo keeps anyway; imports and logs nothing."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

from dpmon.record.shared_names import innermost_script_line, shorten_name
from dpmon.tracer.core.session import Session

POLL_NS, GROWTH, MAX_LINES = 1_000_000_000, 1.1, 8
"""Interval between polls; smallest growth between two records; maximum number of lines in a list."""
_GUARD = re.compile(r"^\d+/\d+: (.*?)(?:  #|\n|$)")
_NUMBER = re.compile(r"[\d.]+(?:e-?\d+)?")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class CompileReader:
    """The reader of one process's compilations."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._due_ns = self._recorded_count = 0

    def poll(self, now: int) -> int:
        """Record what was compiled if there is at least a tenth more. Return when to call again (monotonic ns)."""
        if now >= self._due_ns:
            self._due_ns = now + POLL_NS
            self._record(GROWTH)
        return self._due_ns

    def at_exit(self) -> None:
        """Record what was compiled since the last record, because the process ends."""
        self._record(1)

    def _record(self, growth: float) -> None:
        if self._session.ring is None:
            return
        with self._session.hidden("compilations"):
            utils: Any = sys.modules.get("torch._dynamo.utils")
            count = utils.counters.get("frames", {}).get("ok", 0) if utils else 0
            if count > self._recorded_count * growth:
                self._recorded_count = count
                self._session.record_event("compiles", compilations=count, **_read(utils))


def _read(utils: Any) -> dict[str, Any]:
    """Return the fields of a record `compiles`, from what dynamo keeps: all graph breaks, the last 64 compilations."""
    if not hasattr(getattr(utils, "CompilationMetrics", None), "recompile_reason"):
        return {"absent": {"again": "this version of torch does not keep the reasons of its compilations"}}
    times, breaks = utils.compilation_time_metrics, {}
    for item in utils.graph_break_reasons:
        line = innermost_script_line((frame.filename, frame.lineno) for frame in item.user_stack)
        breaks[line or "a library"] = shorten_name(item.reason.partition("\n")[0])
    repeated = [entry for entry in utils._compilation_metrics if re.search(r"/[1-9]\d*$", str(entry.compile_id))]
    counts, guards, places = Counter[tuple[str, int, str]](), {}, {}
    for entry in repeated:
        match = _GUARD.match(entry.recompile_reason or "")  # backward graphs have none
        if match is not None:
            guard = shorten_name(match[1].rstrip())
            form = _NUMBER.sub("0", guard)  # equal for guards that differ only in numbers
            repetition = entry.co_filename, entry.co_firstlineno, form
            counts[repetition] += 1
            guards[repetition] = guard
            frames = _FRAME.findall(entry.recompile_reason)
            if frames or repetition not in places:  # dynamo has the guard's line only the first time
                lines = [(entry.co_filename, entry.co_firstlineno), *frames]
                places[repetition] = innermost_script_line(lines) or entry.co_name
    again = [[places[repetition], guards[repetition], count] for repetition, count in counts.most_common(MAX_LINES)]
    return {
        "seconds": sum(times.get("_compile.compile_inner", ())) + sum(times.get("backward._backward_impl", ())),
        "seconds_again": sum(entry.duration_us or 0 for entry in repeated) / 1e6,
        "again": again,
        "graph_breaks": [*breaks.items()][-MAX_LINES:],
        "absent": {},
    }
