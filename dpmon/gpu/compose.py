"""Composes a sample of a GPU from NVML's answers, the reasons for missing ones, and facts about the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from dpmon.gpu.device import VALUES, DeviceSample
from dpmon.gpu.share import Run, bare_uuid, of_processes, of_torch

NOT_ASKED = "not asked yet"
_OF_PROCESSES = ("of_run", "mem_run_bytes", "mem_others_bytes", "processes", "process_count")
_NO_SUCH_LIST = ("not supported", "this driver does not offer it")


_Part = tuple[Mapping[str, Any], Mapping[str, str]]
"""Values by field, and reasons for missing values by field."""


def compose(
    index: int, who: Mapping[str, str], found: Mapping[str, Any], absent: Mapping[str, str], run: Run, uuids: Set[str]
) -> DeviceSample:
    """Compose a sample.

    `found`, `absent`: answers and reasons for missing ones, by field. `uuids`: bare UUIDs of the GPU and its instances.
    """
    torch = of_torch(run, uuids)
    used_by_torch = bool(torch[0].get("ordinals")) and torch[0].get("mem_torch_bytes") != 0
    said: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for values, why in (
        ({name: found[name] for name in VALUES if name in found}, absent),
        (who, {}),
        _who_sees_it(who, run),
        torch,
        _processes(found, absent, run, used_by_torch),
        _retired(found, absent),
        _instances(found, absent),
    ):
        said.update(values)
        reasons.update(why)
    known = {name: said[name] for name in VALUES if said.get(name) is not None}
    return DeviceSample(
        index, **known, absent={name: reasons.get(name, NOT_ASKED) for name in VALUES if name not in known}
    )


def _who_sees_it(who: Mapping[str, str], run: Run) -> _Part:
    visible = run.visible.get(bare_uuid(who["uuid"])) if "uuid" in who else None
    return {"visible": visible}, {"visible": run.invisible_reason} if visible is None else {}


def _processes(found: Mapping[str, Any], absent: Mapping[str, str], run: Run, used_by_torch: bool) -> _Part:
    compute, graphics = found.get("compute"), found.get("graphics")
    # A GPU without a display engine has no list of graphics processes; it counts as empty.
    if compute is None or (graphics is None and absent.get("graphics") not in _NO_SUCH_LIST):
        reason = next((absent[name] for name in ("compute", "graphics") if name in absent), NOT_ASKED)
        return {"of_run": True} if used_by_torch else {}, dict.fromkeys(_OF_PROCESSES, reason)
    held: dict[int, int | None] = dict(compute)
    for pid, used in (graphics or {}).items():  # a process in both lists holds it once
        held[pid] = held.get(pid) if used is None else max(used, held.get(pid) or 0)
    return of_processes(held, run, used_by_torch)


def _retired(found: Mapping[str, Any], absent: Mapping[str, str]) -> _Part:
    names = ("retired_single", "retired_double")
    if all(name in found for name in names):
        return {"retired_pages": sum(found[name] for name in names)}, {}
    return {}, {"retired_pages": next((absent[name] for name in names if name in absent), NOT_ASKED)}


def _instances(found: Mapping[str, Any], absent: Mapping[str, str]) -> _Part:
    if "mig" not in found:
        return {"mig_devices": None}, {"mig_devices": absent.get("mig", NOT_ASKED)}
    return ({} if found["mig"] else {"mig_devices": []}), {}
