"""Records each collective that is launched during a sample; how it is seen depends on the version of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any, NamedTuple

import torch

from dpmon.record.spans import FLAGS_AT, INSIDE_AT, SITE_AT, Flag, Kind
from dpmon.record.wire import Unended
from dpmon.tracer.collective_ends import Ends, Launched, Sample
from dpmon.tracer.frames import outwards
from dpmon.tracer.recorder import Recorder
from dpmon.tracer.session import Session

MAX_RANKS = 1024
"""Limit of ranks that are listed."""
_UNTIL_DONE_S = 1.0
"""Python's switch interval while our functions are switched (0.1 ms at most), so that no other thread runs then."""
_DISTRIBUTED = os.path.dirname(os.path.abspath(torch.distributed.__file__)) + os.sep


class Group(NamedTuple):
    """Facts about a process group."""

    name: str
    size: int
    ranks: tuple[int, ...] | None
    """None for all ranks or unknown ranks."""
    backend: str | None
    """The backend for the type of the device; None if unknown."""


class Seen(NamedTuple):
    """Facts about a collective, except for its group."""

    operation: str
    bytes: int
    """By the convention of nccl-tests."""
    device: str
    dtype: Any


class Launches:
    """The collectives that one process launches during a sample. Derived classes see them."""

    def __init__(self, session: Session, recorder: Recorder, ends: Ends, sample: Sample) -> None:
        self._session = session
        self._recorder = recorder
        self._ends = ends
        self._sample = sample
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork. Functions that the parent registered stay, and do nothing."""
        self.inherited: Any = getattr(self, "_registered", None)
        """The parent's value of `_registered`, kept alive because its destruction may remove its functions."""
        self._registered: Any = None
        """What keeps our functions registered; None while they are not."""
        self._shared = False
        """Whether other threads launch collectives, so that our functions must stay."""
        self._within = 0
        """Number of collectives that are being launched."""
        self._groups: dict[tuple[Any, str], Group] = {}
        """By process group and type of the device, for one sample."""

    def missing(self) -> str | None:
        """Return what this torch lacks for recording collectives; None if it has everything."""
        return None

    def register(self) -> bool:
        """Register our functions; False if that is not possible now."""
        return self._switch(self._register)

    def remove(self) -> bool:
        """Remove our functions; False if that is not possible now."""
        return self._switch(self._remove)

    def _switch(self, change: Callable[[], None]) -> bool:
        """Register or remove our functions; False if another thread may launch a collective at the same time.

        torch's tables of them must not change while another thread reads these. So no other thread runs Python code
        here, and no other thread may already be in torch.distributed. If another thread launches a collective during a
        sample, our functions stay for good.
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
        raise NotImplementedError

    def _remove(self) -> None:
        raise NotImplementedError

    def _launched(self, seen: Seen, group: Group, work: Any, began: int, now: int) -> None:
        """Record a collective that was just launched; `work`: None if it has already waited for the result."""
        recorder = self._recorder
        me = recorder.threads.get(get_ident()) or recorder.thread()
        if me is not recorder.trains and recorder.trains is not None:
            # On devices, autograd launches the collectives of a backward pass on its own threads.
            self._shared = self._shared or recorder.kinds[recorder.trains.number] != Kind.BACKWARD
        self._sample.count += 1
        site = self._site(seen.operation, group, seen.device, seen.dtype)
        if not site:
            return
        head = Kind.COLLECTIVE | me.head | me.inside << INSIDE_AT | site << SITE_AT
        if work is None:
            recorder.write(head, began, now - began, seen.bytes)
        elif seen.device != "cpu" or (seen.operation, group.backend) == ("reduce_scatter", "gloo"):
            why = Unended.ON_DEVICE if seen.device != "cpu" else Unended.UNTOLD
            recorder.write(head | Flag.SKIPPED << FLAGS_AT, began, why, seen.bytes)
        elif work.is_completed():
            recorder.write(head, began, now - began, seen.bytes)
        else:
            self._ends.wait_for(Launched(work, head, began, seen.bytes))

    def _group(self, group: Any, device: str) -> Group:
        found = self._groups.get((group, device))
        if found is None:
            size = group.size()
            ranks = backend = None
            if size != torch.distributed.get_world_size() and size <= MAX_RANKS:
                with suppress(KeyError, ValueError, RuntimeError):  # the script made it without torch.distributed
                    ranks = tuple(torch.distributed.get_process_group_ranks(group))
            with suppress(RuntimeError):
                backend = str(group._get_backend(torch.device(device)).name())
            found = self._groups[group, device] = Group(str(group.group_name), size, ranks, backend)
        return found

    def _site(self, operation: str, group: Group, device: str, dtype: Any) -> int:
        key = "collective", operation, group, device, dtype

        def spell() -> dict[str, Any]:
            ranks = None if group.ranks is None else list(group.ranks)
            kind = str(dtype).removeprefix("torch.")
            facts = {"operation": operation, "group": group.name, "size": group.size, "ranks": ranks}
            return {**facts, "dtype": kind, "backend": group.backend, "device": device}

        return self._session.define(key, spell)


def _others_communicate() -> bool:
    """Whether another thread is in torch.distributed, and may launch a collective at any time."""
    me = get_ident()
    return any(
        frame.f_code.co_filename.startswith(_DISTRIBUTED)
        for ident, innermost in sys._current_frames().items()
        if ident != me
        for frame in outwards(innermost)
    )
