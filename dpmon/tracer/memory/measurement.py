"""Measures the memory of each device: models, their gradients, optimizer states, and the rest.

The first measurement follows the first steps. Later ones follow every few seconds, or less often if they are expensive.
Tensors are counted after each backward pass of the measured step, and the count with most gradients is used: many
scripts clear the gradients before the step ends. This time is in the step's `other`. The result is recorded between two
steps. A storage that holds, for example, both a parameter and an optimizer state counts once, for the first of them in
the order above. The statistics of torch's allocator are read and never reset: the peak is the highest value since the
start, or since the script reset it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import islice
from time import monotonic_ns
from typing import Any

from dpmon.record.span_format import INSIDE_AT, SITE_AT, Kind
from dpmon.tracer.calls.traced_modules import FunctionalStandIn, TracedModules
from dpmon.tracer.core.hidden_frames import Function, wrap_rare_function
from dpmon.tracer.core.session import Session
from dpmon.tracer.memory import allocator
from dpmon.tracer.memory.storages import GRADIENTS, MAX_TENSORS, STATES, StorageWalk, mapped_files
from dpmon.tracer.steps.span_recorder import SpanRecorder

EVERY_NS = 5_000_000_000
SAME_NS = 60_000_000_000
"""Interval between events while nothing changes."""
EARLY = 8
"""Number of measurements after which a new model or optimizer is measured at the usual time only."""
WAIT_FACTOR = 1000
"""A measurement that took t is followed by a wait of WAIT_FACTOR * t, so all take at most a thousandth of the time."""
COUNTS_NS = 10_000_000
"""Time spent in a step after which no other count begins in it."""
MAX_TYPES = 4
"""Most types of tensors that are named if the size of the tensors is unknown."""
NEVER = 1 << 62

_NO_BACKWARD_YET = "no backward pass was seen before this measurement"
_NO_BACKWARD = "the measured step had no backward pass, and earlier gradients are gone"
_NO_STATISTICS = "torch keeps no statistics of this device's allocator"
_PARTS = ("model_bytes", "gradients_bytes", "optimizer_bytes")
_ALLOCATOR = ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes")


class MemoryTracer:
    """Measures the memory of one process."""

    def __init__(self, session: Session, recorder: SpanRecorder, sites: TracedModules) -> None:
        self.session = session
        self.recorder = recorder
        self.sites = sites
        self.on_optimizer: Callable[[], None] = lambda: None
        """Called after an optimizer is made."""
        self._optimizers: dict[int, weakref.ref[object]] = {}
        """The living optimizers, by id."""
        self._made = False
        """Whether an optimizer was made."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._due = self._steps = 0
        self._reported: list[dict[str, object]] = []
        self._reported_ns = 0
        self._peaks: dict[str, tuple[int, int]] = {}
        """Per device: the peak at the last measurement, and the number of the last look before that peak."""
        self._looks = self._looked_at = 0
        """Number of measurements (looks), and number of the last one that was completed."""
        self._walk: StorageWalk | None = None
        """The count with most gradients in the measured step; None until its first backward pass ends."""
        self._spent = 0
        """Time of the measurement so far (ns)."""
        self._again = False
        """Whether something new has come since the measurement began."""

    # ---------------------------------------------------------------- when

    def wrap_optimizer_init(self, original: Function) -> Function:
        """Return the traced form of Optimizer.__init__, which remembers the optimizer weakly."""

        def made(_: object, began: int, optimizer: object, *args: object, **kwargs: object) -> None:
            key, known = id(optimizer), self._optimizers
            known[key] = weakref.ref(optimizer, lambda _: known.pop(key, None))
            if not self._made:
                self._made = True
                self.report_optimizers()
            self.on_optimizer()

        return wrap_rare_function(original, self.session.guard("search for optimizers", fatal=False), made)

    def report_optimizers(self) -> None:
        """Report to the assembler that the script makes optimizers.

        Called when the ring opens, and when the first optimizer is made.
        """
        if self._made:
            self.session.write_line(optimizer=1)

    def measure_soon(self) -> None:
        """Measure soon if the run is young: a model was called, or an optimizer has stepped, for the first time."""
        self._again = self._looks < EARLY
        if self._again and 0 < self._due < NEVER:
            self._due = 0
            self.recorder.schedule_poll()

    def poll(self, now: int) -> int:
        """Measure between two steps if it is time to. Return when to call again (monotonic ns). Never raises."""
        if now < self._due or self.session.ring is None:
            return self._due
        self._steps += 1
        if self._steps == 1:
            return 0  # optimizers make their states in their first steps
        if self._walk is None and self.recorder.on_backward is None:
            self.recorder.on_backward, self._again = self._count, False
            return 0
        self.recorder.on_backward = None
        walk, self._walk = self._walk, None
        self._due = now + EVERY_NS  # an interrupt may end this measurement
        with self.session.guard("memory of devices", fatal=False):
            self._looks += 1
            self._record_measurement(walk, now)
            self._due = self._write_cost_span(now) + max(0 if self._again else EVERY_NS, self._spent * WAIT_FACTOR)
            self._spent = 0
            return self._due
        self._due = NEVER  # after a fault of ours, nothing is measured any more
        return NEVER

    # ---------------------------------------------------------------- the count

    def _count(self) -> None:
        """Count after a backward pass of a measured step."""
        with self.session.guard("memory of devices", fatal=False):
            began = monotonic_ns()
            if self._spent < COUNTS_NS:
                walk = self._walk_storages()
                self._write_cost_span(began)
                if self._walk is None or walk.total(GRADIENTS) >= self._walk.total(GRADIENTS):
                    self._walk = walk

    def _walk_storages(self) -> StorageWalk:
        found = [site.module() for site in list(self.sites.known.values())]
        models = [owner.module if isinstance(owner, FunctionalStandIn) else owner for owner in found]
        optimizers = [made for known in list(self._optimizers.values()) if (made := known()) is not None]
        walk = StorageWalk([module for module in models if module is not None], optimizers)
        walk.stepped = self.recorder.stepped > 0
        return walk

    def _write_cost_span(self, began: int) -> int:
        """Write the span of this look, which began at `began`; return its end (monotonic ns)."""
        ended = monotonic_ns()
        me = self.recorder.current_thread_state()
        head = Kind.MEMORY | me.head | me.inside << INSIDE_AT | self._looks << SITE_AT
        self.recorder.put(head, began, ended - began, 0)
        self._spent += ended - began
        return ended

    # ---------------------------------------------------------------- what

    def _record_measurement(self, counted: StorageWalk | None, now: int) -> None:
        """Record a measurement. `counted`: the count of the measured step; None if it had no backward pass."""
        walk = counted or self._walk_storages()
        statistics = allocator.statistics()
        walk.held.pop("meta", None)
        if statistics:
            allocator.watch_out_of_memory(self.session)
        for device in statistics:
            walk.held.setdefault(device, [0, 0, 0])
        devices = [
            self._device_entry(walk, name, statistics.get(name), self._unknown_reasons(walk, name, counted is None))
            for name in sorted(walk.held)
        ]
        self._looked_at = self._looks
        same = devices == self._reported
        if not devices or (same and now - self._reported_ns < SAME_NS):
            return
        self._reported, self._reported_ns = devices, now
        took = (self._spent + monotonic_ns() - now) / 1e6
        self.session.record_event(
            "memory", "last", step=None, look=self._looks, took_ms=took, devices=devices, absent={}
        )

    def _unknown_reasons(self, walk: StorageWalk, device: str, no_backward: bool) -> dict[str, str]:
        """Return the reason for each part that is not fully known."""
        absent = {}
        for kind, part in enumerate(_PARTS):
            known = f"{walk.held[device][kind]:,} bytes on this device"
            names = walk.unsized[kind]
            if kind in walk.more:
                absent[part] = f"not measured: there are more than {MAX_TENSORS:,} tensors"
            elif names:
                many, types = sum(names.values()), ", ".join(islice(names, MAX_TYPES))
                does = "does not report its size" if many == 1 else "do not report their size"
                absent[part] = f"{many:,} of its tensors {does} ({types}); the others hold {known}"
        if no_backward and not walk.total(GRADIENTS):
            absent.setdefault(_PARTS[GRADIENTS], _NO_BACKWARD if self.recorder.has_run_backward else _NO_BACKWARD_YET)
        if not walk.total(STATES) and not (self._optimizers and walk.stepped):
            why = "no optimizer had stepped before this measurement"
            absent.setdefault(_PARTS[STATES], why if self._optimizers else "no torch optimizer was made")
        return absent

    def _device_entry(
        self, walk: StorageWalk, name: str, stats: dict[str, Any] | None, absent: dict[str, str]
    ) -> dict[str, object]:
        """Return the facts of one device. `absent`: reasons for unknown parts."""
        held = walk.held[name]
        entry: dict[str, object] = {"device": name, **dict(zip(_PARTS, held, strict=True))}
        if stats is None:
            unknown_parts = (*_ALLOCATOR, "peak_after_step")
            entry.update(dict.fromkeys(unknown_parts))
            absent.update(dict.fromkeys(unknown_parts, _NO_STATISTICS))
        else:
            before, after = self._peaks.get(name, (-1, 0))
            if stats["peak_bytes"] != before:  # it grew, or the script has reset it
                after = self._looked_at
            self._peaks[name] = stats["peak_bytes"], after
            unknown = next((part for part in _PARTS if part in absent), None)
            rest = stats["allocated_bytes"] - sum(held)
            entry.update(stats, rest_bytes=rest if rest >= 0 and unknown is None else None, peak_after_look=after)
            if unknown is not None:
                absent["rest_bytes"] = f"{unknown} is not known"
            elif rest < 0:
                absent["rest_bytes"] = "part of the tensors' memory is not from torch's allocator"
        if name in walk.shared:
            entry.update(shared_bytes=walk.shared[name], shared_files=mapped_files(walk.shared_at))
        return {**entry, **{part: None for part in _PARTS if part in absent}, "absent": absent}
