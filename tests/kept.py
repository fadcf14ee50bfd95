"""Makes the directory of a run without running anything: its history, the exit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stored import Recording

from dpmon.record.history_rows import Row
from dpmon.record.record_types import Record
from dpmon.run import proc
from dpmon.run.run_directory import ExitInfo, RunInfo, write_info
from dpmon.run.run_registry import create_run
from dpmon.store.history_writer import LIMIT_BYTES


def draft(**about: Any) -> RunInfo:
    """Return a run that started at clock 0, and has no directory yet; `about`: other fields."""
    facts = {
        "id": "", "name": "linear", "command": ("python", "linear.py"), "script": "linear.py", "cwd": "/home/me",
        "python": "python", "started_unix": 1.7e9, "start_ns": 0, "boot_id": "", "headless": True,
        "versions": {"dpmon": "0", "python": "3.11"}, "command_pid": 4_000_000,
    }  # fmt: skip
    return RunInfo(**{**facts, **about})


def live(directory: Path, **about: Any) -> RunInfo:
    """Write run.json of a run that has just begun, and has this process as its command; return the contents."""
    directory.chmod(0o700)
    now = {"started_unix": time.time(), "start_ns": time.monotonic_ns(), "boot_id": proc.boot_id()}
    us = {"command_pid": os.getpid(), "command_started": proc.start_time_s(os.getpid()), "python": sys.executable}
    info = draft(id="20261120-141502-linear-7f3a", headless=False, options={"mode": "auto"}, **now, **us, **about)
    write_info(directory, info)
    return info


def keep(
    processes: Mapping[int, Iterable[Row | Record]],
    *,
    status: int | None = 0,
    seconds: float = 60.0,
    limit_bytes: int = LIMIT_BYTES,
    **about: Any,
) -> Path:
    """Make a run that started at clock 0, with the rows of each process (-1: the supervisor); return its directory.

    `status` None: the run has not ended. `limit_bytes`: limit of the history, which is then written in 64 parts.
    `about`: as of `draft`. The test must use the fixture `state`.
    """
    directory, _ = create_run(draft(**about))
    run = Recording(0, directory, limit_bytes)
    for process, rows in processes.items():
        every = list(rows)
        part = len(every) // 64 + 1 if limit_bytes != LIMIT_BYTES else len(every) + 1
        for at in range(0, len(every) + 1, part):
            run.add(every[at : at + part], process, skip=True)
    run.end()
    run.close()
    if status is not None:
        write_info(directory, ExitInfo(status, None, 1.7e9 + seconds, int(seconds * 1e9), seconds, "supervisor"))
    return directory
