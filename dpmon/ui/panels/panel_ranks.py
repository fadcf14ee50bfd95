"""Panel 2 of a run of several processes: one row per rank with the parts of its step, and who delays the others.

Many ranks, or ranks on several nodes, are drawn as a map with a cell per rank, and the slowest ranks below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from dpmon.model.communication import Communication
from dpmon.model.nodes import SILENT
from dpmon.model.run_snapshot import MAX_LEAST_WAITING, MAX_LISTED_RANKS, CallTimings, Process
from dpmon.model.stragglers import MIN_STEPS, RankTimes, Straggler, short_sentence, straggler_sentence
from dpmon.record.shared_names import node_suffix
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, span_width
from dpmon.text.formatting import UNKNOWN, format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import busy_bar, busy_legend
from dpmon.ui.panels.panel_replicas import evaluation_mark, every_size, name_of, shown_call, size_text
from dpmon.ui.panels.panel_status import reports_straggler
from dpmon.ui.panels.rank_map import rank_map
from dpmon.ui.panels.ranks_over_time import over_time, slow_rows
from dpmon.ui.screen_data import RANK_NAMES, ScreenData, format_devices
from dpmon.ui.styled_rows import Row, TableColumn, row_width, table_rows, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_LABEL = 6
"""Cells of the mark and the rank."""
_LEAST_BAR, _MOST_BAR = 6, 24
_SIZES = "  received returned rows"
_NAMES = ("data", "forward", "backward", "exposed", "wait")
_SHORT = ("data", "forw", "back", "expos", "wait")
_NODE, _EACH = 12, 16
"""About the most cells beside the nodes of a map; and ranks in a row of a map without nodes."""
_FEW_ROWS = 15
"""Few ranks of several nodes are shown over time on any screen: their panel needs at most this many rows."""
_MOST_NODE = 12
"""Most cells of the name of a node in the table."""
_LEAST_WORST, _LEAST_TABLE, _TIME = 2, 5, 2
"""Fewest rows of the table below a map of nodes, and above ranks over time; rows of one rank over time and the axis."""


class _Rank(NamedTuple):
    """A rank with its chosen or newest call and its times."""

    process: Process
    track: CallTimings | None
    times: RankTimes


def is_shown(facts: ScreenData) -> bool:
    """Whether several processes train side by side, none of them over replicas of its own; or on several nodes."""
    processes = facts.state.training_processes
    if facts.state.nodes or len(processes) < 2:
        return bool(facts.state.nodes)
    track = shown_call(facts)
    return track is None or len(track.last.replicas) <= 1


def _rows(facts: ScreenData, room: int) -> list[tuple[Process, CallTimings | None]]:
    """At most `room` processes, each with its chosen or newest call."""
    return _with_calls(facts, facts.state.training_processes[: max(room, 1)])


def _with_calls(facts: ScreenData, processes: Iterable[Process]) -> list[tuple[Process, CallTimings | None]]:
    track = shown_call(facts)
    key = (track.last.root, track.last.via) if track is not None else ("", None)
    return [(process, process.calls.get(key, process.last_called_root)) for process in processes]


def _known_communication(facts: ScreenData) -> Communication | None:
    """The communication of the ranks, if their waits are known."""
    found = facts.state.communication
    return found if found is not None and found.ranks_with_waits else None


def shows_map(facts: ScreenData) -> bool:
    """Whether a map is drawn: of nodes, or of ranks that are too many for one row each."""
    return bool(facts.state.nodes) or (
        is_shown(facts) and _known_communication(facts) is not None and _shows_slowest_only(facts)
    )


def _shows_slowest_only(facts: ScreenData) -> bool:
    """Whether the table has only the slowest ranks."""
    return bool(facts.state.nodes) or len(facts.state.training_processes) > MAX_LISTED_RANKS


def preferred_height(facts: ScreenData, room: int = 0) -> int:
    """Rows that the whole content needs; with the ranks over time, if that is at most `room`."""
    count = len(facts.state.training_processes)
    found = _known_communication(facts)
    nodes = len(facts.state.nodes)
    room = max(room, _FEW_ROWS) if nodes else room
    if found is None:
        return nodes + count + 3
    note_rows = 1  # always reserved, so that the panels keep their places
    if _shows_slowest_only(facts):
        rows = _max_table_rows(facts) + 2 + (nodes or 2) + note_rows
        over = count + 1 if count <= MAX_LISTED_RANKS else 2
    else:
        rows, over = count + note_rows, count + 2
    return rows + over if rows + over <= room else rows


def _max_table_rows(facts: ScreenData) -> int:
    """Most rows of the table: all ranks if they are few, else the slowest ones."""
    count = len(facts.state.training_processes)
    return count if count <= MAX_LISTED_RANKS else MAX_LEAST_WAITING


def shows_time(facts: ScreenData, width: int, height: int) -> bool:
    """Whether a map leaves room in the panel for the slow ranks over time, with their axis."""
    if not shows_map(facts) or _known_communication(facts) is None:
        return False
    nodes, each = len(facts.state.nodes), max(len(facts.state.training_processes) // max(len(facts.state.nodes), 1), 1)
    rows = -(-nodes // max((width - _NODE) // (each + 1), 1)) or len(facts.state.training_processes) // _EACH + 1
    return height >= rows + 2 + _LEAST_TABLE + _TIME


def panel_title(facts: ScreenData, look: TerminalStyle) -> tuple[Row, Row]:
    """The panel's title, and its main number."""
    processes = facts.state.training_processes
    track = shown_call(facts)
    what: Row = []
    if track is not None:
        what = [*evaluation_mark(track.last, look), (name_of(track.last, f" {look.glyphs.middot} "), "")]
    corner: Row = [("step", "dim"), (align_right(format_count(facts.state.step), 9), "")]
    where = f" on {format_count_with_noun(len(facts.state.nodes), 'node')}" if facts.state.nodes else ""
    where = f" on {processes[0].node}" if facts.view.node_number is not None and processes else where
    return [(RANK_NAMES["replicas"] + where, "title"), *what], corner


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel's rows, inside its frame.

    Rows that do not fit come last, below the lines about all ranks. A tall panel ends with the ranks over time.
    """
    found, above = _known_communication(facts), list[Row]()
    timed = facts.view.zoom is None and shows_time(facts, width, height)
    room = height - slow_rows(facts) if timed else height
    if shows_map(facts):
        most, left = _max_table_rows(facts), room - 3  # without the heads, and a line about all ranks
        above = rank_map(facts, facts.state.ranks, width, (left - most, left - min(_LEAST_WORST, most)), look)
        if facts.view.zoom is None:  # the slowest rank's row is more important than the whole map
            del above[max(height - 2, 1) :]
    if found is None:
        return [*above, *_sizes_table(facts, width, height - len(above), look)]
    head, *rows = _times_table(facts, found, width, height, look)
    room = max(room - len(above) - 1, 1)
    remarks = _notes(facts, found, width, room, len(rows), look)
    room = max(room - len(remarks), 1)
    slow = facts.state.straggler
    if not _shows_slowest_only(facts) and slow is not None:
        rows = [rows[index] for index in _slow_in_room(_ranks(facts, found), slow, room)]
    drawn, below = [*above, head, *rows[:room], *remarks], rows[room:]
    if facts.view.zoom is not None:
        return [*drawn, *below]
    times = over_time(facts, width, height - len(drawn), look, headed=not above)
    return [*drawn, *[[]] * (height - len(drawn) - len(times)), *times, *below] if times else [*drawn, *below]


def _slow_in_room(ranks: Sequence[_Rank], slow: Straggler, room: int) -> list[int]:
    """The order of the rows, with the slow ranks among the first `room` rows."""
    marked = [index for index, one in enumerate(ranks) if _is_slow(slow, one)]
    marked.sort(key=lambda index: ranks[index].process.process != slow.process)
    marked = marked[:room]
    others = [index for index in range(len(ranks)) if index not in marked]
    first = sorted([*marked, *others[: room - len(marked)]])
    return [*first, *others[room - len(marked) :]]


# ------------------------------------------------------------------------------------------------ who waits


def _notes(
    facts: ScreenData, found: Communication, width: int, room: int, ranks: int, look: TerminalStyle
) -> list[Row]:
    """The lines below the ranks: who delays the others, then notes. One row of `room` is left for a rank.

    The sentence about a slow rank is short if the full one does not fit below all ranks.
    """
    slow = facts.current_straggler
    most = max(room - 1, 0)
    rows: list[Row] = []
    if not facts.is_live or (reports_straggler(facts, look) and facts.view.zoom != "replicas"):
        pass
    elif slow is not None:
        whole = wrap_to_rows(straggler_sentence(slow, lately=True), width, "wait")
        fits = len(whole) + ranks <= room
        rows += whole if fits else wrap_to_rows(short_sentence(slow), width, "wait", max(most, 1), look.glyphs.more)
    elif found.step_count_with_waits < MIN_STEPS:
        rows += wrap_to_rows(
            f"a slow rank is named after {MIN_STEPS} steps with known waits: {found.step_count_with_waits} so far",
            width,
        )
    else:
        where = f" of {facts.state.training_processes[0].node}" if facts.view.node_number is not None else ""
        rows += wrap_to_rows(
            f"no rank{where} holds the others up (last {format_count_with_noun(found.step_count_with_waits, 'step')})",
            width,
        )
    for note in found.other_waits():
        rows += wrap_to_rows(note, width)
    return [*rows, *_missing_ranks_row(facts)][:most]


def _ranks(facts: ScreenData, found: Communication) -> list[_Rank]:
    """The ranks of the table by number; if there are many, only the slowest ranks, the slowest first."""
    times: Iterable[RankTimes] = found.ranks
    slow, chosen = facts.state.straggler, facts.view.process_index
    if _shows_slowest_only(facts):
        named = {chosen, *(slow.processes if slow is not None else ())}
        first = [one for one in found.ranks_by_wait if one.process in named]
        first.sort(key=lambda one: one.process != chosen)
        times = islice(
            chain(first, (one for one in found.ranks_by_wait if one.process not in named)), _max_table_rows(facts)
        )
    there = [one for one in times if one.process in facts.state.processes]
    rows = _with_calls(facts, (facts.state.processes[one.process] for one in there))
    return [_Rank(process, track, one) for (process, track), one in zip(rows, there, strict=True)]


def _times_table(facts: ScreenData, found: Communication, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """A header and one row per rank: mean times, and a bar of its step."""
    ranks = _ranks(facts, found)
    slow = facts.state.straggler
    device = min(max([span_width(_device(one)) for one in ranks] + [6]), 10)
    node = max((span_width(one.process.node or "") for one in ranks), default=0)
    node = min(max(node, 4), _MOST_NODE) + 1 if facts.state.nodes else 0
    fixed = _LABEL + device + 1 + node
    cell, gap = (9, " ") if width >= fixed + 9 * len(_NAMES) + _LEAST_BAR + 1 else (7, "")
    left = width - fixed - cell * len(_NAMES) - 1
    sizes = _size_cells(ranks, height, left - _LEAST_BAR)
    needed = max([row_width(row) for row in sizes] + [len(_SIZES)]) if sizes else 0
    bar = min(max(left - needed, 0), _MOST_BAR)
    bar = bar if bar >= _LEAST_BAR else 0
    waits = "  others wait" if left - needed - bar >= len("  others wait") else ""
    top = max((one.times.step_ns or 0.0 for one in ranks), default=0.0)
    slowest = [_is_slow(slow, one) for one in ranks]
    columns = [
        TableColumn(
            "rank ", _LABEL + 1, [_mark(one, marked, facts, look) for one, marked in zip(ranks, slowest, strict=True)]
        ),
        TableColumn("device", device, [_device(one) for one in ranks], left=True),
    ]
    if node:
        columns.insert(1, TableColumn("node", node - 1, [one.process.node or "" for one in ranks], left=True, gap=1))
    for name, word in zip(_NAMES, _NAMES if cell > 8 else _SHORT, strict=True):
        times = [align_right(_time(one.times, name, gap), cell) for one in ranks]
        usual = "bold" if name == "wait" else ""
        cause = slow.phase if slow is not None else None
        styles = ["wait" if marked and name == cause else usual for marked in slowest]
        columns.append(TableColumn(word, cell, [[span] for span in zip(times, styles, strict=True)]))
    if bar:
        bars: list[Row] = [[(" ", ""), *_bar(one.times, top, bar, look)] for one in ranks]
        columns.append(TableColumn([(" ", ""), *busy_legend(bar, look.glyphs)], bar + 1, bars))
    if waits:
        blank = " " * len(waits)
        marks: list[Row] = [[(waits if marked else blank, "wait")] if marked or needed else [] for marked in slowest]
        columns.append(TableColumn([(blank if needed else "", "")], len(waits), marks))
    if needed:
        filled: list[Row] = [[(" " * (needed - row_width(row)), ""), *row] for row in sizes]
        columns.append(TableColumn(_SIZES, needed, [*filled, *[[]] * (len(ranks) - len(sizes))]))
    return table_rows(columns, look.glyphs.more)


def _is_slow(slow: Straggler | None, one: _Rank) -> bool:
    return slow is not None and one.process.process in slow.processes


def _mark(one: _Rank, marked: bool, facts: ScreenData, look: TerminalStyle) -> Row:
    number = align_right(str(one.process.number), _LABEL - 2) + "  "
    sign = look.glyphs.focus if marked else look.glyphs.ring if one.process.process == facts.view.process_index else " "
    return [(sign, "wait"), (number, "wait" if marked else "bold")]


def _bar(times: RankTimes, top: float, width: int, look: TerminalStyle) -> Row:
    exposed, wait = times.exposed_ns or 0.0, times.wait_ns or 0.0
    return busy_bar((max((times.step_ns or 0.0) - exposed - wait, 0.0), exposed, wait), top, width, look.glyphs)


def _time(times: RankTimes, name: str, gap: str) -> str:
    """A time of a rank; exactly 0 is "0", without a unit."""
    own = {"exposed": times.exposed_ns, "wait": times.wait_ns}
    ns = own[name] if name in own else times.phases.get(name)
    return "0" if ns == 0 else format_duration(ns, gap)


def _size_cells(ranks: Sequence[_Rank], height: int, room: int) -> list[Row]:
    """The sizes that each rank received and returned, and its rows, if they fit."""
    cells: list[Row] = []
    for one in ranks[: max(height, 1)]:
        if one.track is None:
            return []
        call = one.track.last
        rows = call.rows
        count = UNKNOWN if rows is None else str(rows)
        cells.append([(f"  {size_text(call.inputs)}  {size_text(call.outputs)}{align_right(count, 6)}", "dim")])
    return cells if max(len(_SIZES), *map(row_width, cells)) <= room else []


def _device(one: _Rank) -> str:
    named = _call_medians(one.track)
    return named if named != UNKNOWN else format_devices(one.process.devices) or UNKNOWN


# ------------------------------------------------------------------------------------------------ sizes


def _sizes_table(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """A header, one row per rank with its sizes and medians, and why the waits are unknown."""
    count = len(facts.state.training_processes)
    rows = _rows(facts, max(height, 2) + 1 + facts.view.first_rows.get("replicas", 0))
    ins = [size_text(track.last.inputs) if track else UNKNOWN for _, track in rows]
    outs = [size_text(track.last.outputs) if track else UNKNOWN for _, track in rows]
    device = min(max([span_width(_call_medians(track)) for _, track in rows] + [6]), 10)
    cell = 9 if width >= 5 + device + 2 + 6 + 9 * 3 + 18 else 8
    count_room = 6 if cell == 9 else 5
    # Times are never cut. Sizes share the remaining width, and a sign marks each cut.
    room = max(width - 5 - device - 1 - 1 - count_room - cell * 3, 4)
    needs = [max(map(span_width, [*texts, word])) for texts, word in ((ins, "input"), (outs, "output"))]
    given = min(needs[0], max(room * 3 // 5, room - needs[1]))
    gave = min(needs[1], room - given)
    who = "rank" if rows and rows[0][0].rank is not None else "proc"
    batches = [track.last.rows if track else None for _, track in rows]
    columns = [
        TableColumn(who, 4, [str(process.number) for process, _ in rows], "bold", gap=1),
        TableColumn("device", device, [_call_medians(track) for _, track in rows], left=True, gap=1),
        TableColumn("input", given, ins, left=True, gap=1),
        TableColumn("output", gave, outs, left=True),
        TableColumn("rows", count_room, [UNKNOWN if batch is None else str(batch) for batch in batches]),
        TableColumn("forward", cell, [_median(process, "forward") for process, _ in rows]),
        TableColumn("backward" if cell == 9 else "backwd", cell, [_median(process, "backward") for process, _ in rows]),
        TableColumn("step", cell, [format_duration(process.figures.median_ns) for process, _ in rows], "bold"),
    ]
    drawn = table_rows(columns, look.glyphs.more)
    drawn += [[] for _ in range(count - len(rows))]  # not drawn, but counted by the frame
    found = facts.state.communication
    why = None if found is None else found.missing
    drawn += [] if why is not None and why.startswith(f"{count} of ") else _missing_ranks_row(facts)
    troubles = ((node.name, node.problem_at(facts.elapsed_ns)) for node in facts.state.nodes)
    away = [name for name, trouble in troubles if trouble is not None and trouble.word in SILENT]
    if why is not None and away:
        others = f" and {format_count_with_noun(len(away) - 1, 'other')}" if away[1:] else ""
        why += f" (no records come from {away[0]}{others})"
    return [*drawn, *wrap_to_rows(why or "", width)]


def _missing_ranks_row(facts: ScreenData) -> list[Row]:
    """A row with the number of ranks, if fewer train than expected; of one node alone, the others are not counted."""
    count, first = len(facts.state.training_processes), facts.state.training_processes[:MAX_LISTED_RANKS]
    wanted = max((ranks for process in first if (ranks := process.info.world) is not None), default=count)
    if facts.view.node_number is not None or wanted <= count or any(process.rank is None for process in first):
        return []
    return [[(f"{count} of {wanted} ranks train in this run", "wait")]]


def _median(process: Process, phase: str) -> str:
    found = process.figures.phase(phase)
    return format_duration(None if found is None else found.median_ns)


def _call_medians(track: CallTimings | None) -> str:
    devices = track.last.devices if track is not None else ()
    return sanitize_line(devices[0], 20) if devices else UNKNOWN


def render_full_screen(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel at full size: the table, the ranks over time, then every size of every rank by its path."""
    drawn = [*render_panel(facts, width, height, look), []]
    if times := over_time(facts, width, len(facts.state.training_processes) + 2, look):
        drawn += [*times, []]
    for process, track in _rows(facts, height + facts.view.first_rows.get("replicas", 0)):
        pid, ranks = process.info.pid, process.info.world or UNKNOWN
        who = f"process {process.process}" if process.rank is None else f"rank {process.rank} of {ranks}"
        who += node_suffix(process.node)
        drawn.append([(f"{who}  {_call_medians(track)}", "bold"), (f"  pid {UNKNOWN if pid is None else pid}", "dim")])
        drawn += every_size(track.last.inputs, track.last.outputs, width, look) if track is not None else []
    return drawn
