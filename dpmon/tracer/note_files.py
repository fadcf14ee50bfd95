"""Appends lines from a training process to files of the run's directory.

Imports only modules that every Python has already loaded, because processes without torch import this module, too.
"""

from __future__ import annotations

import os
import stat
from time import monotonic_ns


def append_note(text: str, file: str = "stages.log") -> None:
    """Append a line to a file in the run's directory. For events before the ring exists; too slow for hot code."""
    directory = os.environ.get("DPMON_RUN")
    if directory:
        line = f"{os.getpid()} {monotonic_ns()} {text[:4096]}\n"  # the script's names may have any length
        try:  # noqa: SIM105 - contextlib is not loaded yet
            append_bytes(directory, file, line.encode("utf-8", "replace"))
        except Exception:  # noqa: BLE001 - a full disk or a deleted directory must not disturb the script
            pass


def append_bytes(directory: str, file: str, data: bytes, max_bytes: int = 1 << 62) -> bool:
    """Append `data` to a file in the run's directory; return whether all of it was written.

    Writes nothing if the file would become larger than `max_bytes` bytes, or if it is not a regular file.
    Raises OSError if the file cannot be opened.
    """
    fd = open_to_append(directory, file)
    try:
        return append_to(fd, data, max_bytes)
    finally:
        os.close(fd)


def open_to_append(directory: str, file: str) -> int:
    """Return a descriptor of a file in the run's directory. Raises OSError."""
    # As in dpmon.run.safe_files: do not wait for the reader of a FIFO, do not follow a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    return os.open(os.path.join(directory, file), flags, 0o600)


def append_to(fd: int, data: bytes, max_bytes: int) -> bool:
    """Append `data` to an open file; return whether all of it was written. `max_bytes`: see `append_bytes`."""
    from dpmon.span_ring import IgnoreFileSizeSignal  # imported here, because a process without torch does not need it

    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size + len(data) > max_bytes:
        return False
    with IgnoreFileSizeSignal():
        return os.write(fd, data) == len(data)
