"""Decides when a sample of the collectives begins and ends.

A sample lasts from one optimizer step to the next; in a loop without an optimizer, from one backward pass to the next.
It has a span for each collective (`kernels`), and a span of its own.

All ranks wait for the slowest rank in a collective. If the ranks sampled different steps, every sample would slow all
ranks down. So a sample is due when the wall clock passes a multiple of the interval, and begins after the next number
of optimizer steps that is a multiple of STEP_MULTIPLE. Every interval is 10 s times a power of two: a rank with a
longer interval samples some of the steps that the others sample.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic_ns, time_ns

import torch

from dpmon.record.span_format import SITE_AT, Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.collectives.kernels import CollectiveKernels
from dpmon.tracer.core.session import Session, raise_from_signal
from dpmon.tracer.steps.span_recorder import SpanRecorder

NEVER = 1 << 62
WAIT_NS, SOON_NS = 1_000_000_000, 50_000_000
"""Interval between checks for a process group (WAIT_NS), and between checks for an open ring (SOON_NS)."""
LOOK_NS = 500_000_000
"""Interval between checks whether a sample is due or a reader has requested one."""
STEP_MULTIPLE = 8
"""A sample begins after a number of optimizer steps that is a multiple of this."""
FIRST_SAMPLE_DELAY_NS = 2_000_000_000
"""Least time before the first sample in a loop without an optimizer."""
MIN_INTERVAL_NS = 10_000_000_000
"""Time between two samples, unless a reader requests one."""
MAX_COST_SHARE = 0.002
"""Largest share of this process's time that samples may cost. The aim is at most 0.005 in total: ranks wait for each
other, so a step grows by the cost of up to two ranks (tests/benchmarks/bench_collectives.py)."""
MAX_SAMPLE_POLLS = 64
"""A sample ends after this many polls, even if no optimizer has stepped."""
RETRY_NS = 50_000_000
"""Time until the next attempt to register or remove the kernels, if another thread was in torch.distributed."""
MAX_FAILED_ATTEMPTS = 100
"""After this many failed attempts in a row, the reason for the missing samples is recorded."""
_OTHER_THREAD_REASON = "another thread of the process was in torch.distributed at every attempt to record a step"


class CollectiveSampler:
    """The sampler of one process's collectives."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self._kernels = CollectiveKernels(session, recorder)
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._kernels.reset()
        self._has_group = self._has_given_up = False
        """Whether there is a process group; whether no more samples are taken."""
        self._failed_attempts = 0
        """Failed attempts to begin a sample since the last sample."""
        self._start_progress = 0, 0
        """The value of `_progress` at the start of the sample."""
        self._poll_count = 0
        """Number of polls since the start of the sample."""
        self._due_ns = self._group_ns = self._interval_ns = 0
        """When the next sample is due, and when the process group was found (monotonic ns); time between samples."""
        self._first_step = 0
        """Number of optimizer steps at which the next sample begins; 0 until it is due."""
        self._handled_request = 0
        """Number of the last request that was handled."""

    def poll(self, now: int) -> int:
        """Begin or end a sample if it is time to, between two steps. Return when to call again (monotonic ns)."""
        if self._has_given_up:
            return NEVER
        try:
            return self._poll(now)
        except Exception as error:  # noqa: BLE001 - the training continues
            raise_from_signal(error)
            self._has_given_up = True
            with suppress(Exception):
                self._kernels.remove()
            self._kernels.is_on = False
            self._session.count_error("collectives of a step", error, fatal=False)
            return NEVER

    def _poll(self, now: int) -> int:
        if not self._has_group:
            return self._find_group(now)
        if self._kernels.is_on:
            self._poll_count += 1
            if not self._is_over() and self._poll_count < MAX_SAMPLE_POLLS:
                return 0
            return min(now + LOOK_NS, self._due_ns) if self._end() else now + RETRY_NS
        request = self._recorder.words[HeaderWord.SAMPLE]
        if request == self._handled_request and now < self._due_ns:
            return min(now + LOOK_NS, self._due_ns)
        if request == self._handled_request and not self._is_time(now):
            return 0
        if self._begin():
            self._handled_request, self._failed_attempts = request, 0
            return 0
        self._failed_attempts += 1
        if self._failed_attempts == MAX_FAILED_ATTEMPTS:
            self._record_no_sample_reason(now, _OTHER_THREAD_REASON)
        return now + RETRY_NS

    def _find_group(self, now: int) -> int:
        """Find out whether collectives can be recorded now. Return when to poll again."""
        if self._session.ring is None:
            return now + SOON_NS
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return now + WAIT_NS
        if self._kernels.inherited:
            self._has_given_up = True
            self._record_no_sample_reason(now, "the process was forked while its parent recorded collectives")
            return NEVER
        self._has_group, self._group_ns, self._interval_ns = True, now, MIN_INTERVAL_NS
        return 0

    def _record_no_sample_reason(self, now: int, reason: str) -> None:
        """Record why there are no samples."""
        definition = self._session.define(("collectives", reason), lambda: {"operation": None, "why": reason})
        self._recorder.put(
            Kind.COLLECTIVE | self._recorder.current_thread_state().thread_bits | definition << SITE_AT, now, 0, 0
        )

    def _progress(self) -> tuple[int, int]:
        """Return the number of optimizer steps; in a loop without an optimizer 0 and the number of backward passes."""
        recorder = self._recorder
        return recorder.optimizer_steps, 0 if recorder.optimizer_steps else recorder.backward_passes

    def _is_time(self, now: int) -> bool:
        """Return whether a sample that is due can begin at this step."""
        steps = self._recorder.optimizer_steps
        if not steps:
            return now - self._group_ns >= FIRST_SAMPLE_DELAY_NS
        self._first_step = self._first_step or (steps // STEP_MULTIPLE + 1) * STEP_MULTIPLE
        return steps >= self._first_step

    def _is_over(self) -> bool:
        """Return whether the sampled step has ended."""
        return self._progress() != self._start_progress or not self._recorder.has_run_backward

    def _begin(self) -> bool:
        """Begin a sample; return False if that is not possible now."""
        start_ns = monotonic_ns()
        self._start_progress, self._poll_count = self._progress(), 0
        try:
            if not self._kernels.register():
                return False
        except BaseException:
            self._kernels.remove()
            raise
        self._kernels.begin_sample(start_ns)
        return True

    def _end(self) -> bool:
        """End the sample; return False if that is not possible now."""
        kernels, now = self._kernels, monotonic_ns()
        if not kernels.remove():
            return False
        kernels.is_on = False
        # Another thread may be launching a collective. If it is counted, it began before this time.
        end_ns = monotonic_ns()
        self._recorder.put(
            Kind.COLLECTIVE | self._recorder.current_thread_state().thread_bits,
            kernels.start_ns,
            end_ns - kernels.start_ns,
            len(kernels.launches),
        )
        while kernels.cost_ns() + end_ns - now > self._interval_ns * MAX_COST_SHARE:
            self._interval_ns *= 2
        self._due_ns, self._first_step = now + self._interval_ns - time_ns() % self._interval_ns, 0
        return True

    def at_exit(self) -> None:
        """End the current sample."""
        if self._kernels.is_on:
            self._end()
        self._has_given_up = True
