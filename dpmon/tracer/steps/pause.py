"""Pauses the training between two steps, for as long as a reader of the ring requests it.

The training thread waits here in short sleeps, so that Python handles signals in between as usual. If the supervisor
dies, the training resumes by itself.
"""

from __future__ import annotations

import json
import os
import stat
from time import monotonic_ns, sleep
from typing import Any

from dpmon.record.span_format import Kind
from dpmon.span_ring import HeaderWord, SpanRing, wants_pause
from dpmon.tracer.core.session import Session, rank_and_world
from dpmon.tracer.steps.span_recorder import SpanRecorder

POLL_S = 0.025
LOOK_NS = 500_000_000
"""Interval between checks that the supervisor is alive."""
MAX_INFO_BYTES = 1 << 22

_RANKS = (
    "the ranks of a distributed training wait for each other in collectives, which time out after some minutes: "
    "a paused rank would end the others"
)


class Pauser:
    """Pauses the training of one process."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self.session = session
        self.recorder = recorder
        self._asked = 0
        """The last request seen."""

    def wait(self) -> None:
        """Act on the last request; wait if it requests a pause.

        Raises only exceptions of the script's signal handlers. Such an exception ends the pause even if it is still
        requested, so that the script can end.
        """
        session, ring = self.session, self.session.ring
        if ring is None:
            return
        words = ring.words
        self._asked = asked = words[HeaderWord.PAUSE]
        try:
            if wants_pause(asked):
                world = max(session.world or 1, rank_and_world()[1] or 1)
                refused = _RANKS if world > 1 else _why_unsupervised(session)
                if refused is None:
                    self._wait(ring)
                else:
                    session.record_event(
                        "pause", "last", paused=False, step=None, paused_s=0.0, reason=None, refused=refused
                    )
        finally:
            words[HeaderWord.PAUSED] = self._asked if wants_pause(words[HeaderWord.PAUSE]) else words[HeaderWord.PAUSE]

    def _wait(self, ring: SpanRing) -> None:
        session, words, me = self.session, ring.words, self.recorder.current_thread_state()
        began = looked = monotonic_ns()
        reason: str | None = "interrupted"
        try:
            session.record_event("pause", "last", paused=True, step=None, paused_s=None, reason=None, refused=None)
            while True:
                self._asked = asked = words[HeaderWord.PAUSE]
                if not wants_pause(asked):
                    reason = None
                    break
                words[HeaderWord.PAUSED] = asked
                words[me.word] = began
                self.recorder.kinds[me.number] = Kind.PAUSE
                sleep(POLL_S)
                if self.recorder.timing is not None:
                    self.recorder.timing.write_known_times()
                now = monotonic_ns()
                if now - looked >= LOOK_NS:
                    looked = now
                    reason = _why_unsupervised(session)
                    if reason is not None:
                        session.warn(f"the paused training continued by itself: {reason}")
                        break
                    reason = "interrupted"
        except BaseException:
            self._asked = words[HeaderWord.PAUSE]
            raise
        finally:
            now = monotonic_ns()
            words[me.word] = now
            self.recorder.kinds[me.number] = 0
            self.recorder.put(Kind.PAUSE | me.head, began, now - began, 0)
            paused_s = (now - began) / 1e9
            session.record_event(
                "pause", "last", paused=False, step=None, paused_s=paused_s, reason=reason, refused=None
            )


def _why_unsupervised(session: Session) -> str | None:
    """Return why no supervisor could end a pause; None if the supervisor is alive."""
    try:
        path = os.path.join(session.config.directory, "run.json")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            os.close(fd)
            return "run.json is not a regular file that belongs to you"
        with open(fd, "rb") as file:
            info: Any = json.loads(file.read(MAX_INFO_BYTES))
        pid, since = info["supervisor_pid"], info["supervisor_started"]
    except OSError as error:
        return f"the run's directory cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, RecursionError):
        return "run.json does not name the supervisor of the run"
    return None if _alive(pid, since) else "the supervisor is gone"


def _alive(pid: object, since: object) -> bool:
    """Whether the process `pid`, started `since` seconds after boot, still runs."""
    if type(pid) is not int or not isinstance(since, (int, float)):
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself contain blanks and parentheses.
            fields = file.read(4096).rpartition(b")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        return fields[0] not in (b"Z", b"X", b"x") and abs(int(fields[19]) / ticks - since) < 1.5 / ticks
    except (OSError, ValueError, LookupError):
        return False
