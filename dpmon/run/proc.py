"""Reads from the kernel whether processes are alive, when they started, how they are related, and how they ended.

A process is identified by its id and its start time in seconds since boot. Setting the clock does not change this start
time, so a reused id is never mistaken for the old process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second, the unit of CPU times and start times in /proc."""
# ioctl PIDFD_GET_INFO, struct pidfd_info and PIDFD_INFO_EXIT: linux/pidfd.h; Linux 6.15 and later provide the exit.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One entry of the process table. `start_s` is in seconds since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_s: float
    exit_code: int | None
    """The value that waitpid would return. The kernel shows it only to the owner, after the process has ended."""
    cpu_s: float = 0.0
    """CPU time that it has used."""

    @property
    def is_dead(self) -> bool:
        """Whether it has ended. A zombie counts as ended."""
        return self.state in "ZXx"


def read_process(pid: int) -> ProcessEntry | None:
    """Return the process with this id, even a zombie; None if it does not exist."""
    try:
        data = read_proc_bytes(pid, "stat")
    except (OSError, ValueError):  # ValueError: an id of thousands of digits
        return None
    # The name in parentheses may itself contain blanks and parentheses.
    _, _, text = data.rpartition(b")")
    fields = text.split()  # from field 3 of proc(5), /proc/pid/stat, on
    if len(fields) < 20:
        return None
    state = fields[0].decode("ascii", "replace")
    exit_code = int(fields[49]) if state in "ZXx" and len(fields) > 49 else None
    parent, group, session = map(int, fields[1:4])
    user_ticks, system_ticks = map(int, fields[11:13])
    start_ticks = int(fields[19])
    cpu_s, start_s = (user_ticks + system_ticks) / _TICKS, start_ticks / _TICKS
    return ProcessEntry(pid, state, parent, group, session, start_s, exit_code, cpu_s)


def voluntary_switches(pid: int, thread: int) -> int | None:
    """Return how many times a thread of a process has gone to sleep by itself; None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/task/{thread}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return None


def read_proc_bytes(pid: int, name: str) -> bytes:
    """Return the first 4096 bytes of /proc/PID/NAME. Raises OSError. Called often, so without Path and file object."""
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def start_time_s(pid: int) -> float | None:
    """Return the start of the process in seconds since boot; None if it does not exist."""
    process = read_process(pid)
    return None if process is None else process.start_s


def is_alive(pid: int, start_s: float | None) -> bool:
    """Return whether this very process runs; if `start_s` is None, whether any process with this id does."""
    process = read_process(pid)
    if process is None or process.is_dead:
        return False
    return start_s is None or has_start_time(process, start_s)


def has_start_time(process: ProcessEntry, start_s: float | None) -> bool:
    """Return whether the process started in the clock tick of `start_s`; False if `start_s` is None."""
    return start_s is not None and abs(process.start_s - start_s) < 0.5 / _TICKS


def is_running(pid: int | None, start_s: float | None) -> bool:
    """Return whether the process with this id and start time runs; False if either is None."""
    return pid is not None and start_s is not None and is_alive(pid, start_s)


def environment_variable(pid: int, name: str) -> str | None:
    """Return a variable of the initial environment of a process of this user; None if it is unset or unreadable."""
    prefix = os.fsencode(name) + b"="
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            variables = file.read(1 << 23).split(b"\0")
    except (OSError, ValueError):
        return None
    return next((os.fsdecode(entry[len(prefix) :]) for entry in variables if entry.startswith(prefix)), None)


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd of the process with this id; None if it does not exist, or if the kernel has no pidfds."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError, OverflowError):
        return None


def ended_child_status(pid: int) -> int | None:
    """Return the status (as in subprocess) of a child that has ended; None while it runs. Does not reap it.

    Raises ChildProcessError if it is not a child of this process.
    """
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def exit_status(pid: int, start_s: float | None, pidfd: int | None = None) -> int | None:
    """Return the status (as in subprocess) of a process that has ended; None while it runs, or if it is unknown.

    Its parent knows it; its user too, until it is reaped; from Linux 6.15 on, a process with a pidfd even after that.
    """
    with contextlib.suppress(ChildProcessError):
        return ended_child_status(pid)
    process = read_process(pid)
    wait_status = None
    if process is not None and process.is_dead and has_start_time(process, start_s):
        wait_status = process.exit_code
    if wait_status is None and pidfd is not None:
        wait_status = _wait_status_from_pidfd(pidfd)
    return None if wait_status is None else os.waitstatus_to_exitcode(wait_status)


def _wait_status_from_pidfd(fd: int) -> int | None:
    """Return the wait status of a process that its parent has reaped; None if the kernel does not provide it."""
    data = bytearray(_INFO.size)
    _INFO.pack_into(data, 0, _INFO_EXIT, *(0,) * 13)
    try:
        fcntl.ioctl(fd, _GET_INFO, data, True)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(data)
    return int(status) if mask & _INFO_EXIT else None


def read_process_table() -> dict[int, ProcessEntry]:
    """Return the process table, by process id."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            process = read_process(int(name))
            if process is not None:
                table[process.pid] = process
    return table


def process_tree(root: int) -> dict[int, ProcessEntry]:
    """Return the living processes that belong to `root`: its descendants, group and session, and their descendants."""
    table = read_process_table()
    members = {pid for pid, process in table.items() if pid == root or root in (process.group, process.session)}
    return {pid: table[pid] for pid in with_descendants(members, table) if not table[pid].is_dead}


def with_descendants(pids: set[int], table: Mapping[int, ProcessEntry]) -> set[int]:
    """Return `pids` and all their descendants."""
    family = set(pids)
    while children := {pid for pid, process in table.items() if process.parent in family and pid not in family}:
        family |= children
    return family


def boot_id() -> str:
    """Return a text that identifies this boot of the machine; empty if the kernel does not provide one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_name() -> str:
    """Return the machine's own name."""
    return os.uname().nodename
