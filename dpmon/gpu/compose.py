"""A sample of a GPU from what was answered, what was not, and what is known of the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from dpmon.gpu.device import VALUES, DeviceSample
from dpmon.gpu.share import Run, bare, of_processes, of_torch

__all__ = ["compose"]

NOT_ASKED = "not asked yet"
_OF_PROCESSES = ("of_run", "mem_run_bytes", "mem_others_bytes", "processes", "process_count")
_NO_SUCH_LIST = ("not supported", "this driver does not offer it")


class _Draft:
    """What will be said, and why the rest will not."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.absent: dict[str, str] = {}

    def add(self, values: Mapping[str, Any], absent: Mapping[str, str]) -> None:
        self.values.update(values)
        self.absent.update(absent)


def compose(
    index: int, who: Mapping[str, str], found: Mapping[str, Any], absent: Mapping[str, str], run: Run, uuids: Set[str]
) -> DeviceSample:
    """`found`, `absent`: the answers by field and why one is missing; `uuids`: the GPU's and its instances', bare."""
    draft = _Draft()
    draft.add({name: found[name] for name in VALUES if name in found}, absent)
    draft.add(who, {})
    _who_sees_it(draft, who, run)
    torch, torch_absent = of_torch(run, uuids)
    draft.add(torch, torch_absent)
    used_by_torch = bool(torch.get("ordinals")) and torch.get("mem_torch_bytes") != 0
    _processes(draft, found, absent, run, used_by_torch)
    _retired(draft, found, absent)
    if found.get("mig") is False:
        draft.values["mig_devices"] = []
    elif "mig" not in found:
        draft.values.pop("mig_devices", None)
        draft.absent["mig_devices"] = absent.get("mig", NOT_ASKED)
    values = {name: draft.values[name] for name in VALUES if draft.values.get(name) is not None}
    why = {name: draft.absent.get(name, NOT_ASKED) for name in VALUES if name not in values}
    return DeviceSample(index, **values, absent=why)


def _who_sees_it(draft: _Draft, who: Mapping[str, str], run: Run) -> None:
    visible = run.visible.get(bare(who["uuid"])) if "uuid" in who else None
    draft.add({"visible": visible}, {"visible": run.invisible_reason} if visible is None else {})


def _processes(
    draft: _Draft, found: Mapping[str, Any], absent: Mapping[str, str], run: Run, used_by_torch: bool
) -> None:
    compute, graphics = found.get("compute"), found.get("graphics")
    # A GPU without a display engine has no such list: then there is nobody in it.
    if compute is None or (graphics is None and absent.get("graphics") not in _NO_SUCH_LIST):
        reason = next((absent[name] for name in ("compute", "graphics") if name in absent), NOT_ASKED)
        draft.add({"of_run": True} if used_by_torch else {}, dict.fromkeys(_OF_PROCESSES, reason))
        return
    held: dict[int, int | None] = dict(compute)
    for pid, used in (graphics or {}).items():  # a process in both lists holds it once
        held[pid] = held.get(pid) if used is None else max(used, held.get(pid) or 0)
    draft.add(*of_processes(held, run, used_by_torch))


def _retired(draft: _Draft, found: Mapping[str, Any], absent: Mapping[str, str]) -> None:
    names = ("retired_single", "retired_double")
    if all(name in found for name in names):
        draft.values["retired_pages"] = sum(found[name] for name in names)
    else:
        reason = next((absent[name] for name in names if name in absent), NOT_ASKED)
        draft.absent["retired_pages"] = reason
