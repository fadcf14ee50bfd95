"""Decides when a sample of the collectives begins and ends.

A sample has a span for each collective (`kernels`, `completion_poller`) and a span for the whole sample. The end of a
collective on a GPU stays unknown: the host would have to query events of a stream that may be capturing a graph. The
end of a reduce_scatter of gloo stays unknown, too: its Work never reports completion.

All ranks wait for the slowest rank in a collective. If the ranks sampled different steps, every sample would slow all
ranks down. So a rank samples when its number of optimizer steps is a multiple of its distance, and every distance is a
power of two: ranks with the same distance sample the same steps, and a rank with a larger distance samples some of
them. In a loop without an optimizer, the time decides.

A sample should hold one training step. `poll` checks it between steps. If it holds collectives but no backward pass has
ended since the last poll, the collectives come from an evaluation: the sample is discarded, and another sample follows
the next optimizer step. After several discarded samples in a row, the next sample is kept as it is.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic_ns

import torch

from dpmon.record.span_format import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.collectives.completion_poller import CompletionPoller, SampleCost
from dpmon.tracer.collectives.kernels import CollectiveKernels, missing_torch_features
from dpmon.tracer.core.session import Session, raise_from_signal
from dpmon.tracer.steps.span_recorder import SpanRecorder

NEVER = 1 << 62
WAIT_NS, SOON_NS = 1_000_000_000, 50_000_000
"""Interval between checks for a process group (WAIT_NS), and between checks for an open ring (SOON_NS)."""
LOOK_NS = 500_000_000
"""Interval between checks whether a reader has requested a sample."""
STEPS_BEFORE_FIRST_SAMPLE = 8
"""Optimizer steps before the first sample."""
MIN_DISTANCE, MAX_DISTANCE = 4, 1 << 16
"""Limits of the optimizer steps between two samples."""
SHARE = 0.002
"""Largest share of this process's time that samples may cost. The aim is at most 0.005 in total: ranks wait for each
other, so a step grows by the cost of up to two ranks (tests/benchmarks/bench_collectives.py)."""
MIN_SAMPLE_INTERVAL_NS = 10_000_000_000
"""Least time between two samples, unless a reader requests one or a sample is discarded."""
FIRST_SAMPLE_DELAY_NS = 2_000_000_000
"""Least time before the first sample in a loop without an optimizer."""
MAX_SAMPLE_POLLS = 64
"""A sample ends after this many polls, even if no optimizer has stepped."""
MAX_DISCARDED = 4
"""How many samples are discarded in a row. Without a limit, a loop with collectives but no backward pass between polls
would have all its samples discarded."""
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
        self._sample = SampleCost()
        self._poller = CompletionPoller(session, recorder, self._sample)
        self._kernels = CollectiveKernels(session, recorder, self._poller, self._sample)
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._sample.reset()
        self._sample.is_on = False
        self._poller.reset()
        self._kernels.reset()
        self._failed_attempts = 0
        """Failed attempts to begin a sample since the last sample."""
        self._ready = False
        """Whether there is a process group and torch has the functions needed."""
        self._given_up = False
        self._start_step = self._poll_count = 0
        """Number of optimizer steps at the start of the sample; number of polls since then."""
        self._backwards = 0
        """Number of backward passes at the last poll."""
        self._is_mixed = False
        """Whether the sample holds collectives that do not belong to one training step."""
        self._discarded = 0
        """Number of samples discarded in a row."""
        self._is_discarded = False
        """Whether this sample or the last one is discarded, so that another follows as soon as possible."""
        self._spent = 0
        """Cost of all samples since the distance was last set (ns)."""
        self._last_schedule_ns = self._last_schedule_step = 0
        """Time and number of optimizer steps when the distance was last set."""
        self._step_interval = 0
        """Distance: optimizer steps from one sample to the next."""
        self._earliest = 0
        """When the next sample may be taken."""
        self._handled_request = 0
        """Number of the last request that was handled."""

    # ---------------------------------------------------------------- between two steps

    def poll(self, now: int) -> int:
        """Begin or end a sample if it is time to; return when to call again (monotonic ns)."""
        if self._poller.failed and not self._given_up:
            self._give_up()
        if self._given_up:
            return NEVER
        try:
            if self._sample.is_on:
                return self._end_if_over(now)
            if not self._ready and not self._is_usable(now):
                wait_ns = SOON_NS if self._session.ring is None else WAIT_NS
                return NEVER if self._given_up else now + wait_ns
            asked = self._recorder.words[HeaderWord.SAMPLE]
            if asked != self._handled_request or self._is_time(now):
                if not self._begin():
                    self._failed_attempts += 1
                    if self._failed_attempts == MAX_FAILED_ATTEMPTS:
                        self._record_no_sample_reason(now, _OTHER_THREAD_REASON)
                    return now + RETRY_NS
                self._handled_request = asked
                return 0
            return 0 if self._is_discarded and not self._recorder.optimizer_steps else now + LOOK_NS
        except Exception as error:  # noqa: BLE001 - the training continues
            raise_from_signal(error)
            self._give_up()
            self._session.count_error("collectives of a step", error, fatal=False)
            return NEVER

    def _give_up(self) -> None:
        """Take no more samples, and leave the current sample without an end."""
        self._given_up = True
        with suppress(Exception):
            self._kernels.remove()
        self._sample.is_on = False

    def _is_usable(self, now: int) -> bool:
        """Return whether collectives can be recorded now."""
        distributed = torch.distributed
        if self._session.ring is None or not (distributed.is_available() and distributed.is_initialized()):
            return False
        reason = missing_torch_features() or (
            self._kernels.inherited and "the process was forked while its parent recorded collectives"
        )
        if reason:
            self._given_up = True
            self._record_no_sample_reason(now, reason)
            return False
        recorder = self._recorder
        self._ready = True
        self._last_schedule_ns, self._last_schedule_step = now, recorder.optimizer_steps
        self._step_interval = STEPS_BEFORE_FIRST_SAMPLE
        self._schedule_next()
        return True

    def _record_no_sample_reason(self, now: int, reason: str) -> None:
        """Record why there are no samples."""
        definition = self._session.define(("collectives", reason), lambda: {"operation": None, "why": reason})
        self._recorder.put(
            Kind.COLLECTIVE | self._recorder.current_thread_state().thread_bits | definition << SITE_AT, now, 0, 0
        )

    def _schedule_next(self) -> None:
        """Schedule a sample for the next number of optimizer steps that is a multiple of the distance."""
        self._recorder.sample_step = (self._recorder.optimizer_steps // self._step_interval + 1) * self._step_interval

    def _is_time(self, now: int) -> bool:
        """Return whether to take a sample now. Before `_earliest`, move it to the next multiple of the distance."""
        recorder = self._recorder
        if not recorder.optimizer_steps:
            ready = recorder.backward_passes != self._backwards or not self._is_discarded
            return ready and now >= max(self._earliest, self._last_schedule_ns + FIRST_SAMPLE_DELAY_NS)
        if recorder.optimizer_steps < recorder.sample_step:
            return False
        if now < self._earliest:
            self._schedule_next()
            return False
        return True

    def _begin(self) -> bool:
        """Begin a sample; return False if that is not possible now."""
        start_ns = monotonic_ns()
        self._start_step, self._backwards = self._recorder.optimizer_steps, self._recorder.backward_passes
        self._is_mixed = self._is_discarded = False
        self._recorder.sample_step = self._start_step + 1  # check after this step, even after an interrupt
        self._poll_count = 0
        self._sample.reset()
        try:
            if not self._kernels.register():
                return False
        except BaseException:
            self._kernels.remove()
            raise
        self._sample.start_ns = monotonic_ns()
        self._sample.own_ns += self._sample.start_ns - start_ns
        self._failed_attempts = 0
        self._sample.is_on = True
        return True

    def _end_if_over(self, now: int) -> int:
        """End the sample if its step has ended, or if it holds an evaluation's collectives; return when to poll."""
        recorder = self._recorder
        self._poll_count += 1
        if not self._is_over():
            has_trained = not recorder.has_run_backward or recorder.backward_passes != self._backwards
            self._backwards = recorder.backward_passes
            if not has_trained and not self._sample.launches:
                self._sample.start_ns, self._poll_count = now, 0  # it holds nothing yet
                return 0
            self._is_mixed = self._is_mixed or not has_trained
            if not self._would_discard() and self._poll_count < MAX_SAMPLE_POLLS:
                return 0
        recorder.sample_step = recorder.optimizer_steps + 1
        self._is_discarded = self._would_discard()
        if not self._end(now):
            self._is_mixed = True  # it will hold more than a step
            return now + RETRY_NS
        self._spent += self._sample.cost_ns()
        if self._is_discarded:
            self._discarded += 1
            self._earliest = now
            return now + LOOK_NS if recorder.optimizer_steps else 0
        if not self._is_mixed:
            self._discarded = 0
        elapsed_ns, steps = now - self._last_schedule_ns, recorder.optimizer_steps - self._last_schedule_step
        self._last_schedule_ns, self._last_schedule_step = now, recorder.optimizer_steps
        self._earliest = now + max(MIN_SAMPLE_INTERVAL_NS, 0 if recorder.optimizer_steps else int(self._spent / SHARE))
        self._step_interval = _steps_between_samples(self._spent, elapsed_ns, steps)
        self._spent = 0
        self._schedule_next()
        return now + LOOK_NS

    def _would_discard(self) -> bool:
        """Return whether the sample would be discarded if it ended now."""
        return self._is_mixed and self._discarded < MAX_DISCARDED

    def _is_over(self) -> bool:
        """Return whether the sampled step has ended: by an optimizer step or, in a loop without it, a backward pass."""
        recorder = self._recorder
        if recorder.optimizer_steps:
            return recorder.optimizer_steps != self._start_step
        return not recorder.has_run_backward or recorder.backward_passes != self._backwards

    def _end(self, now: int) -> bool:
        """End the sample; return False if that is not possible now."""
        if not self._kernels.remove():
            return False
        self._sample.is_on = False
        # Another thread may be launching a collective. If it is counted, it began before this time.
        end_ns = monotonic_ns()
        first_word = Kind.COLLECTIVE | self._recorder.current_thread_state().thread_bits
        if self._is_discarded:
            first_word |= Flag.FAILED << FLAGS_AT
        start_ns = self._sample.start_ns
        self._recorder.put(first_word, start_ns, end_ns - start_ns, len(self._sample.launches))
        self._sample.own_ns += monotonic_ns() - now
        return True

    def at_exit(self) -> None:
        """End the current sample and the polling thread, which must not run while the interpreter ends."""
        if self._sample.is_on:
            self._is_discarded = self._would_discard() or not self._is_over()  # an unfinished step is discarded, too
            self._end(monotonic_ns())
        self._given_up = True
        self._poller.stop()


def _steps_between_samples(cost_ns: int, elapsed_ns: int, steps: int) -> int:
    """Return the optimizer steps between two samples: a power of two, so that ranks sample the same steps.

    `cost_ns`: cost of the samples since the distance was last set. `elapsed_ns`: time since then. `steps`: optimizer
    steps since then.
    """
    needed = max(cost_ns / SHARE, MIN_SAMPLE_INTERVAL_NS) * max(steps, 1) / max(elapsed_ns, 1)
    return min(max(1 << max(int(needed) - 1, 0).bit_length(), MIN_DISTANCE), MAX_DISTANCE)
