"""Composes the `device` record of a GPU from NVML's answers and from what torch reports in the run. Pure.

It also finds which GPUs CUDA_VISIBLE_DEVICES lets CUDA see, as far as another process can know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from dpmon.record.record_specs import RECORDS

VALUES = tuple(each.name for each in RECORDS["device"].fields if each.name not in ("t_s", "index", "absent"))
"""The fields of a GPU that may be unknown."""
_WITHOUT_NVML = ("uuid", "name", "visible", "ordinals", "mem_torch_bytes")
"""The fields of a lost GPU that stay known."""
MAX_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class MissingValue:
    """Takes the place of a missing value, and gives the reason."""

    reason: str


NOT_ASKED = MissingValue("not asked yet")
_NO_PIDS = MissingValue("inside a container the driver's process ids cannot be matched to ours")
_NOT_BY_PROCESS = MissingValue("the driver does not report memory by process")
_NO_REPORT = MissingValue("no running training process has reported the GPUs that torch uses")
_NO_UUID = MissingValue("NVML does not report the GPU's UUID")
_NO_RESERVED = MissingValue("torch does not report its reserved memory")
_NOT_VISIBLE = MissingValue("CUDA_VISIBLE_DEVICES does not say whether CUDA sees it")
_OF_PROCESSES = ("of_run", "mem_run_bytes", "mem_others_bytes", "processes", "process_count")
_NO_SUCH_LIST = ("not supported", "this driver does not offer it")


@dataclass(frozen=True, slots=True)
class TorchReservation:
    """One GPU as one process of the run reports it: torch's name for it, and the reserved bytes."""

    process: int
    device: str
    uuid: str
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunContext:
    """The facts about the run that a sample of a GPU needs."""

    pids: Set[int] = frozenset()
    same_pids: bool = True
    """Whether the driver's process ids are from the same namespace as ours."""
    uses: tuple[TorchReservation, ...] = ()
    visible: bool | None = None
    """Whether CUDA sees the GPU."""


def split_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with None for each `MissingValue`, and its reason in `absent`."""
    absent = {name: value.reason for name, value in values.items() if isinstance(value, MissingValue)}
    return {**values, **dict.fromkeys(absent), "absent": absent}


def build_device_record(
    index: int, answers: Mapping[str, Any], run: RunContext, uuids: Set[str], lost: str = ""
) -> dict[str, Any]:
    """Return the fields of the `device` record, but for `t_s`.

    `answers`: NVML's values by field, or `MissingValue`. `uuids`: bare UUIDs of the GPU and its instances. `lost`: why
    the GPU does not answer at all.
    """
    torch = _torch_fields(run, uuids)
    used = isinstance(torch["ordinals"], list) and bool(torch["ordinals"]) and torch["mem_torch_bytes"] != 0
    known = {
        **answers,
        "visible": _NOT_VISIBLE if run.visible is None else run.visible,
        **torch,
        **_processes(answers, run, used),
    }
    values = {name: known.get(name, NOT_ASKED) for name in VALUES}
    if lost:
        values = {name: value if name in _WITHOUT_NVML else MissingValue(lost) for name, value in values.items()}
    return {"index": index, **split_missing(values)}


def _torch_fields(run: RunContext, uuids: Set[str]) -> dict[str, Any]:
    """Return what torch reports about the GPU (or MIG instances) with these bare UUIDs."""
    if not run.uses or not uuids:
        return dict.fromkeys(("ordinals", "mem_torch_bytes"), _NO_UUID if run.uses else _NO_REPORT)
    uses = [use for use in run.uses if bare_uuid(use.uuid) in uuids]
    return {
        "ordinals": [{"process": use.process, "device": use.device} for use in uses],
        "mem_torch_bytes": _sum([use.reserved_bytes for use in uses], _NO_RESERVED),
    }


def _processes(answers: Mapping[str, Any], run: RunContext, used_by_torch: bool) -> dict[str, Any]:
    """Return the shares of the run's processes and of others, from the driver's lists of processes.

    In a container the driver's ids are the machine's, or hidden: an id equal to one of ours may belong to another
    process, and an empty list does not mean that no process uses the GPU. Then only torch's report counts.
    """
    compute, graphics = answers.get("compute", NOT_ASKED), answers.get("graphics", NOT_ASKED)
    if isinstance(graphics, MissingValue) and graphics.reason in _NO_SUCH_LIST:  # a GPU without a display engine
        graphics = {}
    for each in (compute, graphics):
        if isinstance(each, MissingValue):
            return {**dict.fromkeys(_OF_PROCESSES, each), **({"of_run": True} if used_by_torch else {})}
    held: dict[int, int | None] = dict(compute)
    for pid, used in graphics.items():  # a process in both lists holds it once
        held[pid] = held.get(pid) if used is None else max(used, held.get(pid) or 0)
    if run.same_pids:
        ours = [used for pid, used in held.items() if pid in run.pids]
        others = [used for pid, used in held.items() if pid not in run.pids]
        return {
            "of_run": bool(ours) or used_by_torch,
            "mem_run_bytes": _sum(ours, _NOT_BY_PROCESS),
            "mem_others_bytes": _sum(others, _NOT_BY_PROCESS),
            "processes": _process_entries(held, run.pids, False),
            "process_count": len(held),
        }
    known: dict[str, Any] = (
        {"processes": _process_entries(held, frozenset(), None), "process_count": len(held)} if held else {}
    )
    return {**dict.fromkeys(_OF_PROCESSES, _NO_PIDS), **known, **({"of_run": True} if used_by_torch else {})}


def _sum(parts: list[int | None], unknown: MissingValue) -> int | MissingValue:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else unknown


def _process_entries(held: Mapping[int, int | None], pids: Set[int], otherwise: bool | None) -> list[dict[str, Any]]:
    rows = [{"pid": pid, "mem_bytes": used, "of_run": pid in pids or otherwise} for pid, used in held.items()]
    rows.sort(key=lambda row: (row["of_run"] is not True, -(row["mem_bytes"] or 0), row["pid"] or 0))
    return rows[:MAX_PROCESSES]


# ------------------------------------------------------------------------------------------------ visible GPUs

# The rules are those of the CUDA programming guide (Environment Variables). Entries are indices, or UUIDs that may be
# shortened. Entries after the first invalid one are ignored. A repeated entry hides all GPUs. Indices follow CUDA's
# order, which equals NVML's only under CUDA_DEVICE_ORDER=PCI_BUS_ID: by default, the fastest GPUs come first, by an
# undocumented rule. So the GPU of an index may stay unknown here; then the training process reports it by UUID
# (dpmon.gpu.device_record).

_NUMBER = re.compile(r"[+-]?[0-9]+")
MAX_ENTRIES = 1024


def bare_uuid(uuid: str) -> str:
    """Return a UUID without its prefix: NVML writes GPU-8932f937-..., torch writes 8932f937-...."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def visible_gpus(
    text: str | None, order: str | None, uuids: Sequence[str | None], divided: bool = False
) -> list[bool | None]:
    """Return for each GPU in NVML's order whether CUDA sees it; None if unknown.

    `text`, `order`: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None if not set. `uuids`: of the GPUs; None if unknown.
    `divided`: whether a GPU has MIG instances. CUDA then sees one instance, and an index does not show which one.
    """
    found: list[int] | None
    if text is not None and text.startswith(("GPU-", "MIG-")):
        found = None if text.startswith("MIG-") else _match_uuids(text, uuids)
    else:
        found = list(range(len(uuids))) if text is None else _numbers(text, len(uuids))
        if found and (divided or (order != "PCI_BUS_ID" and len(found) < len(uuids))):
            found = None
    return [None if found is None else index in found for index in range(len(uuids))]


def _numbers(text: str, count: int) -> list[int]:
    """Parse indices as C's strtol does (`1abc` is 1), up to the first invalid one; empty if an index is repeated."""
    found: list[int] = []
    for entry in text.split(",")[:MAX_ENTRIES]:
        match = _NUMBER.match(entry.strip())
        number = int(match.group()) if match and len(match.group()) < 10 else -1
        if number in found:
            return []
        if number < 0:
            break
        found.append(number)
    beyond = next((i for i, number in enumerate(found) if number >= count), len(found))
    return found[:beyond]


def _match_uuids(text: str, uuids: Sequence[str | None]) -> list[int] | None:
    """Find the GPUs of full or shortened UUIDs; None if a UUID is unknown."""
    entries: list[str] = []
    for entry in text.split(",")[:MAX_ENTRIES]:
        if entry in entries:
            return []
        if not entry.startswith("GPU-"):
            break
        entries.append(entry)
    if None in uuids:
        return None
    found: list[int] = []
    for entry in entries:
        fitting = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
        if len(fitting) != 1:  # no GPU, or several
            break
        if fitting[0] in found:
            return []
        found.append(fitting[0])
    return found
