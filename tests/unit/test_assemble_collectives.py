"""Collectives of sampled steps, and their step."""

from __future__ import annotations

from dpmon.assemble import Assembler
from dpmon.record.history_rows import CollectiveRow
from dpmon.record.jsonl import as_json
from dpmon.record.record_types import Step
from dpmon.record.span_format import Kind
from support.script_simulator import MS, Script, assemble_script, without_definitions


def trained(script: Script, steps: int = 1) -> list[int]:
    """Write steps of a loop with a loader; return when each began."""
    starts = []
    for _ in range(steps):
        starts.append(script.now)
        script.play("d l")
    return starts


def test_the_step_is_the_one_under_way_at_the_start() -> None:
    script = Script()
    group = script.group()
    first, second, third = trained(script, 3)
    script.collective(group, first + MS, 1.0)
    script.collective(group, second + MS, 20.0)  # ends long after its step
    script.collective(group, third, 1.0)
    script.fetch(over=True)
    script.collective(group, first - 5 * MS, 1.0)  # before the loop
    script.collective(group, script.now, 1.0)  # after it
    result = assemble_script(script)
    assert sorted((one.step or 0) for one in result.collectives) == [0, 0, 1, 2, 3]
    assert [step.step for step in result.steps] == [1, 2, 3]


def test_a_collective_of_the_open_step_follows_the_step() -> None:
    script = Script()
    group, net = script.group(), script.model()
    script.fetch()
    script.collective(group, script.now, 0.1)
    script.learn(net)
    assembler = Assembler()
    lines = script.lines_between(0, len(script.lines))
    out = assembler.feed(script.spans, lines)
    assert without_definitions(out) == []
    count = len(script.spans)
    script.fetch()
    result = assembler.feed(script.spans[count:], [])
    assert [type(row) for row in result] == [Step, CollectiveRow]
    assert assemble_script(script).collectives[0].step == 1


def test_what_is_known_of_a_collective() -> None:
    script = Script()
    (start,) = trained(script)
    script.collective(script.group(backend="nccl", device="cuda"), start, 0.25, inside=Kind.BACKWARD)
    (one,) = assemble_script(script).collectives
    said = as_json(one)
    assert (said["operation"], said["bytes"], said["backend"], said["device"]) == ("all_reduce", 1000, "nccl", "cuda")
    assert (said["host_ms"], said["phase"]) == (0.25, "backward")


def test_a_sample_belongs_to_the_step_at_its_middle() -> None:
    script = Script()
    before = script.now - MS // 100
    trained(script)
    script.sampled(before, 0)
    script.fetch(over=True)
    (one,) = assemble_script(script).samples
    assert (one.step, one.collectives) == (1, 0)


def test_reasons_why_no_collective_can_be_recorded() -> None:
    script = Script()
    (start,) = trained(script)
    script.collective(script.define({"operation": None, "why": "this torch is too old"}), start, 0.0)
    (one,) = assemble_script(script).samples
    said = as_json(one)
    assert (said["collectives"], said["absent"]["collectives"]) == (None, "this torch is too old")


def test_one_without_a_definition_is_dropped() -> None:
    assembler = Assembler()
    assert assembler.feed([Script().collective(77, 0, 1.0)], []) == []
    assert assembler.dropped == 1
