"""Opens the files of a run: without blocking, without following a link, and only if they are regular files.

A FIFO in place of a log would block its reader; a link would lead out of the directory. Rings (`dpmon.span_ring`,
`dpmon.span_reader`) and the tracer's lines (`dpmon.tracer.note_files`) are opened in the same way elsewhere.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


def file_kind(mode: int) -> str:
    """Return the name of the file type in a mode (st_mode), with its article."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def not_regular_file_error(path: Path | str, mode: int) -> OSError:
    """Return the error for a path with this mode, which is not a regular file."""
    return OSError(errno.EINVAL, f"it is {file_kind(mode)}, not a regular file", str(path))


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file. Raises OSError for anything else.

    `flags`: as for os.open; a new file has mode 0600.
    """
    fd = os.open(path, flags | _SAFE_FLAGS, 0o600)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise not_regular_file_error(path, mode)
        os.set_blocking(fd, True)  # a script may get the file as its output, and expects blocking mode, as from a shell
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_atomically(path: Path, text: str) -> None:
    """Write a file of a run in one step: a reader gets the old or the new contents, never half of them."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def open_fifo(path: Path, flags: int) -> int:
    """Return a descriptor of a FIFO, without blocking. Raises OSError for anything else."""
    fd = os.open(path, flags | _SAFE_FLAGS)
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, f"it is {file_kind(mode)}, not a FIFO", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """Return the first `limit` bytes of a regular file. Raises OSError for anything else."""
    with open(open_file(path), "rb") as file:
        return file.read(limit)


def read_tail(path: Path, limit: int) -> bytes:
    """Return the last `limit` bytes of a regular file. Raises OSError for anything else."""
    with open(open_file(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit)


def read_new_lines(path: Path, offset: int, limit: int) -> bytes:
    """Return the complete lines after `offset` in a regular file; nothing if it cannot be read.

    Returns at most `limit` bytes; of a longer line, its beginning.
    """
    try:
        with open(open_file(path), "rb") as file:
            file.seek(offset)
            data = file.read(limit)
    except OSError:
        return b""
    return data if len(data) == limit and b"\n" not in data else data[: data.rfind(b"\n") + 1]


def check_database(path: Path, *, written: bool = False) -> None:
    """Raise OSError unless the existing files of an SQLite database are regular files.

    SQLite opens them itself and would wait for the writer of a FIFO. Raises FileNotFoundError if the database does not
    exist, unless it is to be `written`. In that case, a rollback journal is removed, because SQLite would delete any
    file that the journal names.
    """
    for suffix in ("", "-journal", "-wal", "-shm"):
        file = Path(f"{path}{suffix}")
        try:
            mode = file.lstat().st_mode
        except FileNotFoundError:
            if not suffix and not written:
                raise
            continue
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"{file.name} is {file_kind(mode)}, not a regular file", str(file))
        if written and suffix == "-journal":
            file.unlink()
