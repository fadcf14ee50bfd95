"""Makes the directory of a run without running anything: rings with payloads, their history, the exit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpmon.ring import Ring
from dpmon.run.rundir import ExitInfo, RunInfo, save
from dpmon.run.runs import create_run
from dpmon.store.drain import Drain
from dpmon.store.writer import LIMIT_BYTES

__all__ = ["fill", "keep"]


def fill(path: Path, process: int, payloads: Iterable[bytes]) -> None:
    """Make a ring that holds `payloads`."""
    ring = Ring(str(path), process=process, start_ns=0, capacity=1 << 22)
    for payload in payloads:
        ring.write(payload)


def keep(
    processes: Mapping[int, Iterable[bytes]],
    *,
    status: int | None = 0,
    seconds: float = 60.0,
    drained: bool = True,
    limit_bytes: int = LIMIT_BYTES,
    **about: Any,
) -> Path:
    """Make a run that started at clock 0, with the payloads of each process (-1: the supervisor); return its directory.

    `status` None: the run has not ended. `drained` False: without a history, only rings. `limit_bytes`: limit of the
    history, which is then written in 64 parts. `about`: fields of RunInfo. The test must use the fixture `state`.
    """
    facts = {
        "id": "", "name": "linear", "command": ("python", "linear.py"), "script": "linear.py", "cwd": "/home/me",
        "python": "python", "started_unix": 1.7e9, "start_ns": 0, "boot_id": "", "headless": True,
        "versions": {"dpmon": "0", "python": "3.11"}, "command_pid": 4_000_000,
    }  # fmt: skip
    directory, info = create_run(RunInfo(**{**facts, **about}))
    drain = Drain(directory, info, print, limit_bytes) if drained else None
    for process, payloads in processes.items():
        name = "gpu.ring" if process < 0 else f"process-{process}.ring"
        ring = Ring(str(directory / name), process=process, start_ns=0, capacity=1 << 22)
        all_of_them = list(payloads)
        part = len(all_of_them) // 64 + 1 if limit_bytes != LIMIT_BYTES else len(all_of_them) + 1
        for number, payload in enumerate(all_of_them, start=1):
            ring.write(payload)
            if drain is not None and number % part == 0:
                drain.flush()
    if drain is not None:
        drain.flush(over=True)
        drain.close()
    if status is not None:
        save(directory, ExitInfo(status, None, 1.7e9 + seconds, int(seconds * 1e9), seconds, "supervisor"))
    return directory
