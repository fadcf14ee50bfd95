"""When the phases of a step ran, as the assembler records it."""

from __future__ import annotations

import random

import pytest
from pretend import MS, START, Script, apart, assembled, decoded, in_portions, resumed_at
from test_assemble_resumed import Chance

from dpmon.assemble import step_rules
from dpmon.assemble.step_totals import StepTotals
from dpmon.record.history_rows import MAX_SPANS, StepRow
from dpmon.record.kinds import Step
from dpmon.record.spans import Flag


def ran(step: Step) -> list[tuple[str, float, float]]:
    """Phase, start and end in ms."""
    assert step.spans is not None
    return [(name, at / MS, (at + took) / MS) for name, at, took in step.spans]


def only(script: Script) -> Step:
    (step,) = assembled(script).steps
    return step


def check(step: Step) -> None:
    """Check that spans are in order, nested or separate, and add up to the phases of the step."""
    assert step.spans is not None
    assert list(step.spans) == sorted(step.spans, key=lambda span: (span.offset_ns, -span.host_ns))
    own: dict[str, int] = {}
    around: list[tuple[str, int]] = []
    for name, at, took in step.spans:
        assert 0 <= at <= at + took <= step.wall_ns
        while around and around[-1][1] <= at:
            around.pop()
        if around:
            assert at + took <= around[-1][1]
            own[around[-1][0]] -= took
        own[name] = own.get(name, 0) + took
        around.append((name, at + took))
    if not step.missing_spans:
        assert own == {name: took for name, took in step.phases.items() if name != "other"}


def test_a_usual_step() -> None:
    script = Script()
    net = script.model()
    for _ in range(3):
        script.fetch()
        script.learn(net)
    script.fetch(over=True)
    steps = assembled(script).steps
    assert [ran(step) for step in steps] == 3 * [
        [("data", 0, 1), ("forward", 1.1, 2.1), ("backward", 2.2, 3.2), ("optimizer", 3.3, 4.3)]
    ]
    assert [step.missing_spans for step in steps] == [0, 0, 0]


def test_several_calls_and_backward_passes() -> None:
    script = Script()
    net = script.model()
    for _ in range(2):
        script.call(net)
        script.backward()
    script.copy()
    script.optimizer()
    assert ran(only(script)) == [
        *(("forward", 0, 1), ("backward", 1.1, 2.1), ("forward", 2.2, 3.2), ("backward", 3.3, 4.3)),
        *(("copy", 4.4, 5.4), ("optimizer", 5.5, 6.5)),
    ]


def test_nested_phases_come_after_the_one_around_them() -> None:
    script = Script()
    net = script.model()
    learns = script.called(net, True, 8)
    with script.phase("optimizer", 1.0, site=1):
        with script.phase("call", 1.0, *learns):
            script.copy()
            script.backward()
        script.backward()
    step = only(script)
    assert ran(step) == [
        *(("optimizer", 0, 5.4), ("forward", 0.5, 3.7), ("copy", 1.0, 2.0), ("backward", 2.1, 3.1)),
        ("backward", 3.8, 4.8),
    ]
    check(step)


def test_the_outer_of_two_spans_with_equal_times_comes_first() -> None:
    script = Script()
    script.call(script.model())
    with script.phase("optimizer", 0, site=1), script.phase("backward", 0):
        script.wait(1)
    script.spans[-1] = script.spans[-1]._replace(took=script.spans[-2].took)
    assert ran(only(script)) == [("forward", 0, 1), ("optimizer", 1.1, 2.1), ("backward", 1.1, 2.1)]


def test_primitives_called_by_the_script_are_forward_even_inside_a_call() -> None:
    script = Script()
    net, hand = script.model(), script.model("Hand", "data_parallel", ["cpu:0", "cpu:1"])

    def by_hand() -> None:
        for name in ("scatter", "parallel_apply", "gather"):
            learns = (Flag.TRAINING | Flag.GRAD) * (name == "parallel_apply")
            with script.phase(name, 1.0, Flag.BY_SCRIPT | Flag.DP | learns, hand if learns else 0):
                pass

    with script.phase("call", 1.0, *script.called(net, True, 8)):
        by_hand()
    by_hand()
    script.backward()
    script.optimizer()
    step = only(script)
    assert ran(step) == [
        *(("forward", 0, 4.3), ("forward", 0.5, 1.5), ("forward", 1.6, 2.6), ("forward", 2.7, 3.7)),
        *(("forward", 4.4, 5.4), ("forward", 5.5, 6.5), ("forward", 6.6, 7.6), ("backward", 7.7, 8.7)),
        ("optimizer", 8.8, 9.8),
    ]
    check(step)


def test_spans_of_other_threads_are_not_in_the_step() -> None:
    script = Script()
    net, beside = script.model(), script.model("Beside")
    script.fetch()
    with script.phase("call", 1.0, *script.called(net, True, 8)), script.on_thread(2):
        script.copy()
    with script.on_thread(2):
        script.evaluate(beside)
    script.backward()
    script.optimizer()
    result = assembled(script)
    assert len(result.calls) == 2
    assert ran(result.steps[0]) == [
        *(("data", 0, 1), ("forward", 1.1, 3.2), ("backward", 4.4, 5.4), ("optimizer", 5.5, 6.5))
    ]


def test_a_long_step() -> None:
    """Its times take more than 32 bits."""
    script = Script()
    net = script.model()
    script.fetch(7000.123456)
    script.call(net, ms=5000)
    script.backward(0)
    script.optimizer()
    step = only(script)
    assert ran(step)[:3] == [
        ("data", 0, 7000.123456),
        ("forward", 7000.223456, 12000.223456),
        ("backward", 12000.323456, 12000.323456),
    ]
    check(step)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("held", [3, step_rules.MAX_HELD])
def test_a_step_keeps_the_first_of_too_many_spans(monkeypatch: pytest.MonkeyPatch, held: int, nested: bool) -> None:
    monkeypatch.setattr(step_rules, "MAX_HELD", held)
    script = Script()
    net = script.model()
    script.fetch()
    script.call(net)
    if nested:
        with script.phase("optimizer", 1.0, site=1):
            for _ in range(MAX_SPANS):
                script.copy()
    else:
        for _ in range(MAX_SPANS):
            script.copy()
    script.backward()
    script.optimizer()
    step = only(script)
    assert step.spans is not None
    assert (len(step.spans), step.missing_spans) == (MAX_SPANS, 4 + nested)
    assert [name for name, _, _ in step.spans][:4] == ["data", "forward", "optimizer" if nested else "copy", "copy"]
    check(step)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("held", [3, step_rules.MAX_HELD])
def test_spans_of_random_loops_are_in_order(monkeypatch: pytest.MonkeyPatch, held: int, seed: int) -> None:
    """Also if they are read in portions, or by a successor."""
    monkeypatch.setattr(step_rules, "MAX_HELD", held)
    script = Chance(seed).run(8)
    whole = in_portions(script, [])
    assert decoded(whole).steps
    for step in decoded(whole).steps:
        check(step)
    draw = random.Random(seed)
    for cut in sorted(draw.sample(range(len(script.spans)), min(6, len(script.spans)))):
        assert apart(in_portions(script, [cut])) == apart(whole)
        before, after = resumed_at(script, cut)
        for step in decoded([*before, *after]).steps:
            check(step)


def test_the_starts_count_from_the_start_of_the_step() -> None:
    script = Script()
    net = script.model()
    script.wait(50)
    script.fetch()
    script.learn(net)
    assert only(script).start_ns == START + 50 * MS


def test_spans_that_reach_out_of_the_step_end_with_it() -> None:
    """Only damaged spans do."""
    totals = StepTotals()
    totals.spans = [(1, 90, 1 << 40), (2, 150, 20), (3, 1 << 50, 7)]
    row = totals.row(1, 100, 60)
    assert isinstance(row, StepRow)
    assert row.spans == [(1, 0, 60), (2, 50, 10), (3, 60, 0)]
