"""Begin and end of steps, as the assembler finds them in loops of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from pretend import MS, Result, Script, assembled, decoded, in_portions
from synthetic import kind_of

from dpmon.assemble import Assembler
from dpmon.assemble.device_waits import MAX_GROUPS
from dpmon.record.kinds import Step
from dpmon.record.spans import Flag, Kind

LEARN, FETCHED, LOOK = "fbo", "dfbo", "f"
Loop = Callable[[Script], None]


def of(loop: Loop) -> Result:
    script = Script()
    loop(script)
    return assembled(script)


def check(result: Result) -> None:
    """Check: no gaps in numbers, phases that add up, steps that do not overlap, every call within its step."""
    assert [step.step for step in result.steps] == list(range(1, len(result.steps) + 1))
    assert [call.call for call in result.calls] == list(range(1, len(result.calls) + 1))
    end = 0
    for step in result.steps:
        assert sum(step.phases.values()) == step.wall_ns
        assert step.start_ns >= end
        end = step.start_ns + step.wall_ns
    steps = {step.step: step for step in result.steps}
    for call in result.calls:
        step = steps[call.step]
        assert step.start_ns <= call.start_ns
        assert call.start_ns + call.wall_ns <= step.start_ns + step.wall_ns


def with_a_loader(script: Script) -> None:
    net = script.model()
    for _ in range(2):
        for rows in (30, 30, 10):
            script.fetch()
            script.learn(net, rows=rows)
        script.fetch(over=True)
        script.wait(300)


def accumulation(script: Script) -> None:
    net = script.model()
    for at in range(6):
        script.fetch()
        script.call(net, rows=10)
        script.backward()
        if at % 2:
            script.optimizer()


def only_looks(script: Script) -> None:
    net = script.model()
    for rows in (30, 10):
        script.fetch()
        script.evaluate(net, rows=rows)
    script.fetch(over=True)


def without_a_loader(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        script.learn(net)


def accumulation_without_a_loader(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        for _ in range(3):
            script.call(net)
            script.backward()
        script.optimizer()


def hundreds_of_calls(script: Script) -> None:
    """As in reinforcement learning, and in recurrent nets with a loop in the script."""
    net = script.model()
    script.makes_optimizer()
    for _ in range(3):
        for _ in range(300):
            script.call(net, rows=1, ms=0.1)
        script.call(net, rows=64)
        script.backward()
        script.optimizer()


def hundreds_of_looks_and_one_that_learns(script: Script) -> None:
    actor, learner = script.model("Actor"), script.model("Learner")
    script.makes_optimizer()
    for _ in range(3):
        for _ in range(200):
            script.evaluate(actor, rows=1)
        script.learn(learner, rows=64)


def no_optimizer(script: Script) -> None:
    """The script changes the weights itself."""
    net = script.model()
    for _ in range(100):
        script.call(net)
        script.backward()


def hundreds_of_calls_and_no_optimizer(script: Script) -> None:
    net = script.model()
    for _ in range(3):
        for _ in range(300):
            script.call(net, rows=1, ms=0.1)
        script.backward()


def two_calls_and_no_optimizer(script: Script) -> None:
    one, two = script.model("One"), script.model("Two")
    for _ in range(50):
        script.call(one)
        script.call(two)
        script.backward()


def nothing_goes_backward(script: Script) -> None:
    net = script.model()
    for rows in (3, 5, 7, 9):
        script.evaluate(net, rows=rows)


def an_optimizer_that_never_steps(script: Script) -> None:
    script.makes_optimizer()
    nothing_goes_backward(script)


def training_calls_only(script: Script) -> None:
    net = script.model()
    for _ in range(200):
        script.call(net)


def encoder_and_decoder(script: Script) -> None:
    one, two = script.model("Encoder"), script.model("Resolver")
    for _ in range(3):
        script.evaluate(one)
        script.evaluate(two)
        script.evaluate(two)


def gan_with_a_loader(script: Script) -> None:
    maker, critic = script.model("Maker"), script.model("Critic")
    for _ in range(3):
        script.fetch()
        script.call(critic, rows=10)
        script.call(maker, rows=10)
        script.call(critic, rows=10)
        script.backward()
        script.optimizer(1)
        script.call(critic, rows=10)
        script.backward()
        script.optimizer(2)


def gan_without_a_loader(script: Script) -> None:
    maker, critic = script.model("Maker"), script.model("Critic")
    script.makes_optimizer(1), script.makes_optimizer(2)
    for _ in range(4):
        script.learn(critic, 1, rows=10)
        script.call(maker, rows=10)
        script.learn(critic, 2, rows=10)


def accumulation_over_two_models(script: Script) -> None:
    """Each backward pass goes through both."""
    encoder, head = script.model("Encoder"), script.model("Head")
    script.makes_optimizer()
    for _ in range(4):
        for _ in range(3):
            script.call(encoder)
            script.call(head)
            script.backward()
        script.optimizer()


def accumulation_with_more_calls(script: Script) -> None:
    """The model is called twice before each backward pass, and for a metric after the last one."""
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        for _ in range(3):
            script.call(net)
            script.call(net, grad=False)
            script.backward()
        script.call(net, grad=False)
        script.optimizer()


def gan_that_makes_twice(script: Script) -> None:
    """Both models are called with gradients before each backward pass."""
    maker, critic = script.model("Maker"), script.model("Critic")
    script.makes_optimizer(1), script.makes_optimizer(2)
    for _ in range(4):
        for optimizer in (1, 2):
            script.call(maker, rows=10)
            script.learn(critic, optimizer, rows=10)


def gan_with_two_passes_of_its_critic(script: Script) -> None:
    """The passes for real and made data come before or after the maker is called."""
    maker, critic = script.model("Maker"), script.model("Critic")
    script.makes_optimizer(1), script.makes_optimizer(2)
    for number in range(4):
        if number % 2:
            script.call(maker, rows=10)
        for _ in range(2):
            script.call(critic, rows=10)
            script.backward()
        script.optimizer(1)
        if not number % 2:
            script.call(maker, rows=10)
        script.learn(critic, 2, rows=10)


def three_optimizers(script: Script) -> None:
    nets = [script.model(name) for name in "ABC"]
    script.makes_optimizer()
    for _ in range(3):
        for number, net in enumerate(nets):
            script.learn(net, number)


def two_optimizers_after_one_pass(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        script.learn(net, 1)
        script.optimizer(2)


def critic_steps_more_often(script: Script) -> None:
    maker, critic = script.model("Maker"), script.model("Critic")
    script.makes_optimizer()
    for at in range(9):
        script.learn(critic, 1)
        if at % 3 == 2:
            script.learn(maker, 2)


def second_optimizer_later(script: Script) -> None:
    one, two = script.model("One"), script.model("Two")
    script.makes_optimizer()
    for _ in range(50):
        script.learn(one, 1)
    for _ in range(51):
        script.learn(two, 2)


def one_step_of_another_optimizer_first(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    script.learn(net, 1)
    for _ in range(100):
        script.learn(net, 2)


def optimizers_one_after_the_other(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for number in (1, 1, 1, 2, 2, 2, 1, 1, 3, 3):
        script.learn(net, number)


def an_optimizer_that_dies(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for number in (1, 2, 3):
        for _ in range(3):
            script.learn(net, number)
        script.gone(number)


def cycle_that_loses_its_last(script: Script) -> None:
    one, two = script.model("One"), script.model("Two")
    script.makes_optimizer()
    for _ in range(3):
        script.learn(one, 1)
        script.learn(two, 2)
    script.gone(2)
    for _ in range(4):
        script.learn(one, 1)


def optimizer_that_raises(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    script.learn(net)
    script.call(net)
    script.backward()
    script.optimizer(failed=True)
    for _ in range(3):
        script.learn(net)


def in_a_closure(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for _ in range(3):
        with script.phase("optimizer", site=1):
            for _ in range(3):
                script.call(net)
                script.backward()


def within_each_other(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        script.call(net)
        script.backward()
        with script.phase("optimizer", site=1):
            script.optimizer(2)
            script.optimizer(3)


def in_the_backward_pass(script: Script) -> None:
    """One optimizer per parameter steps as soon as its gradient is ready."""
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        script.call(net)
        with script.phase("backward"):
            for number in range(5):
                script.optimizer(number)


def in_a_call(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        with script.phase("call", 1.0, *script.called(net, True, 8)):
            script.backward()
            script.optimizer()
        script._sized(8, False)


def a_teacher(script: Script) -> None:
    net, teacher = script.model(), script.model("Teacher")
    script.makes_optimizer()
    for _ in range(4):
        script.evaluate(teacher, rows=99)
        script.learn(net)


def a_teacher_from_a_loader(script: Script) -> None:
    net, teacher = script.model(), script.model("Teacher")
    for _ in range(4):
        script.fetch()
        script.evaluate(teacher, rows=99)
        script.learn(net)


def a_teacher_and_an_evaluation(script: Script) -> None:
    net, teacher = script.model(), script.model("Teacher")
    script.makes_optimizer()
    for _ in range(2):
        for _ in range(3):
            script.evaluate(teacher)
            script.evaluate(net)
        for _ in range(3):
            script.evaluate(teacher)
            script.learn(net)


def evaluation_first(script: Script) -> None:
    """At that time it is not known yet that the model learns."""
    net = script.model()
    script.makes_optimizer()
    script.evaluate(net)
    script.evaluate(net)
    script.wait(300)
    for _ in range(3):
        script.learn(net)


def one_model_after_the_other(script: Script) -> None:
    """Nothing is trained: only some calls of the second model show that the first one is no longer called."""
    first, second = script.model(), script.model()
    for _ in range(3):
        script.evaluate(first)
    for _ in range(30):
        script.evaluate(second)


def evaluation_before_each_step(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    for _ in range(3):
        script.learn(net)
        script.evaluate(net)
        script.evaluate(net)
        script.wait(300)


def evaluation_of_the_bare_model(script: Script) -> None:
    wrapper = script.model(via="DataParallel", module=7)
    bare = script.model(module=7)
    script.makes_optimizer()
    for _ in range(3):
        script.learn(wrapper)
        script.evaluate(bare)


def evaluation_of_the_bare_model_from_loaders(script: Script) -> None:
    wrapper = script.model(via="DataParallel", module=7)
    bare = script.model(module=7)
    for _ in range(2):
        for _ in range(3):
            script.fetch()
            script.learn(wrapper)
        script.fetch(over=True)
        for _ in range(2):
            script.fetch()
            script.evaluate(bare)
        script.fetch(over=True)
        script.wait(300)


def evaluation_without_an_optimizer(script: Script) -> None:
    net = script.model()
    for _ in range(2):
        for _ in range(40):
            script.call(net)
            script.backward()
        for _ in range(5):
            script.evaluate(net)


def fetched_one_ahead(script: Script) -> None:
    """The last batch of a loop is used after its loader has ended."""
    net = script.model()
    for _ in range(2):
        for look in (True, False):
            script.fetch()
            for at in range(3):
                script.fetch(over=at == 2)
                script.evaluate(net, rows=10) if look else script.learn(net, rows=10)
            script.wait(300)


def call_before_the_loader(script: Script) -> None:
    net = script.model()
    script.makes_optimizer()
    script.evaluate(net, rows=3)
    script.wait(300)
    for _ in range(3):
        script.fetch()
        script.learn(net)


def steps_after_the_loader(script: Script) -> None:
    """The script trains on a single batch between two loops."""
    net = script.model()
    for _ in range(2):
        for _ in range(3):
            script.fetch()
            script.learn(net)
        script.fetch(over=True)
        for _ in range(2):
            script.learn(net, rows=5)


def several_fetches_before_a_call(script: Script) -> None:
    """A loader over a loader, and one that is read twice."""
    net = script.model()
    for _ in range(3):
        script.fetch()
        script.fetch()
        script.learn(net)


def micro_batches(script: Script) -> None:
    net = script.model()
    for batches in (3, 3, 2):
        for _ in range(batches):
            script.fetch()
        for _ in range(batches):
            script.call(net, rows=5)
            script.backward()
        script.optimizer()


def model_in_the_dataset(script: Script) -> None:
    net = script.model()
    for _ in range(3):
        with script.phase("fetch"):
            for _ in range(10):
                script.evaluate(net, rows=1)
        script.learn(net, rows=10)


def fetch_in_a_fetch(script: Script) -> None:
    net = script.model()
    for _ in range(3):
        with script.phase("fetch"):
            script.fetch()
            script.fetch(over=True)
        script.learn(net)


def bad_batch(script: Script) -> None:
    net = script.model()
    for _ in range(2):
        script.fetch()
        script.learn(net)
        script.fetch(failed=True)


def left_early(script: Script) -> None:
    net = script.model()
    for batches in (2, 4):
        for _ in range(batches):
            script.fetch()
            script.learn(net)


def copies(script: Script) -> None:
    net = script.model()
    for _ in range(2):
        script.fetch()
        script.copy()
        script.learn(net)


EVALUATED = [(8, LEARN, 1)] + [(8, LOOK, 1)] * 2


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (with_a_loader, [(rows, FETCHED, 1) for rows in (30, 30, 10)] * 2),
        (accumulation, [(10, "dfb", 1), (10, FETCHED, 1)] * 3),
        (only_looks, [(30, "df", 1), (10, "df", 1)]),
        (without_a_loader, [(8, LEARN, 1)] * 4),
        (accumulation_without_a_loader, [(24, LEARN, 3)] * 4),
        (accumulation_over_two_models, [(24, LEARN, 6)] * 4),
        (accumulation_with_more_calls, [(24, LEARN, 7)] * 4),
        (gan_that_makes_twice, [(10, LEARN, 4)] * 4),
        (gan_with_two_passes_of_its_critic, [(10, LEARN, 4)] * 4),
        (hundreds_of_calls, [(64, LEARN, 301)] * 3),
        (hundreds_of_calls_and_no_optimizer, [(1, "fb", 300)] * 3),
        (hundreds_of_looks_and_one_that_learns, [(64, LEARN, 201)] * 3),
        (no_optimizer, [(8, "fb", 1)] * 100),
        (two_calls_and_no_optimizer, [(8, "fb", 2)] * 50),
        (nothing_goes_backward, [(rows, LOOK, 1) for rows in (3, 5, 7, 9)]),
        (an_optimizer_that_never_steps, [(rows, LOOK, 1) for rows in (3, 5, 7, 9)]),
        (training_calls_only, [(8, LOOK, 1)] * 200),
        (encoder_and_decoder, [(8, LOOK, 3)] * 3),
        (gan_with_a_loader, [(10, FETCHED, 4)] * 3),
        (gan_without_a_loader, [(10, LEARN, 3)] * 4),
        (three_optimizers, [(8, LEARN, 3)] * 3),
        (two_optimizers_after_one_pass, [(8, LEARN, 1)] * 4),
        (critic_steps_more_often, [(8, LEARN, n) for n in (1, 1, 1, 2, 1, 1, 2, 1, 1, 1)]),
        (second_optimizer_later, [(8, LEARN, 1)] * 101),
        (one_step_of_another_optimizer_first, [(8, LEARN, 1)] * 101),
        (optimizers_one_after_the_other, [(8, LEARN, 1)] * 10),
        (an_optimizer_that_dies, [(8, LEARN, 1)] * 9),
        (cycle_that_loses_its_last, [(8, LEARN, 2)] * 3 + [(8, LEARN, 1)] * 4),
        (optimizer_that_raises, [(8, LEARN, 1), (16, LEARN, 2), (8, LEARN, 1), (8, LEARN, 1)]),
        (in_a_closure, [(8, LEARN, 3)] * 3),
        (within_each_other, [(8, LEARN, 1)] * 4),
        (in_the_backward_pass, [(8, LEARN, 1)] * 4),
        (in_a_call, [(8, LEARN, 1)] * 4),
        (a_teacher, [(8, LEARN, 2)] * 4),
        (a_teacher_from_a_loader, [(8, FETCHED, 2)] * 4),
        (a_teacher_and_an_evaluation, ([(8, LOOK, 2)] * 3 + [(8, LEARN, 2)] * 3) * 2),
        (evaluation_first, [(8, LOOK, 1)] * 2 + [(8, LEARN, 1)] * 3),
        (one_model_after_the_other, [(8, LOOK, 1)] * 2 + [(8, LOOK, 17)] + [(8, LOOK, 1)] * 14),
        (evaluation_before_each_step, EVALUATED * 3),
        (evaluation_of_the_bare_model, [(8, LEARN, 1), (8, LOOK, 1)] * 3),
        (evaluation_of_the_bare_model_from_loaders, ([(8, FETCHED, 1)] * 3 + [(8, "df", 1)] * 2) * 2),
        (evaluation_without_an_optimizer, ([(8, "fb", 1)] * 40 + [(8, LOOK, 1)] * 5) * 2),
        (
            fetched_one_ahead,
            [(10, "df", 1), (10, "df", 1), (10, LOOK, 1), (10, FETCHED, 1), (10, FETCHED, 1), (10, LEARN, 1)] * 2,
        ),
        (call_before_the_loader, [(3, LOOK, 1)] + [(8, FETCHED, 1)] * 3),
        (steps_after_the_loader, ([(8, FETCHED, 1)] * 3 + [(5, LEARN, 1)] * 2) * 2),
        (several_fetches_before_a_call, [(8, FETCHED, 1)] * 3),
        (micro_batches, [(15, FETCHED, 3), (15, FETCHED, 3), (10, FETCHED, 2)]),
        (model_in_the_dataset, [(10, FETCHED, 11)] * 3),
        (fetch_in_a_fetch, [(8, FETCHED, 1)] * 3),
        (bad_batch, [(8, FETCHED, 1)] * 2),
        (left_early, [(8, FETCHED, 1)] * 6),
        (copies, [(8, "dcfbo", 1)] * 2),
    ],
)
def test_steps(loop: Loop, expected: list[tuple[int | None, str, int]]) -> None:
    result = of(loop)
    assert result.shape() == expected
    check(result)


# ------------------------------------------------------------------------------------------ edges


def walls(steps: list[Step]) -> list[float]:
    """Return the durations of steps, ms."""
    return [step.wall_ns / MS for step in steps]


@pytest.mark.parametrize(
    "loop",
    [
        evaluation_first,
        evaluation_before_each_step,
        evaluation_of_the_bare_model_from_loaders,
        fetched_one_ahead,
        call_before_the_loader,
        with_a_loader,
    ],
)
def test_time_between_an_evaluation_and_the_training_is_in_no_step(loop: Loop) -> None:
    assert max(walls(of(loop).steps)) < 300


@pytest.mark.parametrize("loop", [with_a_loader, without_a_loader, gan_without_a_loader, nothing_goes_backward])
def test_steps_follow_each_other(loop: Loop) -> None:
    steps = of(loop).steps
    gaps = [after.start_ns - before.start_ns - before.wall_ns for before, after in pairwise(steps)]
    assert sum(gap > 0 for gap in gaps) == (loop is with_a_loader)


def ns(step: Step) -> dict[str, float]:
    return {name: round(took / MS, 3) for name, took in step.phases.items() if name != "other"}


def test_phases_are_exclusive() -> None:
    script = Script()
    net = script.model()
    script.makes_optimizer()
    with script.phase("fetch", 4.0):
        script.call(net, ms=2.0)
    with script.phase("optimizer", 3.0, site=1):
        with script.phase("call", 5.0, *script.called(net, True, 8)):
            script.copy(1 << 33)
        with script.phase("backward", 7.0):
            script.copy()
            script.optimizer(2, ms=0.5)
    (step,) = assembled(script).steps
    # Each nested phase is followed by 0.1 ms of the outer one.
    assert ns(step) == {"data": 4.1, "copy": 2.0, "forward": 7.1, "backward": 7.2, "optimizer": 3.7}
    assert step.quantities == {"copied_bytes": (1 << 33) + 1024}


def test_a_measurement_inside_a_phase_is_subtracted_from_it() -> None:
    script = Script()
    net = script.model()
    script.fetch()
    script.call(net)
    with script.phase("backward", 2.0), script.phase("memory", 50.0, site=1):
        pass
    script.optimizer()
    (step,) = assembled(script).steps
    assert ns(step)["backward"] == 2.1
    assert step.phases["other"] > 50 * MS


def test_pauses_and_measurements_between_steps_are_in_no_step() -> None:
    script = Script()
    net = script.model()
    for _ in range(3):
        script.fetch()
        script.learn(net)
        for name in ("pause", "memory", "pause"):
            with script.phase(name, 100.0):
                pass
    assert max(walls(assembled(script).steps)) < 10


def test_without_a_loader_pauses_and_measurements_between_steps_are_in_no_step() -> None:
    script = Script()
    net = script.model()
    script.makes_optimizer()
    for _ in range(3):
        script.learn(net)
        for name in ("memory", "pause"):
            with script.phase(name, 100.0):
                pass
    result = assembled(script)
    assert len(result.steps) == 3
    assert max(walls(result.steps)) < 10


def test_a_measurement_inside_a_step_is_part_of_it() -> None:
    script = Script()
    net = script.model()
    for _ in range(2):
        script.fetch()
        script.call(net)
        with script.phase("memory", 100.0):
            pass
        script.backward()
    first, second = walls(assembled(script).steps)
    assert 100 < first < 110
    assert 100 < second < 110


# ------------------------------------------------------------------------------------------ how it is known


def test_a_loader_that_is_not_read_any_more() -> None:
    """The script trains on one batch repeatedly."""
    script = Script()
    net = script.model()
    for _ in range(2):
        script.fetch()
        script.learn(net)
    script.fetch()
    for _ in range(100):
        script.learn(net)
    script.fetch()
    script.learn(net)
    shape = assembled(script).shape()
    assert shape == [(8, FETCHED, 1)] * 3 + [(8, LEARN, 1)] * 99 + [(8, FETCHED, 1)]


def test_a_loader_with_64_steps_for_a_batch() -> None:
    script = Script()
    net = script.model()
    for _ in range(3):
        script.fetch()
        for _ in range(64):
            script.learn(net)
    assert assembled(script).shape() == [(8, FETCHED, 64)] * 3


def emitted_at(script: Script) -> list[int]:
    """Return the number of steps that are known after each span, before the end."""
    assembler, found, lines_read = Assembler(), [0], 0
    for at, span in enumerate(script.spans):
        until = script.needed(at + 1)
        payloads = assembler.feed([span], script.lines_between(lines_read, until))
        lines_read = until
        found.append(found[-1] + sum(kind_of(payload) == "step" for payload in payloads))
    return found


def test_once_the_rule_is_known_steps_are_emitted_immediately() -> None:
    script = Script()
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        script.learn(net)
    assert emitted_at(script) == [0, 0, 0, 0, 0, 0, 2, 2, 2, 3, 3, 3, 4]


def test_without_an_optimizer_64_calls_are_waited_for() -> None:
    script = Script()
    net = script.model()
    for _ in range(70):
        script.evaluate(net)
    assert emitted_at(script)[64:67] == [0, 64, 65]


def test_without_an_optimizer_five_seconds_are_waited_for() -> None:
    script = Script()
    net = script.model()
    for _ in range(10):
        script.call(net, ms=500)
        script.backward(ms=500)
    found = emitted_at(script)
    assert found[10:] == [0, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]


def test_with_an_optimizer_4096_calls_are_waited_for() -> None:
    script = Script()
    net = script.model()
    script.makes_optimizer()
    for _ in range(4100):
        script.call(net, ms=0.01)
    found = emitted_at(script)
    assert found[4096:4099] == [0, 4096, 4097]


def test_a_loop_that_stops_stepping_its_optimizer() -> None:
    """The last minute of its calls is a step each; when the optimizer steps again, its steps count again."""
    script = Script()
    net = script.model()
    script.makes_optimizer()
    for _ in range(3):
        script.learn(net)
    for _ in range(200):
        script.call(net, ms=500)
        script.backward(ms=500)
    for _ in range(3):
        script.learn(net)
    shape = assembled(script).shape()
    assert shape == [(8, LEARN, 1)] * 3 + [(8, "fb", 1)] * 200 + [(8, LEARN, 1)] * 3


def test_steps_that_take_longer_than_the_limit_of_the_wait() -> None:
    """Their duration is known from the second step on."""
    script = Script()
    net = script.model()
    script.makes_optimizer()
    for _ in range(4):
        for _ in range(10):
            script.call(net, ms=5000)
            script.backward(ms=5000)
        script.optimizer()
    assert [(letters, calls) for _, letters, calls in assembled(script).shape()][-2:] == [(LEARN, 10)] * 2


def test_a_module_that_is_called_no_more_ends_no_steps() -> None:
    script = Script()
    once, net = script.model("Once"), script.model()
    script.call(once)
    for _ in range(500):
        script.call(net)
    result = assembled(script)
    assert len(result.calls) == 501
    assert len(result.steps) > 400


def test_a_step_that_is_too_long_to_be_held() -> None:
    script = Script()
    net = script.model()
    for _ in range(2):
        script.fetch()
        for _ in range(20_000):
            script.call(net, ms=0.01)
        script.backward()
        script.optimizer()
    payloads = in_portions(script, [])
    assert in_portions(script, [17_000, 30_000]) == payloads
    result = decoded(payloads)
    assert result.shape() == [(8, FETCHED, 20_000)] * 2
    check(result)


# ------------------------------------------------------------------------------------------ threads


def test_threads_beside_the_training() -> None:
    script = Script()
    net, other = script.model(), script.model("Other")
    for _ in range(3):
        script.fetch()
        script.call(net)
        with script.on_thread(5):
            script.fetch()
            script.call(other, rows=99)
        script.backward()
        script.optimizer()
        with script.on_thread(6):
            script.evaluate(other)
    result = assembled(script)
    assert result.shape() == [(8, FETCHED, 3)] * 3
    assert [ns(step)["forward"] for step in result.steps] == [1.0] * 3
    assert [call.root for call in result.calls] == ["Net", "Other", "Other"] * 3


def test_a_thread_that_calls_after_the_loop() -> None:
    script = Script()
    net, other = script.model(), script.model("Other")
    script.fetch()
    script.learn(net)
    script.fetch(over=True)
    with script.on_thread(5):
        script.evaluate(other)
    result = assembled(script)
    assert [(call.root, call.step) for call in result.calls] == [("Net", 1), ("Other", 1)]
    assert len(result.steps) == 1


def test_batches_that_another_thread_fetches() -> None:
    script = Script()
    net = script.model()
    script.makes_optimizer()
    with script.on_thread(5):
        script.fetch()
    for _ in range(3):
        with script.on_thread(5):
            script.fetch()
        script.learn(net)
    assert assembled(script).shape() == [(8, LEARN, 1)] * 3


def test_training_in_a_thread() -> None:
    """The first thread only fetches."""
    script = Script()
    net = script.model()
    script.fetch()
    with script.on_thread(3):
        for _ in range(3):
            script.fetch()
            script.learn(net)
    assert assembled(script).shape() == [(8, FETCHED, 1)] * 3


def test_another_thread_than_the_first_is_found_to_train() -> None:
    script = Script()
    net, shown = script.model(), script.model("Shown")
    script.fetch()
    script.evaluate(shown)
    with script.on_thread(3):
        for _ in range(3):
            script.fetch()
            script.learn(net)
    script.evaluate(shown)
    with script.on_thread(3):
        script.fetch()
        script.learn(net)
    result = assembled(script)
    assert [(phases, calls) for _, phases, calls in result.shape()] == [
        ("df", 2),
        (FETCHED, 1),
        (FETCHED, 2),
        (FETCHED, 1),
    ]
    assert [call.root for call in result.calls] == ["Shown", "Net", "Net", "Net", "Shown", "Net"]


def test_a_thread_that_has_trained_stays_the_training_thread() -> None:
    script = Script()
    net, other = script.model(), script.model("Other")
    script.makes_optimizer()
    for _ in range(3):
        script.learn(net)
        with script.on_thread(4):
            script.learn(other, 9)
    result = assembled(script)
    assert [phases for _, phases, _ in result.shape()] == [LEARN] * 3
    assert [call.root for call in result.calls] == ["Net", "Other"] * 3


# ------------------------------------------------------------------------------------------ the end


def test_a_call_that_failed_last_is_no_step() -> None:
    script = Script()
    net = script.model()
    for at in range(3):
        script.fetch()
        script.call(net, failed=at == 2)
        if at < 2:
            script.backward()
    result = assembled(script)
    assert len(result.steps) == 2
    assert [call.failed for call in result.calls] == [False, False, True]


def in_the_third_step() -> Script:
    """Return a training after the call of its third step, before the backward pass."""
    script = Script()
    net = script.model()
    for _ in range(2):
        script.fetch()
        script.learn(net)
    script.fetch()
    script.call(net)
    return script


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("closure", [True, False])
def test_a_backward_pass_that_failed_last_is_no_step(closure: bool, failed: bool) -> None:
    """An interrupted pass may have waited long for other ranks, and would distort every mean."""
    script = in_the_third_step()
    if closure:
        with script.phase("optimizer", flags=Flag.FAILED * failed, site=1):
            script.backward(900.0, failed=failed)
    else:
        script.backward(900.0, failed=failed)
    script.line(end=True, uncaught=failed)
    assert len(assembled(script).steps) == 3 - failed


@pytest.mark.parametrize("failed", [True, False])
def test_a_last_optimizer_step_decides_whether_a_caught_failure_counts(failed: bool) -> None:
    script = Script()
    net = script.model()
    script.fetch()
    script.learn(net)
    script.fetch()
    script.call(net)
    script.backward(failed=True)
    script.optimizer(failed=failed)
    script.line(end=True, uncaught=failed)
    assert len(assembled(script).steps) == 2 - failed


def test_a_backward_pass_that_failed_is_a_step_if_training_goes_on() -> None:
    script = Script()
    net = script.model()
    for at in range(3):
        script.fetch()
        script.call(net)
        script.backward(failed=at == 1)
        if at != 1:
            script.optimizer()
    assert len(assembled(script).steps) == 3


@pytest.mark.parametrize(
    ("uncaught", "backward", "steps"),
    [(True, False, 2), (True, True, 3), (False, False, 3), (False, True, 3), (None, False, 2), (None, True, 3)],
)
def test_a_step_that_was_cut_off(uncaught: bool | None, backward: bool, steps: int) -> None:
    """By an exception, or by a kill, after which the process records no end."""
    script = in_the_third_step()
    if backward:
        script.backward()
    if uncaught is not None:
        script.line(end=True, uncaught=uncaught)
    assert len(assembled(script).steps) == steps


def test_a_process_that_never_learns_and_is_killed() -> None:
    script = Script()
    net = script.model()
    for _ in range(3):
        script.call(net)
    assert len(assembled(script).steps) == 3


def test_an_evaluation_that_an_exception_ends_is_a_step() -> None:
    script = Script()
    net = script.model()
    script.fetch()
    script.evaluate(net)
    script.line(end=True, uncaught=True)
    assert len(assembled(script).steps) == 1


def test_the_last_step_ends_with_its_last_phase() -> None:
    script = Script()
    net = script.model()
    script.fetch()
    script.learn(net)
    with script.phase("memory", 100.0):
        pass
    (step,) = assembled(script).steps
    assert round(step.wall_ns / MS, 3) == 4.3


# ------------------------------------------------------------------------------------------ what is under way


def test_a_fetch_that_has_begun_ends_the_step() -> None:
    script = Script()
    net = script.model()
    for _ in range(2):
        script.fetch()
        script.learn(net)
    script.fetch(ms=5000)
    whole = assembled(script).steps
    assembler = Assembler()
    out = assembler.feed(script.spans[:-1], script.lines_between(0, len(script.lines)))
    assert len(decoded(out).steps) == 1
    assert assembler.take_current_span(Kind.BACKWARD, script.spans[-1].start) == []
    assert assembler.take_current_span(Kind.FETCH, script.spans[-2].start) == []
    out += assembler.take_current_span(Kind.FETCH, script.spans[-1].start)
    assert decoded(out).steps == whole
    out += assembler.feed(script.spans[-1:], [])
    out += assembler.end()
    assert decoded(out).steps == whole


def test_a_loop_beyond_the_limit_of_the_wait_keeps_its_steps_once_they_are_known() -> None:
    script = Script()
    net = script.model()
    script.makes_optimizer()
    for _ in range(3):
        for _ in range(5000):
            script.call(net)
        script.backward()
        script.optimizer()
    assert [calls for _, _, calls in assembled(script).shape()[-2:]] == [5000, 5000]


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
    assert [step.samples for step in assembled(script).steps] == [10, 10]


def test_a_layout_with_too_many_devices_is_refused() -> None:
    script = Script()
    net = script.model(devices=["cuda:0"] * 5000)
    script.fetch()
    script.learn(net)
    assembler = Assembler()
    found = assembler.feed(script.spans, script.lines_between(0, len(script.lines))) + assembler.end()
    assert [payload for payload in found if kind_of(payload) == "call"] == []
    assert assembler.dropped >= 2  # the layout and the call


def test_calls_of_other_threads_do_not_wait_for_ever_behind_a_step_without_device_times() -> None:
    script = Script()
    net = script.model()
    script.fetch()
    script.call(net, timed=True)
    script.backward()
    script.optimizer()
    script.fetch(over=True)
    with script.on_thread(3):
        for _ in range(3 * MAX_GROUPS):
            script.evaluate(net)
    found = Assembler().feed(script.spans, script.lines_between(0, len(script.lines)))
    assert sum(kind_of(payload) == "call" for payload in found) >= 2 * MAX_GROUPS
