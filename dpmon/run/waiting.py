"""Whether the command waits in a read of its standard input, which looks like nothing at all from everywhere else.

The kernel says in which system call a process sleeps (proc(5), /proc/pid/syscall), to whoever may trace it: the
supervisor, whose child it is, nearly always; a screen on a hardened machine not. A wait in anything else than read(2),
such as a select by a library for prompts, cannot be told from other work.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

__all__ = ["FILE", "InputWatch", "reads_input", "waits_since"]

FILE = "waits-for-input"
"""There while it waits; since when (monotonic ns) is in it."""
_READ_CALL = {"x86_64": 0, "aarch64": 63, "riscv64": 63, "ppc64le": 3, "s390x": 3}.get(os.uname().machine)
"""The number of read(2), by machine (syscalls(2) and the kernel's tables)."""
_EVERY_S = 1.0


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
    text = _read(directory / FILE)
    return int(text) if text.isdigit() else None


def _read(path: Path) -> bytes:
    """The first bytes of a regular file, none of anything else; it never blocks, as a screen asks for each picture."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(fd, 64) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


class InputWatch:
    """Keeps that file."""

    def __init__(self, directory: Path, pid: int) -> None:
        self._path = directory / FILE
        self._pid = pid
        self._waits = False
        self._next = 0.0
        self.close()  # what a supervisor that was killed has left

    def look(self, now: float) -> None:
        """Once a second: ask, and write if it is not as it was. `now` monotonic, in s."""
        if now < self._next:
            return
        self._next = now + _EVERY_S
        waits = reads_input(self._pid) is True
        if waits and not self._waits:
            self._write()
        elif self._waits and not waits:
            self.close()
        self._waits = waits

    def close(self) -> None:
        """It waits no more."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _write(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):  # a full disk: it is not told
            fd = os.open(self._path, flags, 0o600)
            try:
                os.write(fd, b"%d" % time.monotonic_ns())
            finally:
                os.close(fd)
