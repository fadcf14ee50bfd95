"""The state of a run in one word."""

from __future__ import annotations

import time
from pathlib import Path

from dpmon.run import proc
from dpmon.run.ending import outcome
from dpmon.run.lock import goes_on_elsewhere, supervised
from dpmon.run.rundir import ExitInfo, RunInfo, load_exit
from dpmon.run.standing import activities

YOUNG_S = 60.0
"""A younger run may be about to start its command, however slow the machine is."""


def command_alive(info: RunInfo) -> bool | None:
    """Whether the command runs; None while its start is not recorded."""
    if info.command_pid is None:
        return None
    return info.boot_id == proc.boot_id() and proc.is_running(info.command_pid, info.command_started)


def goes_on(info: RunInfo) -> bool:
    """Whether a run is live, as far as this machine can see: its command, or its supervisor."""
    return bool(command_alive(info)) or supervised(info)


def run_state(directory: Path, info: RunInfo) -> tuple[str, ExitInfo | None]:
    """The state in a word, and how the run ended if it has.

    starting; running; unsupervised (it runs, but its supervisor was killed: `dpmon attach` starts another one); ending;
    elsewhere (on another machine that shares the directory; whether it runs is unknown here); lost (it has gone without
    a record of its end); or, with the exit, a word from `dpmon.run.ending.outcome`. For a running one, `is_paused` says
    whether `ls` calls it paused.
    """
    # In this order, everything written before a process ended is seen when it has ended.
    alive, watched = command_alive(info), supervised(info)
    how = load_exit(directory)
    if how is not None:
        return outcome(how), how
    if goes_on_elsewhere(directory, info, how):
        return "elsewhere", None
    if alive:
        return "running" if watched else "unsupervised", None
    if alive is None and (watched or time.time() - info.started_unix < YOUNG_S):
        return "starting", None
    return "ending" if watched else "lost", None


def is_paused(directory: Path) -> bool:
    """Whether every training process has paused, according to the rings of a run on this machine."""
    found = [(ring.pid, what) for _, ring, what, _ in activities(directory) if what != "ended"]
    doing = [what for pid, what in found if proc.alive(pid, None)]
    return bool(doing) and all(what == "paused" for what in doing)
