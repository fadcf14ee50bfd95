"""Slow jobs of the screen: saving a picture, looking for findings. This module has no widgets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from dpmon.errors import DpmonError
from dpmon.model.findings.finding import Finding

_MAX_NAMES = 100
# In a process of its own at a lower priority: millions of records would block the screen's thread.
_FINDINGS = """\
import json, os, sys
from pathlib import Path
os.nice(10)
from dpmon.report.report_data import collect_report_data
print(json.dumps(collect_report_data(Path(sys.argv[1])).findings))
"""
_IMPORT_DIRECTORY = str(Path(__file__).resolve().parent.parent.parent)


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


def read_findings(directory: Path) -> list[Finding]:
    """Return the findings of the run, the most important first. Raises JobError."""
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _FINDINGS, str(directory.absolute())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # Not in the user's directory: one of their files may be called dpmon.py.
            cwd="/",
            env={**os.environ, "PYTHONPATH": _IMPORT_DIRECTORY},
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise JobError(f"the findings cannot be started: {error.strerror}") from None
    if completed.returncode:
        last_line = completed.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise JobError(f"the findings failed: {last_line or f'status {completed.returncode}'}")
    return [Finding(*fields) for fields in json.loads(completed.stdout)]
