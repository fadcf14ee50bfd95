"""`ls`, `report` and `export` with damaged runs, a clock set back, or a full disk."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.commands import ls
from dpmon.cli.main import entry, main
from dpmon.errors import HistoryError
from dpmon.export import export, iter_records
from dpmon.record.record_types import Step
from dpmon.run.run_directory import RunError
from dpmon.run.run_registry import find_run
from dpmon.store.database import SCHEMA_VERSION
from dpmon.store.history_writer import HistoryWriter
from support.format_readers import report_text
from support.history_builders import write_run_directory
from support.record_builders import Training


def a_run(name: str = "linear", **about: Any) -> Path:
    training = Training()
    return write_run_directory({0: [*training.begin(), *training.run(5)]}, name=name, **about)


def listed(capsys: pytest.CaptureFixture[str], **options: bool) -> tuple[list[str], str]:
    assert ls(Namespace(json=options.get("json", False), script=None)) == 0
    said = capsys.readouterr()
    return said.out.splitlines(), said.err


def test_runs_that_cannot_be_read_are_counted(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, damaged, empty = a_run("good"), a_run("damaged"), a_run("empty")
    assert listed(capsys)[1] == ""
    (empty / "run.json").unlink()  # like a run that is being created or deleted
    (damaged / "run.json").write_text("{")
    lines, errors = listed(capsys)
    assert [line.split()[0] for line in lines] == ["NAME", f"good-{good.name[-4:]}"]
    assert errors.startswith("dpmon: not listed: ")
    assert damaged.name in errors
    assert errors.count("\n") == 1
    shutil.copytree(damaged, damaged.with_name(damaged.name[:-4] + "0000"))
    lines, errors = listed(capsys, json=True)
    assert [json.loads(line)["id"] for line in lines] == [good.name]
    assert errors.endswith(" (and 1 more)\n")


def test_a_run_is_found_by_the_start_of_its_name_but_not_deleted_by_it(state: Path) -> None:
    linear, gan = a_run("linear"), a_run("gan")
    assert find_run("lin") == linear
    assert find_run(f"gan-{gan.name[-4:-1]}") == gan
    with pytest.raises(RunError, match="there is no run 'lin'"):
        find_run("lin", unique=True)
    other = a_run("list")
    with pytest.raises(RunError, match="could be any of 2 runs: ") as error:
        find_run("li")
    assert all(f"{run.name[-4:]}" in str(error.value) for run in (linear, other))


def test_a_run_that_begins_in_the_future_has_no_age(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(started_unix=time.time() + 86_400)
    row = listed(capsys)[0][1].split()
    assert row[:5] == [row[0], "finished", "-", "00:01:00", "5"]
    assert "finished in 1 min 00 s" in report_text(a_run(started_unix=time.time() + 86_400))[0]


def test_a_run_has_its_duration_and_samples_per_second(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(step_ns=100_000_000, batch=40)
    write_run_directory({0: [*training.begin(), *training.run(50)]}, seconds=3725.0)
    head, row = (re.split("  +", line) for line in listed(capsys)[0])
    assert head == ["NAME", "STATE", "AGE", "TIME", "STEPS", "SAMPLES/S", "EXIT", "COMMAND"]
    found = dict(zip(head, row, strict=True))
    assert (found["TIME"], found["STEPS"]) == ("01:02:05", "50")
    assert float(found["SAMPLES/S"]) == pytest.approx(40 / 0.1, rel=0.05)
    (run,) = [json.loads(line) for line in listed(capsys, json=True)[0]]
    assert run["seconds"] == 3725.0
    assert run["samples_per_s"] == pytest.approx(float(found["SAMPLES/S"]), rel=0.01)


@pytest.mark.parametrize("words", [["ls"], ["report"], ["report", "--json"], ["export"]])
def test_a_terminal_without_room_gets_one_sentence(
    state: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run()
    full = open("/dev/full", "w")  # noqa: SIM115 its end fails, too
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["dpmon", *words])
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            entry()
    assert end.value.code == 2
    with contextlib.suppress(OSError):
        full.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("dpmon: ")
    assert said.endswith("No space left on device")


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_history_of_another_version_is_refused_with_a_sentence(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: int
) -> None:
    directory = a_run()
    path = directory / "history.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (version,))
    before = path.read_bytes()
    with pytest.raises(HistoryError, match=f"another version of dpmon wrote it \\(history {version}\\)"):
        HistoryWriter.open(directory, {})
    says = f"another version of dpmon recorded this run (history {version}; this one reads {SCHEMA_VERSION})"
    monkeypatch.setattr("dpmon.cli.commands.has_screen", lambda: True)
    for words in (["report"], ["export"], ["attach", "--headless"], ["attach"]):
        assert main([*words, directory.name]) == 2
        assert capsys.readouterr() == ("", f"dpmon: {directory.name}: {says}\n")
    lines, _ = listed(capsys)
    assert directory.name[-4:] in lines[1]
    assert lines[2].strip() == says
    assert json.loads(listed(capsys, json=True)[0][0])["unreadable"] == says
    assert path.read_bytes() == before


def test_an_export_is_complete_although_the_run_is_deleted_meanwhile(state: Path, tmp_path: Path) -> None:
    training = Training()
    directory = write_run_directory({0: [*training.begin(), *training.run(400)]})
    whole = [record for record in iter_records(directory) if isinstance(record, Step)]
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")  # the mode that its supervisor sets
        under_way = iter_records(directory)
        first = next(record for record in under_way if isinstance(record, Step))
        for table in ("steps", "events"):
            db.execute(f"DELETE FROM {table}")
    shutil.rmtree(directory)
    assert [first, *(record for record in under_way if isinstance(record, Step))] == whole
    with pytest.raises(RunError):
        export(directory, "csv", str(tmp_path / "tables"))
    with pytest.raises(RunError):
        report_text(directory)
