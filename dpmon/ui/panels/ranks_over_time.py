"""Ranks over time: a row per rank, in which the cells along the time axis show how long the others waited for it."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import format_percent
from dpmon.ui.panels.rank_map import DELAY_TEXT, delay_sign
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, merge_spans, row_width
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import axis_below_chart, build_chart_columns, make_time_axis, stall_intervals

_LABEL_CELLS, _SHARE_CELLS = 9, 7
_MIN_CHART_CELLS = 10
"""Fewest cells for the time axis."""


def render_over_time(
    screen: ScreenData, width: int, height: int, style: TerminalStyle, *, with_heading: bool = True
) -> list[Row]:
    """Return a heading with a legend, a row per rank, and the time axis; empty if the waits are not known.

    If not all ranks fit in `height` rows, show only stragglers, or nothing.
    """
    chart_width = width - _LABEL_CELLS - _SHARE_CELLS
    if chart_width < _MIN_CHART_CELLS or height < 2 + with_heading:
        return []
    waits, process, straggler = screen.state.rank_waits, screen.process, screen.state.straggler
    if waits is None or process is None or not any(waits.shares.values()):
        return []
    ranks = sorted(waits.shares)
    if len(ranks) + 1 + with_heading > height:
        ranks = _slow_ranks(screen)[: max(height - 1 - with_heading, 0)]
    if not ranks:
        return []
    axis = make_time_axis(screen, waits.width_s)
    part_count, legend = axis.part_count(chart_width), f"   1-9 {DELAY_TEXT}"
    head: Row = [("over time", "title"), (truncate(legend, width - 16), "dim")]
    rows: list[Row] = [[*head, (align_right("mean", width - row_width(head)), "dim")]] if with_heading else []
    for rank in ranks:
        shares = waits.shares[rank]
        parts: list[list[float]] = [[] for _ in range(part_count)]
        for second, share in shares.items():
            if 0 <= (part_index := axis.part_at(second, part_count)) < part_count:
                parts[part_index].append(share)
        cells = [delay_sign(fmean(part), style) if part else (" ", "") for part in parts]
        edges = [part_index * chart_width // part_count for part_index in range(part_count + 1)]
        lengths = [end - start for start, end in pairwise(edges)]
        spans = merge_spans(
            (sign * length, text_style) for (sign, text_style), length in zip(cells, lengths, strict=True)
        )
        is_slow = straggler is not None and rank in straggler.ranks
        all_shares = [share for part in parts for share in part]
        mark = "▸" if is_slow else " "
        mean = format_percent(sum(all_shares) / len(all_shares)) if all_shares else ""
        label: Row = [(mark, "wait"), (align_right(str(rank), _LABEL_CELLS - 2) + " ", "wait" if is_slow else "bold")]
        rows.append([*label, *spans, (align_right(mean, _SHARE_CELLS), "bold" if is_slow else "dim")])
    chart = build_chart_columns(process, axis, chart_width, stall_intervals(screen))
    return [*rows, axis_below_chart(screen, axis, chart, _LABEL_CELLS, chart_width)]


def over_time_height(screen: ScreenData) -> int:
    """Return the number of rows for the stragglers and the time axis; 0 without stragglers."""
    count = len(_slow_ranks(screen))
    return count + 1 if count else 0


def _slow_ranks(screen: ScreenData) -> list[int]:
    """Return the stragglers with known waits."""
    straggler, waits = screen.state.straggler, screen.state.rank_waits
    return [] if straggler is None or waits is None else [rank for rank in straggler.ranks if waits.shares.get(rank)]
