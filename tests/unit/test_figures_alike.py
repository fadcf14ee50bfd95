"""All places show the same figures of steps as dpmon.store.step_stats.StatsWindow, and compare the same steps."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpmon.cli.commands import _make_listed_run
from dpmon.cli.status_stream import ProgressReporter, StatusStream
from dpmon.cli.summary import summary_lines
from dpmon.model.layouts import ReplicaStats
from dpmon.model.mode_comparison import Comparison, verdict_sentence
from dpmon.record.schema import EVALUATION, PHASES, REST, STEP
from dpmon.run.run_directory import load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.store.step_stats import StatsWindow, StepStats, rate_to_json
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import format_compact, format_duration, format_percent, format_samples_per_s
from dpmon.ui.live_run import LiveRun
from dpmon.ui.panels import panel_batch, panel_compare
from dpmon.ui.panels.panel_status import render_panel
from dpmon.ui.screen_data import View
from dpmon.ui.styled_rows import Row, plain_text
from support.format_readers import report_json_of, report_text
from support.history_builders import read_report, write_run_directory
from support.rank_builders import ddp_rank_rows
from support.record_builders import SECOND, Training
from support.run_harness import append_to
from support.screen_states import STYLE

MODES = (("dp", False), ("dp", True), ("single", False), ("single", True))
"""Modes, each with and without evaluation."""
LAST = (("dp", False),)
"""The mode at the end of the run; places that follow the run show only this mode."""

Key = tuple[str, bool, str, str]
"""Mode, evaluation, series (a step or a phase) and figure."""
Shown = dict[Key, Any]


class Place(NamedTuple):
    """Figures that a place shows, and its format of numbers."""

    read: Callable[[Path], Shown]
    modes: tuple[tuple[str, bool], ...]
    of_step: Mapping[str, Callable[[Any], Any]]
    of_phase: Mapping[str, Callable[[Any], Any]]


# ------------------------------------------------------------------------------------------------ the run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a run of six minutes: dp, single, dp, with an evaluation in each, twice as slow at the beginning."""
    training = Training(step_ns=2 * SECOND)
    payloads = training.begin()
    for then in ("single", "dp", ""):
        payloads += training.run(60)
        for _ in range(12):
            payloads += training.step(evaluates=True)
        training.now += 3 * SECOND
        training.step_ns = SECOND
        payloads += training.switch(then) if then else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield write_run_directory({0: payloads}, seconds=training.now / SECOND + 1)


def figures_of(found: StepStats) -> Iterator[tuple[str, str, Any]]:
    """Return all figures of a mode: series, figure and number (times in ns)."""
    yield from ((STEP, name, getattr(found, f"{name}_ns")) for name in ("median", "p95", "mean"))
    yield from ((STEP, "rate", found.rate), *((STEP, *rate) for rate in rate_to_json(found.rate).items()))
    for phase in found.phases:
        if phase.ran:
            yield from ((phase.name, name, getattr(phase, f"{name}_ns")) for name in ("median", "p95", "mean"))
            yield phase.name, "share", phase.share


def wanted(directory: Path, place: Place, *, rest: bool) -> Shown:
    """Return the figures that the place should show; `rest`: forward without the phases of its calls."""
    without = "forward" if rest else REST
    found: Shown = {}
    with open_store(directory) as store:
        window = StatsWindow(store)
        assert {*((mode, False) for mode in window.modes), *((mode, True) for mode, _ in window.other_modes)} == {
            *MODES
        }
        for mode, evaluation in place.modes:
            kind = EVALUATION if evaluation else None
            for series, figure, number in figures_of(window.step_stats(mode, kind)):
                shown = place.of_step if series == STEP else place.of_phase
                if figure in shown and series != without:
                    found[mode, evaluation, series, figure] = shown[figure](number)
    return found


# ------------------------------------------------------------------------------------------------ the places

_TIME = r"(\S+ [µm]?s)"
_MODE = r"(dp|single)(?: \(virtual\))?(, evaluation)?"


def in_summary(directory: Path) -> Shown:
    return in_tables(summary_lines(directory, load_exit(directory)))


def in_report(directory: Path) -> Shown:
    return in_tables(report_text(directory, 120))


def in_tables(lines: Iterable[str]) -> Shown:
    found: Shown = {}
    mode = ("", False)
    for line in lines:
        if row := re.fullmatch(rf"  {_MODE} +\d+ +{_TIME} +{_TIME} +(\d.*)", line):
            names = ("median", "p95", "rate")
            found |= {
                (row[1], bool(row[2]), STEP, name): text for name, text in zip(names, row.groups()[2:], strict=True)
            }
        elif head := re.fullmatch(rf"PHASES of a step, {_MODE}", line):
            mode = head[1], bool(head[2])
        elif row := re.fullmatch(rf" +(\w+) +(<?\d+%) +{_TIME} +{_TIME}", line):
            names = ("share", "median", "p95")
            found |= {(*mode, row[1], name): text for name, text in zip(names, row.groups()[1:], strict=True)}
    return found


def in_json(said: Iterable[tuple[str, bool, Mapping[str, Any], Mapping[str, Any]]]) -> Shown:
    """Return the figures that both forms of JSON have, from objects for steps and for phases."""
    found: Shown = {}
    for mode, evaluation, step, phases in said:
        of_step = {name: step[name] for name in ("median_ms", "p95_ms", *rate_to_json(None)) if name in step}
        of_phase = {
            phase: {name: took[name] for name in ("share", "median_ms", "p95_ms")} for phase, took in phases.items()
        }
        for series, numbers in {STEP: of_step, **of_phase}.items():
            found |= {(mode, evaluation, series, name.removesuffix("_ms")): number for name, number in numbers.items()}
    return found


def in_report_as_json(directory: Path) -> Shown:
    said = json.loads(json.dumps(report_json_of(read_report(directory))))
    modes = [(False, one) for one in said["modes"]] + [(True, one) for one in said["evaluations"]]
    return in_json((one["mode"], evaluation, one, one["phases"]) for evaluation, one in modes)


def last_line(directory: Path) -> dict[str, Any]:
    said: list[bytes] = []
    lines = StatusStream(RunReader(directory), append_to(said))
    lines.write_if_due(1e9)
    lines.write_final(load_exit(directory))
    found: dict[str, Any] = json.loads(said[-2])
    assert (found["kind"], found["state"]) == ("status", "ended")
    return found


def in_last_line(directory: Path) -> Shown:
    said = last_line(directory)
    return in_json([(said["mode"], False, said["step_ms"], said["phases"] | said["call_phases"])])


def on_screen(directory: Path, feed: LiveRun) -> tuple[Shown, str]:
    """Return panel 3 for all of the run, and the first rows with panel 4."""
    view = View(zoom="batch", range_s=0)
    feed.start()
    for _ in range(2):
        feed.build_screen_data(view)
        feed.refresh()
    facts = feed.build_screen_data(view)
    title, corner = panel_batch.panel_title(facts, 120)
    assert plain_text(title).endswith("whole run")
    found: Shown = {(*LAST[0], STEP, name): text for name, text in re.findall(rf"(\w+) +{_TIME}", plain_text(corner))}
    head, *table = map(plain_text, panel_batch.render_panel(facts, 150, 40, STYLE)[:4])
    columns = [REST if phase.name == "forward" else phase.name for phase in PHASES if not phase.optional]
    assert [name.lower()[:3] for name in head.split()] == [
        "dat",
        "sca",
        "rep",
        "app",
        "gat",
        "oth",
        "fwd",
        "bac",
        "opt",
        "oth",
        "ste",
    ]
    for row in table:
        name, _, rest = row.partition(" ")
        shown = re.findall(r"<?[\d.]+(?: [µm]?s|%)", rest)
        found |= {(*LAST[0], phase, name): text for phase, text in zip(columns, shown, strict=False)}
    rows: list[Row] = [
        *render_panel(facts, 180, 2),
        *panel_compare.render_panel(facts, 100, 30, STYLE),
    ]
    feed.close()
    return found, "\n".join(map(plain_text, rows))


def _same(number: Any) -> Any:
    return number


def _ms(ns: float) -> float:
    return ns / 1e6


_TEXT = {"median": format_duration, "p95": format_duration}
_JSON = {"median": _ms, "p95": _ms}
PLACES = {
    "summary": Place(
        in_summary, MODES, {**_TEXT, "rate": format_samples_per_s}, {**_TEXT, "share": format_percent}
    ),
    "report": Place(in_report, MODES, {**_TEXT, "rate": format_samples_per_s}, {**_TEXT, "share": format_percent}),
    "report as JSON": Place(
        in_report_as_json, MODES, {**_JSON, **dict.fromkeys(rate_to_json(None), _same)}, {**_JSON, "share": _same}
    ),
    "last line of JSON": Place(in_last_line, LAST, _JSON, {**_JSON, "share": _same}),
    "screen": Place(
        lambda directory: on_screen(directory, LiveRun(directory, lambda: RunReader(directory)))[0],
        LAST, {**_TEXT, "mean": format_duration}, {**_TEXT, "share": format_percent},
    ),
}  # fmt: skip
"""Figures of each place: for steps, and for each phase."""


@pytest.mark.parametrize("name", PLACES)
def test_a_figure_is_the_same_wherever_it_is_shown(run: Path, name: str) -> None:
    place = PLACES[name]
    expected = wanted(run, place, rest=name == "screen")
    assert {key[:2] for key in expected} == set(place.modes)
    assert {key[3] for key in expected if key[2] == STEP} == set(place.of_step)
    assert {key[3] for key in expected if key[2] != STEP} == set(place.of_phase)
    assert place.read(run) == expected


def test_the_times_of_ranks_are_those_of_one_rank_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made, end = ddp_rank_rows(2, slow=1, phase="data", extra_ms=38.0)
    directory = write_run_directory(made, seconds=end / SECOND + 1)
    with open_store(directory) as store:
        window = StatsWindow(store)
        window.ranks = {0: 0, 1: 1}  # as in the events of the processes
        each = [window.step_stats("single", process=process) for process in (0, 1)]
        rate = window.rate("single")
    took = [figures.phase("data") for figures in each]
    assert took[0] is not None
    assert took[1] is not None
    median, steps = took[0].median_ns, each[0].steps
    assert median is not None
    assert took[1].median_ns is not None
    assert took[1].median_ns > 10 * median

    lines = summary_lines(directory, load_exit(directory))
    (shown,) = (line for line in lines if line.startswith("  ddp"))
    assert shown.split()[2:6] == ["rank", "0", *format_duration(each[0].median_ns).split()]
    assert shown.endswith(format_samples_per_s(rate))
    at = lines.index("PHASES of a step, ddp, rank 0")
    assert lines[at + 2].split()[0] == "data"
    assert format_duration(median) in lines[at + 2]
    text = report_text(directory, 120)
    at = text.index("PHASES of a step, ddp, rank 0")
    assert format_duration(median) in text[at + 2]
    (row,) = (line.split() for line in text if line.startswith("  ddp"))
    assert row[:4] == ["ddp", str(steps), "rank", "0"]
    assert f"2 training processes, {steps} steps, {2 * steps} calls total" in " ".join(" ".join(text).split())
    assert _make_listed_run(directory, load_info(directory)).steps == steps
    assert any(line.startswith("  step time of rank 0, mean over each") for line in text)
    said = report_json_of(read_report(directory))
    assert said["steps"] == steps
    (mode,) = said["modes"]
    assert (mode["steps"], mode["process"], mode["rank"], mode["process_steps"]) == (steps, 0, 0, steps)
    assert mode["phases"]["data"]["median_ms"] == median / 1e6
    assert mode["samples_per_s"] == rate_to_json(rate)["samples_per_s"]
    assert sum(one["steps"] for one in said["time"]["stretches"]) == steps
    last = last_line(directory)
    assert (last["process"], last["rank"], last["phases"]["data"]["median_ms"]) == (0, 0, median / 1e6)
    feed = LiveRun(directory, lambda: RunReader(directory))
    feed.start()
    feed.refresh()
    facts = feed.build_screen_data(View(zoom="batch", range_s=0))
    numbers = panel_batch.shown_stats(facts)
    assert "rank 0" in plain_text(panel_batch.panel_title(facts, 120)[0])
    assert numbers.phases[0].median_ns == median
    feed.close()


def test_rates_of_all_modes_and_of_each(run: Path) -> None:
    """The last line of JSON and the first row of the screen have the rate of all modes, panel 4 that of each."""
    with open_store(run) as store:
        window = StatsWindow(store)
        together = window.process_totals(0)[1]
        each = {mode: window.rate(mode) for mode in ("single", "dp")}
    assert together is not None
    said = last_line(run)
    assert {name: said[name] for name in rate_to_json(None)} == rate_to_json(together)
    feed = LiveRun(run, lambda: RunReader(run))
    text = on_screen(run, feed)[1]
    rate, *within = format_samples_per_s(together).split(" (")
    parts = [
        f"mean {rate} samples/s",
        *(f"({w}" for w in within),
        f"{format_compact(together.steps_per_s)} steps/s",
    ]
    assert "  ".join(parts) in text
    (shown,) = re.findall(r"^samples/s +(\S+) +(\S+)", text, re.M)
    assert shown == tuple(format_compact(rate.samples_per_s) for rate in each.values() if rate is not None)


def test_evaluations_are_counted_separately_everywhere(run: Path) -> None:
    feed = LiveRun(run, lambda: RunReader(run))
    feed.start()
    feed.refresh()
    facts = feed.build_screen_data(View(zoom="batch", range_s=0))
    assert facts.process is not None
    columns = facts.process.columns
    with open_store(run) as store:
        window = StatsWindow(store)
        training = sum(window.step_stats(mode).steps for mode in ("dp", "single"))
        evaluations = sum(window.step_stats(mode, EVALUATION).steps for mode in ("dp", "single"))
    assert sum(one.count for one in columns if not one.other_kind) == training
    assert sum(one.count for one in columns if one.other_kind) == evaluations > 0
    drawn = "\n".join(plain_text(row) for row in panel_batch.render_panel(facts, 600, 40, STYLE))
    feed.close()
    assert "evaluation \u2500" in drawn
    assert f"{training} steps + {evaluations} evaluation" in " ".join(" ".join(report_text(run, 120)).split())
    listed = _make_listed_run(run, load_info(run))
    assert (listed.steps, listed.evaluation_steps) == (training, evaluations)
    assert f"{training} (+{evaluations} evaluation)" in listed.table_cells()


def test_the_most_frequent_size_comes_with_the_number_of_others() -> None:
    for calls, expected in (
        ({"b": 4, "a": 120, "c": 2}, "a -> a (+2 other sizes)"),
        ({"a": 120, "b": 4}, "a -> a (+1 other size)"),
        ({"c": 1}, "c -> c"),
    ):
        sizes: Counter[tuple[str | None, str | None]] = Counter({(name, name): count for name, count in calls.items()})
        assert ReplicaStats("dp", "Model", 0, "cpu:0", sizes=sizes).flow == expected


def test_a_loop_whose_steps_are_not_known_yet_has_calls_everywhere(state: Path) -> None:
    """The tracer has seen calls, but cannot tell yet where a step ends (LBFGS, long accumulation)."""
    directory = write_run_directory({0: Training().begin()}, status=None)
    with sqlite3.connect(directory / "history.sqlite") as db:
        db.execute("UPDATE rings SET open_calls = 11 WHERE process = 0")
    so_far = "11 calls so far; the end of a step is not known yet"
    text = " ".join(" ".join(report_text(directory, 100)).split())
    assert "one training process, 0 steps, 11 calls" in text
    assert so_far in text
    found = report_json_of(read_report(directory))
    assert (found["steps"], found["calls"], found["open_calls"], found["nothing"]) == (0, 11, 11, None)
    assert so_far in summary_lines(directory, None)
    assert "nothing was traced" not in text + " ".join(summary_lines(directory, None))
    listed = _make_listed_run(directory, load_info(directory))
    assert (listed.steps, listed.open_calls, listed.table_cells()[4]) == (None, 11, "11 calls")
    reader = RunReader(directory)
    reader.activities = lambda: {0: ("other", time.monotonic_ns())}  # type: ignore[method-assign]
    assert ProgressReporter(reader).line() == f"training: {so_far}"
    lines: list[bytes] = []
    watched = StatusStream(reader, append_to(lines))
    watched.write_if_due(1.0)
    said = json.loads(lines[0])
    assert (said["state"], said["step"], said["absent"]["step"]) == ("ended", None, so_far)


STRETCHES = ((500, "single"), (5000, "dp"), (3000, "single"), (4500, ""))
"""Number of steps before each change of mode, and the new mode."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        training = Training(step_ns=SECOND // 200)
        payloads = training.begin()
        for steps, then in STRETCHES:
            training.step_ns = SECOND // (200 if training.mode == "dp" else 330)
            payloads += training.run(steps)
            payloads += training.switch(then) if then else []
        return write_run_directory({0: payloads}, seconds=training.now / SECOND + 1)


def judged(feed: LiveRun) -> tuple[Comparison, str]:
    facts = feed.build_screen_data(View(zoom="compare"))
    found = panel_compare.shown_stats(facts)
    return found, " ".join(plain_text(row) for row in panel_compare.render_panel(facts, 100, 30, STYLE))


def test_a_run_that_has_ended_and_its_playback_are_judged_as_in_the_report(long: Path) -> None:
    said = read_report(long).run.mode_comparison
    assert said is not None
    assert said.speedup is not None
    assert {mode: side.steps for mode, side in said.sides.items()} == {
        "single": 5000 + 4500 - 10,
        "dp": 500 + 3000 - 10,
    }
    feed = LiveRun(long, lambda: RunReader(long))
    feed.start()
    feed.refresh()
    assert feed.exit_info is not None
    found, text = judged(feed)
    assert (found.devices, found.virtual) == (("cpu:0", "cpu:1"), True), "though the last calls are all single"
    assert verdict_sentence(found) == verdict_sentence(said)
    sentence = verdict_sentence(found)
    assert sentence is not None
    assert sentence in text
    assert found.speedup is not None
    assert found.speedup == said.speedup
    feed.close()
