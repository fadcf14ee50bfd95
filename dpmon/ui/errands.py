"""What is done beside the screen and may take its time: saving a picture, exporting, stopping. No widget in here.

Files get a name that was free: nothing is ever overwritten. They go into the current directory or, where that cannot be
written, into the run's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ErrandError", "export", "new_file", "save", "stop"]

_TRIES = 100
# A process of its own, at a lower priority: an export of millions of records would take the screen's own thread.
_EXPORT = """\
import os, sys
from pathlib import Path
os.nice(10)
from dpmon.run.export import write_jsonl
write_jsonl(Path(sys.argv[1]), sys.stdout)
"""
_HOME = str(Path(__file__).resolve().parent.parent.parent)


class ErrandError(Exception):
    """It could not be done; the text is one sentence for a person."""


def new_file(name: str, ending: str, directory: Path) -> tuple[int, Path]:
    """A new file `NAME-HHMMSS.ENDING`, open for writing, and where it is. ErrandError if there is no place for it."""
    stamp = time.strftime("%H%M%S")
    problem = "no free name"
    for place in (Path.cwd(), directory):
        for number in range(_TRIES):
            path = place / f"{name}-{stamp}{f'-{number}' if number else ''}.{ending}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                return os.open(path, flags, 0o600), path
            except FileExistsError:
                continue
            except OSError as error:
                problem = error.strerror or str(error)
                break
    raise ErrandError(f"no file can be made: {problem}")


def shown(path: Path) -> str:
    """The path as short as it can be said here."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def save(text: str, name: str, ending: str, directory: Path) -> str:
    """Write `text` into a new file; where it is."""
    fd, path = new_file(name, ending, directory)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ErrandError(f"{shown(path)} cannot be written: {error.strerror}") from None
    return shown(path)


def export(directory: Path, name: str) -> str:
    """Write all records of the run into a new file, one JSON object a line; where it is and how many."""
    fd, path = new_file(name, "jsonl", directory)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _EXPORT, str(directory.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=subprocess.PIPE,
            # Not where the user is: a file of theirs may be called dpmon.py.
            cwd="/",
            env={**os.environ, "PYTHONPATH": _HOME},
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ErrandError(f"the export cannot be started: {error.strerror}") from None
    finally:
        os.close(fd)
    if done.returncode:
        path.unlink(missing_ok=True)
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ErrandError(f"the export failed: {last or f'status {done.returncode}'}")
    size = path.stat().st_size
    return f"{shown(path)} ({size / 1e6:.1f} MB)"


def stop(directory: Path) -> Iterator[str]:
    """Stop the whole run, telling how it goes."""
    from dpmon.run.stop import stop_run

    yield from stop_run(directory)
