"""`export --follow` for a mirror that never asks: it does not wait without a limit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.export import ExportError
from dpmon.export import row_stream as module
from dpmon.export.incremental_rows import IncrementalRows
from dpmon.export.row_stream import stream_rows
from dpmon.mirror.mirror_run import find_or_create_mirror
from dpmon.run import proc
from dpmon.run.run_directory import load_exit, load_info, stop_requested_unix, write_info
from dpmon.run.run_reader import NO_TRAINING_MESSAGE
from dpmon.run.run_signals import stop_run
from support.history_builders import write_run_directory
from support.record_builders import even_training_rows, sample_events


@pytest.fixture
def directory(state: Path) -> Path:
    return write_run_directory({0: even_training_rows(), -1: sample_events()}, status=0)


@contextmanager
def as_input() -> Iterator[int]:
    """Make a pipe the standard input; return its other end."""
    here, there = os.pipe()
    before = os.dup(0)
    os.dup2(here, 0)
    try:
        yield there
    finally:
        os.dup2(before, 0)
        for each in (here, before):
            os.close(each)


def test_a_way_without_input_is_said(directory: Path) -> None:
    with as_input() as there:
        os.close(there)
        with pytest.raises(ExportError, match="standard input ends at once"):
            stream_rows(directory, 0, rollups=True)


@pytest.mark.parametrize("asked", [b"", b'{"ask": "begin"}\n'])
def test_a_reader_that_is_gone_is_not_waited_for(
    directory: Path, asked: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MAX_READER_WAIT_S", 0.2)
    with as_input() as there:
        os.write(there, asked)
        stream_rows(directory, 0, rollups=True)
        os.close(there)
    assert ('"exit"' in capsys.readouterr().out) == bool(asked)


def test_machines_that_cannot_be_asked_are_not_called_stopped(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmon.run.run_signals.time.sleep", pytest.fail)  # a mirror has no command to wait for
    mirror = find_or_create_mirror("train", [["gpu-1", "20260101-000000-train-0001", "false"]])
    *_, said = stop_run(mirror, load_info(mirror))
    assert said == "no node is connected, so the run cannot be stopped now: try again in a few seconds"
    assert stop_requested_unix(mirror) is None


@pytest.mark.parametrize("request_", [{"ask": "mode", "mode": "dp"}, {"ask": "pause", "paused": True}])
def test_a_request_that_no_process_takes_is_answered_with_the_reason(directory: Path, request_: dict[str, Any]) -> None:
    followed = module._RowStream(directory, IncrementalRows(rollups=True))
    followed.handle_request({**request_, "id": 7})
    assert [json.loads(line) for line in followed.pop_replies()] == [{"answer": 7, "error": NO_TRAINING_MESSAGE}]


def test_output_is_passed_on_in_whole_lines(directory: Path) -> None:
    followed = module._RowStream(directory, IncrementalRows(rollups=True))
    path = followed._reader.output_paths[0]

    def more(data: bytes, *, last: bool = False) -> str | None:
        with path.open("ab") as file:
            file.write(data)
        return followed._new_output(is_last=last)

    path.write_bytes(b"begin\n" * 1000 + b"half a")
    assert more(b"") == "begin\n" * ((module.FIRST_OUTPUT_BYTES - 6) // 6)
    assert more(b" line") is None
    assert more(b"!\nx") == "half a line!\n"
    assert more("\u00e9".encode()[:1]) is None
    assert more("\u00e9".encode()[1:] + b"\r10%") == "x\u00e9\r"
    assert more(b"\r20%") == "10%\r"
    assert more(b"\nend") == "20%\n"
    flood = b"%029d\n" % 7
    assert more(flood * 5000 + b"z") == flood.decode() * ((module.MAX_OUTPUT_BYTES - 1) // len(flood))
    at = followed._output_offset
    assert more(b"", last=True) == "z"
    again = module._RowStream(directory, IncrementalRows(rollups=True))
    again.begin({"output_at": at})
    assert again._new_output(is_last=True) == "z"


def test_the_end_is_sent_when_the_supervisor_has_written_everything(directory: Path) -> None:
    """It records the end of the command before it writes the last rows."""
    how = load_exit(directory)
    assert how is not None
    me: dict[str, Any] = {
        "supervisor_pid": os.getpid(),
        "supervisor_started": proc.start_time_s(os.getpid()),
        "boot_id": proc.boot_id(),
    }
    write_info(directory, replace(load_info(directory), **me))
    write_info(directory, replace(how, drained=False))
    followed = module._RowStream(directory, IncrementalRows(rollups=True))
    lines, _, last = followed.next_chunk()
    assert (last, "exit" in json.loads(lines[-1])) == (False, False)
    write_info(directory, how)
    last = False
    while not last:
        lines, _, last = followed.next_chunk()
    assert json.loads(lines[-1])["exit"]["status"] == 0
