"""Runs a script with and without dpmon in the same directory, for comparison."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from running import Dpmon
from sizes import LONG
from warm import Forked

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 250.0
# With several threads, the last bit of a sum may vary. Unbuffered, because dpmon switches buffering off.
SAME = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Outcome:
    """Exit status of a command (128 + N for a signal), its output, and the files that it made, by name."""

    status: int
    stdout: bytes
    stderr: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)


class SideBySide:
    """Runs scripts in a working directory that is empty at first, always with the same name."""

    def __init__(self, dpmon: Dpmon) -> None:
        self.dpmon = dpmon

    def alone(self, *words: object, stdin: int = subprocess.DEVNULL, fresh: bool = False) -> Outcome:
        """Run the Python command `words` without dpmon.

        A script runs in a fork of a Python with torch (see `warm`), or with `fresh`, in a fresh interpreter.
        """
        self._empty()
        outcome = self.plainly(*words, stdin=stdin, fresh=fresh)
        return replace(outcome, files=self._files())

    def plainly(self, *words: object, stdin: int = subprocess.DEVNULL, fresh: bool = False) -> Outcome:
        """Run the same in the present directory, without comparing files."""
        argv, env = [str(word) for word in words], self.dpmon.environment(SAME)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open("/dev/null") as null:
            process: subprocess.Popen[bytes] | Forked
            if fresh or LONG or argv[0].startswith("-") or self.dpmon.python != sys.executable:
                process = subprocess.Popen(
                    [self.dpmon.python, *argv],
                    cwd=self.dpmon.cwd, env=env, stdin=stdin, stdout=out, stderr=err, start_new_session=True,
                )  # fmt: skip
            else:
                fds = [null.fileno() if stdin == subprocess.DEVNULL else stdin, out.fileno(), err.fileno()]
                process = Forked(argv, self.dpmon.cwd, env, fds, start_new_session=True)
            try:
                status = process.wait(LIMIT_S)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            return Outcome(status if status >= 0 else 128 - status, out.read(), err.read())

    def under(self, *words: object, options: tuple[object, ...] = (), fresh: bool = False, **more: Any) -> Outcome:
        """Run the same under `dpmon --headless`; leave out dpmon's own lines on stderr."""
        python = ("--python", self.dpmon.python) if fresh else self.dpmon.warm() or ("--python", self.dpmon.python)
        for run in self.dpmon.runs():
            shutil.rmtree(run)
        self._empty()
        result = self.dpmon.run(
            "--headless",
            *python,
            *options,
            *words,
            env=SAME,
            limit=LIMIT_S,
            **more,
        )
        assert self.dpmon.runs(), result.errors
        stderr = (self.dpmon.last() / "stderr.log").read_bytes()
        return Outcome(result.status, result.out, stderr, self._files())

    def _empty(self) -> None:
        shutil.rmtree(self.dpmon.cwd)
        self.dpmon.cwd.mkdir()

    def _files(self) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for path in sorted(self.dpmon.cwd.rglob("*")):
            with contextlib.suppress(IsADirectoryError):
                found[str(path.relative_to(self.dpmon.cwd))] = path.read_bytes()
        return found


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind."""
    return [record for record in records if record["kind"] == kind]
