"""The memory of each device by use, over all training processes, from their newest records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

HOST = "host"
"""The key in a mode's peaks for the sampled memory of all processes of the run."""
MAX_DEVICES = 256
TRIFLE_BYTES = 1 << 20
"""If GPUs have rows, the host gets a row only with at least this many bytes."""


class Peak(NamedTuple):
    """The peak memory of a mode; only an upper bound if not `exact`: it may come from another mode."""

    bytes: int
    exact: bool


class Held(NamedTuple):
    """One device's memory in bytes, summed over its processes; None if it is unknown for one of them."""

    device: str
    model: int | None
    gradients: int | None
    optimizer: int | None
    rest: int | None
    peak: int | None
    """Peak of torch's allocations; None for several processes: their peaks may come at different times."""
    absent: Mapping[str, str]


def held(records: Iterable[Mapping[str, Any]]) -> list[Held]:
    """One row per device, by name, from the newest `memory` record of each process."""
    rows: dict[str, Held] = {}
    for record in records:
        devices = record.get("devices")
        for one in devices[:MAX_DEVICES] if isinstance(devices, list) else ():
            if not isinstance(one, Mapping) or not isinstance(one.get("device"), str):
                continue
            new = _row(one)
            before = rows.get(new.device)
            if before is None and len(rows) < MAX_DEVICES:
                rows[new.device] = new
            elif before is not None:
                rows[new.device] = _both(before, new)
    return [rows[device] for device in sorted(rows) if len(rows) == 1 or not _is_trifle(rows[device])]


def reasons(row: Held) -> list[tuple[str, str]]:
    """Why parts of a row are unknown: their names ("rest and peak") and the reason, in the row's order."""
    found: dict[str, list[str]] = {}
    for name in Held._fields[1:6]:
        if getattr(row, name) is None and (reason := row.absent.get(f"{name}_bytes")):
            found.setdefault(reason, []).append(name)
    return [(" and ".join(names), reason) for reason, names in found.items()]


def _is_trifle(row: Held) -> bool:
    """Whether the row has only the few bytes that optimizers keep on the host (Adam's step counters)."""
    return row.device.partition(":")[0] == "cpu" and sum(part or 0 for part in row[1:5]) < TRIFLE_BYTES


def _row(one: Mapping[str, Any]) -> Held:
    model, gradients, optimizer, rest, peak = (
        _bytes(one.get(f"{key}_bytes")) for key in ("model", "gradients", "optimizer", "rest", "peak")
    )
    absent = one.get("absent")
    reasons = {str(k): str(v) for k, v in absent.items()} if isinstance(absent, Mapping) else {}
    return Held(one["device"], model, gradients, optimizer, rest, peak, reasons)


def _both(one: Held, other: Held) -> Held:
    model, gradients, optimizer, rest = (
        a + b if a is not None and b is not None else None for a, b in zip(one[1:5], other[1:5], strict=True)
    )
    reasons = {**one.absent, **other.absent}
    reasons.setdefault("peak_bytes", "several processes use it: their peaks may come at different times")
    return Held(one.device, model, gradients, optimizer, rest, None, reasons)


def _bytes(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
