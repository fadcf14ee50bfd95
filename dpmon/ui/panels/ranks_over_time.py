"""Ranks over time: a row for each rank, a cell for each part of the time axis: how long the others waited for it."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import format_percent
from dpmon.ui.panels.rank_map import DELAY, delay_sign
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, merge_spans, row_width
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import axis_below_chart, build_chart_columns, make_time_axis, stall_intervals

_LABEL, _SHARE = 9, 7
_LEAST = 10
"""Fewest cells for the time."""


def over_time(facts: ScreenData, width: int, height: int, look: TerminalStyle, *, headed: bool = True) -> list[Row]:
    """A heading with a legend, a row for each rank, and the time axis; empty if the waits are not known.

    If there is no room for all ranks in `height` rows, only those that the others wait for, or none.
    """
    found, process, slow = facts.state.rank_waits, facts.process, facts.state.straggler
    room = width - _LABEL - _SHARE
    if found is None or process is None or not any(found.shares.values()) or room < _LEAST:
        return []
    ranks = sorted(found.shares)
    if len(ranks) + 1 + headed > height:
        ranks = _slow(facts)[: max(height - 1 - headed, 0)]
    if not ranks:
        return []
    axis = make_time_axis(facts, found.width_s)
    places, shown = axis.part_count(room), f"   1-9 {DELAY}"
    head: Row = [("over time", "title"), (truncate(shown, width - 16, look.glyphs.more), "dim")]
    rows: list[Row] = [[*head, (align_right("mean", width - row_width(head)), "dim")]] if headed else []
    for rank in ranks:
        shares = found.shares[rank]
        parts: list[list[float]] = [[] for _ in range(places)]
        for second, share in shares.items():
            if 0 <= (place := axis.part_at(second, places)) < places:
                parts[place].append(share)
        cells = [delay_sign(fmean(part), look) if part else (" ", "") for part in parts]
        edges = [place * room // places for place in range(places + 1)]
        lengths = [end - at for at, end in pairwise(edges)]
        spans = merge_spans((sign * length, style) for (sign, style), length in zip(cells, lengths, strict=True))
        marked = slow is not None and rank in slow.ranks
        every = [share for part in parts for share in part]
        mark = look.glyphs.focus if marked else " "
        mean = format_percent(sum(every) / len(every)) if every else ""
        label: Row = [(mark, "wait"), (align_right(str(rank), _LABEL - 2) + " ", "wait" if marked else "bold")]
        rows.append([*label, *spans, (align_right(mean, _SHARE), "bold" if marked else "dim")])
    return [
        *rows,
        axis_below_chart(
            facts, axis, build_chart_columns(process, axis, room, stall_intervals(facts)), _LABEL, room, look
        ),
    ]


def slow_rows(facts: ScreenData) -> int:
    """Rows for the ranks that the others wait for and the time axis; 0 if there are none."""
    count = len(_slow(facts))
    return count + 1 if count else 0


def _slow(facts: ScreenData) -> list[int]:
    """The ranks with known waits that the others wait for."""
    slow, found = facts.state.straggler, facts.state.rank_waits
    return [] if slow is None or found is None else [rank for rank in slow.ranks if found.shares.get(rank)]
