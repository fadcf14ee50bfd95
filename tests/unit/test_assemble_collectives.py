"""Collectives of sampled steps: their step, when they could begin, and what is derived from that."""

from __future__ import annotations

from dpmon.assemble import Assembler
from dpmon.record.jsonl import as_json
from dpmon.record.record_types import bus_factor
from dpmon.record.shared_names import Unended
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


def test_a_collective_that_began_in_the_open_step_waits_for_its_end() -> None:
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
    assert len(result) == 1
    assert assemble_script(script).collectives[0].step == 1


def test_a_collective_can_begin_when_earlier_ones_of_its_group_are_over() -> None:
    script = Script()
    (start,) = trained(script)
    mine, others = script.group(size=4), script.group(name="1")
    script.collective(mine, start, 10.0, size=1_000_000)
    script.collective(mine, start + 4 * MS, 8.0, size=1_000_000)
    script.collective(others, start + 4 * MS, 8.5, size=1_000_000)
    first, second, third = assemble_script(script).collectives
    assert (first.queue_ns, second.queue_ns, third.queue_ns) == (0, 6 * MS, 0)
    assert first.alone.alg_bytes_s == 1_000_000 / 0.010
    assert second.alone.alg_bytes_s == 1_000_000 / 0.002
    assert second.alone.bus_bytes_s == second.alone.alg_bytes_s * 1.5


def test_a_collective_does_not_wait_for_one_that_was_launched_or_ended_later() -> None:
    script = Script()
    (start,) = trained(script)
    group = script.group()
    script.collective(group, start + 2 * MS, 3.0)
    script.collective(group, start, 6.0)  # it was launched before, and ended after
    assert [one.queue_ns for one in assemble_script(script).collectives] == [0, 0]


def test_an_unknown_end_has_a_reason_and_no_bandwidth() -> None:
    script = Script()
    (start,) = trained(script)
    script.collective(
        script.group(backend="nccl", device="cuda"), start, 0, inside=Kind.BACKWARD, why=Unended.ON_DEVICE
    )
    (one,) = assemble_script(script).collectives
    said = as_json(one)
    assert (said["host_ms"], said["queue_ms"], said["alg_bytes_s"], said["bus_bytes_s"]) == (None,) * 4
    assert "device" in said["absent"]["host_ms"]
    assert said["phase"] == "backward"


def test_a_barrier_has_no_bandwidth() -> None:
    script = Script()
    (start,) = trained(script)
    script.collective(script.group("barrier"), start, 1.0, size=0)
    said = as_json(assemble_script(script).collectives[0])
    assert (said["host_ms"], said["alg_bytes_s"]) == (1.0, None)
    assert "no tensor" in said["absent"]["alg_bytes_s"]


def test_a_collective_shorter_than_the_precision_of_its_end_has_no_bandwidth() -> None:
    script = Script()
    (start,) = trained(script)
    mine = script.group(size=4)
    script.collective(mine, start, 1.0, size=1_000_000)
    script.collective(mine, start, 1.0035, size=43_008)
    first, second = (as_json(one) for one in assemble_script(script).collectives)
    assert first["alg_bytes_s"] == 1_000_000 / 0.001
    assert (second["alg_bytes_s"], second["bus_bytes_s"]) == (None, None)
    assert second["absent"]["alg_bytes_s"] == "too short to time: dpmon finds the end to 0.1 ms"


def test_a_sample_belongs_to_the_step_at_its_middle() -> None:
    script = Script()
    before = script.now - MS // 100
    trained(script)
    script.sampled(before, 0)
    script.fetch(over=True)
    (one,) = assemble_script(script).samples
    assert (one.step, one.collectives) == (1, 0)


def test_nothing_of_a_discarded_sample_is_recorded() -> None:
    """Its collectives may end after it, and even after a later sample."""
    script = Script()
    group = script.group()
    (first,) = trained(script)
    script.collective(group, first, 1.0, size=1)
    script.sampled(first, 2)
    (second,) = trained(script)
    script.collective(group, second, 1.0, size=2)
    ends_late = second + MS
    script.sampled(second, 2, discarded=True)
    (third,) = trained(script)
    script.collective(group, first, 9.0, size=3)
    script.collective(group, ends_late, 9.0, size=4)
    script.collective(group, third, 1.0, size=5)
    script.sampled(third, 1)
    script.collective(group, ends_late, 12.0, size=6)
    script.fetch(over=True)
    result = assemble_script(script)
    assert sorted((one.bytes, one.step) for one in result.collectives) == [(1, 1), (3, 1), (5, 3)]
    assert [one.step for one in result.samples] == [1, 3]


def test_a_collective_that_its_sample_does_not_count_is_dropped() -> None:
    """Another thread launched it just as the sample ended. One that was counted may arrive after the sample, too."""
    script = Script()
    group = script.group()
    (first,) = trained(script)
    script.collective(group, first, 1.0, size=1)
    script.sampled(first, 2)
    script.collective(group, first + MS, 1.0, size=2)
    script.collective(group, first + MS, 1.0, size=3)
    script.fetch(over=True)
    result = assemble_script(script)
    assert [one.bytes for one in result.collectives] == [1, 2]
    assert [one.collectives for one in result.samples] == [2]


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


def test_bus_bandwidth_by_operation() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1.0
    assert bus_factor("all_reduce", 1) == 0.0
