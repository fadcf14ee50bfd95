"""The first rows: the run, its state, how far it is and how fast; below them the most important message now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dpmon.model.epoch_progress import Progress, format_time_left
from dpmon.model.findings.failure_findings import INVALID_LOSS_TEXTS
from dpmon.model.findings.finding_evidence import MIN_DATA_SHARE, MIN_STEPS, data_share
from dpmon.model.stragglers import short_sentence
from dpmon.model.throughput import Throughput, throughput_of
from dpmon.record.schema import SECOND, SPAN_PHASES
from dpmon.record.shared_names import node_suffix
from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import EVALUATING, STALLED, STARTING, WAITING_FOR_DATA
from dpmon.text.cells import align_right, span_width, truncate, wrap_text
from dpmon.text.formatting import (
    format_clock,
    format_compact,
    format_count,
    format_count_with_noun,
    format_long_duration,
    format_minutes,
    format_percent,
    format_rate_within_steps,
)
from dpmon.ui.panels.panel_progress import format_batch_of_total, loss_span, losses_in, progress_in
from dpmon.ui.panels.rank_map import STYLES
from dpmon.ui.screen_data import READING, ActivityText, ScreenData, describe_activity, format_mode_and_devices
from dpmon.ui.styled_rows import Row, fit_row, join_left_right, plain_text, row_width
from dpmon.ui.terminal_style import TerminalStyle

WARNING_SHOWN_NS = 60 * SECOND
DONE_SHOWN_NS = 15 * SECOND
_ALL_OF_IT = "  W: all of it "
_NAME, _STATE = 10, len(WAITING_FOR_DATA) + 2
"""Fewest cells for the run's name and for its state, whatever they are, so that the figures beside them stand still."""
_LEFT = len(" · took 9.99 s")
"""Fewest cells for the time left."""
_BRANDED = 140
"""Width (cells) from which the first row begins with the word dpmon."""
_BEGINNING = 16
"""Fewest cells for a message beside the state."""


class _Part(NamedTuple):
    """Figures in a fixed width, never cut."""

    row: Row
    rank: int
    """Parts with a higher rank are left out first."""
    short: Row | None = None
    """The form for less room."""


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """`height` rows of `width` cells: two where panels stand side by side, three on a narrow screen."""
    alive, more = describe_activity(facts), look.glyphs.more
    figures, about = _figures(facts, look), [_Part([(format_clock(facts.elapsed_ns), "")], 1), *_mode(facts, look)]
    if height >= 3:
        first, _ = _first(facts, alive, about, width, look)
        second, left_out = _choose_fitting_parts(figures, width - 2)
        rows: list[Row] = [first, [(" ", ""), *second]]
    else:
        first, left_out = _first(facts, alive, [about[0], *figures, *about[1:]], width, look)
        rows = [first]
    told = reply_message(facts, look)
    before: Row = []
    if alive.detail not in plain_text(first) and facts.stop_progress is None and not told:
        before = [(f"{alive.word}: ", alive.style), (alive.detail, ""), ("  ", "")]
    room = width - 2 - row_width(before)
    message = _message(facts, look, room, left_out)
    if height >= 3 and facts.shown_stall is not None:  # the sentence needs more room than the rates, which are unknown
        sentence, *rest = wrap_text(plain_text(_stall_message(facts, look)), width - 2, 2, more)
        rows[1] = [(" ", ""), (sentence, "bad")]
        if message == _stall_message(facts, look):
            known = second if progress_in(facts).epoch is not None and not facts.is_over else []
            message = [(rest[0], "bad")] if rest else _warning(facts) or known
    corner = _lost_records_part(facts)
    warned = bool(message) and message == _warning(facts)
    if warned and 1 + row_width(before) + row_width(message) + row_width(corner) > width:
        corner = [(_ALL_OF_IT, "dim"), *corner]
    if before and row_width(message) > room - row_width(corner):
        if not message or message[0][1] == "dim":
            message = []
        elif room - row_width(corner) < _BEGINNING:
            before = []
    message = [(" ", ""), *before, *message]
    rows.append(
        join_left_right(message, corner or _next_command_hint(facts, width - row_width(message), look), width, more)
    )
    blank: Row = [(" " * width, "")]
    return [*(fit_row(row, width, more) for row in rows), *[blank] * height][:height]


def _choose_fitting_parts(parts: Sequence[_Part], room: int) -> tuple[Row, list[_Part]]:
    """The parts that fit in `room` cells, two cells apart, in their order; and the others."""
    shown: dict[int, Row] = {}
    for index in sorted(range(len(parts)), key=lambda at: parts[at].rank):
        for form in (parts[index].row, parts[index].short):
            if form is not None and row_width(form) + 2 * bool(shown) <= room:
                room -= row_width(form) + 2 * bool(shown)
                shown[index] = form
                break
    row: Row = []
    for index in sorted(shown):
        row += [*([("  ", "")] if row else []), *shown[index]]
    return row, [part for index, part in enumerate(parts) if index not in shown]


def _first(
    facts: ScreenData, alive: ActivityText, parts: Sequence[_Part], width: int, look: TerminalStyle
) -> tuple[Row, list[_Part]]:
    """The first row: name and state at the left, these parts at the right; and the parts without room."""
    brand = " dpmon  " if width >= _BRANDED else " "
    head: Row = [("FROZEN ", "wait")] if facts.view.is_frozen else []
    if facts.past is not None:
        ago = ""
        if facts.past.now_ns is not None:
            since = max(facts.past.now_ns - facts.now_ns, 0) / SECOND
            ago = f", {since:.0f} s ago" if since < 59.5 else f", {format_minutes(since)} ago"
        head = [(f"at {format_clock(facts.now_ns)}{ago} ", "wait")]
    sign = {"good": look.glyphs.dot, "bad": look.glyphs.cross}.get(alive.style, look.glyphs.ring)
    sign = look.glyphs.square if alive.word == STALLED.upper() else sign
    state: Row = [*head, (f"{sign} {alive.word}", alive.style)]
    colon = ":" if alive.word in (STARTING, "ending") else ""
    detail: Row = [(f"{colon} {alive.detail}", "dim")] if alive.detail else []
    if facts.shown_stall is not None:
        state, detail = [*state, *detail], []
    room = width - len(brand) - min(span_width(facts.title), _NAME) - 4
    figures, left_out = _choose_fitting_parts(parts, room - max(row_width(state), min(_STATE, room // 3)))
    room = width - len(brand) - row_width(figures) - 4
    name = truncate(facts.title, max(room - row_width(state), _NAME), look.glyphs.more)
    # Show the detail in full or not at all: if it does not fit here, the row below shows it.
    if span_width(name) + row_width(state) + row_width(detail) <= room:
        state += detail
    left: Row = [(brand, "dim"), (name + "  ", "title"), *state]
    return join_left_right(left, [*figures, (" ", "")] if figures else [], width, look.glyphs.more), left_out


def _speed(facts: ScreenData) -> Throughput:
    process = facts.process
    if facts.is_reading and not facts.is_over:  # the newest steps read so far are old ones
        return Throughput(None, READING)
    if process is None:
        return Throughput(None, "no training process yet")
    return throughput_of(process, facts.state, facts.now_ns, facts.activities.get(process.process, ("", 0))[1])


def _mode(facts: ScreenData, look: TerminalStyle) -> list[_Part]:
    process = facts.process
    mode, where = format_mode_and_devices(process, look.glyphs.times)
    where = format_count_with_noun(len(facts.state.nodes), "node") if facts.state.nodes else where
    where = process.node or where if process is not None and facts.view.node_number is not None else where
    if process is None or not process.mode:
        return []
    return [_Part([(mode, f"mode.{process.mode}")], 5), *([_Part([(where, "")], 8)] if where else [])]


def _figures(facts: ScreenData, look: TerminalStyle) -> list[_Part]:
    """How far the training is, and how fast; after the end, the means. Nothing before the first step."""
    process, rates = facts.process, _speed(facts)
    if process is None or process.last_step is None:
        return []
    step = _Part([("step ", "dim"), (format_count(process.last_step.step).ljust(7), "bold")], 2)
    found = progress_in(facts)
    parts = [step]
    if found.epoch is not None:
        epoch: Row = [(f"epoch {format_count(found.epoch)}", ""), (f" {look.glyphs.middot} ", "dim")]
        batches = [*epoch, (done, "bold")] if (done := format_batch_of_total(found)) else epoch[:1]
        left = "" if found.left_ns is None else f" {look.glyphs.middot} {format_time_left(found.left_ns, None)} left"
        if found.batch is not None and found.batch == found.batches:
            left = f" {look.glyphs.middot} took {format_long_duration(found.epochs[-1].took_ns)}"
        timed = found.batches is not None and facts.shown_stall is None
        parts = [_Part([*batches, (left.ljust(_room_for_left(found)), "")] if timed else batches, 2, batches)]
    if found.epoch is not None and facts.is_live and facts.run_state.word == EVALUATING:  # the rates are of training
        own = replace(found, batch=found.evaluated, batches=found.evaluated_of)
        return [_Part([*epoch, ("evaluating ", ""), (format_batch_of_total(own), "bold")], 2)]
    if facts.shown_stall is not None and not facts.is_over:  # the rates are of the time before the stall
        return parts
    rates_shown = [(rates.samples_per_s, " samples/s", 4), (rates.steps_per_s, " steps/s", 9)]
    if rates.rate is not None and rates.samples_per_s is None:
        rates_shown = [(rates.steps_per_s, " steps/s", 4)]
    for number, unit, rank in rates_shown:
        mean, text = "mean " if facts.is_over and len(parts) == 1 else "", format_compact(number)
        parts.append(
            _Part([(mean, "dim"), (text if facts.is_over else align_right(text, 5), "bold"), (unit, "dim")], rank)
        )
    values = [loss_span(one.last, 7) for one in losses_in(facts)[:2]]
    if values:
        parts.insert(2, _Part([("loss ", "dim"), *values], 6))
    within = format_rate_within_steps(rates.rate).strip()
    parts += [step._replace(rank=10)] if found.epoch is not None else []
    return [*parts[:2], _Part([(within, "dim")], 11), *parts[2:]] if within else parts


def _room_for_left(found: Progress) -> int:
    """Cells for the time left at the beginning of the epoch, so that what follows stands still."""
    begun_ns = found.epochs[-1].begin_ns if found.epochs else found.at_ns
    return max(len(f" · {format_time_left(found.at_ns - begun_ns + (found.left_ns or 0), None)} left"), _LEFT)


def _lost_records_part(facts: ScreenData) -> Row:
    """The number of records that are missing from the screen, if any."""
    lost = facts.state.missed
    if not lost:
        return []
    return [(f"  {format_count(lost)} records dropped ", "wait")]


def reports_straggler(facts: ScreenData, look: TerminalStyle) -> bool:
    """Whether the message is about a straggler, so that no panel has to repeat it."""
    first = _problem_nodes(facts) or _warning(facts) or facts.state.unfit
    other = facts.stop_progress is not None or reply_message(facts, look) or first
    return not other and facts.current_straggler is not None


def _message(facts: ScreenData, look: TerminalStyle, width: int, left_out: Sequence[_Part]) -> Row:
    """The most important event now: the end, an answer, a warning; else the figures left out above, and plain facts."""
    if facts.stop_progress is not None:  # also after the command has ended, while it has processes left
        return [("stopping: ", "wait"), (sanitize_line(facts.stop_progress, 200), "")]
    reply = reply_message(facts, look)
    if reply:
        return reply
    if facts.shown_stall is not None:
        return _stall_message(facts, look)
    if facts.is_over:
        return _after_end_message(facts)
    warned = _problem_nodes(facts) or _warning(facts)
    if warned:
        return warned
    if facts.state.unfit is not None:
        return _invalid_loss_message(facts)
    if facts.current_straggler is not None:  # see reports_straggler
        return [(f"{look.glyphs.focus} ", "wait"), (short_sentence(facts.current_straggler), "")]
    process = facts.process
    if facts.is_live and process is not None and process.settled.steps >= MIN_STEPS:
        share, who = data_share(process.settled), "" if process.rank is None else f"{process.name} "
        if share >= MIN_DATA_SHARE:
            words = f"{who}waits for data: {format_percent(share)} of the time of its steps"
            return [(f"{look.glyphs.focus} ", "wait"), (words, "")]
    rates = _speed(facts)
    if rates.reason not in (None, READING) and process is not None and process.last_step is not None:
        return [(rates.reason, "dim")]
    return _facts(facts, look, width, left_out)


def _stall_message(facts: ScreenData, look: TerminalStyle) -> Row:
    """Which rank stands where; at the end of the run, also its outcome."""
    text = "" if facts.shown_stall is None else sanitize_line(facts.shown_stall.text, 400)
    if facts.shown_stall is not None and facts.is_over:
        seconds = facts.shown_stall.duration_ns(facts.elapsed_ns) / SECOND
        last = f"; {facts.exit_cause}" if facts.exit_cause else ""
        text = f"the run ended in a stall of {seconds:,.0f} s: {text}{last}"
    return [(f"{look.glyphs.focus} ", "bad"), (text, "bad")]


def is_reply_cut(facts: ScreenData, width: int, look: TerminalStyle) -> bool:
    """Whether an answer does not fit in its row."""
    if facts.stop_progress is not None and not facts.is_over:
        return False
    return 1 + row_width(reply_message(facts, look)) > width - row_width(_lost_records_part(facts))


def _warning(facts: ScreenData) -> Row:
    warning = facts.state.warnings[-1] if facts.state.warnings else None
    if warning is None or facts.now_ns - (warning.t_ns or 0) >= WARNING_SHOWN_NS:
        return []
    return [("warning: ", "wait"), (sanitize_line(warning.text, 300), "")]


def _problem_nodes(facts: ScreenData) -> Row:
    """The nodes whose records do not arrive as usual, by what is wrong."""
    now_ns, found = facts.elapsed_ns, dict[str, list[str]]()
    for one in facts.state.nodes:
        trouble = one.problem_at(now_ns)
        if trouble is not None and trouble.word not in ("ended", "stopped"):
            known = found.setdefault(trouble.word, [])
            known.append(one.name if known else f"{one.name} {trouble.words(now_ns)}")
    row: Row = []
    for word, (first, *others) in sorted(found.items(), key=lambda each: each[0] in STYLES):
        count = len(others) + 1
        text = first if not others else f"{count} nodes {word} ({first.partition(' ')[0]}, {others[0]}"
        text += (")" if count == 2 else ", ...)") if others else ""
        row += [("; " if row else "", ""), (text, STYLES.get(word, "bad"))]
    return row


def _invalid_loss_message(facts: ScreenData) -> Row:
    """The first loss that was no finite number, as far as losses were read: about one in a second."""
    unfit = facts.state.unfit
    if unfit is None:
        return []
    when = "" if unfit.step is None else f", first seen in step {format_count(unfit.step)}"
    process = facts.state.processes.get(unfit.process)
    who = "" if process is None or process.rank is None else f" of {process.name}"
    loss = INVALID_LOSS_TEXTS[repr(unfit.loss)]
    return [(f"the loss{who} was {loss}{when} ({sanitize_line(unfit.place, 80)})", "bad")]


def _after_end_message(facts: ScreenData) -> Row:
    if facts.exit_cause:
        return [(facts.exit_cause, "bad")]
    if facts.exit_info is None:
        return [("the command is gone; its exit status was not recorded", "wait")]
    return _invalid_loss_message(facts) or [
        ("the run is over" if facts.playing is not None else "the run is over; this picture stays", "dim")
    ]


def _next_command_hint(facts: ScreenData, room: int, look: TerminalStyle) -> Row:
    """The next command to try after the end, if it fits in full."""
    if facts.run_info is None or not facts.is_over:
        return []
    hint = f"{look.glyphs.middot} dpmon export {sanitize_line(facts.run_info.id, 120)} writes the records "
    return [("  " + hint, "dim")] if len(hint) + 4 <= room else []


def _facts(facts: ScreenData, look: TerminalStyle, width: int, left_out: Sequence[_Part]) -> Row:
    """The figures without room above, then facts that do not change; each in full, or not at all except the first."""
    process = facts.process
    parts: list[str] = [plain_text(part.row).strip(" ()") for part in left_out]
    if process is not None:
        if process.virtual and process.mode == "dp":
            parts.append("virtual replicas: " + sanitize_line(process.mode_reason or "devices are shared", 200))
        if len(facts.state.processes) > 1:
            many = process.info.world or len(facts.state.processes)
            # Processes are numbered from 0 like ranks, but "process 1 of 2" would suggest numbers from 1.
            one = f"process {process.process}, one of {many}"
            one = one if process.rank is None else f"rank {process.rank} of {many}"
            nodes = format_count_with_noun(len(facts.state.nodes), "node")
            nodes += f", {format_count_with_noun(len(facts.state.training_processes), 'rank')}"
            parts.append(nodes if facts.state.nodes else one + node_suffix(process.node))
        for key, value in (("python", process.info.python), ("torch", process.info.torch)):
            if value is not None:
                parts.append(f"{key} {sanitize_line(value, 30)}")
    elif facts.run_info is not None and facts.run_info.python:
        parts.append(f"Python: {sanitize_line(facts.run_info.python, 200)}")
    if facts.run_info is not None and facts.run_info.options.get("mode") == "script":
        parts.append("mode script: observed only")
    dot = f" {look.glyphs.middot} "
    while len(parts) > 1 and span_width(dot.join(parts)) > width:
        parts.pop()
    return [(dot.join(parts), "dim")]


# ------------------------------------------------------------------------------------------------ answers


def reply_message(facts: ScreenData, look: TerminalStyle) -> Row:
    """The answer to the user's last request, if it is recent: a key, a pause, a mode."""
    if facts.view.message is not None:
        return [(facts.view.message, "wait")]
    if facts.is_over:
        return []
    return _failed_nodes_message(facts) or (
        _pending_request_reason(facts)
        if facts.shown_stall is not None
        else _pause_message(facts) or _answer(facts, look)
    )


def _pending_request_reason(facts: ScreenData) -> Row:
    """What a pending request waits for while the training makes no progress; empty without a request."""
    toggle = facts.mode_request if facts.mode_request is not None and facts.mode_request.status == "pending" else None
    busy = [(since, process) for process, (doing, since) in facts.activities.items() if since > 0 and doing != "ended"]
    if not busy or not (toggle or facts.pause_state.is_pending):
        return []
    since, number = min(busy)
    process = facts.state.processes.get(number)
    who = "the training" if process is None or process.rank is None else process.name
    what = f"switch to {toggle.mode}" if toggle else "pause" if facts.pause_state.is_requested else "go on"
    doing, waited = facts.activities[number][0], (facts.now_ns - since) / 1e9
    place = f"in {doing}" if doing in SPAN_PHASES else "in the script's own work"
    return [(f"{who} has been {place} for {waited:.0f} s: ", "wait"), (f"it will {what} when it comes back", "")]


def _reply_count(facts: ScreenData) -> str:
    """How many nodes have answered a pending request; empty on one machine."""
    found = facts.node_replies
    return (
        ""
        if found is None
        else f"; {found.reply_count} of {format_count_with_noun(found.request_count, 'node')} answered"
    )


def _failed_nodes_message(facts: ScreenData) -> Row:
    """The nodes that did not do what the user asked for, and why."""
    failed = {} if facts.node_replies is None else facts.node_replies.failures
    return [part for name, text in failed.items() for part in ((f"{name}: ", "bad"), (f"{text}  ", ""))]


def _pause_message(facts: ScreenData) -> Row:
    """A pause or its end, requested but not yet in force; or why it was refused."""
    pausing = facts.pause_state
    if pausing.is_pending:
        what, when = ("pause", "after the step it is in") if pausing.is_requested else ("resume", "in a moment")
        return [(what, ""), (" pending", "wait"), (f": the training {what}s {when}{_reply_count(facts)}", "dim")]
    last = facts.state.pauses[-1] if facts.state.pauses else None
    if last is None or last.t_ns is None or facts.now_ns - last.t_ns > DONE_SHOWN_NS:
        return []
    if last.refused is not None:
        return [("pause", ""), (" refused: ", "bad"), (sanitize_line(last.refused, 300), "")]
    if last.reason is not None and not last.paused:
        return [("the pause is over: ", "wait"), (sanitize_line(last.reason, 300), "")]
    return []


def _answer(facts: ScreenData, look: TerminalStyle) -> Row:
    toggle = facts.mode_request
    if toggle is None:
        return []
    style = f"mode.{toggle.mode}"
    if toggle.status == "pending":
        waited = max(facts.now_ns - toggle.since_ns, 0) / 1e9
        note = "the training answers at its next call"
        if not facts.is_reading and (facts.process is None or facts.process.seen_ns < 0):
            note = "the training answers at its first call"
        elif facts.pause_state.since_ns is not None:
            note = "the training answers once it goes on (p)"
        return [
            (f"{look.glyphs.arrow} ", ""),
            (toggle.mode, style),
            (" pending ", "wait"),
            (f"{waited:.0f} s: {note}{_reply_count(facts)}", "dim"),
        ]
    if facts.now_ns - toggle.since_ns > DONE_SHOWN_NS:
        return []
    if toggle.status == "refused":
        why = sanitize_line(toggle.reason, 300) if toggle.reason else "no reason was given"
        return [(toggle.mode, style), (" refused: ", "bad"), (why, "")]
    at = " done" if toggle.step is None else f" from step {format_count(toggle.step)} on"
    return [(toggle.mode, style), (at, "good")]
