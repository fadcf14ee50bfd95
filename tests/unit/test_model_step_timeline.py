"""The timeline of the last step: places of phases, phases of calls, and replicas."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.model.recent_calls import STEP_CALLS_READ
from dpmon.model.step_timeline import Piece, StepTimeline, last_step_timeline
from dpmon.record.history_rows import Definition
from dpmon.record.record_types import CallRow, Step
from support.history_builders import snapshot_of_rows
from support.record_builders import TRAINING_FLAGS, call_row, calls_alone, runs_of

TOOK = {"data": 10, "forward": 60, "backward": 50, "optimizer": 20, "other": 60}
SPANS = (("data", 0, 10), ("forward", 12, 60), ("backward", 80, 50), ("optimizer", 140, 20))
STEP = Step(0, None, 7, "dp", 1000, 200, 8, TOOK, runs=runs_of(SPANS))
PHASES = (0, 5, 5, 15, 20, 30, 52, 4)
REPLICAS = (0, 0, 21, 20, 0, 0, 23, 26)
DEFINED = [
    Definition(1, {"root": "Net", "via": "DataParallel", "devices": ["cuda:0", "cuda:1", "cuda:2"], "absent": {}}),
    Definition(2, {"device": "cpu", "parts": ["a"]}),
    Definition(3, {"device": "cuda:0", "parts": ["b"]}),
]


def a_call(
    number: int = 7, start_ns: int = 1012, wall_ns: int = 60, mode: str = "dp", **changes: Sequence[int]
) -> CallRow:
    """Return a call; `changes`: phases, replicas and stages, as of `call_row`."""
    parts = {"phases": PHASES, "replicas": REPLICAS, **changes}
    return call_row(mode, TRAINING_FLAGS, 1, number, start_ns, wall_ns, 0, 0, **parts)


def timeline_of(step: Step, *calls: CallRow) -> StepTimeline:
    process = snapshot_of_rows([*DEFINED, step._replace(calls=calls)]).representative
    assert process is not None
    timeline = last_step_timeline(process)
    assert timeline is not None
    return timeline


def test_a_call_s_phases_lie_where_they_were_recorded_and_forward_has_the_rest() -> None:
    timeline = timeline_of(STEP, a_call())
    assert timeline.main == (
        Piece("data", 0, 10),
        Piece("scatter", 12, 17),
        Piece("replicate", 17, 32),
        Piece("apply", 32, 62),
        Piece("forward", 62, 64),
        Piece("gather", 64, 68),
        Piece("forward", 68, 72),
        Piece("backward", 80, 130),
        Piece("optimizer", 140, 160),
    )
    assert [(lane.number, lane.device, lane.pieces) for lane in timeline.lanes] == [
        (0, "cuda:0", (Piece("apply", 33, 53),)),
        (1, "cuda:1", (Piece("apply", 35, 61),)),
        (2, "cuda:2", ()),
    ]
    assert (timeline.step.step, timeline.step.wall_ns) == (7, 200)


def spans_of(*spans: tuple[str, int, int]) -> Step:
    """Return a step with these spans: phase, start, end."""
    return STEP._replace(runs=runs_of((name, start, end - start) for name, start, end in spans))


def test_several_calls_share_the_lanes() -> None:
    """As in a GAN: forward, backward, forward, backward, optimizer."""
    plain: dict[str, Sequence[int]] = {"phases": (-1, 0) * 4, "replicas": (0, 0, 0, 40)}
    first, second = a_call(7, 1010, 40, "single", **plain), a_call(8, 1110, 40, "single", **plain)
    pieces = (
        *(Piece("data", 0, 10), Piece("forward", 10, 50), Piece("backward", 55, 100), Piece("forward", 110, 150)),
        *(Piece("backward", 151, 170), Piece("optimizer", 180, 200)),
    )
    timeline = timeline_of(spans_of(*pieces), first, second)
    assert timeline.main == pieces
    (lane,) = timeline.lanes
    assert [(piece.start_ns, piece.end_ns) for piece in lane.pieces] == [(10, 50), (110, 150)]


def test_a_nested_phase_is_drawn_over_the_outer_one() -> None:
    """An optimizer with a closure, a forward with a copy and a gradient in it."""
    step = spans_of(
        *(("optimizer", 10, 190), ("forward", 20, 100), ("copy", 30, 40), ("backward", 50, 70), ("backward", 60, 65)),
        *(("backward", 100, 150), ("forward", 160, 170), ("forward", 160, 170)),
    )
    assert timeline_of(step).main == (
        *(Piece("optimizer", 10, 20), Piece("forward", 20, 30), Piece("copy", 30, 40), Piece("forward", 40, 50)),
        *(Piece("backward", 50, 70), Piece("forward", 70, 100), Piece("backward", 100, 150)),
        *(Piece("optimizer", 150, 160), Piece("forward", 160, 170), Piece("optimizer", 170, 190)),
    )


def test_phases_of_a_call_are_drawn_over_its_forward_only() -> None:
    """A lone replica runs on the thread that trains, and so do a copy and a gradient in it."""
    step = spans_of(("data", 0, 10), ("forward", 12, 72), ("copy", 35, 40), ("backward", 50, 60))
    assert timeline_of(step, a_call()).main == (
        *(Piece("data", 0, 10), Piece("scatter", 12, 17), Piece("replicate", 17, 32), Piece("apply", 32, 35)),
        *(Piece("copy", 35, 40), Piece("apply", 40, 50), Piece("backward", 50, 60), Piece("apply", 60, 62)),
        *(Piece("forward", 62, 64), Piece("gather", 64, 68), Piece("forward", 68, 72)),
    )


def test_a_call_composed_by_hand_has_its_phases() -> None:
    """Each primitive is forward in the step; work of the script between them is not."""
    step = spans_of(("forward", 12, 17), ("forward", 20, 32), ("forward", 40, 60), ("backward", 61, 90))
    call = a_call(wall_ns=48, phases=(0, 5, 8, 12, 28, 20, -1, 0))
    assert timeline_of(step, call).main == (
        *(Piece("scatter", 12, 17), Piece("replicate", 20, 32), Piece("apply", 40, 60), Piece("backward", 61, 90)),
    )


def test_calls_of_other_threads_are_not_in_the_main_row() -> None:
    alone, both = timeline_of(STEP, a_call()), timeline_of(STEP, a_call(), a_call(8, 1020))
    assert both.main == alone.main
    assert [len(lane.pieces) for lane in both.lanes] == [2, 2, 0]


def test_the_stages_of_a_spread_model_have_lanes() -> None:
    stages = (2, 0, 0, 5, 10, 3, 0, 0, 20, -1)
    timeline = timeline_of(STEP, a_call(mode="single", stages=stages, replicas=(), phases=(-1, 0) * 4))
    assert timeline.staged
    assert [lane.pieces for lane in timeline.lanes] == [(Piece("apply", 17, 27),), ()]


def test_calls_of_other_steps_are_not_in_it() -> None:
    process = snapshot_of_rows([*DEFINED, calls_alone(6, a_call(6)), STEP]).representative
    assert process is not None
    timeline = last_step_timeline(process)
    assert timeline is not None
    assert [piece.phase for piece in timeline.main] == ["data", "forward", "backward", "optimizer"]
    assert timeline.lanes == ()


def test_before_the_first_step_there_is_none() -> None:
    state = snapshot_of_rows([*DEFINED, calls_alone(7, a_call())])
    process = state.representative
    assert process is not None
    assert last_step_timeline(process) is None


def test_a_step_of_many_calls_shows_the_last_ones() -> None:
    calls = [a_call(number, 1012 + number) for number in range(500)]
    process = snapshot_of_rows([*DEFINED, STEP._replace(calls=calls)]).representative
    assert process is not None
    assert [call.call for call in process.last_calls] == list(range(500 - STEP_CALLS_READ, 500))
