"""Opens the files of a run without waiting and without following links, because other programs may have replaced them.

A run's directory may come from another person, or change during the run. A FIFO in the place of a log would block its
reader; a link would lead out of the directory. So the files of a run are opened here. Three kinds of access have checks
of their own: rings (`dpmon.span_ring`, `dpmon.span_reader`), the tracer's lines (`dpmon.tracer.note_files`), and the
database, which SQLite opens (`check_database`).
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)
_DATABASE_PARTS = ("", "-journal", "-wal", "-shm")


def file_kind(mode: int) -> str:
    """The name of the file type in this mode (st_mode)."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def not_regular_file_error(path: Path | str, mode: int) -> OSError:
    """The error for a path that is not a regular file but has this mode."""
    return OSError(errno.EINVAL, f"it is {file_kind(mode)}, not a regular file", str(path))


def open_file(path: Path, flags: int = os.O_RDONLY, *, anyone: bool = False) -> int:
    """A descriptor of a regular file of this user (with `anyone`: of any user), without waiting.

    `flags`: as for os.open; a new file has mode 0600. Without `anyone`, a file opened for writing must not have a
    second name (a hard link), because that name could be outside the run. Raises OSError for anything else.
    """
    with open_directory(path.parent, linked=anyone) as place:
        try:  # check before opening, because opening some devices has side effects
            _check_file(path, os.stat(path.name, dir_fd=place, follow_symlinks=False), flags, anyone)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        fd = os.open(path.name, flags & ~os.O_TRUNC | _SAFE, 0o600, dir_fd=place)
    try:
        _check_file(path, os.fstat(fd), flags, anyone)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)  # a script may get the file as its output, and expects blocking mode, as from a shell
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def open_directory(directory: Path, *, linked: bool = False) -> Iterator[int]:
    """A descriptor (O_PATH) of a directory, which must not be a link unless `linked`."""
    # The directory itself may be replaced while a run goes on, and a link in its place would lead elsewhere.
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if linked else os.O_NOFOLLOW))
    try:
        yield fd
    finally:
        os.close(fd)


def remove_file(path: Path) -> None:
    """Delete a file of a run, of any file type; OSError if that fails, FileNotFoundError if it does not exist."""
    with open_directory(path.parent) as place:
        os.unlink(path.name, dir_fd=place)


def write_atomically(path: Path, text: str) -> None:
    """Write a file of a run in one step: a reader gets the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        with open_directory(path.parent) as place:
            os.replace(temporary.name, path.name, src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_file(temporary)
        raise


def _check_file(path: Path, info: os.stat_result, flags: int, anyone: bool) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise not_regular_file_error(path, info.st_mode)
    if anyone:
        return
    if info.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if flags & (os.O_WRONLY | os.O_RDWR) and info.st_nlink > 1:
        raise PermissionError(errno.EPERM, "it has a second name (a hard link)", str(path))


def open_fifo(path: Path, flags: int) -> int:
    """A descriptor of a FIFO of this user, without waiting; OSError for anything else."""
    with open_directory(path.parent) as place:
        fd = os.open(path.name, flags | _SAFE, dir_fd=place)
    info = os.fstat(fd)
    if stat.S_ISFIFO(info.st_mode) and info.st_uid == os.getuid() and info.st_nlink == 1:
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, f"it is {file_kind(info.st_mode)}, not a FIFO that belongs to you", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a regular file; OSError for anything else."""
    return _read(path, limit, at_end=False)


def read_tail(path: Path, limit: int) -> bytes:
    """The last `limit` bytes of a regular file; OSError for anything else."""
    return _read(path, limit, at_end=True)


def _read(path: Path, limit: int, *, at_end: bool) -> bytes:
    with open(open_file(path), "rb") as file:
        if at_end:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit)


def check_database(path: Path, *, written: bool = False) -> None:
    """Raise OSError unless the existing files of an SQLite database are regular files of this user.

    SQLite opens them itself and would wait for the writer of a FIFO. FileNotFoundError if the database does not exist
    and is not `written`. If it is, a rollback journal is removed: SQLite would delete any file that the journal names.
    """
    with open_directory(path.parent) as place:
        for part in _DATABASE_PARTS:
            name = Path(f"{path}{part}")
            try:
                info = os.stat(name.name, dir_fd=place, follow_symlinks=False)
            except FileNotFoundError:
                if not part and not written:
                    raise
                continue
            # SQLite writes the other files for readers, too.
            _check_file(name, info, os.O_RDWR if written or part else os.O_RDONLY, False)
            if written and part == "-journal":
                os.unlink(name.name, dir_fd=place)
