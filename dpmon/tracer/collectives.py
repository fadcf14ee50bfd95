"""Every collective of a sampled step: a span each, and one for the time in which all of them are recorded.

Python kernels for the operators of `c10d` are registered at the dispatch key BackendSelect for one sampled step, and
removed after it. That key comes after autograd and before the backends. So the kernels see what DistributedDataParallel
and FSDP2 launch from C++ or Python, hand-written and functional collectives, compiled functions and inference mode; and
a kernel of the script at another key runs as before. (A kernel at an autograd key misses functional collectives and
inference mode.) `send` and `recv` have no kernel: they are no collectives.

torch 2.14 has hooks of its own at this place (pytorch #186300). They are not used: no released version to verify them
with had them.

The end of a collective on the CPU is found by a thread that asks `is_completed`. It runs only while something is under
way, and drops the Work object, which may hold tensors, when it is complete or after MAX_WAIT_NS. Nobody waits, and
there is no callback. Ends are late by up to 0.1 ms, or a twentieth of the time taken. On a device, the end stays
unknown: the host would have to query events of a stream that may be capturing a graph. So does the end of a
reduce_scatter of gloo: its Work never says that it is complete.

All ranks wait for the slowest one in a collective. If each rank sampled other steps, all would pay for each. So a step
is sampled when the number of optimizer steps, which ranks have in common, is a multiple of a power of two. A loop
without an optimizer is sampled by the clock.

A sample is to hold one training step. If a look finds collectives but no backward pass since the last look, they are an
evaluation's: the sample is discarded, and another one is taken after the next optimizer step. A loop that often does so
within a training step is sampled as it is.
"""

from __future__ import annotations

import inspect
import os
import sys
from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns, sleep, thread_time_ns
from typing import Any, NamedTuple

import torch

from dpmon.record.spans import FLAGS_AT, INSIDE_AT, SITE_AT, Flag, Kind
from dpmon.record.wire import Unended
from dpmon.span_ring import Word
from dpmon.tracer.collective_operators import OPERATORS, Operator
from dpmon.tracer.frames import drop_frames, outwards
from dpmon.tracer.recorder import Recorder
from dpmon.tracer.session import Session, raise_from_signal

NEVER = 1 << 62
WAIT_NS, SOON_NS = 1_000_000_000, 50_000_000
"""Interval of checks whether there is a process group; of checks whether a call has opened the ring."""
LOOK_NS = 500_000_000
"""Interval of checks whether a reader has requested a sample."""
FIRST = 8
"""Optimizer steps before the first sample, and between samples until their cost is known."""
LEAST, MOST = 4, 1 << 16
"""Limits of the optimizer steps between two samples."""
SHARE = 0.002
"""Share of the time that samples may cost by this process's own account. They are to cost at most 0.005: the ranks wait
for each other, so that a step gets longer by up to the costs of two (tests/benchmarks/bench_collectives.py)."""
DISPATCH_NS = 15_000
"""Cost of a kernel outside of its own code: the dispatcher converts the arguments and waits for the GIL."""
APART_NS, TIMED_NS = 10_000_000_000, 2_000_000_000
"""Least time between two samples, unless a reader requests one; before the first one of a loop without an optimizer."""
MAX_LOOKS = 64
"""A sample ends after this many steps, even if no optimizer has stepped."""
MOST_DISCARDED = 4
"""After this many discarded samples in a row none is: a step has collectives and no backward pass between two looks."""
MAX_WAIT_NS = 10_000_000_000
MAX_RANKS = 1024
"""Limit of ranks that are listed."""
_SHORTEST_S, _LONGEST_S = 50e-6, 5e-3
"""Limits of the time between two queries."""
_UNTIL_DONE_S = 1.0
"""Python's switch interval while the kernels are switched, which takes 0.1 ms: so no other thread runs meanwhile."""
RETRY_NS = 50_000_000
"""Time until the kernels are switched again after another thread was in torch.distributed."""
MAX_PUT_OFF = 100
"""Attempts at a sample in a row, after which the record says why there is none."""
_BESIDE = "another thread of the process was in torch.distributed at every attempt to record a step"
_DISTRIBUTED = os.path.dirname(os.path.abspath(torch.distributed.__file__)) + os.sep
_DRAIN_S = 0.05
"""How long the end of the process waits for the thread that queries."""


class _Group(NamedTuple):
    """Facts about a process group."""

    name: str
    size: int
    ranks: tuple[int, ...] | None
    """None: all ranks, or they are not known."""
    backend: str | None
    """For the type of the device."""


class _Launched(NamedTuple):
    """A collective under way."""

    work: Any
    head: int
    start: int
    bytes: int


class Collectives:
    """The sampled collectives of one process."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork. Kernels that the parent registered stay, and only pass on."""
        self._inherited = getattr(self, "_library", None)
        self._library: Any = None
        """Registers the kernels while it lives."""
        self._names: list[str] = []
        """Operators that have a kernel now."""
        self._put_off = 0
        """How often no sample could begin since the last one."""
        self._shared = False
        """Whether other threads launch collectives, so that the kernels must stay."""
        self._ready = False
        """Whether there is a process group and torch has what is needed."""
        self._given_up = False
        self._on = False
        """Whether a sample is under way."""
        self._began = self._stepped = self._looks = 0
        """When the sample began, how many optimizer steps there were then, and how many steps ended since."""
        self._backwards = 0
        """Backward passes up to the last look."""
        self._spoiled = False
        """Whether the sample holds collectives of steps without a backward pass."""
        self._discarded = 0
        """Samples that were discarded in a row."""
        self._again = False
        """Whether the sample is discarded, or the last one was: then another one is taken as soon as possible."""
        self._count = self._own_ns = self._polled_ns = 0
        """Of the sample: number of collectives, time spent in their kernels and in queries."""
        self._spent = 0
        """Cost of the samples that were discarded since the distance was last set (ns)."""
        self._last = self._last_stepped = 0
        """When the distance to the next sample was last set, and how many optimizer steps there were then."""
        self._every = 0
        """Optimizer steps from one sample to the next."""
        self._earliest = 0
        """When the next sample may be taken."""
        self._asked = 0
        """The last request acted upon."""
        self._within = 0
        """Number of kernels under way."""
        self._groups: dict[tuple[Any, str], _Group] = {}
        """By process group and type of the device, for one sample."""
        self._new: deque[_Launched] = deque()
        self._life = object()
        """Changes when the thread that queries must end."""
        self._polling = False
        self._wake = allocate_lock()
        """Held while nobody has roused the thread that queries. An Event would not survive an interrupt in `set`."""
        self._wake.acquire()

    # ---------------------------------------------------------------- between two steps

    def look(self, now: int) -> int:
        """Begin or end a sample if it is time; returns when to call again (monotonic ns)."""
        if self._given_up:
            return NEVER
        try:
            if self._on:
                return self._go_on(now)
            if not self._ready and not self._usable(now):
                return NEVER if self._given_up else now + (SOON_NS if self._session.ring is None else WAIT_NS)
            asked = self._recorder.words[Word.SAMPLE]
            if asked != self._asked or self._is_time(now):
                if not self._begin():
                    self._put_off += 1
                    if self._put_off == MAX_PUT_OFF:
                        self._say_why(now, _BESIDE)
                    return now + RETRY_NS
                self._asked = asked
                return 0
            return 0 if self._again and not self._recorder.stepped else now + LOOK_NS
        except Exception as error:  # noqa: BLE001 - the training goes on without
            self._failed(error)
            return NEVER

    def _failed(self, error: Exception) -> None:
        """Give up after a fault of ours; raises what is not ours."""
        raise_from_signal(error)
        self._given_up = True
        with suppress(Exception):
            self._switch(self._remove)
        self._session.fault("collectives", error, fatal=False)

    def _usable(self, now: int) -> bool:
        """Whether collectives can be recorded now."""
        distributed = torch.distributed
        if self._session.ring is None or not (distributed.is_available() and distributed.is_initialized()):
            return False
        why = _missing() or (self._inherited and "the process was forked while its parent recorded collectives")
        if why:
            self._given_up = True
            self._say_why(now, why)
            return False
        recorder = self._recorder
        self._ready = True
        self._last, self._last_stepped = now, recorder.stepped
        self._every = FIRST
        self._next()
        return True

    def _say_why(self, now: int, why: str) -> None:
        """Record why there are no samples."""
        site = self._session.define(("collectives", why), lambda: {"operation": None, "why": why})
        self._recorder.write(Kind.COLLECTIVE | self._recorder.thread().head | site << SITE_AT, now, 0)

    def _next(self) -> None:
        """Take the next sample when the number of optimizer steps is a multiple of the distance."""
        self._recorder.sample_at = (self._recorder.stepped // self._every + 1) * self._every

    def _is_time(self, now: int) -> bool:
        """Whether to take a sample; if it is too early for one, it is taken at another multiple of the distance."""
        recorder = self._recorder
        if not recorder.stepped:
            again = recorder.backwards != self._backwards or not self._again
            return again and now >= max(self._earliest, self._last + TIMED_NS)
        if recorder.stepped < recorder.sample_at:
            return False
        if now < self._earliest:
            self._next()
            return False
        return True

    def _begin(self) -> bool:
        """Begin a sample; False if that is not possible now."""
        began = monotonic_ns()
        self._stepped, self._backwards = self._recorder.stepped, self._recorder.backwards
        self._spoiled = self._again = False
        self._recorder.sample_at = self._stepped + 1  # then look whether it is over, even after an interrupt
        self._looks = self._count = self._own_ns = self._polled_ns = 0
        try:
            if not self._switch(self._register):
                return False
        except BaseException:
            self._switch(self._remove)
            raise
        self._began = monotonic_ns()
        self._own_ns += self._began - began
        self._put_off = 0
        self._on = True
        return True

    def _go_on(self, now: int) -> int:
        """End the sample if its step is over, or if it holds collectives of an evaluation."""
        recorder = self._recorder
        self._looks += 1
        if not self._is_over():
            trains = not recorder.learns or recorder.backwards != self._backwards
            self._backwards = recorder.backwards
            if not trains and not self._count:
                self._began, self._looks = now, 0  # it holds nothing yet
                return 0
            self._spoiled = self._spoiled or not trains
            if not self._discards() and self._looks < MAX_LOOKS:
                return 0
        recorder.sample_at = recorder.stepped + 1
        self._again = self._discards()
        if not self._end(now):
            self._spoiled = True  # it will hold more than a step
            return now + RETRY_NS
        self._spent += self._own_ns + self._polled_ns + self._count * DISPATCH_NS
        if self._again:
            self._discarded += 1
            self._earliest = now
            return now + LOOK_NS if recorder.stepped else 0
        if not self._spoiled:
            self._discarded = 0
        since, steps = now - self._last, recorder.stepped - self._last_stepped
        self._last, self._last_stepped = now, recorder.stepped
        self._earliest = now + max(APART_NS, 0 if recorder.stepped else int(self._spent / SHARE))
        self._every = _distance(self._spent, since, steps)
        self._spent = 0
        self._next()
        return now + LOOK_NS

    def _discards(self) -> bool:
        """Whether the sample is discarded as far as it has come."""
        return self._spoiled and self._discarded < MOST_DISCARDED

    def _is_over(self) -> bool:
        """Whether the sampled step is over: an optimizer has stepped, or, if none ever does, a backward pass ended."""
        recorder = self._recorder
        if recorder.stepped:
            return recorder.stepped != self._stepped
        return not recorder.learns or recorder.backwards != self._backwards

    def _end(self, now: int) -> bool:
        """End the sample; False if that is not possible now."""
        if not self._switch(self._remove):
            return False
        head = Kind.COLLECTIVE | self._recorder.thread().head
        if self._again:
            head |= Flag.FAILED << FLAGS_AT
        self._recorder.write(head, self._began, now - self._began, self._count)
        self._on = False
        self._rouse()
        self._own_ns += monotonic_ns() - now
        return True

    # ---------------------------------------------------------------- kernels

    def _switch(self, change: Callable[[], None]) -> bool:
        """Register or remove the kernels; False if another thread may launch a collective meanwhile.

        torch's table of kernels is not made to be changed while another thread reads it. So no other thread runs Python
        code here, and none may be in torch.distributed already. Once another thread has launched a collective in a
        sample, the kernels stay for good.
        """
        if self._shared:
            return True
        if self._within > 0:
            return False
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_UNTIL_DONE_S)
        try:
            if _others_communicate():
                return False
            change()
        finally:
            sys.setswitchinterval(interval)
        return True

    def _register(self) -> None:
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library
        below = torch._C._dispatch_keyset_full_after(_KEY)
        for name, operator in OPERATORS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None or torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect"):
                continue  # another version of torch, or a kernel of the script
            kernel = self._kernel(packet.default, operator, below)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
            self._names.append(name)

    def _remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
        self._names.clear()
        self._groups.clear()

    def _kernel(self, op: Any, operator: Operator, below: Any) -> Callable[..., Any]:
        redispatch, clock, fault = op.redispatch, monotonic_ns, self._session.fault

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                self._within += 1
                try:
                    result = redispatch(keyset & below, *args, **kwargs)
                finally:
                    self._within -= 1
                if self._on:
                    launched = clock()
                    try:
                        self._launched(operator, args, result, began, launched)
                    except Exception as error:  # noqa: BLE001 - the collective is under way
                        fault("collectives", error, fatal=False)
                    self._own_ns += clock() - launched
                return result
            except BaseException as error:
                drop_frames(error)
                args, kwargs, result = (), {}, None
                raise

        return kernel

    def _launched(self, operator: Operator, args: tuple[Any, ...], result: Any, began: int, now: int) -> None:
        """Record a collective that was just launched."""
        recorder = self._recorder
        me = recorder.threads.get(get_ident()) or recorder.thread()
        with torch._C.DisableTorchFunction():  # hides our look from the script's modes
            tensors = _flat(args[operator.counted])
            first = tensors[0] if tensors else _flat(args[1 - operator.counted])[0]
            device, dtype = first.device.type, first.dtype
            if device == "meta":
                return  # torch.compile tries the function out
            size = sum([tensor.nbytes for tensor in tensors])
        group = self._group(args[operator.group], device)
        if operator.name == "barrier":
            size = 0  # its tensor only selects the device
        elif operator.by_ranks:
            size *= group.size
        if me is not recorder.trains and recorder.trains is not None:
            # On devices, autograd launches what a backward pass communicates on threads of its own.
            self._shared = self._shared or recorder.kinds[recorder.trains.number] != Kind.BACKWARD
        self._count += 1
        site = self._site(operator.name, group, device, dtype)
        if not site:
            return
        head = Kind.COLLECTIVE | me.head | me.inside << INSIDE_AT | site << SITE_AT
        work = result[-1] if isinstance(result, (tuple, list)) else result
        if work is None:  # it has waited itself
            recorder.write(head, began, now - began, size)
        elif device != "cpu" or (operator.name, group.backend) == ("reduce_scatter", "gloo"):
            why = Unended.ON_DEVICE if device != "cpu" else Unended.UNTOLD
            recorder.write(head | Flag.SKIPPED << FLAGS_AT, began, why, size)
        else:
            work = _distributed().Work.unbox(work)
            if work.is_completed():
                recorder.write(head, began, now - began, size)
            else:
                self._wait_for(_Launched(work, head, began, size))

    def _group(self, boxed: Any, device: str) -> _Group:
        group = _distributed().ProcessGroup.unbox(boxed)
        found = self._groups.get((group, device))
        if found is None:
            size = group.size()
            ranks = backend = None
            if size != torch.distributed.get_world_size() and size <= MAX_RANKS:
                with suppress(KeyError, ValueError, RuntimeError):  # the script made it without torch.distributed
                    ranks = tuple(torch.distributed.get_process_group_ranks(group))
            with suppress(RuntimeError):
                backend = str(group._get_backend(torch.device(device)).name())
            found = self._groups[group, device] = _Group(str(group.group_name), size, ranks, backend)
        return found

    def _site(self, operation: str, group: _Group, device: str, dtype: Any) -> int:
        key = "collective", operation, group, device, dtype

        def spell() -> dict[str, Any]:
            ranks = None if group.ranks is None else list(group.ranks)
            kind = str(dtype).removeprefix("torch.")
            facts = {"operation": operation, "group": group.name, "size": group.size, "ranks": ranks}
            return {**facts, "dtype": kind, "backend": group.backend, "device": device}

        return self._session.define(key, spell)

    # ---------------------------------------------------------------- ends

    def _wait_for(self, launched: _Launched) -> None:
        self._new.append(launched)
        if self._polling:
            self._rouse()
        else:  # the thread itself says that it runs: an interrupt here could leave it unstarted
            start_new_thread(self._poll, (self._life,))

    def _rouse(self) -> None:
        """Rouse the thread that queries, now or when it is about to wait."""
        with suppress(RuntimeError):  # it is roused already
            self._wake.release()

    def _poll(self, life: object) -> None:
        """Query the collectives under way until the sample is over and all have ended."""
        self._polling = True
        waiting: list[_Launched] = []
        new, before = self._new, thread_time_ns()
        try:
            while self._life is life:
                while new:
                    with suppress(IndexError):  # two threads of this function, for a moment
                        waiting.append(new.popleft())
                waiting = [one for one in waiting if not self._over(one)]
                spent, before = before, thread_time_ns()
                self._polled_ns += before - spent
                if waiting:
                    sleep(min(max((monotonic_ns() - waiting[-1].start) / 20e9, _SHORTEST_S), _LONGEST_S))
                    continue
                if self._on:
                    self._wake.acquire()
                    continue
                self._polling = False
                if not new:
                    break
                self._polling = True
            for one in waiting:
                self._write(one, Unended.ENDED)
        except Exception as error:  # noqa: BLE001 - only ends are lost
            self._given_up = True
            self._session.fault("collectives", error, fatal=False)
        self._polling = False
        self._rouse()  # another thread of this function, if two were started

    def _over(self, one: _Launched) -> bool:
        """Write the span of a collective if it is over, or was waited for too long."""
        if one.work.is_completed():
            self._recorder.write(one.head, one.start, monotonic_ns() - one.start, one.bytes)
            return True
        if monotonic_ns() - one.start < MAX_WAIT_NS:
            return False
        self._write(one, Unended.LATE)
        return True

    def _write(self, one: _Launched, why: int) -> None:
        self._recorder.write(one.head | Flag.SKIPPED << FLAGS_AT, one.start, why, one.bytes)

    def at_exit(self) -> None:
        """End the sample under way, and the thread that queries: it must not run while the interpreter ends."""
        if self._on:
            self._again = self._discards() or not self._is_over()  # part of a step
            self._end(monotonic_ns())
        self._given_up = True
        self._life = object()
        self._rouse()
        until = monotonic_ns() + int(_DRAIN_S * 1e9)
        while self._polling and monotonic_ns() < until:
            sleep(_SHORTEST_S)


def _others_communicate() -> bool:
    """Whether another thread is in torch.distributed, and may launch a collective at any time."""
    me = get_ident()
    return any(
        frame.f_code.co_filename.startswith(_DISTRIBUTED)
        for ident, innermost in sys._current_frames().items()
        if ident != me
        for frame in outwards(innermost)
    )


def _distance(spent: int, since: int, steps: int) -> int:
    """Optimizer steps from one sample to the next: a power of two, so that samples of all ranks coincide.

    `spent`: cost of a sample (ns). `since`, `steps`: time and optimizer steps between two samples.
    """
    needed = max(spent / SHARE, APART_NS) * max(steps, 1) / max(since, 1)
    return min(max(1 << max(int(needed) - 1, 0).bit_length(), LEAST), MOST)


def _flat(tensors: Any) -> list[Any]:
    """The tensors in a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in ((part,) if isinstance(part, torch.Tensor) else part)]


_KEY: Any = torch._C.DispatchKey.BackendSelect


def _distributed() -> Any:
    return torch._C._distributed_c10d


def _missing() -> str | None:
    """What this torch lacks; None if it has everything."""
    for holder, name in (
        (torch._C, "_dispatch_keyset_full_after"),
        (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
        (_distributed(), "Work"),
    ):
        if not hasattr(holder, name):
            return f"this torch has no {name}, which recording collectives needs"
    if "with_keyset" not in inspect.signature(torch.library.Library.impl).parameters:
        return "kernels of this torch do not get the dispatch keys, which recording collectives needs"
    return None
