"""Reads the state of a run's processes, and sends requests to them. dpmon.store.store_opening reads their records.

This module starts no threads, and writes only requests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpmon.record.shared_names import MODES
from dpmon.run import proc
from dpmon.run.activities import StartupStage, current_startup_stage, read_startup_stages
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

NO_TRAINING_MESSAGE = "no training process is running"
"""Why a request cannot be sent."""
_ENDED = ("ended", 0)
_PAUSE_REFUSED = "the ranks wait for each other, so their collectives would time out"


class PauseState(NamedTuple):
    """The last pause request, and whether the training is paused."""

    is_requested: bool = False
    """Whether a pause of at least one training process is pending or goes on."""
    is_pending: bool = False
    """Whether a process has not yet acted on the last request."""
    since_ns: int | None = None
    """When the last training process paused (monotonic; in `ScreenData`, since the run's start). None unless all are
    paused."""


Activities = Mapping[int, tuple[str, int]]
"""The activity of each training process, and its start (monotonic ns)."""


class RunReader:
    """A reader of the processes of the run in `directory`.

    A method with the parameter `activities` reads them again, unless the caller passes what `activities` has just
    returned.
    """

    def __init__(self, directory: Path, *, known_exit: Callable[[], ExitInfo | None] = lambda: None) -> None:
        """Open the run. Raises RunError if the directory is not a run of this user.

        `known_exit` returns how the run ended, if the caller knows it without a file; else None.
        """
        self.directory = directory
        self._known_exit = known_exit
        self._stamp = 0
        self.info: RunInfo = load_info(directory)
        self._rings: dict[str, SpanReader] = {}
        """Rings of training processes by file name."""
        self._mode_requests: dict[int, int] = {}
        """Serial of the last mode request, by process."""
        self._exit: ExitInfo | None = None
        self._mirror = MirrorState(directory, self.info.start_ns) if self.info.nodes else None
        """The state of a mirror, which has no rings; None on one machine."""

    def refresh(self) -> RunInfo:
        """Return the contents of run.json, read again if it was replaced; the old ones while it cannot be read."""
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

    def startup_stage(self) -> StartupStage | None:
        """Return the run's stage before its first call, and when it started (monotonic ns); None if unknown."""
        if self._mirror is not None:
            stage, since_ns = self._mirror.text_member("stage"), self._mirror.time_member("stage_ns")
            return None if stage is None or since_ns is None else StartupStage(stage, since_ns)
        return current_startup_stage(read_startup_stages(self.directory), lambda pid: proc.is_alive(pid, None))

    def input_wait_start_ns(self) -> int | None:
        """Return when the command began to wait for input (monotonic ns); None if it does not, or if unknown."""
        if self._mirror is not None:
            return self._mirror.time_member("input_ns")
        return input_wait_start_ns(self.directory)

    def activities(self) -> dict[int, tuple[str, int]]:
        """Return each training process's activity and its start (monotonic ns); "ended" also for a killed one."""
        if self._mirror is not None:
            return self._mirror.activities()
        for path in ring_paths(self.directory, self._rings):
            with contextlib.suppress(RingError, OSError):  # its header will be complete in a moment
                self._rings[path.name] = SpanReader(str(path))
        return {ring.process: _activity_of(ring) for ring in self._rings.values()}

    def exit_info(self) -> ExitInfo | None:
        """Return how the run ended; None while it runs."""
        if self._exit is None or not self._exit.drained:
            self._exit = load_exit(self.directory) or self._exit or self._known_exit()
        return self._exit

    def is_command_alive(self) -> bool | None:
        """Return whether the command runs; None before its start."""
        run_info = self.refresh() if self.info.command_pid is None else self.info
        return is_command_alive(run_info)

    # ------------------------------------------------------------------------------------------ requests

    def request_mode(self, mode: str) -> int:
        """Request `mode` (dp or single) of every training process. Return the number of processes or nodes.

        Raises ValueError for other modes.
        """
        mode_number = MODES.index(mode)

        def request(ring: SpanReader) -> None:
            self._mode_requests[ring.process] = ring.request(mode_number)

        return self._request_all({"ask": "mode", "mode": mode}, request)

    def has_pending_request(self, activities: Activities | None = None) -> bool:
        """Return whether a living process has not yet acted on the last mode request."""
        if self._mirror is not None:
            return self._mirror.state.get("pending") is True
        serials = ((ring.process, *ring.acknowledged()) for ring in self._live_rings(activities))
        return any(serial < self._mode_requests.get(process, 0) for process, serial, _ in serials)

    def request_pause(self, paused: bool) -> int:
        """Ask every training process to pause between two steps, or to resume. Return the number of processes or nodes.

        Does nothing and returns 0 if a pause is requested and `pause_refusal` returns a reason.
        """
        if paused and self.pause_refusal() is not None:
            return 0
        return self._request_all({"ask": "pause", "paused": paused}, lambda ring: ring.request_pause(paused))

    def request_sample(self) -> int:
        """Ask every training process to sample the collectives of a step soon. Return how many processes or nodes."""
        return self._request_all({"ask": "sample"}, SpanReader.request_sample)

    def request_profile(self, rank: int, steps: int) -> tuple[int, int] | None:
        """Ask a rank to profile steps (0: to end). Return its process and the request; None if no such rank runs here.

        A process that is no rank counts as rank 0.
        """
        ring = next((ring for ring in self._live_rings() if (ring.rank or 0) == rank), None)
        return None if ring is None else (ring.process, ring.request_profile(steps))

    def node_replies(self) -> NodeReplies | None:
        """Return the nodes' replies to the last request of this reader; None on one machine."""
        return None if self._mirror is None else self._mirror.replies()

    def request_records(self, processes: Collection[int]) -> None:
        """Subscribe to all records of these processes of a mirror, while this process lives. Raises OSError."""
        if self._mirror is not None:
            self._mirror.subscribe(processes)

    def pause_refusal(self, activities: Activities | None = None) -> str | None:
        """Return why the training cannot be paused now; None if a pause can be requested."""
        if self._mirror is not None:
            return self._mirror.text_member("refusal")
        rings = self._live_rings(activities)
        if not rings:
            return NO_TRAINING_MESSAGE
        return _PAUSE_REFUSED if any((ring.world or 1) > 1 for ring in rings) else None

    def pause_state(self) -> PauseState:
        """Return the last pause request, whether it is in force, and the start of the pause."""
        if self._mirror is not None:
            state = self._mirror.state
            return PauseState(
                state.get("wanted") is True, state.get("pausing") is True, self._mirror.time_member("paused_ns")
            )
        rings = self._live_rings()
        requests = [ring.pause_requests() for ring in rings]
        activities = [_activity_of(ring) for ring in rings]  # read last: a process has paused when it acknowledges
        paused = bool(activities) and all(activity == "paused" for activity, _ in activities)
        return PauseState(
            is_requested=any(
                wants_pause(request) and (request != acknowledged or activity == "paused")
                for (request, acknowledged), (activity, _) in zip(requests, activities, strict=True)
            ),
            is_pending=any(request != acknowledged for request, acknowledged in requests),
            since_ns=max(since_ns for _, since_ns in activities) if paused else None,
        )

    def _live_rings(self, activities: Activities | None = None) -> list[SpanReader]:
        activities = self.activities() if activities is None else activities
        return [ring for ring in self._rings.values() if activities.get(ring.process, _ENDED) != _ENDED]

    def _request_all(self, members: Mapping[str, Any], request: Callable[[SpanReader], object]) -> int:
        """Send a request to every training process, or its JSON to all nodes. Return how many could be reached."""
        if self._mirror is not None:
            return self._mirror.send_request(members)
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
    """Return the activity of a process and its start; "ended" also if it was killed, or if its ring cannot be read."""
    with contextlib.suppress(RingError, OSError):
        activity, since_ns = ring.activity()
        if activity != "ended" and proc.is_alive(ring.pid, None):
            return activity, since_ns
    return _ENDED
