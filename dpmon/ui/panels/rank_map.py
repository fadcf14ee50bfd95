"""A map of many ranks, in rows by node or by rank: the cell of a rank shows how long the others waited for it.

Several nodes share a row if there is no room for a row each. If even that does not fit, each cell is a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain

from dpmon.model.nodes import SILENT, NodeStatus
from dpmon.model.stragglers import RankTimes, Straggler, delay_shares
from dpmon.stalls.stall_detection import format_ranges
from dpmon.text.cells import align_right, span_width
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, Span, fit_row, merge_spans, plain_text
from dpmon.ui.terminal_style import TerminalStyle

_BLOCK_CELLS = 8
"""Cells between two gaps."""
_NUMBER_CELLS, _MAX_NAME_CELLS = 4, 16
"""Cells for the number of a row's first rank, and most cells for the name of a node."""
_LOW_SHARE, _HIGH_SHARE = 0.1, 0.3
"""Shares of a step: below the first, the others hardly wait; from the second on, the cell is highlighted."""
PROBLEM_STYLES = {"slow": "wait", "connecting": "wait", "ended": "dim", "stopped": "dim"}
"""The style of a node by its problem; "bad" for other problems."""
DELAY_TEXT = "tenths of a step that the others waited for it"


def delay_sign(share: float | None, style: TerminalStyle) -> Span:
    """Return a cell for the share of a step that the others waited for a rank: tenths, a dot for 0, "?" if unknown."""
    if share is None:
        return ("?", "dim")
    tenths = min(round(share * 10), 9)
    if not tenths:
        return ("." if style.is_ascii else "·", "dim")
    if share < _LOW_SHARE:
        return (str(tenths), "dim")
    return (str(tenths), "wait" if share < _HIGH_SHARE else "bad")


def rank_map(
    screen: ScreenData, ranks: Sequence[RankTimes], width: int, row_limits: tuple[int, int], style: TerminalStyle
) -> list[Row]:
    """Return the map and a legend. `row_limits`: usual rows if nodes share rows, and most rows."""
    if screen.state.nodes:
        rows = _rows_by_node(screen, ranks, width, row_limits, style)
    else:
        rows = rows_by_rank(ranks, screen.state.straggler, width, style)
    legend: Row = [("1-9", "bold"), (f" {DELAY_TEXT}", "dim")]
    if screen.view.process_index is not None and screen.state.nodes:
        legend = [("○", "key"), (" chosen  ", "dim"), *legend]
    if screen.state.straggler is not None:
        legend = [("▸", "found"), (" slowest  ", "dim"), *legend]
    return [*rows, fit_row(legend, width)]


def _rank_cells(
    ranks: Sequence[RankTimes], shares: Mapping[int, float], straggler: Straggler | None, style: TerminalStyle
) -> dict[int, Span]:
    """Return the cell of each rank by its process index."""
    no_delay, unknown = delay_sign(0.0, style), delay_sign(None, style)
    cells = {rank.process: no_delay if rank.wait_ns is not None and rank.step_ns else unknown for rank in ranks}
    cells |= {process: delay_sign(share, style) for process, share in shares.items()}
    return cells | dict.fromkeys(straggler.processes if straggler is not None else (), ("▸", "found"))


def rows_by_rank(
    ranks: Sequence[RankTimes], straggler: Straggler | None, width: int, style: TerminalStyle
) -> list[Row]:
    """Return rows of 32 ranks, or 16 if 32 do not fit; each starts with the number of its first rank.

    A rank without records is blank, and a row without any rank is omitted.
    """
    ranks_per_row = 32 if width >= _NUMBER_CELLS + 1 + 32 + 3 else 16
    cells = _rank_cells(ranks, delay_shares(ranks), straggler, style)
    by_rank = {times.process if times.rank is None else times.rank: cells[times.process] for times in ranks}
    rows: list[Row] = []
    for first in sorted({rank // ranks_per_row * ranks_per_row for rank in by_rank}):
        blocks = _split_into_blocks([by_rank.get(rank, (" ", "")) for rank in range(first, first + ranks_per_row)])
        rows += _labeled_rows([align_right(str(first), _NUMBER_CELLS)], blocks, len(blocks))
    return rows


def _split_into_blocks(cells: Row) -> list[Row]:
    return [merge_spans(cells[start : start + _BLOCK_CELLS]) for start in range(0, len(cells), _BLOCK_CELLS)]


def _labeled_rows(labels: Sequence[str], blocks: Sequence[Row], blocks_per_row: int) -> list[Row]:
    """Return rows of `blocks_per_row` blocks; each row begins with its label."""
    rows: list[Row] = []
    for index, label in enumerate(labels):
        row_blocks = blocks[index * blocks_per_row : (index + 1) * blocks_per_row]
        rows.append([(label, "dim"), *chain.from_iterable(((" ", ""), *block) for block in row_blocks)])
    return rows


@lru_cache(4096)
def _fit_block(cells: tuple[Span, ...], width: int) -> Row:
    """Return cells fitted to `width`; cached, because most ranks look alike and rarely change."""
    return merge_spans(fit_row(cells, width))


# ------------------------------------------------------------------------------------------------ nodes


def _rows_by_node(
    screen: ScreenData, ranks: Sequence[RankTimes], width: int, row_limits: tuple[int, int], style: TerminalStyle
) -> list[Row]:
    nodes, now_ns = screen.state.nodes, screen.elapsed_ns
    communication, chosen_process = screen.state.communication, screen.view.process_index
    delays = {} if communication is None else communication.delays
    rank_cells = _rank_cells(ranks, delays, screen.state.straggler, style)
    if chosen_process is not None:
        mark = "▸" if _is_slow(chosen_process, screen) else "○"
        rank_cells[chosen_process] = (mark, "key")
    ranks_by_node = screen.state.processes_by_node
    label_width = min(max(span_width(node.name) for node in nodes), _MAX_NAME_CELLS)
    node_width = max(max(map(len, ranks_by_node)), 1)
    usual_rows, max_rows = (max(rows, 1) for rows in row_limits)
    max_per_row = max((width - label_width) // (node_width + 1), 1)
    nodes_per_row = 1 if len(nodes) <= max_rows else min(-(-len(nodes) // usual_rows), max_per_row)
    nodes_per_row = -(-len(nodes) // -(-len(nodes) // nodes_per_row))  # rows of equal length
    if -(-len(nodes) // nodes_per_row) > max_rows and screen.view.zoom is None:
        nodes_and_ranks = zip(nodes, ranks_by_node, strict=True)
        cells = [_node_cell(node, node_ranks, rank_cells, now_ns) for node, node_ranks in nodes_and_ranks]
        nodes_per_row = max((width - label_width) // (_BLOCK_CELLS + 1), 1)
        labels = _node_labels(nodes[:: _BLOCK_CELLS * nodes_per_row], label_width)
        return _labeled_rows(labels, _split_into_blocks(cells), nodes_per_row)
    blocks, unknown = list[Row](), delay_sign(None, style)
    for node, node_ranks in zip(nodes, ranks_by_node, strict=True):
        problem = node.problem_at(now_ns)
        cells = [rank_cells.get(process, unknown) for process in node_ranks.values()]
        if problem is not None and problem.word in SILENT:
            cells = [(text, cell_style) if cell_style in ("found", "key") else unknown for text, cell_style in cells]
        if nodes_per_row > 1 and problem is not None and problem.word != "ended":
            cells = [(problem.brief(now_ns, node_width), PROBLEM_STYLES.get(problem.word, "bad"))]
        blocks.append(_fit_block(tuple(cells), node_width))
    rows = _labeled_rows(_node_labels(nodes[::nodes_per_row], label_width), blocks, nodes_per_row)
    for row, node, node_ranks in zip(rows, nodes, ranks_by_node, strict=True) if nodes_per_row == 1 else ():
        row.append((f"  {format_ranges(node_ranks, ',', 2)}", "dim"))
        if (problem := node.problem_at(now_ns)) is not None:
            row.append((f"  {problem.words(now_ns)}", PROBLEM_STYLES.get(problem.word, "bad")))
    return rows


def _node_labels(nodes: Sequence[NodeStatus], width: int) -> list[str]:
    return [plain_text(fit_row([(node.name, "")], width)) for node in nodes]


def _node_cell(node: NodeStatus, ranks: Mapping[int, int], rank_cells: Mapping[int, Span], now_ns: int) -> Span:
    """Return a cell for a node: that of the rank that the others waited for longest, or the letter of its problem."""
    problem = node.problem_at(now_ns)
    if problem is not None:
        return (problem.word[:1], PROBLEM_STYLES.get(problem.word, "bad"))
    cells = (rank_cells[process] for process in ranks.values() if process in rank_cells)
    return max(cells, key=_importance, default=("?", "dim"))


def _is_slow(process: int, screen: ScreenData) -> bool:
    return screen.state.straggler is not None and process in screen.state.straggler.processes


def _importance(cell: Span) -> tuple[bool, bool, str]:
    """Return a sort key: slow or chosen ranks come last, after digits."""
    text, text_style = cell
    return text_style in ("found", "key"), text.isdigit(), text
