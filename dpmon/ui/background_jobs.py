"""Slow jobs of the screen: saving a screenshot. This module has no widgets."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from dpmon.errors import DpmonError

_MAX_NAMES = 100


class JobError(DpmonError):
    """A failed job; the text is one sentence for the user."""


def save_text(text: str, name: str, extension: str, directory: Path) -> str:
    """Write `text` to the first free path `NAME-HHMMSS.EXTENSION` and return its path for the screen.

    It lies in the current directory or, if that is not writable, in the run's `directory`. Raises JobError.
    """
    stamp = time.strftime("%H%M%S")
    problem = "too many files with this name exist"
    for parent in (Path.cwd(), directory.absolute()):
        for attempt in range(_MAX_NAMES):
            suffix = f"-{attempt}" if attempt else ""
            path = parent / f"{name}-{stamp}{suffix}.{extension}"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            except OSError as error:
                problem = error.strerror or str(error)
                break
            try:
                with open(fd, "w", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise JobError(f"{format_path(path)} cannot be written: {error.strerror}") from None
            return format_path(path)
    raise JobError(f"cannot write to this directory: {problem}")


def format_path(path: Path) -> str:
    """Return a path for the screen, relative to the current directory if it lies there."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
