"""Runs calls over several devices, or in stages on several devices.

A data-parallel call goes through torch's own functions: scatter, replicate, parallel_apply, gather. For virtual
devices, the lowest layer of these functions is replaced (dpmon.tracer.modes.virtual_devices). If dp fails for a bare
root, or for a DataParallel on virtual devices, the call runs again as it would without dpmon. On virtual devices, the
random state and the buffers are restored first, until dp has worked once for the module.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import CALL_PHASES
from dpmon.record.span_format import INSIDE_AT, Kind
from dpmon.tracer.calls.replicas import ROWS, ReplicaProbes, ResultsWouldChange
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
    """The random state and the buffers of a module, restored after a failed attempt at dp."""

    def __init__(self, module: object, device: torch.device) -> None:
        self._random = torch.get_rng_state()
        self._device = device
        self._there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in tensors_of(module, BUFFERS)]

    def restore(self) -> None:
        """Undo the attempt (side effects of the forward outside torch remain)."""
        torch.set_rng_state(self._random)
        if self._there is not None:
            torch.cuda.set_rng_state(self._there, self._device)
        with torch.no_grad():
            for buffer, was in self._buffers:
                buffer.copy_(was)


class SplitCall:
    """One call while it runs over several devices."""

    __slots__ = ("around", "before", "head", "plan", "primitives", "share", "site", "watch")

    def __init__(self, site: TracedModule, around: object, watch: ReplicaProbes | None = None) -> None:
        self.site = site
        self.plan = site.plan
        self.head = site.head
        """Layout and flags of its span: see TracedModules.span_head."""
        self.around = around
        """The enclosing call of this thread that also runs over several devices; None for none."""
        self.watch = watch
        """Hooks on the replicas."""
        self.primitives: set[int] = set()
        """Phases that have run, as kinds of spans."""
        self.share: Any = None
        """If torch runs the module itself in place of a lone replica: (args, kwargs, end of scatter); else None."""
        self.before: SavedModuleState | None = None


class SplitRunner:
    """Runs the calls of one process over several devices."""

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

    @uncounted
    def run(
        self, me: ThreadState, site: TracedModule, original: Function, module: object, args: Any, kwargs: Any
    ) -> object:
        """Run a call in place of `original(module, *args, **kwargs)`. The caller must call `finish` afterwards."""
        call = None
        with self.session.guard("beginning of a call"):
            replicas = ReplicaProbes(self.recorder, me, site, strict=site.via is None) if site.plan.mode == DP else None
            call = me.split = SplitCall(site, me.split, replicas)
        if call is None:
            return original(module, *args, **kwargs)
        if isinstance(module, FunctionalStandIn):
            return self._functional(call, module, args, kwargs)
        if site.kind == Kind.WRAPPED and site.via is not None:
            return self._wrapper(call, me, original, module, args, kwargs)
        if site.plan.mode == DP:
            return self._root(call, me, original, module, args, kwargs)
        stages = site.stages if me is self.recorder.training_thread else None
        if stages is None:
            return original(module, *args, **kwargs)
        stages.begin(self.recorder)
        try:
            return original(module, *args, **kwargs)
        finally:
            unclear = stages.end(self.recorder, me)
            if unclear is not None and "stages" not in site.absent:
                site.absent = {**site.absent, "stages": unclear}
                site.head = call.head = self.sites.span_head(site, site.plan)

    def finish(self, me: ThreadState, site: TracedModule, outputs: int, failed: bool) -> int:
        """Finish a call that `run` has run; return layout and flags of its span (see `span_head`). Never raises.

        `outputs`: the number of the definition for the sizes of its result.
        """
        call: SplitCall | None = me.split
        if call is None or call.site is not site:  # an interrupt came before the SplitCall existed
            return site.head
        me.split = call.around
        with self.session.guard("end of a call"):
            try:
                if me.tried is not None:
                    self.modes.finish_fallback(me, failed)
                if call.share is not None and not failed:
                    self._lone_replica(me, call, outputs)
                if call.site.own and not failed:
                    self._note_bypassed_phases(call)
            finally:
                if call.watch is not None:
                    call.watch.close()
        return call.head

    def _lone_replica(self, me: ThreadState, call: SplitCall, outputs: int) -> None:
        """Write the span of a lone replica: torch ran the module itself after the scatter."""
        args, kwargs, began = call.share
        inputs = self.session.input_definition(args, kwargs, call.site.share)
        head = Kind.REPLICA | me.head | call.site.kind << INSIDE_AT
        self.recorder.put(head, began, monotonic_ns() - began, inputs | outputs << 32)

    def _note_bypassed_phases(self, call: SplitCall) -> None:
        """Note the phases that are missing because the script's subclass runs them itself."""
        site, absent = call.site, {}
        if call.plan.mode == DP:
            own = ", ".join(site.own)
            for kind, name in zip(PRIMITIVES, CALL_PHASES, strict=True):
                if kind not in call.primitives:
                    absent[name] = f"{site.via} has its own {own} and does not use torch's {name}"
            if call.watch is None or not call.watch.ran:
                absent["replicas"] = f"{site.via} has its own {own}: no replica was made or run by torch's functions"
        if absent != site.absent:
            site.absent = absent
            site.head = self.sites.span_head(site, site.plan)
            call.head = self.sites.span_head(site, call.plan)

    # ---------------------------------------------------------------- the functional form

    def _functional(self, call: SplitCall, functional: FunctionalStandIn, args: Any, kwargs: Any) -> object:
        plan = call.plan
        module, (ids, output, dim) = functional.module, functional.given
        if plan.device_ids is None:
            return self.originals.data_parallel(module, args, ids, output, dim, kwargs)
        chosen = list(plan.device_ids)
        if plan.virtual is not None:
            return plan.virtual.functional(module, args, chosen, None, dim, kwargs)
        if plan.mode == DP:
            return self.originals.data_parallel(module, args, chosen, output, dim, kwargs)
        result = self.originals.data_parallel(module, args, chosen, None, dim, kwargs)
        if output is not None and output != chosen[0]:
            result = self.originals.gather([result], output, dim)
        return result

    # ---------------------------------------------------------------- DataParallel

    @uncounted
    def _wrapper(
        self, call: SplitCall, me: ThreadState, original: Function, module: Any, args: Any, kwargs: Any
    ) -> object:
        plan = call.plan
        if plan.device_ids is None:
            return original(module, *args, **kwargs)
        view = None
        with self.session.guard("model for the replicas"):
            view = _with_devices(module, plan, call.site.dim)
            self._remember(call, module)
        if view is None:
            return original(module, *args, **kwargs)
        if plan.virtual is None:
            result = original(view, *args, **kwargs)
            if plan.mode == SINGLE and module.output_device != plan.device_ids[0]:
                result = self.originals.gather([result], module.output_device, module.dim)
            self._copy_back_attributes(module, view)
            return result
        try:
            result = original(view, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - without us this call would not have been data parallel
            self._fall_back(call, me, module, error, False)
        else:
            self._copy_back_attributes(module, view)
            if "forward" in call.site.own and not call.primitives:
                # It ran as a whole: the script's forward is not data parallel.
                call.before = None
                reason = f"{call.site.via} has its own forward, which uses none of DataParallel's functions"
                self._fall_back(call, me, module, reason, True)
            else:
                self._note_success(call, module)
            return result
        return original(module, *args, **kwargs)

    def _remember(self, call: SplitCall, module: object) -> None:
        """Save the state that a first attempt at dp may change, in case it fails. Never raises."""
        if call.site.proven or call.plan.virtual is None:
            return
        with self.session.guard("state before a call"):
            call.before = SavedModuleState(module, call.plan.virtual.base)

    def _note_success(self, call: SplitCall, module: Any) -> None:
        """Forget earlier failures, because dp worked. Never raises."""
        with self.session.guard("end of a call"):
            call.site.proven = True
            self.modes.clear_failures(module)

    def _copy_back_attributes(self, module: object, view: object) -> None:
        """Copy to the script's object the attributes that a subclass set on the view in the call. Never raises."""
        if type(module) is torch.nn.DataParallel:
            return
        with self.session.guard("model for the replicas"):
            own = module.__dict__
            for name, value in view.__dict__.items():
                if name not in _OVERLAID and own.get(name, own) is not value:
                    own[name] = value

    # ---------------------------------------------------------------- bare roots

    def _root(
        self, call: SplitCall, me: ThreadState, original: Function, module: object, args: Any, kwargs: Any
    ) -> object:
        plan = call.plan
        self._remember(call, module)
        try:
            function = self.originals.data_parallel if plan.virtual is None else plan.virtual.functional
            result = function(module, args, plan.device_ids, None, 0, kwargs)
            reason = changed_meaning_reason(result, args, kwargs, 0 if call.watch is None else call.watch.ran)
        except Exception as error:  # noqa: BLE001 - without us this call would not have been data parallel
            self._fall_back(call, me, module, error, isinstance(error, ResultsWouldChange))
        else:
            if reason is None:
                self._note_success(call, module)
                return result
            self._fall_back(call, me, module, reason, True)
        return original(module, *args, **kwargs)

    # ---------------------------------------------------------------- what failed

    def _fall_back(self, call: SplitCall, me: ThreadState, module: Any, why: Exception | str, final: bool) -> None:
        """Note why dp failed for this call, and prepare to run it as it would run without dpmon. Never raises."""
        watch, call.watch, call.share, call.primitives = call.watch, None, None, set()
        me.inside = call.site.kind  # not reset yet, if a lone replica ran on this thread
        with self.session.guard("return to one device"):
            try:
                self.recorder.put(Kind.RESTARTED | me.head | call.site.kind << INSIDE_AT, monotonic_ns(), 0, 0)
                if call.before is not None:
                    call.before.restore()
                reason = (
                    str(why) if isinstance(why, (str, ResultsWouldChange)) else f"the model raised {one_line_text(why)}"
                )
                plan = self.modes.handle_dp_failure(me, module, reason, final)
                if plan is None:
                    make = self.sites.of_root if call.site.via is None else self.sites.of_wrapper
                    fresh = make(module)
                    self.sites.register(fresh)
                    plan = fresh.plan
                call.plan = plan
                call.head = self.sites.span_head(call.site, plan)
            finally:
                if watch is not None:
                    watch.close()
        if isinstance(why, Exception):
            # A frame in the error's traceback has a local variable that refers to the error. This cycle would keep
            # the call's arguments alive until the next garbage collection.
            why.__traceback__ = None


def changed_meaning_reason(result: object, args: Any, kwargs: Any, replicas: int) -> str | None:
    """Return why dp would change the meaning of a result for the script; None if it would not.

    A script that uses DataParallel expects a vector of losses; other scripts do not.
    """
    rows = first_row_count(signature_of_call(args, kwargs))
    for tensor in tensors_in(result):
        count = tensor.shape[0] if tensor.dim() else 0
        if count != rows:
            kind = "a scalar" if tensor.dim() == 1 and count == replicas else "tensors of other lengths"
            return f"{ROWS}: the model returns {kind} for the {rows} rows of the batch"
    return None


def _with_devices(module: object, plan: CallPlan, dim: int) -> object:
    """Return a copy of a DataParallel with other devices. It shares all else with `module`, which stays unchanged."""
    ids = list(plan.device_ids or ())
    view: object = object.__new__(type(module))
    state = view.__dict__
    state.update(module.__dict__)
    state["device_ids"] = ids
    if plan.virtual is not None:
        state["src_device_obj"] = plan.virtual.base
        state["output_device"] = ids[0]
        state["dim"] = dim
    return view
