"""Controls process/scripts/clocked.py, a script that measures its own counts and times."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from running import Dpmon, wait_for

from dpmon.run.run_reader import RunReader
from dpmon.run.stdin_terminal import is_reading_stdin

SCRIPT = Path(__file__).resolve().parent / "process" / "scripts" / "clocked.py"
CLOSE = 0.02
"""Largest relative difference between a rate and the script's own."""
only_where_waits_show = pytest.mark.skipif(
    is_reading_stdin(os.getpid()) is None, reason="this kernel does not say in which system call a process is"
)


def pass_time(seconds: float) -> None:
    """Wait for `seconds`."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until)


def reader_of(dpmon: Dpmon) -> RunReader:
    """Return a reader of the script's run, after waiting until the script trains."""
    wait_for((dpmon.cwd / "began").exists, what="the training")
    reader = RunReader(dpmon.last())
    reader.refresh()
    return reader


def switch(reader: RunReader, *modes: str, seconds: float) -> None:
    """Let the script train in one mode after another, `seconds` in each."""
    for mode in modes:
        reader.request_mode(mode)
        wait_for(lambda: not reader.has_pending_request(), what="the answer")
        pass_time(seconds)


def pause(reader: RunReader, seconds: float) -> None:
    """Pause the script for `seconds`."""
    reader.request_pause(True)
    wait_for(lambda: reader.pause_state().since_ns, what="the pause")
    pass_time(seconds)
    reader.request_pause(False)
    wait_for(lambda: not reader.pause_state().is_pending, what="the end of the pause")


def end(dpmon: Dpmon, reader: RunReader, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Make the script end; return its output and that of dpmon."""
    (dpmon.cwd / "stop").touch()
    written = process.communicate(timeout=60)
    reader.close()
    return written


def answer_twice(dpmon: Dpmon, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Answer the two questions of the script, each after two seconds; return its output and that of dpmon."""
    assert process.stdin is not None
    for _ in range(2):
        wait_for((dpmon.cwd / "asked").exists, what="the question")
        (dpmon.cwd / "asked").unlink()
        pass_time(2)
        process.stdin.write(b"yes\n")
        process.stdin.flush()
    return process.communicate(timeout=60)
