"""Answers to the user's last request: a key, a pause, a mode."""

from __future__ import annotations

from dpmon.cleaning import clean
from dpmon.record.schema import SPAN_PHASES
from dpmon.text.quantities import group
from dpmon.ui.look import Look
from dpmon.ui.rows import Row
from dpmon.ui.scene import SECOND, Scene

DONE_SHOWN_NS = 15 * SECOND


def answer(scene: Scene, look: Look) -> Row:
    """The answer to the user's last request, if it is recent: a key, a pause, a mode."""
    if scene.view.message is not None and scene.now_ns - scene.view.message_ns < DONE_SHOWN_NS:
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
