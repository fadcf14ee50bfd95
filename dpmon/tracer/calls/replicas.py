"""Records the input sizes, output sizes and times of DataParallel's replicas, with forward hooks.

torch's replica is a throw-away copy of the module and shares the module's dicts of hooks. dpmon gives each replica its
own dicts, so our hooks never appear on the script's module, and are never pickled or copied with it, even by another
thread.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from time import monotonic_ns
from typing import Any

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, SITE_AT, Flag, Kind
from dpmon.tracer.calls.traced_modules import TracedModule
from dpmon.tracer.core.hidden_frames import drop_frames
from dpmon.tracer.core.session import SizeCache
from dpmon.tracer.core.tensor_sizes import is_gatherable
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

KEY = -7061
"""Key of our hooks. torch counts up from 0, so no other hook has a negative key."""
ROWS = "return one row per input row, and compute the loss outside the model"
"""Advice for a script that should work with dp."""
ODD = f"{ROWS}: the model returns a scalar or values other than tensors, which DataParallel would change"


class ResultsWouldChange(Exception):
    """Raised when dp would change the meaning of a bare root's results for the script; the text is the reason."""


class ReplicaProbe:
    """Observes one replica in one call."""

    __slots__ = ("_around", "_began", "_inputs", "_mark", "_memos", "_nested", "_watch", "index", "module")

    def __init__(self, watch: ReplicaProbes, index: int, memos: tuple[SizeCache, SizeCache]) -> None:
        self._watch = watch
        self._memos = memos
        self.index = index
        self.module: Any = None
        """The callable that it stands in for (see `ReplicaProbes.stand_ins`); None if the replica has our hooks."""
        self._inputs = self._began = 0
        self._nested = 0
        """Number of nested calls that are running."""
        self._around = 0
        """Kind of the enclosing span on its thread."""
        self._mark: Any = None
        """Its device time; None if it is not timed."""

    def before_forward(self, module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Forward pre-hook: runs on the replica's thread. It returns None, so the inputs stay unchanged.

        A module may call itself. The outermost call has the inputs and outputs of the replica.
        """
        recorder = self._watch.recorder
        try:
            self._nested += 1
            if self._nested > 1:
                return
            me = recorder.current_thread_state()
            self._around, me.inside = me.inside, Kind.REPLICA  # no roots inside a replica
            self._inputs = recorder.session.input_definition(args, kwargs, self._memos[0])
            if self._watch.timing is not None:
                self._mark = self._watch.timing.begin_replica(self._watch.site.plan.devices, self.index)
        except Exception as error:  # noqa: BLE001 - missing sizes must not stop a training
            recorder.session.count_error("inputs and outputs of a replica", error)
        self._began = monotonic_ns()

    def after_forward(
        self, module: object, args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> None:
        """Forward hook; torch calls it with None for a replica that raised."""
        now = monotonic_ns()
        watch = self._watch
        recorder = watch.recorder
        try:
            if not self._nested:
                return
            self._nested -= 1
            if self._nested:
                return
            recorder.current_thread_state().inside = self._around
            if result is None and sys.exc_info()[1] is not None:
                self._failed(now)
                return
            head = 0 if self._mark is None else self._mark.end()
            self._write(now, recorder.session.output_definition(result, self._memos[1]), head)
            if watch.odd is False and not is_gatherable(result):
                watch.odd = True
        except Exception as error:  # noqa: BLE001 - missing sizes must not stop a training
            recorder.session.count_error("inputs and outputs of a replica", error)

    def _failed(self, now: int) -> None:
        head = 0 if self._mark is None else self._mark.raised()
        self._write(now, 0, head | Flag.FAILED << FLAGS_AT)

    def _write(self, now: int, outputs: int, more: int) -> None:
        watch, mark = self._watch, self._mark
        head = Kind.REPLICA | watch.head | self.index << SITE_AT | more
        number = watch.recorder.put(head, self._began, now - self._began, self._inputs | outputs << 32)
        if mark is not None:
            mark.set_span_number(number)
        watch.ran += 1

    def hook(self, replica: object) -> None:
        """Put the two hooks on a replica, after the script's own hooks."""
        own = replica.__dict__
        for name, hook in (("_forward_pre_hooks", self.before_forward), ("_forward_hooks", self.after_forward)):
            own[name] = hooks = OrderedDict(own[name])
            hooks[KEY] = hook
        for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            own[name] = OrderedDict(own[name])
            own[name][KEY] = True

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the callable of this probe. parallel_apply calls the probe in place of the callable."""
        self.before_forward(None, args, kwargs)
        try:
            result = self.module(*args, **kwargs)
        except BaseException as error:
            self.raised()
            drop_frames(error)
            args, kwargs = (), {}
            raise
        self.after_forward(None, args, kwargs, result)
        return result

    def raised(self) -> None:
        """Handle an exception of the module on this thread. Never raises."""
        with self._watch.recorder.session.guard("inputs and outputs of a replica", fatal=False):
            self._nested = 0
            self._watch.recorder.current_thread_state().inside = self._around
            self._failed(monotonic_ns())


class ReplicaProbes:
    """The replicas of one call."""

    __slots__ = ("_memos", "head", "odd", "probes", "ran", "recorder", "site", "timing")

    def __init__(self, recorder: SpanRecorder, me: ThreadState, site: TracedModule, strict: bool) -> None:
        """`me`: the thread that makes the call. `strict`: whether to check for results that gather would change."""
        self.recorder = recorder
        self.site = site
        self.timing = recorder.timing if me is recorder.training_thread else None
        self.head = me.head | site.kind << INSIDE_AT
        self.odd: bool | None = False if strict else None
        """Whether a replica returned something that torch's gather would change; None if this is not checked."""
        self._memos = site.replicas
        """The last sizes of each replica, kept between calls."""
        self.probes: list[ReplicaProbe] = []
        self.ran = 0
        """Number of replicas that have run."""

    def _probe(self, index: int) -> ReplicaProbe:
        while len(self._memos) <= index:
            self._memos.append((SizeCache(), SizeCache()))
        probe = ReplicaProbe(self, index, self._memos[index])
        self.probes.append(probe)
        return probe

    def stand_ins(self, modules: Any) -> object:
        """Return stand-ins that parallel_apply calls in place of `modules`, in the same order.

        If the script has hooks on its module, they may change the inputs. In this case, return the replicas themselves,
        with our hooks after the script's.
        """
        first = getattr(modules[0], "__dict__", {}) if modules else {}
        if "_is_replica" in first and (first["_forward_pre_hooks"] or first["_forward_hooks"]):
            self.hook(modules)
            return modules
        for index, module in enumerate(modules):
            self._probe(index).module = module
        return self.probes

    def wrapped_arguments(self, args: Any, kwargs: Any) -> tuple[object, object]:
        """Return the arguments of parallel_apply, with stand-ins for its modules."""
        if args and isinstance(args[0], (list, tuple)):
            return (self.stand_ins(args[0]), *args[1:]), kwargs
        if isinstance(kwargs.get("modules"), (list, tuple)):
            return args, {**kwargs, "modules": self.stand_ins(kwargs["modules"])}
        return args, kwargs

    def hook(self, replicas: list[object]) -> None:
        """Hook these replicas, numbered in this order."""
        for index, replica in enumerate(replicas):
            self._probe(index).hook(replica)

    def close(self) -> None:
        """Break the reference cycle of probes and watch after the call, so that no garbage collection is needed."""
        for probe in self.probes:
            probe.module = None
        self.probes = []
