"""Panel 1: what each GPU does; without one, what the host does and why there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpmon.model.memory import Held, held
from dpmon.model.ranks import training
from dpmon.model.state import DeviceTrack
from dpmon.ui.chart import bar, spark
from dpmon.ui.format import UNKNOWN, memory, memory_of
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, cut, right, span_width, width_of, wrapped
from dpmon.ui.scene import Scene
from dpmon.ui.text import clean

__all__ = ["devices", "title", "wanted_rows"]

_SHORT = {
    "util_pct": "utilisation",
    "mem_used_bytes": "memory",
    "mem_total_bytes": "memory",
    "mem_run_bytes": "this run's memory",
    "of_run": "this run's share",
    "temperature_c": "temperature",
    "power_w": "power",
    "power_limit_w": "power limit",
    "sm_clock_mhz": "clock",
    "cpu_pct": "cpu",
    "run_cpu_pct": "this run's cpu",
    "run_mem_bytes": "this run's memory",
}


def number(data: Mapping[str, Any], key: str) -> float | None:
    """A figure of a sample, None when it is absent (or no figure)."""
    value = data.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def wanted_rows(scene: Scene) -> int:
    """Rows that the panel would like to have for its content."""
    count = len(scene.state.devices)
    rows = 2 * count + 1 if 0 < count <= 4 else count + 1 if count else 4
    more = len(_held(scene))
    return rows + min(more, 8) + 1 if more else rows


def title(scene: Scene, look: Look) -> tuple[Row, Row]:
    """The panel's title, and the one number that counts."""
    tracks = list(scene.state.devices.values())
    if tracks:
        utils = [number(track.data, "util_pct") for track in tracks]
        shown = " ".join(UNKNOWN if u is None else f"{u:.0f}" for u in utils[:16])
        return [("1 Devices", "title")], [(f"util {shown} %", "")]
    cpu = number(scene.state.host.data, "cpu_pct")
    return [("1 Devices", "title"), (f" {look.glyphs.middot} host", "")], [
        ("cpu ", "dim"),
        (UNKNOWN if cpu is None else f"{cpu:.0f} %", ""),
    ]


def devices(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The panel's rows, inside its frame."""
    drawn = _devices(scene, width, height, look)
    held_rows = _holds(scene, width)
    # What is measured comes first; what its memory holds has the rows that are left, its reason before all others.
    return drawn[: max(height - len(held_rows), 3)] + held_rows if held_rows else drawn


def _held(scene: Scene) -> list[Held]:
    return held(process.memory for process in training(scene.state) if process.memory)


def _holds(scene: Scene, width: int) -> list[Row]:
    """A row for each device whose memory torch told of: what models, gradients and optimizers take of it."""
    rows: list[Row] = []
    found = _held(scene)
    for one in found:
        parts = [("model", one.model), ("grads", one.gradients), ("optim", one.optimizer)]
        parts += [("rest", one.rest), ("peak", one.peak)]
        row: Row = [(clean(one.device, 10).ljust(8) + " ", "dim")]
        if width_of(row) + sum(len(word) + 11 for word, _ in parts) > width:
            parts = [part for part in parts if part[1] is not None]  # why they are not known is said below
        for word, count in parts:
            gap = "  " if len(row) > 1 else ""
            if width_of(row) + len(gap) + len(word) + 9 <= width:
                row += [(gap + word, "dim"), (right(memory(count), 9), "")]
        rows.append(row)
    reasons = dict.fromkeys(why for one in found for why in one.absent.values())
    if reasons:
        rows.append([(cut(clean("; ".join(reasons), 300), width), "dim")])
    return rows


def _devices(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    tracks = sorted(scene.state.devices.items())
    if not tracks:
        return _host(scene, width, height, look)
    rows: list[Row] = []
    full = 2 * len(tracks) <= height
    name_room = min(max(span_width(_name(track.data)) for _, track in tracks), 20 if width >= 70 else 12)
    for index, track in tracks:
        rows.append(_gpu(index, track, width, name_room, look, more=not full))
        if full:
            rows.append(_gpu_more(track, width))
    reasons = _reasons([track.data for _, track in tracks])
    return rows + _said(reasons, width, height - len(rows), look)


def _gpu(index: int, track: DeviceTrack, width: int, name_room: int, look: Look, more: bool) -> Row:
    data = track.data
    util, used, total = (number(data, key) for key in ("util_pct", "mem_used_bytes", "mem_total_bytes"))
    name = cut(_name(data), name_room, look.glyphs.more)
    style = "dim" if data.get("of_run") is False else "bold"
    share = used / total if used is not None and total else None
    figures = _figures(data) if more and width >= 76 + name_room else []
    spare = max(width - 3 - name_room - 1 - 6 - 2 - 19 - width_of(figures), 8)
    graph = min(spare * 3 // 5, 60)
    return [
        (right(str(index), 2) + " ", "bold"),
        (name + " " * (name_room + 1 - span_width(name)), style),
        (spark(track.util, graph, look.glyphs), "bar"),
        (right(UNKNOWN if util is None else f"{util:.0f} %", 6), "bold"),
        ("  ", ""),
        *bar(share, min(spare - graph, 24), look.glyphs),
        (right(memory_of(used, total), 19), ""),
        *figures,
    ]


def _name(data: Mapping[str, Any]) -> str:
    return clean(data.get("name") or "GPU", 60).removeprefix("NVIDIA ")


def _figures(data: Mapping[str, Any]) -> Row:
    power, limit, heat, megahertz = (
        number(data, key) for key in ("power_w", "power_limit_w", "temperature_c", "sm_clock_mhz")
    )
    watts = UNKNOWN if power is None else f"{power:.0f}"
    of = "" if limit is None else f" / {limit:.0f}"
    return [
        (right(f"{watts}{of} W", 12), ""),
        (right(UNKNOWN if heat is None else f"{heat:.0f} °C", 8), ""),
        (right(UNKNOWN if megahertz is None else f"{megahertz:.0f} MHz", 11), ""),
    ]


def _gpu_more(track: DeviceTrack, width: int) -> Row:
    mine = number(track.data, "mem_run_bytes")
    row: Row = [("  ", ""), *_figures(track.data)]
    return [*row, ("  this run", "dim"), (right(memory(mine), 9), "")] if width >= 54 else row


def _host(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    data = scene.state.host.data
    if not data:
        return [[("no sample yet", "dim")]]
    cpu, used, total = (number(data, key) for key in ("cpu_pct", "mem_used_bytes", "mem_total_bytes"))
    mine, held = number(data, "run_cpu_pct"), number(data, "run_mem_bytes")
    room = max(width - 24, 6)
    graph = min(room, 60)
    share = used / total if used is not None and total else None
    rows: list[Row] = [
        [
            ("host cpu ", "dim"),
            (spark(scene.state.host.util, graph, look.glyphs), "bar"),
            (right(UNKNOWN if cpu is None else f"{cpu:.0f} %", 7), "bold"),
        ],
        [
            ("host mem ", "dim"),
            *bar(share, max(min(graph - 12, 40), 4), look.glyphs),
            (right(memory_of(used, total), 22), ""),
        ],
        [
            ("this run ", "dim"),
            (right(UNKNOWN if mine is None else f"{mine:.0f} % of a core", 16), ""),
            (right(memory(held), 12), ""),
            (" resident", "dim"),
        ],
    ]
    reason = data.get("gpu_absent")
    if isinstance(reason, str):
        text = reason if reason.lower().startswith("no gpu") else f"no GPU: {reason}"
        rows = rows[: max(height - 1, 1)]
        rows += _said(clean(text, 300), width, max(height - len(rows), 1), look)
    rows += _said(_reasons([data]), width, height - len(rows), look)
    return rows


def _said(text: str, width: int, room: int, look: Look) -> list[Row]:
    """A reason in at most `room` rows; the last one is cut with a sign when there is more."""
    lines = wrapped(text, width) if text and room > 0 else []
    if len(lines) > room:
        lines = [*lines[: room - 1], cut(" ".join(lines[room - 1 :]), width, look.glyphs.more)]
    return [[(line, "dim")] for line in lines]


def _reasons(samples: list[Mapping[str, Any]]) -> str:
    """Why values are missing, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for data in samples:
        absent = data.get("absent")
        if isinstance(absent, dict):
            for key, reason in list(absent.items())[:50]:
                what = by_reason.setdefault(clean(reason, 200), [])
                name = _SHORT.get(key, clean(key, 40))
                if name not in what:
                    what.append(name)
    return "; ".join(f"{', '.join(what)}: {reason}" for reason, what in by_reason.items())
