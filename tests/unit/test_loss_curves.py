"""Losses: their steps, their curves, what is kept of them, and the finding about one that is no finite number."""

from __future__ import annotations

import csv
import io
import json
import re
from itertools import pairwise
from math import inf, isnan, nan
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dpmon.export.csv_tables import CsvTables
from dpmon.model.findings.all_findings import find_all
from dpmon.model.loss_curves import read_loss_curves
from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.history_rows import Definition, LossRow, Row
from dpmon.record.jsonl import as_json
from dpmon.report.html_page import HEIGHT, render_plot
from dpmon.report.plain_text import text_lines
from dpmon.report.plots import build_plots
from dpmon.report.sections import build_document
from dpmon.store.loss_table import KEPT_LOSSES, KEPT_OLDER, InvalidLoss, LossBin, find_invalid_losses, read_loss_bins
from dpmon.store.records import read_records
from dpmon.supervise.prometheus_file import PrometheusFile
from support.history_builders import Recording, read_report, write_run_directory
from support.record_builders import SECOND, Training
from support.script_simulator import MS, Script, assemble_script

LINE, OTHER = 3000, 3001
LINES = [
    Definition(LINE, {"place": "train.py:88", "why": None}),
    Definition(OTHER, {"place": "train.py:91", "why": None}),
]


def losses(*values: float, every_s: float = 1.0, first: int = 1) -> list[Row]:
    """Return losses of the steps from `first` on, one step every `every_s`."""
    return [LossRow(LINE, step, int(step * every_s * SECOND), value) for step, value in enumerate(values, start=first)]


def recorded(*rows: Row, process: int = 0) -> Recording:
    """Return a run of one process with these rows."""
    return Recording().add([*LINES, *rows], process)


def trained(training: Training, steps: int) -> list[Row]:
    """Return the rows of steps."""
    return [*training.begin(), *training.run(steps)]


# ------------------------------------------------------------------------------------------------ steps


def test_a_loss_belongs_to_the_step_in_which_its_pass_began() -> None:
    script = Script()
    line, starts = script.loss_line("train.py:88"), []
    for _ in range(3):
        starts.append(script.now)
        script.play("d l")
    for start, value in zip(starts, (0.25, nan, -inf), strict=True):
        script.loss(line, start + MS, value)  # the third belongs to the open step
    script.fetch(over=True)
    script.loss(line, starts[0] - 5 * MS, 4.0)  # before the loop
    found = [event.data for event in assemble_script(script).events if event.kind == "loss"]
    assert sorted((each["step"] or 0, each["loss"]) for each in found if each["loss"]) == [(0, 4.0), (1, 0.25)]
    assert sorted((each["step"], each["absent"]["loss"]) for each in found if each["loss"] is None) == [
        (2, "nan"),
        (3, "-inf"),
    ]
    assert {each["place"] for each in found} == {"train.py:88"}
    assert next(each for each in found if each["loss"] == 4.0)["absent"].keys() == {"step"}


# ------------------------------------------------------------------------------------------------ queries


def test_a_curve_has_points_of_equal_duration() -> None:
    store = recorded(*losses(4.0, 2.0, nan, 1.0, 8.0, every_s=0.5)).store()
    assert read_loss_bins(store, 0, LINE, 0, 10, 1) == [
        LossBin(0, 1, 4.0, 4.0, 4.0, 0),
        LossBin(1, 1, 2.0, 2.0, 2.0, 1),
        LossBin(2, 2, 1.0, 4.5, 8.0, 0),
    ]
    assert read_loss_bins(store, 0, LINE, 1, 2, 2) == [LossBin(0, 1, 2.0, 2.0, 2.0, 1)]
    assert read_loss_bins(store.as_of(SECOND), 0, LINE, 0, 10, 10) == [LossBin(0, 2, 2.0, 3.0, 4.0, 0)]


def smoothed_after(*values: float, until_s: int = 1000) -> float | None:
    (curve,) = read_loss_curves(recorded(*losses(*values)).store().as_of(until_s * SECOND), 0, 0, 1000, 1)
    return curve.smoothed


def test_the_smoothed_value_is_the_median_of_the_newest_nine() -> None:
    assert smoothed_after(0.0, *(9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0)) == 5.0
    assert smoothed_after(5.0, nan, 3.0, 1.0) == 3.0
    assert smoothed_after(5.0, nan, 3.0, 1.0, until_s=2) == 5.0
    assert smoothed_after(5.0, *[nan] * 9) is None


@pytest.mark.parametrize("flat", range(1, 40))
def test_after_a_steep_fall_the_smoothed_value_is_a_recent_one(flat: int) -> None:
    recent = [0.1 + 0.01 * (step % 5) for step in range(flat)]
    assert smoothed_after(115.5, *recent) in recent
    assert smoothed_after(*(115.5, 47.1, 2.8)[: flat - 1], *recent) in recent


def test_all_new_losses_are_kept_and_old_ones_in_equal_distances(tmp_path: Path) -> None:
    count, part = 12_000, 500
    for begin in range(0, count, part):  # a new writer for each part, as after a kill of the supervisor
        recording = Recording(directory=tmp_path)
        values = [nan if step in (4001, 7001) else 1.0 for step in range(begin + 1, begin + part + 1)]
        recording.add([*([] if begin else LINES), *losses(*values, first=begin + 1)])
        recording.close()
    recording = Recording(directory=tmp_path)
    store = recording.store()
    steps = [step for (step,) in store.query("SELECT step FROM losses ORDER BY t_ns")]
    assert [one.step for one in find_invalid_losses(store)] == [4001]
    recording.close()
    assert len(steps) <= KEPT_OLDER + 2 * KEPT_LOSSES
    assert steps[-KEPT_LOSSES:] == list(range(count - KEPT_LOSSES + 1, count + 1))
    assert max(after - before for before, after in pairwise(steps)) <= 8


def test_the_limit_of_the_history_does_not_delete_losses() -> None:
    recording = Recording(limit_bytes=400_000)
    training = Training()
    rows = [*LINES, *losses(*([1.0] * 50))]
    recording.add([*rows, *trained(training, 3000)])
    store = recording.store()
    assert store.pruned
    assert store.query("SELECT count(*) FROM losses") == [(50,)]


# ------------------------------------------------------------------------------------------------ state and facts


def test_the_state_has_a_curve_for_each_line_of_the_process_in_focus() -> None:
    training = Training()
    steps = trained(training, 20)
    rows = [*LINES, *losses(3.0, 2.0), LossRow(OTHER, 2, 2 * SECOND + 5, 9.0)]
    recording = Recording().add([*steps, *rows])
    first, second = recording.state().losses
    assert (first.place, first.first, first.last, first.step, first.t_ns) == ("train.py:88", 3.0, 2.0, 2, 2 * SECOND)
    assert (second.place, second.last, second.smoothed) == ("train.py:91", 9.0, 9.0)
    facts = RunAnalysis(recording.store())
    assert [curve.place for curve in facts.whole_losses] == ["train.py:88", "train.py:91"]
    assert [point.mean for point in facts.whole_losses[0].points] == [3.0, 2.0]
    assert recording.state().unfit is None


def test_the_report_has_the_losses_of_a_process_that_trains() -> None:
    training, other = Training(process=0), Training(process=1, start_ns=60 * SECOND)
    recording = Recording().add([*trained(training, 20), *LINES, *losses(3.0, 2.0)])
    evaluated = [row for _ in range(20) for row in other.step(evaluates=True)]
    recording.add([*other.begin(), *evaluated], 1)
    state = recording.state()
    assert state.representative is not None
    assert state.representative.process == 1, "the main process, which evaluates what its workers have trained"
    assert [curve.last for curve in RunAnalysis(recording.store()).whole_losses] == [2.0]


def test_a_line_without_a_loss_has_a_reason_and_is_not_unfit() -> None:
    why = "the pass begins at a tensor of 5 values, not at one value"
    rows: list[Row] = [Definition(OTHER, {"place": "train.py:91", "why": why}), LossRow(OTHER, 1, SECOND, nan)]
    recording = Recording().add([*trained(Training(), 5), *rows])
    (curve,) = recording.state().losses
    assert (curve.place, curve.why, curve.last, curve.points) == ("train.py:91", why, None, ())
    assert find_invalid_losses(recording.store()) == []
    (record,) = [record for record in read_records(recording.store()) if getattr(record, "kind", "") == "loss"]
    assert record.data["absent"] == {"loss": why}  # type: ignore[union-attr]


@pytest.mark.parametrize(("value", "words"), [(nan, "not a number (NaN)"), (inf, "infinite")])
def test_a_loss_that_is_no_finite_number_is_the_first_finding(value: float, words: str) -> None:
    recording = Recording().add([*trained(Training(rank=0), 40), *LINES, *losses(1.0, 2.0)], 0, 0)
    assert [finding.kind for finding in find_all(RunAnalysis(recording.store())) if finding.kind == "loss"] == []
    other = Training(process=1, rank=1)
    recording.add([*trained(other, 40), *LINES, *losses(1.0, value, value)], 1, 1)
    assert find_invalid_losses(recording.store())[0][:4] == InvalidLoss(1, "train.py:88", 2, 2 * SECOND, value)[:4]
    first = find_all(RunAnalysis(recording.store()))[0]
    assert first.kind == "loss"
    assert first.text == f"The loss of rank 1 is {words}: seen at step 2 (train.py:88)."
    assert first.weight == 1.0
    assert recording.state().unfit is not None
    assert "also" not in first.ground
    recording.add([*trained(Training(process=2, rank=2), 40), *LINES, *losses(1.0, 2.0, value)], 2, 2)
    assert find_all(RunAnalysis(recording.store()))[0].ground.endswith("; also seen in losses of rank 2")


# ------------------------------------------------------------------------------------------------ exports


def test_a_loss_is_a_json_line_and_a_row_of_csv() -> None:
    store = recorded(*losses(0.5, inf)).store()
    records = list(read_records(store))
    lines = [json.loads(json.dumps(as_json(record), allow_nan=False)) for record in records]
    common = {"kind": "loss", "process": 0, "rank": None, "place": "train.py:88"}
    assert lines == [
        {**common, "step": 1, "t_s": 1.0, "loss": 0.5, "absent": {}},
        {**common, "step": 2, "t_s": 2.0, "loss": None, "absent": {"loss": "inf"}},
    ]
    table = io.StringIO()
    CsvTables(lambda kind: table).write(records)
    first, second = csv.DictReader(io.StringIO(table.getvalue()))
    assert (first["place"], first["loss"], second["loss"]) == ("train.py:88", "0.5", "")


def test_metrics_have_the_newest_loss_of_each_line_and_process(state: Path, tmp_path: Path) -> None:
    rows = [*LINES, *losses(3.0, 0.5), LossRow(OTHER, 2, 2 * SECOND, nan)]
    directory = write_run_directory(
        {0: [*trained(Training(), 5), *rows], 1: [*trained(Training(process=1), 5), *LINES, *losses(7.0)]}
    )
    text = PrometheusFile(tmp_path / "file", directory, print).build_text(None)
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    found = {(one.labels["process"], one.labels["place"]): one.value for one in families["dpmon_loss"]}
    assert isnan(found.pop(("0", "train.py:91")))
    assert found == {("0", "train.py:88"): 0.5, ("1", "train.py:88"): 7.0}


def test_the_report_has_a_row_and_a_curve_for_each_line(state: Path) -> None:
    rows = [*LINES, *losses(3.0, -0.5, nan), LossRow(OTHER, 2, 2 * SECOND, 1.1), LossRow(OTHER, 3, 3 * SECOND, 1.2)]
    story = read_report(write_run_directory({0: [*trained(Training(step_ns=SECOND), 4), *rows]}))
    text = text_lines(build_document(story), 100)
    (at,) = [number for number, line in enumerate(text) if "backward called at" in line]
    assert re.split(r"\s{2,}", text[at].strip()) == [
        *("backward called at", "first", "lowest sampled", "smoothed", "last")
    ]
    assert re.split(r"\s{2,}", text[at + 1].strip()) == ["train.py:88", "3", "-0.5", "-0.5", "NaN at step 3"]
    assert re.split(r"\s{2,}", text[at + 2].strip()) == ["train.py:91", "1.1", "1.1", "1.1", "1.2 at step 3"]
    assert text[at + 3].strip().startswith("losses, sampled: at most one per second, and the last;")
    assert "smoothed: the median of the newest nine" in " ".join(map(str.strip, text))
    assert "of those inside optimizer.step, the first counts" in " ".join(map(str.strip, text))
    (plot,) = [plot for plot in build_plots(story.run) if plot.name == "loss"]
    assert [[y for _, _, y in one.points] for one in plot.series] == [[3.0, -0.5], [1.1, 1.2]]
    heights = [float(y) for y in re.findall(r'cy="([-0-9.]+)"', render_plot(plot))]
    assert len(heights) == 4
    assert [y for y in heights if not 0 <= y <= HEIGHT] == []
    assert max(heights) == heights[1], "the negative value is the lowest"
