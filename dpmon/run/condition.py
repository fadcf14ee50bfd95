"""What has become of a run, in a word that is true."""

from __future__ import annotations

import time
from pathlib import Path

from dpmon.run import proc
from dpmon.run.ending import outcome
from dpmon.run.lock import goes_on_elsewhere, supervised
from dpmon.run.rundir import ExitInfo, RunInfo, load_exit
from dpmon.run.standing import activities

YOUNG_S = 60.0
"""A run that is no older may be about to start its command, however slow the machine."""


def command_alive(info: RunInfo) -> bool | None:
    """Whether the command runs; None: nobody has said yet that it was started."""
    if info.command_pid is None:
        return None
    return info.boot_id == proc.boot_id() and proc.is_running(info.command_pid, info.command_started)


def goes_on(info: RunInfo) -> bool:
    """Whether a run is going on, as far as can be seen from this machine: its command, or its supervisor."""
    return bool(command_alive(info)) or supervised(info)


def run_state(directory: Path, info: RunInfo) -> tuple[str, ExitInfo | None]:
    """The state in a word, and how the run ended if it has.

    starting; running; unsupervised (it runs, its supervisor was killed: `dpmon attach` starts another one); ending;
    elsewhere (on another machine that shares the directory, so that it cannot be seen from here whether it runs); lost
    (it has gone, and nobody has recorded how); or, with the exit, what `dpmon.run.ending.outcome` calls it. Of one that
    is running `is_paused` says whether it is paused, as `ls` calls it then.
    """
    # Asked in this order: what is written down before a process goes is there when it has gone.
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
    """Whether every process that trains has paused, as the rings of a run of this machine say."""
    found = [(ring.pid, what) for _, ring, what, _ in activities(directory) if what != "ended"]
    doing = [what for pid, what in found if proc.alive(pid, None)]
    return bool(doing) and all(what == "paused" for what in doing)
