"""When the phases of a step ran, as the assembler records it."""

from __future__ import annotations

import pytest

from dpmon.record.record_types import MAX_SPANS, Step
from dpmon.record.span_format import Flag
from support.script_simulator import MS, Script, assemble_script, check_spans_of_step


def ran(step: Step) -> list[tuple[str, float, float]]:
    """Phase, start and end in ms."""
    assert step.spans is not None
    return [(name, at / MS, (at + took) / MS) for name, at, took in step.spans]


def only(script: Script) -> Step:
    (step,) = assemble_script(script).steps
    return step


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("f b f b c o", "f 0 1 b 1.1 2.1 f 2.2 3.2 b 3.3 4.3 c 4.4 5.4 o 5.5 6.5"),
        ("o( f( c b ) b )", "o 0 5.4 f 0.5 3.7 c 1 2 b 2.1 3.1 b 3.8 4.8"),
        ("o( k( f b ) k( f ) )", "o 0 0.5 f 1 2 b 2.1 3.1 o 3.7 3.8 f 4.3 5.3 o 5.9 6.5"),
        ("d f( @2 c @0 ) @2 eB @0 b o", "d 0 1 f 1.1 3.2 b 4.4 5.4 o 5.5 6.5"),
        ("d=7000.123456 f=5000 b=0 o", "d 0 7000.123456 f 7000.223456 12000.223456 b 12000.323456 12000.323456 o {o}"),
    ],
    ids=["several", "nested", "in a closure", "of other threads", "longer than 32 bits"],
)
def test_spans_follow_each_other_or_are_nested(loop: str, expected: str) -> None:
    step = assemble_script(Script().play(loop)).steps[0]
    spans = [f"{name[0]} {begin:.11g} {end:.11g}" for name, begin, end in ran(step)]
    assert " ".join(spans) == expected.format(o="12000.423456 12001.423456")
    check_spans_of_step(step)


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
    check_spans_of_step(step)


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_keeps_the_first_of_too_many_spans(nested: bool) -> None:
    copies = "c " * MAX_SPANS
    step = only(Script().play(f"d f {f'o( {copies})' if nested else copies} b o"))
    assert step.spans is not None
    assert (len(step.spans), step.missing_spans) == (MAX_SPANS, 4 + nested)
    assert [name for name, _, _ in step.spans][:4] == ["data", "forward", "optimizer" if nested else "copy", "copy"]
    check_spans_of_step(step)
