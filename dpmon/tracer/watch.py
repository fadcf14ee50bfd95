"""A thread that answers for the training thread while that one is stuck.

Once a second it writes into the ring how many collectives this process has started in each process group. On request it
notes the stacks of all Python threads. The thread needs the GIL, so it gives no answer while C code holds that.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import time
from typing import Any
from zlib import crc32

from dpmon.record.names import packed_json, shortened
from dpmon.span_ring import MAX_GROUPS, SpanRing, Word
from dpmon.tracer.append import append
from dpmon.tracer.core.session import Session

LOOK_S = 0.25
GROUPS_EVERY = 4
"""The process groups are asked at one look in this many."""
MAX_BYTES = 4 << 20
"""Most bytes of noted stacks of a process."""
INNER, OUTER, MAX_THREADS = 100, 20, 64
"""The frames of a deep stack that are noted, and the most threads."""
_SET_PTRACER = 0x59616D61
"""PR_SET_PTRACER (linux/prctl.h)."""


class Watch:
    """The thread of one process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def start(self, ring: SpanRing) -> None:
        """Start the thread for a new ring, also in a forked child."""
        # Not a threading.Thread: the script must not see it in threading.enumerate(), nor wait for it at its end.
        with self._session.guarded("the thread that watches", fatal=False):
            _thread.start_new_thread(self._run, (ring, _thread.get_ident()))

    def _run(self, ring: SpanRing, training: int) -> None:
        session, words = self._session, ring.words
        answered, allowed, looks = words[Word.STACKS], 0, 0
        with contextlib.suppress(BaseException):  # a fault here must not end up in the script's output
            while session.ring is ring and not session.off:
                time.sleep(LOOK_S)
                if looks % GROUPS_EVERY == 0:
                    note_groups(words)
                looks += 1
                if words[Word.PTRACER] != allowed:
                    allowed = words[Word.PTRACER]
                    _allow(allowed)
                if words[Word.STACKS] != answered:
                    answered = words[Word.STACKS]
                    line = packed_json({"asked": answered, "threads": stacks(training)}) + b"\n"
                    append(session.config.directory, f"process-{session.process}.stacks", line, MAX_BYTES)


def note_groups(words: memoryview) -> None:
    """Write the sequence number of each process group into the ring."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    at = Word.GROUPS
    for group, name in list(world.pg_names.items())[:MAX_GROUPS] if world is not None else ():
        with contextlib.suppress(Exception):  # some backends have no sequence numbers
            words[at + 1] = group._get_sequence_number_for_group()
            words[at] = crc32(str(name).encode()) << 32 | min(group.size(), (1 << 31) - 1)
            at += 2
    if at < Word.GROUPS + 2 * MAX_GROUPS:
        words[at] = 0


def stacks(training: int) -> list[dict[str, Any]]:
    """The stacks of all Python threads but this one, innermost call first. `training`: ident of the training thread."""
    me, found = _thread.get_ident(), []
    for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]:
        if ident == me:
            continue
        frames: list[tuple[str, str, int]] = []
        at: Any = frame
        while at is not None:
            code = at.f_code
            frames.append((code.co_filename, getattr(code, "co_qualname", code.co_name), at.f_lineno or 0))
            at = at.f_back
        left_out = max(len(frames) - INNER - OUTER, 0)
        if left_out:
            frames[INNER:-OUTER] = []
        found.append(
            {
                "training": ident == training,
                "left_out": left_out,
                "frames": [(shortened(file), shortened(name), line) for file, name, line in frames],
            }
        )
    return found


def _allow(pid: int) -> None:
    """Let the process `pid` look into this one, if it is not an ancestor and Yama restricts that to ancestors."""
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
