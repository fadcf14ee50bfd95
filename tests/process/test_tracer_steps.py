"""Steps of loops of many shapes begin and end where a person would say; processes that fork."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from tracing import Traced, text_of, traced

from dpmon.record.kinds import Call, Step

LEARN = {"forward", "backward", "optimizer", "other"}
FETCH = {"data", *LEARN}
LOOK = {"data", "forward", "other"}


class Loop:
    """The record of one loop."""

    def __init__(self, run: Traced, name: str) -> None:
        pid, self.status, self.reported = run.printed[name]
        self.run = run
        processes = [event.data["process"] for event in run.events("process") if event.data["pid"] == pid]
        assert len(processes) <= 1
        self.process = processes[0] if processes else None
        self.calls = run.calls(process=self.process) if processes else []
        self.steps = run.steps(self.process) if processes else []
        self.warnings = [event.data["text"] for event in run.events("warning", self.process)] if processes else []

    def child(self) -> tuple[list[Call], list[Step]]:
        """Return calls and steps of the child whose process id the loop reported."""
        process = self.run.process_of(self.reported)
        assert process != self.process
        return self.run.calls(process=process), self.run.steps(process)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    found = traced(tmp_path_factory.mktemp("loops"), text_of("loops"))
    assert found.status == 0, found.err
    assert (found.err, found.missed, found.warnings) == ("", 0, ())
    return found


@pytest.fixture(scope="module")
def loop(run: Traced) -> Callable[[str], Loop]:
    return lambda name: Loop(run, name)


def check(steps: list[Step], calls: list[Call]) -> None:
    """Check: no gaps in numbers, phases that add up, steps that do not overlap, every call within its step."""
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert [call.call for call in calls] == list(range(1, len(calls) + 1))
    for step in steps:
        assert sum(step.phases.values()) == step.wall_ns > 0
        assert all(took > 0 for name, took in step.phases.items() if name != "other")
    for before, after in pairwise(steps):
        assert before.start_ns + before.wall_ns <= after.start_ns
    by_number = {step.step: step for step in steps}
    for call in calls:
        around = by_number[call.step]
        assert around.start_ns <= call.start_ns
        assert call.start_ns + call.wall_ns <= around.start_ns + around.wall_ns
    for step in steps:
        mine = [call for call in calls if call.step == step.step]
        assert step.mode == mine[0].mode
        assert step.phases["forward"] == sum(call.wall_ns for call in mine)


def shape(loop: Loop, *, checked: bool = True) -> list[tuple[int | None, set[str], int]]:
    """Return, per step: samples, the phases that ran, the number of calls."""
    assert loop.status == 0
    if checked:
        check(loop.steps, loop.calls)
    counts = Counter(call.step for call in loop.calls)
    return [(step.samples, set(step.phases), counts[step.step]) for step in loop.steps]


BATCHES = (30, 30, 30, 10)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrapped", [(rows, FETCH, 1) for rows in BATCHES]),
        ("bare", [(rows, FETCH, 1) for rows in BATCHES]),
        ("forward_only", [(rows, LOOK, 1) for rows in BATCHES]),
        ("gan", [(rows, FETCH, 4) for rows in BATCHES]),
        ("accumulation", [(10, FETCH - {"optimizer"}, 1), (10, FETCH, 1)] * 3),
        ("optimizer_only", [(12, LEARN, 1)] * 6),
        ("taught_without_a_loader", [(12, LEARN, 2)] * 5),
        ("accumulation_without_a_loader", [(36, LEARN, 3)] * 4),
        # A step whose optimizer raised has two batches.
        ("optimizers_that_raise", [(12, LEARN, 1), (24, LEARN, 2)] + [(12, LEARN, 1)] * 6),
        ("optimizers_within_each_other", [(12, LEARN, 1)] * 6),
        ("calls_only", [(rows, {"forward", "other"}, 1) for rows in (3, 5, 7, 9)]),
        ("evaluation_between", [*((rows, FETCH, 1) for rows in BATCHES), *[(10, LOOK, 1)] * 2] * 2),
        ("left_early", [(30, FETCH, 1)] * 2 + [(10, FETCH, 1)] * 4),
        ("two_loaders", [(rows, FETCH, 1) for rows in BATCHES]),
        ("trains_in_a_thread", [(rows, FETCH, 1) for rows in BATCHES]),
        ("checkpoints", [(6, LEARN, 1)] * 4),
        ("checkpointed_as_a_whole", [(6, LEARN, 1)] * 2),
        ("model_in_the_dataset", [(10, FETCH, 11)] * 4),
        pytest.param(
            "a_second_optimizer",
            [(12, LEARN, 1)] * 85,
        ),
        pytest.param(
            "fetched_by_a_thread",
            [(rows, LEARN, 1) for rows in BATCHES],
        ),
    ],
)
def test_samples_phases_and_calls_of_each_step(loop: Callable[[str], Loop], name: str, expected: list[Any]) -> None:
    found = loop(name)
    assert shape(found) == expected
    assert found.warnings == []


def test_an_evaluation_ends_with_its_last_call(loop: Callable[[str], Loop]) -> None:
    """The time before the training goes on (a sleep of a second) belongs to no step of either."""
    for name, looks, learns in (
        ("fetched_one_ahead", [10] * 3, [10] * 4),
        ("training_after_an_evaluation_without_a_loader", [12] * 3, [12] * 4),
    ):
        found = loop(name)
        assert [samples for samples, _, _ in shape(found)] == (looks + learns) * 2
        assert [calls for _, _, calls in shape(found)] == [1] * 14
        learnt = ["backward" in phases for _, phases, _ in shape(found)]
        assert learnt == ([False] * 3 + [True] * 4) * 2
        between = [step.wall_ns for step in found.steps if step.wall_ns >= 1_000_000_000]
        assert between == [], name


def test_micro_batches_that_were_fetched_together_are_added_up(loop: Callable[[str], Loop]) -> None:
    found = shape(loop("micro_batches_fetched_together"))
    assert [(samples, calls) for samples, _, calls in found] == [(15, 3), (15, 3), (5, 1), (5, 1), (10, 2)] * 2
    assert [samples for samples, _, _ in shape(loop("gan_fetched_one_ahead"))] == [10] * 4


def test_a_call_before_the_loader_is_a_separate_step(loop: Callable[[str], Loop]) -> None:
    """The time between them (a sleep of a second) belongs to no step."""
    found = loop("a_call_before_the_loader")
    assert shape(found) == [(3, {"forward", "other"}, 1), *[(rows, FETCH, 1) for rows in BATCHES]]
    assert [step.step for step in found.steps if step.wall_ns >= 1_000_000_000] == []


def test_a_call_that_contains_backward_and_optimizer_is_one_step(loop: Callable[[str], Loop]) -> None:
    found = loop("steps_within_a_call")
    assert shape(found, checked=False) == [(12, LEARN, 1)] * 4
    assert [call.step for call in found.calls] == [step.step for step in found.steps] == [1, 2, 3, 4]
    for step, call in zip(found.steps, found.calls, strict=True):
        assert sum(step.phases.values()) == step.wall_ns
        assert step.start_ns <= call.start_ns
        assert call.start_ns + call.wall_ns <= step.start_ns + step.wall_ns
        learns = sum(step.phases[name] for name in ("forward", "backward", "optimizer"))
        assert learns <= call.wall_ns


def test_steps_of_an_epoch_follow_each_other_without_gaps(loop: Callable[[str], Loop]) -> None:
    """In an epoch, each step begins where the previous one ended, except after a memory measurement."""
    for name in ("wrapped", "bare", "gan", "optimizer_only", "calls_only"):
        found = loop(name)
        steps, measured = found.steps, found.run.events("memory", found.process)
        gaps = [after.start_ns - before.start_ns - before.wall_ns for before, after in pairwise(steps)]
        assert min(gaps) == 0
        measurements = 1 + sum(step.wall_ns for step in steps) // 5_000_000_000
        assert sum(gap > 0 for gap in gaps) <= max(measurements, len(measured))


def test_steps_of_two_models_without_a_loader(loop: Callable[[str], Loop]) -> None:
    """A step ends with the last of the alternating optimizers; the first step waits until they repeat."""
    found = loop("gan_without_a_loader")
    assert [calls for _, _, calls in shape(found)] == [3] * 5
    assert found.reported == len(found.steps)


def test_steps_of_three_optimizers_without_a_loader(loop: Callable[[str], Loop]) -> None:
    found = loop("three_optimizers_without_a_loader")
    assert [calls for _, _, calls in shape(found)] == [3] * 4
    assert found.reported == len(found.steps)


def test_steps_of_a_critic_whose_optimizer_runs_more_often(loop: Callable[[str], Loop]) -> None:
    """Each step of the critic's optimizer ends a step, as it does before the generator's first one."""
    found = loop("critic_steps_more_often")
    assert [calls for _, _, calls in shape(found)] == [1, 1, 1, 2, 1, 1, 2, 1, 1, 1]


def test_the_first_calls_of_a_later_model_are_recorded(loop: Callable[[str], Loop]) -> None:
    """After the end of a loader, the next loop may train another model."""
    roots = [call.root for call in loop("one_model_after_another").calls]
    assert roots == ["Small"] * 40 + ["Big"] * (3 + 4)


def test_nested_calls_end_no_step(loop: Callable[[str], Loop]) -> None:
    """The step of the optimizer may come only after many calls."""
    found = loop("long_accumulation_without_a_loader")
    assert [(step.samples, set(step.phases)) for step in found.steps] == [(2, LEARN)] * 3, "of three models"
    assert [call.root for call in found.calls] == ["Linear", "Linear 2", "Linear 3"] * 120


def test_steps_of_an_optimizer_with_a_closure(loop: Callable[[str], Loop]) -> None:
    """LBFGS calls the model in its step; these times are forward and backward, and are not part of the optimizer."""
    found = loop("closure")
    assert [calls for _, _, calls in shape(found)] == [3, 3, 3]
    assert sum(calls for _, _, calls in shape(found)) == found.reported
    assert [phases for _, phases, _ in shape(found)] == [LEARN] * 3


def test_calls_of_an_evaluation_are_marked(loop: Callable[[str], Loop]) -> None:
    calls = loop("evaluation_between").calls
    assert [(call.training, call.grad) for call in calls] == ([(True, True)] * 4 + [(False, False)] * 2) * 2


def test_recomputed_parts_are_not_recorded_as_calls(loop: Callable[[str], Loop]) -> None:
    assert [call.root for call in loop("checkpoints").calls] == ["Deep"] * 4
    assert [call.root for call in loop("checkpointed_as_a_whole").calls] == ["Net"] * 2


def test_losses_are_no_calls(loop: Callable[[str], Loop]) -> None:
    assert {call.root for name in ("wrapped", "bare", "gan") for call in loop(name).calls} == {"Net", "Critic"}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("another_model_later", 40),
        ("another_model_later_without_a_loader", 100),
        ("another_model_later_that_is_only_called", 100),
    ],
)
def test_a_model_of_another_kind_is_seen_from_its_first_call(
    loop: Callable[[str], Loop], name: str, count: int
) -> None:
    """When it is first called, the tracer no longer watches all modules."""
    found = loop(name)
    shape(found)
    assert Counter(call.root for call in found.calls) == {"Net": count, "Later": count}
    assert found.warnings == []


@pytest.mark.parametrize(
    "name",
    [
        "the_model_beside_its_wrapper",
        "the_model_beside_its_wrapper_from_a_loader",
        "the_model_beside_its_ranks_wrapper",
        "the_model_beside_its_average",
        "a_part_by_itself",
        "made_and_called_after_the_training",
        "made_in_the_middle_and_called_later",
    ],
)
def test_all_calls_of_a_module_first_called_late_are_recorded(loop: Callable[[str], Loop], name: str) -> None:
    """`reported` has the script's own count of its calls."""
    found = loop(name)
    assert found.status == 0
    assert Counter(f"{call.root.removesuffix(' 2')} {call.via}" for call in found.calls) == found.reported
    assert found.warnings == []


def test_a_warning_says_which_calls_may_have_been_missed(loop: Callable[[str], Loop]) -> None:
    """A small part of a known model, which scripts rarely call directly."""
    found = loop("a_layer_by_itself")
    seen = Counter(call.root for call in found.calls)
    assert seen["Linear"] <= found.reported["Linear"]
    assert [text for text in found.warnings if text.startswith("Linear was called by the script at step ")]


def test_weights_that_are_arguments_do_not_count_as_samples(loop: Callable[[str], Loop]) -> None:
    found = loop("given_its_weights")
    assert shape(found) == [(30, LEARN, 3)] * 4, "three calls with a backward pass each"
    assert {(call.root, call.devices) for call in found.calls} == {("Net", ("cpu",))}


def test_a_backward_across_rpc(loop: Callable[[str], Loop]) -> None:
    found = loop("backward_across_rpc")
    assert found.reported == 4
    assert shape(found) == [(8, {"forward", "backward", "other"}, 1)]


def test_a_warning_comes_soon_if_forwards_are_called_directly(loop: Callable[[str], Loop]) -> None:
    found = loop("forwards_called_directly")
    assert found.calls == []
    assert [text.split(":")[0] for text in found.warnings] == ["an optimizer steps, but no call of a module was seen"]


def test_no_call_is_lost_without_an_optimizer(loop: Callable[[str], Loop]) -> None:
    """With gradients but no optimizer, the ends of steps are a guess, but every call is in a step."""
    found = loop("by_hand")
    assert sum(calls for _, _, calls in shape(found)) == 10


def test_threads_beside_the_training(loop: Callable[[str], Loop]) -> None:
    """Their calls are recorded and do not change the steps."""
    found = loop("a_thread_beside_it")
    mine = [call for call in found.calls if call.root == "Net"]
    others = [call for call in found.calls if call.root == "Critic"]
    assert [(step.samples, set(step.phases)) for step in found.steps] == [(rows, FETCH) for rows in BATCHES]
    assert [call.step for call in mine] == [1, 2, 3, 4]
    assert len(others) > 0
    assert sorted(call.call for call in found.calls) == list(range(1, len(found.calls) + 1))
    for step, call in zip(found.steps, mine, strict=True):
        assert step.phases["forward"] == call.wall_ns
        assert sum(step.phases.values()) == step.wall_ns


def test_parts_that_fail(loop: Callable[[str], Loop]) -> None:
    """Batch 3 cannot be read, the optimizer refuses the second, the backward pass of the fifth fails."""
    found = loop("failing_parts")
    assert [name for name, _ in found.reported] == ["RuntimeError", "OSError", "ZeroDivisionError"]
    assert sum(frames for _, frames in found.reported) == 0
    assert [phases for _, phases, _ in shape(found)] == [
        FETCH,
        FETCH - {"optimizer"},
        FETCH,
        FETCH - {"optimizer"},
        FETCH,
    ]


def test_a_forward_that_fails(loop: Callable[[str], Loop]) -> None:
    found = loop("forward_fails")
    assert found.reported == [0, 0]  # lines of the traceback that name dpmon
    failed = [call for call in found.calls if call.failed]
    assert {call.step for call in failed} == {4, 8}
    assert [step.samples for step in found.steps] == [*BATCHES, *BATCHES]
    assert all(call.outputs is None and call.inputs is not None for call in failed)
    assert all(set(step.phases) == LOOK for step in (found.steps[3], found.steps[7]))


def test_a_wrapper_that_runs_as_written_is_one_call_in_a_forked_child(loop: Callable[[str], Loop]) -> None:
    found = loop("forward_fails")
    assert [call.via for call in found.calls] == [*[None] * 4, *["DataParallel"] * 4]


# ------------------------------------------------------------------------------------------------ processes


def test_workers_leave_no_ring(run: Traced, loop: Callable[[str], Loop]) -> None:
    """Not even those that call a model of their own."""
    found = loop("workers")
    assert shape(found) == [(10, FETCH, 1)] * 4
    assert {call.root for call in found.calls} == {"Critic"}
    trained = {pid for pid, _, _ in run.printed.values()}
    told = {run.printed[name][2] for name in run.printed if name.startswith("forks_")}
    told.add(run.printed["multiprocessing_child"][2])
    assert {event.data["pid"] for event in run.events("process")} <= trained | told


def test_a_forked_child_has_a_record_of_its_own(loop: Callable[[str], Loop]) -> None:
    found = loop("forks_a_child")
    assert shape(found) == [(12, LEARN, 1)] * 4
    calls, steps = found.child()
    check(steps, calls)
    assert [(step.samples, set(step.phases)) for step in steps] == [(12, LEARN)] * 3
    assert len(calls) == 3


def test_a_wrapper_made_before_the_fork(loop: Callable[[str], Loop]) -> None:
    found = loop("forks_a_child_with_a_wrapper")
    calls, _ = found.child()
    assert [(call.via, call.mode) for call in [*found.calls, *calls]] == [("DataParallel", "dp")] * 2


def test_a_child_of_multiprocessing(loop: Callable[[str], Loop]) -> None:
    """It ends with os._exit, but its last step is recorded."""
    found = loop("multiprocessing_child")
    assert found.status == 0
    assert found.process is None
    process = found.run.process_of(found.reported)
    calls, steps = found.run.calls(process=process), found.run.steps(process)
    check(steps, calls)
    assert [(step.samples, set(step.phases)) for step in steps] == [(12, LEARN)] * 6
