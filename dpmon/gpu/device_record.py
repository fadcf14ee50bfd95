"""Builds the `device` record of a GPU from NVML's answers and from torch's reports in the run. Pure.

It also finds which GPUs CUDA_VISIBLE_DEVICES lets CUDA see, as far as another process can know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from dpmon.record.record_specs import RECORDS

OPTIONAL_FIELDS = tuple(
    field.name for field in RECORDS["device"].fields if field.name not in ("t_s", "index", "absent")
)
"""The fields of the record that may be unknown."""
_WITHOUT_NVML = ("uuid", "name", "visible", "ordinals", "mem_torch_bytes")
"""The fields that stay known when the GPU is lost."""
MAX_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class MissingValue:
    """The place of a missing value, with the reason why it is missing."""

    reason: str


NOT_QUERIED = MissingValue("not asked yet")
_NO_PIDS = MissingValue("inside a container the driver's process ids cannot be matched to ours")
_NOT_BY_PROCESS = MissingValue("the driver does not report memory by process")
_NO_REPORT = MissingValue("no running training process has reported the GPUs that torch uses")
_NO_UUID = MissingValue("NVML does not report the GPU's UUID")
_NO_RESERVED = MissingValue("torch does not report its reserved memory")
_NOT_VISIBLE = MissingValue("CUDA_VISIBLE_DEVICES does not say whether CUDA sees it")
_PROCESS_FIELDS = ("of_run", "mem_run_bytes", "mem_others_bytes", "processes", "process_count")
_UNSUPPORTED_REASONS = ("not supported", "this driver does not offer it")


@dataclass(frozen=True, slots=True)
class TorchReservation:
    """A GPU as one process of the run reports it: torch's name for it, and the bytes that torch has reserved."""

    process: int
    device: str
    uuid: str
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunContext:
    """The state of the run that a sample of a GPU needs."""

    pids: Set[int] = frozenset()
    same_pids: bool = True
    """Whether the driver's process ids are from the same namespace as ours."""
    reservations: tuple[TorchReservation, ...] = ()
    visible: bool | None = None
    """Whether CUDA sees the GPU; None: unknown."""


def split_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with None in place of each `MissingValue`, and the reasons under `absent`."""
    absent = {name: value.reason for name, value in values.items() if isinstance(value, MissingValue)}
    return {**values, **dict.fromkeys(absent), "absent": absent}


def build_device_record(
    index: int, answers: Mapping[str, Any], run_context: RunContext, uuids: Set[str], lost: str = ""
) -> dict[str, Any]:
    """Return the fields of the `device` record except `t_s`.

    `answers`: for each field, NVML's value or a `MissingValue`. `uuids`: bare UUIDs of the GPU and its instances.
    `lost`: why the GPU does not answer at all; empty if it does.
    """
    torch_fields = _torch_fields(run_context, uuids)
    ordinals = torch_fields["ordinals"]
    used_by_torch = isinstance(ordinals, list) and bool(ordinals) and torch_fields["mem_torch_bytes"] != 0
    fields = {
        **answers,
        "visible": _NOT_VISIBLE if run_context.visible is None else run_context.visible,
        **torch_fields,
        **_processes(answers, run_context, used_by_torch),
    }
    values = {name: fields.get(name, NOT_QUERIED) for name in OPTIONAL_FIELDS}
    if lost:
        values = {name: value if name in _WITHOUT_NVML else MissingValue(lost) for name, value in values.items()}
    return {"index": index, **split_missing(values)}


def _torch_fields(run_context: RunContext, uuids: Set[str]) -> dict[str, Any]:
    """Return the fields that torch reports about the GPU (or MIG instances) with these bare UUIDs."""
    if not run_context.reservations or not uuids:
        return dict.fromkeys(("ordinals", "mem_torch_bytes"), _NO_UUID if run_context.reservations else _NO_REPORT)
    reservations = [reservation for reservation in run_context.reservations if bare_uuid(reservation.uuid) in uuids]
    return {
        "ordinals": [{"process": reservation.process, "device": reservation.device} for reservation in reservations],
        "mem_torch_bytes": _sum([reservation.reserved_bytes for reservation in reservations], _NO_RESERVED),
    }


def _processes(answers: Mapping[str, Any], run_context: RunContext, used_by_torch: bool) -> dict[str, Any]:
    """Return the fields about the run's processes and others, from the driver's lists of processes.

    In a container, the driver's ids are those of the machine, or hidden: an id equal to one of ours may belong to
    another process, and an empty list does not mean that no process uses the GPU. Then only torch's report counts.
    """
    compute, graphics = answers.get("compute", NOT_QUERIED), answers.get("graphics", NOT_QUERIED)
    if isinstance(graphics, MissingValue) and graphics.reason in _UNSUPPORTED_REASONS:  # a GPU without a display engine
        graphics = {}
    of_run = {"of_run": True} if used_by_torch else {}
    for process_list in (compute, graphics):
        if isinstance(process_list, MissingValue):
            return {**dict.fromkeys(_PROCESS_FIELDS, process_list), **of_run}
    bytes_by_pid: dict[int, int | None] = dict(compute)
    for pid, used_bytes in graphics.items():  # a process in both lists holds it once
        bytes_by_pid[pid] = bytes_by_pid.get(pid) if used_bytes is None else max(used_bytes, bytes_by_pid.get(pid) or 0)
    pids, same_pids = run_context.pids, run_context.same_pids
    entries = [
        {"pid": pid, "mem_bytes": used_bytes, "of_run": pid in pids if same_pids else None}
        for pid, used_bytes in bytes_by_pid.items()
    ]
    entries.sort(key=lambda entry: (entry["of_run"] is not True, -(entry["mem_bytes"] or 0), entry["pid"]))
    known_fields = {"processes": entries[:MAX_PROCESSES], "process_count": len(entries)}
    if not same_pids:
        return {**dict.fromkeys(_PROCESS_FIELDS, _NO_PIDS), **(known_fields if entries else {}), **of_run}
    run_bytes = [used_bytes for pid, used_bytes in bytes_by_pid.items() if pid in pids]
    other_bytes = [used_bytes for pid, used_bytes in bytes_by_pid.items() if pid not in pids]
    return {
        "of_run": bool(run_bytes) or used_by_torch,
        "mem_run_bytes": _sum(run_bytes, _NOT_BY_PROCESS),
        "mem_others_bytes": _sum(other_bytes, _NOT_BY_PROCESS),
        **known_fields,
    }


def _sum(values: list[int | None], unknown: MissingValue) -> int | MissingValue:
    known_values = [value for value in values if value is not None]
    return sum(known_values) if len(known_values) == len(values) else unknown


# ------------------------------------------------------------------------------------------------ visible GPUs

# The rules are those of the CUDA programming guide (Environment Variables). Entries are indices, or UUIDs that may be
# shortened. Entries after the first invalid one are ignored. A repeated entry hides all GPUs. Indices follow CUDA's
# order, which equals NVML's only under CUDA_DEVICE_ORDER=PCI_BUS_ID: by default, the fastest GPUs come first, by an
# undocumented rule. So the GPU of an index may stay unknown here; then the training process reports it by UUID.

_INDEX_PATTERN = re.compile(r"[+-]?[0-9]{1,9}(?![0-9])")
MAX_ENTRIES = 1024


def bare_uuid(uuid: str) -> str:
    """Return a UUID without its prefix: NVML writes GPU-8932f937-..., torch writes 8932f937-...."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def visible_gpus(
    text: str | None, order: str | None, uuids: Sequence[str | None], has_mig_instances: bool = False
) -> list[bool | None]:
    """Return for each GPU in NVML's order whether CUDA sees it; None if unknown.

    `text`, `order`: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None if not set. `uuids`: those of the GPUs; None if
    unknown. `has_mig_instances`: whether a GPU has MIG instances. CUDA then sees only one instance, and an index does
    not show which one.
    """
    entries = [str(index) for index in range(len(uuids))] if text is None else text.split(",")[:MAX_ENTRIES]
    first_entry, *_ = entries or [""]
    by_uuid = first_entry.startswith("GPU-")
    unknown: list[bool | None] = [None] * len(uuids)
    if first_entry.startswith("MIG-") or (by_uuid and None in uuids):
        return unknown
    indices = _parse_entries(entries, uuids, by_uuid=by_uuid)
    is_order_unknown = order != "PCI_BUS_ID" and len(indices) < len(uuids)
    if indices and not by_uuid and (has_mig_instances or is_order_unknown):
        return unknown
    return [index in indices for index in range(len(uuids))]


def _parse_entries(entries: Sequence[str], uuids: Sequence[str | None], *, by_uuid: bool) -> list[int]:
    """Return the indices of the GPUs that the entries name, up to the first invalid one; empty if one is repeated."""
    names: list[str | int] = []
    for entry in entries:
        name = _parse_entry(entry, by_uuid=by_uuid)
        if name in names:
            return []
        if name is None:
            break
        names.append(name)
    indices: list[int] = []
    for name in names:
        matches = [index for index, uuid in enumerate(uuids) if index == name or str(uuid).startswith(str(name))]
        if len(matches) != 1:  # no GPU, or several
            break
        if matches[0] in indices:
            return []
        indices += matches
    return indices


def _parse_entry(entry: str, *, by_uuid: bool) -> str | int | None:
    """Return the UUID or the index in an entry, which is parsed like strtol (`1abc` is 1); None if it is invalid."""
    if by_uuid:
        return entry if entry.startswith("GPU-") else None
    match = _INDEX_PATTERN.match(entry.strip())
    return int(match.group()) if match and not match.group().startswith("-") else None
