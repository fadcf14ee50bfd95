"""The state of a run at a time: its figures, records that it refuses, and that it depends only on the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from dpmon.model.run_process import PHASES, Process
from dpmon.model.throughput import throughput_of
from dpmon.record.history_rows import Definition, Row
from dpmon.record.record_types import CallRow, Event, Step
from dpmon.record.shared_names import CALL_PHASES
from support.history_builders import Recording, snapshot_of_rows
from support.record_builders import SECOND, TRAINING_FLAGS, Training, call_row, calls_alone, device_event, host_event

NOT_RUN = None


def of_run(records: Iterable[Row], t_ns: int | None = None, **wanted: Any) -> Process:
    """Return the process that the screen shows."""
    process = snapshot_of_rows(records, t_ns, **wanted).representative
    assert process is not None
    return process


def a_step(**changes: Any) -> Step:
    phases = {"data": 1000, "forward": 10_000, "backward": 5000, "optimizer": 2000, "other": 2000}
    step = Step(0, None, 1, "dp", 0, 20_000, 4, phases)
    return step._replace(**changes)


LAYOUTS = [
    Definition(1, {"root": "Net", "via": "DataParallel", "devices": ["cuda:0", "cuda:1"], "absent": {}}),
    Definition(2, {"root": "Head", "via": None, "devices": ["cuda:0"], "absent": {}}),
]


def a_call(
    number: int = 1, mode: str = "dp", layout: int = 1, start_ns: int = 0, flags: int = TRAINING_FLAGS,
    replicas: Sequence[int] = (), **phases_us: int
) -> CallRow:  # fmt: skip
    """Return a call whose phases follow each other directly."""
    phases, at = [], 0
    for name in CALL_PHASES:
        us = phases_us.get(name)
        phases += [-1, 0] if us is None else [at, us * 1000]
        at += (us or 0) * 1000
    return call_row(mode, flags, layout, number, start_ns, 10_000, 0, 0, phases, replicas)


def phases_of(*rows: Row) -> dict[str, int | None]:
    """Return the mean of each phase as panel 3 shows it, µs."""
    shown = of_run([*LAYOUTS, *rows], span_s=0).ranged.disjoint_phases
    return {phase.name: None if not phase.ran else round((phase.mean_ns or 0) / 1000) for phase in shown}


# ------------------------------------------------------------------------------------------------ phases


def test_the_phases_of_calls_take_their_part_out_of_forward() -> None:
    found = phases_of(a_step(calls=[a_call(scatter=1, replicate=2, parallel_apply=3, gather=1)]))
    assert found == {
        "data": 1, "copy": NOT_RUN, "scatter": 1, "replicate": 2, "apply": 3, "gather": 1, "forward": 3,
        "backward": 5, "sync": NOT_RUN, "optimizer": 2, "other": 2,
    }  # fmt: skip
    assert sum(us for us in found.values() if us is not None) == 20


def test_several_calls_of_a_step_add_up_and_those_of_another_step_do_not() -> None:
    calls = [a_call(1, scatter=2), a_call(2, scatter=3, gather=1)]
    found = phases_of(a_step(calls=calls), calls_alone(2, a_call(3, scatter=100)))
    assert (found["scatter"], found["gather"], found["forward"]) == (5, 1, 4)
    assert found["replicate"] is NOT_RUN


def test_calls_longer_than_the_forward_are_not_subtracted_from_it() -> None:
    """A forward that is computed again in backward: its phases are not part of this forward."""
    found = phases_of(a_step(calls=[a_call(parallel_apply=11)]))
    assert found["forward"] == 10
    assert found["apply"] is NOT_RUN


# ------------------------------------------------------------------------------------------------ figures and speed


def test_without_new_steps_the_speed_is_replaced_by_a_reason() -> None:
    training = Training(step_ns=10_000_000)
    payloads = [*training.begin(), *training.run(500)]
    state = snapshot_of_rows(payloads)
    process = state.representative
    assert process is not None
    stalled = throughput_of(process, state, process.seen_ns + 12 * SECOND)
    assert stalled.rate is None
    assert stalled.reason == "no step has finished for 12 s"
    now = process.seen_ns + 12 * SECOND
    assert throughput_of(process, state, now, now - SECOND).rate is not None, (
        "the process goes on, only the record is behind"
    )
    assert throughput_of(process, state, now, now - 4 * SECOND).reason == stalled.reason
    over = snapshot_of_rows(payloads, over=True)
    process = over.representative
    assert process is not None
    assert throughput_of(process, over, process.seen_ns + 12 * SECOND).rate is not None, "the mean of the run stays"


def test_speed_does_not_mix_modes() -> None:
    training = Training(step_ns=10_000_000)
    payloads = [*training.begin(), *training.run(500)]
    training.step_ns = 40_000_000
    state = snapshot_of_rows([*payloads, *training.switch("single"), *training.run(100)], span_s=0)
    process = state.representative
    assert process is not None
    rate = throughput_of(process, state, process.seen_ns).rate
    assert rate is not None
    assert rate.steps_per_s == pytest.approx(25, rel=0.05)
    assert process.ranged.mode == "single"
    assert process.ranged.steps == 100


def test_columns_are_seconds_and_break_where_the_mode_changes() -> None:
    training = Training(step_ns=100_000_000)
    payloads = [*training.begin(), *training.run(50)]
    columns = of_run(payloads).columns
    seconds = [column.second for column in columns]
    assert seconds == sorted(set(seconds))
    later = of_run([*payloads, *training.switch("single"), *training.run(5)]).columns
    assert [column.mode for column in later] == ["dp"] * len(seconds) + ["single"] * (len(later) - len(seconds))
    assert len(later) > len(seconds)
    assert sum(column.count for column in later) == 55
    assert all(sum(column.phases) <= column.wall_ns for column in later)
    assert all(len(column.phases) == len(PHASES) for column in later)


def test_devices_and_host_keep_absence_apart_from_nothing() -> None:
    events = [device_event(1.0, 0), device_event(2.0, 0, util_pct=None, absent={"util_pct": "GPU is lost"})]
    state = snapshot_of_rows([*events, host_event(1.0, cpu=0.0), host_event(2.0, cpu=None)])
    assert state.devices[0].util == (97.0, None)
    assert state.host.util == (0.0, None)
    assert state.devices[0].data["absent"] == {"util_pct": "GPU is lost"}


# ------------------------------------------------------------------------------------------------ pauses


def a_pause(paused: bool, t_s: float, **more: Any) -> Event:
    return Event("pause", {"process": 0, "rank": None, "t_s": t_s, "step": 5, "paused": paused, **more})


def steps_from(start_s: float, count: int, first: int = 1) -> list[Row]:
    """Return consecutive steps of 0.1 s."""
    tenth = SECOND // 10
    return [
        a_step(step=first + n, start_ns=int(start_s * SECOND) + n * tenth, wall_ns=tenth, samples=3)
        for n in range(count)
    ]


def test_a_pause_has_a_beginning_and_an_end() -> None:
    state = snapshot_of_rows([*steps_from(1.0, 20), a_pause(True, 3.0)])
    assert state.processes[0].paused_since_ns == 3 * SECOND
    assert throughput_of(state.processes[0], state, 4 * SECOND).reason == "the training is paused"
    state = snapshot_of_rows([*steps_from(1.0, 20), a_pause(True, 3.0), a_pause(False, 63.0, paused_s=60.0)])
    assert state.processes[0].paused_since_ns is None
    assert [(change.paused, change.t_ns, change.paused_ns, change.step) for change in state.pauses] == [
        (True, 3 * SECOND, None, 5),
        (False, 63 * SECOND, 60 * SECOND, 5),
    ]


def test_a_step_ends_a_pause_whose_end_was_missed() -> None:
    records = [*steps_from(1.0, 3), a_pause(True, 3.0), *steps_from(2.0, 1, 4)]
    assert of_run(records).paused_since_ns == 3 * SECOND  # that step began before it
    assert of_run([*records, *steps_from(9.0, 1, 5)]).paused_since_ns is None


def test_a_pause_that_was_refused() -> None:
    state = snapshot_of_rows([*steps_from(1.0, 3), a_pause(False, 1.0, refused="ranks")])
    assert (state.pauses[0].refused, state.processes[0].paused_since_ns) == ("ranks", None)


# ------------------------------------------------------------------------------------------------ modes


def mode_event(root: str, mode: str, step: int, **more: Any) -> Event:
    data = {"process": 0, "t_s": float(step), "step": step, "root": root, "mode": mode, "requested_by": "user"}
    return Event("mode", {**data, "devices": ["cpu:0"], "virtual": False, "reason": None, "refused": None, **more})


def test_a_refusal_keeps_what_is_in_force() -> None:
    training = Training()
    payloads = [*training.begin(), *training.run(5)]
    state = snapshot_of_rows([*payloads, training.mode_event("user", refused="the module is spread over devices")])
    process = state.representative
    assert process is not None
    assert process.mode == "dp"
    assert process.devices == ("cpu:0", "cpu:1")
    assert state.mode_changes[-1].refused == "the module is spread over devices"
    assert len(state.mode_changes) == 2


def test_a_bare_root_beside_a_split_one_does_not_make_the_mode_single() -> None:
    """A head or a teacher has its own mode, and is called in each step."""
    run, modes = Recording().add([*LAYOUTS, mode_event("Net", "dp", 0), mode_event("Head", "single", 0)]), []
    for number in range(1, 9):
        mode, start = "dp" if number < 5 else "single", number * SECOND
        calls = [a_call(2 * number, mode, 1, start), a_call(2 * number + 1, "single", 2, start)]
        run.add([a_step(step=number, mode=mode, start_ns=start, calls=calls)])
        modes.append(run.state().processes[0].mode)
    assert modes == ["dp"] * 4 + ["single"] * 4


def test_refusals_of_roots_that_are_gone_do_not_stay() -> None:
    records: list[Row] = [*LAYOUTS, calls_alone(1, a_call()), mode_event("Old", "single", 10, refused="it is compiled")]
    assert list(of_run(records).refusals) == ["Old"]
    records.append(mode_event("New", "dp", 60))
    assert list(of_run(records).refusals) == ["Old"], "it may have answered to the same request"
    records.append(mode_event("New", "single", 5000))
    assert list(of_run(records).refusals) == []


def test_times_of_evaluation_and_training_are_separate() -> None:
    def part(number: int, took_ns: int, evaluates: bool) -> list[Row]:
        start, flags = number * SECOND, 0 if evaluates else TRAINING_FLAGS
        phases = {"forward": 10_000, "other": 10_000} if evaluates else a_step().phases
        call = a_call(number, start_ns=start, flags=flags, replicas=(0, 0, 0, took_ns))
        return [a_step(step=number, start_ns=start, phases=phases, calls=[call])]

    records = [*LAYOUTS, *(record for number in range(1, 4) for record in part(number, 9000, False))]
    evaluated = [*records, *part(4, 1000, True)]
    for made, expected in (
        (records, (3, 9000)),
        (evaluated, (1, 1000)),
        ([*evaluated, *part(5, 9000, False)], (4, 9000)),
    ):
        (track,) = of_run(made).calls.values()
        (timed,) = track.timed
        assert (timed.time.count, timed.host_ns) == (expected[0], pytest.approx(expected[1], rel=0.004))
