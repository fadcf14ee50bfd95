"""Records the input sizes, output sizes and times of DataParallel's replicas, with forward hooks.

torch's replica is a throw-away copy of the module that shares the module's dicts of hooks. dpmon gives each replica its
own dicts. So our hooks never appear on the script's module, and are never pickled or copied with it, even by another
thread.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, SITE_AT, Flag, Kind
from dpmon.tracer.calls.traced_modules import TracedModule
from dpmon.tracer.core.hidden_frames import drop_frames
from dpmon.tracer.core.session import SizeCache
from dpmon.tracer.core.tensor_sizes import is_gatherable
from dpmon.tracer.devices.device_timing import gpu_of
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

HOOK_KEY = -7061
"""Key of our hooks. torch counts up from 0, so no other hook has a negative key."""
ROWS_ADVICE = "return one row per input row, and compute the loss outside the model"
"""Advice for a script that should work with dp."""
ODD_RESULT = f"{ROWS_ADVICE}: the model returns a scalar or values other than tensors, which DataParallel would change"


class ResultsWouldChange(Exception):
    """An error that means: dp would change the meaning of a bare root's results for the script. Its text says why."""


class ReplicaProbe:
    """An observer of one replica in one call."""

    __slots__ = (
        *("_caches", "_depth", "_inputs", "_mode", "_outer_kind", "_probes", "_start_ns", "_timer", "index", "module"),
    )

    def __init__(self, probes: ReplicaProbes, index: int, size_caches: tuple[SizeCache, SizeCache]) -> None:
        self._probes = probes
        self._caches = size_caches
        self.index = index
        self.module: Any = None
        """The callable that it replaces (see `ReplicaProbes.make_stand_ins`); None if the replica has our hooks."""
        self._inputs = self._start_ns = 0
        self._depth = 0
        """Number of nested calls that are running."""
        self._outer_kind = 0
        """Kind of the enclosing span on its thread."""
        self._mode: Any = None
        """The `FlopCounter` on its thread; None if it does not count there."""
        self._timer: Any = None
        """Its device time; None if it is not timed."""

    def before_forward(self, module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Note the start of the forward. A forward pre-hook; returns None, so the inputs stay unchanged.

        It runs on the replica's thread. A module may call itself: the outermost call has the replica's inputs and
        outputs.
        """
        recorder = self._probes.recorder
        try:
            self._depth += 1
            if self._depth > 1:
                return
            thread = recorder.current_thread_state()
            self._outer_kind, thread.open_kind = thread.open_kind, Kind.REPLICA  # no roots inside a replica
            self._mode = None if thread is recorder.training_thread else recorder.counting_mode
            if self._mode is not None:
                torch._C._push_on_torch_dispatch_stack(self._mode)
            input_cache, _ = self._caches
            self._inputs = recorder.session.input_definition(args, kwargs, input_cache)
            if self._probes.timer is not None:
                devices = self._probes.traced_module.plan.devices
                gpu = gpu_of(devices[self.index]) if self.index < len(devices) else -1
                self._timer = self._probes.timer.begin_part(gpu)
        except Exception as error:  # noqa: BLE001 - missing sizes must not stop a training
            recorder.session.count_error("inputs and outputs of a replica", error)
        self._start_ns = monotonic_ns()

    def after_forward(
        self, module: object, args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> None:
        """Write the replica's span. A forward hook; torch passes None as the result if the replica raised."""
        end_ns = monotonic_ns()
        probes = self._probes
        recorder = probes.recorder
        try:
            if not self._depth:
                return
            self._depth -= 1
            if self._depth:
                return
            self._leave_thread()
            if result is None and sys.exc_info()[1] is not None:
                self._write_failed(end_ns)
                return
            flag_bits = 0 if self._timer is None else self._timer.end()
            _, output_cache = self._caches
            self._write(end_ns, recorder.session.output_definition(result, output_cache), flag_bits)
            if probes.has_odd_result is False and not is_gatherable(result):
                probes.has_odd_result = True
        except Exception as error:  # noqa: BLE001 - missing sizes must not stop a training
            recorder.session.count_error("inputs and outputs of a replica", error)

    def _leave_thread(self) -> None:
        self._probes.recorder.current_thread_state().open_kind = self._outer_kind
        if self._mode is not None:
            torch._C._pop_torch_dispatch_stack(None)

    def _write_failed(self, end_ns: int) -> None:
        """Write the span of a replica that raised."""
        flag_bits = 0 if self._timer is None else self._timer.end()
        self._write(end_ns, 0, flag_bits | Flag.FAILED << FLAGS_AT)

    def _write(self, end_ns: int, output_sizes: int, flag_bits: int) -> None:
        """Write the replica's span. `output_sizes`: the definition of its outputs, 0 if unknown."""
        probes, phase_timer = self._probes, self._timer
        first_word = Kind.REPLICA | probes.span_bits | self.index << SITE_AT | flag_bits
        sizes = self._inputs | output_sizes << 32
        span_number = probes.recorder.put(first_word, self._start_ns, end_ns - self._start_ns, sizes)
        if phase_timer is not None:
            phase_timer.set_span_number(span_number)
        probes.run_count += 1

    def hook(self, replica: object) -> None:
        """Put the two hooks on a replica, after the script's own hooks."""
        attributes = replica.__dict__
        for name, hook in (("_forward_pre_hooks", self.before_forward), ("_forward_hooks", self.after_forward)):
            attributes[name] = hooks = OrderedDict(attributes[name])
            hooks[HOOK_KEY] = hook
        for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            attributes[name] = OrderedDict(attributes[name])
            attributes[name][HOOK_KEY] = True

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the callable of this probe. parallel_apply calls the probe in place of the callable."""
        self.before_forward(None, args, kwargs)
        try:
            result = self.module(*args, **kwargs)
        except BaseException as error:
            self.handle_error()
            drop_frames(error)
            args, kwargs = (), {}
            raise
        self.after_forward(None, args, kwargs, result)
        return result

    def handle_error(self) -> None:
        """Handle an exception of the module on this thread. Never raises."""
        with self._probes.recorder.session.guard("inputs and outputs of a replica", fatal=False):
            self._depth = 0
            self._leave_thread()
            self._write_failed(monotonic_ns())


class ReplicaProbes:
    """The replicas of one call."""

    __slots__ = ("_caches", "has_odd_result", "probes", "recorder", "run_count", "span_bits", "timer", "traced_module")

    def __init__(
        self, recorder: SpanRecorder, thread: ThreadState, traced_module: TracedModule, checks_results: bool
    ) -> None:
        """`thread` makes the call. `checks_results`: whether to check for results that gather would change."""
        self.recorder = recorder
        self.traced_module = traced_module
        self.timer = recorder.device_timer if thread is recorder.training_thread else None
        self.span_bits = thread.thread_bits | traced_module.kind << INSIDE_AT
        self.has_odd_result: bool | None = False if checks_results else None
        """Whether a replica returned something that torch's gather would change; None if this is not checked."""
        self._caches = traced_module.replica_caches
        """For each replica, caches for its inputs and its outputs, kept between calls."""
        self.probes: list[ReplicaProbe] = []
        self.run_count = 0
        """Number of replicas that have run."""

    def _add_probe(self, index: int) -> ReplicaProbe:
        """Add a probe for the replica `index`, and return it."""
        while len(self._caches) <= index:
            self._caches.append((SizeCache(), SizeCache()))
        probe = ReplicaProbe(self, index, self._caches[index])
        self.probes.append(probe)
        return probe

    def make_stand_ins(self, modules: Any) -> object:
        """Return stand-ins that parallel_apply calls in place of `modules`, in the same order.

        If the script has hooks on its module, they may change the inputs. In this case, return the replicas themselves,
        with our hooks after those of the script.
        """
        first = getattr(modules[0], "__dict__", {}) if modules else {}
        if "_is_replica" in first and (first["_forward_pre_hooks"] or first["_forward_hooks"]):
            self.hook(modules)
            return modules
        for index, module in enumerate(modules):
            self._add_probe(index).module = module
        return self.probes

    def wrap_arguments(self, args: Any, kwargs: Any) -> tuple[object, object]:
        """Return the arguments of parallel_apply, with stand-ins for its modules."""
        if args and isinstance(args[0], (list, tuple)):
            return (self.make_stand_ins(args[0]), *args[1:]), kwargs
        if isinstance(kwargs.get("modules"), (list, tuple)):
            return args, {**kwargs, "modules": self.make_stand_ins(kwargs["modules"])}
        return args, kwargs

    def hook(self, replicas: list[object]) -> None:
        """Put hooks on these replicas, which are numbered in this order."""
        for index, replica in enumerate(replicas):
            self._add_probe(index).hook(replica)

    def close(self) -> None:
        """Break the reference cycle with the probes after the call, so that no garbage collection is needed."""
        for probe in self.probes:
            probe.module = None
        self.probes = []
