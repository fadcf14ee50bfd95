"""Runs a script with and without dpmon for comparison, and allows for what torch varies on its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from support.preloaded_python import ForkedScript
from support.run_harness import LONG, Dpmon

ROOT = Path(__file__).resolve().parents[2]
SCRIPT_LIMIT_S = 250.0
# With several threads, the last bit of a sum may vary. Unbuffered, because dpmon switches buffering off.
REPRODUCIBLE = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


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

        A script runs in a fork of a Python with torch (`preload_python`), or with `fresh`, in a fresh interpreter.
        """
        self._empty()
        outcome = self.plainly(*words, stdin=stdin, fresh=fresh)
        return replace(outcome, files=self._files())

    def plainly(self, *words: object, stdin: int = subprocess.DEVNULL, fresh: bool = False) -> Outcome:
        """Run the same in the present directory, without comparing files."""
        argv, env = [str(word) for word in words], self.dpmon.environment(REPRODUCIBLE)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open("/dev/null") as null:
            process: subprocess.Popen[bytes] | ForkedScript
            if fresh or LONG or argv[0].startswith("-") or self.dpmon.python != sys.executable:
                process = subprocess.Popen(
                    [self.dpmon.python, *argv],
                    cwd=self.dpmon.cwd, env=env, stdin=stdin, stdout=out, stderr=err, start_new_session=True,
                )  # fmt: skip
            else:
                fds = [null.fileno() if stdin == subprocess.DEVNULL else stdin, out.fileno(), err.fileno()]
                process = ForkedScript(argv, self.dpmon.cwd, env, fds, start_new_session=True)
            try:
                status = process.wait(SCRIPT_LIMIT_S)
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
            env=REPRODUCIBLE,
            limit=SCRIPT_LIMIT_S,
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


def records_of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind."""
    return [record for record in records if record["kind"] == kind]


# ------------------------------------------------------------------------------------------------ what torch varies

MAX_BASELINE_RUNS = 20
"""Runs without dpmon before a difference counts as dpmon's; an equal result needs none of them."""
T = TypeVar("T")


def closest_baseline(found: T, alone: T, again: Callable[[], T], tries: int = MAX_BASELINE_RUNS) -> T:
    """Return a result without dpmon to compare with `found`: `alone`, or one of up to `tries` runs of `again`.

    Prefer one that equals `found`. If none does, return `alone`, so that the test shows the difference.
    """
    if found == alone:
        return alone
    return next((another for another in (again() for _ in range(tries)) if another == found), alone)


Ended = TypeVar("Ended")
ABORTED = "terminate called without an active exception"
"""What a process of gloo prints if it aborts at its end."""


def run_unless_aborted(
    run: Callable[[int], Ended], output: Callable[[Ended], str], *, sign: str = ABORTED, tries: int = 6
) -> Ended:
    """Return the first result of `run` without `sign` in its `output`; the last one after all `tries`.

    `run` gets the number of the try, because the file in which ranks meet can be used only once.
    """
    for number in range(tries):
        ended = run(number)
        if sign not in output(ended):
            break
        print(f"try {number + 1} was ended by torch")
    return ended
