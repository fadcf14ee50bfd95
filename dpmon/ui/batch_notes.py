"""The notes below panel 3: why a value is missing, and why mean and median differ."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.cleaning import clean
from dpmon.model.finding import host_waits, partly_timed
from dpmon.model.process import PHASES, Process
from dpmon.model.ranks import distributed
from dpmon.model.step_timeline import StepTimeline
from dpmon.model.uneven import INPUT, WAITING_TEXT
from dpmon.record.history_rows import MAX_SPANS
from dpmon.record.kinds import Call
from dpmon.record.schema import phase_shown
from dpmon.store.figures import Figures, PhaseFigures
from dpmon.text.cells import wrapped
from dpmon.text.quantities import group, percent, rate_words
from dpmon.ui.look import Look
from dpmon.ui.rows import Row
from dpmon.ui.scene import Scene


def notes(
    scene: Scene, process: Process, numbers: Figures, timeline: StepTimeline | None, width: int, most: int, look: Look
) -> list[Row]:
    """At most `most` rows of notes on the figures and the last step."""
    texts = [
        *_between(numbers),
        *unevenness(process),
        *host_waits(numbers.parts),
        *partly_timed(numbers.parts),
        *missing(process, numbers.parts),
        *(_not_drawn(timeline) if timeline is not None else ()),
    ]
    if not texts or not most:
        return []
    text = f" {look.glyphs.middot} ".join(texts)
    return [[(line, "dim")] for line in wrapped(text, width, most, look.glyphs.more)]


def _between(numbers: Figures) -> list[str]:
    """The share of training time between steps, if it is large enough to matter."""
    rate = numbers.rate
    if rate is None or not rate.apart or rate.steps_within <= rate.steps_per_s:
        return []
    return [f"{percent(1 - rate.steps_per_s / rate.steps_within)} of the time is between steps: {rate_words(rate)}"]


def unevenness(process: Process) -> list[str]:
    """A note that a few steps take most of the time, with the phase that makes them longer; empty for even steps."""
    found = process.uneven
    if found is None:
        return []
    if found.phase == INPUT:
        return [f"{WAITING_TEXT} took {percent(found.time)} of the time: the mean includes it"]
    by = f", slower in {found.phase}" if found.phase is not None else ""
    return [f"uneven steps: about {percent(found.steps)} take {percent(found.time)} of the time{by}"]


def usual(process: Process, phase: str) -> bool:
    """Whether `phase` is expected in this training, so that a step without it needs a reason.

    A rank has one device: the phases of a DataParallel call are not expected of it.
    """
    known = phase_shown(phase)
    return not known.optional and not (known.of_call and distributed(process) is not None)


def missing(process: Process, phases: Sequence[PhaseFigures]) -> list[str]:
    """A note for each reason why phases are missing: the names of these phases, then the reason."""
    call = process.calls[process.newest].last if process.newest is not None else None
    reasons: dict[str, list[str]] = {}
    for phase in phases:
        if not phase.ran and usual(process, phase.name):
            reasons.setdefault(_why(process, call, phase.name), []).append(phase.name)
    return [f"no {_names(names)}: {reason}" for reason, names in reasons.items()]


def _not_drawn(timeline: StepTimeline) -> list[str]:
    """Why parts of the last step are not drawn."""
    if not timeline.missing_spans:
        return []
    more = group(timeline.missing_spans)
    return [f"{more} spans of the last step are not drawn: only the first {MAX_SPANS} of a step are recorded"]


def _names(names: Sequence[str]) -> str:
    """Join names: "data, gather"; three or more adjacent ones as "scatter to gather"."""
    first = PHASES.index(names[0])
    if len(names) > 2 and PHASES[first : first + len(names)] == tuple(names):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def _why(process: Process, call: Call | None, phase: str) -> str:
    known = phase_shown(phase)
    own = known.name
    if not known.of_call:
        return known.absent
    if call is None:
        return "no call was seen"
    if own in call.absent:
        return clean(call.absent[own], 200)
    if call.stages:
        return "the model is split into stages, not copied"
    if call.mode != "dp" or len(call.devices) < 2:
        return "one device"
    if own in call.phases:
        return "part of it ran during backward and cannot be separated from it"
    return known.absent
