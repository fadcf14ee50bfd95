"""What a report takes from events, whose members may be of any type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpmon.model.evidence import LoaderStart
from dpmon.model.members import number_in, time_of, whole_in
from dpmon.report.story import ModeChange, ProcessFacts

__all__ = ["loader_start", "mode_change", "process_facts"]


def _whole(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if type(value) is int else None


def _text(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    return value if isinstance(value, str) else None


def process_facts(data: Mapping[str, Any]) -> ProcessFacts:
    """What a `process` record says; its number must be one."""
    rank, world, pid = (_whole(data, key) for key in ("rank", "world", "pid"))
    return ProcessFacts(data["process"], rank, world, pid, _text(data, "python"), _text(data, "torch"))


def mode_change(data: Mapping[str, Any]) -> ModeChange:
    """What a `mode` record says; its process must be a number."""
    seconds, devices = data.get("t_s"), data.get("devices")
    at = int(seconds * 1e9) if isinstance(seconds, (int, float)) and abs(seconds) < 1e9 else None
    return ModeChange(
        data["process"],
        _text(data, "root"),
        at,
        _whole(data, "step"),
        _text(data, "mode"),
        _text(data, "requested_by"),
        tuple(map(str, devices[:4096])) if isinstance(devices, list) else (),
        data.get("virtual") is True,
        _text(data, "reason"),
        _text(data, "refused"),
    )


def loader_start(data: Mapping[str, Any]) -> LoaderStart | None:
    """What a `loader` record says; None if it does not say of which process, when and how long."""
    process, at, took = whole_in(data, "process"), time_of(data), number_in(data, "iter_s")
    if process is None or at is None or took is None or not 0 <= took < 1e9:
        return None
    return LoaderStart(process, at, int(took * 1e9), whole_in(data, "workers"), data.get("persistent") is True)
