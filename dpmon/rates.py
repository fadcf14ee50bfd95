"""The one definition of a training rate, for the screen, report, summary, lines of JSON and metrics. Pure.

A rate is a number of steps or samples divided by the elapsed training time. That time runs from the start of the first
step to the end of the last one, without pauses, evaluations and waits for input. The time between two steps counts:
workers start, a checkpoint is written, an epoch is logged. It belongs to the mode of the later step, and to the
evaluation only if both steps belong to it.

Where steps were missed (their numbers have a gap), their time and samples are unknown, and both are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dpmon.records import Step

__all__ = ["NO_GAP", "Between", "Gap", "Pace", "Paces", "Rate", "Tally", "rate_of", "span_rate"]

BESIDE = 0.03
"""The rate within steps is shown if it differs from the rate by more than this share."""
_PIECES_KEPT = 1024
"""Number of recent time stretches that a wait for input is matched with. It is reported shortly after its end."""
_LONGEST = 256
_MAX = (1 << 63) - 1


class Rate(NamedTuple):
    """Steps and samples per second of elapsed training time, and per second within steps.

    Samples are None if a step has no sample count.
    """

    steps_per_s: float
    samples_per_s: float | None
    steps_within: float
    samples_within: float | None

    @property
    def apart(self) -> bool:
        """Whether the two rates differ so much that both must be shown."""
        return abs(self.steps_within / self.steps_per_s - 1) > BESIDE


class Gap(NamedTuple):
    """The time between a step and the previous one, without pauses; `evaluation`: both are evaluation steps."""

    ns: int
    evaluation: bool


NO_GAP = Gap(0, False)


@dataclass(slots=True)
class Tally:
    """The sums from which a rate is computed: training steps, or evaluation steps, of one mode of one process."""

    steps: int = 0
    samples: int = 0
    unknown: int = 0
    """Steps without a sample count."""
    step_ns: int = 0
    """Time within steps."""
    elapsed_ns: int = 0
    """Time within steps and between them."""
    first_ns: int | None = field(default=None, compare=False)
    """When the first step began and the last one ended."""
    last_ns: int | None = field(default=None, compare=False)

    def step(self, start: int, wall: int, samples: int | None) -> None:
        """Add a step."""
        self.steps += 1
        self.step_ns += wall
        self.elapsed_ns += wall
        if samples is None:
            self.unknown += 1
        else:
            self.samples += samples
        self.first_ns = start if self.first_ns is None else min(self.first_ns, start)
        self.last_ns = start + wall if self.last_ns is None else max(self.last_ns, start + wall)

    def add(self, other: Tally, sign: int = 1) -> None:
        """Add `other`, or subtract it (`sign` -1). Subtracting does not change `first_ns` and `last_ns`."""
        self.steps += sign * other.steps
        self.samples = max(min(self.samples + sign * other.samples, _MAX), -_MAX)
        self.unknown += sign * other.unknown
        self.step_ns = max(min(self.step_ns + sign * other.step_ns, _MAX), -_MAX)
        self.elapsed_ns = max(min(self.elapsed_ns + sign * other.elapsed_ns, _MAX), -_MAX)
        if sign > 0 and other.first_ns is not None and other.last_ns is not None:
            self.first_ns = other.first_ns if self.first_ns is None else min(self.first_ns, other.first_ns)
            self.last_ns = other.last_ns if self.last_ns is None else max(self.last_ns, other.last_ns)


@dataclass(slots=True)
class Pace:
    """One mode of one process, with separate sums for training and evaluations."""

    training: Tally = field(default_factory=Tally)
    evaluation: Tally = field(default_factory=Tally)

    def counted(self) -> Tally:
        """The sums for the mode's rate: its training, or its evaluations if it has no training steps."""
        if self.training.steps:
            return self.training
        both = Tally()
        both.add(self.evaluation)
        both.add(self.training)  # time before the first training step
        return both

    def step(self, start: int, wall: int, samples: int | None, evaluation: bool, gap: Gap) -> None:
        """Add a step and the time before it."""
        (self.evaluation if evaluation else self.training).step(start, wall, samples)
        (self.evaluation if gap.evaluation else self.training).elapsed_ns += gap.ns

    def add(self, other: Pace, sign: int = 1) -> None:
        """Add `other`, or subtract it (`sign` -1)."""
        self.training.add(other.training, sign)
        self.evaluation.add(other.evaluation, sign)

    def copy(self) -> Pace:
        """An independent copy."""
        found = Pace()
        found.add(self)
        return found

    def text(self) -> str:
        """The sums as a line of numbers, without `first_ns` and `last_ns`; the evaluation only if there is one."""
        numbers = [
            number
            for tally in (self.training, self.evaluation)
            if tally is self.training or tally != Tally()
            for number in (tally.steps, tally.samples, tally.unknown, tally.step_ns, tally.elapsed_ns)
        ]
        return " ".join(map(str, numbers))

    @classmethod
    def of_text(cls, text: str, first_ns: int | None = None, last_ns: int | None = None) -> Pace:
        """Parse the result of `text`; ValueError if it is damaged. Its steps lie between the two times."""
        numbers = [int(word) for word in text.split()] if len(text) < _LONGEST else []
        if len(numbers) not in (5, 10) or max(map(abs, numbers)) > _MAX:
            raise ValueError("damaged pace")
        found = cls(*(Tally(*numbers[at : at + 5]) for at in range(0, len(numbers), 5)))
        for tally in (found.training, found.evaluation):
            tally.first_ns, tally.last_ns = first_ns, last_ns
        return found


class Between:
    """Computes the time between the steps of one process. The steps must come in order."""

    __slots__ = ("_end", "_evaluation", "_number", "_paused", "_since")

    def __init__(self) -> None:
        self._end: int | None = None
        self._number = 0
        self._evaluation = False
        self._paused = 0
        self._since: int | None = None

    def pause(self, paused: bool, at: int | None, took: int | None) -> None:
        """A pause began (`paused`) or ended after `took` ns; `at`: when, ns."""
        self._paused += 0 if paused else (took or 0)
        self._since = at if paused else None

    def step(self, number: int, start: int, wall: int, evaluation: bool) -> Gap:
        """The time before this step; none before the first step or after missed steps."""
        found = 0
        if self._end is not None and number == self._number + 1:
            unended = 0 if self._since is None else max(start - self._since, 0)
            found = max(start - self._end - self._paused - unended, 0)
        gap = Gap(found, evaluation and self._evaluation)
        self._end, self._number, self._evaluation = start + wall, number, evaluation
        self._paused, self._since = 0, None
        return gap


@dataclass(slots=True)
class _Piece:
    """A stretch of time that counts in a tally."""

    begin: int
    end: int
    tally: Tally
    within: bool
    """Whether it lies within steps."""

    def leave_out(self, begin: int, end: int) -> None:
        """Subtract the overlap with this time from the tally."""
        shared = max(min(end, self.end) - max(begin, self.begin), 0)
        self.tally.elapsed_ns = max(self.tally.elapsed_ns - shared, 0)
        if self.within:
            self.tally.step_ns = max(self.tally.step_ns - shared, 0)


class Paces:
    """The sums of one process by mode. Takes steps in order, and pauses and waits for input as they are reported."""

    __slots__ = ("_between", "_pieces", "_waits", "modes")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.modes: dict[str, Pace] = {}
        self._between = Between()
        self._pieces: deque[_Piece] = deque(maxlen=_PIECES_KEPT)
        self._waits: list[tuple[int, int]] = []
        """Waits that may overlap with steps that have not been added yet."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paces) and self.modes == other.modes

    def __deepcopy__(self, memo: object) -> Paces:
        """Copy for a frozen snapshot, to which nothing will be added."""
        found = Paces()
        found.modes = {mode: pace.copy() for mode, pace in self.modes.items()}
        return found

    def of(self, mode: str) -> Pace:
        """The Pace of one mode, created if it is new."""
        found = self.modes.get(mode)
        if found is None:
            found = self.modes[mode] = Pace()
        return found

    def total(self) -> Pace:
        """The sum of all modes."""
        found = Pace()
        for pace in self.modes.values():
            found.add(pace)
        return found

    def step(self, number: int, mode: str, start: int, wall: int, samples: int | None, evaluation: bool) -> Gap:
        """Add a step and the time before it; return that time."""
        gap = self._between.step(number, start, wall, evaluation)
        pace = self.of(mode)
        pace.step(start, wall, samples, evaluation, gap)
        if gap.ns:
            self._place(start - gap.ns, start, pace.evaluation if gap.evaluation else pace.training, False)
        self._place(start, start + wall, pace.evaluation if evaluation else pace.training, True)
        return gap

    def record(self, step: Step) -> Gap:
        """Add a recorded step and the time before it; return that time."""
        evaluation = "backward" not in step.phases and "optimizer" not in step.phases
        return self.step(step.step, step.mode, step.start_ns, step.wall_ns, step.samples, evaluation)

    def sums(self, mode: str, pace: Pace, begin: int, end: int) -> None:
        """Add the sums of steps that ended between two times and are not known one by one."""
        found = self.of(mode)
        found.add(pace)
        self._place(begin, end, found.training if pace.training.steps else found.evaluation, True)

    def pause(self, paused: bool, at: int | None, took: int | None) -> None:
        """A pause began (`paused`) or ended after `took` ns; `at`: when, ns."""
        self._between.pause(paused, at, took)

    def wait(self, begin: int, end: int) -> None:
        """Leave a wait for input out of the training time, whether it lies in steps or between them."""
        for piece in reversed(self._pieces):
            if piece.end <= begin:
                break
            piece.leave_out(begin, end)
        if not self._pieces or end > self._pieces[-1].end:
            self._waits.append((begin, end))

    def _place(self, begin: int, end: int, tally: Tally, within: bool) -> None:
        if self._waits:
            fresh = _Piece(begin, end, tally, within)
            for wait in self._waits:
                fresh.leave_out(*wait)
            self._waits = [wait for wait in self._waits if wait[1] > end]
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.tally is tally and last.within == within and last.end == begin:
            last.end = end
        else:
            self._pieces.append(_Piece(begin, end, tally, within))


def rate_of(tallies: Iterable[Tally]) -> Rate | None:
    """The rate of processes that train together or one after the other; None if no time has passed.

    Samples of processes that train at the same time add up. Their steps do not: the step rate is that of one process.
    """
    found = [tally for tally in tallies if tally.steps > 0 and tally.elapsed_ns > 0]
    if not found:
        return None
    steps, elapsed = sum(tally.steps for tally in found), sum(tally.elapsed_ns for tally in found)
    samples = None if any(tally.unknown for tally in found) else sum(tally.samples for tally in found)
    return span_rate(steps, samples, elapsed, sum(tally.step_ns for tally in found), _at_once(found))


def span_rate(steps: float, samples: float | None, elapsed_ns: float, step_ns: float, at_once: float = 1.0) -> Rate:
    """The rate of `steps` in a time above 0; `at_once`: the number of processes that trained at the same time."""
    within = step_ns if step_ns > 0 else elapsed_ns
    return Rate(
        steps * 1e9 / elapsed_ns,
        None if samples is None else samples * 1e9 / elapsed_ns * at_once,
        steps * 1e9 / within,
        None if samples is None else samples * 1e9 / within * at_once,
    )


def _at_once(tallies: list[Tally]) -> float:
    """The mean number of processes that trained at the same time; all of them if the times are unknown."""
    spans = sorted(
        (tally.first_ns, tally.last_ns) for tally in tallies if tally.first_ns is not None and tally.last_ns is not None
    )
    covered, reach = 0, 0
    for begin, end in spans:
        covered += max(end - max(begin, reach), 0)
        reach = max(reach, end)
    if len(spans) < len(tallies) or not covered:
        return float(len(tallies))
    return sum(end - begin for begin, end in spans) / covered
