"""Decides whether calls run as dp or single, and why a request is refused.

A `CallPlan` describes how the calls of one module run. It is made at the first call of the module, and again after each
request for a mode.
"""

from __future__ import annotations

from typing import Any

import torch

from dpmon.record.shared_names import MODES
from dpmon.span_ring import HeaderWord
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import ModuleDevice
from dpmon.tracer.core.session import Session
from dpmon.tracer.modes.call_plans import (
    DP,
    SINGLE,
    CallPlan,
    default_device,
    holds_data_parallel,
    refused_plan,
    single_device_plan,
    uncopyable_reason,
    unreplicable_reason,
    unsplittable_reason,
)
from dpmon.tracer.modes.virtual_devices import TorchOriginals, VirtualDevices
from dpmon.tracer.steps.span_recorder import ThreadState

DEFAULT_VIRTUAL = 2
MAX_EVENTS = 64
MAX_FAILURES = 3


class ModeDecider:
    """The part of one process's tracer that decides the mode of each call."""

    def __init__(self, session: Session, originals: TorchOriginals) -> None:
        self.session = session
        self.originals = originals
        self._dims: IdentityTable[int] = IdentityTable()
        """The `dim` of each DataParallel: torch does not store it if there are no GPUs."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        config = self.session.config
        self.is_locked = config.mode == "script"
        """Whether dpmon leaves the computation as written."""
        self.requested_mode = MODES.index(config.mode) if config.mode in MODES[1:] else 0
        """The requested mode, as an index of MODES; 0 if none was requested."""
        self.is_user_request = False
        """Whether a reader requested the mode while the training ran."""
        self.request_serial = 0
        """Number of the last request that was handled."""
        self._dp_failures: IdentityTable[tuple[str, int]] = IdentityTable()
        """By module: why dp failed last, and the number of failures in a row."""
        self._self_splitting_roots: IdentityTable[bool] = IdentityTable()
        """The root modules whose forward makes a data_parallel or similar call."""
        self._event_count = 0
        self._virtual_devices_cache: dict[tuple[int, str], VirtualDevices] = {}

    def note_dim(self, wrapper: object, dim: int) -> None:
        """Remember the `dim` of a new DataParallel."""
        self._dims.set(wrapper, dim)

    def dim_of(self, wrapper: object) -> int | None:
        """Return the dimension along which a DataParallel splits; None if it was not made here (copied, loaded)."""
        return self._dims.get(wrapper)

    # ---------------------------------------------------------------- requests

    def apply_new_request(self) -> bool:
        """Handle a new request. Return whether calls must be planned again. Called only between calls."""
        ring = self.session.ring
        if ring is None or ring.words[HeaderWord.REQUEST] == self.request_serial:
            return False
        self.request_serial = ring.words[HeaderWord.REQUEST]
        requested = ring.words[HeaderWord.REQUESTED_MODE]
        if self.is_locked or requested not in (DP, SINGLE):
            reason = "--mode script leaves the computation as written" if self.is_locked else "unknown mode"
            self.session.record_event("mode", mode=None, requested_by="user", refused=reason, reason=reason)
            self._acknowledge(0)
            return False
        self.requested_mode = requested
        self.is_user_request = True
        self._dp_failures.clear()
        self._event_count = 0
        return True

    def _acknowledge(self, mode: int) -> None:
        """Write the number of the last request, and the mode in force, into the ring."""
        ring = self.session.ring
        if ring is not None:
            ring.words[HeaderWord.MODE] = mode
            ring.words[HeaderWord.ACKNOWLEDGED] = self.request_serial

    def handle_dp_failure(
        self, thread: ThreadState, module: torch.nn.Module, reason: str, final: bool
    ) -> CallPlan | None:
        """Handle a failure of dp in one call. Return the plan for that call; None to plan the module again.

        The batch may be at fault (a single row for BatchNorm), so the next call tries dp again. After MAX_FAILURES
        failures in a row, or if `final`, the module stays single until dp is requested again.
        """
        _, failures_before = self._dp_failures.get(module) or ("", 0)
        count = MAX_FAILURES if final else failures_before + 1
        self._dp_failures.set(module, (reason, count))
        if count >= MAX_FAILURES:
            return None
        warning = f"dp was not possible for call {{call}}, which ran on one device: {reason}"
        thread.dp_failure = warning, module
        return refused_plan(ModuleDevice(module).device or "cpu", reason)

    def finish_fallback(self, thread: ThreadState, failed: bool) -> None:
        """Finish a call that ran on one device after dp had failed.

        `failed`: whether the call raised on one device, too. In that case, the script itself is at fault, and dp stays
        available.
        """
        warning, module = thread.dp_failure
        thread.dp_failure = None
        if failed:
            self._dp_failures.pop(module)
        else:
            self.session.warn(warning, "last")

    def clear_failures(self, module: torch.nn.Module) -> None:
        """Forget earlier failures of the module, because dp worked."""
        self._dp_failures.pop(module)

    def record_plan(self, root: str, plan: CallPlan) -> None:
        """Acknowledge and record the plan for the next call of a root. `root`: the root's name."""
        self._acknowledge(plan.mode)
        self._event_count += 1
        if self._event_count > MAX_EVENTS:
            return
        config = self.session.config
        was_dp_requested = config.has_requested_devices or config.mode == "dp"
        if plan.is_refused and plan.mode == SINGLE and not self.is_user_request and was_dp_requested:
            self.session.warn(f"dp was requested, but {root} runs on one device: {plan.reason}")
        self.session.record_event(
            "mode",
            "next",
            step=None,
            call=None,
            root=root,
            mode=MODES[plan.mode],
            requested_by="user" if self.is_user_request else "start",
            devices=list(plan.devices),
            virtual=plan.virtual_devices is not None,
            reason=plan.reason,
            refused=plan.reason if plan.is_refused else None,
        )

    def plan_functional(self, module: torch.nn.Module, device_ids: Any) -> CallPlan:
        """Make the plan for torch's functional data_parallel of `module` over `device_ids` (None: all devices)."""
        device = ModuleDevice(module).device or default_device()
        module_devices = (str(device),)
        if self.is_locked or device.type not in ("cpu", "cuda"):
            return CallPlan(DP, module_devices)
        if device.type == "cpu":
            if torch.cuda.is_available():
                return CallPlan(DP, module_devices)  # torch raises a clear error
            refusal = unreplicable_reason(module)
            if refusal is not None or self.requested_mode == SINGLE:
                lone_device = self._virtual_devices(1, device)
                return CallPlan(
                    SINGLE,
                    module_devices,
                    device_ids=(0,),
                    virtual_devices=lone_device,
                    reason=refusal,
                    is_refused=refusal is not None,
                )
            if device_ids is None or self.session.config.has_requested_devices:
                return self._plan_dp(device)
            return self._plan_virtual_devices(len(device_ids), device, "no GPU: replicas share the CPU")
        if self.session.config.has_requested_devices and self.requested_mode != SINGLE:
            plan = self._plan_dp(device)
            if plan.virtual_devices is None or unreplicable_reason(module) is None:
                return plan
        if device_ids is None:
            device_ids = range(torch.cuda.device_count())
        indices = tuple(torch._utils._get_device_index(device_id, True) for device_id in device_ids)
        own_devices = tuple(f"cuda:{index}" for index in indices)
        if self.requested_mode == SINGLE and len(own_devices) > 1:
            return CallPlan(SINGLE, own_devices[:1], device_ids=indices[:1])
        return CallPlan(DP if len(own_devices) > 1 else SINGLE, own_devices)

    # ---------------------------------------------------------------- plans

    def splits_itself(self, module: object, *, just_found: bool = False) -> bool:
        """Return whether the forward of a root module has made a data_parallel or similar call before.

        `just_found`: whether it has just made such a call; this is remembered.
        """
        splits_itself = self._self_splitting_roots.get(module) is not None
        if just_found:
            self._self_splitting_roots.set(module, True)
        return splits_itself

    def plan_composed(self, devices: tuple[str, ...], virtual_devices: VirtualDevices | None) -> CallPlan:
        """Make the plan for calls that a script composes from primitives, over the devices that the script passes."""
        reason = None if virtual_devices is None else "no GPU: replicas share the CPU"
        if self.requested_mode == SINGLE and not self.is_locked:
            reason = "the script composes replicate, scatter, parallel_apply and gather itself"
            return CallPlan(DP, devices, virtual_devices=virtual_devices, reason=reason, is_refused=True)
        replicas = self.session.config.replicas
        if replicas is not None and replicas != len(devices) and not self.is_locked:
            reason = f"the script itself passes {len(devices)} devices to the primitives; {replicas} were requested"
        return CallPlan(DP, devices, virtual_devices=virtual_devices, reason=reason)

    def composed_devices(self) -> VirtualDevices | None:
        """Return virtual devices for the script's own calls of primitives without a GPU; None to run as written."""
        if self.is_locked or torch.cuda.is_available():
            return None
        return self._virtual_devices(DEFAULT_VIRTUAL, torch.device("cpu"))

    def _find_refusal(self, module: torch.nn.Module) -> str | None:
        """Return why dp has failed too often for a module; None if it may be tried."""
        reason, count = self._dp_failures.get(module) or (None, 0)
        return reason if count >= MAX_FAILURES else None

    def plan_wrapper(self, module: Any) -> CallPlan:
        """Make the plan for a DataParallel."""
        own_devices = tuple(f"{module.src_device_obj.type}:{i}" for i in module.device_ids)
        # A module without parameters, such as a loss, runs on the devices of its inputs.
        device = ModuleDevice(module.module).device or (module.src_device_obj if own_devices else default_device())
        module_devices = (str(device),)
        if self.is_locked:
            mode = DP if len(own_devices) > 1 else SINGLE
            return CallPlan(mode, own_devices or module_devices)
        if self.requested_mode == SINGLE:
            if len(own_devices) > 1:
                return single_device_plan(module, own_devices)
            return CallPlan(SINGLE, own_devices or module_devices)
        refusal = self._find_refusal(module)
        if refusal is None and not own_devices and self.dim_of(module) is None:
            refusal = "this DataParallel was copied or loaded: its dim is not known"
        if refusal is None and not own_devices:
            refusal = unreplicable_reason(module.module)
        if refusal is not None:
            device_ids = tuple(module.device_ids[:1]) if own_devices else None
            return CallPlan(
                SINGLE, own_devices[:1] or module_devices, device_ids=device_ids, reason=refusal, is_refused=True
            )
        runs_as_written = len(own_devices) > 1 or not self.is_user_request
        if own_devices and not self.session.config.has_requested_devices and runs_as_written:
            return CallPlan(DP, own_devices)
        reason = uncopyable_reason(module)
        if reason is not None:
            mode = DP if len(own_devices) > 1 else SINGLE
            return CallPlan(mode, own_devices or module_devices, reason=reason, is_refused=True)
        plan = self._plan_dp(device)
        if plan.is_refused and len(own_devices) > 1:  # as written, the call would run on all its devices
            return single_device_plan(module, own_devices, plan.reason)
        return plan

    def plan_root(self, module: torch.nn.Module) -> CallPlan:
        """Make the plan for a bare root: a root module without a wrapper."""
        device = ModuleDevice(module).device
        device_name = str(device or "cpu")
        module_devices = (device_name,)
        if self.is_locked:
            return CallPlan(SINGLE, module_devices)
        mode = self.requested_mode or (DP if self.session.config.has_requested_devices else SINGLE)
        if mode == SINGLE:
            return CallPlan(SINGLE, module_devices)
        refusal = self._find_refusal(module) or unsplittable_reason(module)
        if refusal is None and holds_data_parallel(module):
            return CallPlan(SINGLE, module_devices, reason="it holds a DataParallel, which has a mode of its own")
        if self.splits_itself(module):
            refusal = "its own forward runs a part of it data-parallel"
        if self.session.config.batch_dim:
            refusal = "--batch-dim is not 0: dpmon splits a batch along its first dimension only"
        if refusal is not None:
            return refused_plan(device_name, refusal)
        return self._plan_dp(device)

    def _plan_dp(self, module_device: torch.device | None) -> CallPlan:
        """Plan dp over the requested devices, or over all available ones. `module_device`: None without parameters."""
        if module_device is None:
            return refused_plan("cpu", "the module has no parameters")
        config = self.session.config
        devices = [torch.device(name) for name in config.devices]
        if devices:
            if len(set(devices)) == len(devices) and all(device.type != "cpu" for device in devices):
                return self._plan_real_devices([device.index or 0 for device in devices], module_device)
            if len({(device.type, device.index or 0) for device in devices}) > 1:
                return refused_plan(module_device, "virtual replicas share one device, but --devices names several")
            requested = devices[0]
            is_other_gpu = module_device.type == "cuda" and (requested.index or 0) != (module_device.index or 0)
            if requested.type != module_device.type or is_other_gpu:
                return refused_plan(module_device, f"--devices names {requested}, but the module is on {module_device}")
            return self._plan_virtual_devices(len(devices), module_device, "requested by --devices")
        if module_device.type == "cuda":
            count = torch.cuda.device_count()
            replicas = config.replicas or count
            first = module_device.index or 0
            if replicas <= count and (replicas > 1 or config.replicas):
                others = [index for index in range(count) if index != first]
                return self._plan_real_devices([first, *others][:replicas], module_device)
            if config.replicas:
                return self._plan_virtual_devices(replicas, module_device, f"{replicas} replicas on {count} GPU(s)")
            return refused_plan(module_device, "there is only one GPU; --replicas N makes virtual replicas")
        if module_device.type != "cpu":
            return refused_plan(module_device, f"DataParallel does not run on {module_device.type}")
        if torch.cuda.is_available() and not config.replicas:
            return refused_plan(module_device, "the module is on the CPU of a machine with GPUs")
        reason = "no GPU" if not torch.cuda.is_available() else "the module is on the CPU"
        count = config.replicas or DEFAULT_VIRTUAL
        return self._plan_virtual_devices(count, module_device, f"{reason}: replicas share the CPU")

    def _plan_real_devices(self, device_ids: list[int], device: torch.device) -> CallPlan:
        """Plan dp over GPUs. `device`: the device of the module, which must be the first of them."""
        if device_ids[0] != (device.index or 0) or device.type != "cuda":
            return refused_plan(device, f"the module is on {device}, but the first device is cuda:{device_ids[0]}")
        count = torch.cuda.device_count()  # CUDA_VISIBLE_DEVICES may leave fewer than the machine has
        if max(device_ids) >= count:
            reason = f"this process has no cuda:{max(device_ids)}: it has {count} GPU{'s' if count > 1 else ''}"
            return refused_plan(device, reason)
        return CallPlan(DP, tuple(f"cuda:{i}" for i in device_ids), tuple(device_ids))

    def _plan_virtual_devices(self, count: int, device: torch.device, reason: str) -> CallPlan:
        virtual_devices = self._virtual_devices(count, device)
        return CallPlan(DP, virtual_devices.names, tuple(range(count)), virtual_devices, reason)

    def _virtual_devices(self, count: int, device: torch.device) -> VirtualDevices:
        """Return `count` virtual devices on a real device, made once."""
        key = (count, str(device))
        virtual_devices = self._virtual_devices_cache.get(key)
        if virtual_devices is None:
            virtual_devices = self._virtual_devices_cache[key] = VirtualDevices(count, device, self.originals)
        return virtual_devices
