"""All facts about one GPU, for the zoomed devices panel, with a reason for each missing one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.model.run_snapshot import DeviceHistory
from dpmon.record.safe_json import int_member, number_member
from dpmon.record.schema import SECOND
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, span_width, wrap_text
from dpmon.text.formatting import UNKNOWN, format_bytes, format_bytes_of_total, format_count, short_clock
from dpmon.ui.chart import filled_area
from dpmon.ui.styled_rows import Row, fit_row, row_width
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import TimeAxis, resample

GpuData = Mapping[str, Any]

_NO_XID = "no XID error since the run's start"
"""The sampler's reason when no error occurred. Any other reason means that the value is unknown."""
_UNIT_SUFFIX = re.compile("_(pct|w|c|j)$")
_FIELD_NAMES = {
    "util_pct": "utilization",
    "mem_used_bytes": "memory",
    "mem_total_bytes": "memory",
    "mem_reserved_bytes": "reserved memory",
    "mem_run_bytes": "this run's memory",
    "mem_others_bytes": "others' memory",
    "mem_torch_bytes": "torch's memory",
    "of_run": "this run's share",
    "sm_clock_mhz": "clock",
    "mem_clock_mhz": "memory clock",
    "throttle": "clock throttling",
    "sm_active_pct": "SM activity",
    "tensor_active_pct": "tensor activity",
    "dram_active_pct": "memory activity",
    "run_cpu_pct": "this run's cpu",
    "run_mem_bytes": "this run's memory",
    "process_count": "processes",
    "ordinals": "its number in the run",
    "mig_devices": "MIG instances",
}
"""Fields that reasons call otherwise than by their name without its unit."""


def device_name(data: GpuData) -> str:
    """The GPU's name without "NVIDIA"."""
    return sanitize_line(data.get("name") or "GPU", 60).removeprefix("NVIDIA ")


def may_belong_to_run(data: GpuData) -> bool:
    """Whether the GPU belongs to the run, or may belong to it."""
    return data.get("of_run") is not False and data.get("visible") is not False


def format_rounded(value: float | None, unit: str) -> str:
    """Return a value as a whole number with its unit: "43%", "250 W"; a dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}%" if unit == "%" else f"{value:.0f} {unit}"


def gpu_label(index: int, data: GpuData) -> str:
    """A GPU's number, followed by its name in the run's processes (cuda:N) if that has another number."""
    names = {sanitize_line(one.get("device"), 10) for one in data.get("ordinals") or () if isinstance(one, dict)}
    named = names.pop() if len(names) == 1 else f"cuda:{index}"
    return f"{index:2d}" if named == f"cuda:{index}" else f"{index:2d} {named}"


def missing_value_reasons(samples: Sequence[GpuData], only: Sequence[str] | None = None) -> str:
    """Why values are missing, each reason once; for all values or those in `only`."""
    by_reason: dict[str, dict[str, None]] = {}
    for data in samples:
        for key, reason in (data.get("absent") or {}).items():
            if (only is None or key in only) and (key != "xid" or reason != _NO_XID):
                name = _FIELD_NAMES.get(key, _UNIT_SUFFIX.sub("", sanitize_line(key, 40)).replace("_", " "))
                by_reason.setdefault(sanitize_line(reason, 200), {})[name] = None
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


# ------------------------------------------------------------------------------------------------ one GPU


def chart_rows(
    index: int, track: DeviceHistory, width: int, tall: int, axis: TimeAxis, look: TerminalStyle
) -> list[Row]:
    """The name and number of one GPU, and its histories in `tall` rows."""
    return [_heading(index, track.data, width), *_chart_group_rows(track, width, tall, axis, look)]


def detail_rows(index: int, track: DeviceHistory, width: int, look: TerminalStyle) -> list[Row]:
    """The name and number of one GPU, then every figure."""
    data = track.data
    rows = [_heading(index, data, width), *_topic_rows(data, width), *_process_rows(data, width, look)]
    why = missing_value_reasons([data])
    if why:
        rows += [[("   ", ""), (line, "dim")] for line in wrap_text(why, width - 3, 4, look.glyphs.more)]
    return rows


def _heading(index: int, data: GpuData, width: int) -> Row:
    ours = may_belong_to_run(data)
    head: Row = [
        (f"{gpu_label(index, data)} ", "bold" if ours else "dim"),
        (device_name(data), "bold" if ours else "dim"),
        (f"  {_owner_text(data)}", "" if ours else "dim"),
    ]
    uuid = data.get("uuid")
    if isinstance(uuid, str) and row_width(head) + 2 + span_width(sanitize_line(uuid, 60)) <= width:
        head.append((f"  {sanitize_line(uuid, 60)}", "dim"))
    return head


def _owner_text(data: GpuData) -> str:
    if data.get("visible") is False:
        return "hidden by CUDA_VISIBLE_DEVICES"
    return {True: "used by this run", False: "not used by this run"}.get(data.get("of_run"), "")  # type: ignore[arg-type]


class _Chart(NamedTuple):
    """One figure of a device over time."""

    heading: str
    values: Sequence[float | None]
    max_value: float
    unit: str


_GUTTER_CELLS = 8
"""Cells for a chart's scale."""
_MIN_PLOT_ROWS = 3
"""From this many rows on, a chart has a scale and a time axis."""


def side_by_side_charts(
    charts: Sequence[_Chart], second: int, width: int, height: int, axis: TimeAxis, look: TerminalStyle
) -> list[Row]:
    """Charts side by side in `height` rows: each has its newest value above it, a scale and a time axis."""
    each = width // len(charts)
    graph = each - _GUTTER_CELLS - 1
    if graph < _GUTTER_CELLS or height < _MIN_PLOT_ROWS + 2:
        return []
    rows: list[Row] = [[] for _ in range(height)]
    for head, values, top, unit in charts:
        dots = graph * (2 if look.glyphs.braille else 1)
        drawn = filled_area(resample(values, second, axis, dots), graph, height - 2, top or 1.0, look.glyphs)
        scales = [format_rounded(top, unit), *[""] * (height - 4), "0"]
        begin, now = (short_clock(at * SECOND) for at in (axis.start_s, axis.now_s))
        ends = f"now {now}" if len(begin) + len(now) + 6 <= graph else now
        rows[0] += fit_row([(" " * _GUTTER_CELLS, ""), (head, "bold")], each, look.glyphs.more)
        for row, scale, line in zip(rows[1:-1], scales, drawn, strict=True):
            row += fit_row([(align_right(scale, _GUTTER_CELLS - 1) + " ", "dim"), (line, "bar")], each)
        rows[-1] += fit_row([(" " * _GUTTER_CELLS, ""), (begin + ends.rjust(graph - len(begin)), "dim")], each)
    return rows


def _chart_group_rows(track: DeviceHistory, width: int, tall: int, axis: TimeAxis, look: TerminalStyle) -> list[Row]:
    """Use, memory and power side by side, each with its newest value; in few rows without scale and axis."""
    data = track.data
    limit = number_member(data, "power_limit_w")
    top_power = limit or max((p for p in track.power if p is not None), default=0.0)
    charts = [
        _Chart("util", track.util, 100.0, "%"),
        _Chart("mem", track.mem, 100.0, "%"),
        _Chart("power", track.power, top_power, "W"),
    ]
    newest = (
        format_rounded(number_member(data, "util_pct"), "%"),
        format_rounded(track.mem_pct, "%"),
        format_rounded(number_member(data, "power_w"), "W"),
    )
    if tall >= _MIN_PLOT_ROWS + 2:
        named = [one._replace(heading=f"{one.heading} {figure}") for one, figure in zip(charts, newest, strict=True)]
        return side_by_side_charts(named, track.second, width, tall, axis, look)
    each = (width - 3) // len(charts)
    graph = each - 8
    if graph < 8:
        return []
    rows: list[Row] = [[("   ", "")] for _ in range(tall)]
    for (word, values, top, _), figure in zip(charts, newest, strict=True):
        dots = graph * (2 if look.glyphs.braille else 1)
        drawn = filled_area(resample(values, track.second, axis, dots), graph, tall, top or 1.0, look.glyphs)
        heads = [word, figure] if tall > 1 else [figure]
        for row, head, line in zip(rows, [*heads, *[""] * tall], drawn, strict=False):
            row += [(align_right(head, 6) + " ", "dim"), (line, "bar"), (" ", "")]
    return rows


def host_charts(track: DeviceHistory, width: int, height: int, axis: TimeAxis, look: TerminalStyle) -> list[Row]:
    """The host's processor and memory over time."""
    heads = (
        f"cpu {format_rounded(number_member(track.data, 'cpu_pct'), '%')}",
        f"memory {format_rounded(track.mem_pct, '%')}",
    )
    charts = [_Chart(heads[0], track.util, 100.0, "%"), _Chart(heads[1], track.mem, 100.0, "%")]
    return side_by_side_charts(charts, track.second, width, height, axis, look)


_TOPICS = {
    "activity": (("SM", "sm_active_pct", "%"), ("tensor", "tensor_active_pct", "%"), ("dram", "dram_active_pct", "%")),
    "memory": (
        ("", "mem_used_bytes", "of all"),
        ("this run", "mem_run_bytes", "bytes"),
        ("others", "mem_others_bytes", "bytes"),
        ("torch", "mem_torch_bytes", "bytes"),
        ("driver", "mem_reserved_bytes", "bytes"),
    ),
    "power": (("", "power_w", "W"), ("limit", "power_limit_w", "W"), ("energy", "energy_j", "kWh")),
    "heat": (("", "temperature_c", "°C"), ("limit", "temperature_limit_c", "°C"), ("fan", "fan_pct", "%")),
    "clocks": (
        ("SM", "sm_clock_mhz", "MHz"),
        ("memory", "mem_clock_mhz", "MHz"),
        ("held down by", "throttle", "words"),
    ),
    "links": (
        ("PCIe in", "pcie_rx_bytes_s", "bytes/s"),
        ("out", "pcie_tx_bytes_s", "bytes/s"),
        ("NVLink in", "nvlink_rx_bytes_s", "bytes/s"),
        ("out", "nvlink_tx_bytes_s", "bytes/s"),
    ),
    "errors": (
        ("ECC corrected", "ecc_corrected", "count"),
        ("uncorrected", "ecc_uncorrected", "errors"),
        ("retired pages", "retired_pages", "errors"),
        ("remapped rows", "remapped_rows", "errors"),
        ("newest XID", "xid", "errors"),
    ),
    "modes": (("MIG", "mig", "on"), ("persistence", "persistence", "on")),
}
"""Every figure by topic, in a fixed order: its label, its field and its unit or form."""


def _format_value(data: GpuData, key: str, form: str) -> tuple[str, str]:
    """A figure as text, and its style."""
    raw, value = data.get(key), number_member(data, key)
    if form == "words":
        words = ", ".join(sanitize_line(word, 30) for word in raw[:8]) if isinstance(raw, list) else UNKNOWN
        return words or "nothing", "wait" if words and words != UNKNOWN else ""
    if form == "on":
        return "on" if raw is True else "off" if raw is False else UNKNOWN, ""
    if form == "of all":
        return format_bytes_of_total(value, number_member(data, "mem_total_bytes")), ""
    if form == "bytes":
        return format_bytes(value), "bold" if key == "mem_run_bytes" else ""
    if key == "xid" and raw is None and (data.get("absent") or {}).get(key, _NO_XID) == _NO_XID:
        return "none", ""
    if value is None:
        return UNKNOWN, ""
    if form == "bytes/s":
        return format_bytes(value) + "/s", ""
    if form == "kWh":
        return f"{value / 3.6e6:.2f} kWh", ""
    if form in ("count", "errors"):
        return format_count(int(value)), "bad" if form == "errors" and value > 0 else ""
    return format_rounded(value, form), ""


def _topic_rows(data: GpuData, width: int) -> list[Row]:
    """One row or more per topic; the values have fixed widths, so that they do not move."""
    rows: list[Row] = []
    for topic, items in _TOPICS.items():
        row: Row = [("   " + topic.ljust(10), "dim")]
        for word, key, form in items:
            value, style = _format_value(data, key, form)
            room = 15 if topic == "memory" and not word else 9 if "/s" not in value else 11
            shown = value if span_width(value) > room else align_right(value, room)
            piece: Row = [(word + " " if word else "", "dim"), (shown, style)]
            if row_width(row) + 3 + row_width(piece) > width and len(row) > 1:
                rows.append(row)
                row = [(" " * 13, "")]
            row += [("   ", ""), *piece] if len(row) > 1 else piece
        rows.append(row)
    return rows


def _process_rows(data: GpuData, width: int, look: TerminalStyle) -> list[Row]:
    """The processes that hold memory on the GPU, the run's own first."""
    listed = data.get("processes")
    if not isinstance(listed, list):
        return []
    left = int(number_member(data, "process_count") or len(listed))
    row: Row = [("   processes ", "dim")]
    for one in [each for each in listed if isinstance(each, dict)][:16]:
        ours = one.get("of_run") is True
        held = format_bytes(number_member(one, "mem_bytes"))
        piece: Row = [(f"{int_member(one, 'pid')} ", "bold" if ours else ""), (held, "" if ours else "dim")]
        piece.append((" this run   ", "") if ours else ("   ", "dim"))
        if row_width(row) + row_width(piece) > width:
            break
        row += piece
        left -= 1
    if len(row) == 1:
        row.append(("none", ""))
    elif left > 0:
        row.append((f"{left} more{look.glyphs.more}", "dim"))
    return [row]
