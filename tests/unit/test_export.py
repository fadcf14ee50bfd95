"""Exports of made-up runs: contents of tables and traces, and what happens to files."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import dpmon.export as run_export
from dpmon.cli.status_stream import NonBlockingLineFile
from dpmon.export import ExportError, export
from dpmon.export.perfetto import write_trace
from dpmon.record.record_specs import COLUMNS
from dpmon.record.record_types import Call, Record, Step
from dpmon.run.output_target import open_replacement
from dpmon.run.run_directory import load_info
from support.format_readers import ChromeTrace, read_trace
from support.history_builders import write_run_directory
from support.record_builders import (
    SECOND,
    Training,
    even_training_rows,
    records_of_rows,
    runs_of,
    sample_events,
)


@pytest.fixture
def directory(state: Path) -> Path:
    return write_run_directory({0: even_training_rows(), -1: sample_events()}, status=3)


def table(directory: Path, which: str, where: Path) -> list[dict[str, str]]:
    with open(where / f"{which}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------ csv


def test_csv_is_a_table_a_kind_with_a_row_a_record(directory: Path, tmp_path: Path) -> None:
    where = tmp_path / "tables"
    export(directory, "csv", str(where))
    absent = {
        *("pause", "input", "stall", "loader", "loader_lines", "oom", "growth", "ddp", "collective", "sampled", "loss"),
        *("flops", "profile", "checkpoint", "compiles", "host_syncs", "check"),
    }
    assert sorted(path.name for path in where.iterdir()) == sorted(
        f"{kind}.csv" for kind in COLUMNS if kind not in absent
    )
    calls = table(directory, "call", where)
    assert len(calls) == 25
    first, last = calls[0], calls[-1]
    assert tuple(first) == COLUMNS["call"]
    assert (first["process"], first["rank"], first["root"], first["mode"]) == ("0", "", "Model", "dp")
    assert (first["virtual"], first["devices"]) == ("true", '["cpu:0","cpu:1"]')
    assert first["inputs"] == '[{"path":"0","shape":[30,5],"dtype":"float32","bytes":600}]'
    assert [replica["outputs"][0]["shape"] for replica in json.loads(first["replicas"])] == [[15, 2]] * 2
    assert float(first["replicate_host_ms"]) > float(first["scatter_host_ms"]) > 0
    assert first["replicate_device_ms"] == "", "unknown is empty, not 0"
    assert (last["mode"], last["replicate_host_ms"], len(json.loads(last["replicas"]))) == ("single", "", 1)
    steps = table(directory, "step", where)
    assert [int(step["step"]) for step in steps] == list(range(1, 26))
    assert steps[0]["samples"] == "30"
    assert float(steps[0]["wall_ms"]) == pytest.approx(sum(float(steps[0][f"{p}_ms"]) for p in
        ("data", "forward", "backward", "optimizer", "other")))  # fmt: skip
    spans = json.loads(steps[0]["spans"])
    assert [span["phase"] for span in spans] == ["data", "forward", "backward", "optimizer"]
    assert [repr(span["ms"]) for span in spans] == [steps[0][f"{span['phase']}_ms"] for span in spans]
    assert steps[0]["missing_spans"] == ""
    lost = table(directory, "device", where)[-1]
    assert (lost["util_pct"], lost["absent"]) == ("", '{"util_pct":"the GPU is lost"}')
    (memory,) = table(directory, "memory", where)
    assert [(one["device"], one["model_bytes"]) for one in json.loads(memory["devices"])] == [
        ("cuda:0", 100),
        ("cuda:1", 10),
    ]
    assert (memory["took_ms"], json.loads(memory["absent"])) == ("0.1", {"devices": "too many"})
    assert table(directory, "warning", where)[0]["text"] == "a b"
    assert table(directory, "exit", where)[0]["status"] == "3"


def test_csv_of_one_kind_is_one_file(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "steps.csv"
    export(directory, "csv", str(target), "step")
    assert len(target.read_text().splitlines()) == 26
    export(directory, "csv", None, "device")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ",".join(COLUMNS["device"])
    assert len(lines) == 8
    export(directory, "csv", "-", "exit")
    assert capsys.readouterr().out.splitlines()[1] == "3,,60.0,supervisor,,"


def test_csv_of_all_kinds_needs_a_directory(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="give a directory with -o"):
        export(directory, "csv")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="cannot be written"):
        export(directory, "csv", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


# ------------------------------------------------------------------------------------------------ perfetto


def trace_of(directory: Path, records: Iterable[Record] | None = None) -> ChromeTrace:
    """Write the records of a run, or these, as a trace; read it."""
    file = io.StringIO()
    write_trace(load_info(directory), run_export.iter_records(directory) if records is None else records, file)
    return read_trace(file.getvalue())


def test_a_trace_has_a_track_a_replica_and_all_that_happened(directory: Path) -> None:
    trace = trace_of(directory)
    assert trace.tracks("process 0") == ["calls", "replica 0 cpu:0", "replica 1 cpu:1", "steps"]
    steps = trace.slices["process 0", "steps"]
    phases = ["data", "forward", "backward", "optimizer"]
    assert [event["name"] for event in steps] == [name for n in range(1, 26) for name in (f"step {n}", *phases)]
    took = steps[0]["args"]["phases_ms"]
    assert [event["dur"] / 1e3 for event in steps[1:5]] == pytest.approx([took[name] for name in phases])
    assert ("process 0", "step phases (ms)") not in trace.counters
    assert steps[0]["ts"] == 2e6, "the first began two seconds after the run's start"
    assert len(trace.slices["process 0", "replica 0 cpu:0"]) == 25
    assert len(trace.slices["process 0", "replica 1 cpu:1"]) == 20, "the last five ran on one device"
    names = [event["name"] for event in trace.slices["process 0", "calls"]]
    assert names[:5] == ["Model", "scatter", "replicate", "parallel_apply", "gather"]
    assert names[-1] == "Model"
    util = trace.counters["GPU 0 NVIDIA H200 GPU-0000", "util_pct"]
    assert util == [(0, {"value": 97}), (1e6, {"value": 97}), (2e6, {"value": 97})]
    assert ("host", "cpu_pct") in trace.counters
    assert trace.counters["process 0", "memory cuda:0"] == [(2.5e6, {"model_bytes": 100, "gradients_bytes": 50})]
    assert {event["name"] for event in trace.instants} == {
        *("start", "process", "mode dp", "mode single", "util_pct is unknown from here on", "warning: a b"),
        *("0 records were lost", "exit status 3"),
    }


def test_calls_at_the_same_time_do_not_tear_each_other(state: Path) -> None:
    """Calls of several threads overlap, and are in the order of their ends."""
    (one,) = (record for record in records_of_rows(Training().step()) if isinstance(record, Call))

    def at(start: int, wall: int) -> Call:
        return replace(one, start_ns=start, wall_ns=wall, phases={}, replicas=one.replicas[:1])

    calls = [at(0, 2_000_000), at(1_000_000, 3_000_000), at(2_000_000, 9_000_000), at(4_000_000, 8_000_000)]
    trace = trace_of(write_run_directory({}), calls)
    assert len(trace.slices["process 0", "calls"]) == 2
    assert len(trace.slices["process 0", "calls (concurrent 1)"]) == 2


def test_steps_that_touch_each_other_do_not_overlap_for_perfetto(state: Path) -> None:
    """A step begins in the ns in which the previous one ended, but times in µs are not exact in binary.

    Phases may begin and end with the step, and with each other.
    """
    chance, at, steps = random.Random(5), 2 * SECOND, []
    for number in range(1, 3001):
        took = chance.randrange(1000, 50_000_000)
        within = chance.randrange(took)
        spans = [("optimizer", 0, took), ("forward", 0, within), ("copy", within // 2, within - within // 2)]
        spans += [("backward", within, took - within), ("backward", took, 0)]
        phases = {"forward": took // 3}
        steps.append(Step(0, None, number, "dp", at, took, 4, phases, runs=runs_of(spans)))
        at += took
    found = trace_of(write_run_directory({}), steps).slices["process 0", "steps"]
    wanted: list[tuple[str, int, int]] = []
    for step in steps:
        wanted.append((f"step {step.step}", step.start_ns, step.wall_ns))
        wanted += [(name, step.start_ns + begin, ran) for name, begin, ran in step.spans or ()]
    assert [(one["name"], int(one["ts"] * 1000.0), int(one["dur"] * 1000.0)) for one in found] == wanted


def test_a_trace_that_is_interrupted_is_closed(directory: Path) -> None:
    def interrupted() -> Iterator[Record]:
        for number, record in enumerate(run_export.iter_records(directory)):
            if number == 20:
                raise KeyboardInterrupt
            yield record

    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        write_trace(load_info(directory), interrupted(), file)
    assert read_trace(file.getvalue()).slices


# ------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize("form", ["jsonl", "perfetto"])
def test_a_file_is_replaced_whole_or_not_at_all(
    directory: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.write_text("before")
    target.chmod(0o640)

    whole = list(run_export.iter_records(directory))

    def broken(*_: object) -> object:
        yield from whole[:30]
        assert target.read_text() == "before"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("dpmon.export.iter_records", broken)
        with pytest.raises(ExportError, match="No space left"):
            export(directory, form, str(target))
    assert target.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["out", "state"]
    export(directory, form, str(target))
    assert "Model" in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["out", "state"]


def test_new_files_are_the_owners_alone_and_old_ones_keep_their_mode(directory: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for form in ("jsonl", "perfetto"):
            export(directory, form, str(tmp_path / form))
        assert NonBlockingLineFile(str(tmp_path / "lines")).write(b"{}\n")
        (tmp_path / "tables").mkdir()
        (tmp_path / "tables" / "step.csv").touch(0o644)
        export(directory, "csv", str(tmp_path / "tables"))
        with open_replacement(tmp_path / "page.html") as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600, "while it is written, too"
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("**/*.*") if path.is_file()}
    assert modes.pop("step.csv") == 0o644
    modes |= {form: stat.S_IMODE((tmp_path / form).stat().st_mode) for form in ("jsonl", "perfetto", "lines")}
    assert {modes[name] for name in ("call.csv", "page.html", "jsonl", "perfetto", "lines")} == {0o600}
