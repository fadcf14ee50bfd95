"""Finds when sampled collectives on the CPU end.

A thread polls `is_completed` of each unfinished collective. It starts with the first one. It drops the Work object,
which may hold tensors, on completion or after MAX_WAIT_NS. The thread never blocks on a collective, and it registers no
callbacks. A recorded end is late by up to 0.1 ms or a twentieth of the collective's duration.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from contextlib import suppress
from time import monotonic_ns, sleep, thread_time_ns
from typing import Any, NamedTuple

from dpmon.record.shared_names import Unended
from dpmon.record.span_format import FLAGS_AT, Flag
from dpmon.tracer.core.session import Session
from dpmon.tracer.responder_thread import start_thread
from dpmon.tracer.steps.span_recorder import SpanRecorder

DISPATCH_NS = 15_000
"""Cost of a kernel outside its own code: the dispatcher converts the arguments and waits for the GIL."""
MAX_WAIT_NS = 10_000_000_000
_SHORTEST_S, _LONGEST_S = 50e-6, 5e-3
"""Limits of the time between two polls."""
_DRAIN_S = 0.05
"""Longest wait for the polling thread at the end of the process."""


class SampleCost:
    """The collectives in the current sample, and the cost of the sample."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether a sample is running."""
        self.reset()

    def reset(self) -> None:
        """Clear the counts."""
        self.launches: list[None] = []
        """One entry for each collective. Threads that add entries at the same time lose none; a sum could lose some."""
        self.start_ns = 0
        """Start of the sample (monotonic ns)."""
        self.own_ns = self.polled_ns = 0
        """Time spent in the kernels of the collectives and in polling (ns)."""

    def cost_ns(self) -> int:
        """Return the cost of the sample so far (ns)."""
        return self.own_ns + self.polled_ns + len(self.launches) * DISPATCH_NS


class PendingCollective(NamedTuple):
    """An unfinished collective."""

    work: Any
    """The torch.distributed.Work of the collective."""
    first_word: int
    """First word of its span."""
    start: int
    bytes: int


class CompletionPoller:
    """A poller that waits for the ends of one process's collectives, and writes their spans."""

    def __init__(self, session: Session, recorder: SpanRecorder, sample: SampleCost) -> None:
        self._session = session
        self._recorder = recorder
        self._sample = sample
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self.failed = False
        """Whether a fault of ours has ended the polling thread."""
        self._new: deque[PendingCollective] = deque()
        self._life = object()
        """Token of the polling thread. When it is replaced, the thread ends."""
        self._polling = False
        self._wake = allocate_lock()
        """Released to wake the polling thread. An interrupt in `set` could leave a threading.Event unusable."""
        self._wake.acquire()

    def add(self, collective: PendingCollective) -> None:
        """Write the span of a collective once it has ended."""
        self._new.append(collective)
        if self._polling:
            self._wake_thread()
        else:  # the thread sets `_polling`: if it were set here, an interrupt could leave it true without a thread
            start_thread(self._poll, self._life)

    def _wake_thread(self) -> None:
        """Wake the polling thread, now or when it is about to wait."""
        with suppress(RuntimeError):  # it is already awake
            self._wake.release()

    def _poll(self, token: object) -> None:
        """Poll the unfinished collectives until `stop`, or until this process is forked."""
        self._polling = True
        pending: list[PendingCollective] = []
        new_collectives, before = self._new, thread_time_ns()
        try:
            while self._life is token:
                while new_collectives:
                    with suppress(IndexError):  # two polling threads may run for a moment
                        pending.append(new_collectives.popleft())
                pending = [collective for collective in pending if not self._write_if_done(collective)]
                before_ns, before = before, thread_time_ns()
                self._sample.polled_ns += before - before_ns
                if pending:
                    sleep(min(max((monotonic_ns() - pending[-1].start) / 20e9, _SHORTEST_S), _LONGEST_S))
                else:
                    self._wake.acquire()
            for collective in pending:
                self._write(collective, Unended.ENDED)
        except Exception as error:  # noqa: BLE001 - only ends are lost
            self.failed = True
            self._session.count_error("collectives of a step", error, fatal=False)
        self._polling = False
        self._wake_thread()  # wakes the other polling thread, if two were started

    def _write_if_done(self, collective: PendingCollective) -> bool:
        """Write the span of a collective if it has ended or the wait is too long; return whether it was written."""
        if collective.work.is_completed():
            self._recorder.put(
                collective.first_word, collective.start, monotonic_ns() - collective.start, collective.bytes
            )
            return True
        if monotonic_ns() - collective.start < MAX_WAIT_NS:
            return False
        self._write(collective, Unended.LATE)
        return True

    def _write(self, collective: PendingCollective, reason: int) -> None:
        self._recorder.put(collective.first_word | Flag.UNENDED << FLAGS_AT, collective.start, reason, collective.bytes)

    def stop(self) -> None:
        """End the polling thread and wait briefly for it: it must not run while the interpreter ends."""
        self._life = object()
        self._wake_thread()
        deadline_ns = monotonic_ns() + int(_DRAIN_S * 1e9)
        while self._polling and monotonic_ns() < deadline_ns:
            sleep(_SHORTEST_S)
        while self._new:  # the thread has not run since they were launched
            with suppress(IndexError):
                self._write(self._new.popleft(), Unended.ENDED)
