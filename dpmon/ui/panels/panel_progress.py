"""Panel 6: progress and losses; before the first step, what dpmon will do; after the end, also the findings."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from dpmon.model.epoch_progress import Epoch, Progress, format_time_left, without_time
from dpmon.model.loss_curves import LossCurve, smooth_losses
from dpmon.record.schema import SECOND
from dpmon.report.tables import EPOCHS
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import (
    format_count,
    format_count_with_noun,
    format_elapsed,
    format_percent,
)
from dpmon.ui.chart import filled_bar, line_chart
from dpmon.ui.panel_table import PanelColumn, draw_table, fact_columns
from dpmon.ui.panels.longest_steps import step_rows
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.styled_rows import Row, add_scale, join_left_right, row_width, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import make_time_axis

_GUTTER_CELLS = 8
_MIN_BAR_CELLS = 10
"""Fewest cells for a bar."""
_EPOCH_ROWS, _CURVE_ROWS = 4, 5
"""Preferred rows: of past epochs with their header, and of the chart of a loss."""
_MIN_LOSS_ROWS = 3
"""Fewest rows for each loss next to past epochs."""
_SLOW_STEPS, _TALL_HEIGHT = 6, 18
"""Number of longest steps in the panel, and the fewest rows of a panel that shows them."""
_MODE_TEXTS = {
    "auto": "auto: follows the script and the options",
    "dp": "dp: replicas on several devices",
    "single": "single: one device",
    "script": "script: leaves the computation as written",
}


def _has_not_started(screen: ScreenData) -> bool:
    """Return whether no training process has made a step or a call yet; False once there are findings about the end."""
    has_end = screen.is_over and screen.findings is not None
    return not has_end and (screen.process is None or screen.process.seen_ns < 0)


def shown_progress(screen: ScreenData) -> Progress:
    """Return the progress of the process that represents the run; without the time left if the run is not live."""
    progress = Progress() if screen.process is None else screen.process.progress
    return progress if screen.is_live else without_time(progress, "")


def _listed_epochs(screen: ScreenData) -> Sequence[Epoch]:
    """Return the epochs of the table: those before the one in the bar; after the end, all, because there is no bar."""
    epochs = shown_progress(screen).epochs
    return epochs if screen.is_over else epochs[:-1]


def shown_losses(screen: ScreenData) -> list[LossCurve]:
    """Return the loss curves that have values."""
    return [curve for curve in screen.state.losses if curve.last is not None]


def is_shown(screen: ScreenData) -> bool:
    """Return whether there are findings of an ended run, epochs, losses, or a plan before the first step."""
    if screen.is_over and screen.findings is not None:
        return True
    if _has_not_started(screen):
        return not screen.is_over and bool(_startup_plan_rows(screen))
    return bool(shown_progress(screen).epochs or shown_losses(screen))


def preferred_height(screen: ScreenData, has_slow_steps: bool = False) -> int:
    """Return the number of rows of the whole content; `has_slow_steps`: with the table of the longest steps."""
    if _has_not_started(screen):
        return len(_startup_plan_rows(screen))
    rows = 1 + (1 + _CURVE_ROWS) * min(len(shown_losses(screen)), 2)
    epochs = _listed_epochs(screen)
    if epochs:
        rows += min(len(epochs) + 1, _EPOCH_ROWS)
    if has_slow_steps and screen.process is not None and screen.process.last_step is not None:
        rows += _SLOW_STEPS + 3
    if screen.is_over:
        rows += 4 * min(len(screen.findings or ()), 3)
    return rows


def panel_title(screen: ScreenData, folded: bool) -> tuple[Row, Row]:
    """Return the title and the main number."""
    title: Row = [(NAMES["progress"], "title")]
    progress = shown_progress(screen)
    if screen.is_over and screen.findings is not None:
        count = len(screen.findings)
        corner: Row = [(format_count_with_noun(count, "finding"), "wait")] if count else []
        return [(NAMES["progress"][:2] + "What happened", "title")], corner
    if progress.epoch is None:
        losses = [loss_span(curve.last, 7) for curve in shown_losses(screen)[:1]]
        return title, [("loss ", "dim"), *losses] if losses else []
    if folded:
        return title, [(format_batch_of_total(progress).strip(), "bold")]
    return [*title, (f" · epoch {format_count(progress.epoch)}", "dim")], [(format_batch_of_total(progress), "bold")]


def render_panel(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows inside the frame. A tall panel ends with the longest steps."""
    slowest = screen.state.slowest
    if height < _TALL_HEIGHT or not slowest.steps:
        return _main_rows(screen, width, height, style)
    slow_rows: list[Row] = [[("longest steps", "title")], *step_rows(slowest, width)[: _SLOW_STEPS + 1]]
    rows = _main_rows(screen, width, height - len(slow_rows) - 1, style)
    return [*rows, *[[]] * (height - len(rows) - len(slow_rows)), *slow_rows]


def _main_rows(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows of findings, progress and losses, or of the plan before the first step."""
    if _has_not_started(screen):
        plan = _startup_plan_rows(screen)
        return [row for name, text in plan for row in wrap_to_rows(text, width, "", label=[(name.ljust(9), "dim")])]
    rows = _finding_rows(screen, width) if screen.is_over else []
    if rows and height - len(rows) > 1:
        rows.append([])
    free_rows = height - len(rows)
    return [*rows, *_progress_rows(screen, width, max(free_rows, 2), style)] if free_rows > 0 else rows


def format_batch_of_total(progress: Progress) -> str:
    """Format batch n of N, in a constant width while n grows: "  412/1,563", "batch 412"."""
    if progress.batch is None:
        return ""
    if progress.batches is None:
        return f"batch {format_count(progress.batch)}"
    total_text = format_count(progress.batches)
    return f"{align_right(format_count(progress.batch), len(total_text))}/{total_text}"


def loss_span(value: float | None, width: int) -> tuple[str, str]:
    """Return a loss, left-aligned; NaN and infinite values have the style "bad"."""
    if value is None or not isfinite(value):
        return ("–" if value is None else str(value).replace("nan", "NaN")).ljust(width), "bad"
    magnitude = abs(value)
    if magnitude >= 99_999.5 or 0 < magnitude < 0.0005:
        text = f"{value:.1e}"
    elif magnitude < 10:
        text = f"{value:.3f}"
    else:
        text = f"{value:.2f}" if magnitude < 100 else f"{value:.1f}"
    return text.ljust(width), "bold"


# ------------------------------------------------------------------------------------------------ before and after


def _startup_plan_rows(screen: ScreenData) -> list[tuple[str, str]]:
    """Return (label, text) of what dpmon will do with the run, as far as it is known before the first step."""
    if screen.run_info is None:
        return []
    options = screen.run_info.options
    requested = [str(options[name]) for name in ("devices", "replicas") if options.get(name)]
    names = {str(track.data.get("name") or "GPU") for track in screen.state.devices.values()}
    rows = [("mode", _MODE_TEXTS.get(str(options.get("mode")), "")), ("replicas", ", ".join(requested))]
    rows += [("GPUs", f"{len(screen.state.devices)} × {', '.join(sorted(names))}" if names else "")]
    return [(label, sanitize_line(text, 200)) for label, text in rows if text]


def _finding_rows(screen: ScreenData, width: int) -> list[Row]:
    """Return the findings, the most important first, each with its advice."""
    rows: list[Row] = [] if screen.findings is None or screen.findings else [[("no findings", "dim")]]
    for number, finding in enumerate(screen.findings or (), start=1):
        text_style = "bad" if finding.kind == "failed" else "wait"
        rows += wrap_to_rows(sanitize_line(finding.text, 400), width, text_style, label=[(f"{number} ", "dim")])
        rows += wrap_to_rows(sanitize_line(finding.advice_text, 400), width, "", label=[("  ", "")])
    return rows


# ------------------------------------------------------------------------------------------------ epochs and losses


def _progress_rows(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the bar of the epoch, each loss with a chart, and as many past epochs as fit."""
    progress, curves = shown_progress(screen), shown_losses(screen)[: max((height - 1) // 2, 1)]
    rows = [] if screen.is_over else _epoch_bar(progress, width)
    free_rows = height - len(rows) - len(curves)
    epochs = _listed_epochs(screen)
    max_epoch_rows = min(max(_EPOCH_ROWS, free_rows // 3), free_rows - _MIN_LOSS_ROWS * len(curves))
    epoch_rows = min(len(epochs) + 1, max_epoch_rows)
    if epoch_rows <= 1:  # only the header
        epoch_rows = 0
    rows_per_loss = max(free_rows - epoch_rows, 0) // max(len(curves), 1)
    for curve in curves:
        rows += _loss_rows(screen, curve, len(curves) > 1, width, rows_per_loss, style)
    return [*rows, *_epoch_table(epochs, width, epoch_rows)] if epoch_rows else rows


def _epoch_bar(progress: Progress, width: int) -> list[Row]:
    """Return a row with the done part of the epoch and the time left, or why they are unknown."""
    if progress.epoch is None or progress.batch is None or not progress.batches:
        values = {"epoch": progress.epoch, "batch": progress.batch}
        name = next((name for name, value in values.items() if value is None), "batches")
        reason = sanitize_line(progress.absent.get(name, ""), 200)
        text = f"no length: {reason}" if name == "batches" else reason
        return [[(truncate(text, width), "dim")]] if reason else []
    done_share = progress.batch / progress.batches
    percentage: Row = [(align_right(format_percent(done_share), 6), "bold")]
    time_left: Row = []
    if progress.left_ns is not None:
        time_left = [("  ", ""), (f"{format_time_left(progress.left_ns, progress.error_ns)} left".rjust(16), "")]
    if width - row_width(percentage) - row_width(time_left) < _MIN_BAR_CELLS:
        time_left = []
    bar = filled_bar((min(done_share, 1.0),), width - row_width(percentage) - row_width(time_left))
    return [[*bar, *percentage, *time_left]]


def _epoch_table(epochs: Sequence[Epoch], width: int, height: int) -> list[Row]:
    """Return a table of epochs, the newest first, as many as fit."""
    epochs = [*reversed(epochs)][: height - 1]
    numbers = PanelColumn(EPOCHS.label.head, [EPOCHS.label.cell(epoch) for epoch in epochs])
    return draw_table([numbers, *fact_columns(EPOCHS, epochs)], width)


def _loss_rows(
    screen: ScreenData, curve: LossCurve, has_several: bool, width: int, height: int, style: TerminalStyle
) -> list[Row]:
    """Return the newest and the smoothed loss with their curves: in `height` rows below, or in the same row."""
    process = screen.state.processes.get(curve.process)
    rank_text = "" if process is None or process.rank is None else f"of {process.name} "
    header: Row = [(f"loss {rank_text}", "dim"), loss_span(curve.last, 8)]
    if curve.smoothed is not None:
        header += [("smoothed ", "bar"), loss_span(curve.smoothed, 8)]
    if has_several:
        header.append((truncate(sanitize_line(curve.place, 200), 24) + " ", "dim"))
    in_header = height < 2
    chart_width = width - (row_width(header) if in_header else _GUTTER_CELLS)
    if chart_width < _MIN_BAR_CELLS:
        return [header]
    axis = make_time_axis(screen)
    axis_s = max(axis.end_s - axis.start_s, 1)
    visible = [point for point in curve.points if point.second >= axis.start_s]
    points = [((p.second - axis.start_s + 0.5) / axis_s, p.mean) for p in visible if p.mean is not None]
    if not points:
        return [header]
    values = sorted(mean for _, mean in points)
    low, top = values[0], values[len(values) - 1 - len(values) // 50]  # the highest 2% are cut
    invalid_places = [(point.second - axis.start_s) / axis_s for point in visible if point.unfit]
    places, means = zip(*points, strict=True)
    lines = ((points, "dim"), ([*zip(places, smooth_losses(means), strict=True)], "bar"))
    if in_header:
        (row,) = line_chart(lines[1:], invalid_places, chart_width, 1, low, top, style)
        return [[*header, *row]]
    chart = line_chart(lines, invalid_places, chart_width, height, low, top, style)
    (top_text, _), (low_text, _) = loss_span(top, 0), loss_span(low, 0)
    rows = add_scale(chart, top_text if top > low else "", low_text, _GUTTER_CELLS)
    start_text = f"since {format_elapsed(axis.start_s * SECOND)}"
    right: Row = [(start_text, "dim")] if row_width(header) + len(start_text) < width else []
    return [join_left_right(header, right, width), *rows]
