"""Panel 3, where step time goes: share, median and p95 of each phase, their history, and the last step."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.model.findings.phase_notes import host_waits, timed_steps_note
from dpmon.model.run_process import NO_STEPS, PHASES, Process
from dpmon.model.slow_steps import INPUT, WAITING_TEXT
from dpmon.model.step_timeline import StepTimeline, last_step_timeline
from dpmon.record.record_types import MAX_SPANS, Call
from dpmon.record.schema import SECOND, STEP, TRAINING, phase_by_display_name
from dpmon.report import tables
from dpmon.sanitize import sanitize_line
from dpmon.store.step_stats import PhaseStats, StepStats
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import (
    format_count,
    format_duration,
    format_percent,
    format_quantities,
    format_rate,
    format_short_elapsed,
    format_time_range,
)
from dpmon.ui.chart import scale_top, stacked_columns
from dpmon.ui.panel_table import DURATION_CELLS, PanelColumn, draw_table
from dpmon.ui.panels.panel_replicas import size_text
from dpmon.ui.screen_data import BEFORE_STALL, NAMES, ScreenData, format_mode_and_devices
from dpmon.ui.step_waterfall import OTHER_FORWARD_NAMES, render_waterfall, visible_lanes
from dpmon.ui.styled_rows import Row, add_scale, dim_row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import LETTERS, TerminalStyle, letter_position
from dpmon.ui.time_axis import axis_below_chart, build_chart_columns, make_time_axis, stall_intervals

_MAX_RANKS = 64
_OUTLIER_RATIO = 3
"""The longest step is mentioned if it takes at least this many times the median."""
_FOLDED_CELLS = 30
"""A title of at most this many cells is that of a folded panel, with one number."""
_NO_NOTES_HEIGHT = 6
"""Up to this height, notes have no row: the rows are for shares, medians, a history and the last step."""
_TALL_HEIGHT = 9
"""From this height on, notes have two rows. Without the notes, quantities need this many rows, and p95 one fewer."""


def preferred_height(screen: ScreenData) -> int:
    """Return the number of rows of the whole content: the table of phases, a history, the last step."""
    timeline = _last_timeline(screen)
    if timeline is None:
        return 4 + 5 + 3
    lane_count = len(_ranks_with_steps(screen)) or 1 + len(visible_lanes(timeline))
    table_height = 4 + bool(_text_below_table(screen))
    return table_height + 5 + 1 + bool(timeline.step.buckets) + min(lane_count, 9)


def _text_below_table(screen: ScreenData) -> str:
    """Return how good the training is, and the quantities of its steps."""
    return " · ".join(filter(None, [screen.state.efficiency.line, *format_quantities(shown_stats(screen))]))


def _last_timeline(screen: ScreenData) -> StepTimeline | None:
    """Return the timeline of the last step; None during a stall, when it would look like the present."""
    process = screen.process
    return None if process is None or screen.shown_stall is not None else last_step_timeline(process)


def shown_stats(screen: ScreenData) -> StepStats:
    """Return the stats of the current mode in the time range, at first those of the previous mode."""
    process = screen.process
    return NO_STEPS if process is None else process.ranged


def panel_title(screen: ScreenData, width: int) -> tuple[Row, Row]:
    """Return the title with the time range, and the main numbers of that range, for a frame of `width` cells.

    A narrow frame omits the last numbers in favor of the mode or rank, then the time range.
    """
    process, stats = screen.process, shown_stats(screen)
    if not stats.steps or process is None:
        return [(NAMES["batch"], "title")], []
    range_text = format_time_range(screen.view.range_s)
    mode = stats.mode
    mode_text, _ = format_mode_and_devices(process)
    if mode != process.mode:
        devices = () if process.compared is None else process.compared.devices
        mode_text = f"dp ×{len(devices)}" if mode == "dp" else mode
    if process.rank is not None and len(screen.state.training_processes) > 1:
        mode_text = process.name  # these stats are of one rank only
    corner: Row = []
    for name, value, text_style in (
        ("step mean" if width > _FOLDED_CELLS else "mean", stats.mean_ns, "bold"),
        (" median", stats.median_ns, "bold"),
        (" p95", stats.p95_ns, ""),
    ):
        corner += [(name, "dim"), (align_right(format_duration(value), 8), text_style)]
    kind: Row = []
    if stats.kind != TRAINING:
        kind = [(" · ", "dim"), (screen.state.kind_words[stats.kind], "wait")]
    head: Row = [(NAMES["batch"], "title"), (" · ", "dim"), (mode_text, f"mode.{mode}"), *kind]
    if screen.shown_stall is not None:
        return [*head, (f" · {range_text}", "dim")], [BEFORE_STALL]
    sizes = _size_spans(process)
    if row_width(head) + row_width(sizes) + row_width(corner[:-2]) + 7 <= width:
        head += sizes
    free_cells = width - row_width(head) - 7
    while len(corner) > 2 and row_width(corner) > free_cells:
        del corner[-2:]
    range_span = (f" · {range_text}", "dim")
    if row_width(corner) + row_width([range_span]) <= free_cells:
        head.append(range_span)
    return head, corner


def _size_spans(process: Process) -> Row:
    """Return the input and output sizes of the last forward, unless panel 2 has a table of them."""
    if process.has_used_dp or process.distributed is not None or process.last_called_root is None:
        return []
    call = process.last_called_root.last
    if call.kind != process.ranged.kind:
        return []
    return [(f" · {size_text(call.inputs)} → {size_text(call.outputs)}", "")]


def render_panel(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows inside the frame: the table of phases, a history, the last step, and notes at the end."""
    process, stats = screen.process, shown_stats(screen)
    if process is None or not stats.steps:
        return [[(screen.empty_reason("no step was traced", "no step has finished yet"), "dim")]]
    # If not all fit, the order of importance is: shares, medians, a row of notes, then the last step and the history.
    timeline = _last_timeline(screen)
    max_notes = 1 if height < _TALL_HEIGHT else 2
    if height <= _NO_NOTES_HEIGHT:
        max_notes = 0
    note_rows = render_notes(screen, process, stats, timeline, width, max_notes)
    height -= len(note_rows)
    # Every phase that ran and every expected phase of this mode has a column.
    columns = [phase for phase in stats.disjoint_phases if phase.ran or is_expected_phase(process, stats, phase.name)]
    table = _phase_table(columns, stats, width, style, height)
    text, line = _text_below_table(screen), screen.state.efficiency.line
    if text and (height >= _TALL_HEIGHT or (line and height > _NO_NOTES_HEIGHT)):
        table.append([(truncate(text, width), "")])
    if screen.view.zoom == "batch":
        table.append(_step_count_row(stats, width, style))
    if screen.shown_stall is not None:
        table = list(map(dim_row, table))
    free_rows = height - len(table)
    last_step_rows: list[Row] = []
    if timeline is not None and free_rows >= 1 and free_rows != 2:
        ranks = _ranks_with_steps(screen)
        max_height = max(free_rows // 2, free_rows - 4) if screen.view.zoom is None else free_rows // 2
        if free_rows < 6:
            max_height = 1
        lane_count = len(ranks) or 1 + len(visible_lanes(timeline))
        waterfall_height = min(1 + bool(timeline.step.buckets) + lane_count, max_height)
        last_step_rows = render_waterfall(
            process, timeline, width, waterfall_height, style, screen.state.kind_words, ranks
        )
    chart_height = free_rows - len(last_step_rows)
    chart = history_rows(screen, process, width, chart_height, style) if chart_height >= 2 else []
    blank_rows: list[Row] = [[]] * (height - len(table) - len(chart) - len(last_step_rows)) if note_rows else []
    return [*table, *chart, *last_step_rows, *blank_rows, *note_rows]


def _ranks_with_steps(screen: ScreenData) -> list[Process]:
    """Return the ranks with a step: the straggler, the rank of panel 3, then the others; empty if there is only one."""
    straggler, state = screen.state.straggler, screen.state
    slow_processes = straggler.processes if straggler is not None else ()
    first_processes = [process.process for process in state.training_processes[:_MAX_RANKS]]
    indices = dict.fromkeys((*slow_processes, *first_processes))
    ranks = [
        process
        for process in state.current_processes(indices)
        if process.rank is not None and process.last_step is not None and process.last_step.phases
    ]
    ranks.sort(key=lambda rank: (rank.process not in slow_processes, rank is not screen.process, rank.rank))
    return ranks[:_MAX_RANKS] if len(ranks) > 1 else []


def _step_count_row(stats: StepStats, width: int, style: TerminalStyle) -> Row:
    """Return a row with the number of steps that the stats cover."""
    text = f"{format_count(stats.steps)} steps"
    if not style.has_color or style.is_ascii:
        text += "; a small letter: too short for a cell"
    return [(truncate(text, width), "dim")]


def _phase_title(phase: str, max_cells: int, style: TerminalStyle, *, other_forward: bool) -> Row:
    """Return the phase's name, with its letter marked in the phase's style.

    `other_forward`: the call's phases have columns of their own, so forward is only the remaining part.
    """
    if other_forward and phase == "forward":
        text = next(name for name in (*OTHER_FORWARD_NAMES, "fwd") if len(name) <= max_cells)
        return [(text[0].upper(), f"chip.{phase}"), (text[1:], "")]
    text = phase if len(phase) <= max_cells else phase_by_display_name(phase).short_display_name[:max_cells]
    letter, letter_index = LETTERS[phase], letter_position(phase, text)
    if letter == ".":
        return [("." if not style.has_color or style.is_ascii else " ", f"chip.{phase}"), (text, "")]
    shown_letter = letter.lower() if letter_index else letter
    marked: Row = [(shown_letter, f"chip.{phase}"), (text[letter_index + 1 :], "")]
    return [(text[:letter_index], ""), *marked] if letter_index else marked


def _phase_table(
    phases: Sequence[PhaseStats], stats: StepStats, width: int, style: TerminalStyle, height: int
) -> list[Row]:
    """Return the header and, as far as `height` has room, the rows of the declared table of phases.

    The smallest phases are left out where not all fit.
    """
    shown_rows = tables.PHASES.shown_columns(phases, on_screen=True)[: 1 + (height >= 3) + max(height - 7, 0)]
    has_call_phases = any(phase.ran for phase in phases if phase_by_display_name(phase.name).of_call)
    by_share = sorted(phases, key=lambda phase: -(phase.share or 0.0))
    columns = [PanelColumn("", [row.short or row.head for row in shown_rows], "dim", is_text=True, min_width=6)]
    for phase in phases:
        titles = [_phase_title(phase.name, cells, style, other_forward=has_call_phases) for cells in (9, 6)]
        cells: list[str | Row] = [row.cell(phase) for row in shown_rows]
        column = PanelColumn(titles[0], cells, "" if phase.ran else "dim", short=titles[1], min_width=DURATION_CELLS)
        columns.append(column._replace(rank=by_share.index(phase) + 1))
    step = PhaseStats(STEP, stats.steps, stats.median_ns, stats.p95_ns, stats.mean_ns, None)
    step_cells = ["" if row.fact(step) is None else row.cell(step) for row in shown_rows]
    columns.append(PanelColumn("step", step_cells, rank=len(phases) + 1, min_width=DURATION_CELLS))
    return draw_table(columns, width, keeps_columns=True)


def history_rows(screen: ScreenData, process: Process, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return a chart with its scale at the left and its time axis below."""
    axis = make_time_axis(screen)
    gutter = max(len(format_short_elapsed(axis.start_s * SECOND)) + 1, 8)
    chart_width = width - gutter
    chart = build_chart_columns(process, axis, chart_width, stall_intervals(screen))
    has_axis = height >= 3
    bar_height = height - 1 if has_axis else height
    top = scale_top(chart.columns)
    has_values = any(column.count for column in chart.columns)
    rows = stacked_columns(chart.columns, chart_width, bar_height, top, style, chart.part_count)
    rows = add_scale(rows, format_duration(top) if has_values else "", "0" if has_values else "", gutter)
    return [*rows, axis_below_chart(screen, axis, chart, gutter, chart_width)] if has_axis else rows


# ------------------------------------------------------------------------------------------------ notes


def render_notes(
    screen: ScreenData,
    process: Process,
    stats: StepStats,
    timeline: StepTimeline | None,
    width: int,
    max_rows: int,
) -> list[Row]:
    """Return at most `max_rows` rows of notes on the stats and the last step."""
    longest_notes = _longest_step_note(screen, stats)
    speed_notes = [*_between_steps_note(stats), *longest_notes, *host_waits(stats.disjoint_phases)]
    texts = [
        *(speed_notes if screen.shown_stall is None else []),
        *timed_steps_note(stats.disjoint_phases),
        *missing_phase_notes(process, stats),
    ]
    if timeline is not None and timeline.step.missing_spans:
        undrawn_text = f"{format_count(timeline.step.missing_spans)} spans of the last step are not drawn"
        texts.append(f"{undrawn_text}: only the first {MAX_SPANS} of a step are recorded")
    if not texts or not max_rows:
        return []
    text = " · ".join(texts)
    return wrap_to_rows(text, width, max_rows=max_rows)


def _between_steps_note(stats: StepStats) -> list[str]:
    """Return a note on the share of training time outside the steps, if it is large enough to matter."""
    rate = stats.rate
    if rate is None or not rate.differs_within_steps or rate.steps_per_s_within <= rate.steps_per_s:
        return []
    share = format_percent(1 - rate.steps_per_s / rate.steps_per_s_within)
    return [f"{share} of the training time is outside the steps: {format_rate(rate)}"]


def _longest_step_note(screen: ScreenData, stats: StepStats) -> list[str]:
    """Return a note on the longest step of the time range, if it is an outlier."""
    longest = next(iter(screen.state.slowest.steps), None)
    if longest is None or longest.wall_ns < _OUTLIER_RATIO * (stats.median_ns or longest.wall_ns):
        return []
    rank_text = "" if longest.rank is None else f" of rank {longest.rank}"
    phase = WAITING_TEXT if longest.phase == INPUT else longest.phase
    excess_text = "" if phase is None else f", {format_duration(longest.excess_ns)} more than usual in {phase}"
    duration, time = format_duration(longest.wall_ns), format_short_elapsed(longest.start_ns)
    return [f"longest step{rank_text}: {duration} at {time}{excess_text}"]


def is_expected_phase(process: Process, stats: StepStats, phase: str) -> bool:
    """Return whether `phase` is expected in these stats, so that its absence needs a reason.

    The phases of a DataParallel call are expected only in dp.
    """
    definition = phase_by_display_name(phase)
    is_dp = process.distributed is None and stats.mode == "dp"
    return not definition.optional and (is_dp or not definition.of_call)


def missing_phase_notes(process: Process, stats: StepStats) -> list[str]:
    """Return a note for each reason why phases are missing: the names of these phases, then the reason."""
    call = process.last_called_root.last if process.last_called_root is not None else None
    reasons: dict[str, list[str]] = {}
    for phase in stats.disjoint_phases:
        if not phase.ran and is_expected_phase(process, stats, phase.name):
            reasons.setdefault(_missing_phase_reason(call, phase.name), []).append(phase.name)
    return [f"no {_join_phase_names(names)}: {reason}" for reason, names in reasons.items()]


def _join_phase_names(names: Sequence[str]) -> str:
    """Join names: "data, gather"; three or more adjacent ones as "scatter to gather"."""
    start = PHASES.index(names[0])
    if len(names) > 2 and PHASES[start : start + len(names)] == tuple(names):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def _missing_phase_reason(call: Call | None, phase: str) -> str:
    definition = phase_by_display_name(phase)
    phase_name = definition.name
    if not definition.of_call:
        return definition.absent
    if call is None:
        return "no call was seen"
    if phase_name in call.absent:
        return sanitize_line(call.absent[phase_name], 200)
    if call.stages:
        return "the model is split into stages, not copied"
    if call.mode != "dp" or len(call.devices) < 2:
        return "one device"
    if phase_name in call.phases:
        return "part of it ran during backward and cannot be separated from it"
    return definition.absent
