"""Reads the state of a run's processes, and sends requests to them. dpmon.store.store_opening reads their records.

This module starts no threads and writes nothing but requests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from dpmon.record.shared_names import MODES
from dpmon.run import proc
from dpmon.run.activities import current_startup_stage, read_startup_stages
from dpmon.run.lifecycle import is_command_alive
from dpmon.run.mirror_state import MirrorState, NodeReplies
from dpmon.run.run_directory import (
    INFO_FILE,
    ExitInfo,
    RunError,
    RunInfo,
    load_exit,
    load_info,
    output_paths,
    ring_paths,
)
from dpmon.run.stdin_terminal import input_wait_start_ns
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError, wants_pause

NO_TRAINING = "no training process is running"
"""Why a request has no addressee."""
_ENDED = ("ended", 0)
_RANKS = "the ranks wait for each other, so their collectives would time out"


class PauseState(NamedTuple):
    """The last request for a pause, and whether the training is paused."""

    wanted: bool = False
    """Whether the last request to at least one training process was to pause."""
    pending: bool = False
    """Whether a process has not yet acted on the last request."""
    since_ns: int | None = None
    """When the last training process paused (monotonic; in `ScreenData`, since the start); None while one runs."""


Doing = Mapping[int, tuple[str, int]]
"""The activity of each training process, and its start (monotonic ns)."""


class RunReader:
    """Watches the processes of the run in `directory`.

    A method with `doing` looks at the processes again, unless it is given what `activities` has just returned.
    """

    def __init__(self, directory: Path, *, known_exit: Callable[[], ExitInfo | None] = lambda: None) -> None:
        """`known_exit` returns how the run ended, if the caller knows it without a file; else None.

        RunError if the directory is not a run of this user.
        """
        self.directory = directory
        self._known_exit = known_exit
        self._stamp = 0
        self.info: RunInfo = load_info(directory)
        self._rings: dict[str, SpanReader] = {}
        """Rings of training processes by file name."""
        self._asked: dict[int, int] = {}
        """The last request for a mode, by process."""
        self._exit: ExitInfo | None = None
        self._machines = MirrorState(directory, self.info.start_ns) if self.info.nodes else None
        """In place of the rings, of a mirror."""

    def refresh(self) -> RunInfo:
        """Read run.json again if it was replaced; keep the old contents while it cannot be read."""
        try:
            stamp = os.lstat(self.directory / INFO_FILE).st_mtime_ns
            if stamp != self._stamp:
                self.info = load_info(self.directory)
                self._stamp = stamp
        except (OSError, RunError):
            pass
        return self.info

    def close(self) -> None:
        """Close the descriptors; the reader is of no further use."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    # ------------------------------------------------------------------------------------------ state

    def startup_stage(self) -> tuple[str, int] | None:
        """The run's stage before its first call, and when it began (monotonic ns)."""
        if self._machines is not None:
            text, since_ns = self._machines.text_member("stage"), self._machines.time_member("stage_ns")
            return None if text is None or since_ns is None else (text, since_ns)
        return current_startup_stage(read_startup_stages(self.directory), lambda pid: proc.is_alive(pid, None))

    def waits_for_input(self) -> int | None:
        """When the command began to wait for input (monotonic ns); None if it does not, or if this is unknown."""
        return input_wait_start_ns(self.directory) if self._machines is None else self._machines.time_member("input_ns")

    def activities(self) -> dict[int, tuple[str, int]]:
        """Each training process's activity and its start (monotonic ns); "ended" also for a killed one."""
        if self._machines is not None:
            return self._machines.activities()
        for path in ring_paths(self.directory, self._rings):
            with contextlib.suppress(RingError, OSError):  # its header will be complete in a moment
                self._rings[path.name] = SpanReader(str(path))
        return {ring.process: _activity_of(ring) for ring in self._rings.values()}

    def exit_info(self) -> ExitInfo | None:
        """How the run ended; None while it runs."""
        if self._exit is None or not self._exit.drained:
            self._exit = load_exit(self.directory) or self._exit or self._known_exit()
        return self._exit

    def command_alive(self) -> bool | None:
        """Whether the command runs; None before its start."""
        return is_command_alive(self.info if self.info.command_pid is not None else self.refresh())

    # ------------------------------------------------------------------------------------------ requests

    def request_mode(self, mode: str) -> int:
        """Request `mode` (dp or single) of every training process; return their number. ValueError for other modes."""
        number = MODES.index(mode)
        if self._machines is not None:
            return self._machines.send_request({"ask": "mode", "mode": mode})

        def ask(ring: SpanReader) -> None:
            self._asked[ring.process] = ring.request(number)

        return self._request_all(ask)

    def has_pending_request(self, doing: Doing | None = None) -> bool:
        """Whether a living process has not yet acted on the last request."""
        if self._machines is not None:
            return self._machines.state.get("pending") is True
        return any(ring.acknowledged()[0] < self._asked.get(ring.process, 0) for ring in self._live_rings(doing))

    def request_pause(self, paused: bool) -> int:
        """Ask every training process to pause between two steps, or to resume; return the number of processes.

        Does not ask for a pause if `pause_refusal` returns a reason.
        """
        if paused and self.pause_refusal() is not None:
            return 0
        if self._machines is not None:
            return self._machines.send_request({"ask": "pause", "paused": paused})
        return self._request_all(lambda ring: ring.request_pause(paused))

    def request_sample(self) -> int:
        """Ask every training process to sample the collectives of one step soon; return the number of processes."""
        if self._machines is not None:
            return self._machines.send_request({"ask": "sample"})
        return self._request_all(SpanReader.request_sample)

    def node_replies(self) -> NodeReplies | None:
        """How the machines have answered the last request of this reader; None on one machine."""
        return None if self._machines is None else self._machines.replies()

    def request_records(self, processes: Collection[int]) -> None:
        """Ask a mirror for all records of these processes while this process lives, and only some others. OSError."""
        if self._machines is not None:
            self._machines.subscribe(processes)

    def pause_refusal(self, doing: Doing | None = None) -> str | None:
        """Why the training cannot be paused now; None if a pause can be requested."""
        if self._machines is not None:
            return self._machines.text_member("refusal")
        training = self._live_rings(doing)
        if not training:
            return NO_TRAINING
        return _RANKS if any((ring.world or 1) > 1 for ring in training) else None

    def pause_state(self, doing: Doing | None = None) -> PauseState:
        """The last request for a pause, whether it is in force, and the start of the pause."""
        if self._machines is not None:
            state = self._machines.state
            return PauseState(
                state.get("wanted") is True, state.get("pausing") is True, self._machines.time_member("paused_ns")
            )
        doing = self.activities() if doing is None else doing
        training = self._live_rings(doing)
        requests = [ring.pause_requests() for ring in training]
        own = [doing[ring.process] for ring in training]
        paused = bool(own) and all(what == "paused" for what, _ in own)
        return PauseState(
            wanted=any(wants_pause(asked) for asked, _ in requests),
            pending=any(asked != answered for asked, answered in requests),
            since_ns=max(since for _, since in own) if paused else None,
        )

    def _live_rings(self, doing: Doing | None = None) -> list[SpanReader]:
        doing = self.activities() if doing is None else doing
        return [ring for ring in self._rings.values() if doing.get(ring.process, _ENDED) != _ENDED]

    def _request_all(self, request: Callable[[SpanReader], object]) -> int:
        """Send a request to every training process; return the number of processes that can be asked."""
        count = 0
        for ring in self._live_rings():
            with contextlib.suppress(RingError, OSError):
                request(ring)
                count += 1
        return count

    @property
    def output_paths(self) -> tuple[Path, ...]:
        """The files with the script's output (dpmon.run.run_directory)."""
        return output_paths(self.directory, self.info)


def _activity_of(ring: SpanReader) -> tuple[str, int]:
    """The activity of a process; "ended" also if it was killed, or if its ring cannot be read."""
    with contextlib.suppress(RingError, OSError):
        name, since = ring.activity()
        if name != "ended" and proc.is_alive(ring.pid, None):
            return name, since
    return _ENDED
