"""The state of a run in one word."""

from __future__ import annotations

import time
from pathlib import Path

from dpmon.run import proc
from dpmon.run.activities import ring_activities
from dpmon.run.ending import outcome
from dpmon.run.lock import goes_on_elsewhere, supervised
from dpmon.run.rundir import ExitInfo, RunInfo, load_exit

YOUNG_S = 60.0
"""A run younger than this may still start its command, even on a slow machine."""


def command_alive(info: RunInfo) -> bool | None:
    """Whether the command runs; None while its start is not recorded."""
    if info.command_pid is None:
        return None
    return info.boot_id == proc.boot_id() and proc.is_running(info.command_pid, info.command_started)


def goes_on(info: RunInfo) -> bool:
    """Whether the command or the supervisor of a run is alive, as far as this machine can see."""
    return bool(command_alive(info)) or supervised(info)


def run_state(directory: Path, info: RunInfo) -> tuple[str, ExitInfo | None]:
    """The state in a word, and how the run ended, if it has.

    With an exit, the word is from `dpmon.run.ending.outcome`. Without one, it is starting, running, ending, or one of
    these: unsupervised (the command runs, but its supervisor was killed: `dpmon attach` starts another one); elsewhere
    (on another machine that shares the directory; this machine does not know whether it runs); lost (ended without a
    record of its end). `ls` shows a running run as paused if `is_paused` is true.
    """
    # Check the processes before exit.json: then everything that they wrote before they ended is visible.
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
    found = [(ring.pid, what) for _, ring, what, _ in ring_activities(directory) if what != "ended"]
    doing = [what for pid, what in found if proc.alive(pid, None)]
    return bool(doing) and all(what == "paused" for what in doing)
