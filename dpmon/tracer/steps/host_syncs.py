"""Finds the lines of the script that wait for a GPU: in a step now and then, the functions that wait are wrapped."""

from __future__ import annotations

import sys
from functools import wraps
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import innermost_script_line
from dpmon.tracer.core.hidden_frames import Function, drop_frames, iter_callers, uncounted
from dpmon.tracer.core.session import Session, count_function_modes
from dpmon.tracer.steps.span_recorder import SpanRecorder

_READING = ("item", "cpu", "tolist", "nonzero", "__getitem__", "__repr__", "__format__")
METHODS = (*_READING, "__bool__", "__int__", "__float__", "__index__")
MIN_WAIT_NS, INTERVAL_NS, MAX_LINES = 50_000, 3_000_000_000, 16
"""Shortest call that counts; shortest time between samples, which varies up to fourfold, so that a line that waits in
every hundredth step is not in each sample; most lines in an event."""


class HostSyncSampler:
    """The sampler of one process's waits for a GPU."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session, self._recorder = session, recorder
        self._originals: list[tuple[Any, str, Any]] = []
        """During a sample: what was replaced; None for an attribute that was not there."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._restore()
        self._due_ns = self._samples = self._start_ns = self._first_step = self._thread = 0
        self._is_waiting = False
        self._lines: dict[tuple[str, str], list[int]] = {}

    def poll(self, now: int) -> int:
        """Begin or end a sample if it is time to, between two steps. Return when to call again (monotonic ns)."""
        recorder = self._recorder
        if now < self._due_ns or (self._originals and recorder.optimizer_steps == self._first_step):
            return self._due_ns
        self._due_ns = now + int(INTERVAL_NS * 1.15 ** (self._samples % 10))
        if recorder.device_timer is None or self._session.ring is None:
            return self._due_ns
        with self._session.hidden("waits for the GPU"):
            if self._originals:
                self._restore()
                lines = [[place, call, *times] for (place, call), times in self._lines.items()]
                self._session.record_event("host_syncs", wall_ms=(now - self._start_ns) / 1e6, lines=lines, absent={})
            elif _is_compiling():
                reason = "torch.compile is in use, which may compile again if functions are replaced"
                self._session.record_event("host_syncs", wall_ms=None, lines=[], absent={"lines": reason})
                self._due_ns = 1 << 62
            elif recorder.optimizer_steps and not count_function_modes():
                self._samples, self._lines, self._due_ns = self._samples + 1, {}, 0
                self._start_ns, self._first_step, self._thread = now, recorder.optimizer_steps, get_ident()
                for owner, name in (*((torch.Tensor, name) for name in METHODS), (torch.cuda, "synchronize")):
                    self._originals.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, self._wrap(name, getattr(owner, name)))
        return self._due_ns

    def _restore(self) -> None:
        """Put back what was replaced."""
        while self._originals:
            owner, name, original = self._originals.pop()
            delattr(owner, name) if original is None else setattr(owner, name, original)

    def _wrap(self, name: str, original: Function) -> Function:
        """Return a function that also notes the line and the time of an outermost call that waits for a GPU."""

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> object:
            is_on_host = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_cuda
            if is_on_host or self._is_waiting or get_ident() != self._thread:
                return original(*args, **kwargs)
            self._is_waiting, start_ns = True, monotonic_ns()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                drop_frames(error)
                args, kwargs = (), {}
                raise
            finally:
                self._is_waiting = False
                with self._session.guard("waits for the GPU", fatal=False):
                    self._note(name, monotonic_ns() - start_ns)

        return uncounted(wrapper)

    def _note(self, name: str, duration_ns: int) -> None:
        frames = [*iter_callers(sys._getframe(2))][::-1] if duration_ns >= MIN_WAIT_NS else []
        place = innermost_script_line((frame.f_code.co_filename, frame.f_lineno) for frame in frames)
        if place is not None and len(self._lines) < MAX_LINES:
            count_and_ns = self._lines.setdefault((place, name), [0, 0])
            count_and_ns[0] += 1
            count_and_ns[1] += duration_ns


def _is_compiling() -> bool:
    """Return whether torch.compile has compiled anything."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames"))
