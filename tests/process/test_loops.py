"""Loops of many shapes count what they do: the record has the same counts, and they compute what they do without dpmon.

The loops are in traced/loops.py and traced/unusual.py, and the count in traced/counted.py.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpmon.record.record_types import Call, Step
from dpmon.record.schema import TRAINING
from support.baseline_comparison import closest_baseline
from support.script_simulator import check_numbers
from support.tracer_harness import TRACED_SCRIPTS_PATH, TracedRun, TracedScript, run_traced, traced_script_text

NAMES = [
    name for text in ("loops", "unusual") for name in re.findall(r"^@loop\ndef (\w+)", traced_script_text(text), re.M)
]
SCRIPT = "from counted import main\nimport loops\nimport unusual\nmain()\n"
TOGGLED = (
    "by_hand_from_a_loader",
    "evaluation_in_the_middle_of_an_epoch",
    "a_teacher_from_a_loader",
    "an_optimizer_an_epoch",
    "adversaries_that_share_a_fake",
    "a_search_along_a_line_from_a_loader",
    "mixed_precision_from_a_loader",
    "checkpoints",
    "checkpoints_reentrant",
    "checkpoints_wrapped",
    "checkpoints_wrapped_reentrant",
    "in_another_mode_than_its_wrapper",
    "everything_swallowed",
    "two_threads",
    "forward_called",
    "forward_called_of_a_wrapper",
    "saved_and_copied",
)
"""Loops that also run without dpmon, and with requests for dp (after the first step) and single (after the third)."""
FORKS = "forks_a_child_with_a_wrapper"
UNSEEN = ("forward_called_of_a_module_without_parts", "multiprocessing_child")
"""Loops without a call that dpmon can see."""
UNCOUNTED = ("a_thread_beside_it", "a_layer_by_itself")
"""Loops whose record has calls that are not counted by the loop, or fewer."""
SEVERAL_THREADS = ("a_thread_beside_it", "two_threads")
NESTED = ("steps_within_a_call", "model_in_the_dataset", "long_accumulation_of_nested_calls")
"""Loops whose calls have other parts of the step in them, or are in other parts or calls."""
COMPLAINTS = {
    "forward_called": "Net.forward() is called directly",
    "forward_called_of_a_module_without_parts": "an optimizer steps, but no call of a module was seen",
    "a_layer_by_itself": "Linear was called by the script at step ",
}
"""By loop: how its only warning begins."""
ONE_S = 1_000_000_000
PLAYS_FIRST = """
import json, time, torch
from torch import nn
class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x):
        return self.layer(x)
policy, value = nn.Sequential(nn.Linear(4, 1)), Value()
optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], lr=0.01)
calls = 0
value.layer.register_forward_hook(lambda *_: globals().update(calls=calls + 1))
for _ in range(200):
    policy(torch.randn(1, 4))
    time.sleep(0.001)
for _ in range(20):
    (policy(torch.randn(8, 4)).mean() + value.forward(torch.randn(8, 4)).mean()).backward()
    optimizer.step()
print(json.dumps(calls))
"""
"""`value` learns only in calls past Module.__call__, so only its layer can be seen."""


class Loop(NamedTuple):
    """One loop: what it said, and what is recorded."""

    pid: int
    steps: list[Any]
    """Per step: samples, phases, number of calls, as the loop counted them."""
    calls: list[Any]
    """Per call: name of the model and of its wrapper, training mode, gradients."""
    losses: list[float]
    told: Any
    recorded_steps: list[Step]
    recorded_calls: list[Call]
    warnings: list[str]


class Runs:
    """All loops in one run, or some of them."""

    def __init__(self, place: Path, *words: str, **options: Any) -> None:
        self.run = run_traced(place, SCRIPT, *words, env=TRACED_SCRIPTS_PATH, **options)
        found = self.run
        assert (found.status, found.err, found.missed, found.warnings, found.unreadable) == (0, "", 0, (), ())
        self.printed = found.printed
        self.numbers = {event.data["pid"]: event.data["process"] for event in found.events("process")}
        self.records: dict[int, tuple[list[Step], list[Call], list[str]]] = {
            number: ([], [], []) for number in self.numbers.values()
        }
        for step in found.steps():
            self.records[step.process][0].append(step)
        for call in found.calls():
            self.records[call.process][1].append(call)
        for event in found.events("warning"):
            self.records[event.data["process"]][2].append(event.data["text"])

    def recorded(self, pid: int) -> tuple[list[Step], list[Call], list[str]]:
        """Return steps, calls and warnings of a process; none if it has no ring."""
        return self.records.get(self.numbers.get(pid, -1), ([], [], []))

    def loop(self, name: str) -> Loop:
        pid, status, steps, calls, losses, told = self.printed[name]
        assert status == 0
        return Loop(pid, steps, calls, losses, told, *self.recorded(pid))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("loops"), mode="script")


@pytest.fixture(scope="module")
def toggled(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("toggled"), "toggle", *TOGGLED, FORKS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("alone"), *TOGGLED, run=False)


def shape(steps: list[Step], calls: list[Call]) -> list[list[Any]]:
    """Return, per step: samples, the phases that ran, the number of calls."""
    return [[step.samples, sorted(set(step.phases) - {"other"}), len(calls_of(step, calls))] for step in steps]


def calls_of(step: Step, calls: list[Call]) -> list[Call]:
    """Return the calls of a step; of one without a number, those in its time."""
    if step.step:
        return [call for call in calls if (call.kind, call.step) == (step.kind, step.step)]
    end_ns = step.start_ns + step.wall_ns
    return [call for call in calls if call.step is None and step.start_ns <= call.start_ns < end_ns]


def identified(calls: list[Call]) -> list[list[Any]]:
    return [[call.root.split()[0], call.via, call.training, call.grad] for call in calls]


def named(calls: list[Any]) -> list[list[Any]]:
    return [["Net" if name == "OptimizedModule" else name, *rest] for name, *rest in calls]


def check(steps: list[Step], calls: list[Call], *, threads: bool = False) -> None:
    """Check: no gaps in numbers, phases that add up, steps that do not overlap, every call within its step.

    `threads`: there are calls of other threads, which may end later than the last step.
    """
    check_numbers(steps)
    assert [call.call for call in calls] == list(range(1, len(calls) + 1))
    for step in steps:
        assert sum(step.phases.values()) == step.wall_ns > 0
        # On a busy machine, averaging may begin as soon as the backward pass does.
        may_be_none = {"other", "backward"} if "sync" in step.phases else {"other"}
        assert all(took > 0 for name, took in step.phases.items() if name not in may_be_none)
    for before, after in pairwise(steps):
        assert before.start_ns + before.wall_ns <= after.start_ns
    by_number = {(step.kind, step.step): step for step in steps}
    for call in () if threads else calls:
        if call.step is None:  # outside the steps
            continue
        around = by_number[call.kind, call.step]
        assert around.start_ns <= call.start_ns
        assert call.start_ns + call.wall_ns <= around.start_ns + around.wall_ns


def alike(found: Any, expected: Any) -> bool:
    """Return whether results are equal except for the effects of another order of sums."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(alike, found, expected))
    if (
        isinstance(expected, float)
        and isinstance(found, float)
        and abs(found - expected) < 1e-2 * max(1, abs(expected))
    ):
        return True
    return bool(found == expected)


def test_all_loops_ran(runs: Runs) -> None:
    assert list(runs.printed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_record_of_a_loop_is_what_the_loop_counted(runs: Runs, name: str) -> None:
    loop = runs.loop(name)
    steps, calls = loop.recorded_steps, loop.recorded_calls
    if name not in UNCOUNTED:
        found = shape(steps, calls)
        if name in SEVERAL_THREADS:  # a last call of the other thread belongs to no step
            found[-1][-1] = loop.steps[-1][-1]
        assert found == ([] if name in UNSEEN else loop.steps)
        assert identified(calls) == named(loop.calls)
        assert (loop.calls == []) == (name in UNSEEN)
    if name not in (*UNCOUNTED, *UNSEEN):  # the summary and the report rely on this
        trains = [bool({"backward", "optimizer"} & set(phases)) for _, phases, _ in loop.steps]
        assert [step.kind == TRAINING for step in steps] == trains
    check(steps, calls, threads=name in SEVERAL_THREADS)
    for step in steps:
        mine = calls_of(step, calls)
        assert step.mode == mine[0].mode
        if name not in (*SEVERAL_THREADS, *NESTED):
            assert step.phases["forward"] == sum(call.wall_ns for call in mine)
    assert [text.startswith(COMPLAINTS.get(name, "none")) for text in loop.warnings] == [True] * (name in COMPLAINTS)


# ------------------------------------------------------------------------------------------ toggled and without dpmon


@pytest.mark.parametrize("name", TOGGLED)
def test_each_loop_computes_the_same_as_without_dpmon(
    runs: Runs, toggled: Runs, alone: Runs, name: str, tmp_path: Path
) -> None:
    def again() -> Any:
        return TracedScript(tmp_path, SCRIPT, name, env=TRACED_SCRIPTS_PATH, run=False).end().printed[name][4:]

    expected, as_written, found = (run.loop(name) for run in (alone, runs, toggled))
    results = [as_written.losses, as_written.told]
    assert results == closest_baseline(results, [expected.losses, expected.told], again)  # to the last bit
    assert expected.losses
    assert alike([found.losses, found.told], [expected.losses, expected.told])


@pytest.mark.parametrize("name", TOGGLED)
def test_the_toggle_works_in_each_loop(runs: Runs, toggled: Runs, name: str) -> None:
    """The second and third steps have mode dp, and so do all calls in them; the record is that of the loop itself."""
    loop, counted = toggled.loop(name), runs.loop(name)
    steps, calls = loop.recorded_steps, loop.recorded_calls
    check(steps, calls, threads=name in SEVERAL_THREADS)
    found = shape(steps, calls)
    if name in SEVERAL_THREADS:
        found[-1][-1] = counted.steps[-1][-1]
    assert found == counted.steps
    assert identified(calls) == named(counted.calls)
    assert len(loop.warnings) == (name in COMPLAINTS)
    process = toggled.numbers[loop.pid]
    asked = [e.data for e in toggled.run.events("mode", process) if e.data["requested_by"] == "user"]
    assert [event["refused"] for event in asked] == [None] * len(asked)
    modes = ["dp", "single"][: 2 if len(steps) > 3 else 1]
    assert list(dict.fromkeys(event["mode"] for event in asked)) == modes
    assert [calls[event["call"] - 1].mode for event in asked] == [event["mode"] for event in asked]
    assert calls[asked[0]["call"] - 1].step == 2
    wrapped = any(call.via for call in calls if call.step == 1)
    assert [step.mode for step in steps[:3]] == ["dp" if wrapped else "single", "dp", "dp"]
    assert steps[-1].mode == modes[-1]
    for call in calls:
        assert len(call.replicas) == (2 if call.mode == "dp" else 1)
        assert set(call.phases) == (
            {"scatter", "replicate", "parallel_apply", "gather"} if call.mode == "dp" else set()
        )


def test_mixed_precision_is_visible_in_the_sizes(toggled: Runs) -> None:
    calls = toggled.loop("mixed_precision_from_a_loader").recorded_calls
    assert calls
    for call in calls:
        assert call.inputs is not None
        assert call.outputs is not None
        assert (call.inputs[0].dtype, call.outputs[0].dtype) == ("float32", "bfloat16")
        assert {share.outputs[0].dtype for share in call.replicas if share.outputs} == {"bfloat16"}


def test_nothing_of_dpmon_is_saved_with_a_model(runs: Runs, toggled: Runs) -> None:
    for run in (runs, toggled):
        assert run.loop("saved_and_copied").told == [*[[False, True]] * 8, False, True]


def test_the_script_can_hide_devices_because_dpmon_does_not_ask_first(runs: Runs) -> None:
    assert runs.loop("devices_hidden_late").told == [[0, False], False, 0]


# ------------------------------------------------------------------------------------------ one by one


def test_an_evaluation_ends_with_its_last_call(runs: Runs) -> None:
    """The time before the training goes on (a sleep of a second) belongs to no step of either."""
    steps = runs.loop("fetched_one_ahead").recorded_steps
    gaps = [
        after.start_ns - before.start_ns - before.wall_ns
        for before, after in pairwise(steps)
        if before.kind != after.kind
    ]
    assert [gap >= ONE_S for gap in gaps[:2]] == [True] * 2
    assert len(gaps) == 3


@pytest.mark.parametrize("name", ["adversaries_that_share_a_fake", "an_optimizer_an_epoch", "inference"])
def test_steps_follow_each_other_without_gaps(runs: Runs, name: str) -> None:
    """In an epoch, each step begins where the previous one ended, except after a memory measurement."""
    loop = runs.loop(name)
    steps, measured = loop.recorded_steps, runs.run.events("memory", runs.numbers[loop.pid])
    gaps = [after.start_ns - before.start_ns - before.wall_ns for before, after in pairwise(steps)]
    assert min(gaps) == 0
    # Equal results are recorded once.
    measurements = 1 + (steps[-1].start_ns + steps[-1].wall_ns - steps[0].start_ns) // (5 * ONE_S)
    assert sum(gap > 0 for gap in gaps) <= max(measurements, len(measured))


def test_a_call_that_contains_backward_and_optimizer_is_one_step(runs: Runs) -> None:
    loop = runs.loop("steps_within_a_call")
    for step, call in zip(loop.recorded_steps, loop.recorded_calls, strict=True):
        assert sum(step.phases[name] for name in ("forward", "backward", "optimizer")) <= call.wall_ns


def test_an_evaluation_does_not_count_in_the_samples_of_a_training_step(runs: Runs) -> None:
    """Its calls are recorded with their rows."""
    calls = runs.loop("a_teacher_from_a_loader").recorded_calls
    assert {call.rows for call in calls if not call.grad} == {60}
    assert {call.rows for call in calls if call.grad} == {30}


def test_weights_that_are_arguments_are_no_devices(runs: Runs) -> None:
    assert {call.devices for call in runs.loop("given_its_weights").recorded_calls} == {("cpu",)}


def test_a_warning_says_which_calls_may_have_been_missed(runs: Runs) -> None:
    """A small part of a known model, which scripts rarely call directly."""
    loop = runs.loop("a_layer_by_itself")
    assert Counter(call.root for call in loop.recorded_calls)["Linear"] <= loop.told


@pytest.mark.parametrize("name", SEVERAL_THREADS)
def test_threads_beside_the_training(runs: Runs, name: str) -> None:
    """The thread with the first call is the training thread; the other's calls are recorded, but not its steps."""
    loop = runs.loop(name)
    mine = [call for call in loop.recorded_calls if call.root == "Net"]
    assert 0 < len(mine) < len(loop.recorded_calls)
    assert [[samples, phases] for samples, phases, _ in shape(loop.recorded_steps, mine)] == [
        [samples, phases] for samples, phases, _ in loop.steps
    ]
    for step, call in zip(loop.recorded_steps, mine, strict=True):
        assert step.step == call.step
        assert step.phases["forward"] == call.wall_ns


# ------------------------------------------------------------------------------------------ processes

CHILDREN = ("forks_a_child", FORKS, "multiprocessing_child")


def test_workers_leave_no_ring(runs: Runs) -> None:
    """Not even those that call a model of their own."""
    assert set(runs.numbers) <= {runs.loop(name).pid for name in NAMES} | {runs.loop(name).told for name in CHILDREN}


@pytest.mark.parametrize(("name", "steps"), [("forks_a_child", 3), ("multiprocessing_child", 6)])
def test_a_child_has_a_record_of_its_own(runs: Runs, name: str, steps: int) -> None:
    """The last step is recorded even if it ends with os._exit."""
    found, calls, warnings = runs.recorded(runs.loop(name).told)
    check(found, calls)
    assert shape(found, calls) == [[12, ["backward", "forward", "optimizer"], 1]] * steps
    assert warnings == []


def test_a_wrapper_made_before_the_fork(runs: Runs, toggled: Runs) -> None:
    for run, mode in ((runs, "single"), (toggled, "dp")):
        loop = run.loop(FORKS)
        _, calls, _ = run.recorded(loop.told)
        assert [(call.via, call.mode) for call in [*loop.recorded_calls, *calls]] == [("DataParallel", mode)] * 2


def test_a_root_that_comes_with_the_first_step_of_an_optimizer_is_seen_from_the_second_on(tmp_path: Path) -> None:
    """The search for roots has ended by then, and rarely starts again exactly at the first step."""
    run: TracedRun = run_traced(tmp_path, PLAYS_FIRST, mode="script")
    assert run.printed == 20
    assert [call.step for call in run.calls("Linear")][-19:] == list(range(2, 21))
    assert len(run.calls("Sequential")) == 220
    assert len(run.calls("Linear")) == 20 or "Linear was called by the script at step 2, " in "".join(run.complaints)
