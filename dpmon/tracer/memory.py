"""What the memory of each device holds: the models, their gradients, the optimizers' states, and the rest.

Looked at between two turns of the loop: after the first ones, then every few seconds, and more rarely where looking
takes long. Storages are counted once, whoever shares them, in the order above. What torch's allocator says of a GPU is
read, never reset: the peak is the one since the start, or since the script itself has last reset it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from time import monotonic_ns
from typing import Any

import torch

from dpmon.tracer.calls import Calls
from dpmon.tracer.frames import drop_frames, named_like
from dpmon.tracer.session import Session

__all__ = ["Memory"]

FIRST_TURNS = 3
"""Turns before the first look: by then the optimizers have made their states."""
EVERY_NS = 5_000_000_000
SAME_NS = 60_000_000_000
"""How long nothing is said while nothing changes."""
MAX_SHARE = 1000
"""A look that took t is not repeated for MAX_SHARE times t: at most a thousandth of the time goes into it."""
MAX_TENSORS = 20_000
MAX_OPTIMIZERS = 256
MAX_FAULTS = 3
MAX_DEPTH = 4
MAX_TURNS = 1 << 20

_NO_STATISTICS = "torch keeps no statistics of this device's allocator"
_ALLOCATOR = ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes", "peak_after_step")


class Memory:
    """The looks at one process's memory."""

    def __init__(self, session: Session, calls: Calls) -> None:
        self.session = session
        self.calls = calls
        self._optimizers: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        self._due = 0
        self._since = 0
        self._turns = 0
        self._faults = 0
        self._said: Any = None
        self._said_ns = 0
        self._peaks: dict[str, tuple[int, int]] = {}
        """By device: its peak at the last look, and the turn after which it came up to it."""
        self._looked_at = 0
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
                raise
            try:
                self._optimizers = [known for known in self._optimizers if known() is not None][-MAX_OPTIMIZERS:]
                self._optimizers.append(weakref.ref(self_))
            except Exception as error:  # noqa: BLE001 - the object is made, whatever we make of it
                self.session.fault("optimizers", error, fatal=False)

        return named_like(__init__, original)

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
            if now >= self._due:
                self._look(now)
                ended = monotonic_ns()
                self._due = ended + max(EVERY_NS, (ended - now) * MAX_SHARE)
                self._since, self._turns = ended, FIRST_TURNS
                return 1
            # As many turns as fit into what is left, by what they took since the last look.
            each = (now - self._since) / max(self._turns - FIRST_TURNS, 1)
            return min(max(int((self._due - now) / max(each, 1.0)), 1), MAX_TURNS)
        except Exception as error:  # noqa: BLE001 - the training goes on without
            self._faults += 1
            self.session.fault("memory", error, fatal=False)
            return MAX_TURNS

    # ---------------------------------------------------------------- what

    def _look(self, now: int) -> None:
        if self.session.ring is None:
            return
        step = self.calls.steps.number
        devices, more = self._devices(step)
        self._looked_at = step
        same = (devices, more) == self._said
        if not devices or (same and now - self._said_ns < SAME_NS):
            return
        self._said, self._said_ns = (devices, more), now
        absent = {"devices": f"more than {MAX_TENSORS} tensors: the others are in the rest"} if more else {}
        took = (monotonic_ns() - now) / 1e6
        self.session.event("memory", step=step, took_ms=took, devices=devices, absent=absent)

    def _devices(self, step: int) -> tuple[list[dict[str, Any]], bool]:
        seen: set[tuple[str, int]] = set()
        held: dict[str, list[int]] = {}
        counts = [0, 0]
        """Tensors looked at, and those that would not say their size."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, tensors in enumerate((self._model(), self._gradients(), self._states())):
                for tensor in tensors:
                    if counts[0] >= MAX_TENSORS:
                        break
                    counts[0] += 1
                    try:
                        for device, key, size in _storages(tensor):
                            if (device, key) not in seen:
                                seen.add((device, key))
                                held.setdefault(device, [0, 0, 0])[index] += size
                    except (RuntimeError, NotImplementedError, TypeError, ValueError):
                        counts[1] += 1  # a tensor without data of its own, a parameter that is not made yet
        held.pop("meta", None)
        statistics = _statistics()
        for device in statistics:
            held.setdefault(device, [0, 0, 0])
        found = [self._one(name, held[name], statistics.get(name), counts[1], step) for name in sorted(held)]
        return found, counts[0] >= MAX_TENSORS

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
            if rest < 0:
                absent["rest_bytes"] = "part of what the tensors hold is not from torch's allocator"
        if unsized:
            absent["model_bytes"] = f"{unsized} tensors would not say their size and are not counted"
        one["absent"] = absent
        return one

    def _model(self) -> Iterator[Any]:
        for module in self._modules():
            yield from torch.nn.Module.parameters(module)
            yield from torch.nn.Module.buffers(module)

    def _gradients(self) -> Iterator[Any]:
        for module in self._modules():
            for parameter in torch.nn.Module.parameters(module):
                if parameter.is_leaf and parameter.grad is not None:
                    yield parameter.grad

    def _modules(self) -> list[Any]:
        found = (site.module() for site in list(self.calls.sites.values()))
        return [module for module in found if module is not None]

    def _states(self) -> Iterator[Any]:
        for known in self._optimizers:
            optimizer = known()
            state = getattr(optimizer, "state", None)
            if isinstance(state, dict):
                yield from _tensors(list(state.values()), 0)


def _tensors(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < MAX_DEPTH and isinstance(value, dict):
            yield from _tensors(list(value.values()), depth + 1)
        elif depth < MAX_DEPTH and isinstance(value, (list, tuple)):
            yield from _tensors(value, depth + 1)


def _storages(tensor: Any) -> list[tuple[str, int, int]]:
    """Device, identity and bytes of what holds a tensor's data: two for a sparse one."""
    parts: tuple[Any, ...] = (tensor,)
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
    found = []
    for part in parts:
        storage = part.untyped_storage()
        found.append((str(part.device), storage._cdata, storage.nbytes()))
    return found


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
