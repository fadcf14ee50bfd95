"""Where the time of a run went: every second of a process, up to its last step, belongs to one activity.

startup     before the process's first step
training    within training steps
evaluation  within evaluation steps, and between two of them
between     between two steps, unless both are of an evaluation: the start of a loader's workers, a checkpoint, logging
paused      the user paused the training
input       the script waited for a line of input
missed      steps that were not recorded, and the time between them

After its last step a process accounts for pauses and waits only: it may have ended long before the others. What nobody
accounts for is the run's end (dpmon.store.window.accounted).

Steps come in order. Pauses and waits for input are reported after they ended; they are taken out of the activity in
which they lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

ACTIVITIES = ("startup", "training", "evaluation", "between", "paused", "input", "missed")
_PIECES = 1024
"""Stretches of time in which a late wait for input is looked for: the newest."""
_PIECE_NS = 20_000_000
"""Shorter stretches are not among them. A wait lies within one long step, or between two steps."""
_SECOND = 1_000_000_000
_MISSED = -2
"""The number of a step that no step follows."""
_LONG = (86_400 * _SECOND, 3600 * _SECOND, 60 * _SECOND)
_LONG_NS = 600 * _SECOND
LATEST_NS = 10 * 365 * 86_400 * _SECOND
"""No run takes longer: a time that is further from its start is damaged."""


class Spent(NamedTuple):
    """Time of an activity: from `begin` to `end` (ns since the run's start); `sign` -1 takes it back."""

    activity: str
    mode: str
    begin: int
    end: int
    sign: int = 1

    def by_second(self) -> Iterator[tuple[int, int]]:
        """Each second it touches, and the time in it (ns, negative if it is taken back).

        Of a time of ten minutes or more whole minutes, hours and days are each given as one, under their first second:
        all ranks of a job may have paused for a night, and a damaged record may claim a century.
        """
        at = self.begin
        widths = _LONG if self.end - at >= _LONG_NS else ()
        while at < self.end:
            width = next((width for width in widths if at % width == 0 and at + width <= self.end), _SECOND)
            until = min((at // width + 1) * width, self.end)
            yield at // _SECOND, self.sign * (until - at)
            at = until


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """All of the time that is in any of them, in order, none touching another."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


class Gap(NamedTuple):
    """Time between two steps that is neither a pause nor a wait for input."""

    after_step: int
    before_step: int
    mode: str
    begin: int
    end: int
    ns: int
    """Without pauses and waits."""


class Account:
    """The activities of one process."""

    def __init__(self, begin: int = 0) -> None:
        """`begin`: when the process began, ns since the run's start."""
        self._at = begin
        """Everything before has been accounted for."""
        self._number: int | None = None
        self._evaluation = False
        self._mode = ""
        self._apart: list[tuple[str, int, int]] = []
        """Pauses and waits for input that lie after `_at`, or may."""
        self._paused_since: int | None = None
        self._pieces: deque[Spent] = deque(maxlen=_PIECES)
        """Time that was accounted for as neither a pause nor a wait for input."""

    def resume(self, number: int, mode: str, start: int, wall: int, evaluation: bool) -> None:
        """Go on after a step that another supervisor accounted for."""
        self._at, self._number, self._evaluation, self._mode = start + wall, number, evaluation, mode
        self._end_pause(start)
        self._apart = [one for one in self._apart if one[2] > self._at]

    def miss(self) -> None:
        """Steps were not recorded: the next one does not follow the last one."""
        self._number = _MISSED

    def step(self, number: int, mode: str, start: int, wall: int, evaluation: bool) -> tuple[list[Spent], Gap | None]:
        """Add a step. Return the time since the last one with it, and the gap before it if there is one."""
        end = start + wall
        before = self._number
        if before is None:
            activity = "startup"
            self._at = min(self._at, start)  # a process reports itself within its first step
        elif number != before + 1:
            activity = "missed"
        elif evaluation and self._evaluation:
            activity = "evaluation"
        else:
            activity = "between"
        self._end_pause(start)
        spent, left = self._gap(activity, mode, start)
        gap = None
        if activity == "between" and left > 0 and before is not None:
            gap = Gap(before, number, mode, self._at, start, left)
        spent += self._stretch("evaluation" if evaluation else "training", mode, max(start, self._at), end)
        self._at, self._number, self._evaluation, self._mode = max(end, self._at), number, evaluation, mode
        if self._apart:
            self._apart = [one for one in self._apart if one[2] > self._at]
        return spent, gap

    def pause(self, paused: bool, at: int | None, took: int | None) -> None:
        """A pause began (`paused`) at `at`, or ended there after `took` ns."""
        if paused:
            self._paused_since = at
            return
        begin = at - took if at is not None and took is not None else self._paused_since
        self._paused_since = None
        if begin is not None and at is not None and at > begin:
            self._apart.append(("paused", begin, at))

    def _end_pause(self, at: int) -> None:
        """A step began: a pause whose end was not recorded is over."""
        if self._paused_since is not None and at > self._paused_since:
            self._apart.append(("paused", self._paused_since, at))
            self._paused_since = None

    def wait(self, begin: int, end: int) -> list[Spent]:
        """The process waited for input. Return what changes in the time that was accounted for before."""
        changes: list[Spent] = []
        pieces: list[Spent] = []
        for piece in self._pieces:
            low, high = max(begin, piece.begin), min(end, piece.end)
            if high <= low or piece.activity in ("paused", "input"):
                pieces.append(piece)
                continue
            waited = Spent("input", piece.mode, low, high)
            changes += (Spent(piece.activity, piece.mode, low, high, -1), waited)
            parts = piece._replace(end=low), waited, piece._replace(begin=high)
            pieces += [part for part in parts if part.end > part.begin]
        if changes:
            self._pieces = deque(pieces, _PIECES)
        if end > self._at:
            self._apart.append(("input", begin, end))
        return changes

    def finish(self, end: int) -> list[Spent]:
        """The run ended: return the pauses and waits for input after the last step."""
        if self._paused_since is not None:
            self._apart.append(("paused", self._paused_since, end))
            self._paused_since = None
        spent, _ = self._gap("", self._mode, end)
        self._at = max(end, self._at)
        return spent

    def _gap(self, activity: str, mode: str, until: int) -> tuple[list[Spent], int]:
        """The time up to `until`, in order, and the sum (ns) of its parts that are neither pause nor wait.

        `activity` "": only pauses and waits are returned.
        """
        if not self._apart:
            return self._piece(activity, mode, self._at, until), max(until - self._at, 0)
        spent = self._cut(activity, mode, self._at, until, sorted(self._apart, reverse=True))  # pauses first
        return spent, sum(one.end - one.begin for one in spent if one.activity == activity)

    def _stretch(self, activity: str, mode: str, begin: int, end: int) -> list[Spent]:
        """The time of a step, without the waits for input in it."""
        if not self._apart:
            return self._piece(activity, mode, begin, end)
        return self._cut(activity, mode, begin, end, [one for one in self._apart if one[0] == "input"])

    def _cut(
        self, activity: str, mode: str, begin: int, end: int, apart: Sequence[tuple[str, int, int]]
    ) -> list[Spent]:
        """A stretch of time, in order: the first of `apart` that covers a part of it, else `activity`."""
        if not apart:
            return self._piece(activity, mode, begin, end)
        edges = sorted({begin, end, *(at for _, *both in apart for at in both if begin < at < end)})
        spent: list[Spent] = []
        for low, high in pairwise(edges) if end > begin else ():
            covering = (what for what, since, until in apart if since <= low and high <= until)
            spent += self._piece(next(covering, activity), mode, low, high)
        return spent

    def _piece(self, activity: str, mode: str, begin: int, end: int) -> list[Spent]:
        if end <= begin or not activity:
            return []
        piece = Spent(activity, mode, begin, end)
        if end - begin >= _PIECE_NS and activity not in ("paused", "input"):
            self._pieces.append(piece)
        return [piece]
