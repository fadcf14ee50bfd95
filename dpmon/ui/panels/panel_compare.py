"""Panel 4: dp and single side by side, the speed-up from the other devices, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.model.mode_comparison import Comparison, verdict_sentence
from dpmon.model.run_process import PHASES
from dpmon.model.step_timeline import Piece
from dpmon.record.schema import REST, WARM_UP_STEPS, phase_by_display_name, phase_by_name
from dpmon.sanitize import sanitize_line
from dpmon.store.step_stats import StepStats
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import (
    UNKNOWN,
    format_bytes,
    format_compact,
    format_count,
    format_count_with_noun,
    format_duration,
    format_factor,
    format_percent,
    format_time_range,
)
from dpmon.ui.chart import round_up_nice
from dpmon.ui.panels.panel_batch import history_rows
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.step_waterfall import main_row
from dpmon.ui.styled_rows import Row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_MODES = ("single", "dp")
_MAX_REFUSAL_ROWS = 3
"""Most rows for refusals, unless the panel is on the full screen."""
_MIN_CHART_ROWS, _MAX_CHART_ROWS = 4, 16
"""Rows of the chart on the full screen."""
_SHORT_VIRTUAL_NOTE = "virtual replicas show behavior, not speed"
_VIRTUAL_NOTE = "virtual replicas share one device: this shows how dp behaves, not how fast it would be"


def shown_stats(screen: ScreenData) -> Comparison:
    """Return the modes of the process that represents the run; empty for ranks, which have no mode."""
    process = screen.process
    return process.compared or Comparison() if process is not None else Comparison()


def is_shown(screen: ScreenData) -> bool:
    """Return whether there can be two modes: a script on one device has nothing to compare."""
    return screen.process is not None and screen.process.has_used_dp


def preferred_height(screen: ScreenData) -> int:
    """Return the number of rows of the content with a verdict of two rows; the phases are left to the bars."""
    comparison = shown_stats(screen)
    device_count = len({device for peaks in comparison.memory.values() for device in peaks})
    return 5 + max(device_count, 1) + 2 + 2 + comparison.virtual if len(comparison.sides) > 1 else 4


def panel_title(screen: ScreenData, style: TerminalStyle, folded: bool) -> tuple[Row, Row]:
    """Return the title and the main numbers."""
    comparison = shown_stats(screen)
    corner: Row = []
    if comparison.outcome == "even":
        corner = [("too uncertain" if comparison.uncertain else "no difference shows", "dim")]
    elif comparison.speedup is not None:
        text_style = "good" if comparison.outcome == "faster" else "bad"
        baseline_text = "" if folded else " as one device"
        corner = [
            (align_right(format_factor(comparison.speedup.value, style.glyphs.times), 6), text_style),
            (f" as fast{baseline_text}", "dim"),
        ]
    elif folded and len(comparison.sides) > 1:
        corner = [("no verdict yet", "dim")]
    else:
        for mode, side in ((mode, comparison.sides[mode]) for mode in _MODES if mode in comparison.sides):
            corner += [
                ("  " if corner else "", ""),
                (mode, f"mode.{mode}"),
                (align_right(format_duration(side.median_ns), 8), ""),
            ]
    return [(NAMES["compare"], "title")], corner


def render_panel(
    screen: ScreenData, width: int, height: int, style: TerminalStyle, *, advice: bool = True
) -> list[Row]:
    """Return the rows inside the frame. The verdict (`advice`) comes last and always fits."""
    comparison = shown_stats(screen)
    if not comparison.sides:
        return [[(screen.empty_reason("no step was traced", "no step has finished yet"), "dim")]]
    note_rows = _note_rows(screen, comparison, width, style) if advice else []
    table = _CompareTable(comparison, width, style)
    max_rows = max(height - len(note_rows), 3)
    main_rows = [table.header_row(), table.step_row(), table.samples_row(), *table.rates_within_rows()]
    has_both_modes = len(comparison.sides) > 1  # the bar and the phases of one mode are in panel 3
    extra_rows: list[Row] = []
    # Take the most important rows that fit; the last loop puts them into the order of the screen.
    candidates = [("memory", table.memory_rows()), ("p95", [table.p95_row()]), ("steps", [table.steps_row()])]
    if has_both_modes:
        candidates = [("bars", table.bar_rows()), *candidates, ("phases", table.phase_rows())]
    chosen_rows: dict[str, list[Row]] = {}
    free_rows = max_rows - len(main_rows)
    for name, rows in candidates:
        if rows and len(rows) <= free_rows:
            chosen_rows[name] = rows
            free_rows -= len(rows)
        elif name == "memory" and free_rows > 0 and rows:
            shown = rows[: free_rows - 1]
            text = f"{len(rows) - len(shown)} more devices" if shown else f"peak memory of {len(rows)} devices: zoom"
            chosen_rows[name] = [*shown, [(text, "dim")]]
            free_rows = 0
    for name in ("p95", "memory", "steps", "phases", "bars"):
        extra_rows += chosen_rows.get(name, [])
    rows = [*main_rows, *extra_rows, *note_rows]
    return [*rows, *_mode_chart(screen, width, height - len(rows) - 2, style)]


def _mode_chart(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return a chart of the mean step in the color of its mode, on the full screen and if there are rows for it."""
    if screen.process is None or screen.view.zoom != "compare" or height < _MIN_CHART_ROWS:
        return []
    chart = history_rows(screen, screen.process, width, min(height, _MAX_CHART_ROWS), style, by_mode=True)
    return [[], [(f"mean step, {format_time_range(screen.view.range_s)}", "bold")], *chart]


class _CompareTable:
    """A table with the columns label, single, dp and result. Rows of rates within steps widen the label."""

    def __init__(self, comparison: Comparison, width: int, style: TerminalStyle) -> None:
        self.comparison, self.width, self.style = comparison, width, style
        rates = [side.rate for side in comparison.sides.values() if side.rate is not None]
        has_rate_rows = any(rate.differs_within_steps for rate in rates)
        self.label_width = 14 if has_rate_rows else 12  # for "within steps"
        self.cell_width = 11 if width >= 52 else 10
        self.modes = [mode for mode in _MODES if mode in comparison.sides]
        self.note_cells = width - self.label_width - len(self.modes) * self.cell_width - 2
        self.has_call_phases = any(
            phase.ran and phase_by_name(phase.name).of_call
            for side in comparison.sides.values()
            for phase in side.phases
            if phase.name != REST
        )
        """Whether the call's phases have rows of their own, so that forward is only the remaining part."""

    def make_row(self, label: str, values: Mapping[str, str], text_style: str = "", note: Row | None = None) -> Row:
        row: Row = [(truncate(label, self.label_width - 1).ljust(self.label_width), "dim")]
        row += [(align_right(values.get(mode, UNKNOWN), self.cell_width), text_style) for mode in self.modes]
        return [*row, ("  ", ""), *note] if note and row_width(note) <= self.note_cells else row

    def header_row(self) -> Row:
        count = len(self.comparison.devices)
        dp = f"dp {self.style.glyphs.times}{count}" if count else "dp"
        mode_labels = {"single": "single", "dp": dp}
        row: Row = [(" " * self.label_width, "")]
        row += [(align_right(mode_labels[mode], self.cell_width), f"mode.{mode}") for mode in self.modes]
        return [*row, ("  speed-up (95%)", "dim")] if self.comparison.speedup is not None else row

    def step_row(self) -> Row:
        comparison, style = self.comparison, self.style
        steps = {mode: format_duration(side.median_ns) for mode, side in comparison.sides.items()}
        note: Row = []
        if comparison.speedup is not None:
            value = format_factor(comparison.speedup.value, style.glyphs.times)
            low, high = format_factor(comparison.speedup.low, ""), format_factor(comparison.speedup.high, "")
            if comparison.outcome == "even":  # no difference shows: give only the range, not a ratio
                return self.make_row("median step", steps, "bold", [(f"{low} to {high}{style.glyphs.times}", "dim")])
            note = [(value, "bold"), (f" ({low} to {high})", "dim")]
            if row_width(note) > self.note_cells:
                note = [(value, "bold")]
        return self.make_row("median step", steps, "bold", note)

    def samples_row(self) -> Row:
        comparison = self.comparison
        note: Row = []
        if comparison.efficiency is not None and comparison.outcome != "even":
            note = [(format_percent(comparison.efficiency), "bold"), (" efficiency", "dim")]
        rates = {m: s.rate for m, s in comparison.sides.items() if s.rate is not None}
        texts = {m: format_compact(rate.samples_per_s) for m, rate in rates.items()}
        return self.make_row("samples/s", texts, "bold", note)

    def rates_within_rows(self) -> list[Row]:
        """Return a row with the rates within steps, if they differ from the overall rates."""
        rates = {m: s.rate for m, s in self.comparison.sides.items() if s.rate is not None}
        if not any(rate.differs_within_steps for rate in rates.values()):
            return []
        texts = {m: format_compact(rate.samples_per_s_within) for m, rate in rates.items()}
        return [self.make_row(" within steps", texts, "dim")]

    def p95_row(self) -> Row:
        return self.make_row("p95 step", {m: format_duration(s.p95_ns) for m, s in self.comparison.sides.items()})

    def steps_row(self) -> Row:
        """Return how many steps are compared, and their samples; before a comparison, how many steps were seen."""
        comparison, samples = self.comparison, self.comparison.samples
        if samples is None:
            return self.make_row("steps seen", {m: format_count(seen) for m, seen in comparison.seen.items()}, "dim")
        note: Row = [(f"of {format_count(samples)} samples each", "dim")]
        texts = {m: format_count(side.steps) for m, side in comparison.sides.items()}
        return self.make_row("compared", texts, "dim", note)

    def memory_rows(self) -> list[Row]:
        """Return a row per device with its peak allocated memory in each mode."""
        peaks = {mode: self.comparison.memory.get(mode, {}) for mode in self.comparison.sides}
        devices = sorted({device for by_device in peaks.values() for device in by_device})
        return [
            self.make_row(
                ("peak " if index == 0 else "     ") + sanitize_line(device, 12).replace("cuda:", "gpu "),
                {m: format_bytes(by_device.get(device)) for m, by_device in peaks.items()},
            )
            for index, device in enumerate(devices)
        ]

    def phase_rows(self) -> list[Row]:
        """Return a row per phase: its median in both modes, and the difference."""
        rows = []
        for index, name in enumerate(PHASES):
            phases = {m: s.disjoint_phases[index] for m, s in self.comparison.sides.items()}
            has_run = any(phase.ran for phase in phases.values())
            if phase_by_display_name(name).optional and not has_run:  # as in panel 3
                continue
            medians = {m: phase.median_ns for m, phase in phases.items()}
            single, dp = medians.get("single"), medians.get("dp")
            note: Row = []
            if len(medians) == 2 and (single is not None or dp is not None):
                change = (dp or 0.0) - (single or 0.0)
                note = [(("+" if change >= 0 else "-") + format_duration(abs(change)), "dim")]
            texts = {m: format_duration(medians[m]) if phase.ran else "none" for m, phase in phases.items()}
            label = "other fwd" if name == "forward" and self.has_call_phases else name
            rows.append(self.make_row(" " + label, texts, "", note))
        return rows

    def bar_rows(self) -> list[Row]:
        """Return the phases of each mode end to end, on one scale."""
        pieces_by_mode = {mode: _phases_end_to_end(side) for mode, side in self.comparison.sides.items()}
        ends = {mode: pieces[-1].end_ns for mode, pieces in pieces_by_mode.items() if pieces}
        label_width = 7
        bar_width = self.width - label_width
        if not ends or bar_width < 20:
            return []
        top = round_up_nice(max(ends.values()))
        rows: list[Row] = []
        for mode in (mode for mode in _MODES if mode in ends):
            bar = main_row(pieces_by_mode[mode], bar_width, top, self.style, (0, 0))
            rows.append([(mode.ljust(label_width), f"mode.{mode}"), *bar])
        return rows


def _phases_end_to_end(side: StepStats) -> list[Piece]:
    """Return the medians of a mode's phases in order, end to end."""
    pieces: list[Piece] = []
    start = 0
    for phase in side.disjoint_phases:
        if phase.median_ns:
            end = start + int(phase.median_ns)
            pieces.append(Piece(phase.name, start, end))
            start = end
    return pieces


def _note_rows(screen: ScreenData, comparison: Comparison, width: int, style: TerminalStyle) -> list[Row]:
    """Return the verdict, or why there is none yet, and the caveats."""
    rows: list[Row] = []
    is_full_screen = screen.view.zoom == "compare"
    text = verdict_sentence(comparison)
    refusal = _refusal_note(screen)
    rows += wrap_to_rows(refusal, width, "wait", None if is_full_screen else _MAX_REFUSAL_ROWS, style.glyphs.more)
    if text is not None:
        rows += wrap_to_rows(text, width, "bold")
    elif len(comparison.sides) == 1 and refusal:
        pass  # the refusal already explains why the other mode was not seen
    elif len(comparison.sides) == 1:
        (other,) = (mode for mode in _MODES if mode not in comparison.sides)
        hint: Row = [(f"{other} was not seen yet: ", "dim"), ("d", "key"), (" switches the running job", "dim")]
        if not screen.can_toggle:
            rows += wrap_to_rows(f"{other} was not seen" + (" until then" if screen.cursor.is_playback else ""), width)
        else:
            rows.append(hint if row_width(hint) <= width else hint[:2])
    elif comparison.missing:
        rows += wrap_to_rows(comparison.missing, width, "wait")
    if len(comparison.sides) == 2:
        if comparison.virtual:
            rows += wrap_to_rows(
                _VIRTUAL_NOTE if is_full_screen or len(_VIRTUAL_NOTE) <= width else _SHORT_VIRTUAL_NOTE, width
            )
        omitted = "; ".join(_incomparable_steps_note(comparison))
        text = _excluded_steps_note(comparison) if is_full_screen else omitted
        rows += wrap_to_rows(text, width)
    return rows


def _refusal_note(screen: ScreenData) -> str:
    """Return the refused mode with its root modules and the reasons, while the refusal is the newest reply.

    If other root modules run in that mode (a model but not its loss), the refusal appears only on the full screen.
    """
    process = screen.process
    if process is None or not process.refusals:
        return ""
    has_several_roots = len(process.calls) > 1
    roots_by_text: dict[str, list[str]] = {}
    for root, refusal in process.refusals.items():
        current_mode = process.last_step.mode if process.last_step is not None else process.mode
        if refusal.mode == current_mode and screen.view.zoom != "compare":
            continue
        roots_by_text.setdefault(f"{refusal.mode} refused{{}}: {sanitize_line(refusal.reason, 300)}", []).append(
            sanitize_line(root, 60)
        )
    return "; ".join(
        template.replace("{}", f" for {', '.join(roots)}" if has_several_roots and all(roots) else "", 1)
        for template, roots in roots_by_text.items()
    )


def _incomparable_steps_note(comparison: Comparison) -> list[str]:
    """Return which steps are not compared, and why."""
    if not comparison.left_out:
        return []
    return [f"excluded: {format_count_with_noun(comparison.left_out, 'step')} of another batch size"]


def _excluded_steps_note(comparison: Comparison) -> str:
    """Return which steps the metrics omit, and why."""
    parts = [
        *_incomparable_steps_note(comparison),
        f"median, p95 and phases without the first {WARM_UP_STEPS} steps and the {WARM_UP_STEPS} after each switch",
        "samples/s: all training, without pauses and evaluations",
    ]
    devices_by_mode = [{*peaks} for peaks in comparison.memory.values()]
    if any(devices != devices_by_mode[0] for devices in devices_by_mode):
        parts.append("peak –: it did not rise in this mode")
    return "; ".join(parts)
