"""The one definition of a training rate, for the screen, report, summary, lines of JSON and metrics. Pure.

A rate is a number of steps or samples divided by the elapsed training time. That time runs from the start of the first
step to the end of the last one, without pauses, evaluations and waits for input. The time between two steps counts:
workers start, a checkpoint is written, an epoch is logged. It belongs to the mode of the later step, and to the
evaluation only if both steps belong to it.

Where steps were missed (their numbers have a gap), their time and samples are unknown, and both are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dpmon.record.codec import Step

__all__ = ["NO_GAP", "Between", "Gap", "Pace", "Paces", "Rate", "Tally", "as_fields", "rate_of", "span_rate"]

BESIDE = 0.03
"""The rate within steps is shown if it differs from the rate by more than this share."""
_PIECES_KEPT = 1024
"""Stretches of time in which a wait for input is looked for. It is reported a moment after it ended."""
_SUMS_KEPT = 4096
"""The same for steps that are known only as sums. A minute has one for each mode."""
_UNSURE_NS = 300_000_000
"""A wait may be shorter than reported by this much: its begin and its end are sampled."""
_BESIDE = 16
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

    def leave_out(self, wait: _Wait) -> None:
        """Take what it has in common with the wait out of its tally.

        A wait that has less than a sixteenth of its time in common with this stretch lies beside it: its begin and its
        end are sampled, so it only seems to overlap.
        """
        shared = min(max(min(wait.end, self.end) - max(wait.begin, self.begin), 0), wait.left)
        if _BESIDE * shared < wait.end - wait.begin:
            return
        wait.left -= shared
        self.tally.elapsed_ns = max(self.tally.elapsed_ns - shared, 0)
        if self.within:
            self.tally.step_ns = max(self.tally.step_ns - shared, 0)


@dataclass(slots=True)
class _Wait:
    """A wait for input. `left`: how much of it was not yet taken out of any tally."""

    begin: int
    end: int
    left: int


class _Sum:
    """Steps that ended between two times. Only their sums are known."""

    __slots__ = ("begin", "end", "pace", "reach", "room")

    def __init__(self, begin: int, end: int, added: Pace, pace: Pace) -> None:
        self.begin, self.end, self.pace = begin, end, pace
        tallies = added.training, added.evaluation
        # Time between steps first: most waits lie between two loops.
        self.room = [max(tally.elapsed_ns - tally.step_ns, 0) for tally in tallies]
        self.room += [max(min(tally.step_ns, tally.elapsed_ns), 0) for tally in tallies]
        self.reach = begin - sum(self.room)
        """The first step cannot have begun before."""

    def has_room(self, wait: _Wait, slots: int) -> bool:
        """Whether the whole wait can lie in the first `slots` of its times."""
        return sum(self.room[:slots]) + _UNSURE_NS >= wait.end - wait.begin

    def leave_out(self, wait: _Wait) -> None:
        """Subtract the rest of the wait from the tallies, at most all that was added."""
        for slot, room in enumerate(self.room):
            tally = self.pace.evaluation if slot % 2 else self.pace.training
            took = min(room, wait.left, max(tally.elapsed_ns, 0))
            self.room[slot] -= took
            wait.left -= took
            tally.elapsed_ns -= took
            if slot >= _BETWEEN:
                tally.step_ns = max(tally.step_ns - took, 0)


_BETWEEN, _ALL = 2, 4
"""How many slots of `_Sum.room` are between steps, and in all."""


class Paces:
    """The sums of one process by mode. Takes steps in order, and pauses and waits for input as they are reported."""

    __slots__ = ("_between", "_pieces", "_sums", "_waits", "modes")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.modes: dict[str, Pace] = {}
        self._between = Between()
        self._pieces: deque[_Piece] = deque(maxlen=_PIECES_KEPT)
        self._sums: deque[_Sum] = deque(maxlen=_SUMS_KEPT)
        self._waits: list[_Wait] = []
        """Waits that may overlap steps that are added later."""

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
        """Add a step as it was recorded; the time before it that was added with it."""
        return self.step(step.step, step.mode, step.start_ns, step.wall_ns, step.samples, step.evaluation)

    def sums(self, mode: str, pace: Pace, begin: int, end: int) -> None:
        """Add the sums of steps that ended between two times (ns). Call it in the order of time."""
        found = self.of(mode)
        found.add(pace)
        self._sums.append(_Sum(begin, end, pace, found))
        for wait in self._waits:
            self._leave_out_of_sums(wait)
        self._forget_waits(begin)

    def pause(self, paused: bool, at: int | None, took: int | None) -> None:
        """A pause began (`paused`) or ended after `took` ns; `at`: when, ns."""
        self._between.pause(paused, at, took)

    def wait(self, begin: int, end: int) -> None:
        """The process waited for input: that time is no training, wherever it lies."""
        wait = _Wait(begin, end, max(end - begin, 0))
        for piece in reversed(self._pieces):
            if piece.end <= begin:
                break
            piece.leave_out(wait)
        self._leave_out_of_sums(wait)
        if wait.left and self._reached() < end:
            self._waits.append(wait)

    def _reached(self) -> int:
        """When the newest of what was added began; -1 before there is any."""
        newest = [kept[-1].begin for kept in (self._pieces, self._sums) if kept]
        return max(newest, default=-1)

    def _leave_out_of_sums(self, wait: _Wait) -> None:
        """A wait lies in one step or between two, so in one sum: the one of the first step that ended after it."""
        if not wait.left:
            return
        near: list[_Sum] = []
        windows: list[int] = []
        for at in range(bisect_right(self._sums, wait.end, key=lambda each: each.end), len(self._sums)):
            fresh = self._sums[at]
            if fresh.end not in windows:
                # Where the first window began before the wait ended, that step may have ended in the next window.
                if len(windows) == 2 or (near and near[0].begin >= wait.end):
                    break
                windows.append(fresh.end)
            near.append(fresh)
        found = [each for each in near if each.reach < wait.end]
        for slots in (_BETWEEN, _ALL):
            for each in found:
                if each.has_room(wait, slots):
                    each.leave_out(wait)
                    return

    def _forget_waits(self, reached: int) -> None:
        self._waits = [wait for wait in self._waits if wait.left and wait.end > reached]

    def _place(self, begin: int, end: int, tally: Tally, within: bool) -> None:
        if self._waits:
            fresh = _Piece(begin, end, tally, within)
            for wait in self._waits:
                fresh.leave_out(wait)
            self._forget_waits(end)
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


def as_fields(rate: Rate | None) -> dict[str, float | None]:
    """The rate under its names in JSON; all values are None if there is no rate."""
    names = ("steps_per_s", "samples_per_s", "steps_per_s_within_steps", "samples_per_s_within_steps")
    return dict(zip(names, rate or (None,) * len(names), strict=True))


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
