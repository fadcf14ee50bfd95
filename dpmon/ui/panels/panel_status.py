"""The first rows: the run, its state, progress and rates; below them the most important message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dpmon.model.epoch_progress import Progress, format_time_left
from dpmon.model.findings.correctness_findings import KIND as WRONG
from dpmon.model.findings.failure_findings import INVALID_LOSS_TEXTS
from dpmon.model.findings.finding_evidence import MIN_DATA_SHARE, MIN_STEPS, step_share
from dpmon.model.recorded_stalls import final_stall_sentence
from dpmon.model.stragglers import short_sentence
from dpmon.model.throughput import Throughput, throughput_of
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import node_suffix
from dpmon.run.run_registry import short_name
from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import EVALUATING, STALLED, STARTING, WAITING_FOR_DATA
from dpmon.store.step_stats import compute_phase_stats, rate_to_json
from dpmon.text.cells import align_right, span_width, truncate, wrap_text
from dpmon.text.formatting import (
    format_compact,
    format_count,
    format_count_with_noun,
    format_elapsed,
    format_long_duration,
    format_minutes,
    format_percent,
    format_rate_note,
    format_updates,
)
from dpmon.ui.panels import panel_stall
from dpmon.ui.panels.panel_progress import format_batch_of_total, loss_span, shown_losses, shown_progress
from dpmon.ui.panels.rank_map import PROBLEM_STYLES
from dpmon.ui.screen_data import ActivityText, ScreenData, describe_activity, format_mode_and_devices, last_mode_reply
from dpmon.ui.styled_rows import Row, fit_row, join_left_right, plain_text, row_width

WARNING_SHOWN_NS = 60 * SECOND
DONE_SHOWN_NS = 15 * SECOND
_MIN_NAME_CELLS, _MIN_STATE_CELLS = 10, len(WAITING_FOR_DATA) + 2
"""Fewest cells for the run's name and its state, whatever they are, so that the metrics next to them do not move."""
_MIN_TIME_LEFT_CELLS = len(" · took 9.99 s")
"""Fewest cells for the time left."""
_MIN_BRAND_CELLS = 140
"""Fewest cells of a first row that begins with the word dpmon."""
_MIN_MESSAGE_CELLS = 16
"""Fewest cells for a message next to the state."""


class _StatusPart(NamedTuple):
    """A part of the first rows with a fixed width, shown in full or not at all."""

    row: Row
    rank: int
    """Parts with a higher rank are left out first."""
    short: Row | None = None
    """A shorter form."""


def render_panel(screen: ScreenData, width: int, height: int) -> list[Row]:
    """Return `height` rows of `width` cells: two if panels are side by side, three on a narrow screen."""
    activity = describe_activity(screen)
    metrics, modes = _metric_parts(screen), _mode_parts(screen)
    clock = _StatusPart([(format_elapsed(screen.elapsed_ns), "")], 1)
    if height >= 3:
        first, _ = _first_row(screen, activity, [clock, *modes], width)
        second, omitted = _choose_fitting_parts(metrics, width - 2)
        rows: list[Row] = [first, [(" ", ""), *second]]
    else:
        first, omitted = _first_row(screen, activity, [clock, *metrics, *modes], width)
        rows = [first]
    reply = reply_message(screen)
    detail_row: Row = []
    if activity.detail not in plain_text(first) and screen.stop_progress is None and not reply:
        separator = " " if screen.is_over else ": "
        detail_row = [(f"{activity.word}{separator}", activity.style), (activity.detail, ""), ("  ", "")]
    max_cells = width - 2 - row_width(detail_row)
    message = _message_row(screen, max_cells, omitted)
    if height >= 3 and screen.shown_stall is not None:  # the sentence needs more room than the rates, which are unknown
        sentence, *continuation = wrap_text(plain_text(_stall_message(screen)), width - 2, 2)
        rows[1] = [(" ", ""), (sentence, "bad")]
        if message == _stall_message(screen):
            progress_row = second if shown_progress(screen).epoch is not None and not screen.is_over else []
            message = [(line, "bad") for line in continuation] or _recent_warning(screen) or progress_row
    corner = _lost_records_part(screen)
    if detail_row and row_width(message) > max_cells - row_width(corner):
        first_style = next((text_style for _, text_style in message), "dim")
        if first_style == "dim":
            message = []
        elif max_cells - row_width(corner) < _MIN_MESSAGE_CELLS:
            detail_row = []
    message = [(" ", ""), *detail_row, *message]
    corner = corner or _next_command_hint(screen, width - row_width(message))
    rows.append(join_left_right(message, corner, width))
    blank_row: Row = [(" " * width, "")]
    return [*(fit_row(row, width) for row in rows), *[blank_row] * height][:height]


def _choose_fitting_parts(parts: Sequence[_StatusPart], free_cells: int) -> tuple[Row, list[_StatusPart]]:
    """Return the parts that fit in `free_cells` cells, two cells apart, in their order; and the other parts."""
    rows_by_index: dict[int, Row] = {}
    for index in sorted(range(len(parts)), key=lambda index: parts[index].rank):
        for form in (parts[index].row, parts[index].short):
            if form is not None and row_width(form) + 2 * bool(rows_by_index) <= free_cells:
                free_cells -= row_width(form) + 2 * bool(rows_by_index)
                rows_by_index[index] = form
                break
    row: Row = []
    for index in sorted(rows_by_index):
        row += [*([("  ", "")] if row else []), *rows_by_index[index]]
    return row, [part for index, part in enumerate(parts) if index not in rows_by_index]


def _first_row(
    screen: ScreenData, activity: ActivityText, parts: Sequence[_StatusPart], width: int
) -> tuple[Row, list[_StatusPart]]:
    """Return the first row, with name and state at the left and these parts at the right; and the omitted parts."""
    brand = " dpmon  " if width >= _MIN_BRAND_CELLS else " "
    prefix: Row = [("FROZEN ", "wait")] if screen.cursor.is_frozen else []
    if screen.cursor.is_looking_back:
        ago_text = ""
        if not screen.cursor.has_ended:
            age_s = max(screen.cursor.present_ns - screen.now_ns, 0) / SECOND
            ago_text = f", {age_s:.0f} s ago" if age_s < 59.5 else f", {format_minutes(age_s)} ago"
        prefix = [(f"at {format_elapsed(screen.now_ns)}{ago_text} ", "wait")]
    mark = {"good": "●", "bad": "✗"}.get(activity.style, "○")
    if activity.word == STALLED.upper():
        mark = "■"
    state: Row = [*prefix, (f"{mark} {activity.word}", activity.style)]
    colon = ":" if activity.word in (STARTING, "ending") else ""
    detail: Row = [(f"{colon} {activity.detail}", "dim")] if activity.detail else []
    if screen.shown_stall is not None:
        state, detail = [*state, *detail], []
    free_cells = width - len(brand) - min(span_width(screen.title), _MIN_NAME_CELLS) - 4
    state_width = max(row_width(state), min(_MIN_STATE_CELLS, free_cells // 3))
    metrics, omitted = _choose_fitting_parts(parts, free_cells - state_width)
    free_cells = width - len(brand) - row_width(metrics) - 4
    name = truncate(screen.title, max(free_cells - row_width(state), _MIN_NAME_CELLS))
    # Show the detail in full or not at all: if it does not fit here, the row below shows it.
    if span_width(name) + row_width(state) + row_width(detail) <= free_cells:
        state += detail
    left: Row = [(brand, "dim"), (name + "  ", "title"), *state]
    return join_left_right(left, [*metrics, (" ", "")] if metrics else [], width), omitted


def _current_throughput(screen: ScreenData) -> Throughput:
    process = screen.process
    if process is None:
        return Throughput(None, "no training process yet")
    _, since_ns = screen.activities.get(process.process, ("", 0))
    return throughput_of(process, screen.state, screen.now_ns, since_ns)


def _mode_parts(screen: ScreenData) -> list[_StatusPart]:
    process = screen.process
    mode, devices = format_mode_and_devices(process)
    if process is None or not process.mode:
        return []
    if screen.state.nodes:
        devices = format_count_with_noun(len(screen.state.nodes), "node")
    if screen.view.node_number is not None:
        devices = process.node or devices
    parts = [_StatusPart([(mode, f"mode.{process.mode}")], 5)]
    return [*parts, _StatusPart([(devices, "")], 8)] if devices else parts


def _metric_parts(screen: ScreenData) -> list[_StatusPart]:
    """Return progress and rates; after the end, the means. Empty before the first step."""
    process, rates = screen.process, _current_throughput(screen)
    if process is None or process.last_step is None:
        return []
    number, updates = format_count(process.step_number), format_updates(*process.trained, " · ")
    step = _StatusPart([("step ", "dim"), (number if updates else number.ljust(7), "bold"), (updates, "")], 2)
    if (stalled_step := panel_stall.stalled_step(screen)) is not None:  # other ranks may be one step ahead
        step = step._replace(row=[("step ", "dim"), (format_count(stalled_step), "bold")])
    progress = shown_progress(screen)
    parts = [step]
    if progress.epoch is not None:
        epoch: Row = [(f"epoch {format_count(progress.epoch)}", ""), (" · ", "dim")]
        batches = [*epoch, (done, "bold")] if (done := format_batch_of_total(progress)) else epoch[:1]
        time_text = ""
        if progress.left_ns is not None:
            time_text = f" · {format_time_left(progress.left_ns, None)} left"
        if progress.batch is not None and progress.batch == progress.batches:
            time_text = f" · took {format_long_duration(progress.epochs[-1].took_ns)}"
        row = batches
        if progress.batches is not None and screen.shown_stall is None:
            row = [*batches, (time_text.ljust(_time_left_cells(progress)), "")]
        parts = [_StatusPart(row, 2, batches)]
        if screen.is_live and screen.run_state.word == EVALUATING:  # the rates are those of training
            evaluation = replace(progress, batch=progress.evaluated, batches=progress.evaluated_of)
            return [_StatusPart([*epoch, ("evaluating ", ""), (format_batch_of_total(evaluation), "bold")], 2)]
    if screen.shown_stall is not None and not screen.is_over:  # the rates are from before the stall
        return parts
    rate, units = rate_to_json(rates.rate), {"samples": 4, "steps": 9}
    if rate["tokens_per_s"] is not None:
        units = {"samples": 10, "tokens": 4, "steps": 9}
    elif rates.rate is not None and rate["samples_per_s"] is None:
        units = {"steps": 4}
    for unit, rank in units.items():
        prefix, text = "mean " if screen.is_over and len(parts) == 1 else "", format_compact(rate[f"{unit}_per_s"])
        text = text if screen.is_over else align_right(text, 5)
        parts.append(_StatusPart([(prefix, "dim"), (text, "bold"), (f" {unit}/s", "dim")], rank))
    values = [loss_span(curve.last, 7) for curve in shown_losses(screen)[:2]]
    if values:
        label = "last loss " if screen.is_over else "sampled loss "
        parts.insert(2, _StatusPart([(label, "dim"), *values], 6, [("loss ", "dim"), *values]))
    within_text = format_rate_note(rates.rate).strip()
    parts += [step._replace(rank=10)] if progress.epoch is not None else []
    return [*parts[:2], _StatusPart([(within_text, "dim")], 11), *parts[2:]] if within_text else parts


def _time_left_cells(progress: Progress) -> int:
    """Return the cells of the time left at the start of the epoch: with them, later metrics do not move."""
    start_ns = progress.epochs[-1].begin_ns if progress.epochs else progress.at_ns
    first_text = format_time_left(progress.at_ns - start_ns + (progress.left_ns or 0), None)
    return max(len(f" · {first_text} left"), _MIN_TIME_LEFT_CELLS)


def _lost_records_part(screen: ScreenData) -> Row:
    """Return the number of lost records; empty if there are none."""
    lost_count = screen.state.missed
    if not lost_count:
        return []
    return [(f"  {format_count(lost_count)} records lost ", "wait")]


def reports_straggler(screen: ScreenData) -> bool:
    """Return whether the message is about a straggler, so that no panel has to repeat it."""
    is_wrong = any(cause.kind == WRONG for cause in screen.causes)
    higher_message = _problem_nodes(screen) or _recent_warning(screen) or screen.state.unfit or is_wrong
    has_other_message = screen.stop_progress is not None or reply_message(screen) or higher_message
    return not has_other_message and screen.current_straggler is not None


def _message_row(screen: ScreenData, width: int, omitted: Sequence[_StatusPart]) -> Row:
    """Return the most important message: the end, a reply, a warning; else the omitted metrics and basic facts."""
    if screen.stop_progress is not None:  # also after the command has ended, while it has processes left
        return [("stopping: ", "wait"), (sanitize_line(screen.stop_progress, 200), "")]
    reply = reply_message(screen)
    if reply:
        return reply
    if screen.shown_stall is not None:
        return _stall_message(screen)
    if screen.is_over:
        return _after_end_message(screen)
    warning = _problem_nodes(screen) or _recent_warning(screen)
    if warning:
        return warning
    if screen.state.unfit is not None:
        return _invalid_loss_message(screen)
    cause = next(iter(screen.causes), None)
    if cause is not None and cause.kind == WRONG:
        return [("▸ ", "bad"), (sanitize_line(cause.text, 400), "")]
    if screen.current_straggler is not None:  # see reports_straggler
        return [("▸ ", "wait"), (short_sentence(screen.current_straggler), "")]
    if cause is not None:
        return [("▸ ", "wait"), (sanitize_line(cause.text, 400), "")]
    process = screen.process
    if screen.is_live and process is not None and process.settled.steps >= MIN_STEPS:
        share = step_share(compute_phase_stats("data", process.settled.tally))
        rank_text = "" if process.rank is None else f"{process.name} "
        if share >= MIN_DATA_SHARE:
            text = f"{rank_text}waits for data: {format_percent(share)} of its step time"
            return [("▸ ", "wait"), (text, "")]
    rates = _current_throughput(screen)
    if rates.reason is not None and process is not None and process.last_step is not None:
        return [(rates.reason, "dim")]
    return _fact_row(screen, width, omitted)


def _stall_message(screen: ScreenData) -> Row:
    """Return where each rank is; after the end of the run, also its outcome."""
    text = "" if screen.shown_stall is None else sanitize_line(screen.shown_stall.text, 400)
    if screen.shown_stall is not None and screen.is_over:
        outcome = f"; {screen.exit_cause}" if screen.exit_cause else ""
        text = f"{final_stall_sentence(screen.shown_stall.duration_ns(screen.elapsed_ns), text)}{outcome}"
    return [("▸ ", "bad"), (text, "bad")]


def is_reply_cut(screen: ScreenData, width: int) -> bool:
    """Return whether a reply does not fit in its row."""
    if screen.stop_progress is not None and not screen.is_over:
        return False
    return 1 + row_width(reply_message(screen)) > width - row_width(_lost_records_part(screen))


def _recent_warning(screen: ScreenData) -> Row:
    warning = screen.state.warnings[-1] if screen.state.warnings else None
    # A warning without a time is about now.
    is_old = warning is not None and warning.t_ns is not None and screen.now_ns - warning.t_ns >= WARNING_SHOWN_NS
    if warning is None or is_old:
        return []
    return [("warning: ", "wait"), (sanitize_line(warning.text, 300), "")]


def _problem_nodes(screen: ScreenData) -> Row:
    """Return the nodes whose records do not arrive as usual, grouped by problem."""
    now_ns, texts_by_word = screen.elapsed_ns, dict[str, list[str]]()
    for node in screen.state.nodes:
        problem = node.problem_at(now_ns)
        if problem is not None and problem.word not in ("ended", "stopped"):
            texts = texts_by_word.setdefault(problem.word, [])
            texts.append(node.name if texts else f"{node.name} {problem.words(now_ns)}")
    row: Row = []
    for word in sorted(texts_by_word, key=lambda word: word in PROBLEM_STYLES):
        text, *others = texts_by_word[word]
        if others:
            first_name, _, _ = text.partition(" ")
            second_name, *more_names = others
            text = f"{len(others) + 1} nodes {word} ({first_name}, {second_name}{', ...' if more_names else ''})"
        row += [("; " if row else "", ""), (text, PROBLEM_STYLES.get(word, "bad"))]
    return row


def _invalid_loss_message(screen: ScreenData) -> Row:
    """Return the first loss that was not finite, among those read: about one per second."""
    invalid = screen.state.unfit
    if invalid is None:
        return []
    step_text = "" if invalid.step is None else f", first seen in step {format_count(invalid.step)}"
    process = screen.state.processes.get(invalid.process)
    rank_text = "" if process is None or process.rank is None else f" of {process.name}"
    value, place = INVALID_LOSS_TEXTS[repr(invalid.loss)], sanitize_line(invalid.place, 80)
    return [(f"the loss{rank_text} was {value}{step_text} ({place})", "bad")]


def _after_end_message(screen: ScreenData) -> Row:
    if screen.exit_cause:
        return [(screen.exit_cause, "bad")]
    text = "the run has ended" if screen.cursor.is_playback else "the run has ended; this screen stays"
    return _invalid_loss_message(screen) or [(text, "dim")]


def _next_command_hint(screen: ScreenData, max_cells: int) -> Row:
    """Return the next command to try after the end; empty if it does not fit in full."""
    if screen.run_info is None or not screen.is_over:
        return []
    hint = f"· dpmon report {sanitize_line(short_name(screen.run_info), 120)} "
    return [("  " + hint, "dim")] if len(hint) + 4 <= max_cells else []


def _fact_row(screen: ScreenData, width: int, omitted: Sequence[_StatusPart]) -> Row:
    """Return the omitted metrics, then constant facts. Only the first one may be truncated."""
    process = screen.process
    parts: list[str] = [plain_text(part.row).strip(" ()") for part in omitted]
    if process is not None:
        if process.virtual and process.mode == "dp":
            parts.append("virtual replicas: " + sanitize_line(process.mode_reason or "devices are shared", 200))
        if len(screen.state.processes) > 1:
            process_count = process.info.world or len(screen.state.processes)
            # Processes are numbered from 0 like ranks, but "process 1 of 2" would suggest numbers from 1.
            process_text = f"process {process.process}, one of {process_count}"
            process_text = process_text if process.rank is None else f"rank {process.rank} of {process_count}"
            nodes_text = format_count_with_noun(len(screen.state.nodes), "node")
            nodes_text += f", {format_count_with_noun(len(screen.state.training_processes), 'rank')}"
            parts.append(nodes_text if screen.state.nodes else process_text + node_suffix(process.node))
        for key, value in (("python", process.info.python), ("torch", process.info.torch)):
            if value is not None:
                parts.append(f"{key} {sanitize_line(value, 30)}")
    elif screen.run_info is not None and screen.run_info.python:
        parts.append(f"Python: {sanitize_line(screen.run_info.python, 200)}")
    if screen.run_info is not None and screen.run_info.options.get("mode") == "script":
        parts.append("mode script: observed only")
    while len(parts) > 1 and span_width(" · ".join(parts)) > width:
        parts.pop()
    return [(" · ".join(parts), "dim")]


# ------------------------------------------------------------------------------------------------ replies


def reply_message(screen: ScreenData) -> Row:
    """Return the reply to the user's last request, if it is recent: a key, a pause, a mode."""
    if screen.view.message is not None:
        return [(screen.view.message, "wait")]
    if screen.is_over:
        return []
    return _failed_nodes_message(screen) or _pause_message(screen) or _mode_reply(screen)


def _reply_count(screen: ScreenData) -> str:
    """Return how many nodes have answered a pending request; empty for a run on one node."""
    replies = screen.node_replies
    if replies is None:
        return ""
    return f"; {replies.reply_count} of {format_count_with_noun(replies.request_count, 'node')} answered"


def _failed_nodes_message(screen: ScreenData) -> Row:
    """Return the nodes that failed to do what the user requested, and why."""
    failed = {} if screen.node_replies is None else screen.node_replies.failures
    return [part for name, text in failed.items() for part in ((f"{name}: ", "bad"), (f"{text}  ", ""))]


def _pause_message(screen: ScreenData) -> Row:
    """Return a requested pause or resume that has not taken effect, or why it was refused."""
    pausing = screen.pause_state
    if pausing.is_pending:
        request_text, time_text = "resume", "in a moment"
        if pausing.is_requested:
            request_text, time_text = "pause", "after the step it is in"
        return [
            (request_text, ""),
            (" pending", "wait"),
            (f": the training {request_text}s {time_text}{_reply_count(screen)}", "dim"),
        ]
    last = screen.state.pauses[-1] if screen.state.pauses else None
    if last is None or last.t_ns is None or screen.now_ns - last.t_ns > DONE_SHOWN_NS:
        return []
    if last.refused is not None:
        return [("pause", ""), (" refused: ", "bad"), (sanitize_line(last.refused, 300), "")]
    if last.reason is not None and not last.paused:
        return [("the pause has ended: ", "wait"), (sanitize_line(last.reason, 300), "")]
    return []


def _mode_reply(screen: ScreenData) -> Row:
    """Return the requested mode while it is pending, or the reply to the last request."""
    request, reply = screen.mode_request, last_mode_reply(screen.state)
    if request is not None:
        waited_s = max(screen.now_ns - request.since_ns, 0) / 1e9
        note = "takes effect at the next call"
        if screen.process is None or screen.process.seen_ns < 0:
            note = "takes effect at the first call"
        elif screen.pause_state.since_ns is not None:
            note = "takes effect once training resumes (p)"
        return [
            ("→ ", ""),
            (request.mode, f"mode.{request.mode}"),
            (" pending ", "wait"),
            (f"{waited_s:.0f} s: {note}{_reply_count(screen)}", "dim"),
        ]
    if reply is None or reply.t_ns is None or screen.now_ns - reply.t_ns > DONE_SHOWN_NS:
        return []
    if reply.refused is not None:
        refused_mode = "single" if reply.mode == "dp" else "dp"
        reason = sanitize_line(reply.refused, 300)
        return [(refused_mode, f"mode.{refused_mode}"), (" refused: ", "bad"), (reason, "")]
    effect_text = " done" if reply.step is None else f" from step {format_count(reply.step)} on"
    return [(reply.mode, f"mode.{reply.mode}"), (effect_text, "good")]
