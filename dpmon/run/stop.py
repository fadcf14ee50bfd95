"""Stops a run with all its processes: sends stronger and stronger signals, and waits for a limited time after each."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from dpmon.run import proc
from dpmon.run.condition import YOUNG_S, goes_on_elsewhere, supervised
from dpmon.run.proc import ProcessEntry
from dpmon.run.rundir import RunError, RunInfo, load_exit, load_info, mark_stop
from dpmon.run.signalling import find_members, pid_of_unproven_command, send_to_all

GRACE_S = 5.0
NOTHING_RUNS = "nothing runs"
STOPPED_BY = "stopped by "
_LOOK_S = 0.05
_SEARCH_S = 0.3
"""Seconds between two searches of the whole process table."""
_RECORD_S = 30.0
"""Longest wait for a supervisor that lives to record the end."""
_START_S = 10.0
"""Longest wait for a run to start its command."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def stop_run(directory: Path, last_known: RunInfo | None = None, grace_s: float = GRACE_S) -> Iterator[str]:
    """Send SIGINT, SIGTERM and SIGKILL in turn until no process of the run is left; wait `grace_s` seconds after each.

    Yields a line for each signal sent; the last line is the result. `last_known`: earlier contents of run.json, in case
    the directory has been deleted. Sends no signal and raises RunError if the directory is not a run, if the run is on
    another machine, or if a process with the command's number is not proven to be the command.
    """
    try:
        info = _started(directory)
    except RunError:
        if last_known is None or directory.exists():
            raise
        info = last_known
    how = load_exit(directory)
    if goes_on_elsewhere(directory, info, how):
        raise RunError(f"{directory.name} is on another machine; stop it there")
    known = find_members(directory, info, over=how is not None)
    if not known:
        if how is None and (stranger := pid_of_unproven_command(directory, info)) is not None:
            raise RunError(f"process {stranger} is not proven to be the command of {directory.name}; no signal sent")
        yield NOTHING_RUNS
        return
    if how is None:
        mark_stop(directory)
    for number in _SIGNALS:
        count = len(known)
        yield f"{number.name} to {count} process{'es' if count != 1 else ''}"
        send_to_all(known, info.command_pid, number)
        known = _wait(directory, info, known, grace_s)
        if not known:
            yield f"{STOPPED_BY}{number.name}"
            return
    left = f"{len(known)} process{'es' if len(known) != 1 else ''}"
    yield f"{left} cannot be stopped: {', '.join(map(str, sorted(known)))}"


def _started(directory: Path) -> RunInfo:
    """The contents of run.json. If the run is just being started, wait until they contain the command's process id."""
    until = time.monotonic() + _START_S
    while True:
        info = load_info(directory)
        young = 0 <= time.time() - info.started_unix < YOUNG_S
        if info.command_pid is not None or not young or load_exit(directory) is not None:
            return info
        if time.monotonic() >= until:
            return info
        time.sleep(_LOOK_S)


def unexpected_end(directory: Path, last: str, limit_s: float = _RECORD_S) -> str | None:
    """Describe the end of a stopped run if a signal that dpmon did not send ended it; None if not, or if unknown.

    `last`: the last signal that dpmon sent. Waits up to `limit_s` seconds for the supervisor to record the end.
    """
    until = time.monotonic() + limit_s
    info = load_info(directory)
    while (how := load_exit(directory)) is None and supervised(info) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    names = [number.name for number in _SIGNALS]
    if how is None or how.signal is None or how.signal in names[: names.index(last) + 1]:
        return None
    # SIGINT ends the interpreter while C++ threads still work. If one of them fails then, it aborts the process.
    why = ", as Python may when threads of torch still run" if how.signal == "SIGABRT" else ""
    return f"it ended with {how.signal}{why}"


def _wait(directory: Path, info: RunInfo, known: dict[int, ProcessEntry], grace_s: float) -> dict[int, ProcessEntry]:
    """Wait until all have ended; return those alive after `grace_s` seconds, including new children."""
    until = time.monotonic() + grace_s
    search_at = 0.0
    while True:
        now = time.monotonic()
        if now >= min(search_at, until) or not any(proc.alive(pid, each.started) for pid, each in known.items()):
            known = find_members(directory, info, over=load_exit(directory) is not None, known=known)
            search_at = now + _SEARCH_S
            if not known or now >= until:
                return known
        time.sleep(_LOOK_S)
