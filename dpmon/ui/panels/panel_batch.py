"""Panel 3, where the time of a batch goes: share, median and p95 of each phase, their history, and the last step."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.model.findings.phase_notes import host_waits, timed_steps_note
from dpmon.model.run_snapshot import NO_STEPS, PHASES, Process
from dpmon.model.slow_steps import INPUT, WAITING_TEXT
from dpmon.model.step_timeline import StepTimeline, last_step_timeline
from dpmon.record.record_types import MAX_SPANS, Call
from dpmon.record.schema import SECOND, phase_by_display_name
from dpmon.sanitize import sanitize_line
from dpmon.store.step_stats import PhaseStats, StepStats
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import (
    format_count,
    format_duration,
    format_percent,
    format_quantity,
    format_rate,
    format_time_range,
    short_clock,
)
from dpmon.ui.chart import scale_top, stacked_columns
from dpmon.ui.panels.panel_replicas import size_text
from dpmon.ui.screen_data import BEFORE_STALL, NAMES, ScreenData, format_mode_and_devices
from dpmon.ui.step_waterfall import OTHER_FORWARD_NAMES, render_waterfall, visible_lanes
from dpmon.ui.styled_rows import Row, dim_row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import LETTERS, TerminalStyle, letter_position
from dpmon.ui.time_axis import axis_below_chart, build_chart_columns, make_time_axis, stall_intervals

WITHOUT_RANKS = 8
"""Rows of the panel that never show a rank: its frame, its table and its history."""
_RANKS_DRAWN = 64
_STANDS_OUT = 3
"""The longest step is mentioned if it takes at least this many times the median."""
_LEAST = 4
"""Up to this height, notes have no row."""
_TALL = 9
"""From this height on, notes have two rows. Without the notes, quantities need this many rows, and p95 one fewer."""


def preferred_height(facts: ScreenData) -> int:
    """Rows that the whole content needs: figures, a history, the last step."""
    timeline = _timeline(facts)
    if timeline is None:
        return 4 + 5 + 3
    lanes = len(_ranks(facts)) or 1 + len(visible_lanes(timeline))
    sampled = facts.state.last_sample is not None
    return 4 + bool(_quantity_texts(shown_stats(facts))) + 5 + 1 + bool(timeline.step.buckets) + sampled + min(lanes, 9)


def _timeline(facts: ScreenData) -> StepTimeline | None:
    """The last step; None in a stall, in which it would look like the present."""
    process = facts.process
    return None if process is None or facts.shown_stall is not None else last_step_timeline(process)


def shown_stats(facts: ScreenData) -> StepStats:
    """Figures of the current mode in the time range; of the previous mode until the current one has a step there."""
    process = facts.process
    return NO_STEPS if process is None else process.ranged


def panel_title(facts: ScreenData, look: TerminalStyle, width: int) -> tuple[Row, Row]:
    """The panel's title with the time range, and the main numbers of that range, for a frame of `width` cells.

    In a narrow frame the last numbers give way to the mode or rank, then the time range does.
    """
    process, numbers = facts.process, shown_stats(facts)
    if not numbers.steps or process is None:
        return [(NAMES["batch"], "title")], []
    span = format_time_range(facts.view.range_s)
    dot = f" {look.glyphs.middot} "
    mode = numbers.mode
    word = format_mode_and_devices(process, look.glyphs.times)[0]
    if mode != process.mode:
        devices = () if process.compared is None else process.compared.devices
        word = f"dp {look.glyphs.times}{len(devices)}" if mode == "dp" else mode
    if process.rank is not None and len(facts.state.training_processes) > 1:
        word = process.name  # the other ranks are not in these figures
    corner: Row = [("step", "dim")]
    for name, value, style in (
        ("mean", numbers.mean_ns, "bold"),
        ("median", numbers.median_ns, "bold"),
        ("p95", numbers.p95_ns, ""),
    ):
        corner += [(f" {name}", "dim"), (align_right(format_duration(value), 8), style)]
    kind: Row = [(dot, "dim"), ("evaluation", "wait")] if numbers.evaluation else []
    head: Row = [(NAMES["batch"], "title"), (dot, "dim"), (word, f"mode.{mode}"), *kind]
    if facts.shown_stall is not None:
        return [*head, (dot + span, "dim")], [BEFORE_STALL]
    sizes = _size_text(process, dot, look)
    if row_width(head) + row_width(sizes) + row_width(corner[:-2]) + 7 <= width:
        head += sizes
    room = width - row_width(head) - 7
    while len(corner) > 3 and row_width(corner) > room:
        del corner[-2:]
    return [*head, (dot + span, "dim")] if row_width(corner) + row_width([(dot + span, "")]) <= room else head, corner


def _size_text(process: Process, dot: str, look: TerminalStyle) -> Row:
    """The sizes that the last forward received and returned, of a process without a table of them in panel 2."""
    if process.has_used_dp or process.distributed is not None or process.last_called_root is None:
        return []
    call = process.last_called_root.last
    return [(f"{dot}{size_text(call.inputs)} {look.glyphs.arrow} {size_text(call.outputs)}", "")]


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel's rows, inside its frame: figures, history, the last step, and notes at the end."""
    process, numbers = facts.process, shown_stats(facts)
    if process is None or not numbers.steps:
        return [[(facts.empty_reason("no step was traced", "no step has ended yet"), "dim")]]
    # If not all fit, the order of importance is: shares, medians, a row of notes, then the last step and the history.
    timeline = _timeline(facts)
    most = 0 if height <= _LEAST else 1 if height < _TALL else 2
    remarks = notes(facts, process, numbers, timeline, width, most, look)
    height -= len(remarks)
    # Every phase that ran has a column, and the usual phases of this mode.
    columns = [
        phase for phase in numbers.disjoint_phases if phase.ran or is_expected_phase(process, numbers, phase.name)
    ]
    table = _table(columns, numbers, width, look, height)
    if (counted := _quantity_texts(numbers)) and height >= _TALL:
        table.append([(truncate(f" {look.glyphs.middot} ".join(counted), width, look.glyphs.more), "")])
    if facts.view.zoom == "batch":
        table.append(_step_count(numbers, width, look))
    if facts.shown_stall is not None:
        table = list(map(dim_row, table))
    room = height - len(table)
    below: list[Row] = []
    if timeline is not None and room >= 1 and room != 2:
        ranks = _ranks(facts)
        most = 1 if room < 6 else max(room // 2, room - 4 if facts.view.zoom is None else 0)
        sample = facts.state.last_sample
        lanes = len(ranks) or 1 + len(visible_lanes(timeline))
        wanted = min(1 + bool(timeline.step.buckets) + (sample is not None) + lanes, most)
        below = render_waterfall(process, width, wanted, look, ranks, sample)
    above = room - len(below)
    history = history_rows(facts, process, width, above, look) if above >= 2 else []
    blank: list[Row] = [[]] * (height - len(table) - len(history) - len(below)) if remarks else []
    return [*table, *history, *below, *blank, *remarks]


def _quantity_texts(numbers: StepStats) -> list[str]:
    """What the steps counted, except where it is one in each step."""
    return [
        format_quantity(*each, numbers.steps) for each in numbers.known_quantities if each[1].total != numbers.steps
    ]


def _ranks(facts: ScreenData) -> list[Process]:
    """All ranks with a step: the straggler, the rank that panel 3 shows, the others; empty if there is one process."""
    found, state = facts.state.straggler, facts.state
    slow = found.processes if found is not None else ()
    first = [one.process for one in state.training_processes[:_RANKS_DRAWN]]
    known = [state.processes[each] for each in dict.fromkeys((*slow, *first)) if each in state.processes]
    ranks = [one for one in known if one.rank is not None and one.last_step is not None and one.last_step.phases]
    ranks.sort(key=lambda one: (one.process not in slow, one is not facts.process, one.rank))
    return ranks[:_RANKS_DRAWN] if len(ranks) > 1 else []


def _step_count(numbers: StepStats, width: int, look: TerminalStyle) -> Row:
    """The number of steps behind the figures."""
    text = f"{format_count(numbers.steps)} steps"
    if not look.has_color or look.glyphs.ascii:
        text += "; a small letter: too short for a cell"
    return [(truncate(text, width, look.glyphs.more), "dim")]


def _name(phase: str, room: int, look: TerminalStyle, *, rest: bool) -> Row:
    """The phase's name, with its letter marked in the phase's style.

    `rest`: the call's phases are shown separately, so forward is only the rest.
    """
    if rest and phase == "forward":
        text = next((word for word in OTHER_FORWARD_NAMES if len(word) < room), OTHER_FORWARD_NAMES[-1])[: room - 1]
        return [(text[0].upper(), f"chip.{phase}"), (text[1:], "")]
    text = phase if len(phase) < room else phase_by_display_name(phase).short_display_name[: room - 1]
    letter, at = LETTERS[phase], letter_position(phase, text)
    if letter == ".":
        return [("." if not look.has_color or look.glyphs.ascii else " ", f"chip.{phase}"), (text, "")]
    return [*([(text[:at], "")] if at else []), (letter, f"chip.{phase}"), (text[at + 1 :], "")]


def _table(
    columns: Sequence[PhaseStats], numbers: StepStats, width: int, look: TerminalStyle, height: int
) -> list[Row]:
    label, cell = _widths(width, len(columns))
    whole = _has_step(width, len(columns))
    rest = any(phase.ran for phase in columns if phase_by_display_name(phase.name).of_call)

    def head(phase: str) -> Row:
        name = _name(phase, cell, look, rest=rest)
        return [(" " * (cell - row_width(name)), ""), *name]

    def time(ns: float | None) -> str:
        return format_duration(ns) if cell > 8 else format_duration(ns, "")

    def line(word: str, last: str, values: Sequence[str], style: str) -> Row:
        row: Row = [(word.ljust(label)[:label], "dim")]
        for phase, value in zip(columns, values, strict=True):
            row.append((align_right(value, cell), style if phase.ran else "dim"))
        if whole:
            row.append((align_right(last, cell), style))
        return row

    header: Row = [(" " * label, "")]
    for phase in columns:
        header += head(phase.name)
    if whole:
        header.append((align_right("step", cell), "dim"))
    shares = [
        format_percent(phase.share) if cell > 5 else format_percent(phase.share).replace(" ", "") for phase in columns
    ]
    rows = [header, line("share", "", shares, "bold")]
    if height >= 3:
        rows.append(line("median", time(numbers.median_ns), [time(phase.median_ns) for phase in columns], ""))
    if label and height >= 6 and any(phase.device_count for phase in numbers.disjoint_phases):
        # On the slowest device; of data, on the device that waits least. Medians over the steps with known times.
        rows.append(line("device", "", [time(phase.device_ns) for phase in columns], ""))
    if height >= _TALL - 1:
        rows.append(line("p95", time(numbers.p95_ns), [time(phase.p95_ns) for phase in columns], "dim"))
    return rows


def _widths(width: int, columns: int) -> tuple[int, int]:
    """The widths of the label and of each column; the step has a column too, if it fits."""
    label = 7 if width >= 100 else 6 if width >= 70 else 0
    return label, min(max((width - label) // (columns + _has_step(width, columns)), 4), 12)


def _has_step(width: int, columns: int) -> bool:
    """Whether the step has a column. If it does not fit, its times are in the title."""
    label = 6 if width >= 70 else 0
    return (width - label) // (columns + 1) >= 7 or (width - label) // columns < 7


def history_rows(
    facts: ScreenData, process: Process, width: int, height: int, look: TerminalStyle, *, by_mode: bool = False
) -> list[Row]:
    """The columns with their scale at the left, and a row below with the axis; `by_mode`: without their phases."""
    axis = make_time_axis(facts)
    gutter = max(len(short_clock(axis.start_s * SECOND)) + 1, 8)
    room = width - gutter
    picture = build_chart_columns(process, axis, room, stall_intervals(facts))
    labeled = height >= 3
    bars = height - 1 if labeled else height
    top = scale_top(picture.columns)
    known = any(column.count for column in picture.columns)
    rows = stacked_columns(picture.columns, room, bars, top, look, picture.part_count, by_mode=by_mode)
    out: list[Row] = []
    for index, row in enumerate(rows):
        scale = (
            "" if not known else format_duration(top) if index == 0 else "0" if index == bars - 1 and bars > 1 else ""
        )
        out.append([(align_right(scale, gutter - 1) + " ", "dim"), *row])
    if labeled:
        out.append(axis_below_chart(facts, axis, picture, gutter, room, look))
    return out


# ------------------------------------------------------------------------------------------------ notes


def notes(
    facts: ScreenData,
    process: Process,
    numbers: StepStats,
    timeline: StepTimeline | None,
    width: int,
    most: int,
    look: TerminalStyle,
) -> list[Row]:
    """At most `most` rows of notes on the figures and the last step."""
    long = _stalls(facts, numbers) or unevenness(process) or _longest_step_note(facts, numbers)
    usual = [*_between_steps_note(numbers), *long, *host_waits(numbers.disjoint_phases)]
    texts = [
        *(usual if facts.shown_stall is None else []),
        *timed_steps_note(numbers.disjoint_phases),
        *missing_phase_notes(process, numbers),
    ]
    if timeline is not None and timeline.step.missing_spans:
        more = f"{format_count(timeline.step.missing_spans)} spans of the last step are not drawn"
        texts.append(f"{more}: only the first {MAX_SPANS} of a step are recorded")
    if not texts or not most:
        return []
    text = f" {look.glyphs.middot} ".join(texts)
    return wrap_to_rows(text, width, max_rows=most, more=look.glyphs.more)


def _between_steps_note(numbers: StepStats) -> list[str]:
    """The share of training time between steps, if it is large enough to matter."""
    rate = numbers.rate
    if rate is None or not rate.differs_within_steps or rate.steps_per_s_within <= rate.steps_per_s:
        return []
    share = format_percent(1 - rate.steps_per_s / rate.steps_per_s_within)
    return [f"{share} of the time is between steps: {format_rate(rate)}"]


def _stalls(facts: ScreenData, numbers: StepStats) -> list[str]:
    """A note that the mean includes a stall on another machine, which the process's own machine did not know of."""
    own, known = numbers.tally, any(each.node is not None for each in facts.state.training_processes)
    for one in facts.state.stalls if known else ():
        if one.end_ns is not None and one.end_ns > (own.first_ns or 0) and (own.high_ns or 0) > one.duration_ns(0) / 2:
            return [f"the mean includes a stall of {one.duration_ns(0) / SECOND:,.0f} s"]
    return []


def unevenness(process: Process) -> list[str]:
    """A note that a few steps take most of the time, with the phase that makes them longer; empty for even steps."""
    found = process.uneven
    if found is None:
        return []
    if found.phase == INPUT:
        return [f"{WAITING_TEXT} took {format_percent(found.time)} of the time: the mean includes it"]
    by = f", slower in {found.phase}" if found.phase is not None else ""
    return [f"uneven steps: about {format_percent(found.steps)} take {format_percent(found.time)} of the time{by}"]


def _longest_step_note(facts: ScreenData, numbers: StepStats) -> list[str]:
    """The longest step of the time range, if it stands out."""
    one = next(iter(facts.state.slowest.steps), None)
    if one is None or one.wall_ns < _STANDS_OUT * (numbers.median_ns or one.wall_ns):
        return []
    of = "" if one.rank is None else f" of rank {one.rank}"
    phase = WAITING_TEXT if one.phase == INPUT else one.phase
    why = "" if phase is None else f", {format_duration(one.excess_ns)} more than usual in {phase}"
    return [f"longest step{of}: {format_duration(one.wall_ns)} at {short_clock(one.start_ns)}{why}"]


def is_expected_phase(process: Process, numbers: StepStats, phase: str) -> bool:
    """Whether `phase` is expected in these figures, so that a step without it needs a reason.

    The phases of a DataParallel call are expected only in dp.
    """
    known = phase_by_display_name(phase)
    dp = process.distributed is None and numbers.mode == "dp"
    return not known.optional and (dp or not known.of_call)


def missing_phase_notes(process: Process, numbers: StepStats) -> list[str]:
    """A note for each reason why phases are missing: the names of these phases, then the reason."""
    call = process.last_called_root.last if process.last_called_root is not None else None
    reasons: dict[str, list[str]] = {}
    for phase in numbers.disjoint_phases:
        if not phase.ran and is_expected_phase(process, numbers, phase.name):
            reasons.setdefault(_missing_phase_reason(process, call, phase.name), []).append(phase.name)
    return [f"no {_join_phase_names(names)}: {reason}" for reason, names in reasons.items()]


def _join_phase_names(names: Sequence[str]) -> str:
    """Join names: "data, gather"; three or more adjacent ones as "scatter to gather"."""
    first = PHASES.index(names[0])
    if len(names) > 2 and PHASES[first : first + len(names)] == tuple(names):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def _missing_phase_reason(process: Process, call: Call | None, phase: str) -> str:
    known = phase_by_display_name(phase)
    own = known.name
    if not known.of_call:
        return known.absent
    if call is None:
        return "no call was seen"
    if own in call.absent:
        return sanitize_line(call.absent[own], 200)
    if call.stages:
        return "the model is split into stages, not copied"
    if call.mode != "dp" or len(call.devices) < 2:
        return "one device"
    if own in call.phases:
        return "part of it ran during backward and cannot be separated from it"
    return known.absent
