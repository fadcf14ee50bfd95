"""Traces calls of models: wraps Module.__call__ of a root, DataParallel.forward and data_parallel.

The wrapper always runs torch's own code, even if the tracer fails. It removes its own frame from tracebacks
(dpmon.tracer.core.hidden_frames).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
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
from dpmon.tracer.modes.mode_decision import ModeDecider
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

REQUEST = HeaderWord.REQUEST
_LEARNS = (Flag.TRAINING | Flag.GRAD) << FLAGS_AT
HIDING = frozenset(kind for kind in range(32) if kind not in (0, Kind.FETCH, Kind.OPTIMIZER, Kind.COPY))
"""Kinds of spans inside which a call of a module is not recorded as a call."""


class CallTracer:
    """Traces the calls of one process."""

    def __init__(
        self, session: Session, recorder: SpanRecorder, modes: ModeDecider, sites: TracedModules, split: SplitRunner
    ) -> None:
        self.session = session
        self.recorder = recorder
        self.modes = modes
        self.sites = sites
        self.split = split

    # ---------------------------------------------------------------- the wrapper

    def wrap_call(
        self,
        original: Function,
        site_of: Callable[[Any, ThreadState], TracedModule | None],
        *,
        root: bool,
    ) -> Function:
        """The traced form of `original`, a function of a module and its arguments.

        `site_of(module, thread)` makes the site of a module at its first call; None if its calls are not recorded.
        `root`: whether the modules are bare roots. A call of a bare root inside another call is not recorded; a
        data-parallel call inside a root is.
        """
        session, recorder, modes = self.session, self.recorder, self.modes
        threads, new, sites = recorder.threads, recorder.current_thread_state, self.sites.known
        hiding = HIDING if root else HIDING - {Kind.CALL}
        is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
        tracing = torch._C._get_tracing_state  # during torch.jit.trace, sizes are tensors of its graph
        function_modes = torch._C._len_torch_function_stack  # a mode of the script would see our reads of sizes
        graph_task = torch._C._current_graph_task_id  # not -1 while autograd recomputes a checkpoint, on any thread
        clock, tensor = monotonic_ns, torch.Tensor
        run, settle = self.split.run, self.split.finish

        def traced(module: object, *args: object, **kwargs: object) -> object:
            if is_compiling():
                return original(module, *args, **kwargs)
            me = around = None
            inside = 0
            try:
                me = threads.get(get_ident()) or new()
                inside, around = me.inside, me.split
                if inside == Kind.OPTIMIZER:
                    inside = recorder.current_open_kind(me)
                if inside in hiding or tracing() is not None or graph_task() != -1:
                    return original(module, *args, **kwargs)
                site = mark = None
                inputs = 0
                try:
                    site = sites.get(id(module))
                    if inside == 0:
                        recorder.calls = number = recorder.calls + 1
                        if number > recorder.calls_before_step:
                            recorder.on_call(me)
                    elif recorder.training_thread is None:  # for example in the closure of an optimizer
                        recorder.on_call(me)
                    if inside != Kind.CALL and recorder.words[REQUEST] != modes.serial and modes.apply_new_request():
                        self.sites.replan_all()
                        site = None
                    if site is None or (site.moves and site.place is not None and site.place.is_stale()):
                        with torch._C.DisableTorchFunction():  # hides our reads from the script's modes
                            site = None if session.off else site_of(module, me)
                    if site is not None:
                        memo, seen = site.inputs, function_modes()
                        if (
                            len(args) == 1
                            and not (kwargs or seen)
                            and type(value := args[0]) is tensor
                            and value.shape == memo.shape
                            and value.dtype is memo.dtype
                        ):
                            inputs = memo.number
                        else:
                            inputs = session.input_definition(args, kwargs, memo)
                        value = None
                        if recorder.timing is not None:
                            mark = recorder.timing.begin_call(me, site.gpus)
                except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                    session.count_error("beginning of a call", error)
                if site is None:
                    return original(module, *args, **kwargs)
                kind, plain, layout = site.kind, site.plain, site.head
                head = layout | me.head | inside << INSIDE_AT | kind
                if root:
                    me.root = site
                began = clock()
                recorder.words[me.word] = began
                recorder.kinds[me.number] = kind
                try:
                    me.inside = kind
                    result = (
                        original(module, *args, **kwargs) if plain else run(me, site, original, module, args, kwargs)
                    )
                except BaseException as error:
                    me.inside = inside
                    try:
                        if not plain:
                            head = head ^ layout | settle(me, site, 0, True)
                        head |= self.flags(module)
                    except Exception as fault:  # noqa: BLE001 - the script's exception must be raised
                        session.count_error("end of a call", fault)
                    recorder.write_failed(me, head, began, inputs, error, mark)
                    raise
                me.inside = inside
                took = outputs = 0
                try:
                    took = clock() - began
                    recorder.kinds[me.number] = inside
                    if mark is not None:
                        head |= mark.end()
                    memo = site.outputs
                    if (
                        not seen
                        and type(result) is tensor
                        and result.shape == memo.shape
                        and result.dtype is memo.dtype
                    ):
                        outputs = memo.number
                    else:
                        outputs = session.output_definition(result, memo)
                    if not plain:
                        head = head ^ layout | settle(me, site, outputs, False)
                    if site.via is None and is_grad_enabled() and module.__dict__.get("training") is True:
                        head |= _LEARNS
                    else:
                        head |= self.flags(module)
                    number = recorder.put(head, began, took, inputs | outputs << 32)
                    if mark is not None:
                        mark.set_span_number(number)
                except BaseException as error:  # noqa: BLE001 - raised again if it is not a fault of ours
                    recorder.write_again(head, began, took or clock() - began, inputs | outputs << 32, error)
                return result
            except BaseException as error:
                if me is not None:  # an interrupt may have come between any two lines
                    me.inside, me.split = inside, around
                drop_frames(error)
                module, args, kwargs, value, result, around = None, (), {}, None, None, None
                raise

        return copy_name_and_signature(traced, original)

    def flags(self, module: object) -> int:
        """Return the flags for a call's span: whether the module trains, and whether gradients are enabled."""
        return (Flag.TRAINING * in_training_mode(module) | Flag.GRAD * torch.is_grad_enabled()) << FLAGS_AT

    # ---------------------------------------------------------------- DataParallel

    def wrap_forward(self, original: Function) -> Function:
        """The traced form of DataParallel.forward."""
        traced: Any = self.wrap_call(original, self._wrapper_site, root=False)
        # Its own code object, so that torch.compile starts at it and compiles the original as written.
        traced.__code__ = traced.__code__.replace()
        return traced  # type: ignore[no-any-return]

    def _wrapper_site(self, module: object, me: ThreadState) -> TracedModule | None:
        if not self.session.ensure_open():
            return None
        return self.sites.register(self.sites.of_wrapper(module))

    def trace_subclass(self, kind: type) -> None:
        """Trace a subclass of DataParallel with its own forward."""
        for base in kind.__mro__:
            forward = base.__dict__.get("forward")
            if base is torch.nn.DataParallel or isinstance(forward, _Forward):
                return
            if forward is not None:
                if isinstance(forward, FunctionType):
                    base.forward = _Forward(forward, self.wrap_forward(forward))  # type: ignore[attr-defined]
                return

    # ---------------------------------------------------------------- the functional form

    def wrap_data_parallel(self, original: Function) -> Function:
        """The traced form of the function torch.nn.parallel.data_parallel."""

        def run(call: FunctionalStandIn, *args: object, **kwargs: object) -> object:
            """Run a call that is not recorded. Without GPUs, it still needs virtual replicas."""
            ids, output, dim = call.given
            plan = None
            with self.session.guard("data_parallel"):
                plan = self.modes.plan_functional(call.module, ids)
            if plan is None or plan.virtual is None:
                return original(call.module, args, ids, output, dim, kwargs)
            return plan.virtual.functional(call.module, args, list(plan.device_ids or ()), None, dim, kwargs)

        traced, signature = self.wrap_call(run, self._functional_site, root=False), inspect.signature(original)

        def data_parallel(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            try:
                bound = self._bind_arguments(signature, args, kwargs)
                if bound is None:
                    return original(*args, **kwargs)
                call, inputs, named = bound
                return traced(call, *inputs, **named)
            except BaseException as error:
                drop_frames(error)
                args, kwargs, bound, call, inputs, named = (), {}, None, None, None, None
                raise

        return copy_name_and_signature(data_parallel, original)

    def _bind_arguments(self, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        """Return a stand-in for the module, and its arguments; None to run the call as written. Never raises."""
        with self.session.guard("data_parallel"), suppress(TypeError):  # torch reports a wrong number of arguments
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            module, inputs, ids, output, dim, named = bound.args
            if isinstance(module, torch.nn.Module):
                inputs = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
                given = None if ids is None else tuple(ids), output, dim
                return self.sites.functional(module, given), inputs, named or {}
        return None

    def _functional_site(self, call: FunctionalStandIn, me: ThreadState) -> TracedModule | None:
        if not self.session.ensure_open():
            return None
        if me.inside == Kind.CALL and me.root is not None:
            self.sites.splits_itself(me.root)
        return self.sites.register(self.sites.of_functional(call))


class _Forward:
    """Descriptor for the forward of a script's subclass: instances get the traced function, the class the original."""

    def __init__(self, original: object, traced: Function) -> None:
        self._original = original
        self._traced = traced

    def __get__(self, module: object, owner: object = None) -> object:
        return self._original if module is None else MethodType(self._traced, module)

    def __reduce__(self) -> Any:
        # A class that is pickled by value (cloudpickle) contains the script's function, not ours.
        return next, (iter([self._original]),)
