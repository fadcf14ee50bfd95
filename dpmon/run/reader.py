"""Tails the rings of one run: what the screen and the headless run know, they know from here.

No threads, and nothing is written but requests. A reader that comes late begins with what the history keeps, and
goes on in the rings exactly where the history ends.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.codec import Decoder, Event, Record, RecordError, kind_of
from dpmon.record.wire import mode_number
from dpmon.ring import Activity, RingError, RingReader
from dpmon.run import proc
from dpmon.run.lock import supervised
from dpmon.run.rundir import (
    INFO_FILE,
    MAX_SECONDS,
    MAX_STATUS,
    ExitInfo,
    RunError,
    RunInfo,
    load_exit,
    load_info,
    ring_paths,
)
from dpmon.run.standing import newest_stage, stages
from dpmon.run.waiting import waits_since

if TYPE_CHECKING:
    from dpmon.past import DevicePast, Drawn, Past
    from dpmon.run.kept import Kept

__all__ = ["Pause", "RunReader"]

POLL_BYTES = 1 << 20
RECENT_RECORDS = 4000
"""Calls and steps that a late reader is given from the history."""
RECENT_NS = 640 * 10**9
"""And this much of samples of devices and host, as far back as their charts go (dpmon.model.state.HISTORY_KEPT)."""
_HISTORY = "history.sqlite"
_RANKS = "the ranks of a distributed training wait for each other: pausing would let their collectives time out"


class Pause(NamedTuple):
    """Whether the training is paused."""

    wanted: bool
    """A pause was asked for last, of any process that trains."""
    pending: bool
    """A process has not yet acted on what was asked of it."""
    since_ns: int | None
    """Since when all that train are paused (monotonic); None while one runs."""


class _Tail:
    """One ring, its decoder, and what is asked of its process."""

    def __init__(self, ring: RingReader, decoder: Decoder, missed_before: int) -> None:
        self.ring = ring
        self.decoder = decoder
        self.asked = 0
        self.unreadable = missed_before
        self._waiting: deque[bytes] = deque()

    def take(self, most: int | None) -> Iterator[bytes]:
        """Payloads that were not taken yet, oldest first: `most`, or all that one read of the ring gives."""
        if not self._waiting:
            with contextlib.suppress(RingError, OSError):
                self._waiting.extend(self.ring.read(POLL_BYTES))
        for _ in range(len(self._waiting) if most is None else min(most, len(self._waiting))):
            yield self._waiting.popleft()

    @property
    def missed(self) -> int:
        try:
            lost = self.ring.lost()
            held = self.ring.held()
            lost += held if held and not self.alive() else 0
        except (RingError, OSError):
            lost = 0
        return self.unreadable + self.ring.missed + lost

    def alive(self) -> bool:
        """Whether the process that writes this ring runs."""
        return self.activity()[0] != "ended" and proc.alive(self.ring.pid, None)

    def activity(self) -> tuple[str, int]:
        try:
            what, since = self.ring.activity()
        except (RingError, OSError):
            return "ended", 0
        return Activity.NAMES[what], since

    def doing(self) -> tuple[str, int]:
        """Its activity, of a living process."""
        return self.activity() if self.alive() else ("ended", 0)

    def request(self, mode: int) -> bool:
        try:
            self.asked = self.ring.request(mode)
        except (RingError, OSError):
            return False
        return True

    def request_pause(self, paused: bool) -> bool:
        try:
            self.ring.request_pause(paused)
        except (RingError, OSError):
            return False
        return True

    def pause_requests(self) -> tuple[int, int]:
        try:
            return self.ring.pause_requests()
        except (RingError, OSError):
            return 0, 0

    def waiting(self) -> bool:
        try:
            return self.ring.acknowledged()[0] < self.asked
        except (RingError, OSError):
            return False


class RunReader:
    """Tails all rings of the run in `directory`; `calls` False leaves out calls, which are dear to decode."""

    def __init__(
        self, directory: Path, *, calls: bool = True, told: Callable[[], ExitInfo | None] = lambda: None
    ) -> None:
        """`told`: how the run ended, if known without a file. RunError if the directory is not a run of this user."""
        self.directory = directory
        self._told = told
        self._stamp = 0
        self.info: RunInfo = load_info(directory)
        self._calls = calls
        self._tails: dict[str, _Tail] = {}
        self._back: Iterator[Record] | None = None
        """What is left of the history; None: it was not looked at yet."""
        self._starts: dict[str, tuple[int, int, int, Decoder]] = {}
        self._exit: ExitInfo | None = None
        self._exit_event: Event | None = None
        self._kept: Kept | None = None

    def refresh(self) -> RunInfo:
        """Read run.json again if it was replaced; the old one holds while it cannot be read."""
        try:
            stamp = os.lstat(self.directory / INFO_FILE).st_mtime_ns
            if stamp != self._stamp:
                self.info = load_info(self.directory)
                self._stamp = stamp
        except (OSError, RunError):
            pass
        return self.info

    def close(self) -> None:
        """Give the descriptors back; the reader is of no further use."""
        for tail in self._tails.values():
            tail.ring.close()
        self._tails.clear()
        self._back = iter(())
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    # ------------------------------------------------------------------------------------------ records

    def poll(self, most: int | None = None) -> list[Record]:
        """What is new in all rings since the last poll, oldest first for each; about 1 MiB a ring at most.

        With `most`, about so many records at most, and none only where there are none just now.
        """
        if self._back is None:
            self._back = self._look_back()
        found = list(islice(self._back, most))
        if most is not None and len(found) >= most:
            return found
        self._open_new()
        share = None if most is None else most // max(len(self._tails), 1) + 1
        taken = True
        while taken:
            taken = False
            for tail in self._tails.values():
                for payload in tail.take(share):
                    taken = True
                    record = self._decode(tail, payload)
                    if record is not None:
                        found.append(record)
            taken = taken and not found and most is not None  # only definitions: that was not all
        return found

    def past(self) -> Iterator[Past | Drawn | DevicePast | None]:
        """What the history says of the time before the records that the first `poll` gives; to be used up before it.

        None in between: there is more to come, which takes a while.
        """
        if self._back is not None or not (self.directory / _HISTORY).exists():
            return
        from dpmon.run.kept import Kept
        from dpmon.run.past import past_of
        from dpmon.run.tables import HistoryError

        try:
            self._kept = Kept(self.directory)
            yield from past_of(self._kept, self._kept.last_id - RECENT_RECORDS)
        except (HistoryError, OSError, ValueError):
            return  # damaged: what could be read is better than nothing

    def of_both(self) -> Iterator[Drawn | None]:
        """Of a run that is over: as many steps of both modes as a report compares. None: there is more to come."""
        from dpmon.run.kept import Kept
        from dpmon.run.past import Before
        from dpmon.run.tables import HistoryError

        try:
            kept = Kept(self.directory)
        except (HistoryError, OSError):
            return
        try:
            yield from Before(kept).of_both(kept.last_id)
        except (HistoryError, ValueError):
            return
        finally:
            kept.close()

    @property
    def missed(self) -> int:
        """Records overwritten before they were read, unreadable, or lost by their writers; over all rings."""
        return sum(tail.missed for tail in self._tails.values())

    def _open_new(self) -> None:
        for process, path in ring_paths(self.directory):
            if path.name in self._tails:
                continue
            start = self._starts.get(path.name)
            try:
                if start is None:
                    ring = RingReader(str(path), live=True)
                    decoder, missed = Decoder(process, ring.rank, self.info.start_ns), 0
                else:
                    position, sequence, missed, decoder = start
                    ring = RingReader(str(path), position=position, sequence=sequence)
            except (RingError, OSError):
                continue  # not ready yet: its header is complete a moment later
            self._tails[path.name] = _Tail(ring, decoder, missed)

    def _decode(self, tail: _Tail, payload: bytes) -> Record | None:
        if not self._calls and kind_of(payload) in ("call", "definition"):
            return None
        try:
            record = tail.decoder.decode(payload)
        except RecordError:
            tail.unreadable += 1
            return None
        if isinstance(record, Event) and record.kind == "exit":
            self._exit_event = record
        return record

    def _look_back(self) -> Iterator[Record]:
        """What the history kept: lasting events, recent calls, steps, samples; the rings go on from there."""
        if not (self.directory / _HISTORY).exists():
            return iter(())
        from dpmon.run.kept import Kept
        from dpmon.run.rows import decoders_of, record_of
        from dpmon.run.tables import HistoryError

        try:
            kept = self._kept = self._kept or Kept(self.directory)
        except (HistoryError, OSError):
            return iter(())
        try:
            decoders = decoders_of(kept, self.info.start_ns)
        except (HistoryError, ValueError):
            decoders = {}
        for ring in kept.rings.values():
            if ring.process in decoders:
                self._starts[ring.name] = (ring.position, ring.sequence, ring.missed, decoders[ring.process])

        def rows() -> Iterator[Record]:
            first = kept.last_id - RECENT_RECORDS
            try:
                for row in chain(kept.lasting(first, kept.last_ns() - RECENT_NS), kept.rows(first)):
                    if self._calls or row[1] != "calls":
                        with contextlib.suppress(RecordError):  # a damaged one does not hide those after it
                            yield record_of(row, decoders)
            except HistoryError:
                pass  # damaged: what could be read is better than nothing
            finally:
                kept.close()
                self._kept = None

        return rows()

    # ------------------------------------------------------------------------------------------ state

    def stage(self) -> tuple[str, int] | None:
        """The run's stage before its first call, and when it began (monotonic ns)."""
        return newest_stage(stages(self.directory), lambda pid: proc.alive(pid, None))

    def waits_for_input(self) -> int | None:
        """Since when (monotonic ns) the command waits for a line of input; None: not, as far as is known."""
        return waits_since(self.directory)

    def activities(self) -> dict[int, tuple[str, int]]:
        """What each training process is in, and since when (monotonic ns); "ended" of one that was killed, too."""
        return {tail.ring.process: tail.doing() for tail in self._tails.values() if tail.ring.process >= 0}

    def exit(self) -> ExitInfo | None:
        """How the run ended; None while it goes on."""
        if self._exit is None:
            self._exit = load_exit(self.directory) or self._exit_from_ring() or self._told()
        return self._exit

    def _exit_from_ring(self) -> ExitInfo | None:
        """The exit as the ring has it, for a disk that had no room for exit.json."""
        data = {} if self._exit_event is None else self._exit_event.data
        status, seconds = data.get("status"), data.get("t_s")
        signal, unknown, cause = data.get("signal"), data.get("unknown"), data.get("cause")
        status = status if type(status) is int and 0 <= status <= MAX_STATUS else None
        if status is None and not isinstance(unknown, str):
            return None
        if not isinstance(seconds, (int, float)) or not abs(seconds) < MAX_SECONDS:
            return None
        return ExitInfo(
            status=status,
            signal=signal if isinstance(signal, str) else None,
            unknown=unknown if isinstance(unknown, str) else None,
            cause=cause if isinstance(cause, str) else None,
            ended_unix=self.info.started_unix + seconds,
            end_ns=self.info.start_ns + int(seconds * 1e9),
            seconds=float(seconds),
            by="supervisor",
        )

    def supervised(self) -> bool:
        """Whether the run's supervisor lives (as far as run.json names it)."""
        return supervised(self.refresh())

    def command_alive(self) -> bool | None:
        """Whether the command runs; None: it was not started yet."""
        info = self.info if self.info.command_pid is not None else self.refresh()
        if info.command_pid is None:
            return None
        if info.boot_id != proc.boot_id():
            return False
        return proc.is_running(info.command_pid, info.command_started)

    # ------------------------------------------------------------------------------------------ requests

    def request_mode(self, mode: str) -> int:
        """Ask every training process for `mode` (dp or single); how many were asked. ValueError for others."""
        number = mode_number(mode)
        self._open_new()
        return sum(tail.request(number) for tail in self._training())

    def pending(self) -> bool:
        """Whether a living process has not yet acted on what was asked of it."""
        return any(tail.waiting() for tail in self._training())

    def request_pause(self, paused: bool) -> int:
        """Ask every training process to pause between two of its steps, or to go on; how many were asked.

        None is asked to pause where `pause_refusal` says that it cannot be.
        """
        self._open_new()
        if paused and self.pause_refusal() is not None:
            return 0
        return sum(tail.request_pause(paused) for tail in self._training())

    def pause_refusal(self) -> str | None:
        """Why the training cannot be paused now; None if it can be asked to."""
        training = self._training()
        if not training:
            return "no training process is there to pause"
        return _RANKS if any((tail.ring.world or 1) > 1 for tail in training) else None

    def paused(self) -> Pause:
        """What was asked for last, whether it is so yet, and since when."""
        training = self._training()
        requests = [tail.pause_requests() for tail in training]
        doing = [tail.activity() for tail in training]
        paused = bool(doing) and all(what == "paused" for what, _ in doing)
        return Pause(
            wanted=any(asked & 1 for asked, _ in requests),
            pending=any(asked != answered for asked, answered in requests),
            since_ns=max(since for _, since in doing) if paused else None,
        )

    def _training(self) -> list[_Tail]:
        return [tail for tail in self._tails.values() if tail.ring.process >= 0 and tail.alive()]

    @property
    def output_paths(self) -> tuple[Path, ...]:
        """The files with the script's output: one, or two for a headless run (output first, then errors)."""
        names = ("stdout.log", "stderr.log") if self.info.headless else ("output.log",)
        return tuple(self.directory / name for name in names)
