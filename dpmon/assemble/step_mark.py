"""The state that a successor needs to continue at the first block of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class StepMark(NamedTuple):
    """The state of StepRecorder, StepRules, Patience and OptimizerCycle before that block."""

    number: int
    calls: int
    unmatched_fetches: int
    placed: int
    awaiting_call: Sequence[int]
    thread: int
    has_trained: bool
    opened: bool
    fetched: bool
    over: bool
    start: int
    last: int
    rule: int
    since_fetch: int
    pace: int
    paced: int
    paced_calls: int
    paced_calls_before: int
    learned: Collection[int]
    ends: int
    since: Sequence[int]
    leading: Mapping[int, int]
    part: Sequence[Any] | None
    """`OpenStep.saved` of a step that is recorded in parts."""
