"""The last step in time: where calls, phases and replicas lie, and where what has no start is laid."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from stored import state_of
from synthetic import Training

from dpmon.model.calls_seen import STEP_CALLS_READ
from dpmon.model.turn import Piece, Turn, last_turn
from dpmon.record.kinds import Call, Phase, Record, Replica, Stage, Step

STEP = Step(0, None, 7, "dp", 1000, 200, 8, {"data": 10, "forward": 60, "backward": 50, "optimizer": 20, "other": 60})
PHASES = {
    "scatter": Phase(0, 5),
    "replicate": Phase(5, 15),
    "parallel_apply": Phase(20, 30),
    "gather": Phase(52, 4),
}


def a_call(**changes: object) -> Call:
    replicas = (Replica(0, "cuda:0", 21, 20, None, None), Replica(1, "cuda:1", 23, 26, None, None))
    devices = ("cuda:0", "cuda:1", "cuda:2")
    call = Call(0, None, 7, 7, "Net", "DataParallel", "dp", False, True, True, False, 1012, 60, devices, PHASES,
                replicas, None, None)  # fmt: skip
    return replace(call, **changes)  # type: ignore[arg-type]


def turn_of(*records: Record) -> Turn:
    process = state_of(records).focus()
    assert process is not None
    turn = last_turn(process)
    assert turn is not None
    return turn


def test_a_call_s_phases_lie_where_they_were_recorded_and_forward_has_the_rest() -> None:
    turn = turn_of(a_call(), STEP)
    assert turn.main == (
        Piece("data", 0, 10),
        Piece("scatter", 12, 17),
        Piece("replicate", 17, 32),
        Piece("apply", 32, 62),
        Piece("forward", 62, 64),
        Piece("gather", 64, 68),
        Piece("forward", 68, 72),
        Piece("backward", 72, 122),
        Piece("optimizer", 122, 142),
    )
    assert [(lane.number, lane.device, lane.pieces) for lane in turn.lanes] == [
        (0, "cuda:0", (Piece("apply", 33, 53),)),
        (1, "cuda:1", (Piece("apply", 35, 61),)),
        (2, "cuda:2", ()),
    ]
    assert (turn.step, turn.wall_ns, turn.calls) == (7, 200, 1)


def test_several_calls_share_the_lanes_and_backward_gets_the_gaps() -> None:
    """As a GAN's: forward, backward, forward, backward. The optimizer comes last."""
    plain = {"phases": {}, "replicas": (Replica(0, "cuda:0", 0, 40, None, None),), "mode": "single", "wall_ns": 40}
    first, second = a_call(start_ns=1010, **plain), a_call(start_ns=1110, call=8, **plain)
    step = replace(STEP, phases={"data": 10, "forward": 80, "backward": 70, "optimizer": 20, "other": 20})
    turn = turn_of(first, second, step)
    assert turn.calls == 2
    assert [piece.phase for piece in turn.main] == [
        "data", "forward", "backward", "forward", "backward", "optimizer",
    ]  # fmt: skip
    took: dict[str, int] = {}
    for piece in turn.main:
        took[piece.phase] = took.get(piece.phase, 0) + piece.end_ns - piece.start_ns
    assert took["optimizer"] == 20
    assert 68 <= took["backward"] <= 70
    (lane,) = turn.lanes
    assert [(piece.start_ns, piece.end_ns) for piece in lane.pieces] == [(10, 50), (110, 150)]


def test_the_stages_of_a_spread_model_have_lanes() -> None:
    stages = (Stage(0, "cpu", ("a",), 5, 10, None, None), Stage(1, "cuda:0", ("b",), 20, None, None, None))
    turn = turn_of(a_call(stages=stages, replicas=(), phases={}, mode="single"), STEP)
    assert turn.staged
    assert [lane.pieces for lane in turn.lanes] == [(Piece("apply", 17, 27),), ()]


def test_calls_of_other_steps_are_not_in_it() -> None:
    turn = turn_of(a_call(step=6), STEP)
    assert turn.calls == 0
    assert [piece.phase for piece in turn.main] == ["data", "backward", "optimizer"]
    assert turn.lanes == ()


def test_before_the_first_step_there_is_none() -> None:
    state = state_of([a_call()])
    process = state.focus()
    assert process is not None
    assert last_turn(process) is None


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_numbers_nothing_overlaps_or_leaves_the_step(seed: int) -> None:
    chance = random.Random(seed)

    def number() -> int:
        return chance.choice([0, 1, -5, 10, 50, 199, 1000, 10**15]) + chance.randint(0, 3)

    calls = [
        a_call(
            call=index,
            start_ns=max(1000 + number(), 0),
            wall_ns=max(number(), 0),
            phases={name: Phase(number(), number()) for name in PHASES},
            replicas=tuple(Replica(i, "cpu", number(), number(), None, None) for i in range(3)),
        )
        for index in range(chance.randint(0, 4))
    ]
    phases = {name: max(number(), 0) for name in ("data", "forward", "backward", "optimizer", "other")}
    turn = turn_of(*calls, replace(STEP, phases=phases))
    at = 0
    for piece in turn.main:
        assert at <= piece.start_ns < piece.end_ns <= turn.wall_ns
        at = piece.end_ns
    for lane in turn.lanes:
        assert all(0 <= piece.start_ns < piece.end_ns <= turn.wall_ns for piece in lane.pieces)


def test_of_a_step_of_many_calls_the_last_ones_are_read() -> None:
    calls = [a_call(call=number, start_ns=1012 + number) for number in range(500)]
    process = state_of([*calls, STEP]).focus()
    assert process is not None
    assert [call.call for call in process.last_calls] == list(range(500 - STEP_CALLS_READ, 500))


def test_the_last_step_is_the_newest() -> None:
    training = Training()
    process = state_of([*training.begin(), *training.run(500)]).focus()
    assert process is not None
    turn = last_turn(process)
    assert turn is not None
    assert turn.step == 500
    assert [len(lane.pieces) for lane in turn.lanes] == [1, 1]
