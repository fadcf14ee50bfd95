"""Detects whether the command waits in a read of its standard input.

The kernel shows the system call in which a process sleeps (proc(5), /proc/pid/syscall) to processes that may trace it.
The supervisor nearly always may, because it is the parent; a screen on a hardened machine may not. Only a wait in
read(2) is recognized. A wait in another call, such as a prompt library's select, looks like other work.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from dpmon.run.files import open_file, read_file, remove_file

FILE = "waits-for-input"
"""Exists during a wait. Contains the start of the wait and the time of the last check (monotonic ns, 20 digits each).
"""
_READ_CALL = {"x86_64": 0, "aarch64": 63, "riscv64": 63, "ppc64le": 3, "s390x": 3}.get(os.uname().machine)
"""The number of read(2), by machine (syscalls(2) and the kernel's tables)."""
_EVERY_S = 0.2
CLOSE_S = 0.05
"""Seconds between two checks, normally and during a wait. They limit the precision of a wait's start and end."""
_REPORTED_NS = 1_000_000_000
"""Shortest wait that is reported, once it is over."""
_VALID_NS = 10_000_000_000
"""How long the file's contents are valid. They expire because a stopped or killed supervisor leaves the file behind."""


def reads_input(pid: int) -> bool | None:
    """Whether the process's first thread sleeps in a read of descriptor 0; None if unknown."""
    if _READ_CALL is None:
        return None
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text("ascii", "replace").split()
    except OSError:
        return None
    return len(fields) > 2 and fields[0] == str(_READ_CALL) and fields[1] == "0x0"


def waits_since(directory: Path) -> int | None:
    """When the command began to wait for input (monotonic ns), as its supervisor saw it; None if it does not wait."""
    try:
        fields = read_file(directory / FILE, 64).split()
    except OSError:
        return None
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    since, seen = map(int, fields)
    return since if since <= seen and 0 <= time.monotonic_ns() - seen < _VALID_NS else None


def _sleeps(pid: int) -> str | None:
    """The kernel's line that counts how often the process's first thread has gone to sleep; None if unknown."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return line
    return None


class InputWatch:
    """Maintains the file FILE; calls `tell` with start and end (ns) of each finished wait that is long enough."""

    def __init__(self, directory: Path, pid: int, tell: Callable[[int, int], None] = lambda since, seen: None) -> None:
        self._path = directory / FILE
        self._pid = pid
        self._tell = tell
        self._since: int | None = None
        self._seen = self._asked = 0
        """When the process was last seen waiting, and when it was last checked (monotonic ns)."""
        self._began = 0
        self._sleeps: str | None = None
        self._next = 0.0
        self.close()  # remove the file of a killed supervisor

    def look(self, now: float) -> None:
        """If a check is due, make it and write the result. `now`: monotonic s."""
        if now < self._next:
            return
        reads = reads_input(self._pid) is True
        sleeps, asked = _sleeps(self._pid) if reads else None, time.monotonic_ns()
        before, self._asked = self._asked or asked, asked
        if not reads:
            if self._since is not None:
                self.close()
        else:
            if self._since is None or sleeps != self._sleeps:  # the process worked in between, so this is a new wait
                self._over()
                # The wait began between two checks.
                self._since, self._sleeps, self._began = asked, sleeps, (before + asked) // 2
            self._seen = asked
            self._write(self._since, asked)
        self._next = now + (_EVERY_S if self._since is None else CLOSE_S)

    def close(self) -> None:
        """End the current wait, if there is one, and delete the file."""
        self._over()
        with contextlib.suppress(OSError):
            remove_file(self._path)

    def _over(self) -> None:
        if self._since is not None and self._seen - self._since >= _REPORTED_NS:
            self._tell(self._began, (self._seen + max(self._asked, self._seen)) // 2)
        self._since = None

    def _write(self, since: int, seen: int) -> None:
        """Overwrite the old content with one of the same length. This is a single write: a reader sees old or new."""
        flags = os.O_WRONLY | os.O_CREAT
        with contextlib.suppress(OSError):
            fd = open_file(self._path, flags)
            with open(fd, "wb", buffering=0) as file:
                file.write(b"%020d %020d" % (since, seen))  # on a full disk the wait is not reported
