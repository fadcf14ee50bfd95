"""Calls as the assembler records them: phases, replicas, stages and device times, and events among them."""

from __future__ import annotations

from typing import Any

import pytest

from dpmon.assemble import Assembler
from dpmon.record.record_types import UNTIMED, Call
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import Flag, Kind, Span
from support.script_simulator import MS, Script, assemble_script, decode_rows

GPUS = ["cuda:0", "cuda:1"]
LEARNS = Flag.TRAINING | Flag.GRAD


def ran(call: Call) -> dict[str, tuple[float, float]]:
    return {name: (phase.offset_ns / MS, phase.host_ns / MS) for name, phase in call.phases.items()}


def shapes(sizes: Any) -> Any:
    return None if sizes is None else [(size.path, size.shape) for size in sizes]


def test_a_plain_call() -> None:
    script = Script()
    net = script.model("Net", absent={"device_ms": "it is the CPU"})
    script.call(net, rows=6)
    (call,) = assemble_script(script).calls
    assert (call.root, call.via, call.mode, call.training, call.grad, call.failed) == (
        *("Net", None, "single", True, True),
        False,
    )
    assert (shapes(call.inputs), shapes(call.outputs)) == ([("0", (6, 4))], [("", (6, 4))])
    assert [(one.offset_ns, one.host_ns) for one in call.replicas] == [(0, call.wall_ns)]
    assert call.absent == {"device_ms": "it is the CPU"}


def test_a_data_parallel_call() -> None:
    script = Script()
    net = script.model(via="DataParallel", devices=GPUS)
    script.fetch()
    script.parallel(net, rows=8)
    result = assemble_script(script)
    (call,) = result.calls
    assert (call.mode, call.via) == ("dp", "DataParallel")
    assert ran(call) == {
        "scatter": (0.5, 1.0),
        "replicate": (1.6, 1.0),
        "parallel_apply": (2.7, 2.0),
        "gather": (4.8, 1.0),
    }
    assert [(one.device, one.offset_ns / MS, shapes(one.inputs)) for one in call.replicas] == [
        (device, 3.7, [("0", (4, 4))]) for device in GPUS
    ]
    assert [step.mode for step in result.steps] == ["dp"]


def test_a_root_that_contains_wrappers_is_recorded_by_them() -> None:
    script = Script()
    whole, part = script.model("Whole"), script.model("Part", "DataParallel", GPUS)
    script.fetch()
    with script.phase("call", 1.0, *script.called(whole, True, 8)):
        script.parallel(part)
        script.parallel(part)
    result = assemble_script(script)
    assert [(call.root, len(call.phases), len(call.replicas)) for call in result.calls] == [("Part", 4, 2)] * 2
    (step,) = result.steps
    assert (step.mode, step.phases["forward"] / MS) == ("dp", 1 + 2 * 6.5)


def test_a_root_that_was_split_as_a_whole() -> None:
    script = Script()
    net = script.model(devices=GPUS)
    script.parallel(net, kind="call")
    (call,) = assemble_script(script).calls
    assert (call.mode, len(call.phases), len(call.replicas)) == ("dp", 4, 2)


def test_a_phase_that_runs_twice() -> None:
    script = Script()
    net = script.model(via="Own", devices=GPUS)
    script.fetch()
    with script.phase("wrapped", 1.0, LEARNS | Flag.DP, net):
        for name in ("scatter", "scatter", "gather"):
            with script.phase(name, 2.0):
                pass
    (call,) = assemble_script(script).calls
    assert ran(call) == {"scatter": (0.5, 4.0), "gather": (4.7, 2.0)}


def test_a_failed_attempt_leaves_nothing() -> None:
    """Its backward passes and copies remain in the step."""
    script = Script()
    net = script.model(via="DataParallel", devices=["cuda:0"])
    script.fetch()
    with script.phase("wrapped", 1.0, LEARNS | Flag.SINGLE, net, inputs=script.sizes(8), outputs=script.sizes(8)):
        with script.phase("scatter", 2.0):
            script.copy()
        script.write(Kind.REPLICA, script.now, 1000, Flag.FAILED, 1)
        script.write(Kind.RESTARTED, script.now, 0)
        script.backward(3.0)
    result = assemble_script(script)
    (call,), (step,) = result.calls, result.steps
    assert (call.phases, [(one.offset_ns, one.host_ns) for one in call.replicas]) == ({}, [(0, call.wall_ns)])
    assert (step.phases["copy"] / MS, step.phases["backward"] / MS) == (1, 3)


def test_replicas_that_are_missing_or_too_many() -> None:
    script = Script()
    net = script.model(via="DataParallel", devices=["cuda:0", "cuda:1", "cuda:2"])
    with script.phase("wrapped", 1.0, Flag.DP, net), script.phase("parallel_apply"):
        for index in (2, 0, 2, 77):
            script.write(Kind.REPLICA, script.now, 1000 + index, 0, index, inside=Kind.WRAPPED)
    (call,) = assemble_script(script).calls
    assert [one.host_ns for one in call.replicas] == [1000, 0, 1002]


def test_a_wrapper_over_one_device_gets_the_whole_batch() -> None:
    script = Script()
    net = script.model(via="DataParallel", devices=["cuda:0"])
    size = script.sizes(8)
    with script.phase("wrapped", 4.0, Flag.SINGLE, net, inputs=size, outputs=size), script.phase("scatter", 1.0):
        pass
    (call,) = assemble_script(script).calls
    (replica,) = call.replicas
    assert (replica.offset_ns / MS, replica.host_ns / MS, shapes(replica.inputs)) == (3.0, 2.1, [("0", (8, 4))])


def test_a_failed_call_has_no_outputs() -> None:
    first, _ = assemble_script(Script().play("f! f")).calls
    assert (first.failed, first.outputs, shapes(first.inputs)) == (True, None, [("0", (8, 4))])


def test_stages() -> None:
    script = Script()
    net = script.model(devices=GPUS)
    stages = [script.define({"device": device, "parts": [f"part{at}"]}) for at, device in enumerate(GPUS)]
    size = script.sizes(8)
    with script.phase("call", 4.0, LEARNS | Flag.SINGLE, net):
        script.write(Kind.STAGE, script.now, MS, 0, stages[0], inputs=size, outputs=size)
        script.write(Kind.STAGE, script.now, (1 << 64) - 1, Flag.FAILED, stages[1], inputs=size)
        script.write(Kind.STAGE, script.now, MS, 0, 99)
    (call,) = assemble_script(script).calls
    assert [(one.device, one.parts, one.host_ns, shapes(one.outputs)) for one in call.stages] == [
        ("cuda:0", ("part0",), MS, [("0", (8, 4))]),
        ("cuda:1", ("part1",), None, None),
    ]
    assert call.replicas == ()


@pytest.mark.parametrize(("dim", "rows"), [(0, 3), (1, 5), (2, 9), (-1, 5), (7, None)])
def test_rows(dim: int, rows: int | None) -> None:
    script = Script()
    net = script.model(dim=dim)
    sizes = script.define(
        [["0.w", [], "float32", 4], ["0.x", [3, 5], "float32", 60], ["1", [7, 8, 9], "float32", 2016]]
    )
    with script.phase("call", 1.0, LEARNS, net, inputs=sizes):
        pass
    (step,) = assemble_script(script).steps
    assert step.samples == rows


def test_samples_are_those_of_calls_that_learn() -> None:
    assert [step.samples for step in assemble_script(Script().play("d eT99 f8 f6 d eT99")).steps] == [8, 99]


@pytest.mark.parametrize(
    ("loop", "samples"),
    [
        ("d d f8 b f6 b o " * 2, [14, 14]),
        ("d d d f8 b f6 b o d d f8 b f6 b o d D f8 b f6 b o", [14, 14, 14]),
        ("d f8 b f8 b o " * 2, [8, 8]),
        ("m " + "f8 b f6 b o " * 2, [14, 14]),
    ],
    ids=["fetched together", "with one read ahead", "two passes over one batch", "no loader"],
)
def test_samples_of_several_backward_passes(loop: str, samples: list[int]) -> None:
    assert [step.samples for step in assemble_script(Script().play(loop)).steps] == samples


# ------------------------------------------------------------------------------------------ by hand


def compose(script: Script, names: str, site: int, failed: bool = False) -> None:
    """Call primitives by their first letters; scatter gets 4 rows, then 5 and so on."""
    rows = 4
    for letter in names:
        name = {"s": "scatter", "r": "replicate", "p": "parallel_apply", "g": "gather"}[letter]
        more: dict[str, int] = {}
        if letter == "s":
            more["inputs"] = script.sizes(rows)
            rows += 1
        elif letter == "g":
            more["outputs"] = script.sizes(9, path="")
        flags = Flag.BY_SCRIPT | (LEARNS | Flag.DP | Flag.FAILED * failed if letter == "p" else 0)
        with script.phase(name, 1.0, flags, site if letter == "p" else 0, **more):
            if letter == "p":
                for index in range(2):
                    script.write(Kind.REPLICA, script.now, 1000, 0, index)


@pytest.mark.parametrize(
    ("names", "absent", "inputs", "outputs"),
    [
        ("srpg", set(), [("0", (4, 4))], True),
        ("ssrpg", set(), [("0", (4, 4))], True),
        ("rpg", {"scatter", "inputs"}, None, True),
        ("spg", {"replicate"}, [("0", (4, 4))], True),
        ("srp", {"gather", "outputs"}, [("0", (4, 4))], False),
    ],
)
@pytest.mark.parametrize("within", [None, "call", "optimizer"])
def test_a_call_composed_by_hand(names: str, absent: set[str], inputs: Any, outputs: bool, within: str | None) -> None:
    script = Script()
    net = script.model("Net", "data_parallel", GPUS)
    other = script.model("Whole")
    script.fetch()
    if within is None:
        compose(script, names, net)
    else:
        with script.phase(within, 1.0, *script.called(other, True, 8)):
            compose(script, names, net)
    script.backward()
    result = assemble_script(script)
    (call,), (step,) = result.calls, result.steps
    assert (call.root, call.mode, set(call.absent)) == ("Net", "dp", absent)
    assert (shapes(call.inputs), call.outputs is not None) == (inputs, outputs)
    assert call.wall_ns / MS == pytest.approx(len(names) * 1.1 - 0.1)
    assert [name[0] for name in call.phases] == sorted(set(names), key="srpg".index)
    assert len(call.replicas) == 2
    took = step.phases["forward"] / MS
    assert took == pytest.approx(len(names) * 1.1 + 1 if within == "call" else len(names))


def test_calls_by_hand_that_follow_each_other() -> None:
    script = Script()
    net = script.model("Net", "data_parallel", GPUS)
    script.fetch()
    compose(script, "srpsrpg", net)
    compose(script, "gsr", net)
    script.backward()
    script.fetch()
    compose(script, "pg", net)
    compose(script, "srp", net, failed=True)
    compose(script, "g", net)
    calls = assemble_script(script).calls
    assert [(call.step, call.call, "".join(name[0] for name in call.phases), call.failed) for call in calls] == [
        (1, 1, "srp", False),
        (1, 2, "srpg", False),
        (2, 3, "pg", False),
        (2, 4, "srp", True),
    ]


def test_steps_of_calls_by_hand_begin_with_what_is_scattered() -> None:
    script = Script()
    net = script.model("Net", "data_parallel", GPUS)
    for _ in range(70):
        compose(script, "srpg", net)
        script.backward()
    result = assemble_script(script)
    assert [(step.samples, step.mode) for step in result.steps] == [(4, "dp")] * 70
    assert all(len(call.phases) == 4 for call in result.calls)
    assert [call.start_ns for call in result.calls] == [step.start_ns for step in result.steps]


# ------------------------------------------------------------------------------------------ device times


def on_gpus(script: Script, net: int) -> list[Span]:
    script.fetch()
    script.spans[-1] = script.spans[-1]._replace(flags=Flag.TIMED)
    with script.phase("call", 2.0, LEARNS | Flag.SINGLE | Flag.TIMED, net), script.phase("copy", 1.0, Flag.TIMED):
        pass
    script.backward()
    script.spans[-1] = script.spans[-1]._replace(flags=Flag.TIMED)
    return script.spans[-4:]


def test_device_times_are_exclusive_and_of_the_slowest_device() -> None:
    script = Script()
    net = script.model(devices=GPUS)
    fetch, copy, call, backward = on_gpus(script, net)
    script.fetch()
    for device, (data, copied, forward, back) in enumerate([(5, 2, 7, 9), (4, 1, 8, 3)]):
        for span, ms in ((fetch, data), (copy, copied), (call, forward), (backward, back)):
            script.times(span, device, ms, of=2)
    result = assemble_script(script)
    (one,), (step,) = result.calls, result.steps
    assert step.device_ms == {"data": 4.0, "copy": 2.0, "forward": 7.0, "backward": 9.0}
    assert step.untimed is None
    assert one.replicas[0].device_ms == 8.0


def test_device_times_of_a_data_parallel_call() -> None:
    script = Script()
    net = script.model(via="DataParallel", devices=GPUS)
    script.fetch()
    script.parallel(net)
    script.spans = [span._replace(flags=span.flags | Flag.TIMED) if span.inside else span for span in script.spans]
    for at, span in enumerate(script.spans[1:-1], 1):
        script.times(span, 0, at)
    (call,) = assemble_script(script).calls
    assert [phase.device_ms for phase in call.phases.values()] == [1.0, 2.0, 5.0, 6.0]
    assert [one.device_ms for one in call.replicas] == [4.0, 3.0]


@pytest.mark.parametrize(("calls", "forward"), [(10, 10.0), (5000, None)])
def test_a_step_with_too_many_timed_calls_has_no_device_times(calls: int, forward: float | None) -> None:
    script = Script()
    net = script.model()
    script.fetch()
    for _ in range(calls):
        script.call(net, timed=True)
        script.times(script.spans[-1], 0, 1.0)
    (step,) = assemble_script(script).steps
    assert (step.device_ms or {})["forward"] == forward
    assert (step.untimed == UNTIMED[Untimed.TOO_MANY]) == (forward is None)


def test_a_step_without_its_device_times_holds_back_all_later_steps() -> None:
    script = Script()
    net = script.model()
    for _ in range(70):
        script.fetch()
        script.call(net, timed=True)
    assembler = Assembler()
    out = assembler.feed(script.spans, script.lines_between(0, len(script.lines)))
    assert len(decode_rows(out).steps) == 5
    late = decode_rows(out)
    assert {step.untimed for step in late.steps} == {UNTIMED[Untimed.LATE]}
    at = len(script.spans)
    script.times(script.spans[13], 0, 3.0)
    script.times(script.spans[11], 0, 2.0)
    assert assembler.feed(script.spans[at : at + 1], []) == []
    rest = decode_rows([*out, *assembler.feed(script.spans[at + 1 :], [])]).steps[5:]
    assert [step.device_ms for step in rest] == [{"data": None, "forward": 2.0}, {"data": None, "forward": 3.0}]
    last = decode_rows([*out, *assembler.finish()]).steps[5:]
    assert {step.untimed for step in last} == {UNTIMED[Untimed.ENDED]}
    assert len(last) == 63


def test_why_a_time_is_missing() -> None:
    script = Script()
    net = script.model()
    script.fetch()
    script.call(net, timed=True)
    script.times(script.spans[-1], 0, 0.0, why=Untimed.CAPTURED)
    (step,) = assemble_script(script).steps
    assert (step.device_ms, step.untimed) == ({"data": None, "forward": None}, UNTIMED[Untimed.CAPTURED])


# ------------------------------------------------------------------------------------------ events


def test_numbers_of_events_are_filled_in() -> None:
    script = Script().play("d")
    script.event("mode", "next", step=None, call=None, reason="from call {call} of step {step} on", t_s=1.5)
    script.play("f")
    script.event("mode", "last", step=0, call=0, text=3)
    script.play("f")
    script.event("pause", "last", step=0)
    script.play("d")
    script.event("mode", "next", step=0, call=0)
    script.play("f")
    script.event("warning", text="as it {call} is")
    data = [event.data for event in assemble_script(script).events]
    assert data == [
        {"step": 1, "call": 1, "reason": "from call 1 of step 1 on", "t_s": 1.5},
        {"step": 0, "call": 1, "text": 3},
        {"step": 0},
        {"text": "as it {call} is"},
        {"step": 1, "call": 3},
    ]


def test_a_pause_ends_the_open_step() -> None:
    script = Script().play("m l l f")
    at = script.now
    script.event("pause", "last", paused=True, step=0)
    assembler = Assembler()
    out = assembler.feed(script.spans, script.lines_between(0, len(script.lines)))
    assert decode_rows(out).events == []
    out += assembler.feed([], [])
    result = decode_rows(out)
    assert [event.data for event in result.events] == [{"paused": True, "step": 2}]
    assert result.steps[-1].start_ns + result.steps[-1].wall_ns == at
    script.play("p=100")
    script.event("pause", "last", paused=False, step=0)
    script.play("l")
    result = assemble_script(script)
    assert [event.data["step"] for event in result.events] == [2, 2]
    assert max(step.wall_ns for step in result.steps) < 10 * MS


def test_a_memory_record_has_the_step_in_which_it_was_measured() -> None:
    script = Script()
    for _ in range(3):
        script.play("d l")
        with script.phase("memory"):
            pass
        script.event("memory", "last", step=0, devices=[])
    script.fetch()
    assert [event.data["step"] for event in assemble_script(script).events] == [1, 2, 3]


def test_an_event_comes_out_although_nothing_follows() -> None:
    assembler = Assembler()
    assert assembler.feed([], [{"kind": "process", "at": 5, "pid": 7}]) == []
    (event,) = decode_rows(assembler.feed([], [])).events
    assert (event.kind, event.data) == ("process", {"pid": 7})
    assert assembler.finish() == []
