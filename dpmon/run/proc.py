"""Facts about processes from the kernel: whether they are alive, when they started, how they are related and ended.

A process is identified by its id and its start in seconds since boot. Setting the clock does not change that start, so
a reused id is never mistaken for the old process.
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
"""Units of processor times and start times in a second."""
_MAX_ENVIRON_BYTES = 1 << 23
# ioctl PIDFD_GET_INFO, struct pidfd_info and PIDFD_INFO_EXIT: linux/pidfd.h; Linux 6.15 and later provide the exit.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of the process table; `started` in seconds since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: float
    exit_code: int | None
    """As waitpid would return it; the kernel shows it to the owner, and only once the process has ended."""
    cpu_s: float = 0.0
    """Time that it has used on processors."""

    @property
    def is_dead(self) -> bool:
        """Whether it has ended. A zombie counts as ended."""
        return self.state in "ZXx"


def read_process(pid: int) -> ProcessEntry | None:
    """The process with this number, even a zombie; None if it does not exist."""
    try:
        raw = read_proc_file(pid, "stat")
    except (OSError, ValueError):  # ValueError: a number of thousands of digits
        return None
    # The name in parentheses may itself contain blanks and parentheses.
    fields = raw.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    state = fields[0].decode("ascii", "replace")
    code = int(fields[49]) if state in "ZXx" and len(fields) > 49 else None
    parent, group, session = map(int, fields[1:4])
    cpu_s, started = (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]) / _TICKS
    return ProcessEntry(pid, state, parent, group, session, started, code, cpu_s)


def voluntary_switches(pid: int, thread: int) -> int | None:
    """How often a thread of a process has gone to sleep by itself; None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/task/{thread}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return None


def read_proc_file(pid: int, name: str) -> bytes:
    """The start of /proc/PID/NAME. Raises OSError. Often called, so without a Path or a file object."""
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def start_time_s(pid: int) -> float | None:
    """Start of the process in seconds since boot; None if it does not exist."""
    process = read_process(pid)
    return None if process is None else process.started


def is_alive(pid: int, since: float | None) -> bool:
    """Whether exactly this process runs; with `since` None, whether any process with this number does."""
    process = read_process(pid)
    if process is None or process.is_dead:
        return False
    return since is None or has_start_time(process, since)


def has_start_time(process: ProcessEntry, since: float | None) -> bool:
    """Whether the process started at `since`, in the same kernel clock tick; False if `since` was not recorded."""
    return since is not None and abs(process.started - since) < 0.5 / _TICKS


def is_running(pid: int | None, since: float | None) -> bool:
    """Whether the process recorded with this number and start time runs; False without a start time."""
    return pid is not None and since is not None and is_alive(pid, since)


def is_suspended(pid: int | None) -> bool:
    """Whether the process exists, and a signal or a debugger has stopped it."""
    process = None if pid is None else read_process(pid)
    return process is not None and process.state in "Tt"


def variable(pid: int, name: str) -> str | None:
    """Return a variable of the initial environment of a process of this user; None if it is unset or unreadable."""
    start = os.fsencode(name) + b"="
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            variables = file.read(_MAX_ENVIRON_BYTES).split(b"\0")
    except (OSError, ValueError):
        return None
    return next((os.fsdecode(each[len(start) :]) for each in variables if each.startswith(start)), None)


def unreaped_wait_status(pid: int, since: float | None) -> int | None:
    """The wait status of a process that has ended and was not reaped yet; None if unknown."""
    process = read_process(pid)
    if process is None or not process.is_dead or not has_start_time(process, since):
        return None
    return process.exit_code


def open_pidfd(pid: int) -> int | None:
    """A descriptor of the process with this number; None if it does not exist, or on an older kernel."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError, OverflowError):
        return None


def wait_status_from_pidfd(fd: int) -> int | None:
    """The wait status of a process that its parent has reaped; None if the kernel does not provide it."""
    data = bytearray(_INFO.size)
    _INFO.pack_into(data, 0, _INFO_EXIT, *(0,) * 13)
    try:
        fcntl.ioctl(fd, _GET_INFO, data, True)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(data)
    return int(status) if mask & _INFO_EXIT else None


def ended_child_status(pid: int) -> int | None:
    """The status (as in subprocess) of a child that has ended; None while it runs. It is not reaped.

    Raises ChildProcessError if it is not a child of this process.
    """
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def read_process_table() -> dict[int, ProcessEntry]:
    """The process table, by number."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            process = read_process(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def process_tree(root: int) -> dict[int, ProcessEntry]:
    """The living processes that belong to `root`: its descendants, group and session, and their descendants."""
    table = read_process_table()
    mine = {pid for pid, p in table.items() if pid == root or root in (p.group, p.session)}
    return {pid: table[pid] for pid in with_descendants(mine, table) if not table[pid].is_dead}


def with_descendants(pids: set[int], table: Mapping[int, ProcessEntry]) -> set[int]:
    """`pids` and all their descendants."""
    found = set(pids)
    while more := {pid for pid, process in table.items() if process.parent in found and pid not in found}:
        found |= more
    return found


def boot_id() -> str:
    """A text that identifies this boot of the machine; empty if the kernel does not provide one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_name() -> str:
    """The machine's own name."""
    return os.uname().nodename
