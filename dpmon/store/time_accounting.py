"""Divides the time of a process into activities. Each moment up to its last step belongs to one activity.

startup     before the process's first step, in that step if it waits long, and what the first steps of a kind take too
            long (see `_excess_of_first_steps`)
training    within training steps
evaluation  within evaluation steps, and before each of them since the previous step: building a dataset, its loader
forward_only  the same for forward-only steps
between     before training steps, since the previous step: starting a loader's workers, a checkpoint, logging
paused      the user paused the training
input       the script waited for a line of input
stalled     a whole step, or the whole time between two steps, in which the run stalled
missed      steps that were not recorded, and the time between them

After its last step, only the pauses and input waits of a process are accounted for, because it may end long before the
others. Time without any activity counts as startup if a process starts after it, else as the end of the run (see
`account_for_elapsed`), and so does the time of a rank from its last step to that of the others.

Steps arrive in order. The length of a pause or an input wait is known only after its end. Its time is subtracted from
the activity in which it lies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dpmon.record.record_types import Step
from dpmon.record.schema import SECOND, STALLED, STARTUP, STEP_KINDS, TRAINING, WARM_UP_STEPS
from dpmon.store.gaps import Gap

ACTIVITIES = ("startup", "training", "evaluation", "forward_only", "between", "paused", "input", "stalled", "missed")
_MAX_RECENT = 1024
"""Number of recent intervals that are remembered. An input wait is reported late, and then corrects them."""
_MIN_RECENT_NS = 20_000_000
"""Shortest interval that is remembered. An input wait lies within one long step, or between two steps."""
_LONG_WIDTHS = (86_400 * SECOND, 3600 * SECOND, 60 * SECOND)
_LONG_NS = 600 * SECOND
"""An interval of at least this length is split into _LONG_WIDTHS where possible, not into seconds."""
_MIN_STARTUP_WAIT_NS = 10 * SECOND
"""A process's first step is start-up if it waits at least this long for its first batch or for other ranks."""
_SLOW_RATIO, _MIN_EXCESS_NS = 4, SECOND // 2
"""One of the first steps of a kind is slow if it takes at least _SLOW_RATIO times as long as a later one of them, and
at least _MIN_EXCESS_NS longer."""
_EXCLUDED_ACTIVITIES = {STALLED: "stalled", STARTUP: "startup"}
"""The activity of a step that statistics exclude, by the step's flag."""


class ActivityInterval(NamedTuple):
    """Time of an activity, from `begin` to `end` (ns since the run's start); `sign` -1 subtracts it."""

    activity: str
    mode: str
    begin: int
    end: int
    sign: int = 1

    def split_by_second(self) -> Iterator[tuple[int, int]]:
        """Yield each second of the interval, and the time spent in that second (ns, negative if subtracted).

        In an interval of ten minutes or more, a whole minute, hour or day is yielded once, with its first second. This
        limits the number of rows: all ranks of a job may pause for a night.
        """
        position_ns = self.begin
        widths = _LONG_WIDTHS if self.end - position_ns >= _LONG_NS else ()
        while position_ns < self.end:
            fitting = (width for width in widths if position_ns % width == 0 and position_ns + width <= self.end)
            width = next(fitting, SECOND)
            part_end = min((position_ns // width + 1) * width, self.end)
            yield position_ns // SECOND, self.sign * (part_end - position_ns)
            position_ns = part_end


def union_of_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals (start, end) as disjoint intervals, in order."""
    union: list[tuple[int, int]] = []
    for start, end in sorted((start, end) for start, end in intervals if end > start):
        if union:
            last_start, last_end = union[-1]
            if start <= last_end:
                union[-1] = last_start, max(last_end, end)
                continue
        union.append((start, end))
    return union


class TimeAccount:
    """Divides the time of one process into activities."""

    def __init__(self, start_ns: int = 0, process: int = 0, stalls: Sequence[tuple[int, int]] = ()) -> None:
        """`start_ns`: start of the process. `stalls`: the start of each stall, and a later time in it."""
        self._process = process
        self._stalls = stalls
        self._end_ns = start_ns
        """End of the time that is accounted for."""
        self._last_steps: dict[int, int] = {}
        """By kind: the number of the last step."""
        self._has_steps = False
        self.kind = TRAINING
        """Kind of the last step."""
        self._mode = ""
        self._interruptions: list[tuple[str, int, int]] = []
        """Pauses and input waits that end after `_end_ns`, as (activity, start, end)."""
        self._paused_since: int | None = None
        self._recent: deque[ActivityInterval] = deque(maxlen=_MAX_RECENT)
        """The newest long intervals that are neither pauses nor input waits."""
        self._first_steps: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """End of the first WARM_UP_STEPS steps, and their time without the wait for data, by kind."""

    def resume(self, steps: Mapping[int, int], kind: int, mode: str, start_ns: int, wall_ns: int) -> None:
        """Continue after a step that an earlier supervisor accounted for. `steps`: the last number of each kind."""
        self._end_ns, self.kind, self._mode, self._has_steps = start_ns + wall_ns, kind, mode, True
        self._last_steps = {kind: number for kind, number in steps.items() if number}
        self._end_pause(start_ns)
        self._drop_old_interruptions()

    def _drop_old_interruptions(self) -> None:
        kept = ((activity, start, end) for activity, start, end in self._interruptions if end > self._end_ns)
        self._interruptions = list(kept)

    def add_step(self, step: Step, start_ns: int) -> tuple[list[ActivityInterval], Gap | None, int]:
        """Add a step that began at `start_ns` (since the run's start).

        Return the intervals since the previous step, with this step's; the gap before it, or None; and the step's flag
        if statistics exclude it, else 0.
        """
        mode, kind, end_ns = step.mode, step.kind, start_ns + step.wall_ns
        exclusion = self._exclusion_flag(step, start_ns, end_ns)
        if not (step.step or self._has_steps):
            return [], None, exclusion  # a call before the first loop: start-up
        if not self._has_steps:
            activity = "startup"
            self._end_ns = min(self._end_ns, start_ns)  # a process reports itself within its first step
        elif step.step not in (0, self._last_steps.get(kind, 0) + 1):
            activity = "missed"
        elif self.overlaps_stall(self._end_ns, start_ns):
            activity = "stalled"
        else:
            activity = "between" if kind == TRAINING else STEP_KINDS[kind]
        self._end_pause(start_ns)
        intervals, gap = self._intervals_until(activity, mode, start_ns), None
        gap_ns = sum(interval.end - interval.begin for interval in intervals if interval.activity == "between")
        if gap_ns > 0:
            gap = Gap(self._process, self._last_steps.get(TRAINING, 0), mode, self._end_ns, start_ns, gap_ns)
        activity = _EXCLUDED_ACTIVITIES.get(exclusion, STEP_KINDS[kind])
        input_waits = [(name, start, end) for name, start, end in self._interruptions if name == "input"]
        intervals += self._split_interval(activity, mode, max(start_ns, self._end_ns), end_ns, input_waits)
        if not exclusion and len(self._first_steps[kind]) < WARM_UP_STEPS:
            intervals += self._excess_of_first_steps(kind, end_ns, step.wall_ns - step.phases.get("data", 0))
        self._end_ns, self.kind, self._mode = max(end_ns, self._end_ns), kind, mode
        self._has_steps = True
        if step.step:
            self._last_steps[kind] = step.step
        if self._interruptions:
            self._drop_old_interruptions()
        return intervals, gap, exclusion

    def _excess_of_first_steps(self, kind: int, end_ns: int, busy_ns: int) -> list[ActivityInterval]:
        """Add one of the first steps of a kind. Return corrections: what slow earlier ones took longer is start-up.

        Compilers, caches and devices start in the first steps. `busy_ns`: its time without the wait for data, which
        may be long at the start of each epoch.
        """
        corrections: list[ActivityInterval] = []
        for slow_end_ns, slow_ns in self._first_steps[kind]:
            if slow_ns >= max(_SLOW_RATIO * busy_ns, busy_ns + _MIN_EXCESS_NS):
                corrections += self._reassign("startup", slow_end_ns - slow_ns + busy_ns, slow_end_ns)
        self._first_steps[kind].append((end_ns, busy_ns))
        return corrections

    def _exclusion_flag(self, step: Step, start_ns: int, end_ns: int) -> int:
        """Return the flag of a step that statistics exclude; 0 for other steps."""
        if self.overlaps_stall(start_ns, end_ns):
            return STALLED
        waited_ns = step.phases.get("data", 0) + step.phases.get("sync", 0)
        return STARTUP if not self._has_steps and waited_ns >= _MIN_STARTUP_WAIT_NS else 0

    def overlaps_stall(self, start_ns: int, end_ns: int) -> bool:
        """Return whether a stall was noticed in this time, and more than half of the stall up to then lies in it."""
        for stall_start, noticed_ns in self._stalls:
            covered_ns = noticed_ns - max(start_ns, stall_start)
            if start_ns <= noticed_ns <= end_ns and 2 * covered_ns > noticed_ns - stall_start:
                return True
        return False

    def note_pause(self, paused: bool, time_ns: int | None, duration_ns: int | None) -> None:
        """Note that a pause began (`paused`) at `time_ns`, or that it ended then, after `duration_ns`."""
        if paused:
            self._paused_since = time_ns
            return
        start_ns = time_ns - duration_ns if time_ns is not None and duration_ns is not None else self._paused_since
        self._paused_since = None
        if start_ns is not None and time_ns is not None and time_ns > start_ns:
            self._interruptions.append(("paused", start_ns, time_ns))

    def _end_pause(self, time_ns: int) -> None:
        """End a pause without a recorded end, because a step began, or the run ended."""
        if self._paused_since is not None and time_ns > self._paused_since:
            self._interruptions.append(("paused", self._paused_since, time_ns))
            self._paused_since = None

    def add_input_wait(self, start_ns: int, end_ns: int) -> list[ActivityInterval]:
        """Note an input wait. Return the corrections to the time that was accounted for earlier."""
        corrections = self._reassign("input", start_ns, end_ns)
        if end_ns > self._end_ns:
            self._interruptions.append(("input", start_ns, end_ns))
        return corrections

    def _reassign(self, activity: str, start_ns: int, end_ns: int) -> list[ActivityInterval]:
        """Return the corrections that assign this time to another activity, if it lies in recent intervals."""
        corrections: list[ActivityInterval] = []
        recent: list[ActivityInterval] = []
        for interval in self._recent:
            part_start, part_end = max(start_ns, interval.begin), min(end_ns, interval.end)
            if part_end <= part_start or interval.activity in ("paused", "input", activity):
                recent.append(interval)
                continue
            reassigned = ActivityInterval(activity, interval.mode, part_start, part_end)
            corrections += (ActivityInterval(interval.activity, interval.mode, part_start, part_end, -1), reassigned)
            parts = interval._replace(end=part_start), reassigned, interval._replace(begin=part_end)
            recent += [part for part in parts if part.end > part.begin]
        if corrections:
            self._recent = deque(recent, _MAX_RECENT)
        return corrections

    def finish(self, end_ns: int) -> list[ActivityInterval]:
        """Close the account at the end of the run. Return the pauses and input waits after the last step."""
        self._end_pause(end_ns)
        intervals = self._intervals_until("", self._mode, end_ns)
        self._end_ns = max(end_ns, self._end_ns)
        return intervals

    def _intervals_until(self, activity: str, mode: str, end_ns: int) -> list[ActivityInterval]:
        """Return the intervals up to `end_ns`, in order. `activity` "": only pauses and input waits are returned."""
        pauses_first = sorted(self._interruptions, reverse=True)
        return self._split_interval(activity, mode, self._end_ns, end_ns, pauses_first)

    def _split_interval(
        self, activity: str, mode: str, start_ns: int, end_ns: int, interruptions: Sequence[tuple[str, int, int]]
    ) -> list[ActivityInterval]:
        """Return the intervals of a time that interruptions divide.

        Each part belongs to the first of `interruptions` that covers it, or to `activity`.
        """
        if not interruptions:
            return self._make_interval(activity, mode, start_ns, end_ns)
        if end_ns <= start_ns:
            return []
        edges = {edge for _, *both in interruptions for edge in both if start_ns < edge < end_ns}
        intervals: list[ActivityInterval] = []
        for part_start, part_end in pairwise(sorted({start_ns, end_ns, *edges})):
            covering = (name for name, start, end in interruptions if start <= part_start and part_end <= end)
            intervals += self._make_interval(next(covering, activity), mode, part_start, part_end)
        return intervals

    def _make_interval(self, activity: str, mode: str, start_ns: int, end_ns: int) -> list[ActivityInterval]:
        """Return a list with the interval, and remember it if it is long; an empty list without time or activity."""
        if end_ns <= start_ns or not activity:
            return []
        interval = ActivityInterval(activity, mode, start_ns, end_ns)
        if end_ns - start_ns >= _MIN_RECENT_NS and activity not in ("paused", "input"):
            self._recent.append(interval)
        return [interval]
