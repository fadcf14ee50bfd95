"""Signals to the processes of a run, and its stop. Every signal that dpmon sends goes through this module.

A process number in run.json proves nothing: the kernel may give the number to another process, and the directory may
come from another person. A process belongs to the run if its initial environment names the run's directory (DPMON_RUN),
or if it is the command, and its parent is the run's supervisor (DPMON_SUPERVISES) or this process. Its descendants
belong to the run too, and so does the session that the command leads, if one of these processes is in it.

If the kernel has pidfds, dpmon opens one first, then checks that the process belongs to the run, then sends the signal
through the pidfd. A pidfd never refers to another process, so the result of the check still holds at that time.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dpmon.run import proc
from dpmon.run.lifecycle import YOUNG_S, has_live_supervisor, is_command_alive, may_be_live_elsewhere
from dpmon.run.mirror_state import MirrorState
from dpmon.run.proc import ProcessEntry
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info, record_stop_request

_PROCESS_GROUP = 1 << 2
"""PIDFD_SIGNAL_PROCESS_GROUP (linux/pidfd.h), Linux 6.9 and later."""


SUPERVISES = "DPMON_SUPERVISES"
"""The variable that names the run's directory in the environment of its supervisor."""


def belongs_to_run(pid: int, directory: Path, variable: str = "DPMON_RUN") -> bool:
    """Whether the process was executed with this variable naming `directory`."""
    named = proc.variable(pid, variable)
    if named is None:
        return False
    # The path may contain a link. Names of runs are unique, so compare the name first and resolve only a match.
    return named == str(directory) or (
        os.path.basename(named) == directory.name and os.path.realpath(named) == os.path.realpath(directory)
    )


def find_run_command(directory: Path, info: RunInfo) -> ProcessEntry | None:
    """Return the command, alive or not yet reaped; None if nothing proves that the recorded process is the command."""
    pid = info.command_pid
    if pid is None or pid <= 1 or info.boot_id != proc.boot_id():
        return None
    process = proc.read_process(pid)
    is_same = process is not None and proc.has_start_time(process, info.command_started)
    return process if is_same and is_member(pid, directory) else None


def is_member(pid: int, directory: Path) -> bool:
    """Whether the process descends from one that is proven to be the run's, its supervisor or this process."""
    while pid > 1:
        if pid == os.getpid() or belongs_to_run(pid, directory) or belongs_to_run(pid, directory, SUPERVISES):
            return True
        process = proc.read_process(pid)
        pid = 0 if process is None else process.parent
    return False


def find_members(
    directory: Path, info: RunInfo, *, over: bool, known: Mapping[int, ProcessEntry] | None = None
) -> dict[int, ProcessEntry]:
    """The living processes that are proven to be the run's, except the caller and the run's supervisor.

    `over`: the run has ended, so its recorded command is of no interest. `known`: members found earlier.
    """
    table = proc.read_process_table()
    mine = {pid for pid in table if pid > 1 and belongs_to_run(pid, directory)}
    for pid, process in (known or {}).items():
        if pid in table and proc.has_start_time(table[pid], process.started):
            mine.add(pid)
    command = None if over else find_run_command(directory, info)
    if command is not None and command.pid in table:
        mine.add(command.pid)
    root = info.command_pid
    if root in mine or any(root in (table[pid].group, table[pid].session) for pid in mine):
        # The kernel does not reuse the number of a process while a group or a session still has this number.
        mine |= {pid for pid, process in table.items() if root in (process.group, process.session)}
    mine = proc.with_descendants(mine, table)
    mine.discard(os.getpid())
    supervisor = table.get(info.supervisor_pid or 0)
    if supervisor is not None and proc.has_start_time(supervisor, info.supervisor_started):
        mine.discard(supervisor.pid)
    return {pid: table[pid] for pid in mine if not table[pid].is_dead}


def send_to_all(members: Mapping[int, ProcessEntry], root: int | None, number: int) -> None:
    """Send a signal to the group of the command `root` in one call, then to the other members, parents first."""
    leader = members.get(root or 0)
    # The caller may be in that group: the training can call `dpmon stop`.
    grouped = leader is not None and os.getpgrp() != root and send_signal(leader, number, group=True)
    for process in sorted(members.values(), key=lambda process: process.started):
        if not (grouped and process.group == root):
            send_signal(process, number)


def send_signal(process: ProcessEntry, number: int, *, group: bool = False) -> bool:
    """Send a signal to this very process; False if it has gone or may not be signalled.

    `group`: to the group that it leads, in one call as a terminal does; False also if it leads none.
    """
    if process.pid <= 1 or (group and process.group != process.pid):
        return False
    fd = proc.open_pidfd(process.pid)
    try:
        if not proc.is_alive(process.pid, process.started):
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


# ------------------------------------------------------------------------------------------------ stop

GRACE_S = 5.0
NOTHING_RUNS = "nothing runs"
STOPPED_BY = "stopped by "
_LOOK_S = 0.05
_SEARCH_S = 0.3
"""Seconds between two searches of the whole process table."""
_RECORD_S = 30.0
"""Longest wait for a supervisor that lives to record the end."""
_MACHINES_S = 60.0
"""Longest wait until all machines of a mirror have stopped their runs."""
_START_S = 10.0
"""Longest wait for a run to start its command."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def stop_run(directory: Path, last_known: RunInfo | None = None, grace_s: float = GRACE_S) -> Iterator[str]:
    """Send SIGINT, SIGTERM and SIGKILL in turn until no process of the run is left; wait `grace_s` seconds after each.

    Yields a line for each signal sent; the last line is the result. `last_known`: earlier contents of run.json, in case
    the directory has been deleted. Sends no signal and raises RunError if the directory is not a run, or if the run is
    on another machine.
    """
    try:
        info = _wait_for_start(directory)
    except RunError:
        if last_known is None or directory.exists():
            raise
        info = last_known
    how = load_exit(directory)
    if info.nodes:
        yield from _stop_nodes(directory, info)
        return
    if may_be_live_elsewhere(directory, info, how):
        raise RunError(f"{directory.name} is on another machine; stop it there")
    known = find_members(directory, info, over=how is not None)
    if not known:
        if how is None and is_command_alive(info):
            yield f"process {info.command_pid} is recorded as the command, but nothing proves it: no signal was sent"
        yield NOTHING_RUNS
        return
    if how is None:
        record_stop_request(directory)
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


def _stop_nodes(directory: Path, info: RunInfo) -> Iterator[str]:
    """Ask the nodes of a mirror to stop their runs; yield how many have ended, whenever that changes."""
    machines = MirrorState(directory, info.start_ns)
    if load_exit(directory) is not None:
        yield NOTHING_RUNS
        return
    if not has_live_supervisor(info) or not machines.send_request({"ask": "stop"}):
        yield "no node is connected, so the run cannot be stopped now: try again in some seconds"
        return
    record_stop_request(directory)
    until, before, told = time.monotonic() + _MACHINES_S, -1, set[str]()
    while True:
        ended, count = machines.ended_counts()
        if ended != before:
            before = ended
            yield f"{ended} of {count} nodes have ended"
        answers = machines.replies()
        for name, text in answers.failed.items() if answers is not None else ():
            if name not in told:
                told.add(name)
                yield f"{name}: {text}"
        if load_exit(directory) is not None:
            yield f"{STOPPED_BY}its nodes"
            return
        if time.monotonic() > until:
            break
        time.sleep(_LOOK_S)
    yield f"{count - ended} of {count} nodes cannot be stopped"


def _wait_for_start(directory: Path) -> RunInfo:
    """Return the contents of run.json; wait until a run that starts has the process id of its command.

    A mirror has no command.
    """
    until = time.monotonic() + _START_S
    while True:
        info = load_info(directory)
        young = 0 <= time.time() - info.started_unix < YOUNG_S
        if info.command_pid is not None or info.nodes or not young or load_exit(directory) is not None:
            return info
        if time.monotonic() >= until:
            return info
        time.sleep(_LOOK_S)


def wait_for_record(directory: Path, limit_s: float = _RECORD_S) -> None:
    """Wait up to `limit_s` seconds for a supervisor that lives to record the end of a stopped run."""
    until = time.monotonic() + limit_s
    info = load_info(directory)
    while load_exit(directory) is None and has_live_supervisor(info) and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _wait(directory: Path, info: RunInfo, known: dict[int, ProcessEntry], grace_s: float) -> dict[int, ProcessEntry]:
    """Wait until all have ended; return those alive after `grace_s` seconds, including new children."""
    until = time.monotonic() + grace_s
    search_at = 0.0
    while True:
        now = time.monotonic()
        if now >= min(search_at, until) or not any(proc.is_alive(pid, each.started) for pid, each in known.items()):
            known = find_members(directory, info, over=load_exit(directory) is not None, known=known)
            search_at = now + _SEARCH_S
            if not known or now >= until:
                return known
        time.sleep(_LOOK_S)
