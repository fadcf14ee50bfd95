"""A background thread that replies to requests while the training thread is stuck.

While there is no progress, it writes once per second into the ring how many collectives this process has started in
each process group. On request, it writes the stacks of all Python threads to a file. It needs the GIL, so it cannot
reply while C code holds the GIL. While the training makes progress, it allocates no objects: otherwise, the cyclic
garbage collector could run on it, and with it finalizers of the script. It starts another thread to sample a
slow loader.
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
from dpmon.record.span_format import Kind
from dpmon.span_ring import MAX_GROUPS, NO_NUMBER, HeaderWord, SpanRing
from dpmon.tracer.core.hidden_frames import iter_callers
from dpmon.tracer.core.session import Session
from dpmon.tracer.note_files import write_file
from dpmon.tracer.steps.loader_stacks import record_loader_lines

if TYPE_CHECKING:
    from dpmon.tracer.steps.span_recorder import SpanRecorder

POLL_INTERVAL_S = 0.25
GROUPS_INTERVAL_POLLS = 4
"""The sequence numbers of the process groups are read once in this many polls."""
MIN_IDLE_NS = 2_000_000_000
"""They are read only if the training thread has begun no span for this long."""
MIN_DATA_SHARE, DATA_POLLS, LOADER_INTERVAL_POLLS = 0.2, 80, 720
"""A loader is sampled if this share of about the last DATA_POLLS polls (20 s) fell in a fetch, at most every 3 min."""
MAX_END_WAIT_S = 0.5
"""Longest wait for the end of the thread."""


def start_thread(function: Callable[..., object], *arguments: object) -> None:
    """Start a thread that the script does not see.

    `threading` does not list it, and it blocks all signals: otherwise it would receive those that the script blocks.
    """
    old_mask = pthread_sigmask(SIG_BLOCK, ())
    try:
        pthread_sigmask(SIG_BLOCK, valid_signals())
        start_new_thread(function, arguments)
    finally:
        pthread_sigmask(SIG_SETMASK, old_mask)


class ResponderThread:
    """The responder thread of one process."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Forget the thread, also in a forked child, which has none."""
        self._locks: tuple[Any, Any] | None = None
        """A lock that is released to stop the thread, and a lock that the thread releases when it ends."""

    def start(self, ring: SpanRing) -> None:
        """Start the thread for a new ring."""
        stop_lock, ended_lock = allocate_lock(), allocate_lock()
        stop_lock.acquire()
        ended_lock.acquire()
        with self._session.guard("the thread that watches", fatal=False):
            start_thread(self._run, ring, get_ident(), stop_lock, ended_lock)
            self._locks = stop_lock, ended_lock

    def at_exit(self) -> None:
        """End the thread. If the interpreter ended while the thread is in a C++ function, the process would abort."""
        locks, self._locks = self._locks, None
        if locks is not None:
            stop_lock, ended_lock = locks
            stop_lock.release()
            ended_lock.acquire(True, MAX_END_WAIT_S)

    def _run(self, ring: SpanRing, opener: int, stop_lock: Any, ended_lock: Any) -> None:
        """Poll the ring for requests until the thread is stopped. `opener`: the thread that opened the ring."""
        session, words = self._session, ring.words
        handled_request = poll_count = loader_due = 0  # requests in a new ring came while this thread started
        data_share = 0.0
        try:
            while not stop_lock.acquire(True, POLL_INTERVAL_S) and session.ring is ring and not session.is_off:
                poll_count += 1
                try:
                    is_fetching = ring.kinds[words[HeaderWord.TRAINING_THREAD]] == Kind.FETCH
                    data_share += (is_fetching - data_share) / DATA_POLLS
                    if data_share >= MIN_DATA_SHARE and poll_count >= loader_due:
                        loader_due = poll_count + LOADER_INTERVAL_POLLS
                        start_thread(record_loader_lines, session)
                    if poll_count % GROUPS_INTERVAL_POLLS == 0:
                        start_ns = words[HeaderWord.SPAN_START + words[HeaderWord.TRAINING_THREAD]]
                        if monotonic_ns() - start_ns > MIN_IDLE_NS:
                            write_group_sequences(words)
                        elif words[HeaderWord.GROUPS]:
                            words[HeaderWord.GROUPS] = 0
                    if words[HeaderWord.STACKS] != handled_request:
                        handled_request = words[HeaderWord.STACKS]
                        stacks = collect_stacks(self._training_thread_ident(opener))
                        line = to_bounded_json({"asked": handled_request, "threads": stacks}) + b"\n"
                        file = f"process-{session.process_index}.stacks"
                        write_file(session.config.directory, file, line, os.O_TRUNC)
                except OSError:  # the disk: the supervisor says that there is no answer
                    pass
                except Exception as error:  # noqa: BLE001 - an error here would be printed
                    session.count_error("the thread that watches", error, fatal=False)
        except BaseException:  # noqa: BLE001 - likewise
            pass
        ended_lock.release()

    def _training_thread_ident(self, opener: int) -> int:
        """Return the ident of the training thread; `opener` if it is not known, because that usually trains."""
        trainer = self._recorder.training_thread
        return next((ident for ident, thread in list(self._recorder.threads.items()) if thread is trainer), opener)


def write_group_sequences(words: memoryview) -> None:
    """Write the sequence number of each process group into the ring."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    index = HeaderWord.GROUPS
    for group in tuple(world.pg_names)[:MAX_GROUPS] if world is not None else ():
        # Groups of different ranks may have the same name: torch counts them in each process.
        ranks = list(world.pg_group_ranks.get(group, ()))
        sequence = NO_NUMBER
        with contextlib.suppress(Exception):  # some backends have no sequence numbers
            sequence = group._get_sequence_number_for_group()
        words[index + 1] = sequence
        words[index] = crc32(f"{world.pg_names.get(group)} {ranks}".encode()) << 32 | max(len(ranks), 1)
        index += 2
    if index < HeaderWord.GROUPS + 2 * MAX_GROUPS:
        words[index] = 0


def collect_stacks(training_ident: int) -> list[dict[str, Any]]:
    """Return the stacks of all Python threads but this one, in py-spy's form. `training_ident`: the training thread."""
    threads, stacks = _current_frames(), []
    del threads[get_ident()]
    for ident, innermost in list(threads.items())[:MAX_THREADS]:
        frames = [(frame.f_code, frame.f_lineno or 0) for frame in iter_callers(innermost)]
        omitted = max(len(frames) - INNER_FRAMES - OUTER_FRAMES, 0)
        if omitted:
            frames[INNER_FRAMES:-OUTER_FRAMES] = []
        stacks.append(
            {
                "thread_name": "MainThread" if ident == training_ident else "",
                "os_thread_id": None,
                "left_out": omitted,
                "frames": [
                    {"filename": shorten_name(code.co_filename), "name": shorten_name(code.co_qualname), "line": line}
                    for code, line in frames
                ],
            }
        )
    return stacks
