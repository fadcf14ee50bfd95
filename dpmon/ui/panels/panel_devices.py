"""Panel 1: the activity of each GPU, the run's own first; without a GPU, the host's activity and the reason.

Each GPU gets three rows, two or one, as space allows; if even one is too much, two GPUs share a row. The
full screen shows everything known of each GPU (`device_details`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpmon.model.device_memory import missing_value_reasons as reasons_of_memory
from dpmon.model.device_usage import DeviceHistory
from dpmon.model.nodes import node_of
from dpmon.record.safe_json import number_member
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, span_width, truncate
from dpmon.text.formatting import UNKNOWN, format_bytes, format_free_bytes
from dpmon.ui.chart import block_line, filled_bar
from dpmon.ui.device_details import (
    chart_rows,
    detail_rows,
    device_name,
    format_rounded,
    gpu_label,
    host_charts,
    may_belong_to_run,
    missing_value_reasons,
)
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.styled_rows import Row, fit_row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import TimeAxis, make_device_axis, resample

_SHOWN_FIELDS = ("util_pct", "mem_used_bytes", "mem_total_bytes", "temperature_c", "power_w", "sm_clock_mhz", "of_run")
"""The GPU fields of the small panel, which gives the reason if one is missing."""
_ACTIVITY_FIELDS = (
    *(("sm_active_pct", "SM"), ("tensor_active_pct", "tensor")),
    *(("mem_run_bytes", "run"), ("mem_others_bytes", "others"), ("dram_active_pct", "dram")),
)
"""The fields of a GPU's third row; percentages only if known."""
_FREE_CELLS = len("69.8 of 80.0 GiB free") + 1
_MIN_FREE_SHARE = 0.05
"""A GPU with a smaller share of free memory is marked."""
_MIN_GRID_CELLS = 52
"""Cells that two GPUs in a row need."""
_METRIC_CELLS, _MIN_DRAWING_CELLS = (8, 8, 10), 12
"""Cells of power, temperature and clock, each with its gap; and the fewest cells for graph and memory bar."""
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
    rows_per_gpu = 3 if count <= 2 else 2
    if count > 4:
        rows_per_gpu = 1
    rows = rows_per_gpu * count + 1 if count else 2
    torch_devices = len(screen.state.device_memory)
    return rows + min(torch_devices, 8) + (count > 0) if torch_devices else rows


def _one_name(tracks: Sequence[tuple[int, DeviceHistory]]) -> str | None:
    """Return the common name of all GPUs; None if their names differ."""
    names = {device_name(track.data) for _, track in tracks}
    return names.pop() if len(names) == 1 else None


def panel_title(screen: ScreenData, style: TerminalStyle, folded: bool = False) -> tuple[Row, Row]:
    """Return the title and the main numbers."""
    tracks = _sorted_gpus(screen)
    dot = f" {style.glyphs.middot} "
    if tracks:
        name = _one_name(tracks)
        title: Row = [(NAMES["devices"], "title"), (_node_shown(screen), "")]
        if name is not None:
            count_text = f"{len(tracks)} {style.glyphs.times} " if len(tracks) > 1 else ""
            title.append((f"{dot}{count_text}{truncate(name, 24, style.glyphs.more)}", ""))
        corner: Row = [("util ", "dim"), (_usage_text(tracks), "")]
        smallest_free = min(
            (total - used for used, total in map(_memory_use, _run_gpu_data(tracks)) if used and total), default=None
        )
        if folded and smallest_free is not None:
            corner += [("  free ", "dim"), (align_right(format_bytes(smallest_free), 8), "")]
            corner += [(" or more", "dim")] if len(tracks) > 1 else []
        return title, corner
    cpu = number_member(screen.state.host.data, "cpu_pct")
    return [(NAMES["devices"], "title"), (f"{_node_shown(screen)}{dot}host", "")], [
        ("cpu ", "dim"),
        (align_right(format_rounded(cpu, "%"), 5), ""),
    ]


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
    if not tracks:
        memory_rows = _memory_rows(screen, width, with_reasons=False)
        return [*render_host(screen, width, height - len(memory_rows), style), *memory_rows]
    note_rows = _throttle_and_missing_rows(tracks, width, style)
    memory_rows = _memory_rows(screen, width)
    free_rows = height - len(note_rows)
    rows_per_gpu = next((count for count in (3, 2) if count * len(tracks) <= free_rows - len(memory_rows)), 0)
    rows_per_gpu = rows_per_gpu or (1 if len(tracks) <= free_rows else 0)
    if rows_per_gpu == 0 and width >= _MIN_GRID_CELLS:
        rows = _grid_rows(tracks, width, screen, style)
    else:
        table = _DeviceTable(tracks, width, max(rows_per_gpu, 1), screen, style)
        rows = [row for index, track in tracks for row in table.rows(index, track)]
    free_memory_rows = height - len(rows) - len(note_rows)
    if memory_rows and free_memory_rows > 0:
        hidden_count = len(memory_rows) - free_memory_rows
        if hidden_count > 0:
            memory_rows = [*memory_rows[: free_memory_rows - 1], [(f"memory of {hidden_count + 1} more: zoom", "dim")]]
        rows += memory_rows
    return rows + note_rows


def render_full_screen(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows on the full screen: memory by owner, charts of all devices, then everything known of each."""
    tracks = _sorted_gpus(screen)
    axis = make_device_axis(screen)
    memory_rows = _memory_rows(screen, width)
    if not tracks:
        return [*render_host(screen, width, max(height - len(memory_rows), 3), style, full_size=True), *memory_rows]
    rows: list[Row] = [*memory_rows, []] if memory_rows else []
    chart_height = min(max((height - len(rows)) // len(tracks) - 1, 1), _MAX_CHART_ROWS)
    for index, track in tracks:
        rows += chart_rows(index, track, width, chart_height, axis, style)
    for index, track in tracks:
        rows += [[], *detail_rows(index, track, width, style)]
    return rows


# ------------------------------------------------------------------------------------------------ memory by owner


def _memory_rows(screen: ScreenData, width: int, *, with_reasons: bool = True) -> list[Row]:
    """Return a row per device with known torch memory: how much models, gradients and optimizers take."""
    rows: list[Row] = []
    device_memory = screen.state.device_memory
    for memory in device_memory:
        parts = [("model", memory.model), ("grads", memory.gradients), ("optim", memory.optimizer)]
        parts += [("rest", memory.rest), ("peak", memory.peak)]
        row: Row = [(sanitize_line(memory.label, 40).ljust(8) + " ", "dim")]
        if not with_reasons or row_width(row) + sum(len(label) + 11 for label, _ in parts) > width:
            # A row below gives the reason for the missing values.
            parts = [(label, byte_count) for label, byte_count in parts if byte_count is not None]
        for label, byte_count in parts:
            gap = "  " if len(row) > 1 else ""
            if row_width(row) + len(gap) + len(label) + 9 <= width:
                row += [(gap + label, "dim"), (align_right(format_bytes(byte_count), 9), "")]
        rows.append(row)
    missing_values = [missing_value for memory in device_memory for missing_value in reasons_of_memory(memory)]
    if missing_values and with_reasons:
        long_text = "; ".join(dict.fromkeys(f"{names}: {reason}" for names, reason in missing_values))
        short_text = "; ".join(dict.fromkeys(reason for _, reason in missing_values))
        text = long_text if span_width(long_text) <= width else short_text
        rows.append([(truncate(sanitize_line(text, 300), width), "dim")])
    return rows


# ------------------------------------------------------------------------------------------------ GPUs


def _history_text(
    track: DeviceHistory, values: Sequence[float | None], axis: TimeAxis, width: int, style: TerminalStyle
) -> str:
    """Draw a history of percentages in `width` cells."""
    return block_line(resample(values, track.second, axis, width), width, style.glyphs)


class _DeviceTable:
    """A table with `rows_per_gpu` rows per GPU. Column widths depend only on the panel's size and the GPUs' names."""

    def __init__(
        self,
        tracks: Sequence[tuple[int, DeviceHistory]],
        width: int,
        rows_per_gpu: int,
        screen: ScreenData,
        style: TerminalStyle,
    ) -> None:
        self.width, self.rows_per_gpu, self.style, self.axis = width, rows_per_gpu, style, make_device_axis(screen)
        names = [] if _one_name(tracks) else [device_name(track.data) for _, track in tracks]
        self.label_width = max(3, *(span_width(gpu_label(index, track.data)) for index, track in tracks)) + 1
        self.name_width = min(max(map(span_width, names), default=0), 20 if width >= 90 else 10)
        free_cells = width - self.label_width - (self.name_width + 1 if self.name_width else 0) - 6 - 2
        self.free_width = _FREE_CELLS if free_cells >= _FREE_CELLS + 4 else _FREE_CELLS - len(" of 80.0")
        free_cells -= self.free_width
        self.metric_count = 0
        """How many of power, temperature and clock follow the memory of a GPU that has only one row."""
        for metric_width in _METRIC_CELLS if rows_per_gpu == 1 else ():
            if free_cells - metric_width < _MIN_DRAWING_CELLS:
                break
            self.metric_count, free_cells = self.metric_count + 1, free_cells - metric_width
        self.graph_width = max(min(free_cells * 3 // 5, 60), 4)
        self.bar_width = max(min(free_cells - self.graph_width - 1, 24), 0)

    def rows(self, index: int, track: DeviceHistory) -> list[Row]:
        return [self.usage_row(index, track), self.memory_row(track), self.activity_row(track)][: self.rows_per_gpu]

    def usage_row(self, index: int, track: DeviceHistory) -> Row:
        data = track.data
        is_own = may_belong_to_run(data)
        used, total = _memory_use(data)
        util = number_member(data, "util_pct")
        row: Row = [(gpu_label(index, data).ljust(self.label_width), "bold" if is_own else "dim")]
        if self.name_width:
            row += fit_row([(device_name(data), "" if is_own else "dim")], self.name_width + 1, self.style.glyphs.more)
        row += [
            (_history_text(track, track.util, self.axis, self.graph_width, self.style), "bar" if is_own else "dim"),
            (align_right(format_rounded(util, "%"), 6), "bold" if is_own else "dim"),
            ("  ", ""),
        ]
        if self.bar_width:
            row += [*_memory_bar(data, self.bar_width, self.style)]
        is_full = used is not None and total is not None and total - used < total * _MIN_FREE_SHARE
        text = format_free_bytes(used, total)
        if self.free_width < _FREE_CELLS:
            free_text, _, total_text = text.partition(" of ")
            text = " ".join([free_text, *total_text.split()[1:]])
        text_style = "" if is_own else "dim"
        row.append((align_right(text, self.free_width), "wait" if is_own and is_full else text_style))
        return [*row, *_metric_spans(data, text_style, _METRIC_CELLS)[: self.metric_count]]

    def memory_row(self, track: DeviceHistory) -> Row:
        """Return the memory history, which lies below the utilization history, then power, temperature and clock."""
        data = track.data
        text_style = "" if may_belong_to_run(data) else "dim"
        share = track.mem_pct
        lead_width = self.label_width + (self.name_width + 1 if self.name_width else 0)
        row: Row = [
            (("memory" if lead_width >= 7 else "mem").ljust(lead_width), "dim"),
            (_history_text(track, track.mem, self.axis, self.graph_width, self.style), text_style or "bar"),
            (align_right(format_rounded(share, "%"), 6), text_style),
        ]
        metrics = _metric_spans(data, text_style, (11, 7, 9), with_limit=True)
        return [*row, *metrics] if row_width(row) + row_width(metrics) <= self.width else [*row, *metrics[:2]]

    def activity_row(self, track: DeviceHistory) -> Row:
        """Return the known activity fields, which say more than utilization, and the memory by owner."""
        data = track.data
        row: Row = [(" " * self.label_width, "")]
        parts: list[Row] = []
        for key, label in _ACTIVITY_FIELDS:
            value, is_share = number_member(data, key), key.endswith("_pct")
            if value is not None or not is_share:
                value_text = align_right(f"{value:.0f}%", 5) if is_share else align_right(format_bytes(value), 8)
                parts.append([(f"{label} ", "dim"), (value_text + " ", "")])
        for part in parts:
            if row_width(row) + row_width(part) - 1 <= self.width:
                row += part
        return row


def _memory_use(data: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the bytes of a GPU that no program can allocate any more, and its total bytes."""
    used, reserved = number_member(data, "mem_used_bytes"), number_member(data, "mem_reserved_bytes")
    return None if used is None else used + (reserved or 0), number_member(data, "mem_total_bytes")


def _memory_bar(data: Mapping[str, Any], width: int, style: TerminalStyle) -> Row:
    """Draw the memory in use: a full line for this run, a broken one for others; all full if the owners are unknown."""
    used, total, run_bytes = (
        number_member(data, key) for key in ("mem_used_bytes", "mem_total_bytes", "mem_run_bytes")
    )
    if used is None or not total:
        return filled_bar(None, width, style.glyphs)
    if run_bytes is None and may_belong_to_run(data):
        return filled_bar((used / total,), width, style.glyphs)
    shown_run_bytes = min(run_bytes or 0.0, used)
    return filled_bar((shown_run_bytes / total, (used - shown_run_bytes) / total), width, style.glyphs)


def _metric_spans(
    data: Mapping[str, Any], text_style: str, widths: tuple[int, int, int], *, with_limit: bool = False
) -> Row:
    """Return power, with its limit if `with_limit`, temperature and clock, in these widths."""
    power, limit, temperature, megahertz = (
        number_member(data, key) for key in ("power_w", "power_limit_w", "temperature_c", "sm_clock_mhz")
    )
    power_text = UNKNOWN if power is None else f"{power:.0f}"
    if with_limit and limit is not None:
        power_text += f"/{limit:.0f}"
    texts = (f"{power_text} W", format_rounded(temperature, "°C"), format_rounded(megahertz, "MHz"))
    return [(align_right(text, width), text_style) for text, width in zip(texts, widths, strict=True)]


def _grid_rows(
    tracks: Sequence[tuple[int, DeviceHistory]], width: int, screen: ScreenData, style: TerminalStyle
) -> list[Row]:
    """Return rows of two GPUs each: utilization and memory in percent."""
    cell_width = (width - 2) // 2
    label_width = max(span_width(gpu_label(index, track.data)) for index, track in tracks) + 1
    graph_width = max(min(cell_width - label_width - 6 - 1 - 5 - 5, 24), 3)
    bar_width = max(cell_width - label_width - graph_width - 6 - 1 - 5, 0)
    row_count = -(-len(tracks) // 2)
    axis = make_device_axis(screen)

    def gpu_cells(index: int, track: DeviceHistory) -> Row:
        text_style = "" if may_belong_to_run(track.data) else "dim"
        util = number_member(track.data, "util_pct")
        share = track.mem_pct
        return [
            (gpu_label(index, track.data).ljust(label_width), text_style or "bold"),
            (_history_text(track, track.util, axis, graph_width, style), text_style or "bar"),
            (align_right(format_rounded(util, "%"), 6), text_style or "bold"),
            (" ", ""),
            *_memory_bar(track.data, bar_width, style),
            (align_right(format_rounded(share, "%"), 5), text_style),
        ]

    rows: list[Row] = []
    for row in range(row_count):
        left = fit_row(gpu_cells(*tracks[row]), cell_width, style.glyphs.more)
        rows.append(
            [*left, ("  ", ""), *(gpu_cells(*tracks[row + row_count]) if row + row_count < len(tracks) else ())]
        )
    return rows


def _throttle_and_missing_rows(
    tracks: Sequence[tuple[int, DeviceHistory]], width: int, style: TerminalStyle
) -> list[Row]:
    """Return throttle reasons, and why values are missing: at most one row each."""
    rows: list[Row] = []
    gpus_by_reason: dict[str, list[str]] = {}
    for index, track in tracks:
        reasons = track.data.get("throttle")
        for reason in reasons if isinstance(reasons, list) else ():
            gpus_by_reason.setdefault(sanitize_line(reason, 40), []).append(gpu_label(index, track.data))
    if gpus_by_reason:
        text = "; ".join(f"{reason}: {' '.join(labels)}" for reason, labels in gpus_by_reason.items())
        rows.append([("throttled ", "wait"), (truncate(text, max(width - 10, 1), style.glyphs.more), "")])
    missing_text = missing_value_reasons([track.data for _, track in tracks], _SHOWN_FIELDS)
    if missing_text:
        rows.append([(truncate(missing_text, width, style.glyphs.more), "dim")])
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
    load_chart = _history_text(track, track.util, axis, max(min(width - 9 - row_width(main_row), 60), 6), style)
    rows = [[("host cpu ", "dim"), (load_chart, "bar"), *main_row], *rows]
    reason_rows = _no_gpu_rows(data, width, style) if full_size else []
    plot_rows = host_charts(track, width, min(height - len(rows) - len(reason_rows), _MAX_CHART_ROWS), axis, style)
    return [*rows, *plot_rows, *reason_rows]


def _no_gpu_rows(data: Mapping[str, Any], width: int, style: TerminalStyle) -> list[Row]:
    reason, text = data.get("gpu_absent"), missing_value_reasons([data])
    if isinstance(reason, str):
        absent = reason if reason.lower().startswith("no gpu") else f"no GPU: {reason}"
        text = f"{absent}; {text}" if text else absent
    return wrap_to_rows(sanitize_line(text, 600), width, max_rows=_MAX_REASON_ROWS, more=style.glyphs.more)
