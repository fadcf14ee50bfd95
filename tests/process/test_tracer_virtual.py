"""Virtual replicas: torch's own DataParallel over CPU replicas means what it means on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.tracer_harness import TracedRun, TracedScript, run_traced, run_untraced, traced_script_text

TABLES = {
    1: [[30], [30], [30], [10]],
    2: [[15, 15], [15, 15], [15, 15], [5, 5]],
    3: [[10, 10, 10], [10, 10, 10], [10, 10, 10], [4, 4, 2]],
    8: [[4] * 7 + [2]] * 3 + [[2] * 5],
}
"""Rows of each replica for batches of 30, 30, 30 and 10, as in the tutorial with the same number of GPUs."""

EXAMPLE = (Path(__file__).resolve().parents[2] / "examples" / "tutorial.py").read_text()
GUARDED = EXAMPLE.replace("model = nn.DataParallel(Model(INPUT_SIZE, OUTPUT_SIZE)).to(device)", """\
model = Model(INPUT_SIZE, OUTPUT_SIZE)
    if torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)
    model.to(device)""")  # fmt: skip
"""The tutorial as published, and as it is published elsewhere: DataParallel only with two or more GPUs."""


@pytest.fixture(scope="module")
def tutorials(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], TracedRun]:
    """Both tutorials over 1, 2, 3 and 8 replicas."""
    place = tmp_path_factory.mktemp("tutorials")
    asked = [(count, guarded) for count in TABLES for guarded in (False, True)]
    scripts = {
        (count, guarded): TracedScript(place, GUARDED if guarded else EXAMPLE, replicas=count)
        for count, guarded in asked
    }
    return {key: script.end() for key, script in scripts.items()}


def sizes(rows: int, columns: int, path: str) -> list[tuple[str, tuple[int, ...], str, int]]:
    return [(path, (rows, columns), "float32", rows * columns * 4)]


def spelt(found: Any) -> list[tuple[str, tuple[int, ...], str, int]]:
    return [(size.path, size.shape, size.dtype, size.bytes) for size in found]


@pytest.mark.parametrize("count", TABLES)
@pytest.mark.parametrize("guarded", [False, True])
def test_the_tutorials_tables(tutorials: dict[tuple[int, bool], TracedRun], count: int, guarded: bool) -> None:
    run = tutorials[count, guarded]
    assert run.status == 0, run.err
    calls = run.calls()
    assert [call.rows for call in calls] == [30, 30, 30, 10]
    assert [call.call for call in calls] == [call.step for call in calls] == [1, 2, 3, 4]
    for call, table in zip(calls, TABLES[count], strict=True):
        assert call.mode == "dp"
        assert call.virtual
        assert not call.failed
        assert call.root == "Model"
        assert call.via == (None if guarded else "DataParallel")
        assert call.devices == tuple(f"cpu:{index}" for index in range(count))
        assert [replica.device for replica in call.replicas] == list(call.devices[: len(table)])
        assert [spelt(replica.inputs) for replica in call.replicas] == [sizes(rows, 5, "0") for rows in table]
        assert [spelt(replica.outputs) for replica in call.replicas] == [sizes(rows, 2, "") for rows in table]
        assert spelt(call.inputs) == sizes(sum(table), 5, "0")
        assert spelt(call.outputs) == sizes(sum(table), 2, "")
        primitives = ["scatter"] if count == 1 else ["scatter", "replicate", "parallel_apply", "gather"]
        assert list(call.phases) == primitives
        assert 0 < sum(phase.host_ns for phase in call.phases.values()) <= call.wall_ns
    assert [step.samples for step in run.steps()] == [30, 30, 30, 10]
    assert run.complaints == []


@pytest.mark.parametrize("count", list(TABLES))
def test_the_script_sees_what_it_would_see_on_gpus(tutorials: dict[tuple[int, bool], TracedRun], count: int) -> None:
    """Replicas print in any order; the lines are those of the tables."""
    run = tutorials[count, False]
    inside = run.out.count("In Model: input size")
    assert inside == sum(len(table) for table in TABLES[count])
    for rows in {rows for table in TABLES[count] for rows in table}:
        expected = sum(table.count(rows) for table in TABLES[count])
        assert run.out.count(f"In Model: input size torch.Size([{rows}, 5])") == expected
    assert run.out.count("Outside: input size torch.Size([30, 5]) output_size torch.Size([30, 2])") == 3
    assert run.out.count("Outside: input size torch.Size([10, 5]) output_size torch.Size([10, 2])") == 1


# ------------------------------------------------------------------------------------------------ the same numbers


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in numbers_in(value[name])]
    if isinstance(value, list):
        return [number for child in value for number in numbers_in(child)]
    return [float(value)]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TracedRun]:
    """The same script without dpmon (0) and over 2 and 3 replicas."""
    place = tmp_path_factory.mktemp("numbers")
    scripts = {
        count: TracedScript(place, traced_script_text("sums"), replicas=count or None, run=count > 0)
        for count in (0, 2, 3)
    }
    return {count: script.end() for count, script in scripts.items()}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "what",
    [
        "loss", "gradients", "input gradient", "gradients of two steps", "loss after a step", "penalty",
        "frozen in part", "by keyword", "no_grad", "inference_mode", "eval", "double", "tied", "loss inside",
    ],
)  # fmt: skip
def test_results_equal_those_of_one_device(numbers: dict[int, TracedRun], count: int, what: str) -> None:
    expected, found = numbers[0].printed[what], numbers[count].printed[what]
    assert len(numbers_in(found)) > 0
    if isinstance(expected, dict):
        # An unused parameter has no gradient without DataParallel, and a zero gradient under it, also on GPUs.
        for name in set(found) - set(expected):
            assert set(found.pop(name)) == {0.0}
        assert sorted(found) == sorted(expected)
    # The order of float32 sums differs: the error is relative to the largest number.
    numbers_expected = numbers_in(expected)
    scale = max(1.0, *(abs(number) for number in numbers_expected))
    assert numbers_in(found) == pytest.approx(numbers_expected, rel=1e-6, abs=1e-6 * scale)


@pytest.mark.parametrize("count", [2, 3])
def test_every_call_of_it_ran_over_all_replicas(numbers: dict[int, TracedRun], count: int) -> None:
    run = numbers[count]
    assert run.complaints == []
    calls = run.calls()
    assert len(calls) == 13
    assert {call.mode for call in calls} == {"dp"}
    assert {len(call.replicas) for call in calls} == {count}
    grads = [call.grad for call in calls]
    assert grads.count(False) == 3  # under no_grad and inference_mode
    assert [call.training for call in calls].count(False) == 1


WITHOUT_PARAMETERS = """
import torch
from torch import nn
from torch.nn.parallel import data_parallel

class Loss(nn.Module):
    def forward(self, one, other):
        return (one - other).pow(2).mean().reshape(1)

wrapped, loss = nn.DataParallel(nn.Identity(), dim=1), nn.DataParallel(Loss())
for _ in range(2):
    print(list(wrapped(torch.ones(4, 6)).shape))
print(list(loss(torch.ones(5, 2), torch.zeros(5, 2)).shape))
print(list(data_parallel(Loss(), (torch.ones(5, 2), torch.zeros(5, 2))).shape))
"""


def test_a_module_without_parameters_is_split_like_any_other(tmp_path: Any) -> None:
    run = run_traced(tmp_path, WITHOUT_PARAMETERS)
    assert run.status == 0, run.err
    assert run.out.splitlines() == ["[4, 6]", "[4, 6]", "[2]", "[2]"]
    received = [[list((replica.inputs or ())[0].shape) for replica in call.replicas] for call in run.calls()]
    assert received == [[[4, 3]] * 2, [[4, 3]] * 2, [[3, 2], [2, 2]], [[3, 2], [2, 2]]]
    assert {call.mode for call in run.calls()} == {"dp"}
    assert run.complaints == []


def test_mode_script_leaves_a_module_without_parameters_alone(tmp_path: Any) -> None:
    """On the CPU torch runs the wrapped module itself, and refuses the functional form."""
    run = run_traced(tmp_path, WITHOUT_PARAMETERS, mode="script")
    expected = run_untraced(tmp_path, WITHOUT_PARAMETERS)
    assert (run.status, run.out) == (expected.status, expected.out)
    assert run.out.splitlines() == ["[4, 6]", "[4, 6]", "[1]"]
    assert run.err.splitlines()[-1] == expected.err.splitlines()[-1]
