"""Finds this run's share of a GPU, from the driver's list of processes and from torch's reports in the run."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

MAX_PROCESSES = 16
MAX_USES = 256
NO_PIDS_IN_CONTAINER = "inside a container the driver's process ids cannot be matched to ours"
NOT_BY_PROCESS = "the driver does not report memory by process"
NOT_SAID = "no running training process has reported the GPUs that torch uses"


@dataclass(frozen=True, slots=True)
class TorchUse:
    """One GPU as one process of the run reports it: torch's name for it, and the reserved bytes."""

    process: int
    device: str
    uuid: str
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """The facts about the run that a sample of a GPU needs."""

    pids: Set[int] = frozenset()
    same_pids: bool = True
    """Whether the driver's process ids are from the same namespace as ours."""
    uses: tuple[TorchUse, ...] = ()
    visible: Mapping[str, bool] = field(default_factory=dict)
    """Whether CUDA sees a GPU, by bare UUID; unknown GPUs are absent."""
    invisible_reason: str = "CUDA_VISIBLE_DEVICES does not say whether CUDA sees it"


def bare_uuid(uuid: str) -> str:
    """Return a UUID without its prefix: NVML writes GPU-8932f937-..., torch writes 8932f937-...."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def uses_of(process: int, devices: Any) -> tuple[TorchUse, ...]:
    """Return the GPUs in the `devices` of a process's `memory` record, without invalid entries."""
    found = []
    for device in devices[:MAX_USES] if isinstance(devices, list) else ():
        if isinstance(device, Mapping) and isinstance(device.get("uuid"), str):
            reserved = device.get("reserved_bytes")
            known = reserved if isinstance(reserved, int) and not isinstance(reserved, bool) else None
            found.append(TorchUse(process, str(device.get("device")), device["uuid"], known))
    return tuple(found)


def of_torch(run: Run, uuids: Set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return torch's values for the GPU (or MIG instances) with these bare UUIDs, and reasons for missing fields."""
    uses = [use for use in run.uses if bare_uuid(use.uuid) in uuids]
    if not uses:
        if not run.uses or not uuids:
            reason = NOT_SAID if not run.uses else "NVML does not report the GPU's UUID"
            return {}, dict.fromkeys(("ordinals", "mem_torch_bytes"), reason)
        return {"ordinals": [], "mem_torch_bytes": 0}, {}
    values: dict[str, Any] = {"ordinals": [{"process": use.process, "device": use.device} for use in uses]}
    known = [use.reserved_bytes for use in uses if use.reserved_bytes is not None]
    if len(known) < len(uses):
        return values, {"mem_torch_bytes": "torch does not report its reserved memory"}
    return {**values, "mem_torch_bytes": sum(known)}, {}


def of_processes(
    held: Mapping[int, int | None], run: Run, used_by_torch: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the shares of the run's processes and of others, and the reasons for missing fields.

    `held`: bytes by process id (None: unknown). In a container the driver's ids are the machine's, or hidden: an id
    equal to one of ours may belong to another process, and an empty list does not mean that no process uses the GPU.
    Then only torch's report counts (`used_by_torch`).
    """
    values: dict[str, Any] = {}
    absent: dict[str, str] = {}
    if not run.same_pids:
        absent.update(dict.fromkeys(("mem_run_bytes", "mem_others_bytes"), NO_PIDS_IN_CONTAINER))
        if used_by_torch:
            values["of_run"] = True
        else:
            absent["of_run"] = NO_PIDS_IN_CONTAINER
        if held:
            values.update(processes=_listed(held, frozenset(), None), process_count=len(held))
        else:
            absent.update(dict.fromkeys(("processes", "process_count"), NO_PIDS_IN_CONTAINER))
        return values, absent
    ours = [used for pid, used in held.items() if pid in run.pids]
    others = [used for pid, used in held.items() if pid not in run.pids]
    values.update(of_run=bool(ours) or used_by_torch, process_count=len(held))
    values["processes"] = _listed(held, run.pids, False)
    for name, parts in (("mem_run_bytes", ours), ("mem_others_bytes", others)):
        known = [used for used in parts if used is not None]
        if len(known) < len(parts):
            absent[name] = NOT_BY_PROCESS
        else:
            values[name] = sum(known)
    return values, absent


def _listed(held: Mapping[int, int | None], pids: Set[int], otherwise: bool | None) -> list[dict[str, Any]]:
    rows = [{"pid": pid, "mem_bytes": used, "of_run": pid in pids or otherwise} for pid, used in held.items()]
    rows.sort(key=lambda row: (row["of_run"] is not True, -(row["mem_bytes"] or 0), row["pid"] or 0))
    return rows[:MAX_PROCESSES]
