"""Plays a finished run back: the reader that a screen knows, with a clock that can be stopped, set and sped up.

What is read is bounded wherever the clock is set: what lasts (processes, modes, warnings), of calls, steps and
samples as much as a reader is given that comes late to a live run, and sums of all that was before. Nothing is written.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpmon.past import Drawn, Past
from dpmon.record.codec import Event, Record, RecordError
from dpmon.run.kept import Kept
from dpmon.run.past import Before
from dpmon.run.reader import RECENT_NS, RECENT_RECORDS, Pause
from dpmon.run.rows import decoders_of, record_of
from dpmon.run.rundir import ExitInfo, RunError, RunInfo, load_exit, load_info
from dpmon.run.standing import newest_stage, stages
from dpmon.store.tables import HistoryError

__all__ = ["SPEEDS", "PlaybackReader", "can_be_played"]

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
_SECOND = 1_000_000_000
POLL_RECORDS = 4000
"""More than these that are due at once are skipped, as by setting the clock: a picture has no use for them all."""
AHEAD_NS = 120 * _SECOND
"""No further ahead is played instead of skipped to."""
AHEAD_ROWS = 16_000
"""Rows that are read ahead and put in order of time."""
_LOOK_AHEAD_NS = 10 * _SECOND
_DISORDER_ROWS = 16 * AHEAD_ROWS
"""So far from each other in the record may what happened at one time lie, where several rings were taken over late."""


def can_be_played(directory: Path) -> bool:
    """Whether the run has a history to be played; without one its rings show how it ended."""
    try:
        PlaybackReader(directory).close()
    except RunError:
        return False
    return True


class PlaybackReader:
    """One finished run. Times are ns since the run's start; `clock` is what real time is measured with."""

    def __init__(self, directory: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Stands at the end of the run, stopped. Raises RunError if there is no run, or nothing to be played."""
        self.directory = directory
        self.info: RunInfo = load_info(directory)
        try:
            self._kept = Kept(directory)
            self._decoders = decoders_of(self._kept, self.info.start_ns)
            self._end = load_exit(directory)
            self._minute_s, self._full_ns = self._kept.summed()
            self.length_ns = self._find_length()
        except (HistoryError, OSError, ValueError) as error:
            raise RunError(f"{directory.name} cannot be played back: {error}") from None
        self._clock = clock
        self._clocked = clock()
        self._position = self.length_ns
        self.playing = False
        self.speed = 1.0
        self.generation = 0
        """Grows when the clock was set: what was folded before belongs to another time."""
        self._due: list[tuple[int, int, tuple[Any, ...]]] = []
        self._rows: Iterator[tuple[Any, ...]] = iter(())
        self._read_ns = -1
        self._read_id = self._needed_id = 0
        self._needed_ns = -1
        self._set = True
        self._first = 0
        self._before = Before(self._kept, again=True)
        self._looked_ns = 0

    def _find_length(self) -> int:
        seconds = self._end.seconds if self._end is not None else 0.0
        return max(int(seconds * 1e9), self._kept.newest_ns(), 1)

    # ------------------------------------------------------------------------------------------ the clock

    @property
    def position_ns(self) -> int:
        """How far the playback is; moves while it plays, and stops at the end by itself."""
        now = self._clock()
        passed, self._clocked = now - self._clocked, now
        if self.playing:
            self._position += int(max(passed, 0) * self.speed)
            if self._position >= self.length_ns:
                self._position, self.playing = self.length_ns, False
        return self._position

    def now_ns(self) -> int:
        """The same on the monotonic clock of the run: what a screen takes for now."""
        return self.info.start_ns + self.position_ns

    def play(self, playing: bool = True) -> None:
        """Go on, or stop; from the end it begins anew."""
        if playing and self.position_ns >= self.length_ns:
            self.seek(0)
        self._clocked = self._clock()
        self.playing = playing

    def seek(self, position_ns: int) -> None:
        """Set the clock; playing or not stays as it is."""
        before, after = self.position_ns, min(max(position_ns, 0), self.length_ns)
        self._position = after
        # A little ahead is played, not skipped to.
        self._set = self._set or after < before or after - before > AHEAD_NS

    def step(self, by: int) -> None:
        """To the end of the next step of the training (`by` 1), or of the one before (-1); stops."""
        self.playing = False
        here = self.position_ns
        found = self._kept.step_end(self._kept.id_at(here), here, forward=by > 0)
        if found is not None:
            self.seek(found)

    def faster(self, by: int) -> None:
        """The next of SPEEDS, or the one before."""
        at = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - self.speed))
        _ = self.position_ns  # what has passed until now passed at the old speed
        self.speed = SPEEDS[min(max(at + by, 0), len(SPEEDS) - 1)]

    # ------------------------------------------------------------------------------------------ records

    def past(self) -> Iterator[Past | Drawn]:
        """What was before the records that `poll` gave when the clock was set last; to be folded before these."""
        try:
            yield from self._before.of(self._first, self._position)
        except (HistoryError, ValueError):
            return  # damaged: what could be read is better than nothing

    def of_both(self) -> Iterator[Drawn | None]:
        """Of the steps until now as many of both modes as a report compares. None: there is more to come."""
        here = self.position_ns
        try:
            last = self._kept.last_id if here >= self.length_ns else self._kept.id_at(here)
            yield from self._before.of_both(last)
        except (HistoryError, ValueError):
            return

    def poll(self, most: int | None = None) -> list[Record]:
        """What happened between the last time and now; after the clock was set, what a late reader would be given.

        All of it, whatever `most` is: the clock's next reading would be another.
        """
        position = self.position_ns
        if not self._set and not self._is_summed(position):
            found = self._take(position, POLL_RECORDS + 1)
            if len(found) <= POLL_RECORDS:
                return found
        self._set = False
        return self._look_back(position)

    def _is_summed(self, position: int) -> bool:
        """Whether the clock has passed a minute of which only sums are left: these are told by looking back."""
        if self._looked_ns >= self._full_ns:
            return False
        minute, looked = (max(at // (60 * _SECOND), self._minute_s // 60) for at in (position, self._looked_ns))
        return minute != looked or position >= self._full_ns

    def _take(self, position: int, limit: int) -> list[Record]:
        """What is due by `position`, oldest first, at most `limit` of it."""
        found: list[Record] = []
        self._read_on(position)
        while self._due and self._due[0][0] <= position and len(found) < limit:
            record = self._record(heapq.heappop(self._due)[2])
            if record is not None:
                found.append(record)
            if not self._due:
                self._read_on(position)
        return found

    def _read_on(self, position: int) -> None:
        try:
            self._fill(position)
        except HistoryError:
            self._rows = iter(())  # damaged: what could be read is better than nothing

    def _fill(self, position: int) -> None:
        """Read rows well past `position`: rings are taken over in turn, so they lie in no strict order."""
        if position > self._needed_ns:  # not at every picture
            self._needed_ns = position + _LOOK_AHEAD_NS
            self._needed_id = self._before.given_until(self._first, self._needed_ns)
        for count in range(_DISORDER_ROWS):
            enough = count >= AHEAD_ROWS or (self._read_ns > position and len(self._due) >= AHEAD_ROWS)
            if enough and self._read_id >= self._needed_id:
                return
            row = next(self._rows, None)
            if row is None:
                return
            self._read_id = row[0]
            self._read_ns = max(self._read_ns, self._push(row))

    def _push(self, row: tuple[Any, ...]) -> int:
        at = _time_of(row)
        if at is None:  # an event without a time belongs to its neighbours
            at = self._read_ns
        heapq.heappush(self._due, (at, row[0], row))
        return at

    def _look_back(self, position: int) -> list[Record]:
        self.generation += 1
        self._looked_ns = position
        here = self._kept.id_at(position)
        first = max(here - 2 * RECENT_RECORDS, 0)
        self._first = first
        found = []
        with suppress(HistoryError):
            for row in self._kept.lasting(first, position - RECENT_NS):
                at = _time_of(row)
                if at is None or at <= position:
                    record = self._record(row)
                    if record is not None:
                        found.append(record)
        self._rows, self._due, self._read_ns = self._kept.rows(first), [], -1
        self._read_id, self._needed_ns = first, -1
        return found + self._take(position, _DISORDER_ROWS)

    def _record(self, row: tuple[Any, ...]) -> Record | None:
        try:
            record = record_of(row, self._decoders)
        except (RecordError, LookupError):
            return None
        return None if isinstance(record, Event) and record.kind == "exit" else record

    # ------------------------------------------------------------------------------------------ what a screen asks

    def refresh(self) -> RunInfo:
        """run.json; it changes no more."""
        return self.info

    def close(self) -> None:
        """Let go of the history."""
        self._kept.close()

    @property
    def missed(self) -> int:
        """What the record itself lacks."""
        return sum(row.missed + row.lost for row in self._kept.rings.values())

    def stage(self) -> tuple[str, int] | None:
        """The run's stage at this time, before its first call, and when it began (monotonic ns)."""
        return newest_stage(stages(self.directory, self.now_ns()))

    def waits_for_input(self) -> int | None:
        """Not in the record."""
        return None

    def activities(self) -> dict[int, tuple[str, int]]:
        """Not in the record: what a process was in the middle of."""
        return {}

    def exit(self) -> ExitInfo | None:
        """How the run ended, once the playback is there."""
        return self._end if self.position_ns >= self.length_ns else None

    def command_alive(self) -> bool | None:
        """Whether the command ran then."""
        return self.position_ns < self.length_ns

    def supervised(self) -> bool:
        """Nobody is needed for it."""
        return True

    def request_mode(self, mode: str) -> int:
        """Nobody is there to be asked."""
        return 0

    def request_pause(self, paused: bool) -> int:
        """Nobody is there to be asked."""
        return 0

    def pause_refusal(self) -> str | None:
        """Why it cannot be paused."""
        return "this is a playback"

    def paused(self) -> Pause:
        """Nothing is asked for in what has been."""
        return Pause(False, False, None)

    def pending(self) -> bool:
        """Nothing is."""
        return False

    @property
    def output_paths(self) -> tuple[Path, ...]:
        """The script's output, all of it: when each line was printed is not in the record."""
        names = ("stdout.log", "stderr.log") if self.info.headless else ("output.log",)
        return tuple(self.directory / name for name in names)


def _time_of(row: tuple[Any, ...]) -> int | None:
    """When what is in a row of `Kept.rows` was over; None if it does not say."""
    if row[1] == "events":
        return row[5] if type(row[5]) is int else None
    start, wall = (row[7], row[8]) if row[1] == "calls" else (row[6], row[7])
    return start + wall if type(start) is int and type(wall) is int else None
