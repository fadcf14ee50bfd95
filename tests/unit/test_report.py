"""Reports of made-up runs: contents, agreement with the record, and hostile text."""

from __future__ import annotations

import html
import os
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dpmon.cli.summary import summary_lines
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.step_history import BINS
from dpmon.record.history_rows import Definition, LossRow, Row
from dpmon.record.record_types import Event, Step
from dpmon.record.schema import EVALUATION, PHASES, TRAINING
from dpmon.record.shared_names import DDP
from dpmon.report.document import MAX_ROWS, Plot, PlotSeries, Table, TimeSpan
from dpmon.report.health import read_health
from dpmon.report.html_page import WIDTH, render_page, render_plot
from dpmon.report.plain_text import text_lines
from dpmon.report.plots import build_plots
from dpmon.report.sections import build_document
from dpmon.run import proc
from dpmon.run.run_directory import load_exit, load_info, record_stop_request
from dpmon.ui.time_axis import build_chart_columns, fit_axis
from support.format_readers import HtmlPage, check_page_is_offline, lines_of_section, report_json_of, report_text
from support.history_builders import Recording, read_report, snapshot_of_directory, write_run_directory
from support.rank_builders import ddp_rank_rows
from support.record_builders import (
    SECOND,
    Training,
    device_event,
    host_event,
    pause_event,
    step_row,
)


def toggled(steps: int = 60, **how: Any) -> list[Row]:
    training = Training(**how)
    out = [*training.begin(), *training.run(steps), *training.switch("single"), *training.run(steps)]
    return [*out, *training.switch("dp"), *training.run(steps)]


@pytest.fixture
def both(state: Path) -> Path:
    memory: dict[str, Any] = {"process": 0, "rank": None, "t_s": 2.5, "step": 9, "absent": {}, "devices": [
        {"device": "cpu", "model_bytes": 4096, "gradients_bytes": 4096, "optimizer_bytes": 0,
         "absent": {"rest_bytes": "torch keeps no statistics"}}]}  # fmt: skip
    own = [host_event(float(t)) for t in range(30)]
    return write_run_directory({0: [*toggled(), Event("memory", memory)], -1: own}, seconds=5.0)


# ------------------------------------------------------------------------------------------------ what it says


def test_a_report_shows_the_command_and_where_the_time_went(both: Path) -> None:
    lines = report_text(both, 80)
    assert re.fullmatch(r"linear\.py \(linear-[0-9a-f]{4}\): finished in 5\.00 s", lines[0])
    head = " ".join(lines[1:8])
    assert (
        "180 steps, 180 calls (120 in dp, 60 in single); started as dp on virtual replicas cpu:0 cpu:1 (no GPU"
        in re.sub(r"\s+", " ", head)
    )
    steps = lines_of_section(lines, "STEPS")
    assert steps[1].split()[:3] == ["dp", "(virtual)", "120"]
    assert steps[2].split()[:2] == ["single", "60"]
    phases = lines_of_section(lines, "PHASES of a step, dp (virtual)")
    assert [line.split()[0] for line in phases[1:]] == [
        "data", "forward", "scatter", "replicate", "parallel_apply", "gather", "backward", "optimizer", "other",
    ]  # fmt: skip
    replicas = lines_of_section(lines, "REPLICAS")
    assert "Model 1" in replicas[2]
    assert "[15, 5] -> [15, 2]" in replicas[2]
    assert "no GPU: NVML library not found" in lines_of_section(lines, "DEVICES")[0]
    assert lines_of_section(lines, "MODE SWITCHES")[1].endswith("to single")
    assert "4.00 KiB" in lines_of_section(lines, "MEMORY")[1]
    said = report_json_of(read_report(both))
    assert [(mode["mode"], mode["virtual"], mode["steps"]) for mode in said["modes"]] == [
        ("dp", True, 120),
        ("single", False, 60),
    ]
    assert {(one["mode"], one["replica"]): (one["rows"], one["calls"]) for one in said["replicas"]} == {
        ("dp", 0): (15, 120),
        ("dp", 1): (15, 120),
        ("single", 0): (30, 60),
    }
    for one in said["time"]["stretches"]:
        assert sum(one["parts_ms"].values()) <= one["mean_ms"] * one["steps"] * 1.0001
    assert [finding["kind"] for finding in said["findings"]] == ["replicate"]


def test_a_run_that_goes_on_that_is_lost_and_that_trained_nothing(state: Path) -> None:
    lines = report_text(write_run_directory({}, status=None, command_pid=None, started_unix=time.time()), 80)
    assert lines[0].endswith("starting: no PyTorch seen yet")
    assert "nothing was traced: the command has not started yet" in "\n".join(lines)
    lines = report_text(write_run_directory({0: Training().run(3)}, status=None), 80)
    assert lines[0].endswith("lost: its end was not recorded")
    assert lines_of_section(lines, "FINDINGS") == [
        "  too few steps for findings: 0 counted, 30 needed, 3 left out as warm-up"
    ]
    lines = report_text(write_run_directory({}), 80)
    assert "no Python process of the run imported torch" in "\n".join(lines)


@pytest.mark.parametrize("status", [None, 0])
def test_an_import_of_torch_is_the_end_only_if_the_process_has_ended(state: Path, status: int | None) -> None:
    pid = os.getpid()
    me: dict[str, Any] = {"command_pid": pid, "command_started": proc.start_time_s(pid), "boot_id": proc.boot_id()}
    directory = write_run_directory({}, status=status, **me)
    (directory / "stages.log").write_text(f"{pid} {time.monotonic_ns() - 7_000_000_000} importing torch\n")
    said = report_text(directory, 200) + summary_lines(directory, load_exit(directory))
    if status is None:
        alive = [line for line in said if "no model was called; the process is importing torch, for " in line]
        assert len(alive) == 2
    else:
        assert len([line for line in said if "the process ended while it imported torch" in line]) == 2


def test_a_run_that_failed_shows_the_end_of_its_output(state: Path) -> None:
    directory = write_run_directory({0: Training().run(3)}, status=1)
    (directory / "stderr.log").write_bytes(b"10%\r20%\r\nTraceback:\n  boom \x1b[31m\n\n")
    lines = report_text(directory, 80)
    assert lines[0].endswith(": failed with exit status 1 after 1 min 00 s")
    assert lines_of_section(lines, "LAST OUTPUT") == ["  20%", "  Traceback:", "    boom \N{REPLACEMENT CHARACTER}[31m"]


def test_a_run_that_was_stopped_has_not_failed(state: Path) -> None:
    directory = write_run_directory({0: toggled()}, status=1)
    (directory / "stages.log").write_text("7 9 joining the process group as rank 1 of 2\n")
    (directory / "statuses.log").write_text("7 20 -6\n")
    (finding,) = [finding for finding in read_report(directory).findings if finding.kind == "failed"]
    assert finding.text == "A rank ended without an exception: rank 1 was ended by SIGABRT."
    record_stop_request(directory)
    ended = load_exit(directory)
    assert ended is not None
    os.utime(directory / "stop-asked", (ended.ended_unix, ended.ended_unix))
    assert not any(finding.kind == "failed" for finding in read_report(directory).findings)
    sentence = "stopped by you after 1 min 00 s"
    assert report_text(directory, 120)[0].endswith(sentence)
    assert read_health(directory).sentence(60.0) == sentence


def test_a_step_that_a_stop_cut_off_is_not_called_long(state: Path) -> None:
    training = Training()
    made = training.run(40)
    training.step_ns *= 200
    made += training.run(1)
    directory = write_run_directory({0: made}, status=130)
    assert read_report(directory).run.longest_steps[0].step == 41
    record_stop_request(directory)
    began = load_info(directory).started_unix + read_report(directory).run.longest_steps[0].start_ns / 1e9
    os.utime(directory / "stop-asked", (began + 0.01, began + 0.01))
    assert 41 not in [step.step for step in read_report(directory).run.longest_steps]
    assert read_report(directory).run.longest_steps
    os.utime(directory / "stop-asked", (began - 0.001, began - 0.001))
    assert read_report(directory).run.longest_steps[0].step == 41, "it began after the request"


def test_devices_are_reported_with_maximum_and_median(state: Path) -> None:
    own = [device_event(float(t), index, mem_run_bytes=(60 + t) << 30) for t in range(40) for index in (0, 1)]
    own += [device_event(40.0, 0, util_pct=None, mem_run_bytes=None, throttle=["power limit"])]
    ordinals = [{"process": 0, "device": "cuda:0"}]
    own += [device_event(41.0 + t, 1, throttle=["power limit"] if t % 2 else [], ordinals=ordinals)
            for t in range(20)]  # fmt: skip
    directory = write_run_directory({0: Training(devices=("cuda:0", "cuda:1"), virtual=False).run(40), -1: own})
    story = read_report(directory)
    first, second = story.run.device_usage
    assert (first.util_median, len(first.util), first.samples) == (97, 40, 41)
    assert first.mem_run_max == 99 << 30
    assert (second.throttled, second.throttle_samples, second.called) == ({"power limit": 10}, 20, "cuda:0")
    assert "throttled" in {finding.kind for finding in story.findings}
    assert "GPU 1 (cuda:0) NVIDIA H200" in "\n".join(report_text(directory, 80))
    assert {plot.name for plot in build_plots(story.run)} >= {"use", "memory"}


def test_maxima_and_means_of_deleted_samples_remain(state: Path) -> None:
    hot = [device_event(float(t), 0, temperature_c=80 if t == 100 else 60, util_pct=50) for t in range(1, 2401)]
    payloads: dict[int, list[Row]] = {-1: [*hot], 0: Training(devices=("cuda:0",), virtual=False).run(40)}
    whole, directory = (
        read_report(write_run_directory(payloads)),
        write_run_directory(payloads, limit_bytes=1 << 18),
    )
    story = read_report(directory)
    assert story.run.store.pruned > 0
    (device,) = story.run.device_usage
    assert device.samples < 2400
    assert device.temperature_max == 80
    points, every = (one.run.device_usage[0].points() for one in (story, whole))
    assert {util for _, util, _ in points} == {50.0}
    assert points[0][0] < 120 * SECOND
    assert every[-1][0] - points[-1][0] < 60 * SECOND
    assert "median of the samples that are left" in " ".join(report_text(directory, 200))


def test_a_batch_that_leaves_devices_idle_is_found(state: Path) -> None:
    training = Training(devices=tuple(f"cpu:{n}" for n in range(8)), batch=9)
    story = read_report(write_run_directory({0: training.run(60)}))
    found = {finding.kind: finding for finding in story.findings}
    assert "3 of 8 devices receive no rows of Model" in found["idle"].text
    assert found["idle"].ground == "60 calls of 60, 8 devices"
    training = Training(devices=tuple(f"cpu:{n}" for n in range(4)), batch=2)
    assert "small batch" in {
        finding.kind for finding in read_report(write_run_directory({0: training.run(60)})).findings
    }


@pytest.mark.parametrize(
    ("since_s", "lasted_s", "stalled_s"), [(0.0, None, 50.0), (5.0, None, 45.0), (5.0, 30.0, 30.0)]
)
def test_a_stall_after_the_last_step_has_its_own_time(
    state: Path, since_s: float, lasted_s: float | None, stalled_s: float
) -> None:
    """The run ends 50 s after its last step, in a stall (lasted_s None) or after it."""
    training = Training()
    rows = [*training.begin(), *training.run(40)]
    end_s = training.now / SECOND
    data = {"since_s": end_s + since_s, "text": "train.py:6", "ranks": []}
    events = [Event("stall", {"t_s": end_s + since_s + 10, **data})]
    if lasted_s is not None:
        events.append(Event("stall", {"t_s": end_s + since_s + lasted_s, "lasted_s": lasted_s, **data}))
    directory = write_run_directory({0: rows, -1: events}, status=1, seconds=end_s + 50)
    story = read_report(directory)
    elapsed = report_json_of(story)["elapsed"]
    assert elapsed["stalled_s"] == pytest.approx(stalled_s)
    assert elapsed["ending_s"] == pytest.approx(50 - stalled_s, abs=1e-6)
    assert sum(time_s for name, time_s in elapsed.items() if name != "gaps") == pytest.approx(end_s + 50)
    (line, *_) = [line for line in summary_lines(directory, story.health.exit_info) if line.startswith("  elapsed")]
    assert f"stalled {stalled_s:.1f} s" in line
    assert [found.kind for found in story.findings if found.kind in ("quiet", "stall")] == ["quiet"]


# ------------------------------------------------------------------------------------------------ how it looks


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(both: Path, width: int) -> None:
    lines = report_text(both, width)
    assert max(map(len, lines)) <= max(width, 40)
    assert all(line == line.rstrip() or line.startswith("  ") for line in lines)


def test_the_page_has_its_plots_and_works_offline(state: Path) -> None:
    training = Training(devices=("cuda:0", "cuda:1"), virtual=False)
    rows = [*training.begin(), *training.run(800), *training.switch("single"), *training.run(400)]
    own = [device_event(t / 10, index) for t in range(60) for index in (0, 1)]
    found = HtmlPage(render_page(build_document(read_report(write_run_directory({0: rows, -1: own})))))
    assert found.tags["svg"] == 5
    check_page_is_offline(found)


def test_all_plots_over_time_have_one_axis_with_the_marks_of_the_run(state: Path) -> None:
    training = Training(step_ns=SECOND // 10)
    rows = [*training.begin(), *training.run(200)]
    single = training.now
    rows += [*training.switch("single"), *training.run(200)]
    rows += (row for _ in range(200) for row in training.step(evaluates=True))
    dp = training.now
    rows += [*training.switch("dp"), *training.run(200)]
    own = [host_event(float(t)) for t in range(1, 80)]
    made = build_plots(read_report(write_run_directory({0: rows, -1: own}, seconds=200.0)).run)
    timed = made
    assert [plot.name for plot in timed] == ["step-time", "speed", "phases", "use", "memory"]
    (time_of,) = {id(plot.time_span): plot.time_span for plot in timed}.values()
    assert time_of is not None
    assert (time_of.start_s, time_of.end_s) == (2.0, pytest.approx(training.now / SECOND, abs=0.01))
    single_mark, dp_mark, evaluation = time_of.marks
    assert single_mark == (pytest.approx(single / SECOND, abs=0.01), None, "single")
    assert dp_mark == (pytest.approx(dp / SECOND, abs=0.01), None, "dp")
    begin, end, word = evaluation
    assert word == "evaluation"
    assert end is not None
    assert single / SECOND < begin < end <= dp / SECOND + 1
    for plot in timed:
        drawn_plot = svg_of(plot)
        words = [one.text for one in drawn_plot.iter("text") if one.attrib.get("class") == "strong"]
        assert words == ["single", "dp", "evaluation"]
        ticks = [one.text for one in drawn_plot.iter("text") if re.fullmatch(r"\d\d:\d\d", one.text or "")]
        assert ticks == ["00:20", "00:40", "01:00"], plot.name


def test_the_page_shows_when_which_rank_was_the_slowest(state: Path) -> None:
    made, end = ddp_rank_rows(3, slow=1, phase="data", steps=2000, then=(1000, 2))
    (plot,) = [plot for plot in build_plots(read_report(write_run_directory(made)).run) if plot.name == "waits"]
    assert [series.name for series in plot.series] == ["rank 0", "rank 1", "rank 2"]
    half = end / SECOND / 2
    for rank, one in enumerate(plot.series):
        for begin, until, share in one.points:
            slow = rank == 1 if until < half else rank == 2 if begin > half + 1 else None
            if slow is not None:
                assert share == (pytest.approx(0.3, abs=0.1) if slow else 0.0), (rank, begin, until)
    cells = [one for one in svg_of(plot).iter("rect") if one.find("title") is not None]
    assert {cell.attrib.get("class") for cell in cells} == {None, "none"}
    assert all(0 <= float(cell.attrib["x"]) <= WIDTH for cell in cells)
    even, _ = ddp_rank_rows(3, steps=300, noise=0.0)
    assert not [plot for plot in build_plots(read_report(write_run_directory(even)).run) if plot.name == "waits"], (
        "nobody waited"
    )


def test_the_slowest_of_many_ranks_is_shown(state: Path) -> None:
    made, _ = ddp_rank_rows(70, slow=68, phase="data", steps=60)
    story = read_report(write_run_directory(made))
    (plot,) = [plot for plot in build_plots(story.run) if plot.name == "waits"]
    assert [series.name for series in plot.series] == [f"rank {rank}" for rank in (*range(63), 68)]
    assert plot.note.endswith("; 6 ranks omitted")
    tables = [part for section in build_document(story).sections for part in section.parts if isinstance(part, Table)]
    shown = [[row[0] for row in table.rows[:MAX_ROWS]] for table in tables if len(table.rows) == 70]
    assert shown == [[f"rank {rank} of 70" for rank in (*range(39), 68)]]
    labels = [row[0] for table in tables for row in table.rows if table.headers[1] == "device"]
    assert sorted(labels) == ["8 equal ranks"] * 2 + ["9 equal ranks"] * 6, "those of one device share a row"


def test_the_page_of_a_day_is_small(state: Path) -> None:
    slow: dict[str, Any] = {"slow": 1, "phase": "data", "extra_ms": 170_000, "then": (250, 0)}
    made, end = ddp_rank_rows(2, steps=500, noise=0.4, **slow)
    assert end / SECOND > 80_000
    places = [Definition(3000 + line, {"place": f"train.py:{line}", "why": None}) for line in (0, 1)]
    losses = [LossRow(3000 + at % 2, at, at * 170 * SECOND, 1 / at) for at in range(1, 500)]
    own = [device_event(float(t), index) for t in range(100, 86_400, 200) for index in range(8)]
    text = render_page(
        build_document(
            read_report(write_run_directory({**made, 0: [*made[0], *places, *losses], -1: own}, seconds=end / SECOND))
        )
    )
    assert text.count("<svg") == 7
    assert len(text.encode()) < 1_500_000


def test_text_and_page_have_the_same_sections_and_cells(both: Path) -> None:
    made = build_document(read_report(both))
    names = [section.title + section.subtitle for section in made.sections]
    drawn, lines = render_page(made), text_lines(made, 200)
    assert re.findall(r'<h2 id="part-\d+">(.*?)</h2>', drawn) == names
    assert [line for line in lines[1:] if line and line[0] != " "] == [
        section.title.upper() + section.subtitle for section in made.sections
    ]
    tables = [part for section in made.sections for part in section.parts if isinstance(part, Table)]
    assert len(tables) == 7
    for cell in (cell for table in tables for row in table.rows for cell in row if cell):
        assert html.escape(cell.strip()) in drawn
        assert cell in "\n".join(lines)


# ------------------------------------------------------------------------------------------------ over time


def test_the_number_of_stretches_is_bounded_and_no_step_is_lost(state: Path) -> None:
    payloads, at = [*Training(mode="single").begin()], 0
    for number in range(1, 3001):
        at += 900_000_000 if number == 1500 else 300_000_000
        payloads.append(step_row("single" if number % 7 else "dp", number, at, 250_000_000, 4, (1000, 2000, 3000, -1)))
    bins = read_report(write_run_directory({0: payloads}, seconds=1000.0)).run.binned_steps.bins
    backward = [phase.name for phase in PHASES].index("backward")
    assert len({one.end_ns for one in bins}) <= BINS
    assert sum(one.count for one in bins) == 3000
    assert sum(one.samples or 0 for one in bins) == 12_000
    assert sum(sum(one.phases) for one in bins) == 3000 * 250_000_000
    assert sum(one.phases[backward] for one in bins) == 3000 * 3000


def test_time_without_steps_is_a_gap_and_a_long_step_is_none(state: Path) -> None:
    training = Training(mode="single", step_ns=100_000_000)
    payloads = [*training.begin(), *training.run(50)]
    training.now += 10 * SECOND
    payloads += training.run(50)
    training.step_ns = 6 * SECOND
    payloads += training.run(1)
    directory = write_run_directory({0: payloads}, seconds=training.now / SECOND)
    story = read_report(directory)
    gaps = [(b.start_ns - a.end_ns) / SECOND for a, b in pairwise(story.run.binned_steps.bins)]
    assert [gap for gap in gaps if gap] == [pytest.approx(9, abs=1)]
    assert (story.run.binned_steps.bins[-1].end_ns - story.run.binned_steps.bins[-1].start_ns) / SECOND in (5, 6, 7)
    (step_time,) = (plot for plot in build_plots(story.run) if plot.name == "step-time")
    places = [(begin, end) for begin, end, _ in step_time.series[0].points]
    assert sum(begin > end for (_, end), (begin, _) in pairwise(places)) == 1
    process = snapshot_of_directory(directory, over=True).processes[0]
    shown = build_chart_columns(process, fit_axis(2, training.now // SECOND, 120, is_over=True), 120)
    assert [column.second for column in shown.columns] == list(range(2, training.now // SECOND + 1))
    empty = [column.second for column in shown.columns if not column.count]
    assert len(empty) in (9, 10), "the chart of the screen has the same gap"
    assert {column.mode for column in shown.columns} == {"single"}
    bars = next(line for line in report_text(directory, 100) if "█" in line)
    assert re.search(r"▁ {8,10}▁", bars)
    assert "no bar where no step ran" in " ".join(report_text(directory, 100))


def ranks_with_an_evaluation(via: str | None, steps: int) -> list[str]:
    """Return the report on two ranks with 60 training steps each; rank 0 then evaluates larger batches."""
    ranks = [
        Training(process=rank, rank=rank, mode="single", via=DDP, devices=("cpu",), virtual=False) for rank in range(2)
    ]
    rows = {rank.process: [*rank.begin(), *rank.run(60)] for rank in ranks}
    ranks[0].via = via
    rows[0] += [row for _ in range(steps) for row in ranks[0].step(64, evaluates=True)]
    return report_text(write_run_directory(rows), 120)


@pytest.mark.parametrize(("via", "mode"), [(None, "single"), (DDP, "ddp")])
def test_calls_of_ranks_have_a_row_for_each_kind_with_the_mode_of_its_calls(
    state: Path, via: str | None, mode: str
) -> None:
    text = ranks_with_an_evaluation(via, 100)
    _, training, evaluation = (line.split() for line in lines_of_section(text, "CALLS"))
    assert training[:4] == ["Model", "ddp", "cpu", "120"]
    assert training[4:6] != ["–", "–"], "the median"
    assert training[-5:] == ["[30,", "5]", "->", "[30,", "2]"]
    assert evaluation[:5] == ["Model", f"{mode},", "evaluation", "cpu", "100"]
    assert evaluation[-5:] == ["[64,", "5]", "->", "[64,", "2]"]
    assert [line.split("  ")[1] for line in lines_of_section(text, "STEPS")[1:3]] == ["ddp", f"{mode}, evaluation"]
    rank_0 = lines_of_section(text, "RANKS")[1]
    assert rank_0.endswith("[30, 5] -> [30, 2]"), "of training, although most calls evaluate"
    assert rank_0.split()[5:7] == ["60", "60"], "its training steps and their calls"
    assert "; mean of 2 ranks: start-up" in lines_of_section(text, "TIME")[0]
    assert any("60 steps + 100 evaluation, 220 calls total" in line for line in text)
    assert not any("in single" in line for line in text)


def test_a_root_that_runs_as_single_inside_dp_steps_has_the_times_of_all_its_calls() -> None:
    model, loss = Training(), Training(root="Loss", via=None, mode="single")
    loss.defined = model.defined
    rows = model.begin()
    for number in range(1, 301):
        *definitions, step = model.step()
        loss.now = model.now
        *more, call_alone = loss.step()
        assert isinstance(step, Step)
        assert isinstance(call_alone, Step)
        (first,), (second,) = step.calls, call_alone.calls
        calls = [first._replace(call=2 * number - 1), second._replace(call=2 * number)]
        rows += [*definitions, *more, step._replace(calls=calls)]
    run = RunAnalysis(Recording().add(rows).store())
    single, *replicas = sorted(run.replicas, key=lambda replica: replica.root)
    assert (single.root, single.mode, single.calls) == ("Loss", "single", 300)
    assert {replica.time.count for replica in replicas} == {single.time.count}
    assert single.time.count >= 299, "all but the first step"


def test_deleted_rows_change_no_figure(state: Path) -> None:
    training = Training(mode="single", step_ns=50_000_000)
    payloads = [*training.begin(), *training.run(1500), *training.switch("dp"), *training.run(4500)]
    whole, directory = (
        report_json_of(read_report(write_run_directory({0: payloads}))),
        write_run_directory({0: payloads}, limit_bytes=1 << 20),
    )
    said = report_json_of(read_report(directory))
    assert said["pruned"] > 0
    same = ("modes", "evaluations", "replicas", "sizes", "stages", "compared", "elapsed", "steps", "calls", "findings")
    assert {name: said[name] for name in same} == {name: whole[name] for name in same}
    assert sum(one["steps"] for one in said["time"]["stretches"]) == 6000
    text = " ".join(" ".join(report_text(directory, 100)).split())
    assert "older records were deleted to bound the history: statistics cover all steps" in text
    summary = [line.split() for line in summary_lines(directory, load_exit(directory))]
    assert ["single", "1,500"] in [words[:2] for words in summary]
    assert "6,000 steps, 6,000 calls" in text
    assert "1,500 in single" in text


# ------------------------------------------------------------------------------------------------ where the time went


def epochs(gap_s: float, workers: int | None = None, persistent: bool = False) -> tuple[list[Row], float]:
    """Return six epochs of 20 steps of 0.1 s, with gaps between them (mostly starts of loaders), and the end (s)."""
    training = Training(mode="single", step_ns=SECOND // 10)
    payloads = training.begin()
    for epoch in range(6):
        if epoch and workers is not None:
            start = {"process": 0, "rank": None, "t_s": training.now / SECOND + 0.1 * gap_s, "iter_s": 0.8 * gap_s}
            kept = {"workers": workers, "persistent": persistent, "start": epoch + 1}
            payloads.append(Event("loader", {**start, **kept}))
        training.now += int(gap_s * SECOND) if epoch else 0
        payloads += training.run(20)
    return payloads, training.now / SECOND


def test_the_time_of_a_run_is_accounted_for(state: Path) -> None:
    training = Training(mode="single", step_ns=SECOND // 10)
    payloads = [*training.begin(), *training.run(40)]
    training.now += 4 * SECOND
    payloads += [*training.run(40), pause_event(training.now / SECOND, 80)]
    training.now += 30 * SECOND
    payloads += [pause_event(training.now / SECOND, 80, 30.0), *training.run(40)]
    seconds = training.now / SECOND + 1.5
    directory = write_run_directory({0: payloads}, seconds=seconds)
    elapsed = report_json_of(read_report(directory))["elapsed"]
    parts = {name: value for name, value in elapsed.items() if name != "gaps" and value}
    assert parts == {
        "startup_s": 2.0, "training_s": pytest.approx(12, rel=0.05), "between_s": pytest.approx(4, abs=0.1),
        "paused_s": pytest.approx(30, abs=0.1), "ending_s": pytest.approx(1.5),
    }  # fmt: skip
    assert sum(parts.values()) == pytest.approx(seconds)
    (gap,) = elapsed["gaps"]
    assert (gap["after_step"], gap["seconds"]) == (40, 4.0)
    text = " ".join(" ".join(lines_of_section(report_text(directory, 100), "TIME")).split())
    assert re.search(
        r"^elapsed 49\.\d s: start-up 2\.00 s, training 12\.\d s, between steps 4\.00 s, paused 30\.0 s,", text
    )
    assert "the longest gaps between steps: 4.00 s after step 40 (00:00:06)" in text
    assert not any(line == "TIME" for line in report_text(write_run_directory({}), 100))


def test_time_between_the_steps_is_found_if_it_is_much(state: Path) -> None:
    payloads, end = epochs(1.0)
    (found,) = (
        one for one in read_report(write_run_directory({0: payloads}, seconds=end)).findings if one.kind == "between"
    )
    share = f"{5.0 / end:.0%} of the elapsed time"
    assert found.text == f"The time between steps takes {share}: 5 gaps, the longest 1.00 s after step 20."
    assert (found.saves_s, found.elapsed_s) == (pytest.approx(5.0, abs=0.01), end)
    assert "a checkpoint" in found.advice
    assert found.weight == pytest.approx(0.29, abs=0.02)
    payloads, end = epochs(0.15)
    assert "between" not in {one.kind for one in read_report(write_run_directory({0: payloads}, seconds=end)).findings}


@pytest.mark.parametrize(("workers", "persistent", "named"), [(4, False, True), (4, True, False), (0, False, False)])
def test_workers_that_start_in_every_epoch_are_named(state: Path, workers: int, persistent: bool, named: bool) -> None:
    payloads, end = epochs(1.0, workers, persistent)
    (found,) = (
        one for one in read_report(write_run_directory({0: payloads}, seconds=end)).findings if one.kind == "between"
    )
    assert ("Starting the loader's workers takes 80% of it." in found.text) == named
    assert found.advice.startswith("DataLoader(persistent_workers=True)") == named


# ------------------------------------------------------------------------------------------------ dp vs. single


def test_a_verdict_stands_in_the_report_with_its_uncertainty(both: Path) -> None:
    found = read_report(both).run.mode_comparison
    assert found is not None
    assert found.speedup is not None
    assert found.speedup.low < found.speedup.value < found.speedup.high
    assert found.sides.keys() == {"dp", "single"}
    lines = lines_of_section(report_text(both, 80), "DP VS. SINGLE")
    assert lines[0].startswith("  DataParallel over 2 virtual replicas")
    assert f"speed-up {found.speedup.value:.2f}" in " ".join(lines)
    assert report_json_of(read_report(both))["compared"]["outcome"] in ("faster", "slower", "even")


# ------------------------------------------------------------------------------------------------ what was deleted


def long_training(slow: int, steps: int = 6000, evaluations: bool = False) -> list[Row]:
    """Return steps of 50 ms, one with a data wait of 10 s; the first thousand are in single, the others in dp."""
    at, out = 0, [*Training().begin()]
    for number in range(1, steps + 1):
        wait = 10 * SECOND if number == slow else 5_000_000
        wall = 45_000_000 + wait
        evaluates = evaluations and number % 10 == 0
        phases = (wait, 20_000_000, *((-1, -1) if evaluates else (20_000_000, 5_000_000)))
        out.append(step_row("single" if number <= 1000 else "dp", number, at, wall, 4, phases))
        at += wall
    return out


def test_stretches_separate_modes_and_evaluations(state: Path) -> None:
    story = read_report(write_run_directory({0: long_training(slow=0, evaluations=True)}, limit_bytes=1 << 18))
    assert {(one.mode, one.kind) for one in story.run.binned_steps.bins} == {
        (mode, evaluation) for mode in ("single", "dp") for evaluation in (TRAINING, EVALUATION)
    }
    drawn = {plot.name: plot for plot in build_plots(story.run)}
    names = [one.name for one in drawn["step-time"].series]
    assert [name for name in names if "mean" in name] == [
        "dp: mean", "single: mean", "dp, evaluation: mean", "single, evaluation: mean"
    ]  # fmt: skip
    bars = drawn["phases"]
    for one in bars.series:
        begins = [begin for begin, _, _ in one.points]
        assert len(begins) == len(set(begins)), "no two bars at one place: they would stand on each other"
        assert all(end <= begin for (_, end, _), begin in zip(one.points, begins[1:], strict=False))
    heights = [sum(y for _, _, y in parts) for parts in zip(*(one.points for one in bars.series), strict=True)]
    assert max(heights) < 55, "every step took 50 ms"


def svg_of(plot: Plot) -> ElementTree.Element:
    text = render_plot(plot)
    return ElementTree.fromstring(re.sub(r"(class|style)=([a-z]+)([ >])", r'\1="\2"\3', text[text.index("<svg") :]))


def lines(*values: float | None) -> Plot:
    points = [(at, at + 1, y) for at, y in enumerate(values) if y is not None]
    return Plot("p", "P", "", [PlotSeries("s", "#000000", points, "steps")], "ms", time_span=TimeSpan(0, len(values)))


def test_one_long_step_does_not_flatten_the_others_and_is_told() -> None:
    text = "".join(svg_of(lines(*[10.0, 11.0] * 20, 5000.0)).itertext())
    assert "1 higher, up to 5000: cut" in text
    assert "20.0" in text, "the axis"
    assert "cut" not in "".join(svg_of(lines(*[10.0, 11.0] * 20, 25.0)).itertext())
    few = "".join(svg_of(lines(10.0, 11.0, 230.0, 45_000.0)).itertext())  # means and longest steps of two modes
    assert "1 higher, up to 45,000: cut" in few.replace("45000", "45,000")
    assert "400" in few, "the axis"


def test_the_page_of_ranks_is_small_and_its_links_are_its_sections(state: Path) -> None:
    made, _ = ddp_rank_rows(3, slow=1, phase="data", steps=100, noise=0.0)
    story = read_report(write_run_directory(made))
    text = render_page(build_document(story))
    assert len(text.encode()) < 200_000
    names = [re.sub(r"<.*?>", "", name) for name in re.findall(r"<h2 id=.*?>(.*?)</h2>", text)]
    assert re.findall(r'<a href="#part-\d+">(.*?)</a>', text) == names
    assert "Communication" in names
