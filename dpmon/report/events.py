"""What a report takes from events, whose members may be of any type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpmon.report.story import ModeChange, ProcessFacts

__all__ = ["mode_change", "process_facts"]


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
