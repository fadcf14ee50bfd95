"""Notices a stall while the run goes on, records it with its beginning and its end, and answers who asks why."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from dpmon.record.safe_json import ns_member, text_member
from dpmon.record.schema import SECOND
from dpmon.run.process_notes import read_notes
from dpmon.run.run_directory import RunInfo, stop_requested_unix
from dpmon.run.safe_files import write_atomically
from dpmon.run.stdin_terminal import input_wait_start_ns
from dpmon.stalls.rank_inspector import INSPECT_AFTER_NS, RankInspector
from dpmon.stalls.run_state import WAITING_FOR_DATA
from dpmon.stalls.stacks import ProcessStacks
from dpmon.stalls.stall_detection import FIRST_BATCH, LearnedDurations, RankActivity, Stall, find_stall, sentence
from dpmon.stalls.why_reply import (
    STANDING_FILE,
    build_reply,
    describe_ranks,
    last_request_number,
    wants_native,
    write_reply,
)

LOOK_NS = SECOND
STACKS_AFTER_NS = 5 * SECOND
"""Stacks are taken when a rank has stood still for this long, and again after half of the time that it stands there."""
REST = 50
"""After taking stacks, this many times the time that it took passes before the next ones are taken."""


class StallRecorder(Protocol):
    """What the watch needs from the record of the run. The record of several machines has no steps and no samples."""

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event."""

    def last_steps(self) -> Mapping[int, int | None]:
        """The last step of each process."""
        return {}

    def gpus(self) -> list[Mapping[str, Any]]:
        """The newest sample of each GPU."""
        return []

    def last_stall(self) -> Mapping[str, Any] | None:
        """The data of the last record of a stall."""


class StallWatch:
    """Looks at the ranks once a second."""

    def __init__(
        self,
        directory: Path,
        info: RunInfo,
        drain: StallRecorder,
        *,
        adopted: bool = False,
        look: RankInspector | None = None,
    ) -> None:
        """`adopted`: another supervisor started the command, and may have recorded the beginning of a stall.

        `look`: what sees the ranks if they run on several machines. It is the owner who then answers requests.
        """
        self._directory = directory
        self._sees_all = look is not None
        self._info = info
        self._drain = drain
        self._look = look or RankInspector(directory, info.cwd, adopted=adopted)
        self._usual = LearnedDurations()
        self._look_at = 0
        self._before: dict[tuple[str | None, int], RankActivity] = {}
        self._stacks_at = 0
        self._asked = 0
        self._thread: threading.Thread | None = None
        self._taken: tuple[int, Mapping[int, ProcessStacks]] | None = None
        """The number of a request, and the stacks for its answer."""
        self._error: Exception | None = None
        """Why the thread that takes stacks failed."""
        self._standing: list[RankActivity] = []
        """The ranks in the file STANDING_FILE."""
        self.stall: Stall | None = None
        self.told = ""
        """The sentence about the stall."""
        self.waits: Mapping[tuple[str | None, int], bool] = {}
        """Whether it waits for another one, for each rank of the stall by its key."""
        self._failed = False
        before = drain.last_stall() if adopted else None
        if before is not None and "lasted_s" not in before and (since := ns_member(before, "since_s")) is not None:
            self.stall = Stall(info.start_ns + since, (), ())
            self.told = text_member(before, "text") or ""
            with contextlib.suppress(TypeError, AttributeError, KeyError):  # any program may have written the record
                ranks = (rank for rank in before["ranks"] if not rank.get("apart"))
                self.waits = {(rank.get("node"), rank["pid"]): bool(rank["waits"]) for rank in ranks}

    def poll(self) -> None:
        """Look if it is time. Never waits, never raises."""
        if self._failed:
            return
        try:
            self._inspect()
        except Exception as error:  # noqa: BLE001 - the record of the run must go on
            self._failed = True
            text = f"stalls are no longer noticed: {type(error).__name__}: {error}"
            self._drain.emit("warning", {"process": None, "text": text})

    def _inspect(self) -> None:
        if self._error is not None:
            raise self._error
        now = time.monotonic_ns()
        asked = 0 if self._sees_all else last_request_number(self._directory)
        if asked != self._asked and not self._is_taking_stacks():
            self._asked = asked
            self._look.inspect_ranks(
                self._drain.last_steps(), now
            )  # finds processes that have begun, as after a takeover
            self._start_taking_stacks(asked)
        if self._taken is not None:
            (number, dumps), self._taken = self._taken, None
            ranks = self._look.with_exceptions(self._look.inspect_ranks(self._drain.last_steps(), now))
            write_reply(self._directory, number, self._answer(ranks, dumps, self._reindexed_stall(ranks), now))
        if now < self._look_at:
            return
        self._look_at = now + LOOK_NS
        ranks = self._look.inspect_ranks(self._drain.last_steps(), now)
        self._learn_durations(ranks)
        if self.stall is not None and (self._all_died(ranks) or self._stopping(now)):
            return
        times = [now - rank.since_ns for rank in ranks if not rank.is_over and rank.doing != "paused" and rank.since_ns]
        longest = max(times, default=0)
        reads = longest >= INSPECT_AFTER_NS and input_wait_start_ns(self._directory) is not None
        if reads:
            self._before = {}  # the time that a person takes is not learned
        over = any(rank.is_over for rank in ranks)
        self._write_rank_report(ranks if over or (longest >= INSPECT_AFTER_NS and not reads) else [], now)
        if longest < INSPECT_AFTER_NS or reads:
            self._record_stall_change(None, ranks, now)
            return
        found = find_stall(ranks, self._usual, now)
        missing = found is not None and not all(ranks[i].has_current_stack for i in (*found.blockers, *found.waiters))
        if not self._is_taking_stacks() and (missing or (longest >= STACKS_AFTER_NS and now >= self._stacks_at)):
            self._stacks_at = now + max(STACKS_AFTER_NS, longest // 2)
            self._start_taking_stacks(None)
        if not missing and not self._may_still_be_stalled(ranks, now):  # without the stacks the wrong rank may be named
            self._record_stall_change(found, ranks, now)

    def _write_rank_report(self, ranks: list[RankActivity], now: int) -> None:
        """Write what these ranks do if others of their job are not among them. Their use of processors never rests."""
        if self._sees_all or len(ranks) >= max((rank.world for rank in ranks), default=0):
            ranks = []
        ranks = self._look.with_exceptions(ranks) if any(rank.is_over for rank in ranks) else ranks
        ranks = [rank._replace(cpu=None, usual_ns=self._usual.learned_ns(rank)) for rank in ranks]
        if ranks != self._standing:
            self._standing = ranks
            with contextlib.suppress(OSError):
                write_atomically(self._directory / STANDING_FILE, json.dumps(describe_ranks(ranks, now, self._info)))

    def _stopping(self, now: int) -> bool:
        """Whether the user has asked for the run's end since the stall began. What its ranks do then is no cause."""
        asked = stop_requested_unix(self._directory)
        began = time.time() - (now - self.stall.since_ns) / SECOND if self.stall is not None else 0.0
        return asked is not None and asked > began

    def _all_died(self, ranks: list[RankActivity]) -> bool:
        """Whether all processes were killed or failed. That is no progress: the run ends in its stall."""
        if not ranks or not all(rank.is_over for rank in ranks):
            return False
        return all(rank.doing != "ended" or rank.raised is not None for rank in self._look.with_exceptions(ranks))

    def _reindexed_stall(self, ranks: list[RankActivity]) -> Stall | None:
        """The stall with the indices of these ranks: since the last look, some may have come or gone."""
        known = [(i, self.waits[rank.key]) for i, rank in enumerate(ranks) if rank.key in self.waits]
        guilty, waiting = (tuple(i for i, waits in known if waits == which) for which in (False, True))
        return self.stall and self.stall._replace(blockers=guilty, waiters=waiting)

    def _may_still_be_stalled(self, ranks: list[RankActivity], now: int) -> bool:
        """Whether the stall that an earlier supervisor saw may go on: for some seconds no sign of life is known."""
        if self.stall is None:
            return False
        still = [rank for rank in ranks if not rank.is_over and rank.since_ns <= self.stall.since_ns + SECOND]
        return any(rank.busy is None and now - rank.since_ns >= INSPECT_AFTER_NS for rank in still)

    def close(self) -> None:
        """Close the rings. A stall in which the run ended stays open in the record."""
        if self._thread is not None:
            self._thread.join(1.0)
        now = time.monotonic_ns()
        with contextlib.suppress(Exception):  # as in `look`
            self._write_rank_report(self._look.inspect_ranks(self._drain.last_steps(), now), now)
        self._look.close()

    def _is_taking_stacks(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start_taking_stacks(self, asked: int | None) -> None:
        """Take the stacks in a thread, because py-spy may take long. `asked`: the number of a request."""

        def work() -> None:
            begun = time.monotonic_ns()
            try:
                if asked is None:
                    self._look.take_stacks(still_ns=INSPECT_AFTER_NS)
                    took = time.monotonic_ns() - begun
                    self._stacks_at = max(self._stacks_at, begun + REST * took)
                    self._look.query_nccl()
                else:
                    dumps = self._look.take_stacks(native=wants_native(self._directory))
                    self._look.query_nccl()
                    self._taken = asked, dumps
            except Exception as error:  # noqa: BLE001 - the next look reports it
                self._error = error

        self._thread = threading.Thread(target=work, name="dpmon stacks", daemon=True)
        self._thread.start()

    def _learn_durations(self, ranks: list[RankActivity]) -> None:
        """Take note of how long each finished operation took.

        Not if the rank waited there for another one, or was stopped.
        """
        before, self._before = self._before, {rank.key: rank for rank in ranks}
        working = {rank.job for rank in before.values() if not rank.is_in_collective}
        for rank in ranks:
            was = before.get(rank.key)
            if was is None:  # before the first call, a process has no ring, only stages
                notes = [note for note in read_notes(self._directory / "stages.log", 1 << 16) if note.pid == rank.pid]
                for note, after in pairwise(notes):
                    if note.text.startswith(WAITING_FOR_DATA):
                        self._usual.add_duration(FIRST_BATCH, after.at_ns - note.at_ns)
                continue
            if was.state == "stopped" or (was.is_in_collective and was.job in working):
                continue
            if rank.since_ns > was.since_ns > 0:
                self._usual.add_duration(was.timing_key, rank.since_ns - was.since_ns)

    def _record_stall_change(self, found: Stall | None, ranks: list[RankActivity], now: int) -> None:
        """Record the beginning, a change, or the end of a stall."""
        before = self.stall
        if found is not None and before is not None:  # all its records have the same time
            found = found._replace(since_ns=before.since_ns)
        self.stall = found
        if found is None:
            if before is not None:
                seconds = (before.since_ns - self._info.start_ns) / 1e9
                lasted = (now - before.since_ns) / 1e9
                self._drain.emit("stall", {"since_s": seconds, "lasted_s": lasted, "text": self.told})
            return
        waited, self.waits = self.waits, {ranks[i].key: i in found.waiters for i in (*found.blockers, *found.waiters)}
        ranks = self._look.with_exceptions(ranks)
        text = sentence(found, ranks, self._info.cwd)
        if before is None or (text != self.told and waited != self.waits):
            self.told = text
            self._drain.emit("stall", self._answer(ranks, {}, found, now))

    def _answer(
        self, ranks: list[RankActivity], dumps: Mapping[int, ProcessStacks], found: Stall | None, now: int
    ) -> dict[str, Any]:
        gpus, nccl = self._drain.gpus(), self._look.nccl
        return build_reply(ranks, dumps, found, now, self._info, text=self.told, gpus=gpus, nccl=nccl)
