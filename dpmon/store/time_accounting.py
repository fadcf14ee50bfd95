"""Divides the time of a process into activities: each moment up to its last step belongs to one activity.

startup     before the process's first step, and in that step if it waits long
training    within training steps
evaluation  within evaluation steps, and between two of them
between     between two steps that are not both evaluation: starting a loader's workers, a checkpoint, logging
paused      the user paused the training
input       the script waited for a line of input
stalled     the whole of a step, or between two steps, in which the run stood still
missed      steps that were not recorded, and the time between them

After its last step, a process accounts only for pauses and waits: it may end long before the others. Time without any
activity counts as startup if a process begins after it, else as the run's end (see `account_for_elapsed`).

Steps come in order. The length of a pause or a wait for input is known only after its end. Its time is subtracted from
the activity in which it lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from dpmon.record.schema import SECOND, STALLED, STARTUP

ACTIVITIES = ("startup", "training", "evaluation", "between", "paused", "input", "stalled", "missed")
_PIECES = 1024
"""Number of recent pieces that are kept: a wait for input is reported late, and then corrects them."""
_PIECE_NS = 20_000_000
"""Shortest piece that is kept. A wait lies within one long step, or between two steps."""
_LONG = (86_400 * SECOND, 3600 * SECOND, 60 * SECOND)
_LONG_NS = 600 * SECOND
_STARTS_NS = 10 * SECOND
"""A process's first step is start-up if it waits for its first batch, or for other ranks, for this long."""
_LEFT_OUT = {STALLED: "stalled", STARTUP: "startup"}
LATEST_NS = 10 * 365 * 86_400 * SECOND
"""Latest possible time of a run; a later one comes from damaged data."""


class ActivityInterval(NamedTuple):
    """Time of an activity, from `begin` to `end` (ns since the run's start); `sign` -1 subtracts it."""

    activity: str
    mode: str
    begin: int
    end: int
    sign: int = 1

    def split_by_second(self) -> Iterator[tuple[int, int]]:
        """Yield each second from `begin` to `end`, and the time spent in that second (ns, negative if subtracted).

        In a span of ten minutes or more, a whole minute, hour or day is yielded once, with its first second. This
        limits the number of rows: all ranks of a job may pause for a night, and a damaged record may claim ten years.
        """
        at = self.begin
        widths = _LONG if self.end - at >= _LONG_NS else ()
        while at < self.end:
            width = next((width for width in widths if at % width == 0 and at + width <= self.end), SECOND)
            until = min((at // width + 1) * width, self.end)
            yield at // SECOND, self.sign * (until - at)
            at = until


def union_of_intervals(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of spans as disjoint spans, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


class Gap(NamedTuple):
    """Time between two steps that is neither a pause nor a wait for input."""

    process: int
    after_step: int
    mode: str
    begin_ns: int
    end_ns: int
    ns: int
    """Its length without pauses and waits."""


class TimeAccount:
    """The activities of one process."""

    def __init__(self, begin: int = 0, process: int = 0, stalls: Sequence[tuple[int, int]] = ()) -> None:
        """`begin`: start of the process (ns since the run's start). `stalls`: begin of each stall, and a time in it."""
        self._process = process
        self._stalls = stalls
        self._at = begin
        """End of the time that is accounted for."""
        self._number: int | None = None
        self._evaluation = False
        self._mode = ""
        self._apart: list[tuple[str, int, int]] = []
        """Pauses and waits for input that lie, or may lie, after `_at`."""
        self._paused_since: int | None = None
        self._pieces: deque[ActivityInterval] = deque(maxlen=_PIECES)
        """The newest long pieces of time that are neither pauses nor waits for input."""

    def resume(self, number: int, mode: str, start: int, wall: int, evaluation: bool) -> None:
        """Continue after a step that another supervisor accounted for."""
        self._at, self._number, self._evaluation, self._mode = start + wall, number, evaluation, mode
        self._end_pause(start)
        self._apart = [one for one in self._apart if one[2] > self._at]

    def step(
        self, number: int, mode: str, start: int, wall: int, evaluation: bool, left_out: int = 0
    ) -> tuple[list[ActivityInterval], Gap | None]:
        """Add a step. Return the time since the previous step, including this one, and the gap before it or None.

        `left_out`: the flag that the method of this name returned for the step.
        """
        end = start + wall
        before = self._number
        if before is None:
            activity = "startup"
            self._at = min(self._at, start)  # a process reports itself within its first step
        elif number != before + 1:
            activity = "missed"
        elif self.overlaps_stall(self._at, start):
            activity = "stalled"
        elif evaluation and self._evaluation:
            activity = "evaluation"
        else:
            activity = "between"
        self._end_pause(start)
        spent, left = self._gap(activity, mode, start)
        gap = None
        if activity == "between" and left > 0 and before is not None:
            gap = Gap(self._process, before, mode, self._at, start, left)
        activity = _LEFT_OUT.get(left_out, "evaluation" if evaluation else "training")
        spent += self._step_intervals(activity, mode, max(start, self._at), end)
        self._at, self._number, self._evaluation, self._mode = max(end, self._at), number, evaluation, mode
        if self._apart:
            self._apart = [one for one in self._apart if one[2] > self._at]
        return spent, gap

    def exclusion_flag(self, begin: int, end: int, waited: int) -> int:
        """The flag of a step that no figure includes; 0 if figures include it. `waited`: for data and other ranks."""
        if self.overlaps_stall(begin, end):
            return STALLED
        return STARTUP if self._number is None and waited >= _STARTS_NS else 0

    def overlaps_stall(self, begin: int, end: int) -> bool:
        """Whether a stall was noticed in a stretch of time that covers most of the stall up to then."""
        return bool(self._stalls) and any(
            begin <= at <= end and 2 * (at - max(begin, since)) > at - since for since, at in self._stalls
        )

    def pause(self, paused: bool, at: int | None, took: int | None) -> None:
        """Note that a pause began (`paused`) at `at`, or ended at `at` after `took` ns."""
        if paused:
            self._paused_since = at
            return
        begin = at - took if at is not None and took is not None else self._paused_since
        self._paused_since = None
        if begin is not None and at is not None and at > begin:
            self._apart.append(("paused", begin, at))

    def _end_pause(self, at: int) -> None:
        """End a pause without a recorded end, because a step began."""
        if self._paused_since is not None and at > self._paused_since:
            self._apart.append(("paused", self._paused_since, at))
            self._paused_since = None

    def wait(self, begin: int, end: int) -> list[ActivityInterval]:
        """Note a wait for input. Return the corrections to the time accounted for earlier."""
        changes: list[ActivityInterval] = []
        pieces: list[ActivityInterval] = []
        for piece in self._pieces:
            low, high = max(begin, piece.begin), min(end, piece.end)
            if high <= low or piece.activity in ("paused", "input"):
                pieces.append(piece)
                continue
            waited = ActivityInterval("input", piece.mode, low, high)
            changes += (ActivityInterval(piece.activity, piece.mode, low, high, -1), waited)
            parts = piece._replace(end=low), waited, piece._replace(begin=high)
            pieces += [part for part in parts if part.end > part.begin]
        if changes:
            self._pieces = deque(pieces, _PIECES)
        if end > self._at:
            self._apart.append(("input", begin, end))
        return changes

    def finish(self, end: int) -> list[ActivityInterval]:
        """End the account with the run. Return the pauses and waits for input after the last step."""
        if self._paused_since is not None:
            self._apart.append(("paused", self._paused_since, end))
            self._paused_since = None
        spent, _ = self._gap("", self._mode, end)
        self._at = max(end, self._at)
        return spent

    def _gap(self, activity: str, mode: str, until: int) -> tuple[list[ActivityInterval], int]:
        """Return the time up to `until`, in order, and the sum (ns) of its parts that are neither pauses nor waits.

        `activity` "": only pauses and waits are returned.
        """
        if not self._apart:
            return self._piece(activity, mode, self._at, until), max(until - self._at, 0)
        spent = self._split_interval(activity, mode, self._at, until, sorted(self._apart, reverse=True))  # pauses first
        return spent, sum(one.end - one.begin for one in spent if one.activity == activity)

    def _step_intervals(self, activity: str, mode: str, begin: int, end: int) -> list[ActivityInterval]:
        """Return the time of a step, with its waits for input as separate parts."""
        if not self._apart:
            return self._piece(activity, mode, begin, end)
        return self._split_interval(activity, mode, begin, end, [one for one in self._apart if one[0] == "input"])

    def _split_interval(
        self, activity: str, mode: str, begin: int, end: int, apart: Sequence[tuple[str, int, int]]
    ) -> list[ActivityInterval]:
        """Divide a stretch of time: each part belongs to the first of `apart` that covers it, else to `activity`."""
        if not apart:
            return self._piece(activity, mode, begin, end)
        edges = sorted({begin, end, *(at for _, *both in apart for at in both if begin < at < end)})
        spent: list[ActivityInterval] = []
        for low, high in pairwise(edges) if end > begin else ():
            covering = (what for what, since, until in apart if since <= low and high <= until)
            spent += self._piece(next(covering, activity), mode, low, high)
        return spent

    def _piece(self, activity: str, mode: str, begin: int, end: int) -> list[ActivityInterval]:
        if end <= begin or not activity:
            return []
        piece = ActivityInterval(activity, mode, begin, end)
        if end - begin >= _PIECE_NS and activity not in ("paused", "input"):
            self._pieces.append(piece)
        return [piece]
