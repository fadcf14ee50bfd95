"""dp or single: what was asked for, what is in force, and why something cannot be had.

A `Plan` says how calls of one module run. It is made when the module is first called, and again after each request.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from dpmon.record.wire import MODES
from dpmon.span_ring import Word
from dpmon.tracer.names import class_name
from dpmon.tracer.session import Session
from dpmon.tracer.tables import buffers_of, modules_of, parameters_of
from dpmon.tracer.threads import Thread
from dpmon.tracer.virtual import Originals, VirtualDevices

__all__ = ["DP", "SINGLE", "Modes", "Plan", "overrides"]

DP, SINGLE = 1, 2
DEFAULT_VIRTUAL = 2
MAX_EVENTS = 64
MAX_FAILURES = 3

_HOST_ONLY = "the devices are CPUs: host time is all there is"
_HOLDS = "it holds a"
_NO_EVENTS = "it was not timed: only calls of the thread that trains are"


@dataclass(frozen=True)
class Plan:
    """How calls of one module run."""

    mode: int
    devices: tuple[str, ...]
    """Names of the devices offered, as records show them."""
    device_ids: tuple[int, ...] | None = None
    """What torch's code is given instead of the script's own; None leaves the call as it is written."""
    virtual: VirtualDevices | None = None
    reason: str | None = None
    """Why it is this and not what was asked for, or why the replicas are virtual."""
    refused: bool = False

    @property
    def absent(self) -> dict[str, str]:
        """Reasons for what a record of such a call lacks."""
        return {"device_ms": _HOST_ONLY if self.on_cpu else _NO_EVENTS}

    @property
    def on_cpu(self) -> bool:
        """Whether no accelerator takes part."""
        return all(name.startswith("cpu") for name in self.devices)


class Modes:
    """The mode of one process."""

    def __init__(self, session: Session, originals: Originals) -> None:
        self.session = session
        self.originals = originals
        self._constructed: dict[int, tuple[Any, int]] = {}
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        config = self.session.config
        self.locked = config.mode == "script"
        self.chosen = MODES.index(config.mode) if config.mode in MODES[1:] else 0
        self.by_user = False
        self.serial = 0
        """The last request taken up."""
        self._refused: dict[int, tuple[Any, str, int]] = {}
        self._splitting: dict[int, Any] = {}
        self._events = 0
        self.unannounced: list[tuple[str, Plan]] = []
        self.doubtful: list[tuple[str, Plan]] = []
        """Refusals for roots that hold a DataParallel: none at all if that one turns out to run in the root's call."""
        self._virtual: dict[tuple[int, str], VirtualDevices] = {}

    def constructed(self, wrapper: Any, dim: int) -> None:
        """A DataParallel was made to split along `dim`, which torch forgets on a machine without GPUs."""
        key = id(wrapper)  # not a WeakKeyDictionary: a subclass may compare and hash as it likes
        self._constructed[key] = weakref.ref(wrapper, lambda _: self._constructed.pop(key, None)), dim

    def dim_of(self, wrapper: Any) -> int | None:
        """Along which dimension the DataParallel splits; None if it was not made here (copied, loaded)."""
        known = self._constructed.get(id(wrapper))
        return known[1] if known is not None and known[0]() is wrapper else None

    # ---------------------------------------------------------------- requests

    def poll(self) -> bool:
        """Take up a request, if somebody made one since the last time; called between calls only."""
        ring = self.session.ring
        if ring is None or ring.words[Word.REQUEST] == self.serial:
            return False
        self.serial = ring.words[Word.REQUEST]
        wanted = ring.words[Word.WANTED]
        if self.locked or wanted not in (DP, SINGLE):
            reason = "--mode script leaves the computation as it is written" if self.locked else "unknown mode"
            self.session.event("mode", mode=None, requested_by="user", refused=reason, reason=reason)
            self._acknowledge(0)
            return False
        self.chosen = wanted
        self.by_user = True
        self._refused.clear()
        self._events = 0
        return True

    def _acknowledge(self, mode: int) -> None:
        """Tell readers which request was acted upon and which mode is in force now."""
        ring = self.session.ring
        if ring is not None:
            ring.words[Word.MODE] = mode
            ring.words[Word.ANSWERED] = self.serial

    def plan(self, module: torch.nn.Module, wrapper: bool) -> Plan:
        """Make the plan for `module`: a DataParallel (`wrapper`) or a bare root."""
        plan = self._for_wrapper(module) if wrapper else self._for_root(module)
        root = module.module if wrapper else module
        holds = plan.refused and not wrapper and (plan.reason or "").startswith(_HOLDS)
        (self.doubtful if holds else self.unannounced).append((class_name(root), plan))
        return plan

    def stateless(self, module: torch.nn.Module, weights: Any) -> Plan:
        """Make the plan for a model that takes its weights as arguments of each call: it runs on their device."""
        tensor = next((value for value in weights if isinstance(value, torch.Tensor)), None)
        here = (str(torch.device("cpu") if tensor is None else tensor.device),)
        if self.chosen == DP and not self.locked:
            plan = Plan(SINGLE, here, None, None, "its weights are arguments of each call", True)
        else:
            plan = Plan(SINGLE, here)
        self.unannounced.append((class_name(module), plan))
        return plan

    def failed(self, me: Thread, module: torch.nn.Module, reason: str, final: bool) -> Plan | None:
        """dp could not be done for one call; the plan to run that call by, None if a new one is to be made for good.

        A batch may be at fault (one row for BatchNorm), so the next call tries again; after MAX_FAILURES in a row, or
        when `final`, the module stays single until somebody asks for dp again.
        """
        known = self._refused.get(id(module))
        known = known if known is not None and known[0]() is module else None
        count = MAX_FAILURES if final else known[2] + 1 if known is not None else 1
        self._refused[id(module)] = (weakref.ref(module), reason, count)
        if count >= MAX_FAILURES:
            return None
        text = f"dp was not possible for call {{call}}, which ran on one device: {reason}"
        me.tried = text, id(module), known
        return Plan(SINGLE, (str(_device_of(module) or "cpu"),), None, None, reason, True)

    def tried(self, me: Thread, failed: bool) -> None:
        """The call that ran on one device after dp had failed is over; `failed` says that it raised there too.

        Then it was the script's, and nothing against dp.
        """
        text, key, before = me.tried
        me.tried = None
        if not failed:
            self.session.warn(text, "last")
        elif before is None:
            self._refused.pop(key, None)
        else:
            self._refused[key] = before

    def succeeded(self, module: torch.nn.Module) -> None:
        """dp worked: earlier failures of the module no longer count."""
        if self._refused:
            self._refused.pop(id(module), None)

    def decide(self, runs_inside: bool) -> None:
        """The call of a root for which there was doubt is over; `runs_inside`: its own DataParallel ran in it."""
        made, self.doubtful = self.doubtful, []
        if not runs_inside:
            self.unannounced += made
            self.announce("last")

    def announce(self, first: str = "next") -> None:
        """Acknowledge and record the plans made since the last time; the "next" or the "last" call was the first."""
        made, self.unannounced = self.unannounced, []
        ring = self.session.ring
        if ring is None:
            return
        for root, plan in made:
            self._acknowledge(plan.mode)
            self._events += 1
            if self._events > MAX_EVENTS:
                continue
            config = self.session.config
            if plan.refused and plan.mode == SINGLE and not self.by_user and (config.explicit or config.mode == "dp"):
                self.session.warn(f"dp was asked for, but {root} runs on one device: {plan.reason}")
            self.session.event(
                "mode",
                first,
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

    # ---------------------------------------------------------------- plans

    def functional(self, module: torch.nn.Module, device_ids: Any) -> Plan:
        """Make the plan for torch's functional data_parallel of `module` over `device_ids` (None: all there are)."""
        plan = self._for_functional(module, device_ids)
        self.unannounced.append((class_name(module), plan))
        return plan

    def unrecorded(self, module: torch.nn.Module, device_ids: Any) -> Plan | None:
        """The same plan for a call that is not recorded; None if it runs as it is written."""
        plan = self._for_functional(module, device_ids)
        return plan if plan.virtual is not None else None

    def _for_functional(self, module: torch.nn.Module, device_ids: Any) -> Plan:
        inner = _device_of(module) or _default_device()
        here = (str(inner),)
        if self.locked or inner.type not in ("cpu", "cuda"):
            return Plan(DP, here)
        if inner.type == "cpu":
            if torch.cuda.is_available():
                return Plan(DP, here)  # torch says what is wrong with it
            refusal = _unreplicable(module)
            if refusal is not None:
                return Plan(SINGLE, here, (0,), self._shared(1, inner), refusal, True)
            if self.chosen == SINGLE:
                return Plan(SINGLE, here, (0,), self._shared(1, inner))
            if device_ids is None or self.session.config.explicit:
                return self._spread(inner, False)
            return self._share(len(device_ids), inner, "no GPU: replicas share the CPU")
        if self.session.config.explicit and self.chosen != SINGLE:
            plan = self._spread(inner, False)
            if plan.virtual is None or _unreplicable(module) is None:
                return plan
        count = torch.cuda.device_count()
        ids = [torch._utils._get_device_index(i, True) for i in device_ids] if device_ids is not None else range(count)
        own = tuple(f"cuda:{i}" for i in ids)
        if self.chosen == SINGLE and len(own) > 1:
            return Plan(SINGLE, own[:1], tuple(ids)[:1])
        return Plan(DP if len(own) > 1 else SINGLE, own)

    def splits_itself(self, module: Any, found: bool = False) -> bool:
        """Whether data_parallel, or its like, was seen in a bare root's forward; `found` says that it just was."""
        known = self._splitting.get(id(module))
        if found:
            self._splitting[id(module)] = weakref.ref(module)
        return known is not None and known() is module

    def by_hand(self, root: str, devices: tuple[str, ...], virtual: VirtualDevices | None) -> Plan:
        """Make the plan for what a script composes of the primitives; its devices are its own."""
        reason = None if virtual is None else "no GPU: replicas share the CPU"
        if self.chosen == SINGLE and not self.locked:
            reason = "the script composes replicate, scatter, parallel_apply and gather itself"
            plan = Plan(DP, devices, None, virtual, reason, True)
        else:
            asked = self.session.config.replicas
            if asked is not None and asked != len(devices) and not self.locked:
                reason = f"the script hands the primitives {len(devices)} devices itself, {asked} were asked for"
            plan = Plan(DP, devices, None, virtual, reason)
        self.unannounced.append((root, plan))
        return plan

    def hand_devices(self) -> VirtualDevices | None:
        """Where primitives used by hand run when there is no GPU; None if they run as they are written."""
        if self.locked or torch.cuda.is_available():
            return None
        return self._shared(DEFAULT_VIRTUAL, torch.device("cpu"))

    def _refusal(self, module: torch.nn.Module) -> str | None:
        known = self._refused.get(id(module))
        if known is None or known[0]() is not module or known[2] < MAX_FAILURES:
            return None
        return known[1]

    def _for_wrapper(self, module: Any) -> Plan:
        own = tuple(f"{module.src_device_obj.type}:{i}" for i in module.device_ids)
        # A module without parameters, such as a loss, runs on the devices of its inputs.
        inner = _device_of(module.module) or (module.src_device_obj if own else _default_device())
        here = (str(inner),)
        if self.locked:
            mode = DP if len(own) > 1 else SINGLE
            return Plan(mode, own or here)
        mode = self.chosen or DP
        if mode == SINGLE:
            return _on_one(module, own) if len(own) > 1 else Plan(SINGLE, own or here)
        refusal = self._refusal(module)
        if refusal is None and not own and self.dim_of(module) is None:
            refusal = "this DataParallel was copied or loaded: its dim is not known"
        if refusal is None and not own:
            refusal = _unreplicable(module.module)
        if refusal is not None:
            return Plan(SINGLE, own[:1] or here, tuple(module.device_ids[:1]) if own else None, None, refusal, True)
        if own and not self.session.config.explicit and (len(own) > 1 or not self.by_user):
            return Plan(DP, own)
        finalised = _finalised(module)
        if finalised is not None:
            return Plan(DP if len(own) > 1 else SINGLE, own or here, None, None, finalised, True)
        plan = self._spread(inner, False)
        if plan.refused and len(own) > 1:  # as it is written it would run on all of its own
            return _on_one(module, own, plan.reason)
        return plan

    def _for_root(self, module: torch.nn.Module) -> Plan:
        inner = _device_of(module)
        here = (str(inner or "cpu"),)
        if self.locked:
            return Plan(SINGLE, here)
        mode = self.chosen or (DP if self.session.config.explicit else SINGLE)
        if mode == SINGLE:
            return Plan(SINGLE, here)
        refusal = self._refusal(module) or _unsplittable(module)
        if self.splits_itself(module):
            refusal = "its forward runs a part of it data-parallel itself"
        if refusal is not None:
            return Plan(SINGLE, here, None, None, refusal, True)
        return self._spread(inner, True)

    def _spread(self, base: torch.device | None, bare: bool) -> Plan:
        """dp over what was asked for, else over all there is."""
        if base is None:
            return Plan(SINGLE, ("cpu",), None, None, "the module has no parameters", True)
        config = self.session.config
        devices = [torch.device(name) for name in config.devices]
        if devices:
            if len(set(devices)) == len(devices) and all(device.type != "cpu" for device in devices):
                return self._real([d.index or 0 for d in devices], base)
            if len({(d.type, d.index or 0) for d in devices}) > 1:
                reason = "virtual replicas share one device; --devices names several"
                return Plan(SINGLE, (str(base),), None, None, reason, True)
            if devices[0].type != base.type or (base.type == "cuda" and (devices[0].index or 0) != (base.index or 0)):
                reason = f"--devices says {devices[0]}, but the module is on {base}"
                return Plan(SINGLE, (str(base),), None, None, reason, True)
            return self._share(len(devices), base, "asked for by --devices")
        if base.type == "cuda":
            count = torch.cuda.device_count()
            wanted = config.replicas or count
            first = base.index or 0
            if wanted <= count and (wanted > 1 or config.replicas):
                others = [i for i in range(count) if i != first]
                return self._real([first, *others][:wanted], base)
            if config.replicas:
                return self._share(config.replicas, base, f"{config.replicas} replicas on {count} GPU(s)")
            return Plan(
                SINGLE, (str(base),), None, None, "there is only one GPU; --replicas N makes virtual ones", True
            )
        if base.type != "cpu":
            return Plan(SINGLE, (str(base),), None, None, f"DataParallel does not run on {base.type}", True)
        if torch.cuda.is_available() and not config.replicas:
            return Plan(SINGLE, (str(base),), None, None, "the module is on the CPU of a machine with GPUs", True)
        reason = "no GPU" if not torch.cuda.is_available() else "the module is on the CPU"
        return self._share(config.replicas or DEFAULT_VIRTUAL, base, f"{reason}: replicas share the CPU")

    def _real(self, ids: list[int], base: torch.device) -> Plan:
        if ids[0] != (base.index or 0) or base.type != "cuda":
            reason = f"the module is on {base}, the first of the devices is cuda:{ids[0]}"
            return Plan(SINGLE, (str(base),), None, None, reason, True)
        count = torch.cuda.device_count()  # CUDA_VISIBLE_DEVICES may leave fewer than the machine has
        if max(ids) >= count:
            reason = f"there is no cuda:{max(ids)} for this process, it has {count} GPU{'s' if count > 1 else ''}"
            return Plan(SINGLE, (str(base),), None, None, reason, True)
        return Plan(DP, tuple(f"cuda:{i}" for i in ids), tuple(ids))

    def _share(self, count: int, base: torch.device, reason: str) -> Plan:
        virtual = self._shared(count, base)
        return Plan(DP, virtual.names, tuple(range(count)), virtual, reason)

    def _shared(self, count: int, base: torch.device) -> VirtualDevices:
        key = (count, str(base))
        virtual = self._virtual.get(key)
        if virtual is None:
            virtual = self._virtual[key] = VirtualDevices(count, base, self.originals)
        return virtual


def _on_one(module: Any, own: tuple[str, ...], reason: str | None = None) -> Plan:
    """A DataParallel over several devices of its own on the first of them; `reason`: why, if that was not asked for."""
    finalised = _finalised(module)
    if finalised is not None:
        return Plan(DP, own, None, None, finalised, True)
    for name in ("forward", "scatter"):
        if overrides(type(module), name):
            odd = f"{class_name(module)} has its own {name}, which may not work on one device"
            return Plan(DP, own, None, None, odd, True)
    return Plan(SINGLE, own[:1], tuple(module.device_ids[:1]), None, reason, reason is not None)


def overrides(kind: type, name: str) -> bool:
    """Whether a subclass of DataParallel has its own method of that name."""
    return next(base for base in kind.__mro__ if name in base.__dict__) is not torch.nn.DataParallel


def _device_of(module: torch.nn.Module) -> torch.device | None:
    tensor: torch.Tensor | None = next(parameters_of(module), None)
    if tensor is None:
        tensor = next(buffers_of(module), None)
    return None if tensor is None else tensor.device


def _default_device() -> torch.device:
    """The device on which torch's data parallelism runs a module without parameters and buffers."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _unsplittable(module: torch.nn.Module) -> str | None:
    """Why a bare root cannot be run by data_parallel; None if it can."""
    unfit = _unreplicable(module)
    if unfit is not None:
        return unfit
    for inner in modules_of(module):
        if isinstance(inner, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            return f"{_HOLDS} {class_name(inner)} of its own"
    devices = {str(tensor.device) for tensor in parameters_of(module)}
    devices |= {str(tensor.device) for tensor in buffers_of(module)}
    if len(devices) > 1:
        return f"its parameters are spread over {', '.join(sorted(devices))}"
    return None


def _finalised(module: Any) -> str | None:
    """Why dpmon must not make short-lived copies of this module; None if it may.

    A copy shares the module's attributes. Its finaliser could close the module's files, or count one module several
    times.
    """
    if not hasattr(type(module), "__del__"):
        return None
    return f"{class_name(module)} has a __del__, which every copy would also run"


def _unreplicable(module: torch.nn.Module) -> str | None:
    """Why virtual replicas of a module cannot be made; None if they can."""
    for inner in modules_of(module):
        finalised = _finalised(inner)
        if finalised is not None:
            return finalised
        compiled = getattr(inner, "_compiled_call_impl", None) is not None
        # On the instance (its forward is compiled, and bound to the one module) or on the class.
        compiled |= getattr(getattr(inner, "forward", None), "_torchdynamo_orig_callable", None) is not None
        if compiled or type(inner).__module__.startswith("torch._dynamo"):
            return "a module compiled by torch.compile cannot be replicated"
        if isinstance(inner, torch.jit.ScriptModule):
            return "a TorchScript module is not replicated virtually"
    return None
