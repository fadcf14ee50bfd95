"""How the ends of unfinished collectives are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.record.shared_names import Unended
from dpmon.record.span_format import FLAGS_AT, Flag, Kind
from dpmon.tracer.collectives.completion_poller import CompletionPoller, PendingCollective, SampleCost


def test_a_collective_is_recorded_although_the_process_ends_before_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is unknown. Its sample counts it, so it must not be missing."""
    written: list[tuple[int, ...]] = []
    session: Any = None
    recorder: Any = SimpleNamespace(put=lambda *words: written.append(words))
    monkeypatch.setattr("dpmon.tracer.collectives.completion_poller.start_thread", lambda *_: None)
    ends = CompletionPoller(session, recorder, SampleCost())
    ends.add(PendingCollective(None, Kind.COLLECTIVE, 5, 40))
    ends.stop()
    assert written == [(Kind.COLLECTIVE | Flag.UNENDED << FLAGS_AT, 5, Unended.ENDED, 40)]
