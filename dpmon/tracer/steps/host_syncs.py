"""Finds the lines of the script that wait for a GPU, by wrapping the functions that wait during a sampled step."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from random import Random
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import innermost_script_line
from dpmon.tracer.core.hidden_frames import iter_callers, wrap_rare_function
from dpmon.tracer.core.session import Session
from dpmon.tracer.steps.copies import TracedMethod
from dpmon.tracer.steps.span_recorder import SpanRecorder

_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__")
_METHODS = ("item", "cpu", "tolist", "nonzero", *_CONVERSIONS)
WAITING = (*((torch.Tensor, name) for name in _METHODS), (torch, "nonzero"), (torch.cuda, "synchronize"))
MIN_WAIT_NS, INTERVAL_NS, MAX_WAITS = 50_000, 3_000_000_000, 256
"""Shortest call that counts; shortest time between the first samples; maximum number of calls in a sample. The time
varies up to threefold, so that a line that waits in every hundredth step is not in each sample."""
MAX_SLOWDOWN = 10
"""Later samples are rarer, up to this factor: a file of lines has room for a week of them, and for other events."""


class HostSyncSampler:
    """The sampler of one process's waits for a GPU."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session, self._recorder, self._random = session, recorder, Random()
        self._originals: list[tuple[Any, str, Any]] = []
        """During a sample: owner, name and value of each replaced attribute; None if the owner inherited it."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._restore()
        self._due_ns = self._start_ns = self._first_step = self._thread = self._samples = 0
        self._waits: list[tuple[int, int, str]] = []
        """Start and duration (ns) of each call, and its line."""

    def poll(self, now: int) -> int:
        """Begin or end a sample if it is time to, between two steps. Return when to call again (monotonic ns)."""
        updates = self._recorder.optimizer_steps
        if now < self._due_ns or (self._originals and updates == self._first_step):
            return self._due_ns
        slowdown = min(1 + self._samples / 8, MAX_SLOWDOWN)
        self._due_ns = now + int(INTERVAL_NS * self._random.uniform(1, 3) * slowdown)
        # Once torch.compile has compiled anything, it could compile again if functions are replaced.
        dynamo_counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        with self._session.hidden("waits for the GPU"):
            if self._originals:
                self._restore()
                self._samples += 1
                lines = Counter[str]()
                for _, duration_ns, line in self._waits:
                    lines[line] += duration_ns
                self._session.record_event("host_syncs", wall_ms=(now - self._start_ns) / 1e6, lines=lines)
            elif updates and self._recorder.device_timer is not None and not dynamo_counters.get("frames"):
                self._waits, self._start_ns, self._first_step, self._thread = [], now, updates, get_ident()
                self._due_ns = 0
                guard = self._session.guard("waits for the GPU", fatal=False)
                for owner, name in WAITING:
                    original = getattr(owner, name)
                    self._originals.append((owner, name, vars(owner).get(name)))
                    wrapper: Any = wrap_rare_function(original, guard, partial(self._note, name))
                    if owner is torch.Tensor:  # a subclass may look its methods up in a table
                        wrapper = TracedMethod(original, wrapper, self._recorder)
                    setattr(owner, name, wrapper)
        return self._due_ns

    def _restore(self) -> None:
        """Put back what was replaced. An interrupt leaves the rest to the next call."""
        while self._originals:
            owner, name, original = self._originals[-1]
            if original is not None:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)
            self._originals.pop()

    def _note(self, function: str, _: object, start_ns: int, *args: Any, **__: object) -> None:
        """Note the line of a call that waited, in place of the calls inside it."""
        duration_ns = monotonic_ns() - start_ns
        if duration_ns < MIN_WAIT_NS or get_ident() != self._thread or len(self._waits) == MAX_WAITS:
            return
        with torch._C.DisableTorchFunction():  # hides our read from subclasses of the script
            if args and isinstance(args[0], torch.Tensor) and not args[0].is_cuda:
                return
        frames = [*iter_callers(sys._getframe(2))]
        line = innermost_script_line((frame.f_code.co_filename, frame.f_lineno) for frame in reversed(frames))
        while self._waits and self._waits[-1][0] >= start_ns:
            self._waits.pop()
        if line is not None:
            self._waits.append((start_ns, duration_ns, f"{line} `{function}`"))
