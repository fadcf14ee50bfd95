"""Pauses the training between two steps, for as long as a reader of the ring requests it.

The training thread waits in short sleeps, so that Python can handle signals between them. If the supervisor dies, the
training resumes automatically.
"""

from __future__ import annotations

import json
import os
from time import monotonic_ns, sleep
from typing import Any

from dpmon.record.span_format import Kind
from dpmon.span_ring import HeaderWord, SpanRing, wants_pause
from dpmon.tracer.core.session import Session, rank_and_world
from dpmon.tracer.steps.span_recorder import SpanRecorder

POLL_INTERVAL_S = 0.025
CHECK_INTERVAL_NS = 500_000_000
"""Interval between checks that the supervisor is alive."""
MAX_INFO_BYTES = 1 << 22
_START_FIELD = 18
"""Index of the start time (in ticks) among the fields after the state in /proc/<pid>/stat (proc_pid_stat(5))."""

_RANKS_REASON = (
    "the ranks of a distributed training wait for each other in collectives, which time out after some minutes: "
    "a paused rank would make the others fail"
)


class Pauser:
    """The part of one process's tracer that carries out requests to pause."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self.session = session
        self.recorder = recorder
        self._last_request = 0
        """The last request seen."""

    def wait(self) -> None:
        """Handle the last request: wait if it requests a pause.

        Raises only exceptions of the script's signal handlers. Such an exception ends the pause even if the pause is
        still requested, so that the script can end.
        """
        session, ring = self.session, self.session.ring
        if ring is None:
            return
        words = ring.words
        self._last_request = request = words[HeaderWord.PAUSE]
        try:
            if wants_pause(request):
                world = max(session.world_size or 1, rank_and_world()[1] or 1)
                refusal = _RANKS_REASON if world > 1 else _why_unsupervised(session)
                if refusal is None:
                    self._wait(ring)
                else:
                    session.record_event(
                        "pause", "last", paused=False, step=None, paused_s=0.0, reason=None, refused=refusal
                    )
        finally:
            request = words[HeaderWord.PAUSE]
            words[HeaderWord.PAUSED] = self._last_request if wants_pause(request) else request

    def _wait(self, ring: SpanRing) -> None:
        """Wait until the pause ends, and record its begin and end."""
        session, words, thread = self.session, ring.words, self.recorder.current_thread_state()
        start_ns = checked_ns = monotonic_ns()
        reason: str | None = "interrupted"
        try:
            session.record_event("pause", "last", paused=True, step=None, paused_s=None, reason=None, refused=None)
            while True:
                self._last_request = request = words[HeaderWord.PAUSE]
                if not wants_pause(request):
                    reason = None
                    break
                words[thread.start_word] = start_ns
                self.recorder.open_kinds[thread.number] = Kind.PAUSE
                words[HeaderWord.PAUSED] = request
                sleep(POLL_INTERVAL_S)
                if self.recorder.device_timer is not None:
                    self.recorder.device_timer.write_known_times()
                now = monotonic_ns()
                if now - checked_ns >= CHECK_INTERVAL_NS:
                    checked_ns = now
                    reason = _why_unsupervised(session)
                    if reason is not None:
                        session.warn(f"the paused training resumed automatically: {reason}")
                        break
                    reason = "interrupted"
        except BaseException:
            self._last_request = words[HeaderWord.PAUSE]
            raise
        finally:
            now = monotonic_ns()
            words[thread.start_word] = now
            self.recorder.open_kinds[thread.number] = 0
            self.recorder.put(Kind.PAUSE | thread.thread_bits, start_ns, now - start_ns, 0)
            paused_s = (now - start_ns) / 1e9
            session.record_event(
                "pause", "last", paused=False, step=None, paused_s=paused_s, reason=reason, refused=None
            )


def _why_unsupervised(session: Session) -> str | None:
    """Return why no supervisor could end a pause; None if the supervisor is alive."""
    try:
        path = os.path.join(session.config.directory, "run.json")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            run_info: Any = json.loads(file.read(MAX_INFO_BYTES))
        pid, started_s = run_info["supervisor_pid"], run_info["supervisor_started"]
    except OSError as error:
        return f"the run's directory cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError):
        return "run.json does not name the supervisor of the run"
    return None if _is_alive(pid, started_s) else "the supervisor has exited"


def _is_alive(pid: object, started_s: object) -> bool:
    """Return whether the process `pid`, which started `started_s` seconds after boot, is still running."""
    if type(pid) is not int or not isinstance(started_s, (int, float)):
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself contain blanks and parentheses.
            _, _, text = file.read(4096).rpartition(b")")
        state, *fields = text.split()
        start_ticks, ticks_per_s = int(fields[_START_FIELD]), os.sysconf("SC_CLK_TCK")
        return state not in (b"Z", b"X", b"x") and abs(start_ticks / ticks_per_s - started_s) < 1.5 / ticks_per_s
    except (OSError, ValueError, LookupError):
        return False
