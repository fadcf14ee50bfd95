"""Traces scatter, replicate, parallel_apply and gather: as phases of a call, or in calls that the script composes.

In a composed call, each of these functions writes a span with the flag BY_SCRIPT. dpmon.assemble joins these spans into
calls. A replica may be any callable passed to parallel_apply, not only a replica made by torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, Flag, Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.calls.replicas import ODD_RESULT, ReplicaProbes, ResultsWouldChange
from dpmon.tracer.calls.traced_modules import TracedModule, TracedModules
from dpmon.tracer.core.hidden_frames import Function, copy_name_and_signature, drop_frames
from dpmon.tracer.core.module_tables import in_training_mode, name_of
from dpmon.tracer.core.session import Session, SizeCache
from dpmon.tracer.core.tensor_sizes import device_in, signature_of_value
from dpmon.tracer.modes.mode_decision import ModeDecider
from dpmon.tracer.modes.virtual_devices import (
    BROADCAST_APPLY,
    PARALLEL_APPLY,
    PRIMITIVES,
    REPLICATE,
    SCATTER,
    SCATTER_APPLY,
    SCATTER_KWARGS,
    TorchOriginals,
)
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

PRIMITIVE_KINDS = (*PRIMITIVES, Kind.SCATTER, Kind.SCATTER, Kind.REPLICATE, Kind.GATHER)
"""Kind of each function in `TorchOriginals.all`."""
_CALL_KINDS = frozenset((Kind.CALL, Kind.WRAPPED))
_MOVING_KINDS = frozenset((Kind.SCATTER, Kind.REPLICATE, Kind.GATHER))
MAX_COMPOSED_CALLS = 256
_DEVICE_ARGUMENTS = {
    SCATTER_KWARGS: (2, "target_gpus"),
    SCATTER: (1, "target_gpus"),
    SCATTER_APPLY: (0, ""),
    REPLICATE: (1, "devices"),
    BROADCAST_APPLY: (0, ""),
    PARALLEL_APPLY: (3, "devices"),
}
"""Position and name of the argument with the devices, by index in `TorchOriginals.all`."""
_UNKNOWN = "unknown"
_SCRIPT_KINDS = frozenset((0, Kind.FETCH, Kind.CALL, Kind.OPTIMIZER, Kind.CLOSURE, Kind.COPY))
"""Spans in which the script's own code runs."""


@dataclass(eq=False)
class PrimitiveTracer:
    """The tracer of one process's primitives, on every thread."""

    session: Session
    recorder: SpanRecorder
    modes: ModeDecider
    traced_modules: TracedModules
    originals: TorchOriginals
    _composed_modules: dict[object, tuple[int, TracedModule]] = field(default_factory=dict)
    """For composed calls, by root and devices: the serial of the mode request for which they were planned, and the
    module."""

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._composed_modules.clear()

    def wrap_primitive(self, primitive: int) -> Function:
        """Return the traced form of a function. `primitive`: its index in `TorchOriginals.all`."""
        recorder, run_composed = self.recorder, self._run_composed
        original, span_kind = self.originals.all[primitive], PRIMITIVE_KINDS[primitive]
        count_error = self.session.count_error
        is_compiling = torch.compiler.is_dynamo_compiling

        def phase(*args: object, **kwargs: object) -> object:
            if is_compiling():
                return original(*args, **kwargs)
            thread, outer_kind = None, 0
            try:
                thread = recorder.threads.get(get_ident()) or recorder.current_thread_state()
                call, outer_kind = thread.split_call, thread.open_kind
                if outer_kind in _MOVING_KINDS:  # a primitive inside another one is not a phase
                    return original(*args, **kwargs)
                if call is None or outer_kind not in _CALL_KINDS:
                    return run_composed(thread, primitive, span_kind, original, args, kwargs)
                replicas = call.probes
                if span_kind == Kind.GATHER and replicas is not None and replicas.has_odd_result:
                    raise ResultsWouldChange(ODD_RESULT)
                if span_kind == Kind.PARALLEL_APPLY and replicas is not None and not replicas.probes:
                    try:
                        args, kwargs = replicas.wrap_arguments(args, kwargs)
                    except Exception as error:  # noqa: BLE001 - missing sizes must not stop a training
                        count_error("replicas", error)
                virtual_devices = call.plan.virtual_devices
                function = original if virtual_devices is None else virtual_devices.primitives[primitive]
                device_timer, phase_timer = recorder.device_timer, None
                if device_timer is not None:
                    phase_timer = device_timer.begin(thread, call.traced_module.gpus, is_call_phase=True)
                first_word = span_kind | thread.thread_bits | outer_kind << INSIDE_AT
                result = recorder.run_in_span(thread, first_word, phase_timer, None, function, args, kwargs)
                call.phases.add(span_kind)
                try:
                    if primitive == REPLICATE and replicas is not None:
                        if "parallel_apply" in call.traced_module.overridden_names:
                            replicas.hook(result)  # the script's own method runs them
                    elif primitive == SCATTER_KWARGS and len(call.plan.devices) == 1:
                        inputs, keywords = result
                        call.lone_run = inputs[0], keywords[0], monotonic_ns()
                        thread.open_kind = Kind.REPLICA  # until the call ends, torch runs the module itself
                except Exception as error:  # noqa: BLE001 - torch has the result anyway
                    count_error("replicas", error)
                return result
            except BaseException as error:
                if thread is not None:  # an interrupt may have come between any two lines
                    thread.open_kind = outer_kind
                drop_frames(error)
                args, kwargs, call, replicas, virtual_devices, result = (), {}, None, None, None, None
                inputs = keywords = None
                raise

        return copy_name_and_signature(phase, original)

    # ---------------------------------------------------------------- composed calls

    def _run_composed(
        self, thread: ThreadState, primitive: int, span_kind: int, original: Function, args: Any, kwargs: Any
    ) -> object:
        """Run a primitive that the script calls itself. The caller removes our frames from a traceback."""
        session, recorder = self.session, self.recorder
        outer_kind = thread.open_kind
        if outer_kind not in _SCRIPT_KINDS or torch._C._current_graph_task_id() != -1:
            return original(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            return original(*args, **kwargs)
        function, probes, phase_timer = original, None, None
        first_word = span_kind | thread.thread_bits | outer_kind << INSIDE_AT | Flag.BY_SCRIPT << FLAGS_AT
        is_recorded = not session.is_off
        try:
            # Needed even after the tracer has given up, because the script depends on the virtual devices.
            virtual_devices = self.modes.composed_devices()
            if virtual_devices is not None:
                function = virtual_devices.primitives[primitive]
            if primitive in _DEVICE_ARGUMENTS and (span_kind == Kind.SCATTER or not thread.passed_devices):
                thread.passed_devices = _devices_argument(*_DEVICE_ARGUMENTS[primitive], args, kwargs)
            if is_recorded and span_kind == Kind.PARALLEL_APPLY:
                is_recorded, begun = False, None
                if session.ensure_open():
                    begun = self._begin_parallel_apply(thread, virtual_devices, args, kwargs)
                if begun is not None:
                    is_recorded = True
                    probes, layout_bits = begun
                    first_word |= layout_bits
                    args, kwargs = probes.wrap_arguments(args, kwargs)
            device_timer = recorder.device_timer
            if is_recorded and device_timer is not None:
                if probes is None:
                    phase_timer = device_timer.begin(thread)
                else:
                    phase_timer = device_timer.begin_call(thread, probes.traced_module.gpus)
        except Exception as error:  # noqa: BLE001 - the script's function runs anyway
            session.count_error("scatter, replicate, parallel_apply or gather", error)
        try:
            if is_recorded:
                sizes = partial(self._size_definitions, primitive, span_kind, args, kwargs)
                return recorder.run_in_span(thread, first_word, phase_timer, sizes, function, args, kwargs)
            thread.open_kind = span_kind
            return function(*args, **kwargs)
        finally:
            thread.open_kind = outer_kind
            if probes is not None:
                probes.close()

    def _size_definitions(self, primitive: int, span_kind: int, args: object, kwargs: object, result: object) -> int:
        """Return the sizes for a primitive's span."""
        if span_kind == Kind.GATHER:
            return self.session.output_definition(result, SizeCache()) << 32
        if span_kind == Kind.SCATTER:
            return self.session.size_definition("0", tuple(_scattered_signatures(primitive, args, kwargs)))
        return 0

    def _begin_parallel_apply(
        self, thread: ThreadState, virtual_devices: object, args: Any, kwargs: Any
    ) -> tuple[ReplicaProbes, int] | None:
        """Return the probes of a new parallel_apply, and layout and flags for its span; None if it is not recorded."""
        recorder, modes = self.recorder, self.modes
        modules = _argument(0, "modules", args, kwargs)
        inputs = _argument(1, "inputs", args, kwargs)
        keywords = _argument(2, "kwargs_tup", args, kwargs)
        devices, thread.passed_devices = thread.passed_devices, ()
        if not (isinstance(modules, (list, tuple)) and modules and isinstance(inputs, (list, tuple))):
            return None
        if thread.open_kind == 0:
            recorder.recent_calls += 1
            if recorder.recent_calls > recorder.max_recent_calls:
                recorder.on_call(thread)
            if recorder.words[HeaderWord.REQUEST] != modes.request_serial and modes.apply_new_request():
                self.traced_modules.forget_plans()
        elif thread.open_kind == Kind.CALL and thread.root is not None:
            self.traced_modules.note_splits_itself(thread.root)
        if virtual_devices is not None:
            devices = tuple(f"cpu:{index}" for index in range(max(len(devices), len(modules))))
        elif len(devices) < len(modules):
            devices = tuple(device_in(pair) or _UNKNOWN for pair in zip(inputs, keywords or inputs, strict=False))
        first = modules[0]
        traced_module = self._composed_module(name_of(first), devices, virtual_devices)
        has_grad = torch.is_grad_enabled()  # a function has no training mode: enabled gradients count as training
        is_training = in_training_mode(first) if isinstance(first, torch.nn.Module) else has_grad
        layout_bits = traced_module.layout_bits | (Flag.TRAINING * is_training | Flag.GRAD * has_grad) << FLAGS_AT
        return ReplicaProbes(recorder, thread, traced_module, checks_results=False), layout_bits

    def _composed_module(self, root: str, devices: tuple[str, ...], virtual_devices: Any) -> TracedModule:
        """Return the TracedModule that represents composed calls. `root`: the name of their first module."""
        modes = self.modes
        serial, traced_module = self._composed_modules.get((root, devices), (None, None))
        if traced_module is not None and serial == modes.request_serial:
            return traced_module
        if len(self._composed_modules) >= MAX_COMPOSED_CALLS:
            self._composed_modules.clear()
        # It belongs to no single module, so it is its own model.
        plan = modes.plan_composed(devices, virtual_devices)
        traced_module = TracedModule(self, plan, "data_parallel", lambda _: None)
        traced_module.model_name, traced_module.kind = root, Kind.PARALLEL_APPLY
        _, traced_module.model_number = self.traced_modules.model_names.name_and_number(traced_module)
        if _UNKNOWN in devices:
            traced_module.absent = {"device_ms": "a replica got no tensor, so its device is unknown"}
        if traced_module.gpus:
            self.traced_modules.on_gpu_call()
        traced_module.layout_bits = self.traced_modules.encode_layout(traced_module, plan)
        modes.record_plan(root, plan)
        self._composed_modules[root, devices] = modes.request_serial, traced_module
        return traced_module


def _argument(position: int, name: str, args: Any, kwargs: Any) -> Any:
    """Return the argument `name` of a call, at index `position`; None if it is missing."""
    return args[position] if len(args) > position else kwargs.get(name)


def _devices_argument(position: int, name: str, args: Any, kwargs: Any) -> tuple[str, ...]:
    """Return the devices in the argument `name`, at index `position`; empty if it names none."""
    devices = _argument(position, name, args, kwargs)
    if not isinstance(devices, (list, tuple, range)) or None in devices:
        return ()
    return tuple(f"cuda:{device}" if isinstance(device, int) else str(device) for device in devices)


def _scattered_signatures(primitive: int, args: Any, kwargs: Any) -> list[object]:
    """Return the signatures of the inputs of a scatter function. `primitive`: its index in `TorchOriginals.all`."""
    values: Any
    keywords: Any = {}
    if primitive == SCATTER_KWARGS:  # scatter_kwargs(inputs, kwargs, devices)
        values = args[0] if args else kwargs["inputs"]
        keywords = _argument(1, "kwargs", args, kwargs) or {}
    elif primitive == SCATTER:  # scatter(inputs, devices)
        values = args[0] if args else kwargs["inputs"]
        if isinstance(values, dict):
            values, keywords = (), values
        elif type(values) not in (tuple, list):
            values = (values,)
    else:  # Scatter.apply(devices, sizes, dim, tensor)
        values, keywords = args[3:], {}
    named_values = [*((str(position), value) for position, value in enumerate(values)), *keywords.items()]
    return [leaf for name, value in named_values for leaf in signature_of_value(value, name)]
