"""Slow jobs beside the screen: saving, exporting, reporting, comparing. This module has no widgets.

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
from dpmon.model.finding_text import Finding

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
from dpmon.report import report_text
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
    """A job failed; the text is one sentence for the user."""


def _create_file(name: str, ending: str, directory: Path, make: Callable[[Path], _Result]) -> tuple[Path, _Result]:
    """Call `make` with the first free path `NAME-HHMMSS.ENDING`; returns the path and its result. Raises JobError."""
    stamp = time.strftime("%H%M%S")
    problem = "too many files with this name exist"
    for place in (Path.cwd(), directory.absolute()):
        for number in range(_MAX_NAMES):
            path = place / f"{name}-{stamp}{f'-{number}' if number else ''}.{ending}"
            try:
                return path, make(path)
            except FileExistsError:
                continue
            except OSError as error:
                problem = error.strerror or str(error)
                break
    raise JobError(f"no file can be written here: {problem}")


def _open_new_file(path: Path) -> TextIO:
    return open(path, "x", encoding="utf-8", opener=partial(os.open, mode=0o600))


def format_path(path: Path) -> str:
    """A short form of the path for the screen."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def save_text(text: str, name: str, ending: str, directory: Path) -> str:
    """Write `text` into a new file; returns its path."""
    path, file = _create_file(name, ending, directory, _open_new_file)
    try:
        with file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise JobError(f"{format_path(path)} cannot be written: {error.strerror}") from None
    return format_path(path)


def export_records(directory: Path, name: str, form: str) -> str:
    """Write all records of the run in one of the formats of ENDINGS; returns path and size."""
    if form == "csv":
        path, _ = _create_file(name, ENDINGS[form], directory, lambda path: path.mkdir(0o700))
    else:
        path, file = _create_file(name, ENDINGS[form], directory, _open_new_file)
        file.close()
    try:
        _in_subprocess(_EXPORT, "the export", str(directory.absolute()), form, str(path))
    except JobError:
        with contextlib.suppress(OSError):
            path.rmdir() if form == "csv" else path.unlink()
        raise
    files = list(path.iterdir()) if form == "csv" else [path]
    size = sum(file.stat().st_size for file in files)
    return f"{format_path(path)}{f', {len(files)} tables' if form == 'csv' else ''} ({size / 1e6:.1f} MB)"


def render_report(directory: Path, width: int) -> list[str]:
    """The report on the run so far, in lines of at most `width` cells."""
    return _in_subprocess(_REPORT, "the report", str(directory.absolute()), str(width)).splitlines()


def render_comparison(before: Sequence[Path], after: Sequence[Path], width: int) -> list[str]:
    """What differs between the runs of two sides, in lines of at most `width` cells."""
    sides = json.dumps([[str(one.absolute()) for one in side] for side in (before, after)])
    return _in_subprocess(_COMPARISON, "the comparison", sides, str(width)).splitlines()


def read_findings(directory: Path) -> list[Finding]:
    """What is worth a look in the run, the most important first."""
    return [Finding(*each) for each in json.loads(_in_subprocess(_FINDINGS, "the findings", str(directory.absolute())))]


def _in_subprocess(code: str, what: str, *arguments: str) -> str:
    """Run `code` in its own process; returns its output."""
    try:
        done = subprocess.run(
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
        raise JobError(f"{what} cannot be started: {error.strerror}") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise JobError(f"{what} failed: {last or f'status {done.returncode}'}")
    return done.stdout.decode("utf-8", "replace")
