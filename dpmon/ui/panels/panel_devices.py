"""Panel 1: the activity of each GPU, the run's own first; without a GPU, the host's activity and the reason.

Each GPU gets two rows or one, as space allows; if even one is too much, two GPUs share a row. The full
screen shows everything known of each GPU (`device_details`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpmon.model.device_memory import missing_value_reasons as reasons_of_memory
from dpmon.model.device_usage import DeviceHistory
from dpmon.model.findings.memory_findings import memory_owner, time_until_limit
from dpmon.model.nodes import node_of
from dpmon.record.safe_json import number_member
from dpmon.report.tables import MEMORY
from dpmon.sanitize import sanitize_line
from dpmon.store.memory_growth import MemoryTrend
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import UNKNOWN, format_bytes, format_free_bytes
from dpmon.ui.chart import block_line, filled_bar
from dpmon.ui.device_details import (
    MIN_CHART_ROWS,
    chart_rows,
    detail_rows,
    device_name,
    format_rounded,
    gpu_label,
    host_charts,
    may_belong_to_run,
    missing_value_reasons,
)
from dpmon.ui.panel_table import PanelColumn, draw_table, fact_columns
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.styled_rows import Row, Span, fit_row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import TimeAxis, make_device_axis, resample

_SHOWN_FIELDS = ("util_pct", "mem_used_bytes", "mem_total_bytes", "temperature_c", "power_w", "sm_clock_mhz", "of_run")
"""The GPU fields of the small panel, which gives the reason if one is missing."""
_ACTIVITY_FIELDS = (
    *(("sm_active_pct", "SM"), ("tensor_active_pct", "tensor")),
    *(("mem_run_bytes", "run"), ("mem_others_bytes", "others"), ("dram_active_pct", "dram")),
)
"""The fields of a GPU's second row after its power, temperature and clock; percentages only if known."""
_METRICS = (("power_w", "W"), ("temperature_c", "°C"), ("sm_clock_mhz", "MHz"))
_FREE_CELLS = len("69.8 of 80.0 GiB free") + 1
_MIN_FREE_SHARE = 0.05
"""A GPU with a smaller share of free memory is marked."""
_MIN_GRID_CELLS = 52
"""Cells that two GPUs in a row need."""
_MIN_GRAPH_CELLS = 10
"""Fewest cells for the history of the load next to the run's part of it."""
_MAX_REASON_ROWS = 4
_MAX_CHART_ROWS = 14
"""Most rows of a device's charts."""


def _sorted_gpus(screen: ScreenData) -> list[tuple[int, DeviceHistory]]:
    """Return the GPUs with their indices, the run's own first."""

    def sort_key(gpu: tuple[int, DeviceHistory]) -> tuple[bool, int]:
        index, track = gpu
        return not may_belong_to_run(track.data), index

    return sorted(screen.state.devices.items(), key=sort_key)


def preferred_height(screen: ScreenData) -> int:
    """Return the number of rows of the whole content."""
    count = len(screen.state.devices)
    rows = 2
    if count:
        rows = (2 if count <= 4 else 1) * count + 1
    rows += len(_growing_memory(screen)[:1])
    torch_devices = len(screen.state.device_memory)
    return rows + 1 + min(torch_devices, 8) + (count > 0) if torch_devices else rows


def _one_name(tracks: Sequence[tuple[int, DeviceHistory]]) -> str | None:
    """Return the common name of all GPUs; None if their names differ."""
    names = {device_name(track.data) for _, track in tracks}
    return names.pop() if len(names) == 1 else None


def panel_title(screen: ScreenData, folded: bool = False) -> tuple[Row, Row]:
    """Return the title and the main numbers."""
    tracks = _sorted_gpus(screen)
    soonest = _growing_memory(screen)[: int(folded)]
    growth: Row = [(f"  ▲ full in {time_until_limit(trend)}", "wait") for trend in soonest]
    if tracks:
        name = _one_name(tracks)
        title: Row = [(NAMES["devices"], "title"), (_node_shown(screen), "")]
        if name is not None:
            count_text = f"{len(tracks)} × " if len(tracks) > 1 else ""
            title.append((f" · {count_text}{truncate(name, 24)}", ""))
        corner: Row = [("util ", "dim"), (_usage_text(tracks), "")]
        smallest_free = min(
            (total - used for used, total in map(_memory_use, _run_gpu_data(tracks)) if used and total), default=None
        )
        if folded and smallest_free is not None:
            corner += [("  free ", "dim"), (align_right(format_bytes(smallest_free), 8), "")]
            corner += [(" or more", "dim")] if len(tracks) > 1 else []
        return title, corner + growth
    cpu = number_member(screen.state.host.data, "cpu_pct")
    corner = [("cpu ", "dim"), (align_right(format_rounded(cpu, "%"), 5), ""), *growth]
    return [(NAMES["devices"], "title"), (f"{_node_shown(screen)} · host", "")], corner


def _node_shown(screen: ScreenData) -> str:
    """Return the node whose samples the panel shows; empty for a run on one node."""
    nodes, shown_number = screen.state.nodes, screen.view.node_number
    shown_number = node_of(nodes, screen.state.representative) if shown_number is None else shown_number
    return next((f" on {node.name}" for node in nodes if node.number == shown_number), "")


def _usage_text(tracks: Sequence[tuple[int, DeviceHistory]]) -> str:
    """Return the utilization of each GPU; for more than four, the range over the run's own."""
    if len(tracks) <= 4:
        values = [number_member(track.data, "util_pct") for _, track in tracks]
        return " ".join((UNKNOWN if u is None else f"{u:.0f}").rjust(3) for u in values) + "%"
    percentages = [u for data in _run_gpu_data(tracks) if (u := number_member(data, "util_pct")) is not None]
    return f"{min(percentages):3.0f} to {max(percentages):3.0f}%" if percentages else UNKNOWN


def _run_gpu_data(tracks: Sequence[tuple[int, DeviceHistory]]) -> list[Mapping[str, Any]]:
    """Return the data of the run's GPUs; of all GPUs, if none is known to be the run's."""
    return [track.data for _, track in tracks if may_belong_to_run(track.data)] or [track.data for _, track in tracks]


def render_panel(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows inside the frame."""
    tracks = _sorted_gpus(screen)
    growth_rows = _memory_growth_rows(screen, width)
    if not tracks:
        memory_rows = [*growth_rows, *_memory_rows(screen, width)[: 1 + len(screen.state.device_memory)]]
        return [*render_host(screen, width, height - len(memory_rows), style), *memory_rows]
    note_rows = growth_rows + _throttle_and_missing_rows(tracks, width)
    memory_rows = _memory_rows(screen, width)
    free_rows = height - len(note_rows)
    has_details = 2 * len(tracks) + len(memory_rows) <= free_rows
    rows = _usage_rows(tracks, width, screen, with_metrics=not has_details)
    if has_details:
        rows = [row for pair in zip(rows, _detail_rows(tracks, width), strict=True) for row in pair]
    elif len(tracks) > free_rows and width >= _MIN_GRID_CELLS:
        left_width, middle = (width - 2) // 2, -(-len(tracks) // 2)
        left = _usage_rows(tracks[:middle], left_width, screen)
        right = [*_usage_rows(tracks[middle:], left_width, screen), *[[]] * (len(tracks) % 2)]
        rows = [[*fit_row(first, left_width + 2), *second] for first, second in zip(left, right, strict=True)]
    if len(rows) + len(memory_rows) + len(note_rows) <= height:
        rows += memory_rows
    return rows + note_rows


def render_full_screen(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows on the full screen: memory by owner, charts of all devices, then everything known of each."""
    tracks = _sorted_gpus(screen)
    axis = make_device_axis(screen)
    memory_rows = [*_memory_growth_rows(screen, width), *_memory_rows(screen, width)]
    if not tracks:
        return [*render_host(screen, width, max(height - len(memory_rows), 3), style, full_size=True), *memory_rows]
    rows: list[Row] = [*memory_rows, []] if memory_rows else []
    chart_height = min(max((height - len(rows)) // len(tracks) - 1, MIN_CHART_ROWS), _MAX_CHART_ROWS)
    for index, track in tracks:
        rows += chart_rows(index, track, width, chart_height, axis, style)
    for index, track in tracks:
        rows += [[], *detail_rows(index, track, width)]
    return rows


# ------------------------------------------------------------------------------------------------ memory by owner


def _memory_growth_rows(screen: ScreenData, width: int) -> list[Row]:
    """Return when growing memory reaches its limit, in a row; none if it does not."""
    texts = [
        f"{memory_owner(trend)} +{format_bytes(trend.growth.step_bytes)}/step: full in {time_until_limit(trend)}"
        for trend in _growing_memory(screen)
    ]
    return [[(truncate(f"▲ {'; '.join(texts)}", width), "wait")]] if texts else []


def _growing_memory(screen: ScreenData) -> list[MemoryTrend]:
    """Return the trends that matter, the one that reaches its limit first at the beginning."""
    growing = [trend for trend in screen.state.memory_trends if trend.matters]
    return sorted(growing, key=lambda trend: trend.seconds_left or 0.0)


def _memory_rows(screen: ScreenData, width: int) -> list[Row]:
    """Return a table of the torch memory of each device by owner, and why values are missing."""
    device_memory = screen.state.device_memory
    if not device_memory:
        return []
    labels = PanelColumn("memory", [sanitize_line(memory.label, 40) for memory in device_memory], is_text=True)
    rows = draw_table([labels, *fact_columns(MEMORY, device_memory)], width)
    missing_values = [missing_value for memory in device_memory for missing_value in reasons_of_memory(memory)]
    text = "; ".join(dict.fromkeys(f"{names}: {reason}" for names, reason in missing_values))
    return [*rows, [(truncate(sanitize_line(text, 300), width), "dim")]] if text else rows


# ------------------------------------------------------------------------------------------------ GPUs


def _history_text(track: DeviceHistory, values: Sequence[float | None], axis: TimeAxis, width: int) -> str:
    """Draw a history of percentages in `width` cells."""
    return block_line(resample(values, track.second, axis, width), width)


def _usage_rows(
    tracks: Sequence[tuple[int, DeviceHistory]],
    width: int,
    screen: ScreenData,
    *,
    with_metrics: bool = True,
) -> list[Row]:
    """Return a row per GPU: its utilization over time, its memory and, with metrics, as many others as fit."""
    axis, samples = make_device_axis(screen), [track.data for _, track in tracks]

    def cells(texts: Sequence[str], own_style: str) -> list[str | Row]:
        pairs = zip(texts, samples, strict=True)
        return [[(text, own_style if may_belong_to_run(data) else "dim")] for text, data in pairs]

    def values(key: str, unit: str) -> list[str]:
        return [format_rounded(number_member(data, key), unit) for data in samples]

    def history(graph_width: int) -> Sequence[str | Row]:
        return ["", *cells([_history_text(track, track.util, axis, graph_width) for _, track in tracks], "bar")]

    def memory(bar_width: int) -> Sequence[str | Row]:
        return ["", *(_memory_bar(data, bar_width) for data in samples)]

    free: list[str | Row] = []
    for data in samples:
        used, total = _memory_use(data)
        is_full = used is not None and total is not None and total - used < total * _MIN_FREE_SHARE
        own_style = "wait" if is_full else ""
        free.append([(format_free_bytes(used, total), own_style if may_belong_to_run(data) else "dim")])
    blanks = [""] * len(tracks)
    columns = [PanelColumn("", cells([gpu_label(index, track.data) for index, track in tracks], "bold"), is_text=True)]
    if _one_name(tracks) is None:
        columns.append(PanelColumn("", cells(list(map(device_name, samples)), ""), is_text=True))
    columns.append(PanelColumn(cells=blanks, draw=history, min_width=4, wanted_width=10, max_width=40))
    columns.append(PanelColumn("", cells(values("util_pct", "%"), "bold"), min_width=4))
    columns.append(PanelColumn(cells=blanks, draw=memory, rank=2, min_width=4))
    columns.append(PanelColumn("", free, rank=1, min_width=len("69.8 of 80.0 GiB free")))
    for rank, (key, unit) in enumerate(_METRICS if with_metrics else (), 3):
        columns.append(PanelColumn("", cells(values(key, unit), ""), rank=rank, min_width=5))
    return draw_table(columns, width)[1:]


def _detail_rows(tracks: Sequence[tuple[int, DeviceHistory]], width: int) -> list[Row]:
    """Return a row per GPU with its power and limit, temperature, clock, activity and memory by owner, if known."""
    rows: list[Row] = []
    for _, track in tracks:
        data, row = track.data, list[Span]([("  ", "")])
        power, limit = (number_member(data, key) for key in ("power_w", "power_limit_w"))
        limit_text = "" if limit is None else f"/{limit:.0f}"
        parts = [("", f"{UNKNOWN if power is None else f'{power:.0f}'}{limit_text} W".rjust(9))]
        parts.append(("", format_rounded(number_member(data, "temperature_c"), "°C").rjust(5)))
        parts.append(("", format_rounded(number_member(data, "sm_clock_mhz"), "MHz").rjust(8)))
        for key, label in _ACTIVITY_FIELDS:
            value = number_member(data, key)
            if key.endswith("_pct") and value is not None:
                parts.append((f"{label} ", f"{value:.0f}%".rjust(4)))
            elif not key.endswith("_pct"):
                parts.append((f"{label} ", format_bytes(value).rjust(8)))
        text_style = "" if may_belong_to_run(data) else "dim"
        for label, text in parts:
            if row_width(row) + 2 + len(label) + len(text) <= width:
                row += [("  " + label, "dim"), (text, text_style)]
        rows.append(row)
    return rows


def _memory_use(data: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the bytes of a GPU that no program can allocate any more, and its total bytes."""
    used, reserved = number_member(data, "mem_used_bytes"), number_member(data, "mem_reserved_bytes")
    return None if used is None else used + (reserved or 0), number_member(data, "mem_total_bytes")


def _memory_bar(data: Mapping[str, Any], width: int) -> Row:
    """Draw the memory in use: a full line for this run, a broken one for others; all full if the owners are unknown."""
    used, total, run_bytes = (
        number_member(data, key) for key in ("mem_used_bytes", "mem_total_bytes", "mem_run_bytes")
    )
    if used is None or not total:
        return filled_bar(None, width)
    if run_bytes is None and may_belong_to_run(data):
        return filled_bar((used / total,), width)
    shown_run_bytes = min(run_bytes or 0.0, used)
    return filled_bar((shown_run_bytes / total, (used - shown_run_bytes) / total), width)


def _throttle_and_missing_rows(tracks: Sequence[tuple[int, DeviceHistory]], width: int) -> list[Row]:
    """Return throttle reasons, and why values are missing: at most one row each."""
    rows: list[Row] = []
    gpus_by_reason: dict[str, list[str]] = {}
    for index, track in tracks:
        reasons = track.data.get("throttle")
        for reason in reasons if isinstance(reasons, list) else ():
            gpus_by_reason.setdefault(sanitize_line(reason, 40), []).append(gpu_label(index, track.data))
    if gpus_by_reason:
        text = "; ".join(f"{reason}: {' '.join(labels)}" for reason, labels in gpus_by_reason.items())
        rows.append([("throttled ", "wait"), (truncate(text, max(width - 10, 1)), "")])
    missing_text = missing_value_reasons([track.data for _, track in tracks], _SHOWN_FIELDS)
    if missing_text:
        rows.append([(truncate(missing_text, width), "dim")])
    return rows


# ------------------------------------------------------------------------------------------------ the host


def render_host(
    screen: ScreenData, width: int, height: int, style: TerminalStyle, full_size: bool = False
) -> list[Row]:
    """Return the host's load and the run's part in one or two rows, and charts if more of the `height` rows are free.

    `full_size`: on the full screen, which also says why there is no GPU.
    """
    track = screen.state.host
    data = track.data
    if not data:
        return [[("no sample yet", "dim")]]
    cpu, used, total = (number_member(data, key) for key in ("cpu_pct", "mem_used_bytes", "mem_total_bytes"))
    run_cpu, run_memory = number_member(data, "run_cpu_pct"), number_member(data, "run_mem_bytes")
    load: Row = [(align_right(format_rounded(cpu, "%"), 6), "bold")]
    load.append((align_right(format_free_bytes(used, total), _FREE_CELLS + 1), ""))
    of_run: Row = [("this run ", "dim")]
    if screen.is_over and run_cpu is None and run_memory is None:
        of_run.append(("has ended", ""))
    else:
        of_run += [(align_right(UNKNOWN if run_cpu is None else f"{run_cpu / 100:.2f}", 5), ""), (" cores", "dim")]
        of_run += [(align_right(format_bytes(run_memory), 10), "")]
    main_row = [*load, ("  ", ""), *of_run]
    rows = [] if full_size or width >= row_width(main_row) + 9 + _MIN_GRAPH_CELLS else [of_run]
    main_row = load if rows else main_row
    axis = make_device_axis(screen)
    load_chart = _history_text(track, track.util, axis, max(min(width - 9 - row_width(main_row), 60), 6))
    rows = [[("host cpu ", "dim"), (load_chart, "bar"), *main_row], *rows]
    reason_rows = _no_gpu_rows(data, width) if full_size else []
    plot_rows = host_charts(track, width, min(height - len(rows) - len(reason_rows), _MAX_CHART_ROWS), axis, style)
    return [*rows, *plot_rows, *reason_rows]


def _no_gpu_rows(data: Mapping[str, Any], width: int) -> list[Row]:
    reason, fields = data.get("gpu_absent"), data.get("absent") or {}
    text = missing_value_reasons([data], [name for name in fields if name != "energy_j"])  # the screen does not show it
    if isinstance(reason, str):
        absent = reason if reason.lower().startswith("no gpu") else f"no GPU: {reason}"
        text = f"{absent}; {text}" if text else absent
    return wrap_to_rows(sanitize_line(text, 600), width, max_rows=_MAX_REASON_ROWS)
