"""Whether the command waits in a read of its standard input, which looks like nothing at all from everywhere else.

The kernel says in which system call a process sleeps (proc(5), /proc/pid/syscall), to whoever may trace it: the
supervisor, whose child it is, nearly always; a screen on a hardened machine not. A wait in anything else than read(2),
such as a select by a library for prompts, cannot be told from other work.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from dpmon.run.files import open_file, read_file, remove_file

FILE = "waits-for-input"
"""There while it waits; since when, and when that was last so (monotonic ns, both of 20 digits), is in it."""
_READ_CALL = {"x86_64": 0, "aarch64": 63, "riscv64": 63, "ppc64le": 3, "s390x": 3}.get(os.uname().machine)
"""The number of read(2), by machine (syscalls(2) and the kernel's tables)."""
_EVERY_S = 0.2
CLOSE_S = 0.05
"""Seconds between two checks, normally and during a wait. They are the precision of a wait's begin and end."""
_TOLD_NS = 1_000_000_000
"""Shortest wait that is reported, once it is over."""
_TRUE_NS = 10_000_000_000
"""How long the file's contents are valid: a supervisor that was stopped or killed leaves the file behind."""


def reads_input(pid: int) -> bool | None:
    """Whether the process's first thread sleeps in a read of descriptor 0; None if that cannot be known."""
    if _READ_CALL is None:
        return None
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text("ascii", "replace").split()
    except OSError:
        return None
    return len(fields) > 2 and fields[0] == str(_READ_CALL) and fields[1] == "0x0"


def waits_since(directory: Path) -> int | None:
    """Since when (monotonic ns) the command of a run waits for input, by what its supervisor saw; None: it does not."""
    try:
        fields = read_file(directory / FILE, 64).split()
    except OSError:
        return None
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    since, seen = map(int, fields)
    return since if since <= seen and 0 <= time.monotonic_ns() - seen < _TRUE_NS else None


def _sleeps(pid: int) -> str | None:
    """How often the process's first thread has gone to sleep so far, in the kernel's words; None if not known."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return line
    return None


class InputWatch:
    """Maintains that file; calls `tell` with the begin and end (ns) of each wait that is over."""

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
        self.close()  # what a supervisor that was killed has left

    def look(self, now: float) -> None:
        """Ask, if it is time to, and write down what was found. `now` monotonic, in s."""
        if now < self._next:
            return
        reads = reads_input(self._pid) is True
        sleeps, asked = _sleeps(self._pid) if reads else None, time.monotonic_ns()
        before, self._asked = self._asked or asked, asked
        if not reads:
            if self._since is not None:
                self.close()
        else:
            if self._since is None or sleeps != self._sleeps:  # the process worked in between: this is another wait
                self._over()
                # The wait began between two checks.
                self._since, self._sleeps, self._began = asked, sleeps, (before + asked) // 2
            self._seen = asked
            self._write(self._since, asked)
        self._next = now + (_EVERY_S if self._since is None else CLOSE_S)

    def close(self) -> None:
        """It waits no more."""
        self._over()
        with contextlib.suppress(OSError):
            remove_file(self._path)

    def _over(self) -> None:
        if self._since is not None and self._seen - self._since >= _TOLD_NS:
            self._tell(self._began, (self._seen + max(self._asked, self._seen)) // 2)
        self._since = None

    def _write(self, since: int, seen: int) -> None:
        """In one write over what is there, which is as long: a reader finds the old or the new."""
        flags = os.O_WRONLY | os.O_CREAT
        with contextlib.suppress(OSError):
            fd = open_file(self._path, flags)
            with open(fd, "wb", buffering=0) as file:
                file.write(b"%020d %020d" % (since, seen))  # on a full disk it is not told
