"""A map of many ranks: one cell per rank shows the part of its step spent waiting for the slowest one."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.model.stragglers import RankTimes, Straggler
from dpmon.text.cells import right
from dpmon.text.quantities import count_of
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, fit

_GROUP = 8
"""Cells between two gaps."""
_LABEL = 5
MOST_ROWS = 64
_LITTLE, _MUCH = 0.1, 0.3
"""Parts of a step. A rank below the first (it hardly waits) is dimmed; a rank above the second is highlighted."""


def rank_map(ranks: Sequence[RankTimes], slow: Straggler | None, width: int, look: Look) -> list[Row]:
    """Rows of 32 ranks, or 16 if 32 do not fit; each starts with the number of its first rank.

    A rank without records is blank, and a row without any rank is omitted. Beyond MOST_ROWS rows, the last row
    counts the ranks that are not drawn.
    """
    each = 32 if width >= _LABEL + 32 + 3 else 16
    by_rank = {one.process if one.rank is None else one.rank: one for one in ranks}
    begins = sorted({rank // each * each for rank in by_rank})
    drawn = begins if len(begins) <= MOST_ROWS else begins[: MOST_ROWS - 1]
    rows: list[Row] = []
    for first in drawn:
        row: Row = [(right(str(first), _LABEL - 1) + " ", "dim")]
        for rank in range(first, first + each):
            if rank > first and rank % _GROUP == 0:
                row.append((" ", ""))
            row.append(_cell(by_rank.get(rank), slow, look))
        rows.append(row)
    left_out = sum(rank >= drawn[-1] + each for rank in by_rank) if drawn else 0
    return [*rows, [(f"and {count_of(left_out, 'rank')} more", "dim")]] if left_out else rows


def _cell(one: RankTimes | None, slow: Straggler | None, look: Look) -> tuple[str, str]:
    if one is None:
        return (" ", "")
    if slow is not None and one.process in slow.processes:
        return (look.glyphs.focus, "found")
    share = one.wait_share
    if share is None:
        return ("?", "dim")
    style = "dim" if share < _LITTLE else "wait" if share < _MUCH else "bad"
    return (str(min(int(share * 10), 9)), style)


def legend(width: int, look: Look) -> Row:
    """The meaning of the cells."""
    tenths = "tenths of the step spent waiting for it"
    return fit([(look.glyphs.focus, "found"), (" slowest  ", "dim"), ("0-9", "bold"), (f" {tenths}", "dim")], width)
