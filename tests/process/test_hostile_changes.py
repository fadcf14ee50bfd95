"""Replacing files of a live run harms neither the script nor its supervisor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.hostile_inputs import create_file_of_type
from support.run_harness import Dpmon, wait_for, wait_until_unsupervised

NOTES = """\
import dpmon.tracer.note_files as inject  # the tracer calls it when a ring cannot be made
inject.append_note("a lost note", "warnings.log")
inject.append_note("a lost note", "stages.log")
print("done", flush=True)
raise SystemExit(5)
"""
SPOILED = (
    *("warnings.log", "stages.log", "endings.log", "spare", "stop-asked", "waits-for-input", "history.sqlite-journal"),
    *("input.fifo", "keep", "process-3.ring", "process-3.jsonl", "exit.json"),
)


@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link", "a directory"])
def test_replacing_files_of_a_run_that_goes_on(dpmon: Dpmon, tmp_path: Path, kind: str) -> None:
    script = dpmon.waiting(NOTES)
    process = dpmon.start("--headless", script)
    dpmon.begun()
    info = dpmon.info()
    directory = dpmon.last()
    wait_for((directory / "history.sqlite-wal").exists)  # SQLite opens it, and then no other file of the history
    for name in SPOILED:
        if kind == "a directory" and name in ("exit.json", "input.fifo"):
            continue  # nothing can replace it: the ring then shows how the run ended
        create_file_of_type(kind, directory / name)
    looked = directory / "supervisor.log"
    (directory / "precious").touch()
    dpmon.go()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, b"done\n"), err
    assert json.loads((directory / "exit.json").read_text())["status"] == 5
    wait_until_unsupervised(info)
    assert "Traceback" not in looked.read_text()
    assert (directory / "precious").read_text() in ("", "precious"), "nothing was written through a link"
    assert "script" in dpmon.run("ls").text
    result = dpmon.run("report")
    assert (result.status, result.text) == (2, "")
    assert result.errors == f"dpmon: the history is damaged: history.sqlite-journal is {kind}, not a regular file\n"
