"""Slow jobs of the screen: saving, exporting, reporting, comparing. This module has no widgets.

Files get a free name, so nothing is ever overwritten. They go into the current directory or, if that is not writable,
into the run's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

from dpmon.errors import DpmonError
from dpmon.model.findings.finding import Finding

_Result = TypeVar("_Result")

_MAX_NAMES = 100
# They run in a process of their own at a lower priority: millions of records would block the screen's thread.
_PREAMBLE = """\
import json, os, sys
from pathlib import Path
os.nice(10)
sys.stdout.reconfigure(encoding="utf-8", errors="replace")
"""
_EXPORT = "from dpmon.export import export; export(Path(sys.argv[1]), sys.argv[2], sys.argv[3])"
_REPORT = """\
from dpmon.report.plain_text import report_text
print("\\n".join(report_text(Path(sys.argv[1]), int(sys.argv[2]))))
"""
_COMPARISON = """\
from dpmon.report.comparison_report import comparison_text
before, after = ([Path(one) for one in side] for side in json.loads(sys.argv[1]))
print("\\n".join(comparison_text(before, after, int(sys.argv[2]))))
"""
_FINDINGS = """\
from dpmon.report.report_data import collect_report_data
print(json.dumps(collect_report_data(Path(sys.argv[1])).findings))
"""
ENDINGS = {"jsonl": "jsonl", "csv": "csv", "perfetto": "trace.json"}
"""The ending of an export's file name, by format; csv is a directory of tables."""
_IMPORT_DIRECTORY = str(Path(__file__).resolve().parent.parent.parent)


class JobError(DpmonError):
    """A failed job; the text is one sentence for the user."""


def _create_file(name: str, extension: str, directory: Path, make: Callable[[Path], _Result]) -> tuple[Path, _Result]:
    """Call `make` with the first free path `NAME-HHMMSS.EXTENSION`.

    Return the path and the result of `make`. Raises JobError.
    """
    stamp = time.strftime("%H%M%S")
    problem = "too many files with this name exist"
    for parent in (Path.cwd(), directory.absolute()):
        for attempt in range(_MAX_NAMES):
            suffix = f"-{attempt}" if attempt else ""
            path = parent / f"{name}-{stamp}{suffix}.{extension}"
            try:
                return path, make(path)
            except FileExistsError:
                continue
            except OSError as error:
                problem = error.strerror or str(error)
                break
    raise JobError(f"cannot write to this directory: {problem}")


def _open_new_file(path: Path) -> TextIO:
    return open(path, "x", encoding="utf-8", opener=partial(os.open, mode=0o600))


def format_path(path: Path) -> str:
    """Return a path for the screen, relative to the current directory if it lies there."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def save_text(text: str, name: str, extension: str, directory: Path) -> str:
    """Write `text` to a new file and return its path for the screen. Raises JobError."""
    path, file = _create_file(name, extension, directory, _open_new_file)
    try:
        with file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise JobError(f"{format_path(path)} cannot be written: {error.strerror}") from None
    return format_path(path)


def export_records(directory: Path, name: str, file_format: str) -> str:
    """Export all records of the run to a new file in one of the formats of ENDINGS.

    Return its path and size. Raises JobError.
    """
    if file_format == "csv":
        path, _ = _create_file(name, ENDINGS[file_format], directory, lambda path: path.mkdir(0o700))
    else:
        path, file = _create_file(name, ENDINGS[file_format], directory, _open_new_file)
        file.close()
    try:
        _in_subprocess(_EXPORT, "the export", str(directory.absolute()), file_format, str(path))
    except JobError:
        with contextlib.suppress(OSError):
            path.rmdir() if file_format == "csv" else path.unlink()
        raise
    files = list(path.iterdir()) if file_format == "csv" else [path]
    size = sum(file.stat().st_size for file in files)
    tables = f", {len(files)} tables" if file_format == "csv" else ""
    return f"{format_path(path)}{tables} ({size / 1e6:.1f} MB)"


def render_report(directory: Path, width: int) -> list[str]:
    """Return the report on the run so far, in lines of at most `width` cells. Raises JobError."""
    return _in_subprocess(_REPORT, "the report", str(directory.absolute()), str(width)).splitlines()


def render_comparison(side_a: Sequence[Path], side_b: Sequence[Path], width: int) -> list[str]:
    """Return the comparison of two sets of runs, in lines of at most `width` cells. Raises JobError."""
    sides = json.dumps([[str(run_directory.absolute()) for run_directory in side] for side in (side_a, side_b)])
    return _in_subprocess(_COMPARISON, "the comparison", sides, str(width)).splitlines()


def read_findings(directory: Path) -> list[Finding]:
    """Return the findings of the run, the most important first. Raises JobError."""
    return [
        Finding(*fields) for fields in json.loads(_in_subprocess(_FINDINGS, "the findings", str(directory.absolute())))
    ]


def _in_subprocess(code: str, job_name: str, *arguments: str) -> str:
    """Run `code` in a process of its own and return its output.

    Raises JobError. `job_name`: the subject of error messages.
    """
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _PREAMBLE + code, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # Not in the user's directory: one of their files may be called dpmon.py.
            cwd="/",
            env={**os.environ, "PYTHONPATH": _IMPORT_DIRECTORY},
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise JobError(f"{job_name} cannot be started: {error.strerror}") from None
    if completed.returncode:
        last_line = completed.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise JobError(f"{job_name} failed: {last_line or f'status {completed.returncode}'}")
    return completed.stdout.decode("utf-8", "replace")
