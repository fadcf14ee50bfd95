"""Ranks over time: a row for each rank, a cell for each part of the time axis: how long the others waited for it."""

from __future__ import annotations

from itertools import pairwise

from dpmon.text.cells import cut, right
from dpmon.text.quantities import percent
from dpmon.ui.facts import Facts
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, merged
from dpmon.ui.time_axis import axis_of, pictured, row_below, stalls_of

_LABEL, _SHARE = 9, 7
_LEAST = 10
"""Fewest cells for the time."""
_LITTLE, _MUCH = 0.1, 0.3
"""Parts of a step: below the first, the others hardly wait; above the second, the cell is highlighted."""


def over_time(facts: Facts, width: int, look: Look) -> list[Row]:
    """A heading with a legend, a row for each rank, and the time axis; empty if the waits are not known."""
    found, process = facts.state.rank_waits, facts.process
    room = width - _LABEL - _SHARE
    if found is None or process is None or not any(found.shares.values()) or room < _LEAST:
        return []
    axis = axis_of(facts, found.width_s)
    places, slow = axis.places(room), facts.state.straggler
    tenths = "tenths of a step that the others waited for this rank"
    head: Row = [("over time", "title"), (cut(f"   1-9: {tenths}", width - 16, look.glyphs.more), "dim")]
    rows: list[Row] = [[*head, (right("mean", width - sum(len(text) for text, _ in head)), "dim")]]
    for rank, shares in sorted(found.shares.items()):
        parts: list[list[float]] = [[] for _ in range(places)]
        for second, share in shares.items():
            if 0 <= (place := axis.place(second, places)) < places:
                parts[place].append(share)
        cells = [_cell(part, look) for part in parts]
        edges = [place * room // places for place in range(places + 1)]
        lengths = [end - at for at, end in pairwise(edges)]
        spans = merged((sign * length, style) for (sign, style), length in zip(cells, lengths, strict=True))
        marked = slow is not None and rank in slow.ranks
        every = [share for part in parts for share in part]
        mark = look.glyphs.focus if marked else " "
        mean = percent(sum(every) / len(every)) if every else ""
        label: Row = [(mark, "wait"), (right(str(rank), _LABEL - 2) + " ", "wait" if marked else "bold")]
        rows.append([*label, *spans, (right(mean, _SHARE), "bold" if marked else "dim")])
    return [*rows, row_below(facts, axis, pictured(process, axis, room, stalls_of(facts)), _LABEL, room, look)]


def _cell(shares: list[float], look: Look) -> tuple[str, str]:
    """The mean of the shares in a cell: blank if unknown, a dot if it rounds to 0."""
    if not shares:
        return " ", ""
    share = sum(shares) / len(shares)
    tenths = min(round(share * 10), 9)
    style = "dim" if share < _LITTLE else "wait" if share < _MUCH else "bad"
    return (str(tenths), style) if tenths else ("." if look.glyphs.ascii else look.glyphs.middot, "dim")
