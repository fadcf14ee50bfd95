"""Memory by device and use: the tracer's sums are equal to the script's own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import Dpmon
from tracing import text_of, traced

from dpmon.tracer.memory_looks import EXTRA_LOOKS, Memory
from dpmon.tracer.storages import AT_ONCE, MAX_TENSORS, MODEL, Walk


def test_memory_sums_equal_those_of_the_script(dpmon: Dpmon, tmp_path: Path) -> None:
    result = traced(tmp_path, text_of("holding"))
    assert result.status == 0, result.err
    assert not result.events("warning")
    assert result.unreadable == ()
    events = result.events("memory")
    assert events, "the memory is first measured after the first steps"
    newest = events[-1].data
    assert newest["step"] >= 2
    assert newest["took_ms"] > 0
    (cpu,) = newest["devices"]
    said = result.printed
    assert cpu["device"] == "cpu"
    assert {name: cpu[f"{name}_bytes"] for name in said} == said
    for name in ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes", "peak_after_step"):
        assert cpu[name] is None
        assert "no statistics" in cpu["absent"][name]


SHARED = """
import torch
model = torch.nn.Linear(4, 4).share_memory()
model.register_buffer("own", torch.zeros(3))
for _ in range(6):
    model(torch.ones(2, 4)).sum().backward()
print(sum(tensor.nbytes for tensor in model.parameters()))
"""


def test_the_part_of_a_model_in_shared_memory_is_recorded(tmp_path: Path) -> None:
    result = traced(tmp_path, SHARED)
    (cpu,) = result.events("memory")[-1].data["devices"]
    assert cpu["shared_bytes"] == result.printed == cpu["model_bytes"] - 3 * 4


LATE = """
import torch
critic, generator = torch.nn.Linear(4, 1), torch.nn.Linear(2, 4)
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
def step(batch):
    optimizer.zero_grad()
    critic(batch).sum().backward()
    optimizer.step()
for _ in range(6):
    step(torch.ones(3, 4))
for _ in range(6):
    with torch.no_grad():
        batch = generator(torch.ones(3, 2))
    step(batch)
print(sum(tensor.nbytes for model in (critic, generator) for tensor in model.parameters()))
"""


def test_a_model_first_called_after_the_first_measurement_is_measured_in_a_short_run(tmp_path: Path) -> None:
    result = traced(tmp_path, LATE)
    (cpu,) = result.events("memory")[-1].data["devices"]
    assert cpu["model_bytes"] == result.printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_rest_and_the_peak_come_from_torch(tmp_path: Path) -> None:
    text = text_of("holding").replace("def main():", "def main():\n    torch.set_default_device('cuda')", 1)
    result = traced(tmp_path, text + "\nprint(json.dumps(torch.cuda.max_memory_allocated()))\n")
    (gpu,) = [one for one in result.events("memory")[-1].data["devices"] if one["device"] == "cuda:0"]
    assert gpu["rest_bytes"] == gpu["allocated_bytes"] - sum(
        gpu[f"{name}_bytes"] for name in ("model", "gradients", "optimizer")
    )
    assert gpu["allocated_bytes"] <= gpu["peak_bytes"] <= result.printed


def test_the_summary_has_the_memory_and_why_the_rest_is_unknown(dpmon: Dpmon) -> None:
    result = dpmon.run(*dpmon.warm(), "--headless", "--mode", "script", dpmon.script(text_of("holding")))
    assert result.status == 0, result.errors
    # model 50 * 16 + 16 * 16 + 16 + 16 + 100 floats; Adam: two for each of the 288 of its own, and three counters
    assert (
        "cpu  model 4.64 KiB, gradients 1.55 KiB, optimizer 2.26 KiB, rest –, peak –  (rest and peak: torch"
        in result.errors
    )


def test_the_first_new_models_are_measured_at_once_and_later_ones_soon() -> None:
    """In this process, because how soon depends on how long a measurement takes, and so on the machine."""
    asked: list[int] = []
    recorder = SimpleNamespace(soon=lambda: asked.append(memory._due))
    memory = Memory(SimpleNamespace(), recorder, SimpleNamespace())  # type: ignore[arg-type]
    memory.sooner()
    assert asked == [], "before the first measurement, which is due anyway"
    for _ in range(EXTRA_LOOKS):
        memory._due, memory._soonest = 9_000, 4_000
        memory.sooner()
    assert (memory._due, asked) == (0, [0] * EXTRA_LOOKS)
    memory._due, asked[:] = 9_000, []
    memory.sooner()
    assert (memory._due, asked) == (4_000, [4_000])
    memory.sooner()
    assert (memory._due, asked) == (4_000, [4_000]), "models that are replaced again and again change nothing"


# ------------------------------------------------------------------------------------------------ one measurement


class Own(torch.nn.Module):
    """A module with a list of parameters that overrides methods of torch.nn.Module."""

    def __init__(self, count: int, size: int = 1) -> None:
        super().__init__()
        self.many = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(size)) for _ in range(count))

    def parameters(self, *_: Any) -> Any:
        raise AssertionError("a method of the script, with other arguments")

    buffers = modules = named_parameters = named_buffers = named_modules = children = parameters


def in_slices(walk: Walk) -> int:
    """Measure in the smallest slices possible; return their number."""
    slices = 1
    while not walk.go_on(0):
        slices += 1
    return slices


def test_a_measurement_in_slices_equals_one_without_slices() -> None:
    model = Own(3 * AT_ONCE, 5)
    optimizer = torch.optim.SGD(torch.nn.Module.parameters(model.many), lr=0.1, momentum=0.9)
    for parameter in model.many:
        parameter.grad = torch.ones(5)
    optimizer.step()
    slow, quick = Walk([model], [optimizer]), Walk([model], [optimizer])
    assert in_slices(slow) > 9
    assert quick.go_on(10**12)
    assert slow.held == quick.held == {"cpu": [3 * AT_ONCE * 5 * 4] * 3}
    assert not slow.more


def test_memory_freed_between_slices_is_not_confused_with_new_memory() -> None:
    """Each gradient is replaced after each slice, as in a training; torch would reuse the address of the old one."""
    model = Own(4 * AT_ONCE, 3)
    walk = Walk([model], [])
    while True:
        for parameter in model.many:
            parameter.grad = None
        for parameter in model.many:
            parameter.grad = torch.ones(3)
        if walk.go_on(0):
            break
    assert walk.held == {"cpu": [4 * AT_ONCE * 12, 4 * AT_ONCE * 12, 0]}


def test_a_deleted_model_does_not_hold_up_the_measurement() -> None:
    model, other = Own(AT_ONCE + 1), Own(1)
    walk = Walk([model, other], [])
    assert not walk.go_on(0)
    del model
    assert in_slices(walk) < 10
    assert walk.held["cpu"][0] < 4 * (AT_ONCE + 2)


class Wrapper(torch.Tensor):
    """A tensor with the shape of a million numbers that holds only ten, like a shard or a quantized weight."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (1000, 1000), dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("a measurement runs no operation")


class Open(Wrapper):
    """A wrapper that lists the tensors that it holds."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def test_the_tensors_inside_a_tensor_subclass_count() -> None:
    model = torch.nn.Module()
    model._buffers["open"] = Open(torch.ones(10))
    walk = Walk([model], [])
    in_slices(walk)
    assert (walk.held, walk.unsized) == ({"cpu": [40, 0, 0]}, ({}, {}, {}))


def test_a_tensor_subclass_that_does_not_list_its_tensors_counts_as_unknown() -> None:
    model = torch.nn.Module()
    model._buffers["closed"] = Wrapper(torch.ones(10))
    walk = Walk([model], [])
    in_slices(walk)
    assert (walk.held, walk.unsized) == ({"cpu": [0, 0, 0]}, ({"Wrapper": 1}, {}, {}))


@pytest.mark.parametrize("more", [0, 1])
def test_too_many_tensors(more: int) -> None:
    model = Own(MAX_TENSORS + more)
    model.many[0].grad = None  # no gradient
    walk = Walk([model], [])
    in_slices(walk)
    assert walk.more == ({MODEL} if more else set())
    assert walk.held == {"cpu": [4 * MAX_TENSORS, 0, 0]}


MANY = """\
import torch
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.many = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(6000))
    def parameters(self, must_be_given):
        raise AssertionError
    named_parameters = named_modules = modules = buffers = parameters
    def forward(self, x):
        return x * self.many[0]
model = Own()
optimizers = [torch.optim.SGD(torch.nn.Module.parameters(model.many), lr=0.1) for _ in range(300)]
for x in torch.utils.data.DataLoader(torch.ones(60, 1)):
    model(x).sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
"""


def test_a_long_measurement_is_spread_over_several_steps_and_in_no_step(tmp_path: Path) -> None:
    run = traced(tmp_path, MANY)
    assert (run.status, run.complaints) == (0, [])
    found = run.events("memory")[0].data
    (cpu,) = found["devices"]
    assert cpu["model_bytes"] == 6000 * 8
    assert cpu["absent"]["optimizer_bytes"] == "more than 256 optimizers at once; 44 of them are not counted"
    assert found["turns"] > 1
    steps = run.steps()
    assert len(steps) == 60
    gaps = {
        before.step: after.start_ns - before.start_ns - before.wall_ns
        for before, after in pairwise(steps)
        if after.start_ns != before.start_ns + before.wall_ns
    }
    begun = found["step"] - found["turns"]  # the last step before the measurement
    assert begun >= 1
    measured = range(begun + 1, found["step"] + 1)
    between = [step for step in measured if step in gaps]
    # The gradients come first, after the backward pass of a step; on a slow machine in more than one.
    assert between == list(range(between[0], found["step"] + 1))
    of_gradients = sum(step.phases["other"] for step in steps if begun < step.step <= between[0])
    assert sum(gaps.pop(step) for step in between) + of_gradients >= 0.99e6 * found["took_ms"] > 0
    assert len(gaps) <= 2 + sum(step.wall_ns for step in steps) // 5_000_000_000  # of a later measurement
