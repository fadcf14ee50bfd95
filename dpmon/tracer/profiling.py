"""Profiles some steps with torch.profiler on request: a trace for Perfetto, and the operators that take most time."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import shorten_name
from dpmon.record.span_format import Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import is_cuda_initialized
from dpmon.tracer.steps.span_recorder import SpanRecorder

CHECK_NS = 500_000_000
"""Interval between checks for a request."""
MAX_OPERATORS = 12
"""Maximum number of operators in a record."""
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_profiler: Any = torch.autograd.profiler


class StepProfiler:
    """The profiles of one process. Each begins and ends between two steps, or ends before a fork.

    A span of kind PROFILE marks each step that a profile may slow.
    """

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session, self._recorder = session, recorder
        self.reset()
        os.register_at_fork(before=self.end)

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._request = self._steps = 0

    def poll(self, now: int) -> int:
        """Begin a profile if a reader has requested it, or end it. Return when to call again (monotonic ns)."""
        recorder = self._recorder
        request = recorder.words[HeaderWord.PROFILE]
        wanted_steps = request & 0xFFFF
        if recorder.profile is not None:
            self._steps += 1
            if self._steps >= wanted_steps:
                self.end()
        elif wanted_steps and request != self._request:
            self._request, self._steps = request, 0
            self._begin()
        else:
            return now + CHECK_NS
        thread = recorder.current_thread_state()
        recorder.put(Kind.PROFILE | thread.thread_bits, monotonic_ns(), 0, 0)
        return 0

    def _record(self, **data: object) -> None:
        self._session.record_event("profile", "last", step=None, request=self._request, **data)

    def _begin(self) -> None:
        refusal = "torch.profiler failed: see the warnings"
        os.putenv(_LOG_LEVEL, os.environ.get(_LOG_LEVEL, "6"))  # otherwise Kineto prints lines when it first starts
        with self._session.guard("profile", fatal=False):
            if _profiler._is_profiler_enabled or "ProfilerStep" in _profiler.KinetoStepTracker._step_dict:
                refusal = "the script uses torch.profiler itself"
            else:
                config = _profiler._ExperimentalConfig(profile_all_threads=True)  # those of replicas, too
                device = "cuda" if is_cuda_initialized() else None
                profile = _profiler.profile(use_device=device, use_kineto=True, experimental_config=config)
                self._recorder.profile = profile.__enter__()
                _profiler._is_profiler_enabled = self  # true; a profiler of the script replaces it by True or False
        if _LOG_LEVEL not in os.environ:
            os.unsetenv(_LOG_LEVEL)
        if self._recorder.profile is None:
            self._record(refused=refusal)

    def end(self) -> None:
        """End the profile, if there is one, and record it."""
        profile, self._recorder.profile = self._recorder.profile, None
        if profile is None:
            return
        if _profiler._is_profiler_enabled is not self:
            self._record(refused="the script started torch.profiler itself")
            return
        data: dict[str, object] = {"refused": "torch.profiler failed: see the warnings"}
        with self._session.guard("profile", fatal=False):
            profile.__exit__(None, None, None)
            path = Path(self._session.config.directory, f"profile-{self._session.process_index}.json")
            path.unlink(missing_ok=True)
            profile.export_chrome_trace(str(path))
            operators = find_top_operators(profile.kineto_results.events())
            data = {"steps": self._steps, "file": path.name, "operators": operators}
        self._record(**data)


def find_top_operators(events: list[Any]) -> list[dict[str, object]]:
    """Return the operators with the most self time (ms) on the host or a device, with their numbers of calls."""
    own_ns, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    callers_by_thread: dict[int, list[tuple[int, tuple[str, str]]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns())):
        on = "host" if event.device_type() == _profiler.DeviceType.CPU else "device"
        if event.is_async() or (on == "device" and event.is_user_annotation()):  # it spans others, but runs nothing
            continue
        operator, ns = (on, event.name()), event.duration_ns()
        own_ns[operator] += ns
        calls[operator] += 1
        if on == "host":
            callers = callers_by_thread[event.start_thread_id()]
            while callers and callers[-1][0] <= event.start_ns():
                callers.pop()
            for _, caller in callers[-1:]:
                own_ns[caller] -= ns
            callers.append((event.start_ns() + ns, operator))
    return [
        {"on": on, "name": shorten_name(name), "calls": calls[on, name], "ms": ns / 1e6}
        for (on, name), ns in own_ns.most_common(MAX_OPERATORS)
    ]
