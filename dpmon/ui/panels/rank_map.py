"""A map of many ranks, in rows of nodes or of numbers: a cell per rank shows how long the others waited for it.

Several nodes share a row where there is no room for one each. Where even that is too much, a cell stands for a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain

from dpmon.model.nodes import SILENT, NodeStatus
from dpmon.model.stragglers import RankTimes, Straggler, delay_shares
from dpmon.stalls.stall_detection import format_ranges
from dpmon.text.cells import align_right, span_width
from dpmon.text.formatting import format_count_with_noun
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, Span, fit_row, merge_spans, plain_text
from dpmon.ui.terminal_style import TerminalStyle

MOST_ROWS = 64
_BLOCK = 8
"""Cells between two gaps."""
_NUMBER, _NAME = 4, 16
"""Cells for the number of a row's first rank, and most cells for the name of a node."""
_LITTLE, _MUCH = 0.1, 0.3
"""Parts of a step: below the first, the others hardly wait; above the second, the cell is highlighted."""
STYLES = {"slow": "wait", "connecting": "wait", "ended": "dim", "stopped": "dim"}
"""The styles of nodes in trouble, by the word for it; else bad."""
DELAY = "tenths of a step that the others waited for it"


def delay_sign(share: float | None, look: TerminalStyle) -> Span:
    """How long the others waited for a rank, as a share of its step: tenths, or a dot for 0; "?" if unknown."""
    if share is None:
        return ("?", "dim")
    tenths = min(round(share * 10), 9)
    style = "dim" if share < _LITTLE else "wait" if share < _MUCH else "bad"
    return (str(tenths), style) if tenths else ("." if look.glyphs.ascii else look.glyphs.middot, "dim")


def rank_map(
    facts: ScreenData, ranks: Sequence[RankTimes], width: int, room: tuple[int, int], look: TerminalStyle
) -> list[Row]:
    """The map, and a row that explains it. `room`: usual rows if nodes share rows, and most rows."""
    if facts.state.nodes:
        rows = _rows_by_node(facts, ranks, width, room, look)
    else:
        rows = rows_by_rank(ranks, facts.state.straggler, width, look)
    legend: Row = [("1-9", "bold"), (f" {DELAY}", "dim")]
    if facts.view.process_index is not None and facts.state.nodes:
        legend = [(look.glyphs.ring, "key"), (" chosen  ", "dim"), *legend]
    if facts.state.straggler is not None:
        legend = [(look.glyphs.focus, "found"), (" slowest  ", "dim"), *legend]
    return [*rows, fit_row(legend, width, look.glyphs.more)]


def _rank_cells(
    ranks: Sequence[RankTimes], shares: Mapping[int, float], slow: Straggler | None, look: TerminalStyle
) -> dict[int, Span]:
    """The cells by process."""
    usual, unknown = delay_sign(0.0, look), delay_sign(None, look)
    signs = {one.process: usual if one.wait_ns is not None and one.step_ns else unknown for one in ranks}
    signs |= {process: delay_sign(share, look) for process, share in shares.items()}
    return signs | dict.fromkeys(slow.processes if slow is not None else (), (look.glyphs.focus, "found"))


def rows_by_rank(ranks: Sequence[RankTimes], slow: Straggler | None, width: int, look: TerminalStyle) -> list[Row]:
    """Rows of 32 ranks, or 16 if 32 do not fit; each starts with the number of its first rank.

    A rank without records is blank, and a row without any rank is omitted. Beyond MOST_ROWS rows, the last row
    counts the ranks that are not drawn.
    """
    each = 32 if width >= _NUMBER + 1 + 32 + 3 else 16
    signs = _rank_cells(ranks, delay_shares(ranks), slow, look)
    by_rank = {one.process if one.rank is None else one.rank: signs[one.process] for one in ranks}
    begins = sorted({rank // each * each for rank in by_rank})
    drawn = begins if len(begins) <= MOST_ROWS else begins[: MOST_ROWS - 1]
    rows: list[Row] = []
    for first in drawn:
        blocks = _blocks([by_rank.get(rank, (" ", "")) for rank in range(first, first + each)])
        rows += _rows([align_right(str(first), _NUMBER)], blocks, len(blocks))
    left_out = sum(rank >= drawn[-1] + each for rank in by_rank) if drawn else 0
    return [*rows, [(f"and {format_count_with_noun(left_out, 'rank')} more", "dim")]] if left_out else rows


def _blocks(cells: Row) -> list[Row]:
    return [merge_spans(cells[at : at + _BLOCK]) for at in range(0, len(cells), _BLOCK)]


def _rows(labels: Sequence[str], blocks: Sequence[Row], each: int) -> list[Row]:
    """Rows of `each` blocks; each row begins with its label."""
    return [
        [(label, "dim"), *chain.from_iterable(((" ", ""), *block) for block in blocks[at * each : (at + 1) * each])]
        for at, label in enumerate(labels)
    ]


@lru_cache(4096)
def _block(cells: tuple[Span, ...], width: int) -> Row:
    """Cells as a part of a row; cached, because most ranks look alike and seldom change."""
    return merge_spans(fit_row(cells, width))


# ------------------------------------------------------------------------------------------------ nodes


def _rows_by_node(
    facts: ScreenData, ranks: Sequence[RankTimes], width: int, room: tuple[int, int], look: TerminalStyle
) -> list[Row]:
    nodes, now_ns = facts.state.nodes, facts.elapsed_ns
    traffic, chosen = facts.state.communication, facts.view.process_index
    signs = _rank_cells(ranks, {} if traffic is None else traffic.delays, facts.state.straggler, look)
    if chosen is not None:
        signs[chosen] = (signs[chosen][0] if _is_slow(chosen, facts) else look.glyphs.ring, "key")
    members = facts.state.processes_by_node
    label = min(max(span_width(node.name) for node in nodes), _NAME)
    size = max(max(map(len, members)), 1)
    usual, most = (max(rows, 1) for rows in room)
    fitting = max((width - label) // (size + 1), 1)
    each = 1 if len(nodes) <= most else min(-(-len(nodes) // usual), fitting)
    each = -(-len(nodes) // -(-len(nodes) // each))  # rows of equal length
    if -(-len(nodes) // each) > most and facts.view.zoom is None:
        cells = [_node_cell(node, own, signs, now_ns) for node, own in zip(nodes, members, strict=True)]
        each = max((width - label) // (_BLOCK + 1), 1)
        return _rows(_labels(nodes[:: _BLOCK * each], label, look), _blocks(cells), each)
    blocks, unknown = list[Row](), delay_sign(None, look)
    for node, own in zip(nodes, members, strict=True):
        trouble = node.problem_at(now_ns)
        cells = [signs.get(process, unknown) for process in own.values()]
        if trouble is not None and trouble.word in SILENT:
            cells = [cell if cell[1] in ("found", "key") else unknown for cell in cells]
        if each > 1 and trouble is not None and trouble.word != "ended":
            cells = [(trouble.brief(now_ns, size), STYLES.get(trouble.word, "bad"))]
        blocks.append(_block(tuple(cells), size))
    rows = _rows(_labels(nodes[::each], label, look), blocks, each)
    for row, node, own in zip(rows, nodes, members, strict=True) if each == 1 else ():
        row.append((f"  {format_ranges(own, ',', 2)}", "dim"))
        if (trouble := node.problem_at(now_ns)) is not None:
            row.append((f"  {trouble.words(now_ns)}", STYLES.get(trouble.word, "bad")))
    return rows


def _labels(nodes: Sequence[NodeStatus], width: int, look: TerminalStyle) -> list[str]:
    return [plain_text(fit_row([(node.name, "")], width, look.glyphs.more)) for node in nodes]


def _node_cell(node: NodeStatus, own: Mapping[int, int], signs: Mapping[int, Span], now_ns: int) -> Span:
    """A cell for a whole node: that of the rank that the others waited for longest, or the letter of its trouble."""
    trouble = node.problem_at(now_ns)
    if trouble is not None:
        return (trouble.word[0], STYLES.get(trouble.word, "bad"))
    return max((signs[each] for each in own.values() if each in signs), key=_importance, default=("?", "dim"))


def _is_slow(process: int, facts: ScreenData) -> bool:
    return facts.state.straggler is not None and process in facts.state.straggler.processes


def _importance(sign: Span) -> tuple[bool, bool, str]:
    """Signs of slow or chosen ranks come last, after digits."""
    text, style = sign
    return style in ("found", "key"), text.isdigit(), text
