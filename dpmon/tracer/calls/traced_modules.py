"""The modules that are called, how their calls run, and the last sizes seen."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dpmon.record.shared_names import DDP, FSDP, RANK_MODES
from dpmon.record.span_format import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.tracer.calls.stages import StageTracer, make_stage_tracer
from dpmon.tracer.core.module_tables import ModelNames, ModuleDevice, class_name, in_training_mode, is_distributed_class
from dpmon.tracer.core.session import Session, SizeCache
from dpmon.tracer.devices.device_timing import cuda_may_be_used, gpus_of
from dpmon.tracer.modes.call_plans import DP, SINGLE, CallPlan, holds_data_parallel, overrides
from dpmon.tracer.modes.mode_decision import ModeDecider

MAX_SITES = 1024
_HOST_ONLY = "the devices are CPUs: host time is all there is"
_NO_EVENTS = "it was not timed: only calls of the training thread are timed"
_NOT_APART = {
    DDP: {"all_reduce": "the ranks average their gradients within the backward pass; this time is not separated"},
    FSDP: {
        "all_gather": "the ranks gather the weights within forward and backward; this time is not separated",
        "reduce_scatter": "the ranks reduce their gradients within the backward pass; this time is not separated",
    },
}
"""By `via`: the ranks' collectives, and why they are not phases of a call."""


class FunctionalStandIn:
    """Stands for a module that torch's functional data_parallel calls repeatedly with the same devices."""

    def __init__(self, module: object, given: tuple[Any, ...]) -> None:
        self._module = weakref.ref(module)
        self.given = given
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

    def __init__(self, module: object, plan: CallPlan, via: str | None, gone: Callable[[object], object]) -> None:
        self.module = weakref.ref(module, gone)
        self.plan = plan
        self.via = via
        """The class of the wrapper, or the function `data_parallel` or `fully_shard`; None for other bare roots."""
        self.kind = Kind.WRAPPED if not (via is None or via in RANK_MODES) or plan.mode == DP else Kind.CALL
        self.gpus = gpus_of(plan.devices)
        self.plain = False
        """Whether only the module's own code runs: no phases, no DataParallel inside."""
        self.root = ""
        self.number = 0
        """The name and the number of the model: see ModelNames.name_and_number."""
        self.dim = 0
        """The dimension along which a batch is split."""
        self.head = 0
        """Layout and flags for the span of a call: see TracedModules.span_head."""
        self.inputs, self.outputs, self.share = SizeCache(), SizeCache(), SizeCache()
        """For the arguments of a call, its result, and the arguments of a lone replica."""
        self.replicas: list[tuple[SizeCache, SizeCache]] = []
        self.stages: StageTracer | None = None
        """The model's stages, if its parts are on several devices."""
        self.proven = False
        """Whether dp has worked for this module."""
        self.place: ModuleDevice | None = None
        """Where the module was when the plan was made; None if the plan does not depend on it."""
        self.moves = False
        """Whether the module may have moved since then."""
        self.own: tuple[str, ...] = ()
        """The methods of DataParallel that the script's subclass overrides."""
        self.absent: dict[str, str] = {}
        """Reasons for missing parts of its calls, for example because these methods bypass torch's functions."""


class TracedModules:
    """Keeps a site for each module that one process calls."""

    def __init__(self, session: Session, modes: ModeDecider) -> None:
        self.session = session
        self.modes = modes
        self.known: dict[int, TracedModule] = {}
        """By id. The traced functions refer to this dict: never replace it."""
        self._functionals: dict[int, FunctionalStandIn] = {}
        self.on_site: Callable[[], None] = lambda: None
        """Called when a module is first called, or planned again."""
        self.on_gpus: Callable[[], None] = lambda: None
        """Called before the first call of a module on a GPU."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self.replan_all()
        self.models = ModelNames()

    def replan_all(self) -> None:
        """Plan all calls again."""
        self.known.clear()
        self._functionals.clear()

    def expect_moves_to_gpu(self) -> None:
        """Expect modules to move to a GPU, because CUDA is or will be initialized."""
        for site in list(self.known.values()):
            site.moves = site.place is not None

    # ---------------------------------------------------------------- how each kind is called

    def of_root(self, module: Any) -> TracedModule:
        """Make the site of a bare root."""
        plan = self.modes.plan_root(module)
        ddp = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        site = self._make_traced_module(
            module, plan, DDP if ddp else FSDP if is_distributed_class(module, "FSDPModule") else None
        )
        site.dim = self.session.config.batch_dim
        site.place = ModuleDevice(module)
        if plan.mode == SINGLE:
            site.stages = make_stage_tracer(module.module if ddp else module, self.session)
            if site.stages is not None:
                site.gpus = gpus_of(site.stages.devices)
            site.plain = site.stages is None and not holds_data_parallel(module)
        return site

    def of_wrapper(self, module: object) -> TracedModule:
        """Make the site of a DataParallel."""
        site = self._make_traced_module(module, self.modes.plan_wrapper(module), class_name(module))
        site.dim = self.modes.dim_of(module) or 0
        site.own = overridden_methods(type(module))
        return site

    def functional(self, module: object, given: tuple[object, ...]) -> FunctionalStandIn:
        """Return the stand-in for a module passed to `data_parallel`. `given`: devices, output device and dim."""
        found = self._functionals.get(id(module))
        if found is None or found.given != given or found.module is not module:
            if len(self._functionals) >= MAX_SITES:
                self._functionals.clear()
            found = self._functionals[id(module)] = FunctionalStandIn(module, given)
        return found

    def of_functional(self, functional: FunctionalStandIn) -> TracedModule:
        """Make the site of a module passed to `data_parallel`."""
        module = functional.module
        site = self._make_traced_module(
            functional, self.modes.plan_functional(module, functional.given[0]), "data_parallel"
        )
        site.dim = functional.given[2]
        site.place = ModuleDevice(module)
        return site

    def _make_traced_module(self, module: object, plan: CallPlan, via: str | None) -> TracedModule:
        key, known = id(module), self.known
        return TracedModule(module, plan, via, lambda _: known.pop(key, None))

    def register(self, site: TracedModule) -> TracedModule | None:
        """Name the site, and register it for all threads; None if its layout cannot be written."""
        module = site.module()
        model = module.module if isinstance(module, FunctionalStandIn) else module
        site.root, site.number = self.models.name_and_number(model)
        device = None if site.place is None else site.place.device
        site.moves = device is not None and (device.type != "cpu" or cuda_may_be_used())
        site.head = self.span_head(site, site.plan)
        self.modes.record_plan(site.root, site.plan)
        if site.gpus:
            self.on_gpus()
        self.known.pop(id(module), None)
        if not site.head >> SITE_AT:
            return None
        if len(self.known) >= MAX_SITES:
            self.known.clear()
        self.known[id(module)] = site
        self.on_site()
        return site

    def splits_itself(self, root: TracedModule) -> None:
        """Note that a bare root's forward itself runs a part of the root data-parallel: the root cannot be split."""
        module = root.module()
        if module is not None and not self.modes.splits_itself(module, True):
            self.known.pop(id(module), None)  # its next call is planned again

    # ---------------------------------------------------------------- layouts

    def span_head(self, site: TracedModule, plan: CallPlan) -> int:
        """Return layout and flags for the span of a call by this plan. The layout is 0 if it cannot be written."""
        devices = plan.devices if site.stages is None else site.stages.devices
        key = site.root, site.via, devices, tuple(site.absent.items()), plan.on_cpu, site.number, site.dim
        number = self.session.define(key, lambda: _describe_layout(site, plan))
        flags = Flag.DP if plan.mode == DP else Flag.SINGLE
        if plan.virtual is not None and plan.mode == DP:
            flags |= Flag.VIRTUAL
        return number << SITE_AT | flags << FLAGS_AT


def _describe_layout(site: TracedModule, plan: CallPlan) -> dict[str, object]:
    devices, absent = plan.devices, {"device_ms": _HOST_ONLY if plan.on_cpu else _NO_EVENTS}
    if site.stages is not None:
        devices, absent = site.stages.devices, site.stages.absent
    absent = {**absent, **_NOT_APART.get(site.via or "", {})}
    layout = {"root": site.root, "via": site.via, "devices": list(devices), "absent": {**absent, **site.absent}}
    return {**layout, "module": site.number, "dim": site.dim}


def overridden_methods(kind: type) -> tuple[str, ...]:
    """Return the names of the methods that a subclass of DataParallel overrides."""
    return tuple(
        name for name in ("forward", "scatter", "replicate", "parallel_apply", "gather") if overrides(kind, name)
    )
