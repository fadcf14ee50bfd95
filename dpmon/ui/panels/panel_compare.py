"""Panel 4: dp and single side by side, the gain from the other devices, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpmon.model.device_memory import HOST
from dpmon.model.mode_comparison import Comparison, ModeSpeedup, Peak, verdict_sentence
from dpmon.model.run_snapshot import PHASES
from dpmon.model.step_timeline import Piece
from dpmon.record.schema import REST, WARM_UP_STEPS, phase_by_display_name, phase_by_name
from dpmon.sanitize import sanitize_line
from dpmon.store.step_stats import StepStats
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import (
    UNKNOWN,
    format_bytes,
    format_clock,
    format_compact,
    format_count,
    format_count_with_noun,
    format_duration,
    format_factor,
    format_percent,
    format_time_range,
)
from dpmon.ui.chart import range_bar, round_up_nice
from dpmon.ui.panels.panel_batch import history_rows
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.step_waterfall import main_row
from dpmon.ui.styled_rows import Row, TableColumn, row_width, table_rows, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_MODES = ("single", "dp")
_REFUSED_ROWS = 3
"""Most rows for refusals, unless the panel is on the full screen."""
_LEAST_CHART, _MOST_CHART = 4, 16
"""Rows of the chart at full size."""
_LEAST_RANGE = 12
"""Fewest cells for the intervals of the changes of mode."""
_VIRTUAL_SHORT = "virtual replicas show behavior, not speed"
_VIRTUAL = "virtual replicas share one device: this shows how dp behaves, not how fast it would be"


def shown_stats(facts: ScreenData) -> Comparison:
    """Both modes of the process that represents the run; empty for ranks, which have no mode."""
    process = facts.process
    return process.compared or Comparison() if process is not None else Comparison()


def is_shown(facts: ScreenData) -> bool:
    """Whether there can be two modes: a script on one device has nothing to compare."""
    return facts.process is not None and facts.process.has_used_dp


def preferred_height(facts: ScreenData) -> int:
    """Rows that the content needs, with a verdict of two rows; without the phases, which the bars show too."""
    found = shown_stats(facts)
    devices = len({device for peaks in found.memory.values() for device in peaks if device != HOST})
    return 5 + max(devices, 1) + 2 + 2 + found.virtual if len(found.sides) > 1 else 4


def panel_title(facts: ScreenData, look: TerminalStyle, folded: bool) -> tuple[Row, Row]:
    """The panel's title, and its main numbers."""
    found = shown_stats(facts)
    corner: Row = []
    if found.outcome == "even":
        corner = [("too uncertain" if found.uncertain else "no difference shows", "dim")]
    elif found.speedup is not None:
        style = "good" if found.outcome == "faster" else "bad"
        more = "" if folded else " as one device"
        corner = [
            (align_right(format_factor(found.speedup.value, look.glyphs.times), 6), style),
            (f" as fast{more}", "dim"),
        ]
    elif folded and len(found.sides) > 1:
        corner = [("no verdict yet", "dim")]
    else:
        for mode, side in ((mode, found.sides[mode]) for mode in _MODES if mode in found.sides):
            corner += [
                ("  " if corner else "", ""),
                (mode, f"mode.{mode}"),
                (align_right(format_duration(side.median_ns), 8), ""),
            ]
    return [(NAMES["compare"], "title")], corner


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle, *, advice: bool = True) -> list[Row]:
    """The panel's rows, inside its frame. The conclusion (`advice`) comes last and always fits."""
    found = shown_stats(facts)
    if not found.sides:
        return [[(facts.empty_reason("no step was traced", "no step has ended yet"), "dim")]]
    below = _notes(facts, found, width, look) if advice else []
    made = _CompareTable(found, width, look)
    room = max(height - len(below), 3)
    first = [made.head(), made.step(), made.samples(), *made.within()]
    both = len(found.sides) > 1  # the bar and the phases of one mode are in panel 3
    more: list[Row] = []
    # Take the most important rows that fit; the last loop puts them into the order of the screen.
    want = [("bars", made.bars()), ("memory", made.memory()), ("p95", [made.p95()]), ("steps", [made.steps()])]
    want = [*want, ("phases", made.phases())] if both else want[1:]
    taken: dict[str, list[Row]] = {}
    left = room - len(first)
    for name, rows in want:
        if rows and len(rows) <= left:
            taken[name] = rows
            left -= len(rows)
        elif name == "memory" and left > 0 and rows:
            shown = rows[: left - 1]
            text = f"{len(rows) - len(shown)} more devices" if shown else f"peak memory of {len(rows)} devices: zoom"
            taken[name] = [*shown, [(text, "dim")]]
            left = 0
    for name in ("p95", "memory", "steps", "phases", "bars"):
        more += taken.get(name, [])
    rows = [*first, *more, *below]
    if facts.view.zoom == "compare" and len(found.changes) > 1:
        rows += [[], *_changes(found.changes, width, look)]
    return [*rows, *_over_time(facts, width, height - len(rows) - 2, look)]


def _over_time(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """At full size, the mean step over time in the color of its mode, if there are rows for it."""
    if facts.process is None or facts.view.zoom != "compare" or height < _LEAST_CHART:
        return []
    drawn = history_rows(facts, facts.process, width, min(height, _MOST_CHART), look, by_mode=True)
    return [[], [(f"mean step, {format_time_range(facts.view.range_s)}", "bold")], *drawn]


def _changes(changes: Sequence[ModeSpeedup], width: int, look: TerminalStyle) -> list[Row]:
    """The speed-up at each change of mode, as figures and as intervals on one scale."""
    low, high = min(one.speedup.low for one in changes), max(one.speedup.high for one in changes)
    room = min(width - 44, 60)
    texts = [
        f"{format_factor(one.speedup.value, look.glyphs.times)}"
        f" ({format_factor(one.speedup.low, '')} to {format_factor(one.speedup.high, '')})"
        for one in changes
    ]
    columns = [
        TableColumn("change", 9, [format_clock(one.t_ns) for one in changes]),
        TableColumn("  to", 8, [[("  " + one.to.ljust(6), f"mode.{one.to}")] for one in changes], left=True),
        TableColumn("speed-up (95%)", 23, texts, "bold"),
    ]
    if room >= _LEAST_RANGE:
        found = [one.speedup for one in changes]
        drawn = [range_bar(one.low, one.value, one.high, high, room, look.glyphs, low) for one in found]
        scale = format_factor(low, "") + format_factor(high, "").rjust(room - len(format_factor(low, "")))
        columns.append(TableColumn("  " + scale, room + 2, [[("  " + text, "bar")] for text in drawn]))
    return table_rows(columns, look.glyphs.more)


class _CompareTable:
    """Columns: label, single, dp, and the result. Rows of rates within steps widen the label."""

    def __init__(self, found: Comparison, width: int, look: TerminalStyle) -> None:
        self.found, self.width, self.look = found, width, look
        apart = any(side.rate is not None and side.rate.differs_within_steps for side in found.sides.values())
        self.label = 14 if apart else 12  # for "within steps"
        self.cell = 11 if width >= 52 else 10
        self.modes = [mode for mode in _MODES if mode in found.sides]
        self.room = width - self.label - len(self.modes) * self.cell - 2
        self.rest = any(
            phase.ran and phase_by_name(phase.name).of_call
            for side in found.sides.values()
            for phase in side.phases
            if phase.name != REST
        )
        """Whether the call's phases are shown separately, so that forward is only the rest."""

    def line(self, word: str, values: Mapping[str, str], style: str = "", note: Row | None = None) -> Row:
        row: Row = [(truncate(word, self.label - 1).ljust(self.label), "dim")]
        row += [(align_right(values.get(mode, UNKNOWN), self.cell), style) for mode in self.modes]
        return [*row, ("  ", ""), *note] if note and row_width(note) <= self.room else row

    def head(self) -> Row:
        count = len(self.found.devices)
        dp = f"dp {self.look.glyphs.times}{count}" if count else "dp"
        words = {"single": "single", "dp": dp}
        row: Row = [(" " * self.label, "")]
        row += [(align_right(words[mode], self.cell), f"mode.{mode}") for mode in self.modes]
        return [*row, ("  speed-up (95%)", "dim")] if self.found.speedup is not None else row

    def step(self) -> Row:
        found, look = self.found, self.look
        steps = {mode: format_duration(side.median_ns) for mode, side in found.sides.items()}
        note: Row = []
        if found.speedup is not None:
            value = format_factor(found.speedup.value, look.glyphs.times)
            low, high = (format_factor(each, "") for each in found.speedup[1:])
            if found.outcome == "even":  # no difference shows: give only the range, not a ratio
                return self.line("median step", steps, "bold", [(f"{low} to {high}{look.glyphs.times}", "dim")])
            note = [(value, "bold"), (f" ({low} to {high})", "dim")]
            if row_width(note) > self.room:
                note = [(value, "bold")]
        return self.line("median step", steps, "bold", note)

    def samples(self) -> Row:
        found = self.found
        note: Row = []
        if found.efficiency is not None and found.outcome != "even":
            note = [(format_percent(found.efficiency), "bold"), (" efficiency", "dim")]
        rates = {m: s.rate for m, s in found.sides.items() if s.rate is not None}
        return self.line(
            "samples/s", {m: format_compact(rate.samples_per_s) for m, rate in rates.items()}, "bold", note
        )

    def within(self) -> list[Row]:
        """The rates within steps, if they differ from the overall rates."""
        rates = {m: s.rate for m, s in self.found.sides.items() if s.rate is not None}
        if not any(rate.differs_within_steps for rate in rates.values()):
            return []
        return [
            self.line(
                " within steps", {m: format_compact(rate.samples_per_s_within) for m, rate in rates.items()}, "dim"
            )
        ]

    def p95(self) -> Row:
        return self.line("p95 step", {m: format_duration(s.p95_ns) for m, s in self.found.sides.items()})

    def steps(self) -> Row:
        """How many steps are compared, and their samples; before a comparison, how many steps were seen."""
        found, samples = self.found, self.found.samples
        if samples is None:
            return self.line("steps seen", {m: format_count(seen) for m, seen in found.seen.items()}, "dim")
        note: Row = [(f"of {format_count(samples)} samples each", "dim")]
        return self.line("compared", {m: format_count(side.steps) for m, side in found.sides.items()}, "dim", note)

    def memory(self) -> list[Row]:
        """One row per device: peak allocated memory; without GPUs the memory of the run's processes."""
        peaks = {mode: self.found.memory.get(mode, {}) for mode in self.found.sides}
        devices = sorted({device for each in peaks.values() for device in each if device != HOST})
        if not devices:
            if not any(HOST in each for each in peaks.values()):
                return []
            return [self.line("memory", {m: _peak(each.get(HOST)) for m, each in peaks.items()})]
        return [
            self.line(
                ("peak " if index == 0 else "     ") + sanitize_line(device, 12).replace("cuda:", "gpu "),
                {m: _peak(each.get(device)) for m, each in peaks.items()},
            )
            for index, device in enumerate(devices)
        ]

    def phases(self) -> list[Row]:
        """One row per phase: its median in both modes, and the difference."""
        rows = []
        for index, name in enumerate(PHASES):
            phases = {m: s.disjoint_phases[index] for m, s in self.found.sides.items()}
            if phase_by_display_name(name).optional and not any(
                phase.ran for phase in phases.values()
            ):  # as in panel 3
                continue
            medians = {m: phase.median_ns for m, phase in phases.items()}
            single, dp = medians.get("single"), medians.get("dp")
            note: Row = []
            if len(medians) == 2 and (single is not None or dp is not None):
                change = (dp or 0.0) - (single or 0.0)
                note = [(("+" if change >= 0 else "-") + format_duration(abs(change)), "dim")]
            shown = {m: format_duration(medians[m]) if phase.ran else "none" for m, phase in phases.items()}
            word = "fwd rest" if name == "forward" and self.rest else name
            rows.append(self.line(" " + word, shown, "", note))
        return rows

    def bars(self) -> list[Row]:
        """Both modes' phases end to end, on one scale."""
        laid = {mode: _phases_end_to_end(side) for mode, side in self.found.sides.items()}
        ends = {mode: pieces[-1].end_ns for mode, pieces in laid.items() if pieces}
        label = 7
        room = self.width - label
        if not ends or room < 20:
            return []
        top = round_up_nice(max(ends.values()))
        return [
            [(mode.ljust(label), f"mode.{mode}"), *main_row(laid[mode], room, top, self.look, (0, 0))]
            for mode in _MODES
            if mode in ends
        ]


def _phases_end_to_end(side: StepStats) -> list[Piece]:
    """The medians of a mode's phases in order, end to end."""
    pieces: list[Piece] = []
    at = 0
    for phase in side.disjoint_phases:
        if phase.median_ns:
            end = at + int(phase.median_ns)
            pieces.append(Piece(phase.name, at, end))
            at = end
    return pieces


def _peak(peak: Peak | None) -> str:
    if peak is None:
        return UNKNOWN
    return format_bytes(peak.bytes) if peak.exact else "≤" + format_bytes(peak.bytes)


def _notes(facts: ScreenData, found: Comparison, width: int, look: TerminalStyle) -> list[Row]:
    """The verdict, or why there is none yet, and the caveats."""
    rows: list[Row] = []
    whole = facts.view.zoom == "compare"
    text = verdict_sentence(found)
    refused = _refusal_note(facts)
    rows += wrap_to_rows(refused, width, "wait", None if whole else _REFUSED_ROWS, look.glyphs.more)
    if text is not None:
        rows += wrap_to_rows(text, width, "bold")
    elif len(found.sides) == 1 and refused:
        pass  # the refusal already explains why the other mode was not seen
    elif len(found.sides) == 1:
        (other,) = (mode for mode in _MODES if mode not in found.sides)
        hint: Row = [(f"{other} was not seen yet: ", "dim"), ("d", "key"), (" switches the running job", "dim")]
        if not facts.can_toggle:
            rows += wrap_to_rows(f"{other} was not seen" + (" until then" if facts.playing else ""), width)
        else:
            rows.append(hint if row_width(hint) <= width else hint[:2])
    elif found.missing:
        rows += wrap_to_rows(found.missing, width, "wait")
    if len(found.sides) == 2:
        if found.virtual:
            rows += wrap_to_rows(_VIRTUAL if whole or len(_VIRTUAL) <= width else _VIRTUAL_SHORT, width)
        omitted = "; ".join([*_no_memory(found), *_incomparable_steps_note(found)])
        text = _excluded_steps_note(found) if whole else omitted
        rows += wrap_to_rows(text, width)
    return rows


def _refusal_note(facts: ScreenData) -> str:
    """The refused mode with its roots and the reasons, while the refusal is the newest answer.

    If other roots run in that mode (a model but not its loss), the refusal appears only on the full screen.
    """
    process = facts.process
    if process is None or not process.refusals:
        return ""
    several = len(process.calls) > 1
    roots_by_text: dict[str, list[str]] = {}
    for root, refusal in process.refusals.items():
        stepped = process.last_step.mode if process.last_step is not None else process.mode
        if refusal.mode == stepped and facts.view.zoom != "compare":
            continue
        roots_by_text.setdefault(f"{refusal.mode} refused{{}}: {sanitize_line(refusal.reason, 300)}", []).append(
            sanitize_line(root, 60)
        )
    return "; ".join(
        head.replace("{}", f" for {', '.join(roots)}" if several and all(roots) else "", 1)
        for head, roots in roots_by_text.items()
    )


def _no_memory(found: Comparison) -> list[str]:
    """A note if only one mode has a memory figure, for example because the other was short."""
    without = [mode for mode in found.sides if mode not in found.memory]
    return [f"{mode}: no sample of its memory was read" for mode in without if len(without) == 1]


def _incomparable_steps_note(found: Comparison) -> list[str]:
    """Which steps are not compared, and why."""
    passes, sizes = found.left_other_kind, found.left_out - found.left_other_kind
    which = "without" if found.trained else "with"
    parts = [(sizes, "of another batch size"), (passes, f"{which} a backward pass")]
    return [f"left out: {format_count_with_noun(number, 'step')} {what}" for number, what in parts if number]


def _excluded_steps_note(found: Comparison) -> str:
    """Which steps the figures leave out, and why."""
    parts = [*_incomparable_steps_note(found), *_no_memory(found)]
    parts += [
        f"median, p95 and phases without the first {WARM_UP_STEPS} steps and the {WARM_UP_STEPS} after each switch",
        "samples/s: all training, without pauses and evaluations",
    ]
    if any(not peak.exact for mode in found.sides for peak in found.memory.get(mode, {}).values()):
        parts.append("≤: the peak came before this mode, which used at most that")
    return "; ".join(parts)
