"""Traces calls of models: wraps Module.__call__ of root modules, DataParallel.forward and data_parallel.

The wrapper always runs torch's own code, even if the tracer fails. It removes its own frames from tracebacks
(dpmon.tracer.core.hidden_frames).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from time import monotonic_ns
from types import FunctionType, MethodType
from typing import Any

import torch

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, Flag, Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.calls.split_calls import SplitRunner
from dpmon.tracer.calls.traced_modules import FunctionalStandIn, TracedModule, TracedModules
from dpmon.tracer.core.hidden_frames import Function, copy_name_and_signature, drop_frames
from dpmon.tracer.core.module_tables import in_training_mode
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import PhaseTimer
from dpmon.tracer.modes.mode_decision import ModeDecider
from dpmon.tracer.steps.flop_counting import FlopCounter
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

REQUEST = HeaderWord.REQUEST
_ModuleFinder = Callable[[Any, ThreadState], TracedModule | None]
_LEARNING_FLAGS = (Flag.TRAINING | Flag.GRAD) << FLAGS_AT
HIDING_KINDS = frozenset(range(32)) - {0, Kind.FETCH, Kind.OPTIMIZER, Kind.CLOSURE, Kind.COPY}
"""Kinds of spans in which a call of a module is not recorded as a call."""


@dataclass(eq=False)
class CallTracer:
    """The tracer of one process's calls."""

    session: Session
    recorder: SpanRecorder
    modes: ModeDecider
    traced_modules: TracedModules
    split_runner: SplitRunner
    flops: FlopCounter

    # ---------------------------------------------------------------- the wrapper

    def wrap_call(
        self,
        original: Function,
        trace_module: _ModuleFinder,
        *,
        root: bool,
    ) -> Function:
        """Return the traced form of `original`, a function of a module and its arguments.

        `trace_module(module, thread)` is called at the first call of a module. It returns a TracedModule, or None if
        the module's calls are not recorded. `root`: whether the modules are bare roots. A call of a bare root inside
        another call is not recorded; a data-parallel call inside a root is recorded.
        """
        recorder, threads, make_thread_state = self.recorder, self.recorder.threads, self.recorder.current_thread_state
        begin_call, end_call, end_failed_call = self._begin_call, self._end_call, self._end_failed_call
        run_split = self.split_runner.run
        hiding_kinds = HIDING_KINDS if root else HIDING_KINDS - {Kind.CALL}
        is_compiling, clock = torch.compiler.is_dynamo_compiling, monotonic_ns
        tracing = torch._C._get_tracing_state  # during torch.jit.trace, sizes are tensors of its graph
        graph_task = torch._C._current_graph_task_id  # not -1 while autograd recomputes a checkpoint, on any thread

        def traced(module: object, *args: object, **kwargs: object) -> object:
            if is_compiling():
                return original(module, *args, **kwargs)
            thread = outer_call = None
            outer_kind = 0
            try:
                thread = threads.get(get_ident()) or make_thread_state()
                outer_kind, outer_call = thread.open_kind, thread.split_call
                if outer_kind == Kind.OPTIMIZER:
                    outer_kind = recorder.current_open_kind(thread)
                if outer_kind in hiding_kinds or tracing() is not None or graph_task() != -1:
                    return original(module, *args, **kwargs)
                traced_module, inputs, phase_timer = begin_call(module, thread, outer_kind, trace_module, args, kwargs)
                if traced_module is None:
                    return original(module, *args, **kwargs)
                if root:
                    thread.root = traced_module
                start_ns = clock()
                recorder.words[thread.start_word] = start_ns
                recorder.open_kinds[thread.number] = traced_module.kind
                try:
                    thread.open_kind = traced_module.kind
                    if traced_module.is_plain:
                        result = original(module, *args, **kwargs)
                    else:
                        result = run_split(thread, traced_module, original, module, args, kwargs)
                except BaseException as error:
                    thread.open_kind = outer_kind
                    end_failed_call(thread, traced_module, module, start_ns, inputs, error, phase_timer)
                    raise
                thread.open_kind = outer_kind
                end_call(thread, traced_module, module, start_ns, inputs, result, phase_timer)
                return result
            except BaseException as error:
                if thread is not None:  # an interrupt may have come between any two lines
                    thread.open_kind, thread.split_call = outer_kind, outer_call
                drop_frames(error)
                module, args, kwargs, result, outer_call = None, (), {}, None, None
                raise

        return copy_name_and_signature(traced, original)

    def _begin_call(
        self,
        module: object,
        thread: ThreadState,
        outer_kind: int,
        trace_module: _ModuleFinder,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[TracedModule | None, int, PhaseTimer | None]:
        """Return how a call is traced, the definition of its inputs, and its device times; None if it is not recorded.

        See `wrap_call` for `trace_module`. Raises only exceptions of the script's signal handlers.
        """
        recorder, modes = self.recorder, self.modes
        traced_module = phase_timer = None
        inputs = 0
        try:
            if outer_kind == 0:
                recorder.recent_calls = recent_calls = recorder.recent_calls + 1
                if recent_calls > recorder.max_recent_calls:
                    recorder.on_call(thread)
            elif recorder.training_thread is None:  # for example in the closure of an optimizer
                recorder.on_call(thread)
            traced_module = self.traced_modules.modules_by_id.get(id(module))
            has_request = outer_kind != Kind.CALL and recorder.words[REQUEST] != modes.request_serial
            if has_request and modes.apply_new_request():
                self.traced_modules.forget_plans()
                traced_module = None
            if traced_module is not None and (traced_module.is_off_cpu or torch.cuda._initialized):  # it may have moved
                device = traced_module.module_device
                if device is not None and device.is_stale():
                    traced_module = None  # if the new plan fails, the call is not traced
            if traced_module is None:
                with torch._C.DisableTorchFunction():  # hides our reads from the script's modes
                    traced_module = None if self.session.is_off else trace_module(module, thread)
            if traced_module is not None:
                inputs = self.session.input_definition(args, kwargs, traced_module.input_cache)
                if recorder.on_inputs is not None and thread is recorder.training_thread:
                    recorder.on_inputs(args, kwargs)
                if outer_kind == 0:
                    if (shape := inputs | traced_module.layout_bits) not in self.flops.known:
                        self.flops.handle_call(thread, module, shape)
                    recorder.is_between_steps = False
                if recorder.device_timer is not None:
                    phase_timer = recorder.device_timer.begin_call(thread, traced_module.gpus)
        except Exception as error:  # noqa: BLE001 - our fault must not reach the script
            self.session.count_error("beginning of a call", error)
        return traced_module, inputs, phase_timer

    def _end_call(
        self,
        thread: ThreadState,
        traced_module: TracedModule,
        module: Any,
        start_ns: int,
        inputs: int,
        result: object,
        phase_timer: PhaseTimer | None,
    ) -> None:
        """Write the span of a call. Raises only exceptions of the script's signal handlers."""
        recorder, outer_kind = self.recorder, thread.open_kind
        first_word = traced_module.layout_bits | thread.thread_bits | outer_kind << INSIDE_AT | traced_module.kind
        duration_ns = outputs = 0
        try:
            duration_ns = monotonic_ns() - start_ns
            recorder.open_kinds[thread.number] = outer_kind
            if phase_timer is not None:
                first_word |= phase_timer.end()
            outputs = self.session.output_definition(result, traced_module.output_cache)
            if not traced_module.is_plain:
                layout_bits = self.split_runner.finish(thread, traced_module, outputs, False)
                first_word = first_word ^ traced_module.layout_bits | layout_bits
            if traced_module.via is None and torch.is_grad_enabled() and module.__dict__.get("training") is True:
                first_word |= _LEARNING_FLAGS
            else:
                first_word |= self.encode_flags(module)
            span_number = recorder.put(first_word, start_ns, duration_ns, inputs | outputs << 32)
            if phase_timer is not None:
                phase_timer.set_span_number(span_number)
        except BaseException as error:  # noqa: BLE001 - raised again if it is not a fault of ours
            duration_ns = duration_ns or monotonic_ns() - start_ns
            recorder.rewrite_span(first_word, start_ns, duration_ns, inputs | outputs << 32, error)

    def _end_failed_call(
        self,
        thread: ThreadState,
        traced_module: TracedModule,
        module: object,
        start_ns: int,
        inputs: int,
        error: BaseException,
        phase_timer: PhaseTimer | None,
    ) -> None:
        """Write the span of a call that raised `error`. Raises only exceptions of the script's signal handlers."""
        layout_bits = traced_module.layout_bits
        first_word = thread.thread_bits | thread.open_kind << INSIDE_AT | traced_module.kind
        try:
            if not traced_module.is_plain:
                layout_bits = self.split_runner.finish(thread, traced_module, 0, True)
            first_word |= self.encode_flags(module)
        except Exception as own_error:  # noqa: BLE001 - the script's exception must be raised
            self.session.count_error("end of a call", own_error)
        self.recorder.write_failed(thread, first_word | layout_bits, start_ns, inputs, error, phase_timer)

    def encode_flags(self, module: object) -> int:
        """Return the flags for a call's span: whether the module trains, and whether gradients are enabled."""
        return (Flag.TRAINING * in_training_mode(module) | Flag.GRAD * torch.is_grad_enabled()) << FLAGS_AT

    # ---------------------------------------------------------------- DataParallel

    def wrap_forward(self, original: Function) -> Function:
        """Return the traced form of DataParallel.forward, or of a subclass's forward."""
        traced: Any = self.wrap_call(original, self._trace_wrapper, root=False)
        # Its own code object, so that torch.compile starts at it and compiles the original as written.
        traced.__code__ = traced.__code__.replace()
        return traced  # type: ignore[no-any-return]

    def _trace_wrapper(self, module: object, thread: ThreadState) -> TracedModule | None:
        """Begin to trace a DataParallel; return None if its calls are not recorded."""
        if not self.session.ensure_open():
            return None
        return self.traced_modules.register(self.traced_modules.make_for_wrapper(module))

    def trace_subclass(self, cls: type) -> None:
        """Trace the forward of a subclass of DataParallel, if it has its own."""
        for base in cls.__mro__:
            forward = base.__dict__.get("forward")
            if base is torch.nn.DataParallel or isinstance(forward, _Forward):
                return
            if forward is not None:
                if isinstance(forward, FunctionType):
                    base.forward = _Forward(forward, self.wrap_forward(forward))  # type: ignore[attr-defined]
                return

    # ---------------------------------------------------------------- the functional form

    def wrap_data_parallel(self, original: Function) -> Function:
        """Return the traced form of the function torch.nn.parallel.data_parallel."""

        def run(stand_in: FunctionalStandIn, *args: object, **kwargs: object) -> object:
            """Run a call that is not recorded. Without GPUs, it still needs virtual replicas."""
            module, (device_ids, output, dim) = stand_in.module, stand_in.placement
            plan = None
            with self.session.guard("data_parallel"):
                plan = self.modes.plan_functional(module, device_ids)
            if plan is None or plan.virtual_devices is None:
                return original(module, args, device_ids, output, dim, kwargs)
            return plan.virtual_devices.functional(module, args, list(plan.device_ids or ()), None, dim, kwargs)

        traced, signature = self.wrap_call(run, self._trace_stand_in, root=False), inspect.signature(original)

        def data_parallel(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            try:
                bound = self._bind_arguments(signature, args, kwargs)
                if bound is None:
                    return original(*args, **kwargs)
                stand_in, inputs, keywords = bound
                return traced(stand_in, *inputs, **keywords)
            except BaseException as error:
                drop_frames(error)
                args, kwargs, bound, stand_in, inputs, keywords = (), {}, None, None, None, None
                raise

        return copy_name_and_signature(data_parallel, original)

    def _bind_arguments(self, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        """Return a stand-in for the module, and its arguments; None to run the call as written. Never raises."""
        with self.session.guard("data_parallel"), suppress(TypeError):  # torch reports a wrong number of arguments
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            module, inputs, device_ids, output, dim, keywords = bound.args
            if isinstance(module, torch.nn.Module):
                if inputs is None:
                    inputs = ()
                elif not isinstance(inputs, tuple):
                    inputs = (inputs,)
                placement = None if device_ids is None else tuple(device_ids), output, dim
                return self.traced_modules.stand_in_for(module, placement), inputs, keywords or {}
        return None

    def _trace_stand_in(self, stand_in: FunctionalStandIn, thread: ThreadState) -> TracedModule | None:
        """Begin to trace a module passed to data_parallel; return None if its calls are not recorded."""
        if not self.session.ensure_open():
            return None
        if thread.open_kind == Kind.CALL and thread.root is not None:
            self.traced_modules.note_splits_itself(thread.root)
        return self.traced_modules.register(self.traced_modules.make_for_stand_in(stand_in))


class _Forward:
    """A descriptor for a subclass's forward: instances get the traced function, the class gets the original."""

    def __init__(self, original: object, traced: Function) -> None:
        self._original = original
        self._traced = traced

    def __get__(self, module: object, owner: object = None) -> object:
        return self._original if module is None else MethodType(self._traced, module)

    def __reduce__(self) -> Any:
        # A class that is pickled by value (cloudpickle) contains the script's function, not ours.
        return next, (iter([self._original]),)
