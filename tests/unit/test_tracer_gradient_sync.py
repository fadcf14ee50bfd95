"""Synchronised backward passes, as the tracer writes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.record.spans import FLAGS_AT, Flag, Kind
from dpmon.tracer.collectives.gradient_sync import GradientSync
from dpmon.tracer.devices.timing import Mark


@pytest.mark.parametrize("mark", [None, Mark(None, Kind.SYNC, [])])  # type: ignore[arg-type]
def test_a_pass_in_a_step_that_sampling_skips_is_still_synchronised(mark: Any) -> None:
    heads: list[int] = []

    def put(head: int, *_: int) -> int:
        heads.append(head)
        return 0

    tracer: Any = GradientSync.__new__(GradientSync)
    tracer._recorder, tracer._mark, tracer._number = SimpleNamespace(put=put), mark, 0
    wrapper: Any = SimpleNamespace(number=0, several=False, buckets=[1], base=0)
    tracer._write(wrapper, [5], at=10, head=0, ended=30)
    (head,) = heads
    assert head & 0xFF == Kind.SYNC
    assert not head >> FLAGS_AT & Flag.UNSYNCED
