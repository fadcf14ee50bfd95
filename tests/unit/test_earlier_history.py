"""Histories of earlier versions give the same answers as new ones, and their files do not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from earlier import as_earlier
from everything import alike, everything
from kept import keep
from synthetic import SECOND, Training, device_event, host_event
from test_takeover_exact import evaluation

from dpmon.cli.summary import summary_lines
from dpmon.export.records import history
from dpmon.record.jsonl import as_json
from dpmon.record.kinds import Event, Step
from dpmon.record.schema import NO_SPANS
from dpmon.record.wire import pack_event, pack_timed
from dpmon.run.rundir import load_info
from dpmon.store.drain import Drain
from dpmon.store.opened import open_store
from dpmon.store.tables import HISTORY_FILE, SCHEMA_VERSION
from dpmon.store.window import Window


def payloads(steps: int, *, timed: bool = True) -> dict[int, list[bytes]]:
    """Return records of two processes that train in both modes and evaluate, with device times and a pause."""
    found: dict[int, list[bytes]] = {-1: [host_event(1.0), device_event(1.5, 0)]}
    for process in (0, 1):
        training = Training(process=process, step_ns=2_400_000, seed=process)
        records = training.begin()
        for number in range(steps):
            if number == steps // 2:
                records += training.switch("single")
            if number % 25 == 24:
                records += [record for _ in range(3) for record in evaluation(training)]
                training.now += SECOND // 3
            records += training.step(rows=30 if number % 7 else 8)
            if timed:
                records[-1] = pack_timed(records[-1], (None, 1.5, 2.5, None), 3)
        pause = {"process": process, "step": 1, "reason": None, "refused": None}
        for paused, took in ((True, None), (False, 0.5)):
            data = {**pause, "t_s": training.now / SECOND, "paused": paused, "paused_s": took}
            records.append(pack_event("pause", data))
            training.now += SECOND // 2
        found[process] = [*records, *training.step()]
    return found


def read(directory: Path) -> dict[str, Any]:
    with open_store(directory) as store:
        assert store.damaged is None
        return everything(store)


def without_spans(step: Step) -> Step:
    return replace(step, spans=None)


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_an_earlier_history_is_read_completely_and_not_changed(state: Path, version: int) -> None:
    directory = keep(payloads(100, timed=version > 1))
    whole, records = read(directory), list(history(directory))
    if version < 6:
        records = [without_spans(one) if isinstance(one, Step) else one for one in records]
        whole["steps"] = {process: list(map(without_spans, steps)) for process, steps in whole["steps"].items()}
    as_earlier(directory / HISTORY_FILE, version)
    before = (directory / HISTORY_FILE).read_bytes()
    alike(read(directory), whole)
    assert list(history(directory)) == records
    assert (directory / HISTORY_FILE).read_bytes() == before


def test_figures_begin_where_deleted_rows_end_and_the_time_before_counts_as_missed(state: Path) -> None:
    directory = keep(payloads(200))
    with open_store(directory) as store:
        rows = sorted(store.steps(1 << 30, process=0), key=lambda step: step.step)
    as_earlier(directory / HISTORY_FILE, rows_from=400)
    left = [record for record in history(directory) if isinstance(record, Step) and record.process == 0]
    assert 0 < len(left) < len(rows)
    assert left == rows[-len(left) :]
    with open_store(directory) as store:
        assert store.damaged is not None
        assert "an earlier version of dpmon deleted" in store.damaged
        window = Window(store)
        assert sum(window.figures(mode, evaluates, 0).steps for mode, evaluates in window.modes) == len(left)
        spent = [row.spent for row in store.time_rows(process=0)]
        began = next(int(one.data["t_s"] * SECOND) for one in store.events("process") if one.data["process"] == 0)
        assert sum(sum(one.values()) for one in spent) == left[-1].start_ns + left[-1].wall_ns - began
        assert sum(one["missed"] for one in spent) == left[0].start_ns - began
        assert sum(one["startup"] for one in spent) == 0
    assert "an earlier version of dpmon deleted" in " ".join(summary_lines(directory, None))


@pytest.mark.parametrize("version", [5, 6])
def test_a_history_without_spans_says_why_a_step_has_none(state: Path, version: int) -> None:
    directory = keep(payloads(20))
    rows = [one for one in history(directory) if isinstance(one, Step)]
    assert any(step.spans for step in rows)
    as_earlier(directory / HISTORY_FILE, version)
    found = [one for one in history(directory) if isinstance(one, Step)]
    assert found == (rows if version >= 6 else [without_spans(step) for step in rows])
    if version < 6:
        said = as_json(found[0])
        assert (said["spans"], said["absent"]["spans"]) == (None, NO_SPANS)


def test_a_supervisor_does_not_change_an_earlier_history_and_it_is_still_read(state: Path) -> None:
    training = Training()
    directory = keep({0: [*training.begin(), *training.run(50)]}, status=None)
    as_earlier(directory / HISTORY_FILE)
    before = (directory / HISTORY_FILE).read_bytes()
    warnings: list[str] = []
    drain = Drain(directory, load_info(directory), warnings.append)
    drain.flush()
    drain.close()
    assert len(warnings) == 1
    assert f"an earlier version of dpmon wrote it (schema {SCHEMA_VERSION - 1})" in warnings[0]
    assert (directory / HISTORY_FILE).read_bytes() == before
    assert sum(isinstance(record, Step) for record in history(directory)) == 50


def test_a_damaged_one_is_read_to_the_damage(state: Path) -> None:
    directory = keep(payloads(500))
    path = directory / HISTORY_FILE
    as_earlier(path)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4 * 4096] = b"\xff" * (4 * 4096)
    path.write_bytes(data)
    records = list(history(directory))
    assert sum(isinstance(record, Step) for record in records) > 0
    assert any(isinstance(record, Event) and "cannot be read" in str(record.data.get("text")) for record in records)
