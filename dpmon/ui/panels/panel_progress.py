"""Panel 6: the progress and the losses; before the first step what dpmon will do, after the end the findings too."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite

from dpmon.model.epoch_progress import Epoch, Progress, format_time_left, without_time
from dpmon.model.loss_curves import LossCurve
from dpmon.record.schema import SECOND
from dpmon.sanitize import sanitize_line
from dpmon.store.query_results import LOSS_SMOOTHING
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import (
    format_clock,
    format_count,
    format_count_with_noun,
    format_long_duration,
    format_percent,
)
from dpmon.ui.chart import filled_bar, line_chart
from dpmon.ui.panels.longest_steps import step_rows
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.styled_rows import Row, TableColumn, join_left_right, row_width, table_rows, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import make_time_axis

_GUTTER = 8
_BAR = 10
"""Fewest cells for a bar."""
_EPOCHS, _CURVE = 4, 5
"""Rows that the panel asks for: for past epochs with their header, and for the chart of a loss."""
_LOWEST = 3
"""Rows that past epochs leave for each loss."""
_STEPS, _TALL = 6, 18
"""Number of longest steps in the panel, and the fewest rows of a panel that shows them."""
_MODES = {
    "auto": "auto: follows the script and the options",
    "dp": "dp: replicas on several devices",
    "single": "single: one device",
    "script": "script: leaves the computation as written",
}


def _has_not_started(facts: ScreenData) -> bool:
    """Whether no training process has made a step or a call yet."""
    return facts.process is None or facts.process.seen_ns < 0


def progress_in(facts: ScreenData) -> Progress:
    """The progress of the process that represents the run, without the time left if the training does not go on."""
    found = Progress() if facts.process is None else facts.process.progress
    return found if facts.is_live else without_time(found, "")


def losses_in(facts: ScreenData) -> list[LossCurve]:
    """The curves with values."""
    return [one for one in facts.state.losses if one.last is not None]


def is_shown(facts: ScreenData) -> bool:
    """Whether there is content: findings of a finished run, epochs, losses, or a plan before the first step."""
    if facts.is_over and facts.findings is not None:
        return True
    if _has_not_started(facts):
        return not facts.is_over and bool(_startup_plan_rows(facts))
    return bool(progress_in(facts).epochs or losses_in(facts))


def preferred_height(facts: ScreenData, tall: bool = False) -> int:
    """Rows that the whole content needs; `tall`: on a screen with room for the longest steps."""
    if _has_not_started(facts):
        return len(_startup_plan_rows(facts))
    slow = _STEPS + 3 if tall and facts.process is not None and facts.process.last_step is not None else 0
    past = progress_in(facts).epochs[:-1]
    below = 1 + min(len(past) + 1, _EPOCHS) * bool(past) + (1 + _CURVE) * min(len(losses_in(facts)), 2)
    return slow + below + 4 * min(len(facts.findings or ()) if facts.is_over else 0, 3)


def panel_title(facts: ScreenData, look: TerminalStyle, folded: bool) -> tuple[Row, Row]:
    """The panel's title, and its main number."""
    name: Row = [(NAMES["progress"], "title")]
    found, dot = progress_in(facts), f" {look.glyphs.middot} "
    if facts.is_over and facts.findings is not None:
        count = len(facts.findings)
        corner: Row = [(format_count_with_noun(count, "finding"), "wait")] if count else []
        return [(NAMES["progress"][:2] + "What happened", "title")], corner
    if found.epoch is None:
        return name, [part for one in losses_in(facts)[:1] for part in (("loss ", "dim"), loss_span(one.last, 7))]
    if folded:
        return name, [(format_batch_of_total(found).strip(), "bold")]
    return [*name, (f"{dot}epoch {format_count(found.epoch)}", "dim")], [(format_batch_of_total(found), "bold")]


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel's rows, inside its frame. A tall panel ends with the longest steps."""
    slow = step_rows(facts.state.slowest, width, look) if height >= _TALL and facts.state.slowest.steps else []
    if not slow:
        return _main_rows(facts, width, height, look)
    slow = [[("longest steps", "title")], *slow[: _STEPS + 1]]
    rows = _main_rows(facts, width, height - len(slow) - 1, look)
    return [*rows, *[[]] * (height - len(rows) - len(slow)), *slow]


def _main_rows(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """Findings, progress, losses."""
    if _has_not_started(facts):
        return [row for label, text in _startup_plan_rows(facts) for row in _labeled(label, text, width)]
    rows = _findings(facts, width) if facts.is_over else []
    if rows and height - len(rows) > 1:
        rows.append([])
    room = height - len(rows)
    return [*rows, *_progress(facts, width, max(room, 2), look)] if room > 0 else rows


def format_batch_of_total(found: Progress) -> str:
    """Batch n of N, in a constant width while n grows: "  412/1,563", "batch 412"."""
    if found.batch is None:
        return ""
    if found.batches is None:
        return f"batch {format_count(found.batch)}"
    whole = format_count(found.batches)
    return f"{align_right(format_count(found.batch), len(whole))}/{whole}"


def loss_span(value: float | None, width: int) -> tuple[str, str]:
    """A loss, left-aligned. NaN and infinite values stand out."""
    if value is None or not isfinite(value):
        return ("–" if value is None else str(value).replace("nan", "NaN")).ljust(width), "bad"
    size = abs(value)
    form = ".1e" if size >= 99_999.5 or 0 < size < 0.0005 else ".3f" if size < 10 else ".2f" if size < 100 else ".1f"
    return f"{value:{form}}".ljust(width), "bold"


# ------------------------------------------------------------------------------------------------ before and after


def _startup_plan_rows(facts: ScreenData) -> list[tuple[str, str]]:
    """What dpmon will do with the run, as far as it is known before the first step."""
    if facts.run_info is None:
        return []
    options = facts.run_info.options
    asked = [str(options[name]) for name in ("devices", "replicas") if options.get(name)]
    names = {str(track.data.get("name") or "GPU") for track in facts.state.devices.values()}
    rows = [("mode", _MODES.get(str(options.get("mode")), "")), ("replicas", ", ".join(asked))]
    rows += [("GPUs", f"{len(facts.state.devices)} × {', '.join(sorted(names))}" if names else "")]
    return [(label, sanitize_line(text, 200)) for label, text in rows if text]


def _labeled(label: str, text: str, width: int) -> list[Row]:
    return [
        [((label if index == 0 else "").ljust(9), "dim"), *row]
        for index, row in enumerate(wrap_to_rows(text, width - 9, ""))
    ]


def _findings(facts: ScreenData, width: int) -> list[Row]:
    """The findings, the most important first, each with its advice."""
    rows: list[Row] = [] if facts.findings is None or facts.findings else [[("nothing stands out", "dim")]]
    for number, found in enumerate(facts.findings or (), start=1):
        style = "bad" if found.kind == "failed" else "wait"
        for index, row in enumerate(wrap_to_rows(sanitize_line(found.text, 400), width - 2, style)):
            rows.append([(f"{number} " if index == 0 else "  ", "dim"), *row])
        rows += [[("  ", ""), *row] for row in wrap_to_rows(sanitize_line(found.advice_text, 400), width - 2, "")]
    return rows


# ------------------------------------------------------------------------------------------------ epochs and losses


def _progress(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The bar of the epoch, each loss with a chart, and as many past epochs as have room."""
    found, curves = progress_in(facts), losses_in(facts)[: max((height - 1) // 2, 1)]
    rows = [] if facts.is_over else _bar(found, width, look)
    room = height - len(rows) - len(curves)
    past = found.epochs[:-1]
    listed = min(len(past) + 1, max(_EPOCHS, room // 3), room - _LOWEST * len(curves)) if past else 0
    listed = listed if listed > 1 else 0
    each = max(room - listed, 0) // max(len(curves), 1)
    for one in curves:
        rows += _loss(facts, one, len(curves) > 1, width, each, look)
    return [*rows, *_epochs(past, listed, look)] if listed else rows


def _bar(found: Progress, width: int, look: TerminalStyle) -> list[Row]:
    """How much of the epoch is done, and the time left; or why this is unknown."""
    if found.epoch is None or found.batch is None or not found.batches:
        name = "epoch" if found.epoch is None else "batch" if found.batch is None else "batches"
        why = sanitize_line(found.absent.get(name, ""), 200)
        return (
            [[(truncate(f"no length: {why}" if name == "batches" else why, width, look.glyphs.more), "dim")]]
            if why
            else []
        )
    done = found.batch / found.batches
    share: Row = [(align_right(format_percent(done), 6), "bold")]
    left: Row = (
        [("  ", ""), (f"{format_time_left(found.left_ns, found.error_ns)} left".rjust(16), "")]
        if found.left_ns is not None
        else []
    )
    if width - row_width(share) - row_width(left) < _BAR:
        left = []
    bar = filled_bar((min(done, 1.0),), width - row_width(share) - row_width(left), look.glyphs)
    return [[*bar, *share, *left]]


def _epochs(past: Sequence[Epoch], height: int, look: TerminalStyle) -> list[Row]:
    """The past epochs, the newest first, as many as have room. A column without a value is left out."""
    shown = [*reversed(past)][: height - 1]
    parts = [
        ("epoch", 5, [format_count(one.epoch) for one in shown]),
        ("time", 12, [format_long_duration(one.took_ns) for one in shown]),
        ("evaluation", 12, [format_long_duration(one.evaluation_ns) if one.evaluation_ns else "" for one in shown]),
        ("between", 12, [format_long_duration(one.pause_ns) if one.pause_ns is not None else "" for one in shown]),
    ]
    return table_rows([TableColumn(head, size, cells) for head, size, cells in parts if any(cells)], look.glyphs.more)


def _loss(facts: ScreenData, one: LossCurve, several: bool, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The newest and the smoothed loss, and their curves: in `height` rows below, or in the same row."""
    head: Row = [("loss ", "dim"), loss_span(one.last, 8)]
    if one.smoothed is not None:
        head += [("smoothed ", "bar"), loss_span(one.smoothed, 8)]
    if several:
        head.append((truncate(sanitize_line(one.place, 200), 24, look.glyphs.more) + " ", "dim"))
    beside = height < 2
    room = width - (row_width(head) if beside else _GUTTER)
    if room < _BAR:
        return [head]
    axis, known = make_time_axis(facts), [(point.second, point.mean) for point in one.points if point.mean is not None]
    length = max(axis.end_s - axis.start_s, 1)
    places = [((second - axis.start_s + 0.5) / length, mean) for second, mean in known if second >= axis.start_s]
    if not places:
        return [head]
    values = sorted(mean for _, mean in places)
    low, top = values[0], values[len(values) - 1 - len(values) // 50]  # a few high ones are cut
    unfit = [
        (point.second - axis.start_s) / length for point in one.points if point.unfit and point.second >= axis.start_s
    ]
    both = ((places, "dim"), (_running_means(places), "bar"))
    drawn = line_chart(both[beside:], unfit, room, 1 if beside else height, low, top, look.glyphs)
    if beside:
        return [[*head, *drawn[0]]]
    marks = {0: loss_span(top, 0)[0] if top > low else "", len(drawn) - 1: loss_span(low, 0)[0]}
    rows: list[Row] = [
        [(align_right(marks.get(index, ""), _GUTTER - 1) + " ", "dim"), *row] for index, row in enumerate(drawn)
    ]
    since = f"since {format_clock(axis.start_s * SECOND)}"
    return [
        join_left_right(
            head, [(since, "dim")] if row_width(head) + len(since) < width else [], width, look.glyphs.more
        ),
        *rows,
    ]


def _running_means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same places, each with a mean of the values up to it. Newer values weigh more."""
    found: list[tuple[float, float]] = []
    weights = total = 0.0
    for at, value in points:
        weights, total = weights * exp(-1 / LOSS_SMOOTHING) + 1, total * exp(-1 / LOSS_SMOOTHING) + value
        found.append((at, total / weights))
    return found
