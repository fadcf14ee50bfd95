"""Pauses in reports and summaries, and figures without the time of pauses."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dpmon.cli.summary import summary_lines
from dpmon.model.device_usage import SampledDevices
from dpmon.model.pauses import (
    Pause,
    PauseTotals,
    Span,
    all_paused_intervals,
    any_paused_intervals,
    build_pauses,
    pause_totals,
)
from dpmon.model.run_events import PauseChange
from dpmon.model.slow_steps import overlap_ns
from dpmon.model.throughput import throughput_of
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.report.html_page import render_page
from dpmon.report.plots import build_plots
from dpmon.report.sections import build_document
from dpmon.run.run_directory import load_exit
from support.format_readers import lines_of_section, report_json_of, report_text
from support.history_builders import open_store_with, read_report, snapshot_of_directory, write_run_directory
from support.record_builders import SECOND, Training, device_event, pause_event, records_of_rows


def paused_run(took_s: float = 600.0, at_the_end_s: float = 0.0) -> Path:
    """Make a run: 100 steps of 0.1 s, a pause, 100 steps, and a pause at the end."""
    training = Training(mode="single", step_ns=SECOND // 10)
    payloads = [*training.begin(), *training.run(100)]
    samples = [(float(t), 80.0) for t in range(1, 31)]
    for step, seconds in ((100, took_s), (200, at_the_end_s)):
        began = training.now / SECOND
        if seconds:
            payloads.append(pause_event(began, step))
            training.now += int(seconds * SECOND)
            payloads.append(pause_event(training.now / SECOND, step, seconds))
            samples += [(began + 0.5 + t, 0.0) for t in range(int(seconds))]
        payloads += training.run(100) if step == 100 else []
    gpu = [device_event(t, 0, util_pct=use) for t, use in samples]
    return write_run_directory({0: payloads, -1: gpu}, seconds=training.now / SECOND + 5)


def test_pauses_are_reported_and_are_in_no_figure_of_steps(state: Path) -> None:
    directory = paused_run(at_the_end_s=120.0)
    story = read_report(directory)
    assert [(pause.step, round((pause.took_ns or 0) / SECOND)) for pause in story.run.pause_list] == [
        (100, 600),
        (200, 120),
    ]
    said = report_json_of(story)
    assert [(one["step"], one["seconds"], one["on"]) for one in said["pauses"]] == [
        (100, pytest.approx(600.0), False), (200, pytest.approx(120.0), False)
    ]  # fmt: skip
    assert said["pauses"][0]["t_s"] == pytest.approx(12.1, abs=0.5)
    (mode,) = said["modes"]
    assert mode["p95_ms"] < 150
    assert said["findings"] == [], "neither a stall, nor silence at the end, nor a GPU without work"
    assert said["devices"][0]["util_median_pct"] == 80.0
    lines = report_text(directory, 100)
    assert "  paused 2 times, for 12 min 00 s total: not counted in any step, phase or metric" in lines
    assert lines_of_section(lines, "PAUSES")[1].endswith("after step 100  for 10 min 00 s")
    assert len(lines_of_section(lines, "PAUSES")) == 1 + 2
    html_page = render_page(build_document(story))
    assert "Pauses</h2>" in html_page
    assert "for 10 min 00 s" in html_page
    for plot in build_plots(story.run):
        if plot.name in ("step-time", "speed", "phases", "use", "memory"):
            assert plot.time_span is not None
            begin, end, word = plot.time_span.marks[0]
            assert word == "paused"
            assert end is not None
            assert end - begin == pytest.approx(600.0, abs=0.01), plot.name


def test_silence_is_reported_in_addition_to_a_pause(state: Path) -> None:
    """After 20 seconds of steps and a pause of ten minutes, the run hangs for a minute."""
    training = Training(mode="single", step_ns=SECOND // 10)
    payloads = [*training.begin(), *training.run(100), pause_event(training.now / SECOND, 100)]
    training.now += 600 * SECOND
    payloads += [pause_event(training.now / SECOND, 100, 600.0), *training.run(100)]
    (found,) = read_report(write_run_directory({0: payloads}, seconds=training.now / SECOND + 60)).findings
    assert found.kind == "quiet"
    assert found.weight == pytest.approx(60 / 80, abs=0.05)


def test_a_pause_without_an_end_and_one_that_was_refused(state: Path) -> None:
    training = Training(mode="single", step_ns=SECOND // 10)
    payloads = [*training.begin(), *training.run(40), pause_event(training.now / SECOND, 40)]
    training.now += 60 * SECOND
    lost = [*payloads, *training.run(40)]
    (pause,) = read_report(write_run_directory({0: lost})).run.pause_list
    assert (pause.took_ns, pause.on) == (None, False)
    assert (pause.end_ns or 0) - (pause.start_ns or 0) == pytest.approx(60 * SECOND, rel=0.01)
    killed = write_run_directory({0: payloads}, seconds=training.now / SECOND)
    _, line = lines_of_section(report_text(killed, 80), "PAUSES")
    assert line.endswith("after step 40  the run ended during it")
    assert read_report(killed).findings == [], "a run that is killed in a pause was not silent"
    refused = pause_event(1.0, 3, 0.0, refused="ranks wait for each other")
    lines = report_text(write_run_directory({0: [*training.begin(), *training.run(5), refused]}), 80)
    assert lines_of_section(lines, "PAUSES")[1:] == ["  00:00:01  after step 3  refused: ranks wait for each other"]
    assert "paused" not in " ".join(lines[:6]).replace("PAUSES", "")


def changed(process: int, at_s: float, took_s: float | None = None) -> PauseChange:
    """Return the beginning of a pause, or with `took_s` its end."""
    took = None if took_s is None else int(took_s * SECOND)
    return PauseChange(process, int(at_s * SECOND), 1, took_s is None, took, None, None)


def paused_ones(*pauses: tuple[int, float, float | None], steps: Sequence[tuple[int, float]] = ()) -> list[Pause]:
    """Return pauses (process, begin, end; in s; end None: not recorded). `steps`: process and begin of each step."""
    begun = [(process, int(at * SECOND)) for process, at in steps]
    changes = []
    for process, begin, end in pauses:
        changes += [changed(process, begin), *([changed(process, end, end - begin)] if end is not None else [])]

    def next_step_ns(process: int, after_ns: int) -> int | None:
        return min((at for who, at in begun if who == process and at >= after_ns), default=None)

    return build_pauses(changes, next_step_ns, max((at for _, at in begun), default=-1))


def there(*seconds: tuple[float, float]) -> dict[int, Span]:
    return {process: (int(a * SECOND), int(b * SECOND)) for process, (a, b) in enumerate(seconds)}


def in_s(spans: list[Span]) -> list[tuple[float, float]]:
    return [(begin / SECOND, end / SECOND) for begin, end in spans]


def test_only_pauses_of_all_processes_together_are_subtracted_from_the_time_of_the_run() -> None:
    pauses = paused_ones((0, 10, 30), (1, 20, 50), (0, 60, 61))
    both = there((0, 100), (0, 100))
    assert in_s(all_paused_intervals(pauses, both, None)) == [(20, 30)]
    assert in_s(any_paused_intervals(pauses, None)) == [(10, 50), (60, 61)]
    assert in_s(all_paused_intervals(pauses, there((0, 5)), None)) == [(10, 50), (60, 61)], "nobody is there any more"
    assert overlap_ns(all_paused_intervals(pauses, both, None), 25 * SECOND, 100 * SECOND) == 5 * SECOND


def test_a_process_that_has_not_started_or_has_ended_does_not_shorten_a_pause() -> None:
    """One training after another, the second paused; and a training that begins while another is paused."""
    pauses = paused_ones((1, 200, 800))
    assert in_s(all_paused_intervals(pauses, there((0, 100), (110, 900)), None)) == [(200, 800)]
    assert in_s(all_paused_intervals(pauses, there((300, 400), (110, 900)), None)) == [(200, 300), (400, 800)]
    assert in_s(all_paused_intervals(pauses, there((0, 900), (110, 900)), None)) == []


def test_a_pause_whose_end_was_lost_is_over_when_the_next_begins() -> None:
    pauses = paused_ones((0, 10, None), (0, 50, 60), steps=[(0, at) for at in range(60, 900, 10)])
    first, second = pauses
    assert (first.took_ns, first.end_ns, first.on) == (None, 50 * SECOND, False)
    assert (second.took_ns, second.on) == (10 * SECOND, False)
    assert in_s(all_paused_intervals(pauses, there((0, 900)), 1000 * SECOND)) == [(10, 60)]
    assert pause_totals(pauses, 1000 * SECOND) == PauseTotals(2, 10 * SECOND, 1)
    two = paused_ones((0, 10, None), (0, 50, 60))
    assert in_s(all_paused_intervals(two, there((0, 900), (0, 900)), 1000 * SECOND)) == [], "the other never paused"


def test_a_process_that_was_killed_in_a_pause_does_not_pause_those_that_come_after_it() -> None:
    pauses = paused_ones((0, 10, None), steps=[(1, 300)])
    assert pauses[0].on is False
    assert in_s(all_paused_intervals(pauses, there((0, 10), (300, 900)), 1000 * SECOND)) == []
    assert pause_totals(pauses, 1000 * SECOND) == PauseTotals(1, 0, 1)


@pytest.mark.parametrize(
    ("pauses", "total"),
    [
        ([(0, 10, 30), (1, 10.1, 30.2)], PauseTotals(1, 20_200_000_000)),
        ([(0, 10, 30), (1, 40, 60)], PauseTotals(2, 40 * SECOND)),
        ([(0, 10, 30), (0, 30, 40)], PauseTotals(2, 30 * SECOND)),
        ([(0, 10, 30), (0, 90, None)], PauseTotals(2, 30 * SECOND, on=True)),
        ([(0, 90, None), (1, 90.5, None)], PauseTotals(1, 10 * SECOND, on=True)),
    ],
)
def test_simultaneous_pauses_of_several_processes_are_one_pause(
    pauses: list[tuple[int, float, float | None]], total: PauseTotals
) -> None:
    assert pause_totals(paused_ones(*pauses), 100 * SECOND) == total


def two_trainings() -> tuple[Path, str]:
    """Record two trainings of a launcher, the second paused from 200 to 800 s, and a GPU that is idle only then."""
    payloads: dict[int, list[Row]] = {}
    for process, (begin, end) in enumerate(((2, 900), (110, 900))):
        training = Training(process=process, mode="single", step_ns=SECOND, start_ns=begin * SECOND)
        payloads[process] = training.begin()
        while training.now < end * SECOND:
            payloads[process] += training.run(1)
            if process == 1 and 200 * SECOND <= training.now < 800 * SECOND:
                payloads[process].append(pause_event(training.now / SECOND, training.steps, process=1))
                took = 800 - training.now / SECOND
                training.now = 800 * SECOND
                payloads[process].append(pause_event(800.0, training.steps, took, process=1))
    gpu = [device_event(float(t), 0, util_pct=0.0 if 201 < t < 800 else 80.0) for t in range(2, 900, 3)]
    directory = write_run_directory({**payloads, -1: gpu}, seconds=905.0)
    return directory, " ".join(" ".join(report_text(directory, 120)).split())


def test_the_report_says_that_figures_include_a_pause_during_another_training(state: Path) -> None:
    directory, text = two_trainings()
    story = read_report(directory)
    assert story.run.paused == []
    assert "step, phase or metric" not in text
    assert re.search(r"for \d+ min \d\d s of it another process was not paused, and device metrics", text)
    assert report_json_of(story)["paused"]["alone_s"] == pytest.approx(600, rel=0.01)


def test_the_summary_of_a_run_that_was_killed_in_a_pause_says_so(state: Path) -> None:
    training = Training(mode="single", step_ns=SECOND // 10)
    payloads = [*training.begin(), *training.run(40), pause_event(10.0, 40)]
    directory = write_run_directory({0: payloads}, seconds=70.0)
    said = summary_lines(directory, load_exit(directory))
    assert "paused once, for 60.0 s, and was paused when it ended: not counted in any step, phase or metric" in said
    goes_on = write_run_directory({0: payloads}, status=None, command_pid=None, started_unix=time.time())
    assert "  paused once, and is paused now: not counted" in "\n".join(report_text(goes_on, 120))


def test_a_gpu_sampled_only_in_pauses_has_no_utilization() -> None:
    """Its work in a pause does not belong to the training."""
    samples = [device_event(t_s, 0, util_pct=0.0, mem_used_bytes=5) for t_s in (10.0, 20.0)]
    (found,) = SampledDevices(open_store_with(samples), [(5 * SECOND, 30 * SECOND)]).gpus
    assert (found.util_median, found.mem_used_max) == (None, 5)


def test_a_pause_and_a_wait_for_input_are_in_no_rate(state: Path) -> None:
    training = Training(mode="single", step_ns=100_000_000)
    payloads = [*training.begin(), *training.run(40)]
    at = training.now / SECOND
    payloads += [pause_event(at, 40), pause_event(at + 7, 40, 7.0)]
    training.now += 7 * SECOND
    payloads += training.run(20)
    began = training.now
    training.now += 5 * SECOND
    payloads += training.run(20)
    waits = Event("input", {"pid": 4242, "t_s": began / SECOND, "waited_s": 5.0})
    steps = [record for record in records_of_rows(payloads) if isinstance(record, Step)]
    true = 30 * len(steps) * 1e9 / sum(step.wall_ns for step in steps)
    directory = write_run_directory({0: payloads, -1: [waits]}, seconds=training.now / 1e9)
    assert report_json_of(read_report(directory))["modes"][0]["samples_per_s"] == pytest.approx(true, rel=0.001)
    live, over = (snapshot_of_directory(directory, span_s=0, over=over) for over in (False, True))
    process = live.processes[0]
    for rate in (over.processes[0].mean, process.ranged.rate):
        assert rate is not None
        assert (rate.samples_per_s, rate.samples_per_s_within) == pytest.approx((true, true), rel=0.001)
    recent = throughput_of(process, live, process.seen_ns).rate
    assert recent is not None
    assert recent.samples_per_s == pytest.approx(true, rel=0.1)
    assert [one["seconds"] for one in report_json_of(read_report(directory))["inputs"]] == [5.0]


@pytest.mark.parametrize(("uncounted", "is_known"), [({1, 55}, True), (set(range(1, 41)), False)])
def test_a_few_steps_without_a_sample_count_do_not_hide_the_rate(
    state: Path, uncounted: set[int], is_known: bool
) -> None:
    training = Training(mode="single", step_ns=SECOND // 10)
    payloads = [
        row._replace(samples=None) if isinstance(row, Step) and row.step in uncounted else row
        for row in (*training.begin(), *training.run(60))
    ]
    steps = [record for record in records_of_rows(payloads) if isinstance(record, Step)]
    true = 30 * len(steps) * 1e9 / sum(step.wall_ns for step in steps)
    directory = write_run_directory({0: payloads}, seconds=training.now / 1e9)
    (mode,) = report_json_of(read_report(directory))["modes"]
    assert mode["samples_per_s"] == (pytest.approx(true, rel=0.001) if is_known else None)
    assert mode["uncounted_steps"] == len(uncounted)
    said = " ".join(summary_lines(directory, load_exit(directory)))
    assert ("(2 steps not counted)" in said) == is_known
    live = snapshot_of_directory(directory, span_s=0)
    throughput = throughput_of(live.processes[0], live, live.processes[0].seen_ns)
    assert (throughput.rate and throughput.rate.samples_per_s) == (pytest.approx(true, rel=0.1) if is_known else None)
