"""Panel 1: the activity of each GPU, the run's own first; without a GPU, the host's activity and the reason.

Each GPU gets three rows, two or one, as space allows; if even one is too much, two GPUs share a row. Zoomed, the panel
shows all facts of each GPU (`device_details`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpmon.model.device_memory import missing_value_reasons as reasons_of_memory
from dpmon.model.nodes import node_of
from dpmon.model.run_snapshot import DeviceHistory
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

_SHOWN = ("util_pct", "mem_used_bytes", "mem_total_bytes", "temperature_c", "power_w", "sm_clock_mhz", "of_run")
"""The GPU fields of the small panel, which gives the reason if one is missing."""
_THIRD = (
    *(("sm_active_pct", "SM"), ("tensor_active_pct", "tensor")),
    *(("mem_run_bytes", "run"), ("mem_others_bytes", "others"), ("dram_active_pct", "dram")),
)
"""The fields of a GPU's third row; percentages only if known."""
_FREE = len("69.8 of 80.0 GiB free") + 1
_FULL = 0.05
"""A GPU with a smaller share of free memory is marked."""
_GRID = 52
"""Cells that two GPUs in a row need."""
_FIGURES, _DRAWN = (8, 8, 10), 12
"""Cells for power, temperature and clock, each with its gap; fewest cells that they leave for the drawings."""
_LEAST_GRAPH = 10
"""Fewest cells for the history of the load beside the run's part of it."""
_MOST_REASONS = 4
_TALLEST = 14
"""Most rows of a device's charts."""


def _sorted_gpus(facts: ScreenData) -> list[tuple[int, DeviceHistory]]:
    """The GPUs, the run's own first."""
    return sorted(facts.state.devices.items(), key=lambda item: (not may_belong_to_run(item[1].data), item[0]))


def preferred_height(facts: ScreenData) -> int:
    """Rows that the whole content needs."""
    count = len(facts.state.devices)
    rows = (3 * count if count <= 2 else 2 * count if count <= 4 else count) + 1 if count else 2
    more = len(facts.state.device_memory)
    return rows + min(more, 8) + (count > 0) if more else rows


def _one_name(tracks: Sequence[tuple[int, DeviceHistory]]) -> str | None:
    """The common name of all GPUs; None if they differ."""
    names = {device_name(track.data) for _, track in tracks}
    return names.pop() if len(names) == 1 else None


def panel_title(facts: ScreenData, look: TerminalStyle, folded: bool = False) -> tuple[Row, Row]:
    """The panel's title, and its main numbers."""
    tracks = _sorted_gpus(facts)
    dot = f" {look.glyphs.middot} "
    if tracks:
        name = _one_name(tracks)
        head: Row = [(NAMES["devices"], "title"), (_node_shown(facts), "")]
        if name is not None:
            many = f"{len(tracks)} {look.glyphs.times} " if len(tracks) > 1 else ""
            head.append((f"{dot}{many}{truncate(name, 24, look.glyphs.more)}", ""))
        corner: Row = [("util ", "dim"), (_uses(tracks), "")]
        left = min(
            (total - used for used, total in map(_memory, _run_gpu_data(tracks)) if used and total), default=None
        )
        if folded and left is not None:
            corner += [("  free ", "dim"), (align_right(format_bytes(left), 8), "")]
            corner += [(" or more", "dim")] if len(tracks) > 1 else []
        return head, corner
    cpu = number_member(facts.state.host.data, "cpu_pct")
    return [(NAMES["devices"], "title"), (f"{_node_shown(facts)}{dot}host", "")], [
        ("cpu ", "dim"),
        (align_right(format_rounded(cpu, "%"), 5), ""),
    ]


def _node_shown(facts: ScreenData) -> str:
    """The node whose samples the panel shows; nothing on one machine."""
    nodes, number = facts.state.nodes, facts.view.node_number
    number = node_of(nodes, facts.state.representative) if number is None else number
    return next((f" on {one.name}" for one in nodes if one.number == number), "")


def _uses(tracks: Sequence[tuple[int, DeviceHistory]]) -> str:
    """The use of each GPU; for many GPUs, the range of the run's own."""
    if len(tracks) <= 4:
        values = [number_member(track.data, "util_pct") for _, track in tracks]
        return " ".join((UNKNOWN if u is None else f"{u:.0f}").rjust(3) for u in values) + "%"
    known = [u for data in _run_gpu_data(tracks) if (u := number_member(data, "util_pct")) is not None]
    return f"{min(known):3.0f} to {max(known):3.0f}%" if known else UNKNOWN


def _run_gpu_data(tracks: Sequence[tuple[int, DeviceHistory]]) -> list[Mapping[str, Any]]:
    """The data of the run's GPUs; of all, if none is known to be the run's."""
    return [track.data for _, track in tracks if may_belong_to_run(track.data)] or [track.data for _, track in tracks]


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel's rows, inside its frame."""
    tracks = _sorted_gpus(facts)
    if not tracks:
        held_rows = _memory_rows(facts, width, with_reasons=False)
        return [*render_host(facts, width, height - len(held_rows), look), *held_rows]
    remarks = _throttle_and_missing_rows(tracks, width, look)
    held_rows = _memory_rows(facts, width)
    room = height - len(remarks)
    each = next((each for each in (3, 2) if each * len(tracks) <= room - len(held_rows)), 0)
    each = each or (1 if len(tracks) <= room else 0)
    if each == 0 and width >= _GRID:
        rows = _grid(tracks, width, facts, look)
    else:
        table = _DeviceTable(tracks, width, max(each, 1), facts, look)
        rows = [row for index, track in tracks for row in table.rows(index, track)]
    left = height - len(rows) - len(remarks)
    if held_rows and left > 0:
        hidden = len(held_rows) - left
        if hidden > 0:
            held_rows = [*held_rows[: left - 1], [(f"memory of {hidden + 1} more: zoom", "dim")]]
        rows += held_rows
    return rows + remarks


def render_full_screen(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel at full size: memory by holder, the charts of all devices, then everything that is known of each."""
    tracks = _sorted_gpus(facts)
    axis = make_device_axis(facts)
    more = _memory_rows(facts, width)
    if not tracks:
        return [*render_host(facts, width, max(height - len(more), 3), look, tall=True), *more]
    rows: list[Row] = [*more, []] if more else []
    tall = min(max((height - len(rows)) // len(tracks) - 1, 1), _TALLEST)
    for index, track in tracks:
        rows += chart_rows(index, track, width, tall, axis, look)
    for index, track in tracks:
        rows += [[], *detail_rows(index, track, width, look)]
    return rows


# ------------------------------------------------------------------------------------------------ memory by holder


def _memory_rows(facts: ScreenData, width: int, *, with_reasons: bool = True) -> list[Row]:
    """A row for each device with known torch memory: how much models, gradients and optimizers take."""
    rows: list[Row] = []
    found = facts.state.device_memory
    for one in found:
        parts = [("model", one.model), ("grads", one.gradients), ("optim", one.optimizer)]
        parts += [("rest", one.rest), ("peak", one.peak)]
        row: Row = [(sanitize_line(one.device, 10).ljust(8) + " ", "dim")]
        if not with_reasons or row_width(row) + sum(len(word) + 11 for word, _ in parts) > width:
            parts = [part for part in parts if part[1] is not None]  # the reason for missing ones is in a row below
        for word, count in parts:
            gap = "  " if len(row) > 1 else ""
            if row_width(row) + len(gap) + len(word) + 9 <= width:
                row += [(gap + word, "dim"), (align_right(format_bytes(count), 9), "")]
        rows.append(row)
    why = [known for one in found for known in reasons_of_memory(one)]
    if why and with_reasons:
        named = "; ".join(dict.fromkeys(f"{names}: {reason}" for names, reason in why))
        short = "; ".join(dict.fromkeys(reason for _, reason in why))
        rows.append([(truncate(sanitize_line(named if span_width(named) <= width else short, 300), width), "dim")])
    return rows


# ------------------------------------------------------------------------------------------------ GPUs


def _history(
    track: DeviceHistory, values: Sequence[float | None], axis: TimeAxis, width: int, look: TerminalStyle
) -> str:
    """A history of percentages in `width` cells."""
    return block_line(resample(values, track.second, axis, width), width, look.glyphs)


class _DeviceTable:
    """Columns of `each` rows per GPU. Their widths depend only on the panel's size and the GPUs' names."""

    def __init__(
        self, tracks: Sequence[tuple[int, DeviceHistory]], width: int, each: int, facts: ScreenData, look: TerminalStyle
    ) -> None:
        self.width, self.each, self.look, self.axis = width, each, look, make_device_axis(facts)
        names = [] if _one_name(tracks) else [device_name(track.data) for _, track in tracks]
        self.head = max(3, *(span_width(gpu_label(index, track.data)) for index, track in tracks)) + 1
        self.name = min(max(map(span_width, names), default=0), 20 if width >= 90 else 10)
        left = width - self.head - (self.name + 1 if self.name else 0) - 6 - 2
        self.free = _FREE if left >= _FREE + 4 else _FREE - len(" of 80.0")
        left -= self.free
        self.figures = 0
        """Number of figures after the memory of a GPU that has only one row: power, temperature and clock."""
        for room in _FIGURES if each == 1 else ():
            if left - room < _DRAWN:
                break
            self.figures, left = self.figures + 1, left - room
        self.graph = max(min(left * 3 // 5, 60), 4)
        self.bar = max(min(left - self.graph - 1, 24), 0)

    def rows(self, index: int, track: DeviceHistory) -> list[Row]:
        return [self.usage_row(index, track), self.memory_row(track), self.activity_row(track)][: self.each]

    def usage_row(self, index: int, track: DeviceHistory) -> Row:
        data = track.data
        ours = may_belong_to_run(data)
        used, total = _memory(data)
        util = number_member(data, "util_pct")
        row: Row = [(gpu_label(index, data).ljust(self.head), "bold" if ours else "dim")]
        if self.name:
            row += fit_row([(device_name(data), "" if ours else "dim")], self.name + 1, self.look.glyphs.more)
        row += [
            (_history(track, track.util, self.axis, self.graph, self.look), "bar" if ours else "dim"),
            (align_right(format_rounded(util, "%"), 6), "bold" if ours else "dim"),
            ("  ", ""),
        ]
        if self.bar:
            row += [*_memory_bar(data, self.bar, self.look)]
        full = used is not None and total is not None and total - used < total * _FULL
        text = format_free_bytes(used, total)
        if self.free < _FREE:
            number, _, rest = text.partition(" of ")
            text = " ".join([number, *rest.split()[1:]])
        row.append((align_right(text, self.free), ("wait" if full else "") if ours else "dim"))
        return [*row, *_figures(data, "" if ours else "dim", _FIGURES)[: self.figures]]

    def memory_row(self, track: DeviceHistory) -> Row:
        """The history of memory under the history of use, then power, temperature and clock."""
        data = track.data
        ours = "" if may_belong_to_run(data) else "dim"
        share = track.mem_pct
        lead = self.head + (self.name + 1 if self.name else 0)
        row: Row = [
            (("memory" if lead >= 7 else "mem").ljust(lead), "dim"),
            (_history(track, track.mem, self.axis, self.graph, self.look), "bar" if not ours else "dim"),
            (align_right(format_rounded(share, "%"), 6), ours),
        ]
        figures = _figures(data, ours, (11, 7, 9), limited=True)
        return [*row, *figures] if row_width(row) + row_width(figures) <= self.width else [*row, *figures[:2]]

    def activity_row(self, track: DeviceHistory) -> Row:
        """Activity fields that tell more than utilization, if the hardware reports them; and who holds the memory."""
        data = track.data
        row: Row = [(" " * self.head, "")]
        parts: list[Row] = []
        for key, word in _THIRD:
            value, share = number_member(data, key), key.endswith("_pct")
            if value is not None or not share:
                figure = align_right(f"{value:.0f}%", 5) if share else align_right(format_bytes(value), 8)
                parts.append([(f"{word} ", "dim"), (figure + " ", "")])
        for part in parts:
            if row_width(row) + row_width(part) - 1 <= self.width:
                row += part
        return row


def _memory(data: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The bytes of a GPU that no program can get any more, and all."""
    used, reserved = number_member(data, "mem_used_bytes"), number_member(data, "mem_reserved_bytes")
    return None if used is None else used + (reserved or 0), number_member(data, "mem_total_bytes")


def _memory_bar(data: Mapping[str, Any], width: int, look: TerminalStyle) -> Row:
    """The memory in use: a full line for this run, a broken one for others; all full if the holders are unknown."""
    used, total, ours = (number_member(data, key) for key in ("mem_used_bytes", "mem_total_bytes", "mem_run_bytes"))
    if used is None or not total:
        return filled_bar(None, width, look.glyphs)
    if ours is None and may_belong_to_run(data):
        return filled_bar((used / total,), width, look.glyphs)
    own = min(ours or 0.0, used)
    return filled_bar((own / total, (used - own) / total), width, look.glyphs)


def _figures(data: Mapping[str, Any], style: str, widths: tuple[int, int, int], *, limited: bool = False) -> Row:
    """Power (`limited`: with its limit), temperature, clock; in fixed widths."""
    power, limit, heat, megahertz = (
        number_member(data, key) for key in ("power_w", "power_limit_w", "temperature_c", "sm_clock_mhz")
    )
    watts = (UNKNOWN if power is None else f"{power:.0f}") + (f"/{limit:.0f}" if limited and limit is not None else "")
    return [
        (align_right(f"{watts} W", widths[0]), style),
        (align_right(format_rounded(heat, "°C"), widths[1]), style),
        (align_right(format_rounded(megahertz, "MHz"), widths[2]), style),
    ]


def _grid(tracks: Sequence[tuple[int, DeviceHistory]], width: int, facts: ScreenData, look: TerminalStyle) -> list[Row]:
    """Two GPUs in a row: use and memory in per cent."""
    cell = (width - 2) // 2
    head = max(span_width(gpu_label(index, track.data)) for index, track in tracks) + 1
    graph = max(min(cell - head - 6 - 1 - 5 - 5, 24), 3)
    space = max(cell - head - graph - 6 - 1 - 5, 0)
    half = -(-len(tracks) // 2)
    axis = make_device_axis(facts)

    def one(index: int, track: DeviceHistory) -> Row:
        style = "" if may_belong_to_run(track.data) else "dim"
        util = number_member(track.data, "util_pct")
        share = track.mem_pct
        return [
            (gpu_label(index, track.data).ljust(head), style or "bold"),
            (_history(track, track.util, axis, graph, look), style or "bar"),
            (align_right(format_rounded(util, "%"), 6), style or "bold"),
            (" ", ""),
            *_memory_bar(track.data, space, look),
            (align_right(format_rounded(share, "%"), 5), style),
        ]

    rows: list[Row] = []
    for row in range(half):
        left = fit_row(one(*tracks[row]), cell, look.glyphs.more)
        rows.append([*left, ("  ", ""), *(one(*tracks[row + half]) if row + half < len(tracks) else ())])
    return rows


def _throttle_and_missing_rows(
    tracks: Sequence[tuple[int, DeviceHistory]], width: int, look: TerminalStyle
) -> list[Row]:
    """What holds the clocks down, and why values are missing: at most a row each."""
    rows: list[Row] = []
    down: dict[str, list[str]] = {}
    for index, track in tracks:
        words = track.data.get("throttle")
        for word in words if isinstance(words, list) else ():
            down.setdefault(sanitize_line(word, 40), []).append(gpu_label(index, track.data))
    if down:
        text = "; ".join(f"{word}: {' '.join(who)}" for word, who in down.items())
        rows.append([("clocks held down ", "wait"), (truncate(text, max(width - 17, 1), look.glyphs.more), "")])
    why = missing_value_reasons([track.data for _, track in tracks], _SHOWN)
    if why:
        rows.append([(truncate(why, width, look.glyphs.more), "dim")])
    return rows


# ------------------------------------------------------------------------------------------------ the host


def render_host(facts: ScreenData, width: int, height: int, look: TerminalStyle, tall: bool = False) -> list[Row]:
    """The host's load and the run's part in one row or two, and their history where more of `height` rows are free.

    `tall`: at full size, also why there is no GPU.
    """
    track = facts.state.host
    data = track.data
    if not data:
        return [[("no sample yet", "dim")]]
    cpu, used, total = (number_member(data, key) for key in ("cpu_pct", "mem_used_bytes", "mem_total_bytes"))
    own, held = number_member(data, "run_cpu_pct"), number_member(data, "run_mem_bytes")
    load: Row = [(align_right(format_rounded(cpu, "%"), 6), "bold")]
    load.append((align_right(format_free_bytes(used, total), _FREE + 1), ""))
    of_run: Row = [("this run ", "dim")]
    if facts.is_over and own is None and held is None:
        of_run.append(("has ended", ""))
    else:
        of_run += [(align_right(UNKNOWN if own is None else f"{own / 100:.2f}", 5), ""), (" cores", "dim")]
        of_run += [(align_right(format_bytes(held), 10), "")]
    whole = [*load, ("  ", ""), *of_run]
    rows = [] if tall or width >= row_width(whole) + 9 + _LEAST_GRAPH else [of_run]
    whole = load if rows else whole
    axis = make_device_axis(facts)
    load_so_far = _history(track, track.util, axis, max(min(width - 9 - row_width(whole), 60), 6), look)
    rows = [[("host cpu ", "dim"), (load_so_far, "bar"), *whole], *rows]
    why = _why_no_gpu(data, width, look) if tall else []
    drawn = host_charts(track, width, min(height - len(rows) - len(why), _TALLEST), axis, look)
    return [*rows, *drawn, *why]


def _why_no_gpu(data: Mapping[str, Any], width: int, look: TerminalStyle) -> list[Row]:
    reason, text = data.get("gpu_absent"), missing_value_reasons([data])
    if isinstance(reason, str):
        absent = reason if reason.lower().startswith("no gpu") else f"no GPU: {reason}"
        text = f"{absent}; {text}" if text else absent
    return wrap_to_rows(sanitize_line(text, 600), width, max_rows=_MOST_REASONS, more=look.glyphs.more)
