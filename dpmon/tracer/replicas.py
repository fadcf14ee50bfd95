"""Forward hooks on DataParallel's replicas: the sizes each received and returned, and how long it took.

A replica is a throw-away copy of the module that shares its hook dicts with it. Each replica is given dicts of its own,
so that nothing of ours is ever seen on the script's module, nor pickled or copied with it, not even by another thread.
"""

from __future__ import annotations

from collections import OrderedDict
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from dpmon.tracer.frames import drop_frames
from dpmon.tracer.session import Memo, Session
from dpmon.tracer.sizes import gathers

if TYPE_CHECKING:
    from dpmon.tracer.events import Span
    from dpmon.tracer.timing import CallTimes

__all__ = ["KEY", "Probe", "Watch"]

KEY = -7061
"""torch counts hooks up from 0, so a negative number is nobody else's."""


class Probe:
    """What one replica did in one call: definitions of its sizes, 0 unknown; monotonic ns, 0 if it was not seen."""

    __slots__ = ("began", "ended", "index", "inputs", "memos", "module", "nested", "outputs", "span", "watch")

    def __init__(self, watch: Watch, memos: tuple[Memo, Memo]) -> None:
        self.watch = watch
        self.memos = memos
        self.module: Any = None
        """What it runs, where that is no replica of torch's making (`over`)."""
        self.inputs = self.outputs = 0
        self.nested = 0
        """Calls of it that have begun and not returned."""
        self.began = self.ended = 0
        self.index = len(watch.probes)
        self.span: Span | None = None
        """What it takes on its device, if that is a GPU."""

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: runs on the replica's thread, and must change nothing.

        A module may call itself: it is the outermost call that says what the replica was given and what it returned.
        """
        session = self.watch.session
        try:
            session.local.depth += 2
            self.nested += 1
            if self.nested > 1:
                return
            self.outputs = 0
            self.inputs = session.inputs(args, kwargs, self.memos[0])
            if self.watch.times is not None:
                self.span = self.watch.times.begin_replica(self.index)
        except Exception as error:  # noqa: BLE001 - sizes are not worth a training
            session.fault("hooks", error)
        self.began = monotonic_ns()

    def leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Forward hook."""
        now = monotonic_ns()
        watch = self.watch
        session = watch.session
        try:
            session.local.depth -= 2
            self.nested -= 1
            if self.nested:
                return
            self.ended = now
            if watch.times is not None:
                watch.times.end_replica(self.span)
            self.outputs = session.outputs(result, self.memos[1])
            if watch.odd is False and not gathers(result):
                watch.odd = True
        except Exception as error:  # noqa: BLE001 - sizes are not worth a training
            session.fault("hooks", error)

    def hook(self, replica: Any) -> None:
        """Put the two hooks on a replica, after those that the script has put on its module."""
        own = replica.__dict__
        for name, hook in (("_forward_pre_hooks", self.enter), ("_forward_hooks", self.leave)):
            own[name] = hooks = OrderedDict(own[name])
            hooks[KEY] = hook
        for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"):
            own[name] = OrderedDict(own[name])
            own[name][KEY] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what this probe was put over, as parallel_apply would."""
        self.enter(None, args, kwargs)
        result: Any = None
        entered = True
        try:
            result = self.module(*args, **kwargs)
            self.leave(None, args, kwargs, result)
            entered = False
            return result
        except BaseException as error:
            drop_frames(error)
            args, kwargs = (), {}
            raise
        finally:
            if entered:  # it raised
                self.ended = monotonic_ns()
                self.nested = 0
                self.watch.session.local.depth -= 2


class Watch:
    """What the replicas of one call did."""

    __slots__ = ("memos", "odd", "probes", "session", "times")

    def __init__(self, session: Session, memos: list[tuple[Memo, Memo]], strict: bool) -> None:
        """`memos`: what each place saw last, kept between calls. `strict`: look for what gather does not keep."""
        self.session = session
        self.odd: bool | None = False if strict else None
        """Whether a replica returned something that torch's gather would turn into something else."""
        self.memos = memos
        self.probes: list[Probe] = []
        self.times: CallTimes | None = None

    def over(self, modules: Any) -> list[Probe]:
        """Stand-ins for whatever parallel_apply is to call, where replicas could not be hooked; in this order."""
        while len(self.memos) < len(modules):
            self.memos.append((Memo(), Memo()))
        for module, memos in zip(modules, self.memos, strict=False):
            probe = Probe(self, memos)
            probe.module = module
            self.probes.append(probe)
        return self.probes

    def expect(self, replicas: list[Any]) -> None:
        """Hook these replicas, numbered in this order."""
        while len(self.memos) < len(replicas):
            self.memos.append((Memo(), Memo()))
        for replica, memos in zip(replicas, self.memos, strict=False):
            probe = Probe(self, memos)
            probe.hook(replica)
            self.probes.append(probe)

    def release(self) -> None:
        """Drop the references to the modules that parallel_apply ran, once it is over."""
        for probe in self.probes:
            probe.module = None

    def close(self) -> None:
        """Break the reference cycle of probes and watch after the call, so that no object waits for a collection."""
        self.release()
        self.probes = []
