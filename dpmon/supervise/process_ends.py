"""Notes how the processes of a run end: a process that a signal kills leaves no note of its own.

The command's own status is in exit.json. The status of any other process comes from the kernel, so it is noted only if
the process ends while this supervisor watches, and only if it is not 0.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

from dpmon.run import proc
from dpmon.run.activities import stages
from dpmon.run.files import open_file
from dpmon.run.first_failure import STATUSES
from dpmon.run.proc import open_pidfd, wait_status
from dpmon.run.signalling import is_named

LOOK_S = 0.2
"""Time between two searches for new processes."""
_MOST = 256
"""Most processes to watch at once."""


class ProcessEnds:
    """Watches each process of the run that has noted a stage. Every process that imports torch notes one."""

    def __init__(self, directory: Path, command: int, poller: select.poll) -> None:
        """`poller`: the supervisor waits with it, and calls `note` when it wakes."""
        self._directory = directory
        self._poller = poller
        self._known = {command}
        self._watched: dict[int, tuple[int, float | None]] = {}
        """By descriptor: process id and start of each watched process."""
        self._look_at = 0.0
        self._size = -1

    def close(self) -> None:
        """Note the last ends, and watch no longer."""
        self.note()
        for fd in [*self._watched]:
            self._forget(fd)

    def look(self, now: float) -> None:
        """Look for new processes from time to time."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        try:
            size = (self._directory / "stages.log").lstat().st_size
        except OSError:
            return
        if size == self._size:
            return
        self._size = size
        for pid in stages(self._directory).keys() - self._known:
            if len(self._watched) >= _MOST:
                break
            self._known.add(pid)
            # A number in a file proves nothing: a process belongs to the run only if its environment names the run.
            if (fd := open_pidfd(pid)) is None:
                continue
            self._watched[fd] = pid, proc.started(pid)
            if is_named(pid, self._directory):
                self._poller.register(fd, select.POLLIN)
            else:
                self._forget(fd)

    def note(self) -> None:
        """Note the watched processes that have ended."""
        at_ns = time.monotonic_ns()
        for fd in [fd for fd, _ in self._poller.poll(0) if fd in self._watched]:
            pid, started = self._watched[fd]
            status = proc.status_of_dead(pid, started)
            status = wait_status(fd) if status is None else status
            self._forget(fd)
            if status:
                with contextlib.suppress(OSError):
                    log = open_file(self._directory / STATUSES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    with open(log, "ab") as file:
                        file.write(b"%d %d %d\n" % (pid, at_ns, os.waitstatus_to_exitcode(status)))

    def _forget(self, fd: int) -> None:
        del self._watched[fd]
        with contextlib.suppress(KeyError):
            self._poller.unregister(fd)
        os.close(fd)
