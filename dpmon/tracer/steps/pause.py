"""Pauses the training between two steps, for as long as a reader of the ring requests it.

The training thread waits in short sleeps, so that Python can handle signals between them. If the supervisor dies, the
training resumes automatically.
"""

from __future__ import annotations

import fcntl
import os
from time import monotonic_ns, sleep

from dpmon.record.span_format import Kind
from dpmon.span_ring import HeaderWord, SpanRing, wants_pause
from dpmon.tracer.core.session import Session, rank_and_world
from dpmon.tracer.steps.span_recorder import SpanRecorder

POLL_INTERVAL_S = 0.025
CHECK_INTERVAL_NS = 500_000_000
"""Interval between checks that the supervisor is alive."""
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
    """Return why no supervisor could end a pause; None if the supervisor is alive: it holds a lock while it runs."""
    try:
        with open(os.path.join(session.config.directory, "supervisor.lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return f"the run's directory cannot be read ({error.strerror})"
    return "the supervisor has exited"
