"""Which gradients became ready in a backward pass, according to torch's notes (ns after the forward)."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.assemble.nesting import decode_bucket_leads
from dpmon.record.span_format import FLAGS_AT, LEAD_NS, MAX_LEAD, Flag, Kind, Span
from dpmon.tracer.collectives.gradient_sync import FULL_READ_INTERVAL, GradientSync, _TracedWrapper
from dpmon.tracer.devices.device_timing import PhaseTimer


class Module(SimpleNamespace):
    """Stands for a DistributedDataParallel."""


def a_wrapper(buckets: str = "1 2,0", unused: bool = False) -> _TracedWrapper:
    wrapper = _TracedWrapper(weakref.ref(Module()), 0, may_skip_gradients=unused)
    wrapper.read_buckets({"rebuilt_per_bucket_param_indices": buckets})
    return wrapper


def ready(wrapper: _TracedWrapper, notes: list[int], end: int) -> list[int]:
    """Return when each bucket was ready, and count the pass if it is complete."""
    found = list(wrapper.bucket_ready_times(notes, end))
    wrapper.pass_count += bool(found)
    return found


@pytest.mark.parametrize("buckets", ["", "0", "1 2,0"])
def test_a_backward_pass_of_another_model_makes_no_gradient_ready(buckets: str) -> None:
    wrapper = a_wrapper(buckets)
    notes = [30] if buckets == "0" else [30, 10, 20]
    for _ in range(3):
        assert ready(wrapper, notes, 40)
        assert not ready(wrapper, notes, 100)
        notes = [note + 1 for note in notes]


def test_gradients_of_a_later_backward_pass_of_the_same_forward_are_not_ready_before() -> None:
    wrapper = a_wrapper()
    assert not ready(wrapper, [0, 10, 20], 25)  # the first: torch has no note of one
    assert ready(wrapper, [50, 10, 20], 60) == [20, 50]
    for later in range(1, 2 * FULL_READ_INTERVAL):
        # Now and then the first pass takes longer than both took before.
        assert not ready(wrapper, [49 + later, 10 + later, 20 + later], 25 + later if later % 3 else 90)
        assert ready(wrapper, [50 + later, 10 + later, 20 + later], 60 + later) == [20 + later, 50 + later]


def test_a_bucket_that_was_ready_long_before_has_the_greatest_lead() -> None:
    """A lead above the limit is written as the limit; it must not be read as none."""
    written: list[tuple[int, ...]] = []
    sync = GradientSync.__new__(GradientSync)
    sync._recorder = SimpleNamespace(put=lambda *words: written.append(words))  # type: ignore[assignment]
    longest = int(MAX_LEAD * LEAD_NS)
    sync._write_buckets(0, 1, [0, 640_000, longest, 9 * longest])
    ((_, _, _, sizes),) = written
    span = Span(0, Kind.BUCKETS, 0, 0, 0, 0, 1, 0, sizes & 0xFFFFFFFF, sizes >> 32)
    assert decode_bucket_leads(span) == [0, 640_000, longest, longest]


@pytest.mark.parametrize("mark", [None, PhaseTimer(None, [])])  # type: ignore[arg-type]
def test_a_pass_in_a_step_that_sampling_skips_is_still_synchronized(mark: Any) -> None:
    heads: list[int] = []

    def put(head: int, *_: int) -> int:
        heads.append(head)
        return 0

    tracer: Any = GradientSync.__new__(GradientSync)
    tracer._recorder, tracer._phase_timer, tracer._pass_number = SimpleNamespace(put=put), mark, 0
    wrapper: Any = SimpleNamespace(number=0, has_several_buckets=False, buckets=[1], forward_end_ns=0)
    tracer._write(wrapper, [5], ready_ns=10, first_word=0, end_ns=30)
    (head,) = heads
    assert head & 0xFF == Kind.SYNC
    assert not head >> FLAGS_AT & Flag.UNSYNCED
