"""Communication of ranks in report, summary, lines, metrics and traces, in the same words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dpmon.cli.commands import _make_listed_run
from dpmon.cli.status_stream import ProgressReporter, StatusStream
from dpmon.cli.summary import summary_lines
from dpmon.export.perfetto import write_trace
from dpmon.model.compared_run import RUN_METRICS
from dpmon.report.comparison_report import read_compared_run
from dpmon.report.html_page import render_page
from dpmon.report.plain_text import text_lines
from dpmon.report.sections import build_document
from dpmon.run.run_directory import load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.store.records import read_records
from dpmon.store.store_opening import open_store
from dpmon.supervise.prometheus_file import PrometheusFile
from support.format_readers import read_trace, report_json_of
from support.history_builders import read_report, write_run_directory
from support.rank_builders import ddp_rank_rows
from support.run_harness import append_to, fake_status_reader

HELD_UP = "rank 1 delays the others by 6.00 ms per step (34%): its data takes 6.40 ms, others 400 µs"
STEPS = 100
KNOWN = STEPS - 5
"""Number of steps without the first ones, which settle."""


def a_run(status: int | None = 0, **how: Any) -> Path:
    """Make a run of three ranks; the second waits long for data."""
    made, _ = ddp_rank_rows(3, **{"slow": 1, "phase": "data", "steps": STEPS, "noise": 0.0, **how})
    return write_run_directory(made, status=status)


def test_text_page_and_json_of_the_report_have_the_communication(state: Path) -> None:
    story = read_report(a_run())
    text = text_lines(build_document(story), 200)
    assert f"  straggler  {HELD_UP}; slowest in {KNOWN} of {KNOWN} steps" in text
    assert f"  exposed    2.10 ms per step, 12% of it; {KNOWN} steps" in text
    assert "  buckets    6: 1.00 MiB, 25.0 MiB ×5" in text
    at = text.index("RANKS: where step time goes")
    head, *rows = (" ".join(line.split()) for line in text[at + 1 : at + 4])
    assert head == "mean per step data forward backward exposed wait slowest in"
    assert rows[0] == "rank 0 of 3 400 µs 3.10 ms 5.00 ms 2.10 ms 6.00 ms 0%"
    assert rows[1] == "rank 1 of 3 6.40 ms 3.10 ms 5.00 ms 2.10 ms 0 100%"
    made = render_page(build_document(story))
    for said in ("Communication", "mean per step", HELD_UP, "6: 1.00 MiB, 25.0 MiB ×5"):
        assert said in made
    found = json.loads(json.dumps(report_json_of(story)))
    told = found["communication"]
    assert told["exposed_ms"] == pytest.approx(2.1, abs=0.01)
    assert told["wait_ms"] == pytest.approx(6.0, abs=0.01), "the straggler's own 0 is no wait"
    assert told["joined_steps"] == KNOWN
    assert told["missing"] is None
    assert told["straggler"]["sentence"] == f"{HELD_UP}; slowest in {KNOWN} of {KNOWN} steps"
    assert told["torch"] == {"process": 0, "iteration": 300, "comm_ms": 8.0, "overlap_ms": 5.9, "absent": {}}
    assert told["wrappers"][0]["bucket_bytes"] == [1 << 20, *[25 << 20] * 5]
    assert [rank["wait_ms"] for rank in found["ranks"]] == pytest.approx([6.0, 0.0, 6.0], abs=0.01)
    assert [rank["slowest"] for rank in found["ranks"]] == [0, KNOWN, 0]
    (straggler, *_) = [finding for finding in found["findings"] if finding["kind"] == "straggler"]
    assert straggler["text"] == HELD_UP.replace("rank", "Rank") + "."


def test_data_of_a_slow_rank_is_one_finding(state: Path) -> None:
    """The slow rank waits for data most of its time, but the finding about the slow rank says so already."""
    slow = read_report(a_run(extra_ms=60.0))
    assert [one.process_name for one in (*slow.run.modes, *slow.run.other_process_modes)] == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]
    assert slow.run.other_process_modes[0].phase_share("data") > 0.2
    kinds = [finding.kind for finding in slow.findings]
    assert "straggler" in kinds
    assert "data" not in kinds
    assert "  100 steps of rank 0" in text_lines(build_document(slow), 200)


def test_steps_without_a_pass_count_as_none_of_it(state: Path) -> None:
    story = read_report(a_run(passes=((0, 1), (0, 1), (0, 1), (1, 0))))
    text = " ".join(" ".join(text_lines(build_document(story), 200)).split())
    assert "100 steps, 25 updates, 300 calls total" in text
    assert f"exposed 2.10 ms per update, 4% of it; {STEPS // 4 - 1} updates" in text
    assert "mean per update data" in text
    assert "passes 1.00 synced per update, 3.00 under no_sync" in text, "as below, where the first steps count, too"
    assert "100 steps, 25 updates of rank 0" in text
    assert "backward passes under no_sync: 3.00 passes per update, 75 passes total" in text
    (mode,) = report_json_of(story)["modes"]
    assert mode["quantities"]["synced"] == {"sum": STEPS // 4, "steps": STEPS}
    assert (mode["process_steps"], mode["process_updates"]) == (STEPS, STEPS // 4)
    directory = Path(story.directory)
    listed = _make_listed_run(directory, load_info(directory))
    assert (listed.steps, listed.updates, listed.table_cells()[4]) == (STEPS, STEPS // 4, "100 · 25 updates")


def test_a_comparison_has_communication_per_step_whatever_an_update_takes(state: Path) -> None:
    every_step, every_fourth = read_compared_run(a_run()), read_compared_run(a_run(passes=((0, 1),) * 3 + ((1, 0),)))
    assert every_step.values["exposed"] == pytest.approx(2.1e6, rel=0.01)
    assert every_fourth.values["exposed"] == pytest.approx(2.1e6 / 4, rel=0.05), "24 of 95 steps averaged"
    assert every_step.values["wait"] > 3 * every_fourth.values["wait"]
    (label,) = [metric.label for metric in RUN_METRICS if metric.name == "exposed"]
    assert label == "exposed communication per step"


def test_the_report_says_why_waits_are_unknown(state: Path) -> None:
    text = text_lines(build_document(read_report(a_run(world=8))), 200)
    assert any("3 of 8 ranks are recorded" in line for line in text)
    assert "RANKS: where step time goes" not in text


def test_the_summary_names_the_slow_rank_and_the_waits(state: Path) -> None:
    directory = a_run()
    lines = summary_lines(directory, load_exit(directory), 200)
    assert any(line.endswith(f"{HELD_UP.replace('rank', 'Rank')}.") for line in lines)
    assert any(f"slowest in {KNOWN} of {KNOWN} steps" in line for line in lines)
    assert any("rank 0 of 3" in line and "2.10 ms  6.00 ms" in line for line in lines)


def test_the_line_of_progress_names_the_slow_rank(state: Path) -> None:
    reader = fake_status_reader(a_run(None))
    assert (
        ProgressReporter(reader).line().endswith("  others wait for rank 1: 6.00 ms (34%), data 6.40 ms, others 400 µs")
    )
    reader.directory = a_run(None, slow=None, noise=0.02)
    assert "others wait" not in ProgressReporter(reader).line()


def test_json_lines_have_the_communication(state: Path) -> None:
    said: list[bytes] = []
    lines = StatusStream(RunReader(a_run(None)), append_to(said))
    lines.write_if_due(1e9)
    found = json.loads(said[0])
    assert found["communication"]["straggler"]["phase"] == "data"
    assert found["communication"]["straggler"]["sentence"].startswith(HELD_UP)
    assert [rank["data_ms"] for rank in found["ranks"]] == pytest.approx([0.4, 6.4, 0.4], abs=0.01)
    assert [rank["wait_ms"] for rank in found["ranks"]] == pytest.approx([6.0, 0.0, 6.0], abs=0.01)


def test_metrics_have_the_communication(state: Path, tmp_path: Path) -> None:
    target = tmp_path / "it.prom"
    metrics = PrometheusFile(target, a_run(None), print)
    metrics.write()
    found = {
        (sample.name, sample.labels.get("process")): sample.value
        for family in text_string_to_metric_families(target.read_text("utf-8"))
        for sample in family.samples
    }
    assert found["dpmon_step_exposed_seconds_total", "0"] == pytest.approx(STEPS * 2.1e-3, rel=0.01)
    assert found["dpmon_step_wait_seconds_total", "2"] == pytest.approx(STEPS * 6e-3, rel=0.01)
    assert found["dpmon_step_wait_known_total", "1"] == STEPS
    assert found["dpmon_step_slowest_total", "1"] == STEPS
    assert ("dpmon_step_slowest_total", "0") not in found
    assert found["dpmon_step_held_seconds_total", "1"] == pytest.approx(STEPS * 6e-3, rel=0.01)
    assert found["dpmon_ddp_group_size", "2"] == 3
    assert found["dpmon_ddp_torch_overlap_seconds", "0"] == pytest.approx(5.9e-3)


def test_a_trace_has_waits_and_buckets(state: Path) -> None:
    directory, file = a_run(steps=10), io.StringIO()
    with open_store(directory) as store:
        write_trace(load_info(directory), read_records(store), file)
    trace = read_trace(file.getvalue())
    slices = trace.slices["rank 0 (process 0)", "steps"]
    steps = [one for one in slices if one["name"].startswith("step ")]
    syncs = [one for one in slices if one["name"] == "sync"]
    for one in (*steps, *syncs):
        assert one["args"]["exposed_ms"] == pytest.approx(2.1, abs=0.01)
        assert one["args"]["wait_ms"] == pytest.approx(6.0, abs=0.01)
    marks = [one for one in trace.instants if one["name"].startswith("bucket ")]
    assert len(marks) == 3 * 10 * 2
    assert {one["name"] for one in marks} == {"bucket 1 ready", "bucket 2 ready"}
    assert any(abs(one["ts"] - syncs[0]["ts"]) < 1 for one in marks if one["name"] == "bucket 2 ready")
