"""All facts about one GPU, for the zoomed devices panel, with a reason for each missing one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.model.device_usage import DeviceHistory, format_pcie_link
from dpmon.record.safe_json import int_member, number_member
from dpmon.record.schema import SECOND
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, span_width
from dpmon.text.formatting import UNKNOWN, format_bytes, format_bytes_of_total, format_count, format_short_elapsed
from dpmon.ui.chart import filled_area
from dpmon.ui.styled_rows import Row, add_scale, fit_row, row_width, wrap_to_rows
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
    """Return the name of the GPU without "NVIDIA"."""
    return sanitize_line(data.get("name") or "GPU", 60).removeprefix("NVIDIA ")


def may_belong_to_run(data: GpuData) -> bool:
    """Return whether the GPU belongs to the run, or may belong to it."""
    return data.get("of_run") is not False and data.get("visible") is not False


def format_rounded(value: float | None, unit: str) -> str:
    """Return a value as a whole number with its unit: "43%", "250 W"; a dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}%" if unit == "%" else f"{value:.0f} {unit}"


def gpu_label(index: int, data: GpuData) -> str:
    """Return the index of a GPU, followed by its name in the run's processes (cuda:N) if N is another number."""
    names = {
        sanitize_line(ordinal.get("device"), 10) for ordinal in data.get("ordinals") or () if isinstance(ordinal, dict)
    }
    run_name = names.pop() if len(names) == 1 else f"cuda:{index}"
    return f"{index:2d}" if run_name == f"cuda:{index}" else f"{index:2d} {run_name}"


def missing_value_reasons(samples: Sequence[GpuData], keys: Sequence[str] | None = None) -> str:
    """Return why values are missing, each reason once; for all values, or for those in `keys`."""
    by_reason: dict[str, dict[str, None]] = {}
    for data in samples:
        for key, reason in (data.get("absent") or {}).items():
            if (keys is None or key in keys) and (key != "xid" or reason != _NO_XID):
                name = _FIELD_NAMES.get(key, _UNIT_SUFFIX.sub("", sanitize_line(key, 40)).replace("_", " "))
                by_reason.setdefault(sanitize_line(reason, 200), {})[name] = None
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


# ------------------------------------------------------------------------------------------------ one GPU


def chart_rows(
    index: int, track: DeviceHistory, width: int, height: int, axis: TimeAxis, style: TerminalStyle
) -> list[Row]:
    """Return the heading of one GPU, and its histories in `height` rows."""
    data = track.data
    limit = number_member(data, "power_limit_w")
    top_power = limit or max((p for p in track.power if p is not None), default=0.0)
    charts = [
        _Chart(f"util {format_rounded(number_member(data, 'util_pct'), '%')}", track.util, 100.0, "%"),
        _Chart(f"mem {format_rounded(track.mem_pct, '%')}", track.mem, 100.0, "%"),
        _Chart(f"power {format_rounded(number_member(data, 'power_w'), 'W')}", track.power, top_power, "W"),
    ]
    return [_heading(index, data, width), *_side_by_side_charts(charts, track.second, width, height, axis, style)]


def detail_rows(index: int, track: DeviceHistory, width: int) -> list[Row]:
    """Return the heading of one GPU, then every value that is known about it."""
    data = track.data
    rows = [_heading(index, data, width), *_topic_rows(data, width), *_process_rows(data, width)]
    return rows + wrap_to_rows(missing_value_reasons([data]), width, max_rows=4, label=[("   ", "")])


def _heading(index: int, data: GpuData, width: int) -> Row:
    is_ours = may_belong_to_run(data)
    heading: Row = [
        (f"{gpu_label(index, data)} ", "bold" if is_ours else "dim"),
        (device_name(data), "bold" if is_ours else "dim"),
        (f"  {_owner_text(data)}", "" if is_ours else "dim"),
    ]
    uuid = data.get("uuid")
    if isinstance(uuid, str) and row_width(heading) + 2 + span_width(sanitize_line(uuid, 60)) <= width:
        heading.append((f"  {sanitize_line(uuid, 60)}", "dim"))
    return heading


def _owner_text(data: GpuData) -> str:
    if data.get("visible") is False:
        return "hidden by CUDA_VISIBLE_DEVICES"
    return {True: "used by this run", False: "not used by this run"}.get(data.get("of_run"), "")  # type: ignore[arg-type]


class _Chart(NamedTuple):
    """One metric of a device over time."""

    heading: str
    values: Sequence[float | None]
    max_value: float
    unit: str


_GUTTER_CELLS = 8
"""Cells for a chart's scale."""
MIN_CHART_ROWS = 5
"""Fewest rows of a chart, with its heading and its time axis."""


def _side_by_side_charts(
    charts: Sequence[_Chart], second: int, width: int, height: int, axis: TimeAxis, style: TerminalStyle
) -> list[Row]:
    """Return charts side by side in `height` rows, each with its newest value above it, a scale and a time axis.

    Empty if they do not fit.
    """
    chart_width = width // len(charts)
    graph_width = chart_width - _GUTTER_CELLS - 1
    if graph_width < _GUTTER_CELLS or height < MIN_CHART_ROWS:
        return []
    rows: list[Row] = [[] for _ in range(height)]
    for heading, values, max_value, unit in charts:
        value_count = graph_width * (1 if style.is_ascii else 2)
        lines = filled_area(
            resample(values, second, axis, value_count),
            graph_width,
            height - 2,
            max_value or 1.0,
            braille=not style.is_ascii,
        )
        start, now = (format_short_elapsed(second_of_axis * SECOND) for second_of_axis in (axis.start_s, axis.now_s))
        ends = f"now {now}" if len(start) + len(now) + 6 <= graph_width else now
        gutter = (" " * _GUTTER_CELLS, "")
        plot = add_scale([[(line, "bar")] for line in lines], format_rounded(max_value, unit), "0", _GUTTER_CELLS)
        axis_row: Row = [gutter, (start + ends.rjust(graph_width - len(start)), "dim")]
        for row, chart_row in zip(rows, [[gutter, (heading, "bold")], *plot, axis_row], strict=True):
            row += fit_row(chart_row, chart_width)
    return rows


def host_charts(track: DeviceHistory, width: int, height: int, axis: TimeAxis, style: TerminalStyle) -> list[Row]:
    """Return the CPU use and the memory of the host over time."""
    headings = (
        f"cpu {format_rounded(number_member(track.data, 'cpu_pct'), '%')}",
        f"memory {format_rounded(track.mem_pct, '%')}",
    )
    charts = [_Chart(headings[0], track.util, 100.0, "%"), _Chart(headings[1], track.mem, 100.0, "%")]
    return _side_by_side_charts(charts, track.second, width, height, axis, style)


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
        ("throttled by", "throttle", "words"),
    ),
    "links": (
        ("PCIe", "pcie_gen", "link"),
        ("in", "pcie_rx_bytes_s", "bytes/s"),
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
        ("NVLinks down", "nvlinks_down", "errors"),
        ("their errors", "nvlink_errors", "count"),
    ),
    "modes": (("MIG", "mig", "on"), ("persistence", "persistence", "on")),
}
"""Every figure by topic, in a fixed order: its label, its field and its unit or form."""


def _format_value(data: GpuData, key: str, value_form: str) -> tuple[str, str]:
    """Return a value as text, and its style."""
    raw_value, value = data.get(key), number_member(data, key)
    if value_form == "words":
        if not isinstance(raw_value, list):
            return UNKNOWN, ""
        words = ", ".join(sanitize_line(word, 30) for word in raw_value[:8])
        return (words, "wait") if words else ("nothing", "")
    if value_form == "on":
        if not isinstance(raw_value, bool):
            return UNKNOWN, ""
        return "on" if raw_value else "off", ""
    if value_form == "of all":
        return format_bytes_of_total(value, number_member(data, "mem_total_bytes")), ""
    if value_form == "bytes":
        return format_bytes(value), "bold" if key == "mem_run_bytes" else ""
    if key == "xid" and raw_value is None and (data.get("absent") or {}).get(key, _NO_XID) == _NO_XID:
        return "none", ""
    if value is None:
        return UNKNOWN, ""
    if value_form == "link":
        return format_pcie_link(data), ""
    if value_form == "bytes/s":
        return format_bytes(value) + "/s", ""
    if value_form == "kWh":
        return f"{value / 3.6e6:.2f} kWh", ""
    if value_form in ("count", "errors"):
        return format_count(int(value)), "bad" if value_form == "errors" and value > 0 else ""
    return format_rounded(value, value_form), ""


def _topic_rows(data: GpuData, width: int) -> list[Row]:
    """Return at least one row per topic. The values have fixed widths, so that they do not move."""
    rows: list[Row] = []
    for topic, items in _TOPICS.items():
        row: Row = [("   " + topic.ljust(10), "dim")]
        for label, key, value_form in items:
            value, style = _format_value(data, key, value_form)
            value_width = 11 if "/s" in value else 9
            if topic == "memory" and not label:
                value_width = 15
            aligned_value = value if span_width(value) > value_width else align_right(value, value_width)
            piece: Row = [(label + " " if label else "", "dim"), (aligned_value, style)]
            if row_width(row) + 3 + row_width(piece) > width and len(row) > 1:
                rows.append(row)
                row = [(" " * 13, "")]
            row += [("   ", ""), *piece] if len(row) > 1 else piece
        rows.append(row)
    return rows


def _process_rows(data: GpuData, width: int) -> list[Row]:
    """Return a row with the processes that hold memory on the GPU, the run's own first."""
    entries = data.get("processes")
    if not isinstance(entries, list):
        return []
    hidden_count = int(number_member(data, "process_count") or len(entries))
    row: Row = [("   processes ", "dim")]
    for gpu_process in [entry for entry in entries if isinstance(entry, dict)][:16]:
        is_ours = gpu_process.get("of_run") is True
        memory = format_bytes(number_member(gpu_process, "mem_bytes"))
        piece: Row = [
            (f"{int_member(gpu_process, 'pid')} ", "bold" if is_ours else ""),
            (memory, "" if is_ours else "dim"),
        ]
        piece.append((" this run   ", "") if is_ours else ("   ", "dim"))
        if row_width(row) + row_width(piece) > width:
            break
        row += piece
        hidden_count -= 1
    if len(row) == 1:
        row.append(("none", ""))
    elif hidden_count > 0:
        row.append((f"{hidden_count} more…", "dim"))
    return [row]
