"""Measures the memory of each device: models, their gradients, optimizer states, and the rest.

The first measurement follows the first steps. Later ones follow every few seconds, or less often if they are expensive.
Tensors are counted after a backward pass, because many scripts clear the gradients before the step ends. This time is
in the step's `other`. The result is recorded between two steps. A storage that holds, for example, both a parameter and
an optimizer state counts once, for the first of them in the order above. The statistics of torch's allocator are read
and never reset: the peak is the highest value since the start, or since the script reset it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.spans import INSIDE_AT, SITE_AT, Kind
from dpmon.tracer import gpus, oom
from dpmon.tracer.frames import drop_frames, named_like
from dpmon.tracer.recorder import Recorder
from dpmon.tracer.session import Session
from dpmon.tracer.sites import Functional, Sites
from dpmon.tracer.storages import GRADIENTS, MAX_TENSORS, STATES, Walk

FIRST_STEPS = 3
"""Steps until the first look: by then, optimizers have made their states."""
EVERY_NS = 5_000_000_000
SOON_NS = 500_000_000
"""Shortest wait after a look before an early one, once EXTRA_LOOKS are spent."""
SAME_NS = 60_000_000_000
"""Interval between events while nothing changes."""
WAIT_FACTOR = 1000
"""A measurement that took t is followed by a wait of WAIT_FACTOR * t, so all take at most a thousandth of the time."""
MAX_OPTIMIZERS = 256
MAX_FAULTS = 3
COUNTS_NS = 10_000_000
"""Time spent in a step after which no other count begins in it."""
EXTRA_LOOKS = 4
"""Most measurements that start at once because a model is called or an optimizer steps for the first time."""
NEVER = 1 << 62

_NO_BACKWARD_YET = "no backward pass was seen before this measurement"
_NO_BACKWARD = "the measured step had no backward pass, and earlier gradients are gone"
_NO_STATISTICS = "torch keeps no statistics of this device's allocator"
_PARTS = ("model_bytes", "gradients_bytes", "optimizer_bytes")
_ALLOCATOR = ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes")


class Memory:
    """Measures the memory of one process."""

    def __init__(self, session: Session, recorder: Recorder, sites: Sites) -> None:
        self.session = session
        self.recorder = recorder
        self.sites = sites
        self.on_optimizer: Callable[[], None] = lambda: None
        """Called after an optimizer is made."""
        self._optimizers: list[Any] = []
        self._unstepped: dict[int, Any] = {}
        """Weak references to optimizers that have not stepped yet, by id."""
        self._made = 0
        """Number of optimizers made."""
        self._forgotten = 0
        """Number of optimizers that were forgotten because there were too many."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._due = self._soonest = 0
        self._steps = 0
        """Number of calls of `look` (between two steps), counted up to FIRST_STEPS."""
        self._faults = 0
        self._reported: Any = None
        self._reported_ns = 0
        self._peaks: dict[str, tuple[int, int]] = {}
        """Per device: the peak at the last measurement, and the number of the last look before that peak."""
        self._looks = self._looked_at = 0
        """Number of looks, and number of the last look that completed a measurement."""
        self._walk: Walk | None = None
        """The count with most gradients in the measured step; None until its first backward pass ends."""
        self._spent = 0
        """Time of the measurement so far (ns)."""
        self._extra = EXTRA_LOOKS

    # ---------------------------------------------------------------- when

    def constructing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the traced form of Optimizer.__init__, which remembers the optimizer weakly."""

        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(self_, *args, **kwargs)
            except BaseException as error:
                drop_frames(error)
                self_, args, kwargs = None, (), {}
                raise
            try:
                self._optimizers = [known for known in self._optimizers if known() is not None]
                self._optimizers.append(weakref.ref(self_))
                self._unstepped[id(self_)] = self._optimizers[-1]
                if len(self._optimizers) > MAX_OPTIMIZERS:
                    del self._optimizers[0]
                    self._forgotten += 1
                self._made += 1
                if self._made == 1:
                    self.opened()
                if len(self._unstepped) > MAX_OPTIMIZERS:
                    self._unstepped = {key: ref for key, ref in self._unstepped.items() if ref() is not None}
                self.on_optimizer()
            except Exception as error:  # noqa: BLE001 - the object is made anyway
                self.session.fault("optimizers", error, fatal=False)

        return named_like(__init__, original)

    def opened(self) -> None:
        """Report to the assembler that the script makes optimizers.

        Called when the ring opens, and when the first optimizer is made.
        """
        if self._made:
            self.session.write_line(optimizer=self._made)

    def sooner(self) -> None:
        """Measure early, because a model is called or an optimizer steps for the first time."""
        due = 0 if self._extra > 0 else self._soonest
        if self._due > due:
            self._due = due
            self._extra -= 1
            self.recorder.soon()

    def look(self, now: int) -> int:
        """Measure between two steps if it is time to. Return when to call again (monotonic ns). Never raises."""
        if self._faults >= MAX_FAULTS:
            return NEVER
        try:
            self._steps += self._steps < FIRST_STEPS
            if self._steps < FIRST_STEPS - 1:
                return 0
            if now < self._due or self.session.ring is None:
                return self._due
            if self._walk is None and self.recorder.on_backward is None:
                self.recorder.on_backward = self._backward_ended
                return 0
            self.recorder.on_backward = None
            self._looks += 1
            self._report(self._walk or self._walked(), now)
            self._walk = None  # also if an exception ends the measurement
            ended = self._took(now)
            self._due = ended + max(EVERY_NS, self._spent * WAIT_FACTOR)
            self._soonest = ended + max(SOON_NS, self._spent * WAIT_FACTOR)
            self._spent = 0
            return self._due
        except Exception as error:  # noqa: BLE001 - the training continues
            self._failed(error)
            return NEVER

    def _failed(self, error: Exception) -> None:
        self._faults += 1
        self._walk = None
        self.recorder.on_backward = None
        self.session.fault("memory", error, fatal=False)

    # ---------------------------------------------------------------- the count

    def stepped(self, optimizer: Any) -> None:
        """Measure early if this was the first step of the optimizer."""
        began = monotonic_ns()
        try:
            if self._unstepped.pop(id(optimizer), None) is None or self._faults >= MAX_FAULTS:
                return
            # Not the training thread, or before the first call.
            if self.recorder.training_thread is not self.recorder.thread():
                self._due = min(self._due, self._soonest)
            elif self._due > 0:
                self.sooner()
                if self._due == 0:
                    self._count(began)  # a script with only one step has no later backward pass
            elif self._walk is not None:
                self._count(began)  # the states were not made yet when the backward pass ended
        except Exception as error:  # noqa: BLE001 - our fault must not reach the script's step
            self._failed(error)

    def _backward_ended(self) -> None:
        """Count after a backward pass of a measured step."""
        try:
            self._count(monotonic_ns())
        except Exception as error:  # noqa: BLE001 - our fault must not reach the script's backward pass
            self._failed(error)

    def _count(self, began: int) -> None:
        if self._spent >= COUNTS_NS:
            return
        walk = self._walked()
        self._took(began)
        if self._walk is None or walk.total(GRADIENTS) >= self._walk.total(GRADIENTS):
            self._walk = walk

    def _walked(self) -> Walk:
        found = [site.module() for site in list(self.sites.known.values())]
        models = [owner.module if isinstance(owner, Functional) else owner for owner in found]
        optimizers = [made for known in self._optimizers if (made := known()) is not None]
        return Walk([module for module in models if module is not None], optimizers)

    def _took(self, began: int) -> int:
        """Write the span of this look, which began at `began`; return its end (monotonic ns)."""
        ended = monotonic_ns()
        me = self.recorder.thread()
        head = Kind.MEMORY | me.head | me.inside << INSIDE_AT | self._looks << SITE_AT
        self.recorder.write(head, began, ended - began)
        self._spent += ended - began
        return ended

    # ---------------------------------------------------------------- what

    def _report(self, walk: Walk, now: int) -> None:
        devices = self._devices(walk)
        self._looked_at = self._looks
        same = devices == self._reported
        if not devices or (same and now - self._reported_ns < SAME_NS):
            return
        self._reported, self._reported_ns = devices, now
        took = (self._spent + monotonic_ns() - now) / 1e6
        facts = {"took_ms": took, "devices": devices, "absent": {}}
        self.session.event("memory", "last", step=None, look=self._looks, **facts)

    def _devices(self, walk: Walk) -> list[dict[str, Any]]:
        held = walk.held
        held.pop("meta", None)
        statistics = _statistics()
        for device in statistics:
            held.setdefault(device, [0, 0, 0])
        return [
            {
                **self._entry(name, held[name], statistics.get(name), self._unknown(walk, name)),
                **({"shared_bytes": walk.shared[name]} if name in walk.shared else {}),
            }
            for name in sorted(held)
        ]

    def _unknown(self, walk: Walk, device: str) -> dict[str, str]:
        """Return the reason for each part that is not fully known."""
        absent = {}
        for kind, part in enumerate(_PARTS):
            known = f"{walk.held[device][kind]:,} bytes on this device"
            names = walk.unsized[kind]
            if kind in walk.more:
                absent[part] = f"not measured: there are more than {MAX_TENSORS:,} tensors"
            elif names:
                many = sum(names.values())
                does = "does not report its size" if many == 1 else "do not report their size"
                absent[part] = f"{many:,} of its tensors {does} ({', '.join(names)}); the others hold {known}"
        if self._walk is None and not walk.total(GRADIENTS):
            absent.setdefault(_PARTS[GRADIENTS], _NO_BACKWARD if self.recorder.has_run_backward else _NO_BACKWARD_YET)
        unstepped = any(ref() is not None for ref in self._unstepped.values())
        if self._forgotten:
            absent[_PARTS[STATES]] = (
                f"more than {MAX_OPTIMIZERS} optimizers at once; {self._forgotten} of them are not counted"
            )
        elif not self._optimizers and not walk.total(STATES):
            absent.setdefault(_PARTS[STATES], "no torch optimizer was made")
        elif unstepped and not walk.total(STATES):
            absent.setdefault(_PARTS[STATES], "no optimizer had stepped before this measurement")
        return absent

    def _entry(self, name: str, held: list[int], stats: Any, absent: dict[str, str]) -> dict[str, Any]:
        entry: dict[str, Any] = {"device": name, **dict(zip(_PARTS, held, strict=True))}
        if stats is None:
            unknown_parts = (*_ALLOCATOR, "peak_after_step")
            entry.update(dict.fromkeys(unknown_parts))
            absent.update(dict.fromkeys(unknown_parts, _NO_STATISTICS))
        else:
            allocated, reserved, peak = stats
            before, after = self._peaks.get(name, (-1, 0))
            if peak != before:  # it grew, or the script has reset it
                after = self._looked_at
            self._peaks[name] = peak, after
            unknown = next((part for part in _PARTS if part in absent), None)
            rest = allocated - sum(held)
            values = (allocated, rest if rest >= 0 and unknown is None else None, reserved, peak)
            entry.update(zip(_ALLOCATOR, values, strict=True), peak_after_look=after)
            entry.update(gpus.allocator(name))
            oom.watch(self.session)
            if unknown is not None:
                absent["rest_bytes"] = f"{unknown} is not known"
            elif rest < 0:
                absent["rest_bytes"] = "part of the tensors' memory is not from torch's allocator"
        return {**entry, **{part: None for part in _PARTS if part in absent}, "absent": absent}


def _statistics() -> dict[str, tuple[int, int, int]]:
    """Return (allocated, reserved, peak allocated) bytes for each GPU that torch uses in this process."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(index)
        allocated, reserved, peak = (
            int(stats.get(key, 0))
            for key in ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
        )
        if reserved or peak:
            found[f"cuda:{index}"] = allocated, reserved, peak
    return found
