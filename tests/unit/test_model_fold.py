"""The state that records fold into: what it says, what it refuses, and that it stays the same size."""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from dataclasses import replace

import pytest
from synthetic import SECOND, Training, chunks, decoded, device_event, host_event

from dpmon.model import State, fold
from dpmon.model.phases import with_calls
from dpmon.model.state import CALLS_KEPT, HISTORY_KEPT, NOT_RUN, PHASES, ROOTS_KEPT, STEPS_KEPT
from dpmon.model.stats import mean_speed, median, median_known, percentile, speed, summary
from dpmon.record.codec import Call, Event, Phase, Record, Replica, Step
from dpmon.record.wire import STEP_PHASES


def folded(records: list[Record], state: State | None = None) -> State:
    state = state or State()
    for record in records:
        state = fold(state, record)
    return state


def after(training: Training, steps: int) -> State:
    return folded(decoded([*training.begin(), *training.run(steps)]))


def a_step(**changes: object) -> Step:
    phases = {"data": 1, "forward": 10, "backward": 5, "optimizer": 2, "other": 2}
    step = Step(0, None, 1, "dp", 0, 20, 4, phases)
    return replace(step, **changes)  # type: ignore[arg-type]


def a_call(**changes: object) -> Call:
    call = Call(
        0,
        None,
        1,
        1,
        "Net",
        "DataParallel",
        "dp",
        False,
        True,
        True,
        False,
        0,
        10,
        ("cuda:0", "cuda:1"),
        {},
        (),
        (),
        (),
    )
    return replace(call, **changes)  # type: ignore[arg-type]


def phases_of(state: State) -> dict[str, int]:
    process = state.focus()
    assert process is not None
    assert process.last_step is not None
    return dict(zip(PHASES, process.last_step.phases, strict=True))


def test_the_phases_of_calls_take_their_part_out_of_forward() -> None:
    phases = {"scatter": Phase(0, 1), "replicate": Phase(1, 2), "parallel_apply": Phase(3, 3), "gather": Phase(6, 1)}
    found = phases_of(folded([a_call(phases=phases), a_step()]))
    assert found == {
        "data": 1,
        "copy": NOT_RUN,
        "scatter": 1,
        "replicate": 2,
        "apply": 3,
        "gather": 1,
        "forward": 3,
        "backward": 5,
        "optimizer": 2,
        "other": 2,
    }
    assert sum(took for took in found.values() if took != NOT_RUN) == 20


def test_several_calls_of_a_step_add_up_and_those_of_another_step_do_not() -> None:
    first = a_call(phases={"scatter": Phase(0, 2)})
    second = a_call(phases={"scatter": Phase(0, 3), "gather": Phase(3, 1)}, call=2)
    foreign = a_call(phases={"scatter": Phase(0, 100)}, call=3, step=2)
    found = phases_of(folded([first, second, foreign, a_step()]))
    assert (found["scatter"], found["gather"], found["forward"]) == (5, 1, 4)
    assert found["replicate"] == NOT_RUN


def test_calls_that_took_longer_than_the_forward_leave_it_whole() -> None:
    """A forward that is computed again in backward: its phases are not part of this forward."""
    found = phases_of(folded([a_call(phases={"parallel_apply": Phase(0, 11)}), a_step()]))
    assert found["forward"] == 10
    assert found["apply"] == NOT_RUN


@pytest.mark.parametrize(("took", "forward", "apply"), [(9, [1.5], [2.5]), (11, [4.0], None)])
def test_what_stands_by_itself_on_the_host_does_on_the_devices(
    took: int, forward: list[float], apply: list[float] | None
) -> None:
    state = folded([a_call(phases={"parallel_apply": Phase(0, took, 2.5)}), a_step(device_ms={"forward": 4.0})])
    track = state.processes[0].modes["dp"]
    assert list(track.device_ms["forward"]) == forward
    assert track.device_ms.get("apply") == (apply if apply is None else deque(apply))
    assert list(track.forward_ms) == [4.0], "whole"


def test_a_phase_that_did_not_run_has_no_figures() -> None:
    state = folded([a_step(phases={"forward": 15, "other": 5})])
    process = state.focus()
    assert process is not None
    figures = {phase.name: phase for phase in summary(list(process.modes["dp"].steps)).phases}
    assert figures["backward"] == ("backward", 0, None, None, None, None, 0, None)
    assert figures["forward"].median_ns == 15
    assert figures["forward"].share == pytest.approx(0.75)


def test_summary_against_plain_arithmetic() -> None:
    state = after(Training(devices=("cuda:0", "cuda:1", "cuda:2")), 200)
    process = state.focus()
    assert process is not None
    steps = list(process.modes["dp"].steps)
    numbers = summary(steps)
    walls = sorted(step.wall_ns for step in steps)
    assert numbers.steps == 200
    assert numbers.median_ns == (walls[99] + walls[100]) / 2
    assert numbers.p95_ns == walls[189]
    rate = mean_speed(process)
    assert rate.samples_per_s == pytest.approx(200 * 30 / sum(walls) * 1e9)
    assert sum(phase.share or 0 for phase in numbers.phases) == pytest.approx(1.0)


@pytest.mark.parametrize(("values", "expected"), [([], None), ([3], 3), ([1, 2], 1.5), ([5, 1, 3], 3)])
def test_median(values: list[int], expected: float | None) -> None:
    assert median(values) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, None), (1, 1), (20, 19), (100, 95), (21, 20)])
def test_percentile_is_the_nearest_rank(count: int, expected: int | None) -> None:
    assert percentile(range(1, count + 1), 0.95) == expected


def test_samples_are_unknown_when_a_step_did_not_know_them() -> None:
    state = folded([a_step(), a_step(step=2, start_ns=20, samples=None)])
    process = state.focus()
    assert process is not None
    assert mean_speed(process).steps_per_s is not None
    assert mean_speed(process).samples_per_s is None


def test_speed_is_that_of_the_steps_own_clock() -> None:
    training = Training(step_ns=10_000_000)
    state = after(training, 2000)
    process = state.focus()
    assert process is not None
    now = speed(process, process.seen_ns + SECOND)
    assert now.reason is None
    assert now.steps_per_s == pytest.approx(97.5, rel=0.02)
    assert now.samples_per_s == pytest.approx((now.steps_per_s or 0) * 30)


def test_speed_counts_steps_whose_records_were_missed() -> None:
    training = Training(step_ns=10_000_000)
    records = decoded([*training.begin(), *training.run(2000)])
    rare = [r for i, r in enumerate(records) if isinstance(r, Event) or i % 20 < 2]
    whole, thin = (folded(each).focus() for each in (records, rare))
    assert whole is not None
    assert thin is not None
    assert speed(thin, None).steps_per_s == pytest.approx(speed(whole, None).steps_per_s, rel=0.02)


def test_speed_goes_away_with_the_reason_when_nothing_ends_any_more() -> None:
    state = after(Training(step_ns=10_000_000), 500)
    process = state.focus()
    assert process is not None
    stalled = speed(process, process.seen_ns + 12 * SECOND)
    assert stalled.steps_per_s is None
    assert stalled.reason == "no step has ended for 12 s"
    assert speed(process, None).steps_per_s is not None, "after the end the last speed stays"


def test_speed_does_not_mix_modes() -> None:
    training = Training(step_ns=10_000_000)
    records = decoded([*training.begin(), *training.run(500)])
    training.step_ns = 40_000_000
    records += decoded(training.switch("single"))
    state = folded(records)
    training.defined.clear()
    state = folded(decoded(training.run(100)), state)
    process = state.focus()
    assert process is not None
    assert speed(process, None).steps_per_s == pytest.approx(25, rel=0.05)
    assert process.modes["dp"].count == 500
    assert process.modes["single"].count == 100


def test_replica_times_begin_anew_when_the_mode_changes() -> None:
    training = Training(devices=("cpu:0", "cpu:1"))
    state = after(training, 50)
    process = state.focus()
    assert process is not None
    (track,) = process.calls.values()
    assert [len(times) for times in track.replica_ns] == [50, 50]
    training.defined.clear()
    state = folded(decoded([*training.switch("single"), *training.run(3)]), state)
    assert [len(times) for times in track.replica_ns] == [3]


def test_idle_devices_are_those_beyond_the_replicas() -> None:
    training = Training(devices=[f"cpu:{i}" for i in range(8)], batch=30)
    state = folded(decoded([*training.begin(), *training.step(), *training.step(rows=10)]))
    process = state.focus()
    assert process is not None
    (track,) = process.calls.values()
    assert len(track.last.replicas) == 5
    assert len(track.last.devices) == 8
    assert chunks(30, 8) == [4] * 7 + [2]


def test_a_refusal_keeps_what_is_in_force() -> None:
    training = Training()
    state = after(training, 5)
    state = folded(decoded([training.mode_event("user", refused="the module is spread over devices")]), state)
    process = state.focus()
    assert process is not None
    assert process.mode == "dp"
    assert process.devices == ("cpu:0", "cpu:1")
    assert state.mode_changes[-1].refused == "the module is spread over devices"
    assert state.mode_change_count == 2


def test_columns_are_seconds_and_break_where_the_mode_changes() -> None:
    training = Training(step_ns=100_000_000)
    state = after(training, 50)
    process = state.focus()
    assert process is not None
    seconds = [column.second for column in process.columns]
    assert seconds == sorted(set(seconds))
    training.defined.clear()
    state = folded(decoded([*training.switch("single"), *training.run(5)]), state)
    assert [column.mode for column in process.columns] == ["dp"] * len(seconds) + ["single"] * (
        len(process.columns) - len(seconds)
    )
    assert len(process.columns) > len(seconds)
    assert sum(column.count for column in process.columns) == 55
    assert all(sum(column.phases) <= column.wall_ns for column in process.columns)


def test_the_focus_is_the_first_rank_that_still_trains() -> None:
    launcher = Training(process=0, start_ns=SECOND)
    records = decoded([*launcher.begin(), *launcher.run(2)])
    for rank in (1, 0):
        child = Training(process=rank + 1, rank=rank, start_ns=100 * SECOND)
        records += decoded([*child.begin(), *child.run(3)], process=rank + 1, rank=rank)
    process = folded(records).focus()
    assert process is not None
    assert (process.process, process.rank) == (1, 0)


def test_devices_and_host_keep_absence_apart_from_nothing() -> None:
    events = [device_event(1.0, 0), device_event(2.0, 0, util_pct=None, absent={"util_pct": "GPU is lost"})]
    state = folded(decoded([*events, host_event(1.0, cpu=0.0), host_event(2.0, cpu=None)]))
    assert list(state.devices[0].util) == [97.0, None]
    assert list(state.host.util) == [0.0, None]
    assert state.devices[0].data["absent"] == {"util_pct": "GPU is lost"}


@pytest.mark.parametrize(
    "record",
    [
        a_step(wall_ns=-1),
        a_step(start_ns=-1),
        a_call(wall_ns=-1),
        Event("mode", {"process": 0, "mode": "triple"}),
        Event("mode", {"process": "0", "mode": "dp"}),
        Event("process", {}),
        Event("device", {"index": True}),
        Event("warning", {"text": 3}),
        Event("surprise", {}),
    ],
)
def test_nonsense_is_counted_and_changes_nothing(record: Record) -> None:
    state = after(Training(), 3)
    before = (len(state.mode_changes), state.newest_ns, set(state.processes), len(state.warnings))
    state = fold(state, record)
    assert state.ignored == 1
    assert (len(state.mode_changes), state.newest_ns, set(state.processes), len(state.warnings)) == before


def test_events_of_any_shape_never_raise() -> None:
    chance = random.Random(7)
    values = [
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "dp",
        "x" * 5000,
        [],
        [1, None],
        {},
        {"a": []},
    ]
    keys = [
        "process",
        "rank",
        "mode",
        "t_s",
        "devices",
        "index",
        "util_pct",
        "cpu_pct",
        "text",
        "count",
        "absent",
        "step",
    ]
    kinds = ["process", "mode", "warning", "device", "host", "dropped", "exit", "other"]
    state = State()
    for _ in range(20_000):
        data = {key: chance.choice(values) for key in chance.sample(keys, chance.randint(0, len(keys)))}
        state = fold(state, Event(chance.choice(kinds), data))
    assert state.ignored > 0
    state.focus()


def test_memory_is_flat() -> None:
    training = Training(step_ns=50_000_000, devices=[f"cpu:{i}" for i in range(4)])
    state = after(training, 4000)
    process = state.focus()
    assert process is not None

    def weight() -> int:
        buffers = [process.columns, process.marks, process.open_steps, state.warnings, state.mode_changes]
        buffers += [track.steps for track in process.modes.values()]
        buffers += [times for track in process.calls.values() for times in track.replica_ns]
        return sum(map(len, buffers)) + len(process.calls) + len(state.processes)

    training.defined.clear()
    half = weight()
    records = decoded(training.run(4000))
    # Warnings and host samples by the thousand, and calls whose step never ends.
    records += decoded([host_event(float(i)) for i in range(3000)])
    records += [Event("warning", {"process": None, "t_s": float(i), "text": f"w{i}"}) for i in range(3000)]
    records += [a_call(step=10_000 + i, phases={"scatter": Phase(0, 1)}, root=f"Net{i}") for i in range(3000)]
    records += [a_call(step=20_000, root=f"Net{i}") for i in range(3000)]
    state = folded(records, state)
    assert len(process.modes["dp"].steps) == STEPS_KEPT
    assert weight() <= half + 100 + 64 + 32 * 3
    assert state.warning_count == 3000
    assert len(state.host.util) == len(state.host.mem) == HISTORY_KEPT
    assert len(process.calls_kept) == CALLS_KEPT
    assert len(process.calls_in_step) <= ROOTS_KEPT


def test_the_same_records_give_the_same_state() -> None:
    payloads = [*Training().begin(), *Training().run(100)]
    assert folded(decoded(payloads)) == folded(decoded(payloads))


def test_folding_asks_no_clock_and_opens_nothing() -> None:
    """The import contract says it of the package; this says it of what is loaded with it."""
    import subprocess

    code = "import sys; before = set(sys.modules); import dpmon.model; print(sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in json.loads(out.replace("'", '"'))}
    assert not loaded & {"textual", "rich", "torch", "threading", "socket", "sqlite3", "subprocess", "pynvml"}


# ------------------------------------------------------------------------------------------------ pauses


def a_pause(paused: bool, t_s: float, **more: object) -> Event:
    return Event("pause", {"process": 0, "rank": None, "t_s": t_s, "step": 5, "paused": paused, **more})


def steps_from(start_s: float, count: int, first: int = 1) -> list[Record]:
    """Steps of a tenth of a second, one after the other."""
    tenth = SECOND // 10
    return [
        a_step(step=first + n, start_ns=int(start_s * SECOND) + n * tenth, wall_ns=tenth, samples=3)
        for n in range(count)
    ]


def test_a_pause_has_a_beginning_and_an_end() -> None:
    state = folded([*steps_from(1.0, 20), a_pause(True, 3.0)])
    process = state.processes[0]
    assert process.paused_since_ns == 3 * SECOND
    assert speed(process, 4 * SECOND).reason == "the training is paused"
    folded([a_pause(False, 63.0, paused_s=60.0)], state)
    assert (process.paused_since_ns, process.paused_ns) == (None, 60 * SECOND)
    assert [(change.paused, change.t_ns, change.paused_ns, change.step) for change in state.pauses] == [
        (True, 3 * SECOND, None, 5),
        (False, 63 * SECOND, 60 * SECOND, 5),
    ]
    assert state.ignored == 0


def test_a_pause_is_no_part_of_the_speed() -> None:
    before = [*steps_from(1.0, 20), a_pause(True, 3.0), a_pause(False, 8.0, paused_s=5.0)]
    state = folded(before)
    assert speed(state.processes[0], 8 * SECOND).steps_per_s is None
    folded(steps_from(8.0, 20, 21), state)
    assert speed(state.processes[0], 10 * SECOND).steps_per_s == pytest.approx(10)
    assert speed(state.processes[0], 10 * SECOND).samples_per_s == pytest.approx(30)


def test_a_step_ends_a_pause_whose_end_was_missed() -> None:
    state = folded([*steps_from(1.0, 3), a_pause(True, 3.0), *steps_from(2.0, 1, 4)])
    assert state.processes[0].paused_since_ns == 3 * SECOND  # that step began before it
    folded(steps_from(9.0, 1, 5), state)
    assert state.processes[0].paused_since_ns is None


def test_a_pause_that_was_refused() -> None:
    state = folded([a_pause(False, 1.0, refused="ranks")])
    assert (state.pauses[0].refused, state.processes[0].paused_since_ns) == ("ranks", None)


@pytest.mark.parametrize(
    "data", [{}, {"process": 0}, {"process": "0", "paused": True}, {"process": True, "paused": True}, {"paused": 1}]
)
def test_a_pause_that_makes_no_sense(data: dict[str, object]) -> None:
    state = folded([Event("pause", data)])
    assert (state.ignored, state.pause_count) == (1, 0)


def test_a_pause_of_no_known_length() -> None:
    for seconds in (float("nan"), float("inf"), -1.0, "60", True):
        state = folded([a_pause(True, 1.0), a_pause(False, 2.0, paused_s=seconds)])
        assert (state.processes[0].paused_ns, state.pauses[1].paused_ns) == (0, None)


def test_times_of_devices_that_are_not_known_any_more_are_not_shown_for_ever() -> None:
    """A device is lost: what was known of it is among the newest for a while only."""

    def part(number: int, took: float | None) -> list[Record]:
        call = a_call(step=number, replicas=(Replica(0, "cuda:0", 0, 1, (), (), took),))
        return [call, a_step(step=number, device_ms={"forward": took, "backward": took})]

    records = [record for number in range(1, 4) for record in part(number, float(number))]
    state = folded(records)
    process = state.processes[0]
    (track,) = process.calls.values()
    mode = process.modes["dp"]
    assert (list(mode.forward_ms), list(track.device_ms[0])) == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    for number in range(4, 130):
        for record in part(number, None):
            fold(state, record)
    assert (median_known(mode.device_ms["backward"]), median_known(track.device_ms[0])) == (2.5, 2.5)
    for record in [*part(130, None), *part(131, None)]:
        fold(state, record)
    assert (median_known(mode.forward_ms), mode.device_ms, track.device_ms) == (None, {}, {})


def mode_event(root: str, mode: str, step: int, **more: object) -> Event:
    data = {"process": 0, "t_s": float(step), "step": step, "root": root, "mode": mode, "requested_by": "user"}
    return Event("mode", {**data, "devices": ["cpu:0"], "virtual": False, "reason": None, "refused": None, **more})


def test_a_bare_root_beside_one_that_is_split_does_not_make_the_mode_single() -> None:
    """A head, a teacher: each announces its own mode, and is called in each step."""
    state = State()
    modes = []
    for number in range(1, 9):
        mode = "dp" if number < 5 else "single"
        for call in (a_call(step=number, mode=mode), a_call(step=number, root="Head", via=None, mode="single")):
            state = fold(state, call)
            modes.append(state.processes[0].mode)
        state = fold(state, a_step(step=number, mode=mode))
    assert modes == ["dp"] * 8 + ["dp"] * 2 + ["single"] * 6, "a step later than the last of it"


def test_refusals_of_roots_that_are_gone_do_not_stay() -> None:
    state = folded([a_call(), mode_event("Old", "single", 10, refused="it is compiled")])
    process = state.processes[0]
    assert list(process.refusals) == ["Old"]
    fold(state, mode_event("New", "dp", 60))
    assert list(process.refusals) == ["Old"], "it may have answered to the same request"
    fold(state, mode_event("New", "single", 5000))
    assert list(process.refusals) == []


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_an_evaluation_has_neither_training_nor_gradients(training: bool, grad: bool) -> None:
    """Times of another kind are put aside only for what is one."""
    state = folded([a_call(replicas=(Replica(0, "cuda:0", 0, 9, (), ()),)) for _ in range(3)])
    (track,) = state.processes[0].calls.values()
    call = a_call(replicas=(Replica(0, "cuda:0", 0, 1, (), ()),), training=training, grad=grad)
    assert call.evaluates == (not training and not grad)
    fold(state, call)
    assert list(track.replica_ns[0]) == ([1] if call.evaluates else [9, 9, 9, 1])


def test_what_a_lone_replica_copies_is_in_one_phase_only() -> None:
    """It runs on the training thread: the step's forward is without its copies, the call's own phase with them."""
    own = dict.fromkeys(STEP_PHASES, 0) | {"copy": 9_000, "forward": 2_000}
    found = dict(zip(PHASES, with_calls(own.values(), [200, 300, 10_100, 100]), strict=True))
    names = ("scatter", "replicate", "apply", "gather", "forward", "copy")
    assert [found[name] for name in names] == [200, 300, 1_400, 100, 0, 9_000]
    elsewhere = dict(zip(PHASES, with_calls(own.values(), [200, 300, 20_000, 100]), strict=True))
    assert [elsewhere[name] for name in names] == [NOT_RUN] * 4 + [2_000, 9_000], "more than the copies explain"
