"""Collectives in the history: queries, exports, and killed supervisors."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

from dpmon.export.csv_tables import CsvTables
from dpmon.export.perfetto import write_trace
from dpmon.record.jsonl import as_json
from dpmon.record.record_specs import COLUMNS, RECORDS
from dpmon.record.record_types import Collective, Operation, Record, Sampled
from dpmon.record.span_format import Kind
from dpmon.run.run_directory import load_info
from dpmon.store.collectives import read_collective_sums
from dpmon.store.records import read_records
from dpmon.store.steps import read_steps
from dpmon.store.store_queries import Store
from support.format_readers import read_trace
from support.history_builders import Recording, open_store_with, write_run_directory
from support.script_simulator import MS, Script, assemble_in_portions

SECOND = 10**9


def script(steps: int = 8) -> Script:
    """Return a script of steps of which the first two of every four are sampled, with two collectives each."""
    found = Script()
    net, reduce, gather = found.model(module=1), found.group(), found.group("all_gather", device="cuda", backend="nccl")
    for number in range(steps):
        start = found.now
        found.fetch()
        found.learn(net)
        if number % 4 < 2:
            found.collective(gather, start + MS, 2.0, size=500)
            found.collective(reduce, start + 2 * MS, 0.5, size=1000)
            found.sampled(start, 2)
    found.fetch(over=True)
    return found


def sampled_seconds(seconds: int) -> Script:
    """Return a script with one step per second, all sampled."""
    found = Script()
    net, reduce = found.model(module=1), found.group()
    for _ in range(seconds):
        found.wait(1000)
        begin = found.now
        found.fetch()
        found.learn(net)
        found.collective(reduce, begin + MS, 0.5)
        found.sampled(begin, 1)
    found.fetch(over=True)
    return found


def recorded(found: Script) -> Store:
    return open_store_with(assemble_in_portions(found, []))


def test_by_operation() -> None:
    found = read_collective_sums(recorded(script()))
    assert (found.samples, found.why) == (4, None)
    assert found.operations == (Operation("all_reduce", 4, 4, 4000), Operation("all_gather", 4, 4, 2000))


def test_of_a_window_and_of_some_processes() -> None:
    store = recorded(script())
    steps = sorted(read_steps(store, 100), key=lambda step: step.step)
    begin, end = steps[0].start_ns, steps[2].start_ns - MS // 10
    assert read_collective_sums(store, processes=[1]).operations == ()
    assert read_collective_sums(store, processes=[0]) == read_collective_sums(store)
    assert sum(begin - MS // 10 <= one.start_ns < end for one in both(read_records(store))) == 6


def test_only_collectives_outside_the_phases_are_the_scripts_own() -> None:
    found = Script()
    net, reduce, gather, barrier = (
        found.model(module=1), found.group(), found.group("all_gather"), found.group("barrier")
    )  # fmt: skip
    for _ in range(2):
        begin = found.now
        found.fetch()
        found.learn(net)
        found.collective(reduce, begin + MS, 0.5, inside=Kind.BACKWARD)
        found.collective(barrier, begin + MS, 0.5)
        found.collective(gather, begin + MS, 0.5)
        found.sampled(begin, 3)
    found.fetch(over=True)
    store = recorded(found)
    assert read_collective_sums(store).own == ("all_gather", "barrier")
    assert read_collective_sums(store, processes=[1]).own == ()


def test_of_a_window_of_whole_seconds() -> None:
    store = recorded(sampled_seconds(4))
    first, second, third, _ = (one.start_ns for one in both(read_records(store)) if isinstance(one, Sampled))
    assert read_collective_sums(store, first, third // SECOND * SECOND).samples == 2
    assert read_collective_sums(store, second, third).samples == 2
    assert read_collective_sums(store).samples == 4


def test_the_oldest_sums_are_added_up() -> None:
    wanted = read_collective_sums(recorded(sampled_seconds(60)))
    recording = Recording(limit_bytes=3 * 180 * 40)  # room for 40 sums
    for payload in assemble_in_portions(sampled_seconds(60), []):
        recording.add([payload])
    store = recording.store()
    rows = list(store.query("SELECT start_s, count FROM collective_sums", ()))
    assert 30 < len(rows) <= 42
    assert sum(count for start, count in rows if start < 0) > 60
    assert read_collective_sums(store)._replace(own=()) == wanted._replace(own=())
    assert wanted.samples == 60


def both(records: Iterable[Record]) -> list[Collective | Sampled]:
    return [record for record in records if isinstance(record, (Collective, Sampled))]


def test_every_record_is_in_the_schema_and_in_the_tables() -> None:
    records = both(read_records(recorded(script())))
    assert {type(record) for record in records} == {Collective, Sampled}
    files: dict[str, io.StringIO] = {}
    CsvTables(lambda which: files.setdefault(which, io.StringIO())).write(records)
    for kind in ("collective", "sampled"):
        said = [as_json(record) for record in records]
        said = [one for one in said if one["kind"] == kind]
        rows = list(csv.DictReader(io.StringIO(files[kind].getvalue())))
        assert len(rows) == len(said)
        for row, one in zip(rows, said, strict=True):
            assert set(one) == {"kind", *(field.name for field in RECORDS[kind].fields)}
            assert tuple(row) == COLUMNS[kind]
            for name in ("process", "step", "start_s"):
                assert row[name] == ("" if one[name] is None else repr(one[name]))
            assert json.loads(row["absent"] or "{}") == one["absent"]


def test_tracks_of_communication_in_a_trace(state: Path) -> None:
    info = load_info(write_run_directory({0: []}))
    file = io.StringIO()
    write_trace(info, read_records(recorded(script())), file)
    trace = read_trace(file.getvalue())
    (process,) = {name for name, _ in trace.slices}
    tracks = [track for track in trace.tracks(process) if track.startswith(("communication", "collectives"))]
    assert tracks == ["collectives sampled", "communication", "communication (concurrent 1)"]
    found = [one for track in tracks[1:] for one in trace.slices[process, track]]
    assert sorted(one["name"] for one in found) == ["all_gather"] * 4 + ["all_reduce"] * 4
    assert all(one["args"]["bytes"] in (500, 1000) for one in found)
