"""Stops a run: asks, insists, ends it; the whole tree of processes, never longer than it has to wait."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from dpmon.run import proc
from dpmon.run.lock import goes_on_elsewhere, supervised
from dpmon.run.rundir import RunError, load_exit, load_info, mark_stop

__all__ = ["GRACE_S", "NOTHING_RUNS", "STOPPED_BY", "otherwise", "stop_run"]

GRACE_S = 5.0
NOTHING_RUNS = "nothing runs"
STOPPED_BY = "stopped by "
_LOOK_S = 0.05
_RECORD_S = 5.0
"""So long the supervisor is given to record the end."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def stop_run(directory: Path, grace_s: float = GRACE_S) -> Iterator[str]:
    """Send SIGINT, SIGTERM, SIGKILL in turn until no process of the run is left, `grace_s` seconds after each.

    Yields a line for each signal sent; the last line says how it went. RunError if the directory is no run, or
    one of another machine.
    """
    info = load_info(directory)
    if goes_on_elsewhere(directory, info, load_exit(directory)):
        raise RunError(f"{directory.name} is on another machine; stop it there")
    root = info.command_pid
    if root is None or info.boot_id != proc.boot_id():
        yield NOTHING_RUNS
        return
    known = _members(root, info.command_started)
    if not known:
        yield NOTHING_RUNS
        return
    mark_stop(directory)
    for number in _SIGNALS:
        count = len(known)
        yield f"{number.name} to {count} process{'es' if count != 1 else ''}"
        _send(known, root, number)
        known = _wait(root, known, grace_s)
        if not known:
            yield f"{STOPPED_BY}{number.name}"
            return
    yield f"{len(known)} processes cannot be stopped: {', '.join(map(str, sorted(known)))}"


def otherwise(directory: Path, last: str, limit_s: float = _RECORD_S) -> str | None:
    """How a run that was just stopped did end, if by a signal that it was not sent; `last`: the last one it was sent.

    Waits up to `limit_s` seconds for the supervisor to record the end. None also where that is not known.
    """
    until = time.monotonic() + limit_s
    info = load_info(directory)
    while (how := load_exit(directory)) is None and supervised(info) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    names = [number.name for number in _SIGNALS]
    if how is None or how.signal is None or how.signal in names[: names.index(last) + 1]:
        return None
    # The interrupt ends the interpreter while threads of C++ are at work; one that fails then aborts the process.
    why = ", as Python may when threads of torch still run" if how.signal == "SIGABRT" else ""
    return f"it ended with {how.signal}{why}"


def _members(root: int, started: float | None) -> dict[int, float]:
    """The run's living processes with their starts; none if the root's number belongs to somebody else now."""
    first = proc.read(root)
    if first is not None and started is not None and abs(first.started - started) > 0.1:
        return {}
    return {pid: process.started for pid, process in proc.tree(root).items()}


def _send(known: dict[int, float], root: int, number: int) -> None:
    """To the group first, in one go as a terminal would; then to those that left it."""
    grouped = set()
    table = proc.every_process()
    if any(pid in table and table[pid].group == root for pid in known):
        with contextlib.suppress(OSError):
            os.killpg(root, number)
        grouped = {pid for pid in known if pid in table and table[pid].group == root}
    for pid, started in known.items():
        if pid not in grouped and proc.alive(pid, started):
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def _wait(root: int, known: dict[int, float], grace_s: float) -> dict[int, float]:
    """Wait until all have ended; what is still there after `grace_s` seconds, children of the dying included."""
    until = time.monotonic() + grace_s
    while True:
        left = {pid: started for pid, started in known.items() if proc.alive(pid, started)}
        if not left:
            left = {pid: p.started for pid, p in proc.tree(root).items() if root in (p.group, p.session)}
        else:
            left |= {pid: p.started for pid, p in proc.tree(root).items()}
        if not left or time.monotonic() >= until:
            return left
        known = left
        time.sleep(_LOOK_S)
