"""A thread that answers for the training thread while the training is stuck.

While the training stands still, it writes once a second into the ring how many collectives this process has started in
each process group. On request it notes the stacks of all Python threads. It needs the GIL, so it gives no answer while
C code holds that. While the training goes on, it makes no objects: the collector of cycles could otherwise run in it,
and with it finalizers of the script.
"""

from __future__ import annotations

import contextlib
import os
import sys
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from signal import SIG_BLOCK, SIG_SETMASK, pthread_sigmask, valid_signals
from sys import _current_frames
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from zlib import crc32

from dpmon.record.shared_names import INNER_FRAMES, MAX_THREADS, OUTER_FRAMES, shorten_name, to_bounded_json
from dpmon.span_ring import MAX_GROUPS, NCCL_FLAG, NO_NUMBER, HeaderWord, SpanRing
from dpmon.tracer.core.session import Session
from dpmon.tracer.note_files import append_bytes

if TYPE_CHECKING:
    from dpmon.tracer.steps.span_recorder import SpanRecorder

LOOK_S = 0.25
GROUPS_EVERY = 4
"""The process groups are asked at one look in this many."""
STILL_NS = 2_000_000_000
"""And only if the training thread has begun nothing for this long."""
END_S = 0.5
"""Longest wait for the end of the thread."""
MAX_BYTES = 4 << 20
"""Most bytes of noted stacks of a process."""
_SET_PTRACER = 0x59616D61
"""PR_SET_PTRACER (linux/prctl.h)."""


def start_thread(function: Callable[..., object], *arguments: object) -> None:
    """Start a thread that the script does not see.

    It is in no list of `threading`, and takes no signal: the kernel would give it those that the script has blocked.
    """
    before = pthread_sigmask(SIG_BLOCK, ())
    try:
        pthread_sigmask(SIG_BLOCK, valid_signals())
        start_new_thread(function, arguments)
    finally:
        pthread_sigmask(SIG_SETMASK, before)


class ResponderThread:
    """The thread of one process."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Forget the thread, also in a forked child, which has none."""
        self._locks: tuple[Any, Any] | None = None
        """Released to end the thread, and released at its end."""

    def start(self, ring: SpanRing) -> None:
        """Start the thread for a new ring."""
        over, ended = allocate_lock(), allocate_lock()
        over.acquire()
        ended.acquire()
        with self._session.guard("the thread that watches", fatal=False):
            start_thread(self._run, ring, get_ident(), over, ended)
            self._locks = over, ended

    def at_exit(self) -> None:
        """End the thread. In a C++ function, it would abort the process if the interpreter ended meanwhile."""
        locks, self._locks = self._locks, None
        if locks is not None:
            over, ended = locks
            over.release()
            ended.acquire(True, END_S)

    def _run(self, ring: SpanRing, opener: int, over: Any, ended: Any) -> None:
        session, words = self._session, ring.words
        answered = allowed = looks = 0  # the ring is new: any request in it came while this thread started
        try:
            while not over.acquire(True, LOOK_S) and session.ring is ring and not session.off:
                looks += 1
                try:
                    if looks % GROUPS_EVERY == 0:
                        begun = words[HeaderWord.SPAN_START + words[HeaderWord.TRAINING_THREAD]]
                        if monotonic_ns() - begun > STILL_NS:
                            write_group_sequences(words)
                        elif words[HeaderWord.GROUPS]:
                            words[HeaderWord.GROUPS] = 0
                    if words[HeaderWord.PTRACER] != allowed:
                        allowed = words[HeaderWord.PTRACER]
                        _allow_ptrace_by(allowed)
                    if words[HeaderWord.STACKS] != answered:
                        answered = words[HeaderWord.STACKS]
                        line = (
                            to_bounded_json(
                                {"asked": answered, "threads": collect_stacks(self._training_thread_ident(opener))}
                            )
                            + b"\n"
                        )
                        _append_reply(session.config.directory, f"process-{session.process}.stacks", line)
                except OSError:  # the disk: the supervisor says that there is no answer
                    pass
                except Exception as error:  # noqa: BLE001 - an error here would be printed
                    session.count_error("the thread that watches", error, fatal=False)
        except BaseException:  # noqa: BLE001 - likewise
            pass
        ended.release()

    def _training_thread_ident(self, opener: int) -> int:
        """The ident of the training thread. `opener`: the thread that opened the ring, which is that as a rule."""
        training = self._recorder.training_thread
        return next((ident for ident, thread in list(self._recorder.threads.items()) if thread is training), opener)


def _append_reply(directory: str, file: str, line: bytes) -> None:
    """Append an answer to a file; begin it anew if it is full, because only the last answer is read."""
    if not append_bytes(directory, file, line, MAX_BYTES):
        os.unlink(os.path.join(directory, file))
        append_bytes(directory, file, line, MAX_BYTES)


def write_group_sequences(words: memoryview) -> None:
    """Write the sequence number of each process group into the ring."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    at = HeaderWord.GROUPS
    for group in tuple(world.pg_names)[:MAX_GROUPS] if world is not None else ():
        # Groups of different ranks may have the same name: torch counts them in each process.
        ranks = list(world.pg_group_ranks.get(group, ()))
        number = NO_NUMBER
        with contextlib.suppress(Exception):  # some backends have no sequence numbers
            number = group._get_sequence_number_for_group()
        words[at + 1] = number
        backends = getattr(world, "pg_backend_config", {}).get(group, "")
        nccl = NCCL_FLAG if "nccl" in backends else 0
        words[at] = crc32(f"{world.pg_names.get(group)} {ranks}".encode()) << 32 | nccl | max(len(ranks), 1)
        at += 2
    if at < HeaderWord.GROUPS + 2 * MAX_GROUPS:
        words[at] = 0


def collect_stacks(training: int) -> list[dict[str, Any]]:
    """The stacks of all Python threads but this one, in py-spy's form. `training`: ident of the training thread."""
    me, found = get_ident(), []
    for ident, frame in list(_current_frames().items())[:MAX_THREADS]:
        if ident == me:
            continue
        frames: list[tuple[str, str, int]] = []
        at: Any = frame
        while at is not None:
            code = at.f_code
            frames.append((code.co_filename, getattr(code, "co_qualname", code.co_name), at.f_lineno or 0))
            at = at.f_back
        left_out = max(len(frames) - INNER_FRAMES - OUTER_FRAMES, 0)
        if left_out:
            frames[INNER_FRAMES:-OUTER_FRAMES] = []
        found.append(
            {
                "thread_name": "MainThread" if ident == training else "",
                "os_thread_id": None,
                "left_out": left_out,
                "frames": [
                    {"filename": shorten_name(file), "name": shorten_name(name), "line": line}
                    for file, name, line in frames
                ],
            }
        )
    return found


def _allow_ptrace_by(pid: int) -> None:
    """Let the process `pid` look into this one, if it is not an ancestor and Yama restricts that to ancestors."""
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
