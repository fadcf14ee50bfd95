"""Models spread over several devices have stages in place of replicas, with the bytes passed between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.record.jsonl import as_json
from dpmon.record.record_types import Call
from support.baseline_comparison import ROOT, records_of_kind
from support.run_harness import Dpmon
from support.tracer_harness import TracedRun, run_traced, run_untraced, traced_script_text


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    result = run_traced(tmp_path_factory.mktemp("spread"), traced_script_text("spread"), mode="script")
    assert result.status == 0, result.err
    assert result.unreadable == ()
    assert not result.events("warning")
    return result


def shapes(call: Call) -> list[tuple[str, tuple[str, ...], list[int], list[int]]]:
    """Return device, parts, first input and first output of each stage."""
    return [(s.device, s.parts, list((s.inputs or ())[0].shape), list((s.outputs or ())[0].shape)) for s in call.stages]


def test_a_toy_model_has_a_stage_for_each_device(spread: TracedRun) -> None:
    first, second, short, *_ = spread.calls("Toy")
    one, *_ = spread.calls("Toy 2")
    for call, rows in ((first, 6), (second, 6), (short, 3)):
        assert shapes(call) == [
            ("cpu", ("net1", "relu"), [rows, 10], [rows, 10]),
            ("meta", ("net2",), [rows, 10], [rows, 5]),
        ]
        assert call.devices == ("cpu", "meta")
        assert (call.replicas, call.mode, call.failed) == ((), "single", False)
        here, there = call.stages
        assert here.crossed_bytes is None
        assert there.crossed_bytes == rows * 10 * 4
        assert here.host_ns is not None
        assert there.host_ns is not None
        # One after the other, within the call.
        assert 0 <= here.offset_ns <= here.offset_ns + here.host_ns <= there.offset_ns
        assert there.offset_ns + there.host_ns <= call.wall_ns
    assert one.stages == ()
    assert one.devices == ("cpu",)
    assert len(one.replicas) == 1


def test_a_stage_that_could_not_be_measured_has_a_reason(spread: TracedRun) -> None:
    record = as_json(spread.calls("Toy")[0])
    assert [stage["device_ms"] for stage in record["stages"]] == [None, None]
    assert record["absent"]["device_ms"].startswith("cpu: host time")
    assert "meta: it holds only shapes" in record["absent"]["device_ms"]
    assert [(s["from"], s["crossed_bytes"]) for s in record["stages"]] == [(None, None), ("cpu", 240)]
    assert "stages" not in as_json(spread.calls("Toy 2")[0])


def test_a_part_that_is_spread_itself_is_taken_apart(spread: TracedRun) -> None:
    (call,) = spread.calls("Nested")
    assert shapes(call) == [
        ("cpu", ("body.0",), [2, 4], [2, 8]),
        ("meta", ("body.1",), [2, 8], [2, 6]),
        ("cpu", ("back",), [2, 4], [2, 3]),
    ]
    assert [size.path for size in call.outputs or ()] == ["far", "near"]


def test_a_stage_that_raised_has_no_time_and_no_output(spread: TracedRun) -> None:
    (call,) = spread.calls("Breaks")
    assert call.failed
    here, there = call.stages
    assert here.host_ns is not None
    assert (there.device, there.host_ns, there.outputs) == ("meta", None, None)
    assert [size.shape for size in there.inputs or ()] == [(2, 7)]
    assert as_json(call)["stages"][1]["host_ms"] is None


def test_a_part_that_raises_within_a_forward_that_goes_on(spread: TracedRun) -> None:
    """Later parts of this call and of the next are recorded as usual, also if a hook of the script raised."""
    caught, refused, again = spread.calls("Tries")
    for call in (caught, again):
        assert not call.failed
        assert [(s.device, s.parts, s.host_ns is None) for s in call.stages] == [
            ("meta", ("net2",), True),
            ("cpu", ("net1", "relu"), False),
            ("meta", ("net2",), False),
        ]
    assert refused.failed
    assert [(s.device, s.parts) for s in refused.stages] == [("meta", ("net2",))]


def test_a_part_that_runs_inside_another_has_no_stage_of_its_own(spread: TracedRun) -> None:
    (call,) = spread.calls("Translates")
    assert [(s.device, s.parts, s.host_ns is None) for s in call.stages] == [
        ("cpu", ("encoder",), False),
        ("meta", ("decoder",), False),
    ]
    assert [size.shape for size in call.stages[1].outputs or ()] == [(2, 2)]


def test_parts_that_run_on_other_threads_are_not_mixed_in(spread: TracedRun) -> None:
    (call,) = spread.calls("Threads")
    assert [(s.device, s.parts) for s in call.stages] == [("cpu", ("net1",))]
    assert call.stages[0].host_ns is not None


def test_stages_are_bounded(spread: TracedRun) -> None:
    (call,) = spread.calls("Back")
    assert len(call.stages) == 64
    assert [stage.device for stage in call.stages[:4]] == ["cpu", "meta", "cpu", "meta"]


def test_the_script_sees_nothing_of_it(spread: TracedRun, tmp_path: Path) -> None:
    assert spread.printed == run_untraced(tmp_path, traced_script_text("spread")).printed
    assert set(spread.printed["hooks"].values()) == {0}
    # A copy of a traced model is another root.
    assert [[len(call.stages) for call in spread.calls(root)] for root in ("Toy", "Toy 2", "Toy 3")] == [
        [2, 2, 2],
        [0],
        [2],
    ]


def test_the_example_and_the_summary(dpmon: Dpmon, tmp_path: Path) -> None:
    """Without a GPU the example uses one device; a spread model has its stages in the summary."""
    result = dpmon.run(*dpmon.warm(), "--headless", ROOT / "examples" / "model_parallel.py", "--steps", 5)
    assert result.status == 0, result.errors
    calls = records_of_kind(dpmon.records(), "call")
    assert [call["call"] for call in calls] == [1, 2, 3, 4, 5]
    assert {call["root"] for call in calls} == {"DistributedModel"}
    assert all(len(call.get("stages", ())) == (2 if len(call["devices"]) > 1 else 0) for call in calls)
    result = dpmon.run(*dpmon.warm(), "--headless", dpmon.script(traced_script_text("spread")))
    assert result.status == 0, result.errors
    shown = {tuple(line.split()[1:5]): line for line in result.errors.splitlines()}
    assert shown["Toy", "0", "cpu", "2"].endswith("  net1, relu: [6, 10] -> [6, 10]")
    assert shown["Toy", "1", "meta", "2"].endswith("  net2: [6, 10] -> [6, 5]")
    assert shown["Breaks", "1", "meta", "1"].endswith("  net2: [2, 7] -> not finished")
