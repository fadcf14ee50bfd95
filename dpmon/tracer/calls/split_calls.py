"""Runs calls over several devices, or in stages on several devices.

A data-parallel call goes through torch's own functions: scatter, replicate, parallel_apply, gather. For virtual
devices, the lowest layer of these functions is replaced (dpmon.tracer.modes.virtual_devices). If dp fails for a bare
root, or for a DataParallel on virtual devices, the call runs again as it would without dpmon. On virtual devices, the
random state and the buffers are restored first, until dp has worked once for the module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import CALL_PHASES
from dpmon.record.span_format import INSIDE_AT, Kind
from dpmon.tracer.calls.replicas import ROWS_ADVICE, ReplicaProbes, ResultsWouldChange
from dpmon.tracer.calls.traced_modules import FunctionalStandIn, TracedModule, TracedModules
from dpmon.tracer.core.exception_text import one_line_text
from dpmon.tracer.core.hidden_frames import Function, uncounted
from dpmon.tracer.core.module_tables import BUFFERS, tensors_of
from dpmon.tracer.core.session import Session
from dpmon.tracer.core.tensor_sizes import first_row_count, signature_of_call, tensors_in
from dpmon.tracer.modes.call_plans import DP, SINGLE, CallPlan
from dpmon.tracer.modes.mode_decision import ModeDecider
from dpmon.tracer.modes.virtual_devices import PRIMITIVES, TorchOriginals
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

_OVERLAID = frozenset(("device_ids", "src_device_obj", "output_device", "dim"))


class SavedModuleState:
    """A copy of the random state and of a module's buffers, to be restored after a failed attempt at dp."""

    def __init__(self, module: object, device: torch.device) -> None:
        self._rng_state = torch.get_rng_state()
        self._device = device
        self._gpu_rng_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in tensors_of(module, BUFFERS)]

    def restore(self) -> None:
        """Undo the attempt (but not side effects of the forward outside torch)."""
        torch.set_rng_state(self._rng_state)
        if self._gpu_rng_state is not None:
            torch.cuda.set_rng_state(self._gpu_rng_state, self._device)
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)


@dataclass(slots=True, eq=False)
class SplitCall:
    """A running call over several devices."""

    traced_module: TracedModule
    plan: CallPlan
    layout_bits: int
    """Layout and flags of its span: see `TracedModules.encode_layout`."""
    outer_call: object
    """The enclosing `SplitCall` of this thread; None if there is none."""
    probes: ReplicaProbes | None = None
    """The observers of the replicas."""
    phases: set[int] = field(default_factory=set)
    """The phases that have run, as kinds of spans."""
    lone_run: Any = None
    """If torch runs the module itself instead of a lone replica: (args, kwargs, end of scatter); otherwise None."""
    saved_state: SavedModuleState | None = None


@dataclass(eq=False)
class SplitRunner:
    """The runner of one process's calls over several devices."""

    session: Session
    recorder: SpanRecorder
    modes: ModeDecider
    traced_modules: TracedModules
    originals: TorchOriginals

    @uncounted
    def run(
        self, thread: ThreadState, traced_module: TracedModule, original: Function, module: Any, args: Any, kwargs: Any
    ) -> object:
        """Run a call in place of `original(module, *args, **kwargs)`. The caller must call `finish` afterwards."""
        call = None
        with self.session.guard("beginning of a call"):
            probes = None
            if traced_module.plan.mode == DP:
                probes = ReplicaProbes(self.recorder, thread, traced_module, checks_results=traced_module.via is None)
            plan, bits = traced_module.plan, traced_module.layout_bits
            call = thread.split_call = SplitCall(traced_module, plan, bits, thread.split_call, probes)
        if call is None:
            return original(module, *args, **kwargs)
        if isinstance(module, FunctionalStandIn):
            return self._run_functional(call, module, args, kwargs)
        if traced_module.kind == Kind.WRAPPED and traced_module.via is not None:
            return self._run_wrapper(call, thread, original, module, args, kwargs)
        if traced_module.plan.mode == DP:
            return self._run_root(call, thread, original, module, args, kwargs)
        stages = traced_module.stages if thread is self.recorder.training_thread else None
        if stages is None:
            return original(module, *args, **kwargs)
        stages.begin(self.recorder)
        try:
            return original(module, *args, **kwargs)
        finally:
            stages.end(self.recorder, thread)

    def finish(self, thread: ThreadState, traced_module: TracedModule, output_sizes: int, has_failed: bool) -> int:
        """Finish a call that `run` has run. Return layout and flags of its span (see `encode_layout`). Never raises.

        `output_sizes`: the number of the definition for the sizes of its result.
        """
        call: SplitCall | None = thread.split_call
        if call is None or call.traced_module is not traced_module:  # an interrupt came before the SplitCall existed
            return traced_module.layout_bits
        thread.split_call = call.outer_call
        with self.session.guard("end of a call"):
            try:
                if thread.dp_failure is not None:
                    self.modes.finish_fallback(thread, has_failed)
                if call.lone_run is not None and not has_failed:
                    self._write_lone_replica(thread, call, output_sizes)
                if call.traced_module.overridden_names and not has_failed:
                    self._note_bypassed_phases(call)
            finally:
                if call.probes is not None:
                    call.probes.close()
        return call.layout_bits

    def _write_lone_replica(self, thread: ThreadState, call: SplitCall, output_sizes: int) -> None:
        """Write the span of a lone replica: torch ran the module itself after the scatter."""
        args, kwargs, start_ns = call.lone_run
        inputs = self.session.input_definition(args, kwargs, call.traced_module.lone_input_cache)
        first_word = Kind.REPLICA | thread.thread_bits | call.traced_module.kind << INSIDE_AT
        self.recorder.put(first_word, start_ns, monotonic_ns() - start_ns, inputs | output_sizes << 32)

    def _note_bypassed_phases(self, call: SplitCall) -> None:
        """Note the phases that are absent because the script's subclass runs them itself."""
        traced_module, absent = call.traced_module, {}
        if call.plan.mode == DP:
            cause = f"{traced_module.via} has its own {', '.join(traced_module.overridden_names)}"
            for kind, name in zip(PRIMITIVES, CALL_PHASES, strict=True):
                if kind not in call.phases:
                    absent[name] = f"{cause} and does not use torch's {name}"
            if call.probes is None or not call.probes.run_count:
                absent["replicas"] = f"{cause}: no replica was made or run by torch's functions"
        if absent != traced_module.absent:
            traced_module.absent = absent
            traced_module.layout_bits = self.traced_modules.encode_layout(traced_module, traced_module.plan)
            call.layout_bits = self.traced_modules.encode_layout(traced_module, call.plan)

    # ---------------------------------------------------------------- the functional form

    def _run_functional(self, call: SplitCall, stand_in: FunctionalStandIn, args: Any, kwargs: Any) -> object:
        """Run a call of torch's functional data_parallel as planned."""
        plan = call.plan
        module, (device_ids, output, dim) = stand_in.module, stand_in.placement
        if plan.device_ids is None:
            return self.originals.data_parallel(module, args, device_ids, output, dim, kwargs)
        planned_ids = list(plan.device_ids)
        if plan.virtual_devices is not None:
            return plan.virtual_devices.functional(module, args, planned_ids, None, dim, kwargs)
        if plan.mode == DP:
            return self.originals.data_parallel(module, args, planned_ids, output, dim, kwargs)
        result = self.originals.data_parallel(module, args, planned_ids, None, dim, kwargs)
        if output is not None and output != planned_ids[0]:
            result = self.originals.gather([result], output, dim)
        return result

    # ---------------------------------------------------------------- DataParallel

    @uncounted
    def _run_wrapper(
        self, call: SplitCall, thread: ThreadState, original: Function, module: Any, args: Any, kwargs: Any
    ) -> object:
        """Run a call of a DataParallel as planned; if virtual replicas fail, run it as written."""
        plan = call.plan
        if plan.device_ids is None:
            return original(module, *args, **kwargs)
        view = None
        with self.session.guard("model for the replicas"):
            view = _with_devices(module, plan, call.traced_module.dim)
            self._save_state(call, module)
        if view is None:
            return original(module, *args, **kwargs)
        if plan.virtual_devices is None:
            result = original(view, *args, **kwargs)
            if plan.mode == SINGLE and module.output_device != plan.device_ids[0]:
                result = self.originals.gather([result], module.output_device, module.dim)
            self._copy_back_attributes(module, view)
            return result
        try:
            result = original(view, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - without us this call would not have been data parallel
            self._fall_back(call, thread, module, error, final=False)
        else:
            self._copy_back_attributes(module, view)
            if "forward" in call.traced_module.overridden_names and not call.phases:
                # It ran as a whole: the script's forward is not data parallel.
                call.saved_state = None
                reason = f"{call.traced_module.via} has its own forward, which uses none of DataParallel's functions"
                self._fall_back(call, thread, module, reason, final=True)
            else:
                self._note_success(call, module)
            return result
        return original(module, *args, **kwargs)

    def _save_state(self, call: SplitCall, module: object) -> None:
        """Save the state that the first attempts at virtual dp may change, in case they fail. Never raises."""
        if call.traced_module.dp_has_worked or call.plan.virtual_devices is None:
            return
        with self.session.guard("state before a call"):
            call.saved_state = SavedModuleState(module, call.plan.virtual_devices.base)

    def _note_success(self, call: SplitCall, module: Any) -> None:
        """Forget earlier failures, because dp worked. Never raises."""
        with self.session.guard("end of a call"):
            call.traced_module.dp_has_worked = True
            self.modes.clear_failures(module)

    def _copy_back_attributes(self, module: object, view: object) -> None:
        """Copy to the script's object the attributes that a subclass set on the view in the call. Never raises."""
        if type(module) is torch.nn.DataParallel:
            return
        with self.session.guard("model for the replicas"):
            attributes = module.__dict__
            for name, value in view.__dict__.items():
                if name not in _OVERLAID and attributes.get(name, attributes) is not value:
                    attributes[name] = value

    # ---------------------------------------------------------------- bare roots

    def _run_root(
        self, call: SplitCall, thread: ThreadState, original: Function, module: object, args: Any, kwargs: Any
    ) -> object:
        """Run a call of a bare root with dp; if dp fails, run it as written."""
        plan = call.plan
        self._save_state(call, module)
        try:
            function = self.originals.data_parallel if plan.virtual_devices is None else plan.virtual_devices.functional
            result = function(module, args, plan.device_ids, None, 0, kwargs)
            replica_count = 0 if call.probes is None else call.probes.run_count
            reason = changed_meaning_reason(result, args, kwargs, replica_count)
        except Exception as error:  # noqa: BLE001 - without us this call would not have been data parallel
            self._fall_back(call, thread, module, error, final=isinstance(error, ResultsWouldChange))
        else:
            if reason is None:
                self._note_success(call, module)
                return result
            self._fall_back(call, thread, module, reason, final=True)
        return original(module, *args, **kwargs)

    # ---------------------------------------------------------------- failures

    def _fall_back(
        self, call: SplitCall, thread: ThreadState, module: Any, error: Exception | str, *, final: bool
    ) -> None:
        """Note why dp failed for this call, and prepare to run the call as without dpmon. Never raises."""
        probes, call.probes, call.lone_run, call.phases = call.probes, None, None, set()
        thread.open_kind = call.traced_module.kind  # not reset yet, if a lone replica ran on this thread
        with self.session.guard("return to one device"):
            try:
                first_word = Kind.RESTARTED | thread.thread_bits | call.traced_module.kind << INSIDE_AT
                self.recorder.put(first_word, monotonic_ns(), 0, 0)
                if call.saved_state is not None:
                    call.saved_state.restore()
                reason = str(error)
                if not isinstance(error, (str, ResultsWouldChange)):
                    reason = f"the model raised {one_line_text(error)}"
                plan = self.modes.handle_dp_failure(thread, module, reason, final)
                if plan is None:
                    if call.traced_module.via is None:
                        traced_module = self.traced_modules.make_for_root(module)
                    else:
                        traced_module = self.traced_modules.make_for_wrapper(module)
                    self.traced_modules.register(traced_module)
                    plan = traced_module.plan
                call.plan = plan
                call.layout_bits = self.traced_modules.encode_layout(call.traced_module, plan)
            finally:
                if probes is not None:
                    probes.close()
        if isinstance(error, Exception):
            # A frame in the error's traceback has a local variable that refers to the error. This cycle would keep
            # the call's arguments alive until the next garbage collection.
            error.__traceback__ = None


def changed_meaning_reason(result: object, args: Any, kwargs: Any, replicas: int) -> str | None:
    """Return why dp would change the meaning of a result for the script; None if it would not.

    A script that uses DataParallel expects a vector of losses; other scripts do not.
    """
    rows = first_row_count(signature_of_call(args, kwargs))
    for tensor in tensors_in(result):
        count = tensor.shape[0] if tensor.dim() else 0
        if count != rows:
            kind = "a scalar" if tensor.dim() == 1 and count == replicas else "tensors of other lengths"
            return f"{ROWS_ADVICE}: the model returns {kind} for the {rows} rows of the batch"
    return None


def _with_devices(module: object, plan: CallPlan, dim: int) -> object:
    """Return a copy of a DataParallel with other devices. It shares all else with `module`, which stays unchanged."""
    device_ids = list(plan.device_ids or ())
    view: object = object.__new__(type(module))
    state = view.__dict__
    state.update(module.__dict__)
    state["device_ids"] = device_ids
    if plan.virtual_devices is not None:
        state["src_device_obj"] = plan.virtual_devices.base
        state["output_device"] = device_ids[0]
        state["dim"] = dim
    return view
