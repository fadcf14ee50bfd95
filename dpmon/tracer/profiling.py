"""Profiles some steps with torch.profiler on request: a trace for Perfetto, and the operators that take most time."""

from __future__ import annotations

import gzip
import os
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dpmon.record.shared_names import shorten_name
from dpmon.span_ring import HeaderWord
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import is_cuda_initialized
from dpmon.tracer.note_files import write_file
from dpmon.tracer.steps.span_recorder import SpanRecorder

CHECK_NS = 500_000_000
"""Interval between checks for a request."""
MAX_EVENTS, MAX_OPERATORS, MAX_TRACES = 500_000, 8, 4
"""Most events of a trace; operators in a record, of host and device each; traces that are kept of a process."""
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_profiler: Any = torch.autograd.profiler


class StepProfiler:
    """The profiles of one process. Each begins and ends between two steps, or ends before a fork."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session, self._recorder = session, recorder
        self._guard = session.guard("profile", fatal=False)
        self.reset()
        os.register_at_fork(before=self.end)

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._is_on = False
        self._request = self._next_ns = self._steps = 0

    def poll(self, now: int) -> int:
        """Begin a profile if a reader has requested it, or end it. Return when to call again (monotonic ns)."""
        request = self._recorder.words[HeaderWord.PROFILE]
        if self._is_on:
            self._steps += 1
            if self._steps >= request & 0xFFFF:
                self.end()
        elif now >= self._next_ns:
            self._next_ns = now + CHECK_NS
            if request != self._request:
                self._request, self._steps = request, 0
                if request & 0xFFFF:
                    self._begin()
        return 0 if self._is_on else self._next_ns

    def _record(self, **data: object) -> None:
        self._session.record_event("profile", "last", step=None, request=self._request, **data)

    def _begin(self) -> None:
        refusal = "torch.profiler failed: see the warnings"
        if not _profiler.kineto_available():
            refusal = "this torch was built without Kineto, its profiler"
        elif _profiler._is_profiler_enabled or "ProfilerStep" in _profiler.KinetoStepTracker._step_dict:
            refusal = "the script uses torch.profiler itself"
        else:
            self._record()
            os.putenv(_LOG_LEVEL, os.environ.get(_LOG_LEVEL, "6"))  # else Kineto prints lines when it starts first
            with self._guard:
                config = _profiler._ExperimentalConfig()
                with suppress(TypeError):  # an older torch does not see the threads of replicas
                    config = _profiler._ExperimentalConfig(profile_all_threads=True)
                device = "cuda" if is_cuda_initialized() else None
                _profiler.profile(use_device=device, experimental_config=config).__enter__()
                _profiler._is_profiler_enabled = self  # true; a profiler of the script replaces it by True or False
                self._is_on = True
            if _LOG_LEVEL not in os.environ:
                os.unsetenv(_LOG_LEVEL)
        if not self._is_on:
            self._record(operators=[], refused=refusal)

    def end(self) -> None:
        """End the profile, if there is one, and record it."""
        if not self._is_on:
            return
        self._is_on = False
        data: dict[str, object] = {"operators": [], "refused": "the script started torch.profiler itself"}
        if _profiler._is_profiler_enabled is self:
            data["refused"] = f"it failed, or more than {MAX_EVENTS:,} operators ran"
            with self._guard:
                if is_cuda_initialized():
                    torch.cuda.synchronize()
                result = _profiler._disable_profiler()
                _profiler._run_on_profiler_stop()
                if len(result.events()) <= MAX_EVENTS:
                    data = {"operators": find_top_operators(result.events()), "file": self._write_trace(result)}
        self._record(steps=self._steps, **data)

    def _write_trace(self, result: Any) -> str:
        """Write the trace in place of the oldest one. Return the name of its file."""
        directory = self._session.config.directory
        name = f"profile-{self._session.process_index}-{(self._request >> 16) % MAX_TRACES}.json"
        path = Path(directory, name)
        result.save(str(path))
        write_file(directory, f"{name}.gz", gzip.compress(path.read_bytes(), 1), os.O_TRUNC)
        path.unlink()
        return f"{name}.gz"


def find_top_operators(events: list[Any]) -> list[dict[str, object]]:
    """Return the operators with most time, without that of operators they call: on the host, then on the device.

    Each has its number of calls, its time (ms), and its share (0 to 1) of the time of all on the host or the device.
    """
    own_ns: dict[str, Counter[str]] = {"host": Counter(), "device": Counter()}
    calls: Counter[tuple[str, str]] = Counter()
    stacks: dict[object, list[tuple[int, str]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns())):
        on = "host" if event.device_type() == _profiler.DeviceType.CPU else "device"
        if on == "device" and event.is_user_annotation():  # it spans kernels, but runs nothing
            continue
        name, start_ns, ns = shorten_name(event.name()), event.start_ns(), event.duration_ns()
        stack = stacks[on, event.device_index(), event.start_thread_id(), event.device_resource_id()]
        while stack and stack[-1][0] <= start_ns:
            stack.pop()
        own_ns[on].update({name: ns, **{caller: -ns for _, caller in stack[-1:]}})
        calls[on, name] += 1
        stack.append((start_ns + ns, name))
    return [
        {"on": on, "name": name, "calls": calls[on, name], "ms": ns / 1e6, "share": ns / times.total()}
        for on, times in own_ns.items()
        for name, ns in times.most_common(MAX_OPERATORS)
    ]
