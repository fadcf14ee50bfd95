"""Device times beside host times in history, exports, reports, findings, lines and on the screen."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.status_stream import StatusStream
from dpmon.cli.summary import summary_lines
from dpmon.export import iter_records
from dpmon.export.csv_tables import CsvTables
from dpmon.export.perfetto import write_trace
from dpmon.record.history_rows import Row
from dpmon.record.record_types import UNTIMED, Call, Step
from dpmon.record.shared_names import CALL_PHASES, Untimed
from dpmon.report.html_page import render_page
from dpmon.report.sections import build_document
from dpmon.run.run_directory import load_info
from dpmon.run.run_reader import RunReader
from support.format_readers import report_json_of, report_text
from support.history_builders import read_report, write_run_directory
from support.record_builders import (
    CALL_TIMES_MS,
    GPUS,
    Training,
    growing_times,
    staged_calls,
    timed_training,
    with_device_times,
)
from support.run_harness import append_to

NEAR = partial(pytest.approx, rel=0.004)
"""Relative error of medians, which come from sketches."""


def even(steps: int) -> list[Row]:
    """Return a training whose replicas always take 1.5 and 1.75 ms."""
    return timed_training(steps, lambda number: (1.5, 1.75))


def test_history_exports_and_report_have_device_times(state: Path) -> None:
    directory = write_run_directory({0: even(40)})
    records = list(iter_records(directory))
    calls = [record for record in records if isinstance(record, Call)]
    steps = [record for record in records if isinstance(record, Step)]
    assert len(calls) == len(steps) == 40
    assert {step.device_ms["backward"] for step in steps if step.device_ms} == {3.0}
    assert {call.replicas[1].device_ms for call in calls} == {1.75}

    files: dict[str, io.StringIO] = {}
    CsvTables(lambda which: files.setdefault(which, io.StringIO())).write(records)
    rows = {which: list(csv.DictReader(io.StringIO(file.getvalue()))) for which, file in files.items()}
    assert (rows["step"][0]["forward_device_ms"], rows["call"][0]["gather_device_ms"]) == ("4.0", "0.25")

    trace = io.StringIO()
    write_trace(load_info(directory), records, trace)
    counters = [event for event in json.loads(trace.getvalue()) if event["name"] == "step phases on the device (ms)"]
    assert len(counters) == 40
    assert counters[0]["args"] == {"data": 0.25, "forward": 4.0, "backward": 3.0, "optimizer": 0.5}

    phases = report_json_of(read_report(directory))["modes"][0]["phases"]
    medians = [phases[name]["device_median_ms"] for name in ("forward", "gather")]
    assert medians == pytest.approx([4.0, 0.25], rel=0.004)
    assert phases["other"]["device_median_ms"] is None
    lines = [line.split() for line in report_text(directory, 100)]
    assert ["phase", "share", "median", "p95", "on", "device"] in lines
    assert next(line for line in lines if line[:1] == ["backward"])[-2] in ("2.99", "3.00", "3.01")
    (backward,) = (line for line in summary_lines(directory, None) if line.startswith("  backward"))
    assert backward.endswith("3.01 ms"), "at most 0.4% off"


def cells(lines: Sequence[str], title: str) -> list[list[str]]:
    """Return the rows of a table by its heading, as words, without sizes on separate lines."""
    begin = next(number for number, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((number for number in range(begin, len(lines)) if not lines[number]), len(lines))
    head, *rows = lines[begin:end]
    return [head.split(), *(line.split() for line in rows if not line.startswith("      "))]


def test_a_replica_has_medians_of_device_and_host_times(state: Path) -> None:
    directory = write_run_directory({0: timed_training()})
    first, second = report_json_of(read_report(directory))["replicas"]
    assert (first["device_median_ms"], first["device_calls"], first["calls"], first["absent"]) == (NEAR(5.0), 9, 9, {})
    assert second["device_median_ms"] == NEAR(10.0)
    assert 0 < first["median_ms"] < 1, "that of the host is another"
    head, one, two = cells(report_text(directory, 64), "REPLICAS")
    assert head[:7] == ["device", "calls", "host", "time", "p95", "on", "device"]
    assert (one[2], one[-2:]) == ("cuda:0", ["5.00", "ms"])
    assert (two[2], two[-2:]) == ("cuda:1", ["9.99", "ms"])
    wide = [line for line in report_text(directory, 120) if "Model 1" in line]
    assert wide[0].endswith("9.99 ms  [15, 5] -> [15, 2]"), "before the sizes"


def test_a_page_has_the_column(state: Path) -> None:
    story = read_report(write_run_directory({0: timed_training()}))
    text = render_page(build_document(story))
    table = text[text.index("Replicas</h2>") :]
    assert "<th>p95</th><th>on device</th><th class=text>received" in table
    row = table[table.index("Model 1") : table.index("</tr>", table.index("Model 1"))]
    assert row.endswith("<td>9.99 ms</td><td class=text>[15, 5] -&gt; [15, 2]</td>")


def test_a_stage_has_the_median_of_its_device(state: Path) -> None:
    """Two processes have the same stages: their calls are in one line."""
    directory = write_run_directory({0: staged_calls(4, growing_times), 1: staged_calls(3, lambda n: (9.0, None))})
    lines = report_json_of(read_report(directory))["stages"]
    found = {(line["stage"], line["outputs"]): line for line in lines}
    assert len(found) == len(lines) == 3
    first = found[0, "[30, 5]"]
    assert (first["calls"], first["device_calls"]) == (7, 7)
    assert (first["device_median_ms"], first["median_ms"]) == (NEAR(4.0), NEAR(2.0)), "of 1 2 3 4 9 9 9"
    whole, half = found[1, "[30, 5]"], found[1, "[15, 5]"]
    assert (whole["calls"], whole["device_calls"], whole["device_median_ms"]) == (4, 2, NEAR(4.0)), "of 2 6"
    assert (half["calls"], half["device_calls"], half["device_median_ms"], half["absent"]) == (3, 2, NEAR(6.0), {})
    head, *rows = cells(report_text(directory, 64), "STAGES")
    assert head[:6] == ["device", "calls", "host", "time", "on", "device"]
    assert [row[-1] for row in rows] == ["ms"] * 3
    assert [float(row[-2]) for row in rows] == NEAR([4.0, 4.0, 6.0])


def test_a_rank_has_the_device_time_of_its_forward(state: Path) -> None:
    ranks = {}
    for number in range(3):
        made = Training(process=number, rank=number, devices=(f"cuda:{number}",), virtual=False, mode="single",
                        via="DistributedDataParallel")  # fmt: skip
        took = (0.25, None if number == 2 else 4.0 + number, 3.0, 0.5)
        ranks[number] = [*made.begin(), *with_device_times(made.run(5), lambda _: (9.0,), Untimed.FAULT, took)]
    directory = write_run_directory(ranks)
    found = report_json_of(read_report(directory))["ranks"]
    assert [one["forward_device_median_ms"] for one in found] == [NEAR(4.0), NEAR(5.0), None]
    assert [one["absent"] for one in found[1:]] == [{}, {"forward_device_median_ms": UNTIMED[Untimed.FAULT]}]
    lines = report_text(directory, 80)
    assert any(line.rstrip().endswith("samples/s  forward on device") for line in lines)
    rows = [line for line in lines if line.startswith("  rank ")]
    assert [float(row.split()[-2]) for row in rows[:2]] == NEAR([4.0, 5.0])
    assert rows[2].endswith("–")


def test_the_share_of_device_waits_is_extrapolated_to_all_steps(state: Path) -> None:
    """Half of the 80 steps (about 2.4 ms each) have a known wait of 1 ms."""
    made = Training(devices=GPUS, virtual=False)
    payloads = with_device_times(made.run(40), of_step=(1.0, 1.5, 0.7, 0.1))
    payloads += with_device_times(made.run(40), of_step=(None, 1.5, 0.7, 0.1), why=Untimed.LATE)
    story = read_report(write_run_directory({0: payloads}))
    figures = story.run.modes[0].phase("data")
    assert figures is not None
    walls = sum(one.wall_ns for one in story.run.binned_steps.bins)
    assert (figures.device_count, figures.ran) == (40, 80)
    assert figures.device_share == pytest.approx(80e6 / walls)
    (finding,) = [finding for finding in story.findings if finding.kind == "data"]
    assert finding.text.startswith(f"The GPU waits for data: {80e6 / walls * 100:.0f}%")


def test_without_device_times_the_report_does_not_mention_them(state: Path) -> None:
    made = Training()
    directory = write_run_directory({0: [*made.begin(), *made.run(40)], 1: Training(process=1).run(40)})
    story = read_report(directory)
    said = report_json_of(story)
    for line in (*said["replicas"], *said["ranks"]):
        assert line["absent"] == {}, "the record does not say"
    assert {line["device_median_ms"] for line in said["replicas"]} == {None}
    assert {line["forward_device_median_ms"] for line in said["ranks"]} == {None}
    assert "on device" not in "\n".join(report_text(directory, 200))
    assert json.loads(json.dumps(said)) == said


def line_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the line of a headless run with these records."""
    said: list[bytes] = []
    lines = StatusStream(RunReader(write_run_directory({0: rows}, status=None)), append_to(said))
    lines.write_if_due(1e9)
    lines.write_final(None)
    found: dict[str, Any] = json.loads(said[0])
    return found


def on_device(phases: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    return {name: phase["device_median_ms"] for name, phase in phases.items()}


def test_a_line_has_the_device_beside_the_host_of_the_same_thing(state: Path) -> None:
    said = line_of(timed_training(40))
    # The whole forward, as for the host; without the phases of the calls, only 0.25 ms would be left.
    others = {"data": 0.25, "forward": 4.0, "backward": 3.0, "optimizer": 0.5}
    assert on_device(said["phases"]) == {"other": None, **{name: NEAR(took) for name, took in others.items()}}
    assert on_device(said["call_phases"]) == {n: NEAR(took) for n, took in zip(CALL_PHASES, CALL_TIMES_MS, strict=True)}
    whole = said["phases"]["forward"]["median_ms"]
    assert whole > sum(phase["median_ms"] for phase in said["call_phases"].values()) * 0.9
    assert "device_median_ms" not in said["absent"]
