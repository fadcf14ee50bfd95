"""Plans how the calls of a module run, and decides whether a module can run over several devices."""

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
    """How calls of one module run."""

    mode: int
    devices: tuple[str, ...]
    """Names of the devices in records."""
    device_ids: tuple[int, ...] | None = None
    """Device ids that replace the script's; None leaves the call as written."""
    virtual: VirtualDevices | None = None
    reason: str | None = None
    """The reason why the plan differs from the request, or why the replicas are virtual."""
    refused: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether no accelerator takes part."""
        return all(name.startswith("cpu") for name in self.devices)


def refused_plan(device: object, reason: str) -> CallPlan:
    """Make the plan for a call that runs on one device although dp was requested."""
    return CallPlan(SINGLE, (str(device),), None, None, reason, True)


def single_device_plan(module: Any, own: tuple[str, ...], reason: str | None = None) -> CallPlan:
    """Make the plan that runs a DataParallel on the first of its devices; `reason` is None if that was requested."""
    unfit = uncopyable_reason(module)
    if unfit is not None:
        return CallPlan(DP, own, None, None, unfit, True)
    for name in ("forward", "scatter"):
        if overrides(type(module), name):
            odd = f"{class_name(module)} has its own {name}, which may not work on one device"
            return CallPlan(DP, own, None, None, odd, True)
    return CallPlan(SINGLE, own[:1], tuple(module.device_ids[:1]), None, reason, reason is not None)


def overrides(kind: type, name: str) -> bool:
    """Whether a subclass of DataParallel has its own method of this name."""
    return next(base for base in kind.__mro__ if name in base.__dict__) is not torch.nn.DataParallel


def default_device() -> torch.device:
    """The device on which torch's data parallelism runs a module without parameters and buffers."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def unsplittable_reason(module: torch.nn.Module) -> str | None:
    """Why a bare root cannot be run by data_parallel; None if it can."""
    unfit = unreplicable_reason(module)
    if unfit is not None:
        return unfit
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside torch.func.grad, vmap or the like
        return "it runs inside a transform of torch.func"
    if any(isinstance(inner, torch.nn.parallel.DistributedDataParallel) for inner in modules_of(module)):
        return "it holds a DistributedDataParallel of its own"
    devices = devices_of(module)
    if len(devices) > 1:
        return f"its parameters are spread over {', '.join(sorted(devices))}"
    return None


def holds_data_parallel(module: object) -> bool:
    """Whether the module or a part of it is a DataParallel."""
    return any(isinstance(inner, torch.nn.DataParallel) for inner in modules_of(module))


def uncopyable_reason(module: object) -> str | None:
    """Why dpmon must not make short-lived copies of this module; None if it may.

    A copy shares the module's attributes, so its finalizer could close the module's files.
    """
    if not hasattr(type(module), "__del__"):
        return None
    return f"{class_name(module)} has a __del__, which every copy would also run"


def _is_sharded(module: object) -> bool:
    """Whether the module's own parameters or buffers are divided among several ranks.

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
    """Why dpmon does not replicate a module, on virtual or real devices; None if it does."""
    for inner in modules_of(module):
        if _is_sharded(inner):
            return "its parameters are sharded over the ranks, which must all run the same calls"
        unfit = uncopyable_reason(inner)
        if unfit is not None:
            return unfit
        # The attribute is on the forward of the instance (compiled for this module only) or of the class.
        forward = getattr(getattr(inner, "forward", None), "_torchdynamo_orig_callable", None)
        if forward is not None or is_compiled(inner):
            return "a module compiled by torch.compile cannot be replicated"
        if isinstance(inner, torch.jit.ScriptModule):
            return "dpmon does not replicate a TorchScript module"
    return None
