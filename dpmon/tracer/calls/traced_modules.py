"""Keeps the modules that are called, how their calls run, and the last sizes of their inputs and outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dpmon.record.shared_names import DDP, FSDP, RANK_MODES
from dpmon.record.span_format import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.tracer.calls.stages import StageTracer, make_stage_tracer
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import ModelNames, ModuleDevice, class_name, in_training_mode, is_distributed_class
from dpmon.tracer.core.session import Session, SizeCache
from dpmon.tracer.devices.device_timing import gpus_of
from dpmon.tracer.modes.call_plans import DP, SINGLE, CallPlan, holds_data_parallel, overrides
from dpmon.tracer.modes.mode_decision import ModeDecider

MAX_MODULES = 1024
_HOST_ONLY = "the devices are CPUs: host time is all there is"
_NO_EVENTS = "it was not timed: only calls of the training thread are timed"


class FunctionalStandIn:
    """A stand-in for a module that torch's functional data_parallel calls repeatedly with the same devices."""

    def __init__(self, module: object, placement: tuple[Any, ...]) -> None:
        self._module = weakref.ref(module)
        self.placement = placement
        """Devices, output device and dim."""

    @property
    def module(self) -> Any:
        """The module, while it lives."""
        return self._module()

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return in_training_mode(self.module)


class TracedModule:
    """A called module, with the plan for its calls and the last sizes seen."""

    def __init__(self, module: object, plan: CallPlan, via: str | None, on_freed: Callable[[object], object]) -> None:
        self.module_ref = weakref.ref(module, on_freed)
        self.plan = plan
        self.via = via
        """The class of the wrapper, or the function `data_parallel` or `fully_shard`; None for other bare roots."""
        is_wrapped = via is not None and via not in RANK_MODES
        self.kind = Kind.WRAPPED if is_wrapped or plan.mode == DP else Kind.CALL
        self.gpus = gpus_of(plan.devices)
        self.is_plain = False
        """Whether only the module's own code runs: no phases, no DataParallel inside."""
        self.model_name = ""
        self.model_number = 0
        """The name and the number of the model: see `ModelNames.name_and_number`."""
        self.dim = 0
        """The dimension along which a batch is split."""
        self.layout_bits = 0
        """Layout and flags for the span of a call: see `TracedModules.encode_layout`."""
        self.input_cache, self.output_cache, self.lone_input_cache = SizeCache(), SizeCache(), SizeCache()
        """Caches for the sizes of a call's arguments, of its result, and of a lone replica's arguments."""
        self.replica_caches: list[tuple[SizeCache, SizeCache]] = []
        self.stages: StageTracer | None = None
        """The model's stages, if its parts are on several devices."""
        self.dp_has_worked = False
        """Whether dp has worked for this module."""
        self.module_device: ModuleDevice | None = None
        """Where the module was when the plan was made; None if the plan does not depend on it."""
        self.is_off_cpu = False
        """Whether it was not on the CPU then."""
        self.overridden_names: tuple[str, ...] = ()
        """The methods of DataParallel that the script's subclass overrides."""
        self.absent: dict[str, str] = {}
        """Reasons for absent fields of its calls, for example that these methods bypass torch's functions."""


class TracedModules:
    """The modules that one process calls."""

    def __init__(self, session: Session, modes: ModeDecider) -> None:
        self.session = session
        self.modes = modes
        self.modules_by_id: dict[int, TracedModule] = {}
        """The traced functions refer to this dict: never replace it."""
        self._stand_ins: IdentityTable[FunctionalStandIn] = IdentityTable()
        self.on_gpu_call: Callable[[], None] = lambda: None
        """Called before the first call of a module on a GPU."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self.forget_plans()
        self.model_names = ModelNames()

    def forget_plans(self) -> None:
        """Forget all plans. The next call of each module makes a new one."""
        self.modules_by_id.clear()
        self._stand_ins.clear()

    # ---------------------------------------------------------------- making them

    def make_for_root(self, module: Any) -> TracedModule:
        """Plan the calls of a bare root."""
        plan, via = self.modes.plan_root(module), None
        is_ddp = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        if is_ddp:
            via = DDP
        elif is_distributed_class(module, "FSDPModule"):
            via = FSDP
        traced_module = self._make_traced_module(module, plan, via)
        traced_module.dim = self.session.config.batch_dim
        traced_module.module_device = ModuleDevice(module)
        if plan.mode == SINGLE:
            traced_module.stages = make_stage_tracer(module.module if is_ddp else module, self.session)
            if traced_module.stages is not None:
                traced_module.gpus = gpus_of(traced_module.stages.devices)
            traced_module.is_plain = traced_module.stages is None and not holds_data_parallel(module)
        return traced_module

    def make_for_wrapper(self, module: object) -> TracedModule:
        """Plan the calls of a DataParallel."""
        traced_module = self._make_traced_module(module, self.modes.plan_wrapper(module), class_name(module))
        traced_module.dim = self.modes.dim_of(module) or 0
        traced_module.overridden_names = overridden_methods(type(module))
        return traced_module

    def stand_in_for(self, module: object, placement: tuple[object, ...]) -> FunctionalStandIn:
        """Return the stand-in for a module passed to `data_parallel`. `placement`: devices, output device and dim."""
        stand_in = self._stand_ins.get(module)
        if stand_in is None or stand_in.placement != placement:
            stand_in = self._stand_ins.set(module, FunctionalStandIn(module, placement))
        return stand_in

    def make_for_stand_in(self, stand_in: FunctionalStandIn) -> TracedModule:
        """Plan the calls of a module passed to `data_parallel`."""
        module, (device_ids, _, dim) = stand_in.module, stand_in.placement
        plan = self.modes.plan_functional(module, device_ids)
        traced_module = self._make_traced_module(stand_in, plan, "data_parallel")
        traced_module.dim = dim
        traced_module.module_device = ModuleDevice(module)
        return traced_module

    def _make_traced_module(self, module: object, plan: CallPlan, via: str | None) -> TracedModule:
        """Make a TracedModule that is removed when its module is freed."""
        key, modules_by_id = id(module), self.modules_by_id
        return TracedModule(module, plan, via, lambda _: modules_by_id.pop(key, None))

    def register(self, traced_module: TracedModule) -> TracedModule | None:
        """Name a traced module, register it for all threads, and return it; None if its layout cannot be written."""
        module = traced_module.module_ref()
        model = module.module if isinstance(module, FunctionalStandIn) else module
        traced_module.model_name, traced_module.model_number = self.model_names.name_and_number(model)
        device = None if traced_module.module_device is None else traced_module.module_device.device
        traced_module.is_off_cpu = device is not None and device.type != "cpu"
        traced_module.layout_bits = self.encode_layout(traced_module, traced_module.plan)
        self.modes.record_plan(traced_module.model_name, traced_module.plan)
        if traced_module.gpus:
            self.on_gpu_call()
        self.modules_by_id.pop(id(module), None)
        if not traced_module.layout_bits >> SITE_AT:
            return None
        if len(self.modules_by_id) >= MAX_MODULES:
            self.modules_by_id.clear()
        self.modules_by_id[id(module)] = traced_module
        return traced_module

    def note_splits_itself(self, root: TracedModule) -> None:
        """Note that the forward of a bare root runs a part of it data-parallel, so that the root cannot be split."""
        module = root.module_ref()
        if module is not None and not self.modes.splits_itself(module, just_found=True):
            self.modules_by_id.pop(id(module), None)  # its next call is planned again

    # ---------------------------------------------------------------- layouts

    def encode_layout(self, traced_module: TracedModule, plan: CallPlan) -> int:
        """Return layout and flags as bits for the span of a call by this plan. The layout is 0 if it is not written."""
        name, number, via = traced_module.model_name, traced_module.model_number, traced_module.via
        devices = plan.devices if traced_module.stages is None else traced_module.stages.devices
        key = name, via, devices, tuple(traced_module.absent.items()), plan.on_cpu, number, traced_module.dim
        definition = self.session.define(key, lambda: _describe_layout(traced_module, plan))
        flags = Flag.DP if plan.mode == DP else Flag.SINGLE
        if plan.virtual_devices is not None and plan.mode == DP:
            flags |= Flag.VIRTUAL
        return definition << SITE_AT | flags << FLAGS_AT


def _describe_layout(traced_module: TracedModule, plan: CallPlan) -> dict[str, object]:
    """Return the definition of a layout: devices and mode of the calls of one module, and why fields are absent."""
    devices, absent = plan.devices, {"device_ms": _HOST_ONLY if plan.on_cpu else _NO_EVENTS}
    if traced_module.stages is not None:
        devices, absent = traced_module.stages.devices, traced_module.stages.absent
    absent = {**absent, **traced_module.absent}
    layout = {"root": traced_module.model_name, "via": traced_module.via, "devices": list(devices), "absent": absent}
    return {**layout, "module": traced_module.model_number, "dim": traced_module.dim}


def overridden_methods(cls: type) -> tuple[str, ...]:
    """Return the names of the methods that a subclass of DataParallel overrides."""
    return tuple(
        name for name in ("forward", "scatter", "replicate", "parallel_apply", "gather") if overrides(cls, name)
    )
