"""Panel 2 of a run with several processes: one row per rank with the parts of its step, and the straggler.

Many ranks, or ranks on several nodes, are drawn as a map with a cell per rank, and the slowest ranks below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from dpmon.model.communication import Communication
from dpmon.model.nodes import SILENT
from dpmon.model.rank_stats import MAX_LEAST_WAITING
from dpmon.model.recent_calls import CallTimings
from dpmon.model.run_analysis import MAX_LISTED_RANKS
from dpmon.model.run_process import Process
from dpmon.model.stragglers import MIN_STEPS, RankTimes, Straggler, short_sentence, straggler_sentence
from dpmon.record.schema import WAIT
from dpmon.record.shared_names import node_suffix
from dpmon.report.tables import RANK_TIMES
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right
from dpmon.text.formatting import UNKNOWN, format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import busy_bar, busy_legend
from dpmon.ui.panel_table import DURATION_CELLS, PanelColumn, draw_table, fact_columns
from dpmon.ui.panels.panel_replicas import all_size_rows, call_name, kind_mark, shown_call, size_text
from dpmon.ui.panels.panel_status import reports_straggler
from dpmon.ui.panels.rank_map import rank_map
from dpmon.ui.panels.ranks_over_time import over_time_height, render_over_time
from dpmon.ui.screen_data import RANK_NAMES, ScreenData, format_devices
from dpmon.ui.styled_rows import Row, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_MIN_BAR_CELLS = 6
_NODE_CELLS, _RANKS_PER_ROW = 12, 16
"""About the most cells next to the nodes of a map; and ranks per row of a map without nodes."""
_MAX_SMALL_ROWS = 15
"""Panels of up to this many rows show the ranks of several nodes over time on any screen."""
_MIN_SLOWEST_ROWS, _MIN_TABLE_ROWS, _MIN_OVER_TIME_ROWS = 2, 5, 2
"""Fewest rows of the table below a map of nodes, and above ranks over time; rows of one rank over time and the axis."""


class _RankRow(NamedTuple):
    """A table row: a rank with its chosen or newest call and its times."""

    process: Process
    track: CallTimings | None
    times: RankTimes


def is_shown(screen: ScreenData) -> bool:
    """Return whether the run has several nodes, or several training processes without replicas of their own."""
    processes = screen.state.training_processes
    if screen.state.nodes or len(processes) < 2:
        return bool(screen.state.nodes)
    track = shown_call(screen)
    return track is None or len(track.last.replicas) <= 1


def _process_calls(screen: ScreenData, max_rows: int) -> list[tuple[Process, CallTimings | None]]:
    """Return at most `max_rows` processes, each with its chosen or newest call."""
    first = screen.state.current_processes(screen.state.order[: max(max_rows, 1)])
    return _pair_with_calls(screen, first)


def _pair_with_calls(screen: ScreenData, processes: Iterable[Process]) -> list[tuple[Process, CallTimings | None]]:
    track = shown_call(screen)
    key = (track.last.root, track.last.via) if track is not None else ("", None)
    return [(process, process.calls.get(key, process.last_called_root)) for process in processes]


def _known_communication(screen: ScreenData) -> Communication | None:
    """Return the communication of the ranks; None unless their waits are known."""
    communication = screen.state.communication
    return communication if communication is not None and communication.ranks_with_waits else None


def shows_map(screen: ScreenData) -> bool:
    """Return whether a map is drawn: of nodes, or of too many ranks for one row each."""
    return bool(screen.state.nodes) or (
        is_shown(screen) and _known_communication(screen) is not None and _shows_slowest_only(screen)
    )


def _shows_slowest_only(screen: ScreenData) -> bool:
    """Return whether the table has only the slowest ranks."""
    return bool(screen.state.nodes) or len(screen.state.training_processes) > MAX_LISTED_RANKS


def preferred_height(screen: ScreenData, max_rows: int = 0) -> int:
    """Return the number of rows of the whole content; with the ranks over time if that fits in `max_rows`."""
    count = len(screen.state.training_processes)
    communication = _known_communication(screen)
    node_count = len(screen.state.nodes)
    max_rows = max(max_rows, _MAX_SMALL_ROWS) if node_count else max_rows
    if communication is None:
        return node_count + count + 3
    note_rows = 1  # always reserved, so that the panels keep their places
    if _shows_slowest_only(screen):
        rows = _max_table_rows(screen) + 2 + (node_count or 2) + note_rows
        over_time_rows = count + 1 if count <= MAX_LISTED_RANKS else 2
    else:
        rows, over_time_rows = count + note_rows, count + 2
    return rows + over_time_rows if rows + over_time_rows <= max_rows else rows


def _max_table_rows(screen: ScreenData) -> int:
    """Return the number of rows of the table: all ranks if they are few, else the slowest ones."""
    count = len(screen.state.training_processes)
    return count if count <= MAX_LISTED_RANKS else MAX_LEAST_WAITING


def shows_time(screen: ScreenData, width: int, height: int) -> bool:
    """Return whether there is room below a map for the slow ranks over time, with their axis."""
    if not shows_map(screen) or _known_communication(screen) is None:
        return False
    node_count, rank_count = len(screen.state.nodes), len(screen.state.training_processes)
    map_rows = rank_count // _RANKS_PER_ROW + 1
    if node_count:
        ranks_per_node = max(rank_count // node_count, 1)
        map_rows = -(-node_count // max((width - _NODE_CELLS) // (ranks_per_node + 1), 1))
    return height >= map_rows + 2 + _MIN_TABLE_ROWS + _MIN_OVER_TIME_ROWS


def panel_title(screen: ScreenData) -> tuple[Row, Row]:
    """Return the title and the main number."""
    processes = screen.state.training_processes
    track = shown_call(screen)
    call_row: Row = []
    if track is not None and track.last.kind == screen.state.main_kind:
        call_row = [*kind_mark(screen, track.last), (call_name(track.last), "")]
    corner: Row = [("step", "dim"), (align_right(format_count(screen.state.step), 9), "")]
    node_text = f" on {format_count_with_noun(len(screen.state.nodes), 'node')}" if screen.state.nodes else ""
    node_text = f" on {processes[0].node}" if screen.view.node_number is not None and processes else node_text
    return [(RANK_NAMES["replicas"] + node_text, "title"), *call_row], corner


def render_panel(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows inside the frame.

    Rows that do not fit come last, below the notes on all ranks. A tall panel ends with the ranks over time.
    """
    communication, map_rows = _known_communication(screen), list[Row]()
    with_over_time = screen.view.zoom is None and shows_time(screen, width, height)
    max_rows = height - over_time_height(screen) if with_over_time else height
    if shows_map(screen):
        max_table_rows = _max_table_rows(screen)
        free_rows = max_rows - 3  # without the legend, the header, and a note on all ranks
        row_limits = (free_rows - max_table_rows, free_rows - min(_MIN_SLOWEST_ROWS, max_table_rows))
        map_rows = rank_map(screen, screen.state.ranks, width, row_limits, style)
        if screen.view.zoom is None:  # the slowest rank's row is more important than the whole map
            del map_rows[max(height - 2, 1) :]
    if communication is None:
        return [*map_rows, *_sizes_table(screen, width, height - len(map_rows))]
    header, *rows = _times_table(screen, communication, width, height)
    max_rows = max(max_rows - len(map_rows) - 1, 1)
    note_rows = _note_rows(screen, communication, width, max_rows, len(rows))
    max_rows = max(max_rows - len(note_rows), 1)
    straggler = screen.state.straggler
    if straggler is not None and len(rows) > max_rows:
        ranks = _table_ranks(screen, communication)
        first = [row for row, rank in zip(rows, ranks, strict=True) if _is_slow(straggler, rank)]
        rows = [*first, *(row for row, rank in zip(rows, ranks, strict=True) if not _is_slow(straggler, rank))]
    main_rows, remaining_rows = [*map_rows, header, *rows[:max_rows], *note_rows], rows[max_rows:]
    if screen.view.zoom is not None:
        return [*main_rows, *remaining_rows]
    over_time_rows = render_over_time(screen, width, height - len(main_rows), style, with_heading=not map_rows)
    if over_time_rows:
        main_rows += [[]] * (height - len(main_rows) - len(over_time_rows))
    return [*main_rows, *over_time_rows, *remaining_rows]


# ------------------------------------------------------------------------------------------------ who waits


def _note_rows(
    screen: ScreenData, communication: Communication, width: int, max_rows: int, rank_count: int
) -> list[Row]:
    """Return the rows below the ranks: the straggler, then notes. One row of `max_rows` is left for a rank.

    The sentence on the straggler is short if the full one does not fit below all ranks.
    """
    straggler = screen.current_straggler
    max_note_rows = max(max_rows - 1, 0)
    rows: list[Row] = []
    if not screen.is_live or (reports_straggler(screen) and screen.view.zoom != "replicas"):
        pass
    elif straggler is not None:
        rows = wrap_to_rows(straggler_sentence(straggler, lately=True), width, "wait")
        if len(rows) + rank_count > max_rows:
            rows = wrap_to_rows(short_sentence(straggler), width, "wait", max(max_note_rows, 1))
    elif (count := communication.step_count_with_waits) < MIN_STEPS:
        text = f"a straggler is reported after {MIN_STEPS} steps with known waits: {count} so far"
        rows = wrap_to_rows(text, width)
    else:
        node_text = f" on {screen.state.training_processes[0].node}" if screen.view.node_number is not None else ""
        rows = wrap_to_rows(f"no straggler{node_text} (last {communication.text_of_known_waits})", width)
    for note in communication.other_waits():
        rows += wrap_to_rows(note, width)
    return [*rows, *_missing_ranks_row(screen)][:max_note_rows]


def _table_ranks(screen: ScreenData, communication: Communication) -> list[_RankRow]:
    """Return the ranks of the table by number; of many ranks, only the slowest, the slowest first."""
    times: Iterable[RankTimes] = communication.ranks
    straggler, chosen_process = screen.state.straggler, screen.view.process_index
    if _shows_slowest_only(screen):
        first_processes = {chosen_process, *(straggler.processes if straggler is not None else ())}
        first_ranks = [rank for rank in communication.ranks_by_wait if rank.process in first_processes]
        first_ranks.sort(key=lambda rank: rank.process != chosen_process)
        other_ranks = (rank for rank in communication.ranks_by_wait if rank.process not in first_processes)
        times = islice(chain(first_ranks, other_ranks), _max_table_rows(screen))
    shown_times = [rank for rank in times if rank.process in screen.state.processes]
    rows = _pair_with_calls(screen, screen.state.current_processes(rank.process for rank in shown_times))
    return [_RankRow(process, track, rank) for (process, track), rank in zip(rows, shown_times, strict=True)]


def _times_table(screen: ScreenData, communication: Communication, width: int, height: int) -> list[Row]:
    """Return a header and one row per rank: mean times, a bar of its step, and the sizes if there is room."""
    ranks, straggler = _table_ranks(screen, communication), screen.state.straggler
    is_slow = [_is_slow(straggler, rank) for rank in ranks]
    top = max((rank.times.step_ns or 0.0 for rank in ranks), default=0.0)
    slow_phase = None if straggler is None else straggler.phase

    def in_slow_style(column: PanelColumn) -> PanelColumn:
        if column.title != slow_phase:
            return column
        pairs = zip(column.cells, is_slow, strict=True)
        return column._replace(cells=[[(str(cell), "wait" if slow else "")] for cell, slow in pairs])

    def step_bars(bar_width: int) -> Sequence[str | Row]:
        bars: list[str | Row] = [busy_legend(bar_width)]
        return bars + [_step_bar(rank.times, top, bar_width) for rank in ranks]

    columns = _label_columns(screen, [rank.process for rank in ranks], [rank.track for rank in ranks])
    times = fact_columns(RANK_TIMES, [rank.times for rank in ranks], {WAIT: "bold"})
    columns += map(in_slow_style, times)
    bars = PanelColumn(cells=[""] * len(ranks), rank=1, min_width=_MIN_BAR_CELLS, draw=step_bars)
    columns.append(bars._replace(wanted_width=bars.max_width))
    delays = ["delays others" if slow else "" for slow in is_slow]
    columns.append(PanelColumn("", delays, "wait", rank=3, min_width=len("delays others")))
    tracks = [rank.track for rank in ranks[: max(height, 1)]]
    if None not in tracks:
        columns += [column._replace(style="dim", rank=2) for column in _size_columns(screen, tracks, len(ranks))]
    return draw_table(columns, width)


def _label_columns(
    screen: ScreenData, processes: Sequence[Process], tracks: Sequence[CallTimings | None]
) -> list[PanelColumn]:
    """Return a mark for the straggler and the chosen process, the rank or process, its node and its device."""
    straggler, labels = screen.state.straggler, list[str | Row]()
    for process in processes:
        is_slow = straggler is not None and process.process in straggler.processes
        mark = "○" if process.process == screen.view.process_index else " "
        number = align_right(str(process.number), 4)
        labels.append([("▸" if is_slow else mark, "wait"), (number, "wait" if is_slow else "bold")])
    title = "rank" if any(process.rank is not None for process in processes[:1]) else "proc"
    columns = [PanelColumn(title, labels)]
    if screen.state.nodes:
        names = [process.node or "" for process in processes]
        columns.append(PanelColumn("node", names, is_text=True))
    devices = [_device_text(process, track) for process, track in zip(processes, tracks, strict=True)]
    return [*columns, PanelColumn("device", devices, is_text=True)]


def _size_columns(screen: ScreenData, tracks: Sequence[CallTimings | None], count: int) -> list[PanelColumn]:
    """Return what each rank received and returned, and its rows, for the first of `count` ranks."""
    blanks = ("",) * (count - len(tracks))
    sizes = [_sizes_of(screen, track) for track in tracks]
    return [
        PanelColumn("received", [*(inputs for inputs, _, _ in sizes), *blanks], is_text=True),
        PanelColumn("returned", [*(outputs for _, outputs, _ in sizes), *blanks], is_text=True),
        PanelColumn("rows", [*(rows for _, _, rows in sizes), *blanks]),
    ]


def _is_slow(straggler: Straggler | None, rank: _RankRow) -> bool:
    return straggler is not None and rank.process.process in straggler.processes


def _step_bar(times: RankTimes, top: float, width: int) -> Row:
    exposed, wait = times.exposed_ns or 0.0, times.wait_ns or 0.0
    return busy_bar((max((times.step_ns or 0.0) - exposed - wait, 0.0), exposed, wait), top, width)


def _sizes_of(screen: ScreenData, track: CallTimings | None) -> tuple[str, str, str]:
    """Return the input, the output and the rows of a call; or the word for its kind, if the times are of another."""
    if track is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    call = track.last
    if call.kind != screen.state.main_kind:
        return screen.state.kind_words[call.kind], "", ""
    return size_text(call.inputs), size_text(call.outputs), UNKNOWN if call.rows is None else str(call.rows)


def _device_text(process: Process, track: CallTimings | None) -> str:
    """Return the first device of the newest call; before it, those of the process."""
    devices = () if track is None else track.last.devices
    return sanitize_line(devices[0], 20) if devices else format_devices(process.devices) or UNKNOWN


# ------------------------------------------------------------------------------------------------ sizes


def _sizes_table(screen: ScreenData, width: int, height: int) -> list[Row]:
    """Return a header, one row per rank with its sizes and medians, and why the waits are unknown."""
    count = len(screen.state.training_processes)
    rows = _process_calls(screen, max(height, 2) + 1 + screen.view.first_rows.get("replicas", 0))
    processes, tracks = [process for process, _ in rows], [track for _, track in rows]
    columns = [*_label_columns(screen, processes, tracks), *_size_columns(screen, tracks, len(tracks))]
    for phase in ("forward", "backward"):
        medians = [_phase_median(process, phase) for process in processes]
        columns.append(PanelColumn(phase, medians, short=phase[:4], min_width=DURATION_CELLS))
    steps = [format_duration(process.figures.median_ns) for process in processes]
    columns.append(PanelColumn("step", steps, "bold", min_width=DURATION_CELLS))
    table = draw_table(columns, width)
    table += [[] for _ in range(count - len(rows))]  # not drawn, but counted by the frame
    communication = screen.state.communication
    reason = None if communication is None else communication.missing
    table += [] if reason is not None and reason.startswith(f"{count} of ") else _missing_ranks_row(screen)
    problems = ((node.name, node.problem_at(screen.elapsed_ns)) for node in screen.state.nodes)
    silent_nodes = [name for name, problem in problems if problem is not None and problem.word in SILENT]
    if reason is not None and silent_nodes:
        silent_node, *others = silent_nodes
        others_text = f" and {format_count_with_noun(len(others), 'other')}" if others else ""
        reason += f" (no records arrive from {silent_node}{others_text})"
    return [*table, *wrap_to_rows(reason or "", width)]


def _missing_ranks_row(screen: ScreenData) -> list[Row]:
    """Return a row with the number of ranks if fewer train than expected; empty if only one node is shown."""
    count, sample = len(screen.state.training_processes), screen.state.training_processes[:MAX_LISTED_RANKS]
    expected = max((ranks for process in sample if (ranks := process.info.world) is not None), default=count)
    if screen.view.node_number is not None or expected <= count or any(process.rank is None for process in sample):
        return []
    return [[(f"{count} of {expected} ranks train in this run", "wait")]]


def _phase_median(process: Process, phase: str) -> str:
    stats = process.figures.phase(phase)
    return format_duration(None if stats is None else stats.median_ns)


def render_full_screen(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows on the full screen: the table, the ranks over time, then every size of every rank by its path."""
    rows = [*render_panel(screen, width, height, style), []]
    if over_time_rows := render_over_time(screen, width, len(screen.state.training_processes) + 2, style):
        rows += [*over_time_rows, []]
    for process, track in _process_calls(screen, height + screen.view.first_rows.get("replicas", 0)):
        pid, rank_count = process.info.pid, process.info.world or UNKNOWN
        name = f"process {process.process}" if process.rank is None else f"rank {process.rank} of {rank_count}"
        name += node_suffix(process.node)
        mark = [] if track is None else kind_mark(screen, track.last)
        pid_text = f"  pid {UNKNOWN if pid is None else pid}"
        rows.append([(f"{name}  {_device_text(process, track)}", "bold"), (pid_text, "dim"), *mark])
        rows += all_size_rows(track.last.inputs, track.last.outputs, width) if track is not None else []
    return rows
