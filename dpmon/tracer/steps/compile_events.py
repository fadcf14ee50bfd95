"""Reads what torch.compile has compiled from the statistics that dynamo keeps anyway; imports and logs nothing."""

from __future__ import annotations

import re
import sys
from typing import Any

from dpmon.record.shared_names import innermost_script_line, shorten_name
from dpmon.tracer.core.session import Session

POLL_NS, GROWTH, MAX_LISTED, MAX_KEPT = 1_000_000_000, 1.1, 8, 256
"""Interval of looks; least ratio of compilations between events; most lines in an event, and in this process."""
_GUARD = re.compile(r"(?:\d+/\d+: )?(.*?) *(?:  #.*)?$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(\w+)_at_\d+$")


class CompileReader:
    """The reader of one process's compilations."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._due_ns = self._recorded_count = 0
        self._seconds_again, self._newest = 0.0, None
        self._functions: dict[tuple[str, ...], dict[str, Any]] = {}

    def poll(self, now: int) -> int:
        """Read what is new, and record it if there is enough. Return when to call again (monotonic ns)."""
        if now >= self._due_ns and self._session.ring is not None:
            self._due_ns = now + POLL_NS
            if "torch._dynamo.utils" in sys.modules:
                with self._session.hidden("compilations"):
                    self._read(sys.modules["torch._dynamo.utils"])
        return self._due_ns

    def _read(self, utils: Any) -> None:
        if not hasattr(getattr(utils, "CompilationMetrics", None), "recompile_reason"):
            self._due_ns, reason = 1 << 62, "this version of torch does not keep the reasons of its compilations"
            self._session.record_event("compiles", functions=[], graph_breaks=[], absent={"compilations": reason})
            return
        entries = tuple(utils._compilation_metrics)  # the last 64
        known = next((index for index, entry in enumerate(entries) if entry is self._newest), -1)
        for self._newest in entries[known + 1 :]:
            self._add(self._newest)
        times = utils.compilation_time_metrics
        frames, backward = times.get("_compile.compile_inner", ()), times.get("backward._backward_impl", ())
        if len(frames) > self._recorded_count * GROWTH:
            self._recorded_count = len(frames)
            breaks = {}
            for item in utils.graph_break_reasons[-MAX_KEPT:]:
                line = innermost_script_line((frame.filename, frame.lineno) for frame in item.user_stack)
                breaks[line or "a library"] = shorten_name(item.reason.partition("\n")[0])
            self._session.record_event(
                "compiles",
                compilations=len(frames),
                seconds=sum(frames) + sum(backward),
                seconds_again=self._seconds_again,
                functions=sorted(self._functions.values(), key=lambda function: -function["count"])[:MAX_LISTED],
                graph_breaks=[*breaks.items()][-MAX_LISTED:],
                absent={},
            )

    def _add(self, entry: Any) -> None:
        """Count the compilation of a function, or of its backward graph, if a guard had failed; keep the guard."""
        if not str(entry.compile_id).endswith("/0"):
            self._seconds_again += (entry.duration_us or 0) / 1e6
        if entry.co_name and entry.recompile_reason and len(self._functions) < MAX_KEPT:
            name = shorten_name(_RESUMED.sub(r"\1", entry.co_name))
            line = innermost_script_line([(entry.co_filename, entry.co_firstlineno)]) or "a library"
            guard = shorten_name(_GUARD.findall(entry.recompile_reason)[0])
            key = name, line, re.sub(r"\d+", "0", guard)  # the same guard with other numbers
            function = self._functions.setdefault(key, {"function": name, "place": line, "count": 0})
            function.update(count=function["count"] + 1, guard=guard)
            function["guard_place"] = innermost_script_line(_FRAME.findall(entry.recompile_reason))
