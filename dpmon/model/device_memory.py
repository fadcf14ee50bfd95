"""The memory of each device by use, over all training processes, from their newest records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dpmon.model.run_process import Process

TRIFLE_BYTES = 1 << 20
"""If GPUs have rows, the host gets a row only with at least this many bytes."""


class DeviceMemory(NamedTuple):
    """One device's memory in bytes, summed over the processes that know it; None if none of them does."""

    device: str
    model: int | None
    gradients: int | None
    optimizer: int | None
    rest: int | None
    peak: int | None
    """Peak of torch's allocations; None for several processes: their peaks may come at different times."""
    absent: Mapping[str, str]
    processes: int = 1
    """Number of processes, with those that are not measured yet."""
    known: Sequence[int] = ()
    """How many of the processes know the model, the gradients, the optimizer states and the rest."""

    @property
    def label(self) -> str:
        """The device; if several processes use it, with their number: "cpu of 2 processes"."""
        return f"{self.device} of {self.processes} processes" if self.processes > 1 else self.device


def memory_of_processes(processes: Iterable[Process], focus: Process | None) -> list[DeviceMemory]:
    """Return one row per device, of the processes that ran at the same time as the one in focus."""
    together = [
        process
        for process in processes
        if focus is None or (process.began_ns <= focus.seen_ns and focus.began_ns <= process.seen_ns)
    ]
    records = [process.memory for process in together if process.memory]
    return memory_by_device(records, len(together) - len(records))


def memory_by_device(records: Iterable[Mapping[str, Any]], unmeasured: int = 0) -> list[DeviceMemory]:
    """Return one row per device, by name, from the newest `memory` record of each process that has one."""
    rows: dict[str, DeviceMemory] = {}
    for record in records:
        for entry in record["devices"]:
            new = _parse_device(entry)
            previous = rows.get(new.device)
            rows[new.device] = new if previous is None else _merge(previous, new)
    return [
        rows[device]._replace(processes=rows[device].processes + unmeasured)
        for device in sorted(rows)
        if len(rows) == 1 or not _is_negligible(rows[device])
    ]


def missing_value_reasons(row: DeviceMemory) -> list[tuple[str, str]]:
    """Return why parts of a row are unknown: their names ("rest and peak") and the reason, in the row's order."""
    names_by_reason: dict[str, list[str]] = {}
    for name in DeviceMemory._fields[1:6]:
        if getattr(row, name) is None and (reason := row.absent.get(f"{name}_bytes")):
            names_by_reason.setdefault(reason, []).append(name)
    for name, known in zip(DeviceMemory._fields[1:5], row.known, strict=False):
        if 0 < known < row.processes:
            reason_text = row.absent.get(f"{name}_bytes")
            others = f"{known} of {row.processes} processes" + (f" (others: {reason_text})" if reason_text else "")
            names_by_reason.setdefault(others, []).append(name)
    return [(" and ".join(names), reason) for reason, names in names_by_reason.items()]


def _is_negligible(row: DeviceMemory) -> bool:
    """Return whether the row has only the few bytes that optimizers keep on the host (Adam's step counters)."""
    return row.device.partition(":")[0] == "cpu" and sum(part or 0 for part in row[1:5]) < TRIFLE_BYTES


def _parse_device(device: Mapping[str, Any]) -> DeviceMemory:
    parts = [device.get(f"{name}_bytes") for name in DeviceMemory._fields[1:6]]
    known = [int(part is not None) for part in parts[:4]]
    return DeviceMemory._make((device["device"], *parts, device.get("absent", {}), 1, known))


def _merge(first: DeviceMemory, second: DeviceMemory) -> DeviceMemory:
    parts = (
        None if a is None and b is None else (a or 0) + (b or 0) for a, b in zip(first[1:5], second[1:5], strict=True)
    )
    reasons = {**first.absent, **second.absent}
    reasons.setdefault("peak_bytes", "several processes use it: their peaks may come at different times")
    known = [a + b for a, b in zip(first.known, second.known, strict=True)]
    return DeviceMemory._make((first.device, *parts, None, reasons, first.processes + second.processes, known))
