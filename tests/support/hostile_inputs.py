"""Damaged records, and file types that a test puts where a regular file is expected."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

# ------------------------------------------------------------------------------------------------ file types


def _device(path: Path) -> None:
    # A new device node, so that a faulty check does not replace the machine's null device.
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.close(os.open(path, os.O_WRONLY))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")


def _block_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(240, 0))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")


def _link(path: Path) -> None:
    target = path.with_name("precious")
    target.write_text("precious")
    path.symlink_to(target)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket may have at most 107 bytes
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


FILE_TYPES: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a symbolic link": _link,
    "a device": _device,
    "a block device": _block_device,
    "a directory": Path.mkdir,
    "a socket": _socket,
}
"""The function that makes each type, by name."""


def create_file_of_type(kind: str, path: Path) -> None:
    """Replace `path` by one of FILE_TYPES."""
    path.unlink(missing_ok=True)
    FILE_TYPES[kind](path)


def file_identity(path: Path) -> tuple[int, ...]:
    """Return values that change if another file replaces the file."""
    info = os.lstat(path)
    return info.st_dev, info.st_ino, info.st_mode, info.st_rdev


def fill_disk(directory: Path) -> None:
    """Fill the disk of a directory by a file `hog`."""
    with open(directory / "hog", "wb", buffering=0) as hog, contextlib.suppress(OSError):
        while True:
            hog.write(bytes(4096))
