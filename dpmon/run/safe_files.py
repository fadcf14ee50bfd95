"""Opens a run's files without blocking and without following links: another program may have replaced them.

A run's directory may come from another person, or change during the run. A FIFO in place of a log would block its
reader; a link would lead out of the directory. So the files of a run are opened here. Three kinds of files have checks
of their own: rings (`dpmon.span_ring`, `dpmon.span_reader`), the tracer's lines (`dpmon.tracer.note_files`), and the
database, which SQLite opens (`check_database`).
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)
_DATABASE_SUFFIXES = ("", "-journal", "-wal", "-shm")


def file_kind(mode: int) -> str:
    """Return the name of the file type in a mode (st_mode), with its article."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def not_regular_file_error(path: Path | str, mode: int) -> OSError:
    """Return the error for a path with this mode, which is not a regular file."""
    return OSError(errno.EINVAL, f"it is {file_kind(mode)}, not a regular file", str(path))


def open_file(path: Path, flags: int = os.O_RDONLY, *, any_owner: bool = False) -> int:
    """Return a descriptor of a regular file of this user (with `any_owner`: of any user), without blocking.

    `flags`: as for os.open; a new file has mode 0600. Without `any_owner`, a file opened for writing must not have a
    second name (a hard link), because that name could be outside the run. Raises OSError for anything else.
    """
    with open_directory(path.parent, allow_link=any_owner) as directory_fd:
        try:  # check before opening, because opening some devices has side effects
            _check_file(
                path, os.stat(path.name, dir_fd=directory_fd, follow_symlinks=False), flags, any_owner=any_owner
            )
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        fd = os.open(path.name, flags & ~os.O_TRUNC | _SAFE_FLAGS, 0o600, dir_fd=directory_fd)
    try:
        _check_file(path, os.fstat(fd), flags, any_owner=any_owner)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)  # a script may get the file as its output, and expects blocking mode, as from a shell
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def open_directory(directory: Path, *, allow_link: bool = False) -> Iterator[int]:
    """Open a descriptor (O_PATH) of a directory, which must not be a link unless `allow_link`."""
    # The directory itself may be replaced during the run, and a link in its place would lead elsewhere.
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if allow_link else os.O_NOFOLLOW))
    try:
        yield fd
    finally:
        os.close(fd)


def remove_file(path: Path) -> None:
    """Delete a file of a run, of any file type. Raises OSError if that fails."""
    with open_directory(path.parent) as directory_fd:
        os.unlink(path.name, dir_fd=directory_fd)


def write_atomically(path: Path, text: str) -> None:
    """Write a file of a run in one step: a reader gets the old or the new contents, never half of them."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        with open_directory(path.parent) as directory_fd:
            os.replace(temporary.name, path.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_file(temporary)
        raise


def _check_file(path: Path, file_stat: os.stat_result, flags: int, *, any_owner: bool) -> None:
    if not stat.S_ISREG(file_stat.st_mode):
        raise not_regular_file_error(path, file_stat.st_mode)
    if any_owner:
        return
    if file_stat.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if flags & (os.O_WRONLY | os.O_RDWR) and file_stat.st_nlink > 1:
        raise PermissionError(errno.EPERM, "it has a second name (a hard link)", str(path))


def open_fifo(path: Path, flags: int) -> int:
    """Return a descriptor of a FIFO of this user, without blocking. Raises OSError for anything else."""
    with open_directory(path.parent) as directory_fd:
        fd = os.open(path.name, flags | _SAFE_FLAGS, dir_fd=directory_fd)
    file_stat = os.fstat(fd)
    if stat.S_ISFIFO(file_stat.st_mode) and file_stat.st_uid == os.getuid() and file_stat.st_nlink == 1:
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, f"it is {file_kind(file_stat.st_mode)}, not a FIFO that belongs to you", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """Return the first `limit` bytes of a regular file. Raises OSError for anything else."""
    return _read(path, limit, at_end=False)


def read_tail(path: Path, limit: int) -> bytes:
    """Return the last `limit` bytes of a regular file. Raises OSError for anything else."""
    return _read(path, limit, at_end=True)


def _read(path: Path, limit: int, *, at_end: bool) -> bytes:
    with open(open_file(path), "rb") as file:
        if at_end:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit)


def check_database(path: Path, *, written: bool = False) -> None:
    """Raise OSError unless the existing files of an SQLite database are regular files of this user.

    SQLite opens them itself and would wait for the writer of a FIFO. Raises FileNotFoundError if the database does not
    exist, unless it is to be `written`. In that case, a rollback journal is removed, because SQLite would delete any
    file that the journal names.
    """
    with open_directory(path.parent) as directory_fd:
        for suffix in _DATABASE_SUFFIXES:
            file = Path(f"{path}{suffix}")
            try:
                file_stat = os.stat(file.name, dir_fd=directory_fd, follow_symlinks=False)
            except FileNotFoundError:
                if not suffix and not written:
                    raise
                continue
            # SQLite writes the other files for readers, too.
            _check_file(file, file_stat, os.O_RDWR if written or suffix else os.O_RDONLY, any_owner=False)
            if written and suffix == "-journal":
                os.unlink(file.name, dir_fd=directory_fd)
