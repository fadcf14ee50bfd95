"""Signals to the processes of a run. Every signal that dpmon sends goes through this module.

A process number proves nothing: the kernel may give it to another process once its owner has gone. A process belongs to
the run if its start time is the one in run.json, or if its initial environment names the run's directory (DPMON_RUN).
Its descendants belong to the run too, and so does the session that the command leads.

If the kernel has pidfds, dpmon opens one first, then checks that the process belongs to the run, then sends the signal
through the pidfd. A pidfd never refers to another process, so the result of the check still holds at that time.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from dpmon.run import proc
from dpmon.run.proc import ProcessEntry
from dpmon.run.rundir import RunInfo

_PROCESS_GROUP = 1 << 2
"""PIDFD_SIGNAL_PROCESS_GROUP (linux/pidfd.h), Linux 6.9 and later."""


def is_named(pid: int, directory: Path) -> bool:
    """Whether the process was executed with DPMON_RUN naming `directory`."""
    named = proc.run_of(pid)
    if named is None:
        return False
    # The path may contain a link. Names of runs are unique, so compare the name first and resolve only a match.
    return named == str(directory) or (
        os.path.basename(named) == directory.name and os.path.realpath(named) == os.path.realpath(directory)
    )


def command_of(info: RunInfo) -> ProcessEntry | None:
    """The command, alive or not yet reaped, if its start is the recorded one."""
    pid = info.command_pid
    if pid is None or pid <= 1 or info.boot_id != proc.boot_id():
        return None
    process = proc.read(pid)
    return process if process is not None and proc.same_start(process, info.command_started) else None


def pid_of_unproven_command(directory: Path, info: RunInfo) -> int | None:
    """The command's number in run.json, if it now belongs to a process not proven to be the command; else None."""
    pid = info.command_pid
    if pid is None or info.boot_id != proc.boot_id():
        return None
    process = proc.read(pid)
    if process is None or process.dead or command_of(info) is not None or is_named(pid, directory):
        return None
    return pid


def find_members(
    directory: Path, info: RunInfo, *, over: bool, known: Mapping[int, ProcessEntry] | None = None
) -> dict[int, ProcessEntry]:
    """The living processes that are proven to be the run's, except the caller and the run's supervisor.

    `over`: the run has ended, so its recorded command no longer proves anything. `known`: members found earlier.
    """
    table = proc.every_process()
    # Reading an environment can be slow. A process that is older than the command cannot descend from it.
    since = _earliest(info)
    mine = {pid for pid, process in table.items() if pid > 1 and process.started >= since and is_named(pid, directory)}
    for pid, process in (known or {}).items():
        if pid in table and proc.same_start(table[pid], process.started):
            mine.add(pid)
    command = None if over else command_of(info)
    if command is not None and command.pid in table:
        mine.add(command.pid)
    root = info.command_pid
    if root in mine or any(root in (table[pid].group, table[pid].session) for pid in mine):
        # The kernel does not reuse the number of a process while a group or a session still has this number.
        mine |= {pid for pid, process in table.items() if root in (process.group, process.session)}
    mine = proc.with_descendants(mine, table)
    mine.discard(os.getpid())
    supervisor = table.get(info.supervisor_pid or 0)
    if supervisor is not None and proc.same_start(supervisor, info.supervisor_started):
        mine.discard(supervisor.pid)
    return {pid: table[pid] for pid in mine if not table[pid].dead}


def _earliest(info: RunInfo) -> float:
    """Start of the first process of the run, in seconds since this boot; 0 if unknown."""
    if info.command_started is None or info.boot_id != proc.boot_id():
        return 0.0
    return info.command_started - proc.TICK_S


def send(process: ProcessEntry, number: int) -> bool:
    """Send a signal to this very process; False if it has gone or may not be signalled."""
    return _deliver(process, number, group=False)


def send_to_group(leader: ProcessEntry, number: int) -> bool:
    """Send a signal to the group that `leader` leads, in one call as a terminal does; False as for `send`."""
    return leader.group == leader.pid and _deliver(leader, number, group=True)


def send_to_all(members: Mapping[int, ProcessEntry], root: int | None, number: int) -> None:
    """Send a signal to the group of the command `root` in one call, then to the other members, parents first."""
    leader = members.get(root or 0)
    # The caller may be in that group: the training can call `dpmon stop`.
    grouped = leader is not None and os.getpgrp() != root and send_to_group(leader, number)
    for process in sorted(members.values(), key=lambda process: process.started):
        if not (grouped and process.group == root):
            send(process, number)


def _deliver(process: ProcessEntry, number: int, *, group: bool) -> bool:
    if process.pid <= 1:
        return False
    fd = proc.open_pidfd(process.pid)
    try:
        if not proc.alive(process.pid, process.started):
            return False
        if fd is not None:
            try:
                signal.pidfd_send_signal(fd, number, None, _PROCESS_GROUP if group else 0)
            except OSError as error:
                if not group or error.errno != errno.EINVAL:
                    return False
            else:
                return True
        # The kernel has no pidfds, or none for groups, or a sandbox refuses the call.
        (os.killpg if group else os.kill)(process.pid, number)
    except (OSError, OverflowError):
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True
