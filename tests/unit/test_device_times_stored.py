"""Device times from the ring to history, exports, report and screen."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kept import keep
from stored import state_of
from synthetic import SECOND, Training, kind_of

from dpmon.cli.summary import summary_lines
from dpmon.export import history
from dpmon.export.perfetto import write_trace
from dpmon.export.table import Tables
from dpmon.record.history_rows import CallRow, Row
from dpmon.record.kinds import Call, Event, Step
from dpmon.record.names import Untimed
from dpmon.report.asjson import as_object
from dpmon.report.collect import collect
from dpmon.report.text import report_text
from dpmon.run.rundir import load_info
from dpmon.ui.look import COLOUR, UNICODE, Look
from dpmon.ui.paint import whole
from dpmon.ui.panels import panel_batch, panel_replicas
from dpmon.ui.panels.panel_output import Output
from dpmon.ui.rows import plain, width_of
from dpmon.ui.scene import Facts, Scene, View

LOOK = Look(UNICODE, COLOUR, True)
OF_CALL = (0.5, 1.0, 2.0, 0.25, 1.5, 1.75)
OF_STEP = (0.25, 4.0, 3.0, 0.5)


def timed(rows: list[Row], why: int = Untimed.NONE) -> list[Row]:
    """Return the records with device times."""
    times: dict[str, Any] = {"call": OF_CALL, "step": OF_STEP}
    if why:
        times = {kind: [None] * len(found) for kind, found in times.items()}
    return [row.timed(times[kind_of(row)], why) if isinstance(row, (CallRow, Step)) else row for row in rows]


def training(steps: int = 40) -> list[Row]:
    made = Training(devices=("cuda:0", "cuda:1"), virtual=False)
    return [*made.begin(), *timed(made.run(steps))]


def test_history_exports_and_report_have_device_times(state: Path) -> None:
    directory = keep({0: training()})
    records = list(history(directory))
    calls = [record for record in records if isinstance(record, Call)]
    steps = [record for record in records if isinstance(record, Step)]
    assert len(calls) == len(steps) == 40
    assert {step.device_ms["backward"] for step in steps if step.device_ms} == {3.0}
    assert {call.replicas[1].device_ms for call in calls} == {1.75}

    files: dict[str, io.StringIO] = {}
    Tables(lambda which: files.setdefault(which, io.StringIO())).write(records)
    rows = {which: list(csv.DictReader(io.StringIO(file.getvalue()))) for which, file in files.items()}
    assert (rows["step"][0]["forward_device_ms"], rows["step"][0]["more"]) == ("4.0", "")
    assert (rows["call"][0]["gather_device_ms"], rows["call"][0]["replica_device_ms"]) == ("0.25", "1.5 1.75")

    trace = io.StringIO()
    write_trace(load_info(directory), records, trace)
    counters = [event for event in json.loads(trace.getvalue()) if event["name"] == "step phases on the device (ms)"]
    assert len(counters) == 40
    assert counters[0]["args"] == {"data": 0.25, "forward": 4.0, "backward": 3.0, "optimizer": 0.5}

    phases = as_object(collect(directory))["modes"][0]["phases"]
    medians = [phases[name]["device_median_ms"] for name in ("forward", "gather")]
    assert medians == pytest.approx([4.0, 0.25], rel=0.004)
    assert phases["other"]["device_median_ms"] is None
    lines = [line.split() for line in report_text(directory, 100)]
    assert ["phase", "share", "median", "p95", "on", "device"] in lines
    assert next(line for line in lines if line[:1] == ["backward"])[-2] in ("2.99", "3.00", "3.01")
    said = "\n".join(summary_lines(directory, None))
    assert "on device  3.01 ms" in said, "at most 0.4 % off"


@pytest.mark.parametrize("damage", [b"\6", "text", "5", '["x"]'])
def test_a_history_is_read_up_to_damaged_device_times(state: Path, damage: object) -> None:
    directory = keep({0: training(5)})
    with closing(sqlite3.connect(directory / "history.sqlite")) as db, db:
        db.execute("UPDATE steps SET device = ? WHERE step = 3", (damage,))
    records = list(history(directory))
    assert {record.step for record in records if isinstance(record, Step)} == {1, 2}
    warnings = [record.data["text"] for record in records if isinstance(record, Event) and record.kind == "warning"]
    assert str(warnings[-1]).startswith("the history cannot be read to its end: ")


def test_the_screen_shows_host_and_device_side_by_side() -> None:
    state = state_of(training())
    scene = Scene(state, 3 * SECOND, Facts(script="x.py"), alive=True)
    head, first, second, *_ = (plain(row) for row in panel_replicas.table(scene, 100, 10, LOOK))
    assert "host time on device" in head
    assert "1.50 ms" in first
    assert "1.75 ms" in second
    rows = [plain(row).split() for row in panel_batch.batch(scene, 120, 14, LOOK)]
    assert [row[0] for row in rows[1:5]] == ["share", "median", "device", "p95"]
    # As on the host, forward excludes the phases of the call: 4 - (0.5 + 1 + 2 + 0.25).
    values = " ".join(rows[3][1:])
    assert values == "250 µs 501 µs 1.00 ms 2.00 ms 250 µs 250 µs 3.01 ms 501 µs –"
    for zoom in (None, "replicas", "batch"):
        for size in ((80, 24), (120, 40), (200, 60), (40, 10)):
            drawn = whole(Scene(state, 3 * SECOND, view=View(zoom=zoom)), Output(), *size, LOOK)
            assert {width_of(row) for row in drawn} == {size[0]}


def test_the_screen_without_devices_times_has_no_column_for_them() -> None:
    made = Training()
    scene = Scene(state_of([*made.begin(), *made.run(20)]), 3 * SECOND, Facts(script="x.py"), alive=True)
    assert "on device" not in plain(panel_replicas.table(scene, 100, 10, LOOK)[0])
    rows = panel_batch.batch(scene, 120, 14, LOOK)
    assert not any(plain(row).startswith("device") for row in rows)
