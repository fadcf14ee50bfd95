"""The first rows: the run, its state, speed and mode; below them the newest event."""

from __future__ import annotations

from dpmon.cleaning import clean
from dpmon.model.pace import Speed, speed
from dpmon.model.state import NO_STEPS
from dpmon.model.stragglers import in_short
from dpmon.record.schema import SPAN_PHASES
from dpmon.stalls.run_state import STALLED
from dpmon.text.cells import cut, right, span_width, wrapped
from dpmon.text.quantities import clock, compact, duration, group, within_words
from dpmon.ui.look import Look
from dpmon.ui.panels.panel_batch import figures
from dpmon.ui.rows import Row, columns, fit, plain, width_of
from dpmon.ui.scene import READING, SECOND, Life, Scene, life, mode_words

WARNING_SHOWN_NS = 60 * SECOND
DONE_SHOWN_NS = 15 * SECOND
_ALL_OF_IT = "  W: all of it "
_WIDE = 140
"""Width (cells) from which the first row shows the rate within steps next to the rate."""
_WARNING_BEGINS = 16
"""Fewest cells for a warning beside the state."""


def status(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """`height` rows of `width` cells: two where panels stand side by side, three on a narrow screen."""
    alive = life(scene)
    rows = _narrow(scene, alive, width, look) if height >= 3 else [_wide(scene, alive, width, look)]
    fact = _message(scene, look, width - 2)
    if height >= 3 and scene.stall is not None:  # the sentence needs more room than the rates, which are unknown
        first, *rest = wrapped(plain(_stalled(scene, look)), width - 2, 2, look.glyphs.more)
        rows[1:] = [[(" ", ""), (first, "bad")]]
        if fact == _stalled(scene, look):
            fact = [(rest[0], "bad")] if rest else _warning(scene)
    warned = bool(fact) and fact == _warning(scene)
    message: Row = [(" ", ""), *fact]
    if alive.detail not in plain(rows[0]) and scene.stopping is None and not answer(scene, look):
        state: Row = [(" ", ""), (f"{alive.word}: ", alive.style), (alive.detail, ""), ("  ", "")]
        if warned:  # show both; a row that is too narrow shows the warning's beginning
            room = width - width_of(_missed(scene)) - span_width(_ALL_OF_IT)
            message = [*state, *fact] if width_of(state) + _WARNING_BEGINS <= room else message
        else:
            whole = scene.over or scene.stall is not None or width_of(state) + width_of(fact) <= width
            message = [*state, *(fact if whole else [])]
    corner = _missed(scene) or _next(scene, width - width_of(message), look)
    if warned and width_of(message) > width - width_of(corner):
        corner = [(_ALL_OF_IT, "dim"), *corner]
    rows.append(columns(message, corner, width, look.glyphs.more))
    blank: Row = [(" " * width, "")]
    return [*(fit(row, width, look.glyphs.more) for row in rows), *[blank] * height][:height]


def _speed(scene: Scene) -> Speed:
    process = scene.process
    if scene.reading and not scene.over:  # the newest steps read so far are old ones
        return Speed(None, READING)
    if process is None:
        return Speed(None, "no training process yet")
    return speed(process, scene.state, scene.now_ns)


def _state(scene: Scene, alive: Life, width: int, look: Look) -> Row:
    frozen: Row = [("FROZEN ", "wait")] if scene.view.frozen else []
    sign = {"good": look.glyphs.dot, "bad": look.glyphs.cross}.get(alive.style, look.glyphs.ring)
    sign = look.glyphs.square if alive.word == STALLED.upper() else sign
    row: Row = [*frozen, (f"{sign} {alive.word}", alive.style)]
    # Show the detail in full or not at all: if it does not fit here, the row below shows it.
    detail: Row = [(f" {alive.detail}", "dim")] if alive.detail else []
    return fit([*row, *detail] if width_of(row) + width_of(detail) <= width else row, width, look.glyphs.more)


def _mode(scene: Scene, look: Look) -> Row:
    process = scene.process
    mode, where = mode_words(process, look.glyphs.times)
    style = f"mode.{process.mode}" if process is not None and process.mode else "dim"
    return [(mode, style), ("  " + where if where else "", "")]


def _numbers(scene: Scene) -> tuple[str, str, str]:
    process = scene.process
    rates = _speed(scene)
    step = group(process.last_step.step if process is not None and process.last_step is not None else None)
    return step, compact(rates.steps_per_s), compact(rates.samples_per_s)


def _wide(scene: Scene, alive: Life, width: int, look: Look) -> Row:
    numbers = [*_rates(scene), *_within(scene, width >= _WIDE), ("   ", ""), *_mode(scene, look), (" ", "")]
    clock_text = clock(scene.elapsed_ns)
    brand = " dpmon  " if width >= _WIDE else " "
    rest = width - width_of(numbers) - span_width(clock_text) - len(brand) - 4
    needed = span_width(alive.word) + span_width(alive.detail) + 3
    name = cut(scene.title, max(rest - max(needed, 18), 10), look.glyphs.more)
    return [
        (brand, "dim"),
        (name + "  ", "title"),
        *_state(scene, alive, max(rest - span_width(name), 12), look),
        ("  " + clock_text, ""),
        *numbers,
    ]


def _rates(scene: Scene) -> Row:
    """Step and rates in a fixed width; empty before the first step, to leave room for the state.

    In a stall, only the step.
    """
    if scene.over:
        return _means(scene)
    if scene.process is None or scene.process.last_step is None:
        return []
    counts = _counting(scene, "  step", 8)
    return counts if scene.stall is None else counts[:2]


def _counting(scene: Scene, head: str, width: int) -> Row:
    step, steps, samples = _numbers(scene)
    return [
        (head, "dim"),
        (right(step, 10), "bold"),
        (right(steps, width), "bold"),
        (" steps/s", "dim"),
        (right(samples, width), "bold"),
        (" samples/s", "dim"),
    ]


def _within(scene: Scene, room: bool) -> Row:
    """The rate within steps, if it differs from the overall rate and there is room."""
    return [(within_words(_speed(scene).rate), "dim")] if room else []


def _means(scene: Scene) -> Row:
    """The means of a finished run: its numbers no longer change."""
    step, steps, samples = _numbers(scene)
    if scene.process is None or scene.process.last_step is None:
        return []
    pairs = (("  step ", step), ("   mean ", steps), (" steps/s  ", samples), (" samples/s", ""))
    return [span for word, number in pairs for span in ((word, "dim"), (number, "bold"))]


def _narrow_means(scene: Scene, width: int) -> Row:
    """A run's means and its median, each in full or not at all."""
    means, middle = _means(scene), _median(scene)
    within = _within(scene, bool(means))
    if width_of(means) + width_of(within) <= width:
        means = [*means, *within]
    if not means or width_of(means) + width_of(middle) <= width:
        return [*means, *middle] if means else []
    return means if width_of(means) <= width else [*means[:4], (" steps/s", "dim")]


def _median(scene: Scene) -> Row:
    """The median step of a finished run in one mode, with the mode's name if there were several."""
    process = scene.process
    whole = process.whole if process is not None else NO_STEPS
    several = process is not None and process.compared is not None and len(process.compared.sides) > 1
    mode = f" ({whole.mode})" if several else ""
    return [("   median ", "dim"), (duration(whole.median_ns), "bold"), (mode, "dim")]


def _narrow(scene: Scene, alive: Life, width: int, look: Look) -> list[Row]:
    mode: Row = [*_mode(scene, look), (" ", "")]
    clock_text = "  " + clock(scene.elapsed_ns) + "  "
    needed = span_width(alive.word) + 14
    room = width - width_of(mode) - span_width(clock_text) - 1
    if room < needed:  # the state is more important than the devices, the mode and the clock
        mode = [mode[0], (" ", "")]
        room = width - width_of(mode) - span_width(clock_text) - 1
    if room < needed:
        mode, clock_text = [], ""
        room = width - 1
    name = cut(scene.title, max(room // 3, 8), look.glyphs.more)
    first: Row = [
        (" ", ""),
        (name + "  ", "title"),
        *_state(scene, alive, max(room - span_width(name) - 2, 3), look),
        (clock_text, ""),
        *mode,
    ]
    if scene.over:
        return [first, _narrow_means(scene, width)]
    second = _counting(scene, " step", 9)
    step_time: Row = [("   median", "dim"), (right(duration(figures(scene).median_ns), 9), "bold")]
    for more in (_within(scene, True), step_time):  # each one complete or not at all
        second = [*second, *more] if width_of(second) + width_of(more) <= width else second
    return [first, second]


def _missed(scene: Scene) -> Row:
    """The number of records that are missing from the screen, if any."""
    lost = scene.state.missed
    if not lost:
        return []
    return [(f"  {group(lost)} records dropped ", "wait")]


def reports_straggler(scene: Scene, look: Look) -> bool:
    """Whether the message is about a straggler, so that no panel has to repeat it."""
    other = scene.stopping is not None or scene.over or answer(scene, look) or _warning(scene)
    return not other and scene.stall is None and scene.state.straggler is not None


def _message(scene: Scene, look: Look, width: int) -> Row:
    """The most important event now: the end, an answer, a warning; else plain facts."""
    if scene.stopping is not None:  # also after the command has ended, while it has processes left
        return [("stopping: ", "wait"), (clean(scene.stopping, 200), "")]
    reply = answer(scene, look)
    if reply:
        return reply
    if scene.stall is not None:
        return _stalled(scene, look)
    if scene.over:
        return _afterwards(scene)
    warned = _warning(scene)
    if warned:
        return warned
    slow = scene.state.straggler
    if slow is not None:  # see reports_straggler
        return [(f"{look.glyphs.focus} ", "wait"), (in_short(slow), "")]
    process = scene.process
    rates = _speed(scene)
    if rates.reason not in (None, READING) and process is not None and process.last_step is not None:
        return [(rates.reason, "dim")]
    return _facts(scene, look, width)


def _stalled(scene: Scene, look: Look) -> Row:
    """Which rank stands where; at the end of the run, also its outcome."""
    text = "" if scene.stall is None else clean(scene.stall.text, 400)
    if scene.stall is not None and scene.over:
        seconds = max(scene.elapsed_ns - scene.stall.since_ns, 0) / SECOND
        last = f"; {scene.last_line}" if scene.last_line else ""
        text = f"the run ended in a stall of {seconds:,.0f} s: {text}{last}"
    return [(f"{look.glyphs.focus} ", "bad"), (text, "bad")]


def cut_answer(scene: Scene, width: int, look: Look) -> bool:
    """Whether an answer does not fit in its row."""
    if scene.stopping is not None and not scene.over:
        return False
    return 1 + width_of(answer(scene, look)) > width - width_of(_missed(scene))


def _warning(scene: Scene) -> Row:
    warning = scene.state.warnings[-1] if scene.state.warnings else None
    if warning is None or scene.now_ns - (warning.t_ns or 0) >= WARNING_SHOWN_NS:
        return []
    return [("warning: ", "wait"), (clean(warning.text, 300), "")]


def _afterwards(scene: Scene) -> Row:
    if scene.last_line:
        return [(scene.last_line, "bad")]
    if scene.ended is None:
        return [("the command is gone; its exit status was not recorded", "wait")]
    return [("the run is over" if scene.playing is not None else "the run is over; this picture stays", "dim")]


def _next(scene: Scene, room: int, look: Look) -> Row:
    """The next command to try after the end, if it fits in full."""
    if scene.info is None or not scene.over:
        return []
    hint = f"{look.glyphs.middot} dpmon export {clean(scene.info.id, 120)} writes the records "
    return [("  " + hint, "dim")] if len(hint) + 4 <= room else []


def _facts(scene: Scene, look: Look, width: int) -> Row:
    """Facts that do not change, each in full or not at all, except the first and most important one."""
    process = scene.process
    parts: list[str] = []
    within = within_words(_speed(scene).rate).strip(" ()")
    if within and width < _WIDE - 2:  # the row above shows it if it is wide enough
        parts.append(within)
    if process is not None:
        if process.virtual and process.mode == "dp":
            parts.append("virtual replicas: " + clean(process.mode_reason or "devices are shared", 200))
        if len(scene.state.processes) > 1:
            many = process.info.world or len(scene.state.processes)
            # Processes are numbered from 0 like ranks, but "process 1 of 2" would suggest numbers from 1.
            one = f"process {process.process}, one of {many}"
            parts.append(one if process.rank is None else f"rank {process.rank} of {many}")
        for key, value in (("python", process.info.python), ("torch", process.info.torch)):
            if value is not None:
                parts.append(f"{key} {clean(value, 30)}")
    elif scene.info is not None and scene.info.python:
        parts.append(f"Python: {clean(scene.info.python, 200)}")
    if scene.info is not None and scene.info.options.get("mode") == "script":
        parts.append("mode script: observed only")
    dot = f" {look.glyphs.middot} "
    while len(parts) > 1 and span_width(dot.join(parts)) > width:
        parts.pop()
    return [(dot.join(parts), "dim")]


# ------------------------------------------------------------------------------------------------ answers


def answer(scene: Scene, look: Look) -> Row:
    """The answer to the user's last request, if it is recent: a key, a pause, a mode."""
    if scene.view.message is not None:
        return [(scene.view.message, "wait")]
    if scene.over:
        return []
    return _held_up(scene) if scene.stall is not None else _pausing(scene) or _answer(scene, look)


def _held_up(scene: Scene) -> Row:
    """What a pending request waits for while the training makes no progress; empty without a request."""
    toggle = scene.toggle if scene.toggle is not None and scene.toggle.status == "pending" else None
    busy = [(since, process) for process, (doing, since) in scene.activities.items() if since > 0 and doing != "ended"]
    if not busy or not (toggle or scene.pausing.pending):
        return []
    since, number = min(busy)
    process = scene.state.processes.get(number)
    who = "the training" if process is None or process.rank is None else f"rank {process.rank}"
    what = f"switch to {toggle.mode}" if toggle else "pause" if scene.pausing.wanted else "go on"
    doing, waited = scene.activities[number][0], (scene.now_ns - since) / 1e9
    place = f"in {doing}" if doing in SPAN_PHASES else "in the script's own work"
    return [(f"{who} has been {place} for {waited:.0f} s: ", "wait"), (f"it will {what} when it comes back", "")]


def _pausing(scene: Scene) -> Row:
    """A pause or its end, requested but not yet in force; or why it was refused."""
    pausing = scene.pausing
    if pausing.pending:
        what, when = ("pause", "after the step it is in") if pausing.wanted else ("resume", "in a moment")
        return [(what, ""), (" pending", "wait"), (f": the training {what}s {when}", "dim")]
    last = scene.state.pauses[-1] if scene.state.pauses else None
    if last is None or last.t_ns is None or scene.now_ns - last.t_ns > DONE_SHOWN_NS:
        return []
    if last.refused is not None:
        return [("pause", ""), (" refused: ", "bad"), (clean(last.refused, 300), "")]
    if last.reason is not None and not last.paused:
        return [("the pause is over: ", "wait"), (clean(last.reason, 300), "")]
    return []


def _answer(scene: Scene, look: Look) -> Row:
    toggle = scene.toggle
    if toggle is None:
        return []
    style = f"mode.{toggle.mode}"
    if toggle.status == "pending":
        waited = max(scene.now_ns - toggle.since_ns, 0) / 1e9
        note = "the training answers at its next call"
        if not scene.reading and (scene.process is None or scene.process.seen_ns < 0):
            note = "the training answers at its first call"
        elif scene.pausing.since_ns is not None:
            note = "the training answers once it goes on (p)"
        return [
            (f"{look.glyphs.arrow} ", ""),
            (toggle.mode, style),
            (" pending ", "wait"),
            (f"{waited:.0f} s: {note}", "dim"),
        ]
    if scene.now_ns - toggle.since_ns > DONE_SHOWN_NS:
        return []
    if toggle.status == "refused":
        why = clean(toggle.reason, 300) if toggle.reason else "no reason was given"
        return [(toggle.mode, style), (" refused: ", "bad"), (why, "")]
    at = " done" if toggle.step is None else f" from step {group(toggle.step)} on"
    return [(toggle.mode, style), (at, "good")]
