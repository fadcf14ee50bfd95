"""What is done beside the screen and may take its time: saving, exporting, reporting. No widget in here.

Files get a name that was free: nothing is ever overwritten. They go into the current directory or, where that cannot be
written, into the run's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dpmon.errors import DpmonError

Made = TypeVar("Made")

_TRIES = 100
# Processes of their own, at a lower priority: millions of records would take the screen's own thread.
_EXPORT = """\
import os, sys
from pathlib import Path
os.nice(10)
from dpmon.export import export
export(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
"""
_REPORT = """\
import os, sys
from pathlib import Path
os.nice(10)
from dpmon.report import report_text
sys.stdout.reconfigure(encoding="utf-8", errors="replace")
print("\\n".join(report_text(Path(sys.argv[1]), int(sys.argv[2]))))
"""
ENDINGS = {"jsonl": "jsonl", "csv": "csv", "perfetto": "trace.json"}
"""How the name of an export ends, by its form; csv is a directory of tables."""
_HOME = str(Path(__file__).resolve().parent.parent.parent)


class ErrandError(DpmonError):
    """It could not be done; the text is one sentence for a person."""


def _new(name: str, ending: str, directory: Path, make: Callable[[Path], Made]) -> tuple[Made, Path]:
    """What `make` makes of the first free name `NAME-HHMMSS.ENDING`; ErrandError if there is no place for it."""
    stamp = time.strftime("%H%M%S")
    problem = "no free name"
    for place in (Path.cwd(), directory.absolute()):
        for number in range(_TRIES):
            path = place / f"{name}-{stamp}{f'-{number}' if number else ''}.{ending}"
            try:
                return make(path), path
            except FileExistsError:
                continue
            except OSError as error:
                problem = error.strerror or str(error)
                break
    raise ErrandError(f"no file can be made: {problem}")


def _file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def shown(path: Path) -> str:
    """The path as short as it can be said here."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def save(text: str, name: str, ending: str, directory: Path) -> str:
    """Write `text` into a new file; where it is."""
    fd, path = _new(name, ending, directory, _file)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ErrandError(f"{shown(path)} cannot be written: {error.strerror}") from None
    return shown(path)


def export(directory: Path, name: str, form: str) -> str:
    """Write all records of the run in one of the forms of ENDINGS; where they are and how much it is."""
    if form == "csv":
        _, path = _new(name, ENDINGS[form], directory, lambda path: path.mkdir(mode=0o700))
    else:
        fd, path = _new(name, ENDINGS[form], directory, _file)
        os.close(fd)
    try:
        _beside(_EXPORT, "the export", str(directory.absolute()), form, str(path))
    except ErrandError:
        with contextlib.suppress(OSError):
            path.rmdir() if form == "csv" else path.unlink()
        raise
    files = list(path.iterdir()) if form == "csv" else [path]
    size = sum(file.stat().st_size for file in files)
    return f"{shown(path)}{f', {len(files)} tables' if form == 'csv' else ''} ({size / 1e6:.1f} MB)"


def report(directory: Path, width: int) -> list[str]:
    """What happened in the run so far, in lines of at most `width` cells."""
    return _beside(_REPORT, "the report", str(directory.absolute()), str(width)).splitlines()


def _beside(code: str, what: str, *arguments: str) -> str:
    """Run `code` in a process of its own; what it prints."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # Not where the user is: a file of theirs may be called dpmon.py.
            cwd="/",
            env={**os.environ, "PYTHONPATH": _HOME},
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise ErrandError(f"{what} cannot be started: {error.strerror}") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ErrandError(f"{what} failed: {last or f'status {done.returncode}'}")
    return done.stdout.decode("utf-8", "replace")
