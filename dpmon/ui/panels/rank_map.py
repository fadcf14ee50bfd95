"""A map of many ranks: one cell per rank shows how long it waits for the slowest; in rows of nodes, or of numbers.

Several nodes share a row where there is no room for one each. Where even that is too much, a cell stands for a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from dpmon.model.nodes import NodeFacts
from dpmon.model.stragglers import RankTimes, Straggler
from dpmon.stalls.verdict import in_ranges
from dpmon.text.cells import right, span_width
from dpmon.text.quantities import count_of
from dpmon.ui.facts import Facts
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, Span, fit, plain

MOST_ROWS = 64
_BLOCK = 8
"""Cells between two gaps."""
_NUMBER, _NAME = 4, 16
"""Cells for the number of a row's first rank, and most cells for the name of a node."""
_LITTLE = 0.1
"""Part of a step. A rank that waits for more than this is dimmed: it is not the one to look at."""
STYLES = {"slow": "wait", "connecting": "wait", "ended": "dim", "stopped": "dim"}
"""The styles of nodes whose records do not arrive as usual; of others it is bad."""
_IT = " for it"
_WAIT, _LEAST = f"tenths of the step spent waiting{_IT}", f"tenths of the step that every rank of a node waits{_IT}"


def rank_map(facts: Facts, ranks: Sequence[RankTimes], width: int, room: tuple[int, int], look: Look) -> list[Row]:
    """The map, and a row that explains it. `room`: rows for several nodes each, if they suffice, and most rows."""
    rows, what = by_number(ranks, facts.state.straggler, width, look), _WAIT
    if facts.state.nodes:
        rows, what = _by_node(facts, ranks, width, room, look)
    legend: Row = [(look.glyphs.focus, "found"), (" slowest  ", "dim"), ("0-9", "bold"), (f" {what}", "dim")]
    if facts.state.straggler is None:
        legend = [("0-9", "bold"), (f" {what.removesuffix(_IT)}", "dim")]
    return [*rows, fit(legend, width, look.glyphs.more)]


def by_number(ranks: Sequence[RankTimes], slow: Straggler | None, width: int, look: Look) -> list[Row]:
    """Rows of 32 ranks, or 16 if 32 do not fit; each starts with the number of its first rank.

    A rank without records is blank, and a row without any rank is omitted. Beyond MOST_ROWS rows, the last row
    counts the ranks that are not drawn.
    """
    each = 32 if width >= _NUMBER + 1 + 32 + 3 else 16
    by_rank = {one.process if one.rank is None else one.rank: one for one in ranks}
    begins = sorted({rank // each * each for rank in by_rank})
    drawn = begins if len(begins) <= MOST_ROWS else begins[: MOST_ROWS - 1]
    rows: list[Row] = []
    for first in drawn:
        known = [by_rank.get(rank) for rank in range(first, first + each)]
        blocks = _blocks([(" ", "") if one is None else _cell(one, slow, look) for one in known])
        rows += _rows([right(str(first), _NUMBER)], blocks, len(blocks))
    left_out = sum(rank >= drawn[-1] + each for rank in by_rank) if drawn else 0
    return [*rows, [(f"and {count_of(left_out, 'rank')} more", "dim")]] if left_out else rows


def _blocks(cells: Row) -> list[Row]:
    return [cells[at : at + _BLOCK] for at in range(0, len(cells), _BLOCK)]


def _rows(labels: Sequence[str], blocks: Sequence[Row], each: int) -> list[Row]:
    """Rows of `each` blocks; a row begins with the label of its first block."""
    return [
        [(labels[at], "dim"), *chain.from_iterable(((" ", ""), *cells) for cells in blocks[at : at + each])]
        for at in range(0, len(blocks), each)
    ]


def _cell(one: RankTimes | None, slow: Straggler | None, look: Look) -> Span:
    if one is not None and slow is not None and one.process in slow.processes:
        return (look.glyphs.focus, "found")
    share = None if one is None else one.wait_share
    if share is None:
        return ("?", "dim")
    return (str(min(int(share * 10), 9)), "" if share < _LITTLE else "dim")


# ------------------------------------------------------------------------------------------------ nodes


def _by_node(
    facts: Facts, ranks: Sequence[RankTimes], width: int, room: tuple[int, int], look: Look
) -> tuple[list[Row], str]:
    """Rows of nodes, and what a cell shows."""
    nodes, now_ns = facts.state.nodes, facts.elapsed_ns
    times = {one.process: one for one in ranks}
    members = [_members(node, facts) for node in nodes]
    label = min(max(span_width(node.name) for node in nodes), _NAME)
    names = [plain(fit([(node.name, "")], label, look.glyphs.more)) for node in nodes]
    size = max(max(map(len, members)), 1)
    usual, most = (max(rows, 1) for rows in room)
    fitting = max((width - label) // (size + 1), 1)
    each = 1 if len(nodes) <= most else min(-(-len(nodes) // usual), fitting)
    if -(-len(nodes) // each) > most and facts.view.zoom is None:
        cells = [_of_node(node, own, times, facts, look) for node, own in zip(nodes, members, strict=True)]
        return _rows(names[::_BLOCK], _blocks(cells), max((width - label) // (_BLOCK + 1), 1)), _LEAST
    blocks: list[Row] = []
    for node, own in zip(nodes, members, strict=True):
        trouble = node.trouble(now_ns)
        cells = [_chosen(_cell(times.get(own[number]), facts.state.straggler, look), own[number], facts)
                 for number in sorted(own)]  # fmt: skip
        if each > 1 and trouble is not None and trouble.word != "ended":
            cells = [(trouble.brief(now_ns, size), STYLES.get(trouble.word, "bad"))]
        blocks.append(fit(cells, size))
    rows = _rows(names, blocks, each)
    for row, node, own in zip(rows, nodes, members, strict=True) if each == 1 else ():
        row.append((f"  {in_ranges(sorted(own), ',', 2)}", "dim"))
        if (trouble := node.trouble(now_ns)) is not None:
            row.append((f"  {trouble.words(now_ns)}", STYLES.get(trouble.word, "bad")))
    return rows, _WAIT


def _members(node: NodeFacts, facts: Facts) -> dict[int, int]:
    """The newest process of each rank of a node, by the rank's number."""
    processes = facts.state.processes
    return {processes[each].number: each for each in node.processes if each in processes}


def _chosen(cell: Span, process: int, facts: Facts) -> Span:
    return (cell[0], "key") if process == facts.view.process else cell


def _of_node(node: NodeFacts, own: Mapping[int, int], times: Mapping[int, RankTimes], facts: Facts, look: Look) -> Span:
    """A cell for a whole node: the rank that waits least, or the first letter of its trouble."""
    trouble = node.trouble(facts.elapsed_ns)
    if trouble is not None:
        return (trouble.word[0], STYLES.get(trouble.word, "bad"))
    known = [times[each] for each in own.values() if each in times]
    least = min(known, key=lambda one: one.wait_share or 0.0, default=None)
    cell = _cell(least, facts.state.straggler, look)
    return (cell[0], "key") if facts.view.process in own.values() else cell
