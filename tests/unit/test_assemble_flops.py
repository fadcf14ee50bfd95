"""Which steps get the FLOPs of a step that was counted, and which steps a count or a profile slows."""

from __future__ import annotations

import pytest

from dpmon.record.span_format import Kind
from support.script_simulator import Script, assemble_script


def train(script: Script, model: int, rows: int = 8, *, with_loader: bool = False, mark: str = "") -> None:
    """Add a step. `mark`: whether the count begins "before" or "after" its first call."""
    if with_loader:
        script.fetch()
    if mark == "before":
        script.write(Kind.FLOPS, script.now, 0)
    script.call(model, rows=rows)
    if mark == "after":
        script.write(Kind.FLOPS, script.now, 0)
    script.backward()
    script.optimizer()
    if mark:
        script.event("flops", "last", step=None, flops=640, recomputed_flops=0, reason=None)


@pytest.mark.parametrize("with_loader", [False, True])
@pytest.mark.parametrize("mark", ["before", "after"])
def test_later_steps_of_the_same_shape_get_the_flops(with_loader: bool, mark: str) -> None:
    script = Script()
    script.makes_optimizer()
    model = script.model()
    for number in range(1, 7):
        rows = 4 if number == 5 else 8
        train(script, model, rows, with_loader=with_loader, mark=mark if number == 3 else "")
    result = assemble_script(script)
    known = [step.quantity("flops") for step in result.steps]
    expected = 640 if mark == "before" else None
    assert known[:2] == [None, None]
    assert known[3:] == [expected, None, expected]
    assert [event.data["step"] for event in result.events if event.kind == "flops"] == [3]
    assert "recomputed_flops" not in result.steps[-1].counts
    assert [step.step for step in result.steps if step.is_slowed] == [3]


@pytest.mark.parametrize(("with_loader", "slowed"), [(False, [3, 4, 5]), (True, [2, 3, 4])])
def test_a_profile_slows_its_steps_and_the_one_with_its_start_or_end(with_loader: bool, slowed: list[int]) -> None:
    """A profile of steps 3 and 4. It starts and ends between steps: before a fetch, or after an optimizer step."""
    script = Script()
    script.makes_optimizer()
    model = script.model()
    for number in range(1, 8):
        if number in (3, 4, 5):
            script.write(Kind.PROFILE, script.now, 0)
        train(script, model, with_loader=with_loader)
    steps = assemble_script(script).steps
    assert [step.step for step in steps] == list(range(1, 8))
    assert [step.step for step in steps if step.is_slowed] == slowed


def test_a_profile_that_ends_in_a_counted_step_keeps_its_flops() -> None:
    script = Script()
    script.makes_optimizer()
    model = script.model()
    for number in range(1, 7):
        if number == 3:
            script.write(Kind.PROFILE, script.now, 0)
        train(script, model, mark="before" if number == 3 else "")
    steps = assemble_script(script).steps
    assert [step.quantity("flops") for step in steps][3:] == [640, 640, 640]
    assert [step.step for step in steps if step.is_slowed] == [3]
