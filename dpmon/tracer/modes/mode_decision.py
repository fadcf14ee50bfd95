"""Decides whether calls run as dp or single, and why a request is refused.

A `CallPlan` describes how calls of one module run. It is made at the first call of the module, and again after each
request.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dpmon.record.shared_names import MODES
from dpmon.span_ring import HeaderWord
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
    """Decides the mode of each call in one process."""

    def __init__(self, session: Session, originals: TorchOriginals) -> None:
        self.session = session
        self.originals = originals
        self._constructed: dict[int, tuple[Any, int]] = {}
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        config = self.session.config
        self.locked = config.mode == "script"
        """Whether dpmon leaves the computation as written."""
        self.chosen = MODES.index(config.mode) if config.mode in MODES[1:] else 0
        """The requested mode, as an index of MODES; 0 if none was requested."""
        self.by_user = False
        """Whether a reader requested the mode while the training ran."""
        self.serial = 0
        """Number of the last request acted upon."""
        self._refused: dict[int, tuple[Any, str, int]] = {}
        """By id of a module: a weak reference to it, why dp failed, and number of failures in a row."""
        self._splitting: dict[int, Any] = {}
        """By id: weak references to bare roots with a data_parallel or similar call in their forward."""
        self._events = 0
        self._virtual: dict[tuple[int, str], VirtualDevices] = {}

    def note_dim(self, wrapper: object, dim: int) -> None:
        """Note the `dim` of a new DataParallel; torch does not store it on a machine without GPUs."""
        key = id(wrapper)  # not a WeakKeyDictionary: a subclass may compare and hash as it likes
        self._constructed[key] = weakref.ref(wrapper, lambda _: self._constructed.pop(key, None)), dim

    def dim_of(self, wrapper: object) -> int | None:
        """The dimension along which a DataParallel splits; None if it was not made here (copied, loaded)."""
        known = self._constructed.get(id(wrapper))
        return known[1] if known is not None and known[0]() is wrapper else None

    # ---------------------------------------------------------------- requests

    def apply_new_request(self) -> bool:
        """Act on a new request; return whether calls must be planned again. Called only between calls."""
        ring = self.session.ring
        if ring is None or ring.words[HeaderWord.REQUEST] == self.serial:
            return False
        self.serial = ring.words[HeaderWord.REQUEST]
        wanted = ring.words[HeaderWord.REQUESTED_MODE]
        if self.locked or wanted not in (DP, SINGLE):
            reason = "--mode script leaves the computation as written" if self.locked else "unknown mode"
            self.session.record_event("mode", mode=None, requested_by="user", refused=reason, reason=reason)
            self._acknowledge(0)
            return False
        self.chosen = wanted
        self.by_user = True
        self._refused.clear()
        self._events = 0
        return True

    def _acknowledge(self, mode: int) -> None:
        """Publish the number of the last request and the mode in force."""
        ring = self.session.ring
        if ring is not None:
            ring.words[HeaderWord.MODE] = mode
            ring.words[HeaderWord.ACKNOWLEDGED] = self.serial

    def handle_dp_failure(self, me: ThreadState, module: torch.nn.Module, reason: str, final: bool) -> CallPlan | None:
        """Handle a failure of dp in one call. Return the plan for that call; None to plan the module again.

        A batch may be at fault (a single row for BatchNorm), so the next call tries dp again. After MAX_FAILURES
        failures in a row, or if `final`, the module stays single until dp is requested again.
        """
        known = self._refused.get(id(module))
        known = known if known is not None and known[0]() is module else None
        count = MAX_FAILURES if final else known[2] + 1 if known is not None else 1
        self._refused[id(module)] = (weakref.ref(module), reason, count)
        if count >= MAX_FAILURES:
            return None
        text = f"dp was not possible for call {{call}}, which ran on one device: {reason}"
        me.tried = text, id(module)
        return refused_plan(ModuleDevice(module).device or "cpu", reason)

    def finish_fallback(self, me: ThreadState, failed: bool) -> None:
        """End a call that ran on one device after dp had failed.

        `failed`: whether the call raised on one device, too. Then the script is at fault, and dp is not counted out.
        """
        text, key = me.tried
        me.tried = None
        if failed:
            self._refused.pop(key, None)
        else:
            self.session.warn(text, "last")

    def clear_failures(self, module: torch.nn.Module) -> None:
        """Forget earlier failures of the module, because dp worked."""
        if self._refused:
            self._refused.pop(id(module), None)

    def record_plan(self, root: str, plan: CallPlan) -> None:
        """Acknowledge and record the plan for the next call of a root."""
        self._acknowledge(plan.mode)
        self._events += 1
        if self._events > MAX_EVENTS:
            return
        config = self.session.config
        if (
            plan.refused
            and plan.mode == SINGLE
            and not self.by_user
            and (config.has_requested_devices or config.mode == "dp")
        ):
            self.session.warn(f"dp was requested, but {root} runs on one device: {plan.reason}")
        self.session.record_event(
            "mode",
            "next",
            step=None,
            call=None,
            root=root,
            mode=MODES[plan.mode],
            requested_by="user" if self.by_user else "start",
            devices=list(plan.devices),
            virtual=plan.virtual is not None,
            reason=plan.reason,
            refused=plan.reason if plan.refused else None,
        )

    def plan_functional(self, module: torch.nn.Module, device_ids: Any) -> CallPlan:
        """Make the plan for torch's functional data_parallel of `module` over `device_ids` (None: all devices)."""
        inner = ModuleDevice(module).device or default_device()
        here = (str(inner),)
        if self.locked or inner.type not in ("cpu", "cuda"):
            return CallPlan(DP, here)
        if inner.type == "cpu":
            if torch.cuda.is_available():
                return CallPlan(DP, here)  # torch raises a clear error
            refusal = unreplicable_reason(module)
            if refusal is not None or self.chosen == SINGLE:
                return CallPlan(SINGLE, here, (0,), self._virtual_devices(1, inner), refusal, refusal is not None)
            if device_ids is None or self.session.config.has_requested_devices:
                return self._plan_over_devices(inner)
            return self._plan_virtual_devices(len(device_ids), inner, "no GPU: replicas share the CPU")
        if self.session.config.has_requested_devices and self.chosen != SINGLE:
            plan = self._plan_over_devices(inner)
            if plan.virtual is None or unreplicable_reason(module) is None:
                return plan
        count = torch.cuda.device_count()
        ids = [torch._utils._get_device_index(i, True) for i in device_ids] if device_ids is not None else range(count)
        own = tuple(f"cuda:{i}" for i in ids)
        if self.chosen == SINGLE and len(own) > 1:
            return CallPlan(SINGLE, own[:1], tuple(ids)[:1])
        return CallPlan(DP if len(own) > 1 else SINGLE, own)

    # ---------------------------------------------------------------- plans

    def splits_itself(self, module: object, found: bool = False) -> bool:
        """Return whether a bare root's forward has made a data_parallel or similar call before.

        `found`: whether it has just made one, which is remembered.
        """
        known = self._splitting.get(id(module))
        if found:
            self._splitting[id(module)] = weakref.ref(module)
        return known is not None and known() is module

    def plan_composed(self, devices: tuple[str, ...], virtual: VirtualDevices | None) -> CallPlan:
        """Make the plan for calls that a script composes from primitives, over the devices that the script passes."""
        reason = None if virtual is None else "no GPU: replicas share the CPU"
        if self.chosen == SINGLE and not self.locked:
            reason = "the script composes replicate, scatter, parallel_apply and gather itself"
            return CallPlan(DP, devices, None, virtual, reason, True)
        asked = self.session.config.replicas
        if asked is not None and asked != len(devices) and not self.locked:
            reason = f"the script itself passes {len(devices)} devices to the primitives; {asked} were requested"
        return CallPlan(DP, devices, None, virtual, reason)

    def composed_devices(self) -> VirtualDevices | None:
        """Return virtual devices for the script's own calls of primitives without a GPU; None to run as written."""
        if self.locked or torch.cuda.is_available():
            return None
        return self._virtual_devices(DEFAULT_VIRTUAL, torch.device("cpu"))

    def _refusal(self, module: torch.nn.Module) -> str | None:
        known = self._refused.get(id(module))
        if known is None or known[0]() is not module or known[2] < MAX_FAILURES:
            return None
        return known[1]

    def plan_wrapper(self, module: Any) -> CallPlan:
        """Make the plan for a DataParallel."""
        own = tuple(f"{module.src_device_obj.type}:{i}" for i in module.device_ids)
        # A module without parameters, such as a loss, runs on the devices of its inputs.
        inner = ModuleDevice(module.module).device or (module.src_device_obj if own else default_device())
        here = (str(inner),)
        if self.locked:
            mode = DP if len(own) > 1 else SINGLE
            return CallPlan(mode, own or here)
        mode = self.chosen or DP
        if mode == SINGLE:
            return single_device_plan(module, own) if len(own) > 1 else CallPlan(SINGLE, own or here)
        refusal = self._refusal(module)
        if refusal is None and not own and self.dim_of(module) is None:
            refusal = "this DataParallel was copied or loaded: its dim is not known"
        if refusal is None and not own:
            refusal = unreplicable_reason(module.module)
        if refusal is not None:
            return CallPlan(SINGLE, own[:1] or here, tuple(module.device_ids[:1]) if own else None, None, refusal, True)
        if own and not self.session.config.has_requested_devices and (len(own) > 1 or not self.by_user):
            return CallPlan(DP, own)
        unfit = uncopyable_reason(module)
        if unfit is not None:
            return CallPlan(DP if len(own) > 1 else SINGLE, own or here, None, None, unfit, True)
        plan = self._plan_over_devices(inner)
        if plan.refused and len(own) > 1:  # as written, the call would run on all its devices
            return single_device_plan(module, own, plan.reason)
        return plan

    def plan_root(self, module: torch.nn.Module) -> CallPlan:
        """Make the plan for a bare root."""
        inner = ModuleDevice(module).device
        here = (str(inner or "cpu"),)
        if self.locked:
            return CallPlan(SINGLE, here)
        mode = self.chosen or (DP if self.session.config.has_requested_devices else SINGLE)
        if mode == SINGLE:
            return CallPlan(SINGLE, here)
        refusal = self._refusal(module) or unsplittable_reason(module)
        if refusal is None and holds_data_parallel(module):
            return CallPlan(SINGLE, here, reason="it holds a DataParallel, which has a mode of its own")
        if self.splits_itself(module):
            refusal = "its own forward runs a part of it data-parallel"
        if self.session.config.batch_dim:
            refusal = "--batch-dim is not 0: dpmon splits a batch along its first dimension only"
        if refusal is not None:
            return refused_plan(here[0], refusal)
        return self._plan_over_devices(inner)

    def _plan_over_devices(self, base: torch.device | None) -> CallPlan:
        """Plan dp over the requested devices, or over all available devices."""
        if base is None:
            return refused_plan("cpu", "the module has no parameters")
        config = self.session.config
        devices = [torch.device(name) for name in config.devices]
        if devices:
            if len(set(devices)) == len(devices) and all(device.type != "cpu" for device in devices):
                return self._plan_real_devices([d.index or 0 for d in devices], base)
            if len({(d.type, d.index or 0) for d in devices}) > 1:
                return refused_plan(base, "virtual replicas share one device, but --devices names several")
            if devices[0].type != base.type or (base.type == "cuda" and (devices[0].index or 0) != (base.index or 0)):
                return refused_plan(base, f"--devices names {devices[0]}, but the module is on {base}")
            return self._plan_virtual_devices(len(devices), base, "requested by --devices")
        if base.type == "cuda":
            count = torch.cuda.device_count()
            wanted = config.replicas or count
            first = base.index or 0
            if wanted <= count and (wanted > 1 or config.replicas):
                others = [i for i in range(count) if i != first]
                return self._plan_real_devices([first, *others][:wanted], base)
            if config.replicas:
                return self._plan_virtual_devices(
                    config.replicas, base, f"{config.replicas} replicas on {count} GPU(s)"
                )
            return refused_plan(base, "there is only one GPU; --replicas N makes virtual replicas")
        if base.type != "cpu":
            return refused_plan(base, f"DataParallel does not run on {base.type}")
        if torch.cuda.is_available() and not config.replicas:
            return refused_plan(base, "the module is on the CPU of a machine with GPUs")
        reason = "no GPU" if not torch.cuda.is_available() else "the module is on the CPU"
        return self._plan_virtual_devices(config.replicas or DEFAULT_VIRTUAL, base, f"{reason}: replicas share the CPU")

    def _plan_real_devices(self, ids: list[int], base: torch.device) -> CallPlan:
        if ids[0] != (base.index or 0) or base.type != "cuda":
            return refused_plan(base, f"the module is on {base}, but the first device is cuda:{ids[0]}")
        count = torch.cuda.device_count()  # CUDA_VISIBLE_DEVICES may leave fewer than the machine has
        if max(ids) >= count:
            reason = f"this process has no cuda:{max(ids)}: it has {count} GPU{'s' if count > 1 else ''}"
            return refused_plan(base, reason)
        return CallPlan(DP, tuple(f"cuda:{i}" for i in ids), tuple(ids))

    def _plan_virtual_devices(self, count: int, base: torch.device, reason: str) -> CallPlan:
        virtual = self._virtual_devices(count, base)
        return CallPlan(DP, virtual.names, tuple(range(count)), virtual, reason)

    def _virtual_devices(self, count: int, base: torch.device) -> VirtualDevices:
        key = (count, str(base))
        virtual = self._virtual.get(key)
        if virtual is None:
            virtual = self._virtual[key] = VirtualDevices(count, base, self.originals)
        return virtual
