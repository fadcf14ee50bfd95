"""Traces scatter, replicate, parallel_apply and gather: as phases of a call, or in calls that the script composes.

In a composed call, each of these functions writes a span with the flag BY_SCRIPT, and dpmon.assemble joins these spans
into calls. A replica may be any callable passed to parallel_apply, not only one of torch's replicas.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, Flag, Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.calls.replicas import ODD, ReplicaProbes, ResultsWouldChange
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

KIND_OF = (*PRIMITIVES, Kind.SCATTER, Kind.SCATTER, Kind.REPLICATE, Kind.GATHER)
"""Kind of each function in `TorchOriginals.all`."""
_OURS = frozenset((Kind.CALL, Kind.WRAPPED))
_MOVING = frozenset((Kind.SCATTER, Kind.REPLICATE, Kind.GATHER))
MAX_SITES = 256
_DEVICES = {
    SCATTER_KWARGS: (2, "target_gpus"),
    SCATTER: (1, "target_gpus"),
    SCATTER_APPLY: (0, ""),
    REPLICATE: (1, "devices"),
    BROADCAST_APPLY: (0, ""),
    PARALLEL_APPLY: (3, "devices"),
}
"""Position and name of the argument for the devices, by index in `TorchOriginals.all`."""
_UNKNOWN = "unknown"
_OUTSIDE = frozenset((0, Kind.FETCH, Kind.CALL, Kind.OPTIMIZER, Kind.COPY))
"""Spans in which the script's own code runs."""


class PrimitiveTracer:
    """Traces the primitives on every thread of one process."""

    def __init__(
        self,
        session: Session,
        recorder: SpanRecorder,
        modes: ModeDecider,
        sites: TracedModules,
        originals: TorchOriginals,
    ) -> None:
        self.session = session
        self.recorder = recorder
        self.modes = modes
        self.sites = sites
        self.originals = originals
        self._sites: dict[object, tuple[int, TracedModule]] = {}
        """For composed calls, by root and devices: the mode request (`ModeDecider.serial`) that the plan follows, and
        the site."""

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._sites.clear()

    def wrap_primitive(self, number: int) -> Function:
        """The traced form of one function in `TorchOriginals.all`."""
        recorder, composed = self.recorder, self._run_composed
        original, kind = self.originals.all[number], KIND_OF[number]
        fault = self.session.count_error
        is_compiling = torch.compiler.is_dynamo_compiling

        def phase(*args: object, **kwargs: object) -> object:
            if is_compiling():
                return original(*args, **kwargs)
            me, inside = None, 0
            try:
                me = recorder.threads.get(get_ident()) or recorder.current_thread_state()
                call, inside = me.split, me.inside
                if inside in _MOVING:  # a primitive inside another one is not a phase
                    return original(*args, **kwargs)
                if call is None or inside not in _OURS:
                    return composed(me, number, kind, original, args, kwargs)
                if kind == Kind.GATHER and call.watch is not None and call.watch.odd:
                    raise ResultsWouldChange(ODD)
                if kind == Kind.PARALLEL_APPLY and call.watch is not None and not call.watch.probes:
                    try:
                        args, kwargs = call.watch.wrapped_arguments(args, kwargs)
                    except Exception as error:  # noqa: BLE001 - missing sizes must not stop a training
                        fault("replicas", error)
                virtual = call.plan.virtual
                function = original if virtual is None else virtual.primitives[number]
                timing = recorder.timing
                mark = None if timing is None else timing.begin(me, kind, call.site.gpus, shares=True)
                head = kind | me.head | inside << INSIDE_AT
                result = recorder.run_in_span(me, head, mark, None, function, args, kwargs)
                call.primitives.add(kind)
                try:
                    if number == REPLICATE and call.watch is not None and "parallel_apply" in call.site.own:
                        call.watch.hook(result)  # the script's own method runs them
                    elif number == SCATTER_KWARGS and len(call.plan.devices) == 1:
                        call.share = result[0][0], result[1][0], monotonic_ns()
                        me.inside = Kind.REPLICA  # until the call ends, torch runs the module itself
                except Exception as error:  # noqa: BLE001 - torch has the result anyway
                    fault("replicas", error)
                return result
            except BaseException as error:
                if me is not None:  # an interrupt may have come between any two lines
                    me.inside = inside
                drop_frames(error)
                args, kwargs, call, virtual, result = (), {}, None, None, None
                raise

        return copy_name_and_signature(phase, original)

    # ---------------------------------------------------------------- composed calls

    def _run_composed(
        self, me: ThreadState, number: int, kind: int, original: Function, args: Any, kwargs: Any
    ) -> object:
        """Run a primitive that the script calls itself. The caller removes our frames from a traceback."""
        session, recorder = self.session, self.recorder
        inside = me.inside
        if (
            inside not in _OUTSIDE
            or torch._C._current_graph_task_id() != -1
            or torch._C._get_tracing_state() is not None
        ):
            return original(*args, **kwargs)
        function, watch, mark = original, None, None
        head = kind | me.head | inside << INSIDE_AT | Flag.BY_SCRIPT << FLAGS_AT
        records = not session.off
        try:
            # Needed even after the tracer has given up, because the script depends on the virtual devices.
            virtual = self.modes.composed_devices()
            if virtual is not None:
                function = virtual.primitives[number]
            if number in _DEVICES and (kind == Kind.SCATTER or not me.offered):
                me.offered = _devices_argument(*_DEVICES[number], args, kwargs)
            if records and kind == Kind.PARALLEL_APPLY:
                records = False
                found = self._begin_parallel_apply(me, virtual, args, kwargs) if session.ensure_open() else None
                if found is not None:
                    records = True
                    watch, more = found
                    head |= more
                    args, kwargs = watch.wrapped_arguments(args, kwargs)
            timing = recorder.timing
            if records and timing is not None:
                mark = timing.begin(me, kind) if watch is None else timing.begin_call(me, watch.site.gpus)
        except Exception as error:  # noqa: BLE001 - the script's function runs anyway
            session.count_error("scatter, replicate, parallel_apply or gather", error)
        try:
            if records:
                sizes = partial(self._sizes, number, kind, args, kwargs)
                return recorder.run_in_span(me, head, mark, sizes, function, args, kwargs)
            me.inside = kind
            return function(*args, **kwargs)
        finally:
            me.inside = inside
            if watch is not None:
                watch.close()

    def _sizes(self, number: int, kind: int, args: object, kwargs: object, result: object) -> int:
        """Return the sizes for a primitive's span."""
        if kind == Kind.GATHER:
            return self.session.output_definition(result, SizeCache()) << 32
        return (
            self.session.size_definition("0", tuple(_scattered_signatures(number, args, kwargs)))
            if kind == Kind.SCATTER
            else 0
        )

    def _begin_parallel_apply(
        self, me: ThreadState, virtual: object, args: Any, kwargs: Any
    ) -> tuple[ReplicaProbes, int] | None:
        """Return the watch of a new parallel_apply and the flags for its span; None if it is not recorded."""
        recorder, modes = self.recorder, self.modes
        modules = args[0] if args else kwargs.get("modules")
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        named = args[2] if len(args) > 2 else kwargs.get("kwargs_tup")
        devices, me.offered = me.offered, ()
        if not (isinstance(modules, (list, tuple)) and modules and isinstance(inputs, (list, tuple))):
            return None
        if me.inside == 0:
            recorder.calls += 1
            if recorder.calls > recorder.calls_before_step:
                recorder.on_call(me)
            if recorder.words[HeaderWord.REQUEST] != modes.serial and modes.apply_new_request():
                self.sites.replan_all()
        elif me.inside == Kind.CALL and me.root is not None:
            self.sites.splits_itself(me.root)
        if virtual is not None:
            devices = tuple(f"cpu:{i}" for i in range(max(len(devices), len(modules))))
        elif len(devices) < len(modules):
            devices = tuple(device_in(given) or _UNKNOWN for given in zip(inputs, named or inputs, strict=False))
        site = self._site(name_of(modules[0]), devices, virtual)
        grad = torch.is_grad_enabled()  # a function has no training mode: enabled gradients count as training
        training = in_training_mode(modules[0]) if isinstance(modules[0], torch.nn.Module) else grad
        head = site.head | (Flag.TRAINING * training | Flag.GRAD * grad) << FLAGS_AT
        return ReplicaProbes(recorder, me, site, strict=False), head

    def _site(self, root: str, devices: tuple[str, ...], virtual: Any) -> TracedModule:
        modes = self.modes
        known = self._sites.get((root, devices))
        if known is not None and known[0] == modes.serial:
            return known[1]
        if len(self._sites) >= MAX_SITES:
            self._sites.clear()
        # It belongs to no single module, so it is its own model.
        site = TracedModule(self, modes.plan_composed(devices, virtual), "data_parallel", lambda _: None)
        site.root, site.kind = root, Kind.PARALLEL_APPLY
        site.number = self.sites.models.name_and_number(site)[1]
        if _UNKNOWN in devices:
            site.absent = {"device_ms": "a replica got no tensor, so its device is unknown"}
        if site.gpus:
            self.sites.on_gpus()
        site.head = self.sites.span_head(site, site.plan)
        modes.record_plan(root, site.plan)
        self._sites[root, devices] = modes.serial, site
        return site


def _devices_argument(at: int, name: str, args: Any, kwargs: Any) -> tuple[str, ...]:
    """Return the devices in the argument `name`, at position `at`; none if it holds none."""
    found = args[at] if len(args) > at else kwargs.get(name)
    if not isinstance(found, (list, tuple, range)) or None in found:
        return ()
    return tuple(f"cuda:{device}" if isinstance(device, int) else str(device) for device in found)


def _scattered_signatures(number: int, args: Any, kwargs: Any) -> list[object]:
    """Return the input signatures of scatter function `number` of `TorchOriginals.all`."""
    if number == SCATTER_KWARGS:  # scatter_kwargs(inputs, kwargs, devices)
        values = args[0] if args else kwargs["inputs"]
        named = (args[1] if len(args) > 1 else kwargs.get("kwargs")) or {}
    elif number == SCATTER:  # scatter(inputs, devices)
        value = args[0] if args else kwargs["inputs"]
        named = value if isinstance(value, dict) else {}
        values = () if isinstance(value, dict) else tuple(value) if type(value) in (tuple, list) else (value,)
    else:  # Scatter.apply(devices, sizes, dim, tensor)
        values, named = args[3:], {}
    found = [leaf for at, value in enumerate(values) for leaf in signature_of_value(value, str(at))]
    return found + [leaf for name, value in named.items() for leaf in signature_of_value(value, name)]
