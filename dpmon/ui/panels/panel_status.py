"""The first rows: the run, its state, speed and mode; below them the newest event."""

from __future__ import annotations

from dpmon.cleaning import clean
from dpmon.model.pace import Speed, speed
from dpmon.model.state import NO_STEPS
from dpmon.model.stragglers import in_short
from dpmon.record.schema import SPAN_PHASES
from dpmon.stalls.run_state import STALLED
from dpmon.text.cells import cut, right, span_width, wrapped
from dpmon.text.quantities import clock, compact, duration, group, minutes, within_words
from dpmon.ui.facts import READING, SECOND, Facts, Life, life, mode_words
from dpmon.ui.look import Look
from dpmon.ui.panels.panel_batch import figures
from dpmon.ui.rows import Row, columns, fit, plain, width_of

WARNING_SHOWN_NS = 60 * SECOND
DONE_SHOWN_NS = 15 * SECOND
_ALL_OF_IT = "  W: all of it "
_WIDE = 140
"""Width (cells) from which the first row shows the rate within steps next to the rate."""
_WARNING_BEGINS = 16
"""Fewest cells for a warning beside the state."""


def status(facts: Facts, width: int, height: int, look: Look) -> list[Row]:
    """`height` rows of `width` cells: two where panels stand side by side, three on a narrow screen."""
    alive = life(facts)
    rows = _narrow(facts, alive, width, look) if height >= 3 else [_wide(facts, alive, width, look)]
    fact = _message(facts, look, width - 2)
    if height >= 3 and facts.stall is not None:  # the sentence needs more room than the rates, which are unknown
        first, *rest = wrapped(plain(_stalled(facts, look)), width - 2, 2, look.glyphs.more)
        rows[1:] = [[(" ", ""), (first, "bad")]]
        if fact == _stalled(facts, look):
            fact = [(rest[0], "bad")] if rest else _warning(facts)
    warned = bool(fact) and fact == _warning(facts)
    message: Row = [(" ", ""), *fact]
    if alive.detail not in plain(rows[0]) and facts.stopping is None and not answer(facts, look):
        state: Row = [(" ", ""), (f"{alive.word}: ", alive.style), (alive.detail, ""), ("  ", "")]
        if warned:  # show both; a row that is too narrow shows the warning's beginning
            room = width - width_of(_missed(facts)) - span_width(_ALL_OF_IT)
            message = [*state, *fact] if width_of(state) + _WARNING_BEGINS <= room else message
        else:
            whole = facts.over or facts.stall is not None or width_of(state) + width_of(fact) <= width
            message = [*state, *(fact if whole else [])]
    corner = _missed(facts) or _next(facts, width - width_of(message), look)
    if warned and width_of(message) > width - width_of(corner):
        corner = [(_ALL_OF_IT, "dim"), *corner]
    rows.append(columns(message, corner, width, look.glyphs.more))
    blank: Row = [(" " * width, "")]
    return [*(fit(row, width, look.glyphs.more) for row in rows), *[blank] * height][:height]


def _speed(facts: Facts) -> Speed:
    process = facts.process
    if facts.reading and not facts.over:  # the newest steps read so far are old ones
        return Speed(None, READING)
    if process is None:
        return Speed(None, "no training process yet")
    return speed(process, facts.state, facts.now_ns)


def _state(facts: Facts, alive: Life, width: int, look: Look) -> Row:
    frozen: Row = [("FROZEN ", "wait")] if facts.view.frozen else []
    if facts.past is not None:
        since = max(facts.past.now_ns - facts.now_ns, 0) / SECOND
        ago = f"{since:.0f} s" if since < 59.5 else minutes(since)
        frozen = [(f"at {clock(facts.now_ns)}, {ago} ago ", "wait")]
    sign = {"good": look.glyphs.dot, "bad": look.glyphs.cross}.get(alive.style, look.glyphs.ring)
    sign = look.glyphs.square if alive.word == STALLED.upper() else sign
    row: Row = [*frozen, (f"{sign} {alive.word}", alive.style)]
    # Show the detail in full or not at all: if it does not fit here, the row below shows it.
    detail: Row = [(f" {alive.detail}", "dim")] if alive.detail else []
    return fit([*row, *detail] if width_of(row) + width_of(detail) <= width else row, width, look.glyphs.more)


def _mode(facts: Facts, look: Look) -> Row:
    process = facts.process
    mode, where = mode_words(process, look.glyphs.times)
    style = f"mode.{process.mode}" if process is not None and process.mode else "dim"
    return [(mode, style), ("  " + where if where else "", "")]


def _numbers(facts: Facts) -> tuple[str, str, str]:
    process = facts.process
    rates = _speed(facts)
    step = group(process.last_step.step if process is not None and process.last_step is not None else None)
    return step, compact(rates.steps_per_s), compact(rates.samples_per_s)


def _wide(facts: Facts, alive: Life, width: int, look: Look) -> Row:
    numbers = [*_rates(facts), *_within(facts, width >= _WIDE), ("   ", ""), *_mode(facts, look), (" ", "")]
    clock_text = clock(facts.elapsed_ns)
    brand = " dpmon  " if width >= _WIDE else " "
    rest = width - width_of(numbers) - span_width(clock_text) - len(brand) - 4
    needed = span_width(alive.word) + span_width(alive.detail) + 3
    name = cut(facts.title, max(rest - max(needed, 18), 10), look.glyphs.more)
    return [
        (brand, "dim"),
        (name + "  ", "title"),
        *_state(facts, alive, max(rest - span_width(name), 12), look),
        ("  " + clock_text, ""),
        *numbers,
    ]


def _rates(facts: Facts) -> Row:
    """Step and rates in a fixed width; empty before the first step, to leave room for the state.

    In a stall, only the step.
    """
    if facts.over:
        return _means(facts)
    if facts.process is None or facts.process.last_step is None:
        return []
    counts = _counting(facts, "  step", 8)
    return counts if facts.stall is None else counts[:2]


def _counting(facts: Facts, head: str, width: int) -> Row:
    step, steps, samples = _numbers(facts)
    return [
        (head, "dim"),
        (right(step, 10), "bold"),
        (right(steps, width), "bold"),
        (" steps/s", "dim"),
        (right(samples, width), "bold"),
        (" samples/s", "dim"),
    ]


def _within(facts: Facts, room: bool) -> Row:
    """The rate within steps, if it differs from the overall rate and there is room."""
    return [(within_words(_speed(facts).rate), "dim")] if room else []


def _means(facts: Facts) -> Row:
    """The means of a finished run: its numbers no longer change."""
    step, steps, samples = _numbers(facts)
    if facts.process is None or facts.process.last_step is None:
        return []
    pairs = (("  step ", step), ("   mean ", steps), (" steps/s  ", samples), (" samples/s", ""))
    return [span for word, number in pairs for span in ((word, "dim"), (number, "bold"))]


def _narrow_means(facts: Facts, width: int) -> Row:
    """A run's means and its median, each in full or not at all."""
    means, middle = _means(facts), _median(facts)
    within = _within(facts, bool(means))
    if width_of(means) + width_of(within) <= width:
        means = [*means, *within]
    if not means or width_of(means) + width_of(middle) <= width:
        return [*means, *middle] if means else []
    return means if width_of(means) <= width else [*means[:4], (" steps/s", "dim")]


def _median(facts: Facts) -> Row:
    """The median step of a finished run in one mode, with the mode's name if there were several."""
    process = facts.process
    whole = process.whole if process is not None else NO_STEPS
    several = process is not None and process.compared is not None and len(process.compared.sides) > 1
    mode = f" ({whole.mode})" if several else ""
    return [("   median ", "dim"), (duration(whole.median_ns), "bold"), (mode, "dim")]


def _narrow(facts: Facts, alive: Life, width: int, look: Look) -> list[Row]:
    mode: Row = [*_mode(facts, look), (" ", "")]
    clock_text = "  " + clock(facts.elapsed_ns) + "  "
    needed = span_width(alive.word) + 14
    room = width - width_of(mode) - span_width(clock_text) - 1
    if room < needed:  # the state is more important than the devices, the mode and the clock
        mode = [mode[0], (" ", "")]
        room = width - width_of(mode) - span_width(clock_text) - 1
    if room < needed:
        mode, clock_text = [], ""
        room = width - 1
    name = cut(facts.title, max(room // 3, 8), look.glyphs.more)
    first: Row = [
        (" ", ""),
        (name + "  ", "title"),
        *_state(facts, alive, max(room - span_width(name) - 2, 3), look),
        (clock_text, ""),
        *mode,
    ]
    if facts.over:
        return [first, _narrow_means(facts, width)]
    second = _counting(facts, " step", 9)
    step_time: Row = [("   median", "dim"), (right(duration(figures(facts).median_ns), 9), "bold")]
    for more in (_within(facts, True), step_time):  # each one complete or not at all
        second = [*second, *more] if width_of(second) + width_of(more) <= width else second
    return [first, second]


def _missed(facts: Facts) -> Row:
    """The number of records that are missing from the screen, if any."""
    lost = facts.state.missed
    if not lost:
        return []
    return [(f"  {group(lost)} records dropped ", "wait")]


def reports_straggler(facts: Facts, look: Look) -> bool:
    """Whether the message is about a straggler, so that no panel has to repeat it."""
    other = facts.stopping is not None or facts.over or answer(facts, look) or _warning(facts)
    return not other and facts.stall is None and facts.state.straggler is not None


def _message(facts: Facts, look: Look, width: int) -> Row:
    """The most important event now: the end, an answer, a warning; else plain facts."""
    if facts.stopping is not None:  # also after the command has ended, while it has processes left
        return [("stopping: ", "wait"), (clean(facts.stopping, 200), "")]
    reply = answer(facts, look)
    if reply:
        return reply
    if facts.stall is not None:
        return _stalled(facts, look)
    if facts.over:
        return _afterwards(facts)
    warned = _warning(facts)
    if warned:
        return warned
    slow = facts.state.straggler
    if slow is not None:  # see reports_straggler
        return [(f"{look.glyphs.focus} ", "wait"), (in_short(slow), "")]
    process = facts.process
    rates = _speed(facts)
    if rates.reason not in (None, READING) and process is not None and process.last_step is not None:
        return [(rates.reason, "dim")]
    return _facts(facts, look, width)


def _stalled(facts: Facts, look: Look) -> Row:
    """Which rank stands where; at the end of the run, also its outcome."""
    text = "" if facts.stall is None else clean(facts.stall.text, 400)
    if facts.stall is not None and facts.over:
        seconds = facts.stall.lasted_ns(facts.elapsed_ns) / SECOND
        last = f"; {facts.last_line}" if facts.last_line else ""
        text = f"the run ended in a stall of {seconds:,.0f} s: {text}{last}"
    return [(f"{look.glyphs.focus} ", "bad"), (text, "bad")]


def cut_answer(facts: Facts, width: int, look: Look) -> bool:
    """Whether an answer does not fit in its row."""
    if facts.stopping is not None and not facts.over:
        return False
    return 1 + width_of(answer(facts, look)) > width - width_of(_missed(facts))


def _warning(facts: Facts) -> Row:
    warning = facts.state.warnings[-1] if facts.state.warnings else None
    if warning is None or facts.now_ns - (warning.t_ns or 0) >= WARNING_SHOWN_NS:
        return []
    return [("warning: ", "wait"), (clean(warning.text, 300), "")]


def _afterwards(facts: Facts) -> Row:
    if facts.last_line:
        return [(facts.last_line, "bad")]
    if facts.ended is None:
        return [("the command is gone; its exit status was not recorded", "wait")]
    return [("the run is over" if facts.playing is not None else "the run is over; this picture stays", "dim")]


def _next(facts: Facts, room: int, look: Look) -> Row:
    """The next command to try after the end, if it fits in full."""
    if facts.info is None or not facts.over:
        return []
    hint = f"{look.glyphs.middot} dpmon export {clean(facts.info.id, 120)} writes the records "
    return [("  " + hint, "dim")] if len(hint) + 4 <= room else []


def _facts(facts: Facts, look: Look, width: int) -> Row:
    """Facts that do not change, each in full or not at all, except the first and most important one."""
    process = facts.process
    parts: list[str] = []
    within = within_words(_speed(facts).rate).strip(" ()")
    if within and width < _WIDE - 2:  # the row above shows it if it is wide enough
        parts.append(within)
    if process is not None:
        if process.virtual and process.mode == "dp":
            parts.append("virtual replicas: " + clean(process.mode_reason or "devices are shared", 200))
        if len(facts.state.processes) > 1:
            many = process.info.world or len(facts.state.processes)
            # Processes are numbered from 0 like ranks, but "process 1 of 2" would suggest numbers from 1.
            one = f"process {process.process}, one of {many}"
            parts.append(one if process.rank is None else f"rank {process.rank} of {many}")
        for key, value in (("python", process.info.python), ("torch", process.info.torch)):
            if value is not None:
                parts.append(f"{key} {clean(value, 30)}")
    elif facts.info is not None and facts.info.python:
        parts.append(f"Python: {clean(facts.info.python, 200)}")
    if facts.info is not None and facts.info.options.get("mode") == "script":
        parts.append("mode script: observed only")
    dot = f" {look.glyphs.middot} "
    while len(parts) > 1 and span_width(dot.join(parts)) > width:
        parts.pop()
    return [(dot.join(parts), "dim")]


# ------------------------------------------------------------------------------------------------ answers


def answer(facts: Facts, look: Look) -> Row:
    """The answer to the user's last request, if it is recent: a key, a pause, a mode."""
    if facts.view.message is not None:
        return [(facts.view.message, "wait")]
    if facts.over:
        return []
    return _held_up(facts) if facts.stall is not None else _pausing(facts) or _answer(facts, look)


def _held_up(facts: Facts) -> Row:
    """What a pending request waits for while the training makes no progress; empty without a request."""
    toggle = facts.toggle if facts.toggle is not None and facts.toggle.status == "pending" else None
    busy = [(since, process) for process, (doing, since) in facts.activities.items() if since > 0 and doing != "ended"]
    if not busy or not (toggle or facts.pausing.pending):
        return []
    since, number = min(busy)
    process = facts.state.processes.get(number)
    who = "the training" if process is None or process.rank is None else f"rank {process.rank}"
    what = f"switch to {toggle.mode}" if toggle else "pause" if facts.pausing.wanted else "go on"
    doing, waited = facts.activities[number][0], (facts.now_ns - since) / 1e9
    place = f"in {doing}" if doing in SPAN_PHASES else "in the script's own work"
    return [(f"{who} has been {place} for {waited:.0f} s: ", "wait"), (f"it will {what} when it comes back", "")]


def _pausing(facts: Facts) -> Row:
    """A pause or its end, requested but not yet in force; or why it was refused."""
    pausing = facts.pausing
    if pausing.pending:
        what, when = ("pause", "after the step it is in") if pausing.wanted else ("resume", "in a moment")
        return [(what, ""), (" pending", "wait"), (f": the training {what}s {when}", "dim")]
    last = facts.state.pauses[-1] if facts.state.pauses else None
    if last is None or last.t_ns is None or facts.now_ns - last.t_ns > DONE_SHOWN_NS:
        return []
    if last.refused is not None:
        return [("pause", ""), (" refused: ", "bad"), (clean(last.refused, 300), "")]
    if last.reason is not None and not last.paused:
        return [("the pause is over: ", "wait"), (clean(last.reason, 300), "")]
    return []


def _answer(facts: Facts, look: Look) -> Row:
    toggle = facts.toggle
    if toggle is None:
        return []
    style = f"mode.{toggle.mode}"
    if toggle.status == "pending":
        waited = max(facts.now_ns - toggle.since_ns, 0) / 1e9
        note = "the training answers at its next call"
        if not facts.reading and (facts.process is None or facts.process.seen_ns < 0):
            note = "the training answers at its first call"
        elif facts.pausing.since_ns is not None:
            note = "the training answers once it goes on (p)"
        return [
            (f"{look.glyphs.arrow} ", ""),
            (toggle.mode, style),
            (" pending ", "wait"),
            (f"{waited:.0f} s: {note}", "dim"),
        ]
    if facts.now_ns - toggle.since_ns > DONE_SHOWN_NS:
        return []
    if toggle.status == "refused":
        why = clean(toggle.reason, 300) if toggle.reason else "no reason was given"
        return [(toggle.mode, style), (" refused: ", "bad"), (why, "")]
    at = " done" if toggle.step is None else f" from step {group(toggle.step)} on"
    return [(toggle.mode, style), (at, "good")]
