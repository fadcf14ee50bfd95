"""Ranks that wait for each other in the script's own collectives, outside the backward pass."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from pretend import MS, Script, in_portions
from stored import store_of

from dpmon.model.communication import communication
from dpmon.model.found_between_ranks import between_ranks
from dpmon.model.own_waits import own_wait
from dpmon.model.stragglers import RankTimes
from dpmon.record.spans import Kind
from dpmon.store.answers import Communicated, OwnCollectives
from dpmon.store.collective_queries import communicated

STEP_MS = 24.0


def rank(number: int, other_ms: float = 21.0) -> RankTimes:
    return RankTimes(number, number, 200, STEP_MS * MS, {"other": other_ms * MS}, 200, 1.0 * MS, 0.3 * MS)


def took(number: int, times_ms: Sequence[float], name: str = "all_reduce") -> OwnCollectives:
    return OwnCollectives(number, (name,), {step: round(ms * MS) for step, ms in enumerate(times_ms)})


def test_the_rank_with_the_least_time_in_them_is_the_late_one() -> None:
    found = own_wait(
        [rank(0), rank(1), rank(2)], [took(0, [20, 21, 22]), took(1, [1, 1.2, 0.8]), took(2, [20.2, 21, 22])]
    )
    assert found is not None
    assert (found.rank, found.samples) == ("rank 1", 3)
    assert found.late_ns == pytest.approx(1.0 * MS)
    assert found.lost_ns == pytest.approx(20.0 * MS, rel=0.01)
    assert found.sentence == (
        "the others wait for rank 1 in the script's own all_reduce: 20.0 ms a step (83 %), in 3 sampled steps"
    )


@pytest.mark.parametrize(
    ("first", "second", "other_ms"),
    [
        ([20, 21], [1, 1], 21.0),  # too few samples
        ([20, 1, 20], [1, 20, 1], 21.0),  # now one is late, now the other
        ([20, 21, 22], [15, 16, 17], 21.0),  # both spend long in it
        ([2.0, 2.1, 2.2], [0.1, 0.1, 0.1], 21.0),  # less than a tenth of the step
        ([20, 21, 22], [1, 1, 1], 2.0),  # it runs beside other phases: asynchronous
    ],
)
def test_no_rank_is_named_without_good_evidence(first: list[float], second: list[float], other_ms: float) -> None:
    assert own_wait([rank(0, other_ms), rank(1, other_ms)], [took(0, first), took(1, second)]) is None


def test_unknown_times_of_a_rank_name_nobody() -> None:
    assert own_wait([rank(0), rank(1)], [took(0, [20, 21, 22])]) is None
    assert own_wait([rank(0), rank(1)], [took(0, [20, 21, 22]), OwnCollectives(1, ("all_reduce",), {})]) is None


def test_equal_ranks_are_seldom_named() -> None:
    chance = random.Random(7)
    named = 0
    for _ in range(1000):
        waits = [[1 + abs(chance.gauss(0, 4)) for _ in range(chance.randrange(3, 8))] for _ in range(2)]
        named += own_wait([rank(0), rank(1)], [took(0, waits[0]), took(1, waits[1])]) is not None
    assert named <= 20


def test_the_finding_replaces_the_note() -> None:
    def of(late: Sequence[float]) -> tuple[list[str], tuple[str, ...]]:
        own = took(0, [20, 21, 22]), took(1, late)
        found = communication([rank(0), rank(1)], [], Communicated(own=own), lately=False)
        assert found is not None
        return [one.kind for one in between_ranks(found)], found.other_waits()

    assert of([1, 1, 1]) == (["own collectives"], ())
    assert of([19, 20, 21]) == (
        [],
        ("the script's own all_reduce may make the ranks wait for each other, too: see `other`",),
    )


def test_only_collectives_outside_the_phases_are_the_scripts_own() -> None:
    script = Script()
    net, reduce, barrier = script.model(module=1), script.group(), script.group("barrier")
    for _ in range(4):
        begin = script.now
        script.fetch()
        script.learn(net)
        script.collective(reduce, begin + MS, 5.0, inside=Kind.BACKWARD)
        script.collective(reduce, begin + MS, 2.0)
        script.collective(barrier, begin + MS, 3.0)
        script.sampled(begin, 3)
    script.fetch(over=True)
    (own,) = communicated(store_of(in_portions(script, []))).own
    assert (own.process, own.names) == (0, ("all_reduce", "barrier"))
    assert dict(own.took_ns) == dict.fromkeys((1, 2, 3, 4), 5 * MS)
