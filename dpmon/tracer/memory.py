"""What the memory of each device holds: the models, their gradients, the optimizers' states, and the rest.

Looked at between two turns of the loop: after the first ones, then every few seconds, and more rarely where looking
takes long; a look that takes longer than a few milliseconds goes on after the next turn, and its time is in no turn.
Storages are counted once, whoever shares them, in the order above. What torch's allocator says of a GPU is
read, never reset: the peak is the one since the start, or since the script itself has last reset it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch

from dpmon.tracer import gpus, oom
from dpmon.tracer.calls import Calls
from dpmon.tracer.frames import drop_frames, named_like
from dpmon.tracer.session import Session
from dpmon.tracer.storages import MAX_TENSORS, Walk

__all__ = ["Memory"]

FIRST_TURNS = 3
"""Turns before the first look: by then the optimizers have made their states."""
EVERY_NS = 5_000_000_000
SOON_NS = 500_000_000
"""How long after a look a model that is new since waits for one at least."""
SAME_NS = 60_000_000_000
"""How long nothing is said while nothing changes."""
MAX_SHARE = 1000
"""A look that took t is not repeated for MAX_SHARE times t: at most a thousandth of the time goes into it."""
SLICE_NS = 10_000_000
"""After which a look makes way for the next turn."""
MAX_OPTIMIZERS = 256
MAX_FAULTS = 3
MAX_TURNS = 1 << 20

_NO_STATISTICS = "torch keeps no statistics of this device's allocator"
_ALLOCATOR = ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes", "peak_after_step")


class Memory:
    """The looks at one process's memory."""

    def __init__(self, session: Session, calls: Calls) -> None:
        self.session = session
        self.calls = calls
        self.on_optimizer: Callable[[], None] = lambda: None
        """Called when an optimizer was made."""
        self._optimizers: list[Any] = []
        self._forgotten = 0
        """Optimizers that were alive when there were too many to remember them all."""
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        self._due = self._soonest = 0
        self._since = 0
        self._turns = 0
        self._faults = 0
        self._said: Any = None
        self._said_ns = 0
        self._peaks: dict[str, tuple[int, int]] = {}
        """By device: its peak at the last look, and the turn after which it came up to it."""
        self._looked_at = 0
        self._walk: Walk | None = None
        """The look that is under way, how long it has taken, and over how many turns."""
        self._spent = self._slices = 0
        self._roots_left = 0
        self._left = 1

    # ---------------------------------------------------------------- when

    def constructing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Optimizer.__init__: remembers the optimizer, weakly."""

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
                if len(self._optimizers) > MAX_OPTIMIZERS:
                    del self._optimizers[0]
                    self._forgotten += 1
                self.on_optimizer()
            except Exception as error:  # noqa: BLE001 - the object is made, whatever we make of it
                self.session.fault("optimizers", error, fatal=False)

        return named_like(__init__, original)

    def soon(self) -> None:
        """Let what `sharing` made be called, and call the other, when the next turn has ended."""
        self._left = self._roots_left = self.calls.steps.countdown = 1

    def new_model(self) -> None:
        """A model is called that may not have been looked at: look as soon as that costs no more than it may."""
        if self._due > self._soonest:
            self._due = self._soonest
            self.soon()

    def sharing(self, other: Callable[[], int]) -> Callable[[], int]:
        """What `Steps.on_close` is to be: calls `other` when it wants to be, and looks when a look is due."""

        def closed() -> int:
            left = self._left
            self._roots_left -= left
            if self._roots_left <= 0:
                self._roots_left = other()
            self._left = min(self._roots_left, self._turned(left))
            return self._left

        return closed

    def _turned(self, turns: int) -> int:
        """So many turns have ended; after how many to come again. Never raises."""
        if self._faults >= MAX_FAULTS:
            return MAX_TURNS
        try:
            self._turns += turns
            if self._turns < FIRST_TURNS:
                return FIRST_TURNS - self._turns
            now = monotonic_ns()
            if self._walk is None and now >= self._due and self.session.ring is not None:
                self._walk = Walk(self._models(), (one for known in self._optimizers if (one := known()) is not None))
                self._spent = self._slices = 0
            if self._walk is not None:
                self._look(self._walk, now)
                return 1
            # As many turns as fit into what is left, by what they took since the last look.
            each = (now - self._since) / max(self._turns - FIRST_TURNS, 1)
            return min(max(int((self._due - now) / max(each, 1.0)), 1), MAX_TURNS)
        except Exception as error:  # noqa: BLE001 - the training goes on without
            self._faults += 1
            self.session.fault("memory", error, fatal=False)
            return MAX_TURNS

    # ---------------------------------------------------------------- what

    def _look(self, walk: Walk, now: int) -> None:
        """Go on with the look that is under way, and say what was found once it is over."""
        self._walk = None  # an exception ends it
        over = walk.go_on(now + SLICE_NS)
        self._slices += 1
        if over:
            self._say(walk, now)
        else:
            self._walk = walk
        ended = monotonic_ns()
        self.calls.steps.ours += ended - now
        self._spent += ended - now
        if over:
            self._due = ended + max(EVERY_NS, self._spent * MAX_SHARE)
            self._soonest = ended + max(SOON_NS, self._spent * MAX_SHARE)
            self._since, self._turns = ended, FIRST_TURNS

    def _say(self, walk: Walk, now: int) -> None:
        step = self.calls.steps.number - 1
        devices = self._devices(walk, step)
        self._looked_at = step
        absent = {"devices": f"more than {MAX_TENSORS} tensors: the others are not counted"} if walk.more else {}
        same = (devices, absent) == self._said
        if not devices or (same and now - self._said_ns < SAME_NS):
            return
        self._said, self._said_ns = (devices, absent), now
        took = (self._spent + monotonic_ns() - now) / 1e6
        self.session.event("memory", step=step, turns=self._slices, took_ms=took, devices=devices, absent=absent)

    def _devices(self, walk: Walk, step: int) -> list[dict[str, Any]]:
        held = walk.held
        held.pop("meta", None)
        statistics = _statistics()
        for device in statistics:
            held.setdefault(device, [0, 0, 0])
        return [self._one(name, held[name], statistics.get(name), walk.unsized, step) for name in sorted(held)]

    def _one(self, name: str, held: list[int], stats: Any, unsized: int, step: int) -> dict[str, Any]:
        model, gradients, optimizer = held
        one: dict[str, Any] = {
            "device": name, "model_bytes": model, "gradients_bytes": gradients, "optimizer_bytes": optimizer,
        }  # fmt: skip
        absent: dict[str, str] = {}
        if stats is None:
            one.update(dict.fromkeys(_ALLOCATOR))
            absent.update(dict.fromkeys(_ALLOCATOR, _NO_STATISTICS))
        else:
            allocated, reserved, peak = stats
            before, after = self._peaks.get(name, (-1, 0))
            if peak != before:  # it grew, or the script has reset it
                after = self._looked_at
            self._peaks[name] = peak, after
            rest = allocated - model - gradients - optimizer
            values = (allocated, rest if rest >= 0 else None, reserved, peak, after)
            one.update(zip(_ALLOCATOR, values, strict=True))
            one.update(gpus.allocator(name))
            oom.watch(self.session)
            if rest < 0:
                absent["rest_bytes"] = "part of what the tensors hold is not from torch's allocator"
        if unsized:
            absent["model_bytes"] = f"{unsized} tensors would not say their size and are not counted"
        if self._forgotten:
            absent["optimizer_bytes"] = (
                f"more than {MAX_OPTIMIZERS} optimizers at once: {self._forgotten} of them are not counted"
            )
        one["absent"] = absent
        return one

    def _models(self) -> list[Any]:
        found = (site.module() for site in list(self.calls.sites.values()))
        return [module for module in found if module is not None]


def _statistics() -> dict[str, tuple[int, int, int]]:
    """Of each GPU that torch uses in this process: bytes allocated, reserved, and the peak of the former."""
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
