"""Writes files of the run's directory from a training process.

Imports only modules that every Python has already loaded, because processes without torch import this module, too.
"""

from __future__ import annotations

import os
from time import monotonic_ns


def append_note(text: str, file: str = "stages.log") -> None:
    """Append a line to a file in the run's directory. For events before the ring exists; too slow for hot code."""
    directory = os.environ.get("DPMON_RUN")
    if directory:
        line = f"{os.getpid()} {monotonic_ns()} {text[:4096]}\n"  # the script's names may have any length
        try:  # noqa: SIM105 - contextlib is not loaded yet
            write_file(directory, file, line.encode("utf-8", "replace"), os.O_APPEND)
        except Exception:  # noqa: BLE001 - a full disk or a deleted directory must not disturb the script
            pass


def write_file(directory: str, file: str, data: bytes, flag: int) -> None:
    """Write to a file in the run's directory. `flag`: os.O_APPEND or os.O_TRUNC. Raises OSError."""
    fd = open_file(directory, file, flag)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def open_file(directory: str, file: str, flag: int) -> int:
    """Return a descriptor of a file in the run's directory, for writing. Raises OSError."""
    # As in dpmon.run.safe_files: do not wait for the reader of a FIFO, do not follow a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | flag
    return os.open(os.path.join(directory, file), flags, 0o600)
