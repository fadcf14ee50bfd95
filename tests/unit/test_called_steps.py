"""Calls lie within their steps; calls that no step holds are records, but no steps."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from dpmon.export.incremental_rows import MAX_CALLED_CHARS, IncrementalRows
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Call, Step
from dpmon.record.schema import EVALUATION, TRAINING
from dpmon.store import records as all_records
from dpmon.store.records import read_records
from dpmon.store.steps import (
    decode_calls,
    find_last_main_step,
    find_next_step_ns,
    find_step_end,
    read_called_steps,
    read_first_activity_ns,
    read_longest_steps,
    read_newest_activity,
    read_newest_steps,
    read_steps,
)
from dpmon.store.store_queries import Store
from support.history_builders import Recording
from support.record_builders import SECOND, TRAINING_FLAGS, Training, call_row, calls_alone

MS = 1_000_000


def run_with_calls_alone() -> tuple[Training, list[Row]]:
    """Return a training and its rows: three steps, calls outside the steps, two steps, and a step that failed."""
    training = Training(mode="single")
    rows = [*training.begin(), *training.run(3)]
    outside = call_row("dp", 0, 1, 4, training.now + MS, 2 * MS, 2, 3)
    rows.append(calls_alone(0, outside, kind=EVALUATION))
    training.now += 5 * MS
    rows += _numbered_from(5, training.run(2))
    failed = [call_row("single", TRAINING_FLAGS, 1, number, training.now + number * MS, MS, 2, 3) for number in (7, 8)]
    rows.append(calls_alone(6, *failed))
    training.now += 10 * MS
    return training, rows


def _numbered_from(number: int, rows: list[Row]) -> list[Row]:
    numbered: list[Row] = []
    for row in rows:
        if isinstance(row, Step):
            row = row._replace(calls=[call._replace(call=number) for call in row.calls])
            number += 1
        numbered.append(row)
    return numbered


def test_calls_that_no_step_holds_are_no_steps() -> None:
    training, rows = run_with_calls_alone()
    store = Recording(0).add(rows).store()
    assert [step.step for step in read_steps(store, 99)] == [5, 4, 3, 2, 1]
    assert read_newest_steps(store, [0])[0].step == 5
    assert [step.step for step in read_longest_steps(store, 99, "single")] == []  # warm-up steps
    last = read_newest_steps(store, [0])[0]
    assert find_step_end(store.as_of(training.now), 0, forward=True) is None
    assert find_step_end(store, 0, forward=False) == last.start_ns + last.wall_ns
    main_step = find_last_main_step(store, 0)
    assert main_step is not None
    assert (main_step.step, main_step.end_ns) == (5, last.start_ns + last.wall_ns)
    assert find_next_step_ns(store, 0, last.start_ns + 1) is None
    assert read_newest_activity(store, [0])[0] == ("single", training.now - MS)
    assert read_first_activity_ns(store, [0])[0] == read_called_steps(store, 0, 99)[-1].calls[0].start
    assert [(step.step, len(step.calls)) for step in read_called_steps(store, 0, 4)] == [(-6, 2), (5, 1), (4, 1)]


def test_calls_that_no_step_holds_are_records_of_their_kind() -> None:
    _, rows = run_with_calls_alone()
    records = [record for record in read_records(Recording(0).add(rows).store()) if isinstance(record, (Call, Step))]
    calls = [record for record in records if isinstance(record, Call)]
    assert [(call.call, call.step, call.kind, call.mode) for call in calls] == [
        *((number, number, TRAINING, "single") for number in (1, 2, 3)),
        (4, None, EVALUATION, "dp"),
        *((number, number - 1, TRAINING, "single") for number in (5, 6)),
        *((number, 6, TRAINING, "single") for number in (7, 8)),
    ]
    assert [record.step for record in records if isinstance(record, Step)] == [1, 2, 3, 4, 5]
    for call, step in pairwise(records):
        assert not isinstance(step, Step) or (isinstance(call, Call) and call.step == step.step), "directly before it"


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_records_are_complete_however_many_a_transaction_has(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    _, rows = run_with_calls_alone()
    whole = [*read_records(Recording(0).add(rows).store())]
    monkeypatch.setattr(all_records, "_RECORDS_PER_TRANSACTION", most)
    assert [*read_records(Recording(0).add(rows).store())] == whole


def sent_steps(store: Store, *, rollups: bool) -> list[dict[str, object]]:
    """Return the rows of steps that a reader gets."""
    lines, _ = IncrementalRows(rollups=rollups).next_chunk(store, 10, is_last=True)
    tables = [line for line in map(json.loads, lines) if line["table"] == "steps"]
    return [dict(zip(line["columns"], row, strict=True)) for line in tables for row in line["rows"]]


@pytest.mark.parametrize("rollups", [False, True])
def test_a_reader_gets_the_last_calls_of_a_step_with_very_many(rollups: bool) -> None:
    training = Training(mode="single", step_ns=SECOND)
    *definitions, step = training.step()
    assert isinstance(step, Step)
    calls = [step.calls[0]._replace(call=number, parts=None) for number in range(1, 2001)]
    store = Recording(0).add([*training.begin(), *definitions, step._replace(calls=calls)]).store()
    (sent,) = sent_steps(store, rollups=rollups)
    text, last_call = sent["called"], sent["last_call"]
    assert isinstance(text, str)
    assert isinstance(last_call, int)
    assert MAX_CALLED_CHARS / 2 < len(text) <= MAX_CALLED_CHARS
    numbers = [call.call for call in decode_calls(text, 0, last_call)]
    assert numbers == list(range(2001 - len(numbers), 2001))
    assert sent["calls"] == 2000


def test_a_mirror_gets_calls_of_a_process_without_steps() -> None:
    alone = [calls_alone(0, call_row("single", 0, 1, number, number * MS, MS, 2, 3)) for number in range(1, 9)]
    sent = sent_steps(Recording(0).add(alone).store(), rollups=True)
    assert sent
    assert all(row["called"] for row in sent)
