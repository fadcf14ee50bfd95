"""Begin and end of steps, as the assembler finds them in loops of many kinds. `Script.play` explains the short form."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from dpmon.assemble import Assembler
from dpmon.assemble.device_times import MAX_ROWS
from dpmon.record.record_types import Step
from dpmon.record.span_format import Kind
from support.record_builders import kind_of
from support.script_simulator import (
    MS,
    DecodedRows,
    Script,
    assemble_in_portions,
    assemble_script,
    check_numbers,
    decode_rows,
)

LEARN, FETCHED, LOOK = "fbo", "dfbo", "f"


def of(loop: str) -> DecodedRows:
    return assemble_script(Script().play(loop))


def check(result: DecodedRows) -> None:
    """Check: no gaps in numbers, phases that add up, steps that do not overlap, every call within its step."""
    check_numbers(result.steps)
    assert [call.call for call in result.calls] == list(range(1, len(result.calls) + 1))
    end = 0
    for step in result.steps:
        assert sum(step.phases.values()) == step.wall_ns
        assert step.start_ns >= end
        end = step.start_ns + step.wall_ns
    steps = {(step.kind, step.step): step for step in result.steps}
    for call in result.calls:
        if call.step is None:
            continue
        step = steps[call.kind, call.step]
        assert step.start_ns <= call.start_ns
        assert call.start_ns + call.wall_ns <= step.start_ns + step.wall_ns


LOOPS: dict[str, tuple[str, list[tuple[int, str, int]]]] = {
    "with a loader": ("d l30 d l30 d l10 D w300 " * 2, [(rows, FETCHED, 1) for rows in (30, 30, 10)] * 2),
    "accumulation": ("d f10 b d f10 b o " * 3, [(10, "dfb", 1), (10, FETCHED, 1)] * 3),
    "evaluation only": ("d e30 d e10 D", [(30, "df", 1), (10, "df", 1)]),
    "without a loader": ("m " + "l " * 4, [(8, LEARN, 1)] * 4),
    "accumulation without a loader": ("m " + ("f b " * 3 + "o ") * 4, [(24, LEARN, 3)] * 4),
    "each pass goes through two models": ("m " + ("fA fB b " * 3 + "o ") * 4, [(24, LEARN, 6)] * 4),
    "accumulation and calls for a metric": ("m " + ("f n b " * 3 + "n o ") * 4, [(24, LEARN, 7)] * 4),
    "gan, both called before each pass": ("m1 m2 " + "fM10 fC10 b o1 fM10 fC10 b o2 " * 4, [(10, LEARN, 4)] * 4),
    "gan, its critic has two passes, before or after the maker's call": (
        "m1 m2 " + "fC10 b fC10 b o1 fM10 fC10 b o2 fM10 fC10 b fC10 b o1 fC10 b o2 " * 2,
        [(10, LEARN, 4)] * 4,
    ),
    "hundreds of calls": ("m " + ("f1=0.1 " * 300 + "f64 b o ") * 3, [(64, LEARN, 301)] * 3),
    "hundreds of calls and no optimizer": (("f1=0.1 " * 300 + "b ") * 3, [(1, "fb", 300)] * 3),
    "hundreds of evaluations and one call": ("m " + ("eA1 " * 200 + "lB64 ") * 3, [(64, LEARN, 201)] * 3),
    "no optimizer": ("f b " * 100, [(8, "fb", 1)] * 100),
    "two calls and no optimizer": ("fA fB b " * 50, [(8, "fb", 2)] * 50),
    "nothing goes backward": ("e3 e5 e7 e9", [(rows, LOOK, 1) for rows in (3, 5, 7, 9)]),
    "an optimizer that never steps": ("m e3 e5 e7 e9", [(rows, LOOK, 1) for rows in (3, 5, 7, 9)]),
    "training calls only": ("f " * 200, [(8, LOOK, 1)] * 200),
    "encoder and decoder": ("eA eB eB " * 3, [(8, LOOK, 3)] * 3),
    "gan with a loader": ("d fC10 fM10 fC10 b o1 fC10 b o2 " * 3, [(10, FETCHED, 4)] * 3),
    "gan without a loader": ("m1 m2 " + "fC10 b o1 fM10 fC10 b o2 " * 4, [(10, LEARN, 3)] * 4),
    "three optimizers": ("m " + "fA b o0 fB b o1 fC b o2 " * 3, [(8, LEARN, 3)] * 3),
    "two optimizers after one pass": ("m " + "l o2 " * 4, [(8, LEARN, 1)] * 4),
    "a critic that steps more often": (
        "m " + "lC lC lC fM b o2 " * 3,
        [(8, LEARN, calls) for calls in (1, 1, 1, 2, 1, 1, 2, 1, 1, 1)],
    ),
    "a second optimizer later": ("m " + "lA " * 50 + "fB b o2 " * 51, [(8, LEARN, 1)] * 101),
    "one step of another optimizer first": ("m l " + "f b o2 " * 100, [(8, LEARN, 2)] + [(8, LEARN, 1)] * 99),
    "optimizers one after the other": (
        "m " + "f b o1 " * 3 + "f b o2 " * 3 + "f b o1 " * 2 + "f b o3 " * 2,
        [(8, LEARN, 1)] * 10,
    ),
    "optimizers that are freed": ("m " + "".join(f"{f'f b o{n} ' * 3}g{n} " for n in (1, 2, 3)), [(8, LEARN, 1)] * 9),
    "a cycle that loses its last": (
        "m " + "lA fB b o2 " * 3 + "g2 " + "lA " * 4,
        [(8, LEARN, 2)] * 3 + [(8, LEARN, 1)] * 4,
    ),
    "an optimizer that raises": ("m l f b o! l l l", [(8, LEARN, 1), (16, LEARN, 2), (8, LEARN, 1), (8, LEARN, 1)]),
    "in a closure": ("m " + "o( k( f b ) k( f b ) k( f b ) ) " * 3, [(8, LEARN, 3)] * 3),
    "in an optimizer": ("m " + "o( f b f b f b ) " * 3, [(8, LEARN, 3)] * 3),
    "optimizers within each other": ("m " + "f b o( o2 o3 ) " * 4, [(8, LEARN, 1)] * 4),
    "an optimizer for each parameter in the pass": ("m " + "f b( o0 o1 o2 o3 o4 ) " * 4, [(8, LEARN, 1)] * 4),
    "in a call": ("m " + "f( b o ) " * 4, [(8, LEARN, 1)] * 4),
    "a teacher": ("m " + "eT99 l " * 4, [(8, LEARN, 2)] * 4),
    "a teacher and a loader": ("d eT99 l " * 4, [(8, FETCHED, 2)] * 4),
    "a teacher and an evaluation": (
        "m " + ("eT e " * 3 + "eT l " * 3) * 2,
        ([(8, LOOK, 2)] * 3 + [(8, LEARN, 2)] * 3) * 2,
    ),
    "evaluation first, when it is not known that the model learns": (
        "m e e w300 l l l",
        [(8, LOOK, 1)] * 2 + [(8, LEARN, 1)] * 3,
    ),
    "one model after the other": (
        "eA " * 3 + "eB " * 30,
        [(8, LOOK, 1)] * 2 + [(8, LOOK, 17)] + [(8, LOOK, 1)] * 14,
    ),
    "evaluation before each step": ("m " + "l e e w300 " * 3, ([(8, LEARN, 1)] + [(8, LOOK, 1)] * 2) * 3),
    "one evaluation of the bare model after each step": ("m " + "lW eV " * 3, [(8, LEARN, 1)] * 3),
    "evaluation of the bare model from loaders": (
        "d lW d lW d lW D d eV d eV D w300 " * 2,
        ([(8, FETCHED, 1)] * 3 + [(8, "df", 1)] * 2) * 2,
    ),
    "evaluation without an optimizer": (
        ("f b " * 40 + "e " * 5) * 2,
        ([(8, "fb", 1)] * 40 + [(8, LOOK, 1)] * 5) * 2,
    ),
    "fetched one ahead": (
        "d d e10 d e10 D e10 w300 d d l10 d l10 D l10 w300 " * 2,
        [(10, "df", 1), (10, "df", 1), (10, LOOK, 1), (10, FETCHED, 1), (10, FETCHED, 1), (10, LEARN, 1)] * 2,
    ),
    "a call before the loader": ("m e3 w300 " + "d l " * 3, [(8, FETCHED, 1)] * 3),
    "steps after the loader": ("d l d l d l D l5 l5 " * 2, ([(8, FETCHED, 1)] * 3 + [(5, LEARN, 1)] * 2) * 2),
    "several fetches before a call": ("d d l " * 3, [(8, FETCHED, 1)] * 3),
    "micro-batches": (
        "d d d f5 b f5 b f5 b o " * 2 + "d d f5 b f5 b o",
        [(15, FETCHED, 3), (15, FETCHED, 3), (10, FETCHED, 2)],
    ),
    "micro-batches fetched one ahead, to the loader's end": (
        ("d d d d " + "f5 b " * 3 + "o d d d " + "f5 b " * 3 + "o d d D f5 b f5 b o w300 d e D w300 ") * 2,
        ([(15, FETCHED, 3)] * 2 + [(10, FETCHED, 2), (8, "df", 1)]) * 2,
    ),
    "a model in the dataset": (("d( " + "e1 " * 10 + ") l10 ") * 3, [(10, FETCHED, 11)] * 3),
    "a fetch in a fetch": ("d( d D ) l " * 3, [(8, FETCHED, 1)] * 3),
    "a bad batch": ("d l d! " * 2, [(8, FETCHED, 1)] * 2),
    "a loader left early": ("d l " * 6, [(8, FETCHED, 1)] * 6),
    "copies": ("d c l " * 2, [(8, "dcfbo", 1)] * 2),
    "a loader that is not read any more": (
        "d l d l d " + "l " * 100 + "d l",
        [(8, FETCHED, 1)] * 3 + [(8, LEARN, 1)] * 99 + [(8, FETCHED, 1)],
    ),
    "64 steps for a batch": (("d " + "l " * 64) * 3, [(8, FETCHED, 64)] * 3),
    "an optimizer that stops stepping": (
        "m l l l " + "f=500 b=500 " * 200 + "l l l",
        [(8, LEARN, 1)] * 3 + [(8, "fb", 1)] * 200 + [(8, LEARN, 1)] * 3,
    ),
    "another thread fetches": ("m @5 d " + "@5 d @0 l " * 3, [(8, LEARN, 1)] * 3),
    "training in a thread, the first thread only fetches": ("d @3 d l d l d l", [(8, FETCHED, 1)] * 3),
}


def test_the_last_batches_of_a_loader_are_of_the_step_that_uses_them() -> None:
    (step,) = of("m d=5 d=3 D=2 f b f b o").steps
    assert step.phases["data"] == 10 * MS
    first, second = of("m d=5 D=2 d=3 f b o d=3 f b o").steps
    assert (first.phases["data"], second.phases["data"]) == (3 * MS, 3 * MS), "nothing used the first loader's batch"


@pytest.mark.parametrize("name", LOOPS)
def test_steps(name: str) -> None:
    loop, expected = LOOPS[name]
    result = of(loop)
    assert result.shape() == expected
    check(result)
    gaps = [after.start_ns - before.start_ns - before.wall_ns for before, after in pairwise(result.steps)]
    assert (max(gaps, default=0) > 299 * MS) == ("w300" in loop), "waits are between steps"
    if name in ("without a loader", "gan without a loader", "nothing goes backward"):
        assert not any(gaps)


def walls(steps: list[Step]) -> list[float]:
    """Return the durations of steps, ms."""
    return [step.wall_ns / MS for step in steps]


def ns(step: Step) -> dict[str, float]:
    return {name: round(took / MS, 3) for name, took in step.phases.items() if name != "other"}


def test_phases_are_exclusive() -> None:
    (step,) = of("m d=4( f=2 ) o=3( f=5( c8589934592 ) b=7( c1024 o2=0.5 ) )").steps
    # Each nested phase is followed by 0.1 ms of the outer one.
    assert ns(step) == {"data": 4.1, "copy": 2.0, "forward": 7.1, "backward": 7.2, "optimizer": 3.7}
    assert step.quantities == {"copied_bytes": (1 << 33) + 1024, "updates": 1}


UPDATES: dict[str, tuple[str, list[int]]] = {
    "an optimizer step per batch": ("d l d l d l", [1, 1, 1]),
    "accumulation": ("d f b d f b o d f b d f b o", [0, 1, 0, 1]),
    "accumulation without a loader": ("m " + "f b f b o " * 2, [1, 1]),
    "four optimizer steps per batch": ("d f b o f b o f b o f b o " * 2, [4, 4]),
    "two optimizers that step once each": ("d f b o1 f b o2 " * 2, [1, 1]),
    "two optimizers, one of which steps three times": ("d f b o1 f b o1 f b o1 f b o2 " * 2, [3, 3]),
    "a step that raises": ("d f b o! d l", [0, 1]),
    "a step that is repeated in its own": ("d o( f b o ) d o( f b f b )", [1, 1]),
    "an optimizer for each parameter in the pass": ("d f b( o0 o1 o2 ) d f b( o0 o1 o2 )", [1, 1]),
    "evaluation": ("d l d e", [1, 0]),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_the_steps_of_the_optimizer_that_stepped_most_often(name: str) -> None:
    loop, updates = UPDATES[name]
    assert [step.quantity("updates") or 0 for step in of(loop).steps] == updates


@pytest.mark.parametrize(
    ("loop", "least", "most"),
    [
        ("d l p=100 r=100 p=100 " * 3, 4, 10),
        ("m " + "l r=100 p=100 " * 3, 3, 10),
        ("d f r=100 b " * 3, 100, 110),
        ("d l l l r=100 " * 3, 4, 20),
    ],
)
def test_only_measurements_inside_a_step_are_part_of_it(loop: str, least: float, most: float) -> None:
    found = walls(of(loop).steps)
    assert len(found) == 3
    assert all(least < wall < most for wall in found)


def test_work_after_a_measurement_is_part_of_a_step_without_an_update() -> None:
    """The script of a micro-batch sleeps or logs for 300 ms after its backward pass, in which memory is measured."""
    first, second, *_ = of("m d f b r=2 w300 d f b w300 d l w300 d f b ").steps
    assert 300 < walls([first])[0] < 310
    assert 300 < walls([second])[0] < 310


def test_a_measurement_inside_a_phase_is_subtracted_from_it() -> None:
    (step,) = of("d f b=2( r=50 ) o").steps
    assert ns(step)["backward"] == 2.1
    assert step.phases["other"] > 50 * MS


# ------------------------------------------------------------------------------------------ how it is known


def emitted_at(script: Script) -> list[int]:
    """Return the number of steps that are known after each span, before the end."""
    assembler, found, lines_read = Assembler(), [0], 0
    for at, span in enumerate(script.spans):
        until = script.needed(at + 1)
        payloads = assembler.feed([span], script.lines_between(lines_read, until))
        lines_read = until
        found.append(found[-1] + sum(kind_of(payload) == "step" for payload in payloads))
    return found


@pytest.mark.parametrize(
    ("loop", "part", "known"),
    [
        ("m l l l l", slice(None), [0, 0, 0, 0, 0, 0, 2, 2, 2, 3, 3, 3, 4]),
        ("e " * 70, slice(64, 67), [0, 64, 65]),
        ("f=500 b=500 " * 10, slice(10, None), [0, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]),
        ("m " + "f=0.01 " * 4100, slice(4096, 4099), [0, 4096, 4097]),
    ],
    ids=["at once", "after 64 calls without an optimizer", "after five seconds", "after 4096 calls with one"],
)
def test_when_steps_are_known(loop: str, part: slice, known: list[int]) -> None:
    assert emitted_at(Script().play(loop))[part] == known


@pytest.mark.parametrize(
    ("loop", "calls"),
    [
        ("m " + ("f=5000 b=5000 " * 10 + "o ") * 4, 10),
        ("m " + ("f " * 5000 + "b o ") * 3, 5000),
    ],
    ids=["longer", "more calls"],
)
def test_steps_beyond_the_limit_of_the_wait_are_known_in_the_end(loop: str, calls: int) -> None:
    assert [shape[1:] for shape in of(loop).shape()[-2:]] == [(LEARN, calls)] * 2


def test_a_module_that_is_called_no_more_ends_no_steps() -> None:
    result = of("fA " + "fB " * 500)
    assert len(result.calls) == 501
    assert len(result.steps) > 400


def test_a_step_that_is_too_long_to_be_held_is_divided() -> None:
    script = Script().play("m " + ("d " + "f=0.01 " * 20_000 + "b o ") * 2)
    payloads = assemble_in_portions(script, [])
    assert assemble_in_portions(script, [17_000, 30_000]) == payloads
    result = decode_rows(payloads)
    assert [(step.step, step.step_kind, step.counts.get("updates")) for step in result.steps] == [
        (1, "forward_only", None),
        (1, "training", 1),
        (2, "forward_only", None),
        (2, "training", 1),
    ]
    assert len(result.calls) == 40_000
    check(result)


# ------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize(
    ("loop", "steps", "calls"),
    [
        ("d f @5 d fB99 @0 b o @6 eB @0 " * 3, [(8, FETCHED, 3)] * 3, ["Net", "B", "B"] * 3),
        ("d l D @5 eB", [(8, FETCHED, 1)], ["Net", "B"]),
        ("m " + "l @4 fB b o9 @0 " * 3, [(8, LEARN, calls) for calls in (1, 2, 2)], ["Net", "B"] * 3),
        (
            "d eB @3 d l d l d l @0 eB @3 d l",
            [(8, "df", 2), (8, FETCHED, 1), (8, FETCHED, 2), (8, FETCHED, 1)],
            ["B", "Net", "Net", "Net", "B", "Net"],
        ),
    ],
    ids=["beside", "after the loop", "the first trains on", "another trains"],
)
def test_calls_of_other_threads(loop: str, steps: list[Any], calls: list[str]) -> None:
    result = of(loop)
    assert result.shape() == steps
    assert [call.root for call in result.calls] == calls


def test_time_of_another_thread_is_in_no_phase() -> None:
    assert [ns(step)["forward"] for step in of("d f @5 d f99=3 @0 b o " * 3).steps] == [1.0] * 3


# ------------------------------------------------------------------------------------------ the end

THIRD = "d l d l d f "


@pytest.mark.parametrize(
    ("loop", "uncaught", "steps"),
    [
        ("d f b d f b d f!", None, 2),
        (THIRD + "b=900!", True, 2),
        (THIRD + "o!( b=900! )", True, 2),
        (THIRD + "b=900", False, 3),
        (THIRD + "o( b=900 )", False, 3),
        ("d l d f b! o!", True, 1),
        ("d l d f b! o", False, 2),
        ("d l d f b! d l", None, 3),
        (THIRD, True, 2),
        (THIRD, False, 3),
        (THIRD, None, 2),
        (THIRD + "b", True, 3),
        (THIRD + "b", False, 3),
        (THIRD + "b", None, 3),
        ("f f f", None, 3),
        ("d e", True, 1),
    ],
)
def test_whether_the_last_step_counts(loop: str, uncaught: bool | None, steps: int) -> None:
    """`uncaught`: whether an exception ended the script; None: it was killed, and wrote no end.

    An interrupted pass may have waited long for other ranks, and would distort every mean.
    """
    script = Script().play(loop)
    if uncaught is not None:
        script.line(end=True, uncaught=uncaught)
    assert len(assemble_script(script).steps) == steps


def test_the_last_step_ends_with_its_last_phase() -> None:
    (wall,) = walls(of("d l r=100").steps)
    assert round(wall, 3) == 4.3


@pytest.mark.parametrize("is_known", [True, False])
def test_a_step_ends_with_its_last_phase_before_another_loop(is_known: bool) -> None:
    """After 2 training steps, an evaluation builds its dataset. The loop of a fetch that still runs is not known."""
    script = Script().play("m")

    def fetch(loop: int) -> None:
        with script.phase("fetch", site=loop):
            pass

    for _ in range(2):
        fetch(1)
        script.play("f b o w10")
    script.wait(500)
    if not is_known:
        script.event("loader")
    fetch(2 if is_known else 0)
    script.play("e")
    fetch(1)
    script.play("f b o")
    found = [round(wall, 2) for wall in walls(assemble_script(script).steps)]
    assert found == [14.4, 4.3, 2.1, 4.3]


# ------------------------------------------------------------------------------------------ what is under way


def test_a_fetch_that_has_begun_ends_the_step() -> None:
    script = Script().play("d l d l d=5000")
    whole = assemble_script(script).steps
    assembler = Assembler()
    out = assembler.feed(script.spans[:-1], script.lines_between(0, len(script.lines)))
    assert len(decode_rows(out).steps) == 1
    assert assembler.take_current_span(Kind.BACKWARD, script.spans[-1].start) == []
    assert assembler.take_current_span(Kind.FETCH, script.spans[-2].start) == []
    out += assembler.take_current_span(Kind.FETCH, script.spans[-1].start)
    assert decode_rows(out).steps == whole
    out += assembler.feed(script.spans[-1:], [])
    out += assembler.finish()
    assert decode_rows(out).steps == whole


def test_calls_with_unknown_rows_do_not_reduce_the_samples() -> None:
    """Two batches are fetched together, then called one after the other."""
    script = Script()
    net = script.model()
    script.makes_optimizer()
    for known in (0, 1):
        script.fetch()
        script.fetch()
        for at in (0, 1):
            script.call(net, rows=10)
            if at != known:
                script.spans[-1] = script.spans[-1]._replace(inputs=0)
            script.backward()
        script.optimizer()
    assert [step.samples for step in assemble_script(script).steps] == [10, 10]


def test_calls_of_other_threads_do_not_wait_for_ever_behind_a_step_without_device_times() -> None:
    script = Script()
    net = script.model()
    script.fetch()
    script.call(net, timed=True)
    script.backward()
    script.optimizer()
    script.fetch(over=True)
    with script.on_thread(3):
        for _ in range(3 * MAX_ROWS):
            script.evaluate(net)
    found = Assembler().feed(script.spans, script.lines_between(0, len(script.lines)))
    assert len(decode_rows(found).calls) >= 2 * MAX_ROWS
