"""Panel 4: dp and single side by side, the speed-up from the other devices, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dpmon.model.mode_comparison import MODES_COMPARED, Comparison, verdict_sentence
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
)
from dpmon.ui.chart import round_up_nice
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.step_waterfall import main_row
from dpmon.ui.styled_rows import Row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_MAX_REFUSAL_ROWS = 3
"""Most rows for refusals, unless the panel is on the full screen."""
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
    return 9 + max(len(_peak_devices(comparison)), 1) + comparison.virtual if len(comparison.sides) > 1 else 4


def _peak_devices(comparison: Comparison) -> list[str]:
    return sorted({device for peaks in comparison.memory.values() for device in peaks})


def panel_title(screen: ScreenData, folded: bool) -> tuple[Row, Row]:
    """Return the title and the main numbers."""
    comparison = shown_stats(screen)
    speedup, corner = comparison.speedup, list[tuple[str, str]]()
    if speedup is not None and not speedup.sign:
        corner = [("too uncertain" if comparison.uncertain else "no difference shows", "dim")]
    elif speedup is not None:
        factor, baseline_text = format_factor(speedup.value, "×"), "" if folded else " as one device"
        corner = [(align_right(factor, 6), "good" if speedup.sign > 0 else "bad"), (f" as fast{baseline_text}", "dim")]
    elif folded and len(comparison.sides) > 1:
        corner = [("no verdict yet", "dim")]
    else:
        for mode, side in comparison.sides.items():
            gap = "  " if corner else ""
            corner += [(gap, ""), (mode, f"mode.{mode}"), (align_right(format_duration(side.median_ns), 8), "")]
    return [(NAMES["compare"], "title")], corner


def render_panel(
    screen: ScreenData, width: int, height: int, style: TerminalStyle, *, advice: bool = True
) -> list[Row]:
    """Return the rows inside the frame. The verdict (`advice`) comes last and always fits."""
    comparison = shown_stats(screen)
    if not comparison.sides:
        return [[(screen.empty_reason("no step was traced", "no step has finished yet"), "dim")]]
    notes = _note_rows(screen, comparison, width) if advice else []
    groups = _table_rows(comparison, width, style)
    free_rows = max(height - len(notes), 3) - len(groups["main"])
    # Take the most important rows that fit. The bars and the phases of one mode are in panel 3.
    wanted = ("bars", "memory", "p95", "steps", "phases") if len(comparison.sides) > 1 else ("memory", "p95", "steps")
    shown = {"main": groups["main"]}
    for name in wanted:
        rows = groups[name]
        if len(rows) > free_rows and name == "memory" and free_rows > 0:
            hidden = len(rows) - free_rows + 1
            text = f"{hidden} more devices" if free_rows > 1 else f"peak memory of {hidden} devices: zoom"
            rows = [*rows[: free_rows - 1], [(text, "dim")]]
        if len(rows) <= free_rows:
            shown[name] = rows
            free_rows -= len(rows)
    return [*(row for name in groups for row in shown.get(name, ())), *notes]


# ------------------------------------------------------------------------------------------------ table


class _Line(NamedTuple):
    """A row of the table: its label, the text of each mode, and a note, which is left out if there is no room."""

    label: str
    texts: Mapping[str, str]
    style: str = ""
    note: Sequence[tuple[str, str]] = ()


def _table_rows(comparison: Comparison, width: int, style: TerminalStyle) -> dict[str, list[Row]]:
    """Return the rows of the table by group, in the order of the screen."""
    groups = _table_lines(comparison)
    label_width = 14 if any(line.label == _WITHIN_STEPS for line in groups["main"]) else 12
    cell_width = 11 if width >= 52 else 10
    note_width = width - label_width - len(comparison.sides) * cell_width - 2

    def draw(line: _Line) -> Row:
        row: Row = [(truncate(line.label, label_width - 1).ljust(label_width), "dim")]
        row += [(align_right(line.texts.get(mode, UNKNOWN), cell_width), line.style) for mode in comparison.sides]
        return [*row, ("  ", ""), *line.note] if line.note and row_width(line.note) <= note_width else row

    devices = f" ×{len(comparison.devices)}" if comparison.devices else ""
    header: Row = [(" " * label_width, "")]
    for mode in comparison.sides:
        header.append((align_right(mode + (devices if mode == "dp" else ""), cell_width), f"mode.{mode}"))
    if comparison.speedup is not None:
        header.append(("  speed-up (95%)", "dim"))
    rows = {name: [draw(line) for line in lines] for name, lines in groups.items()}
    return {**rows, "main": [header, *rows["main"]], "bars": _bar_rows(comparison, width, style)}


_WITHIN_STEPS = " within steps"


def _table_lines(comparison: Comparison) -> dict[str, list[_Line]]:
    """Return the lines of the table by group, in the order of the screen."""
    sides, speedup = comparison.sides, comparison.speedup
    step_note: Row = []
    efficiency_note: Row = []
    if speedup is not None:
        bounds = f"{format_factor(speedup.low, '')} to {format_factor(speedup.high, '')}"
        step_note = [(f"{bounds}×", "dim")]  # no difference shows: give only the range, not a ratio
        if speedup.sign:
            step_note = [(format_factor(speedup.value, "×"), "bold"), (f" ({bounds})", "dim")]
        if speedup.sign and comparison.efficiency is not None:
            efficiency_note = [(format_percent(comparison.efficiency), "bold"), (" efficiency", "dim")]
    rates = {mode: side.rate for mode, side in sides.items() if side.rate is not None}
    medians = {mode: format_duration(side.median_ns) for mode, side in sides.items()}
    samples_per_s = {mode: format_compact(rate.samples_per_s) for mode, rate in rates.items()}
    main = [
        _Line("median step", medians, "bold", step_note),
        _Line("samples/s", samples_per_s, "bold", efficiency_note),
    ]
    if any(rate.differs_within_steps for rate in rates.values()):
        texts = {mode: format_compact(rate.samples_per_s_within) for mode, rate in rates.items()}
        main.append(_Line(_WITHIN_STEPS, texts, "dim"))
    steps = _Line("steps seen", {mode: format_count(count) for mode, count in comparison.seen.items()}, "dim")
    if comparison.samples is not None:
        texts = {mode: format_count(side.steps) for mode, side in sides.items()}
        steps = _Line("compared", texts, "dim", [(f"of {format_count(comparison.samples)} samples each", "dim")])
    memory = []
    for index, device in enumerate(_peak_devices(comparison)):
        label = sanitize_line(device, 12).replace("cuda:", "gpu ")
        texts = {mode: format_bytes(comparison.memory.get(mode, {}).get(device)) for mode in sides}
        memory.append(_Line(("     " if index else "peak ") + label, texts))
    return {
        "main": main,
        "p95": [_Line("p95 step", {mode: format_duration(side.p95_ns) for mode, side in sides.items()})],
        "memory": memory,
        "steps": [steps],
        "phases": _phase_lines(sides),
    }


def _phase_lines(sides: Mapping[str, StepStats]) -> list[_Line]:
    """Return a line per phase: its median in each mode, and the difference."""
    own_rows = {phase.name for side in sides.values() for phase in side.phases if phase.ran and phase.name != REST}
    has_call_phases = any(phase_by_name(name).of_call for name in own_rows)
    lines = []
    for index, name in enumerate(PHASES):
        phases = {mode: side.disjoint_phases[index] for mode, side in sides.items()}
        if phase_by_display_name(name).optional and not any(phase.ran for phase in phases.values()):  # as in panel 3
            continue
        medians = [phases[mode].median_ns for mode in MODES_COMPARED if mode in phases]
        note: Row = []
        if len(medians) == 2 and any(median is not None for median in medians):
            single, dp = (median or 0.0 for median in medians)
            note = [(("+" if dp >= single else "-") + format_duration(abs(dp - single)), "dim")]
        texts = {mode: format_duration(phase.median_ns) if phase.ran else "none" for mode, phase in phases.items()}
        label = "other fwd" if name == "forward" and has_call_phases else name
        lines.append(_Line(" " + label, texts, "", note))
    return lines


def _bar_rows(comparison: Comparison, width: int, style: TerminalStyle) -> list[Row]:
    """Return the median phases of each mode end to end, on one scale."""
    pieces_by_mode: dict[str, list[Piece]] = {}
    for mode, side in comparison.sides.items():
        start = 0
        for phase in side.disjoint_phases:
            if phase.median_ns:
                end = start + int(phase.median_ns)
                pieces_by_mode.setdefault(mode, []).append(Piece(phase.name, start, end))
                start = end
    label_width = 7
    if not pieces_by_mode or width - label_width < 20:
        return []
    top = round_up_nice(max(pieces[-1].end_ns for pieces in pieces_by_mode.values()))
    return [
        [(mode.ljust(label_width), f"mode.{mode}"), *main_row(pieces, width - label_width, top, style, (0, 0))]
        for mode, pieces in pieces_by_mode.items()
    ]


# ------------------------------------------------------------------------------------------------ notes


def _note_rows(screen: ScreenData, comparison: Comparison, width: int) -> list[Row]:
    """Return the verdict, or why there is none yet, and the caveats."""
    is_full_screen = screen.view.zoom == "compare"
    refusal = _refusal_note(screen)
    rows = wrap_to_rows(refusal, width, "wait", None if is_full_screen else _MAX_REFUSAL_ROWS)
    verdict = verdict_sentence(comparison)
    if verdict is not None:
        rows += wrap_to_rows(verdict, width, "bold")
    elif len(comparison.sides) > 1:
        rows += wrap_to_rows(comparison.missing or "", width, "wait")
    elif not refusal:  # which explains why the other mode was not seen
        (other,) = (mode for mode in MODES_COMPARED if mode not in comparison.sides)
        hint: Row = [(f"{other} was not seen yet: ", "dim"), ("d", "key"), (" switches the running job", "dim")]
        if screen.can_toggle:
            rows.append(hint if row_width(hint) <= width else hint[:2])
        else:
            until_text = " until then" if screen.cursor.is_playback else ""
            rows += wrap_to_rows(f"{other} was not seen{until_text}", width)
    if len(comparison.sides) > 1:
        if comparison.virtual:
            has_room = is_full_screen or len(_VIRTUAL_NOTE) <= width
            rows += wrap_to_rows(_VIRTUAL_NOTE if has_room else _SHORT_VIRTUAL_NOTE, width)
        rows += wrap_to_rows(_excluded_steps_note(comparison, is_full_screen), width)
    return rows


def _refusal_note(screen: ScreenData) -> str:
    """Return the refused mode with its root modules and the reasons, while the refusal is the newest reply.

    If other root modules run in that mode (a model but not its loss), the refusal appears only on the full screen.
    """
    process = screen.process
    if process is None:
        return ""
    current_mode = process.mode if process.last_step is None else process.last_step.mode
    roots_by_refusal: dict[tuple[str, str], list[str]] = {}
    for root, refusal in process.refusals.items():
        if refusal.mode != current_mode or screen.view.zoom == "compare":
            roots_by_refusal.setdefault((refusal.mode, refusal.reason), []).append(sanitize_line(root, 60))
    texts = []
    for (mode, reason), roots in roots_by_refusal.items():
        roots_text = f" for {', '.join(roots)}" if len(process.calls) > 1 and all(roots) else ""
        texts.append(f"{mode} refused{roots_text}: {sanitize_line(reason, 300)}")
    return "; ".join(texts)


def _excluded_steps_note(comparison: Comparison, is_full_screen: bool) -> str:
    """Return which steps the comparison omits; on the full screen also what the metrics cover."""
    parts = []
    if comparison.left_out:
        parts.append(f"excluded: {format_count_with_noun(comparison.left_out, 'step')} of another batch size")
    if is_full_screen:
        parts += [
            f"median, p95 and phases without the first {WARM_UP_STEPS} steps and the {WARM_UP_STEPS} after each switch",
            "samples/s: all training, without pauses and evaluations",
        ]
        if len({frozenset(peaks) for peaks in comparison.memory.values()}) > 1:
            parts.append("peak –: it did not rise in this mode")
    return "; ".join(parts)
