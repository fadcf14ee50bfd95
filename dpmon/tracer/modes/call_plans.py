"""Describes how the calls of a module run, and decides whether a module can run over several devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpmon.tracer.core.module_tables import (
    BUFFERS,
    PARAMETERS,
    class_name,
    devices_of,
    is_compiled,
    is_distributed_class,
    modules_of,
    values_of,
)
from dpmon.tracer.modes.virtual_devices import VirtualDevices

DP, SINGLE = 1, 2


@dataclass(frozen=True)
class CallPlan:
    """A plan of how the calls of one module run."""

    mode: int
    devices: tuple[str, ...]
    """The devices as they are named in records."""
    device_ids: tuple[int, ...] | None = None
    """Device ids that replace the script's; None leaves the call as written."""
    virtual_devices: VirtualDevices | None = None
    reason: str | None = None
    """Why the plan differs from the request, or why the replicas are virtual."""
    is_refused: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether no accelerator takes part."""
        return all(name.startswith("cpu") for name in self.devices)


def refused_plan(device: object, reason: str) -> CallPlan:
    """Make the plan for a call that runs on one device although dp was requested."""
    return CallPlan(SINGLE, (str(device),), reason=reason, is_refused=True)


def single_device_plan(module: Any, devices: tuple[str, ...], reason: str | None = None) -> CallPlan:
    """Make the plan that runs a DataParallel on the first of its devices. `reason`: None if that was requested."""
    unfit = uncopyable_reason(module)
    if unfit is not None:
        return CallPlan(DP, devices, reason=unfit, is_refused=True)
    for name in ("forward", "scatter"):
        if overrides(type(module), name):
            override_reason = f"{class_name(module)} has its own {name}, which may not work on one device"
            return CallPlan(DP, devices, reason=override_reason, is_refused=True)
    return CallPlan(
        SINGLE,
        devices[:1],
        device_ids=tuple(module.device_ids[:1]),
        reason=reason,
        is_refused=reason is not None,
    )


def overrides(cls: type, name: str) -> bool:
    """Return whether a subclass of DataParallel has its own method of this name."""
    return next(base for base in cls.__mro__ if name in base.__dict__) is not torch.nn.DataParallel


def default_device() -> torch.device:
    """Return the device on which torch's data parallelism runs a module without parameters and buffers."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def unsplittable_reason(module: torch.nn.Module) -> str | None:
    """Return why data_parallel cannot run a bare root; None if it can."""
    reason = unreplicable_reason(module)
    if reason is not None:
        return reason
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside torch.func.grad, vmap or the like
        return "it runs inside a transform of torch.func"
    if any(isinstance(part, torch.nn.parallel.DistributedDataParallel) for part in modules_of(module)):
        return "it holds a DistributedDataParallel of its own"
    devices = devices_of(module)
    if len(devices) > 1:
        return f"its parameters are spread over {', '.join(sorted(devices))}"
    return None


def holds_data_parallel(module: object) -> bool:
    """Return whether the module or a part of it is a DataParallel."""
    return any(isinstance(part, torch.nn.DataParallel) for part in modules_of(module))


def uncopyable_reason(module: object) -> str | None:
    """Return why dpmon must not make short-lived copies of this module; None if it may.

    A copy shares the module's attributes, so its finalizer could, for example, close the module's files.
    """
    if not hasattr(type(module), "__del__"):
        return None
    return f"{class_name(module)} has a __del__, which every copy would also run"


def _is_sharded(module: object) -> bool:
    """Return whether the module's own parameters or buffers are divided among several ranks.

    Between forward and backward, the parameters of a module given to fully_shard may be ordinary tensors.
    """
    if is_distributed_class(module, "FSDPModule") or is_distributed_class(module, "FullyShardedDataParallel"):
        return True
    return any(
        is_distributed_class(tensor, "DTensor")
        for table in (PARAMETERS, BUFFERS)
        for tensor in values_of(module, table)
    )


def unreplicable_reason(module: torch.nn.Module) -> str | None:
    """Return why dpmon does not replicate a module, on virtual or real devices; None if it does."""
    for part in modules_of(module):
        if _is_sharded(part):
            return "its parameters are sharded over the ranks, which must all run the same calls"
        reason = uncopyable_reason(part)
        if reason is not None:
            return reason
        # The attribute is on the forward of the instance (compiled for this module only) or of the class.
        forward = getattr(getattr(part, "forward", None), "_torchdynamo_orig_callable", None)
        if forward is not None or is_compiled(part):
            return "a module compiled by torch.compile cannot be replicated"
        if isinstance(part, torch.jit.ScriptModule):
            return "dpmon does not replicate a TorchScript module"
    return None
