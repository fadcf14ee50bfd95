"""Runs a script in a Python with the tracer, as the supervisor starts it, and reads its records.

There is no command line and no supervisor, only the environment variables that they set. The script runs in a fork of a
Python with torch (`preloaded_python`), because the import takes longer than most scripts; or, with `fresh`, in a fresh
interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dpmon
from dpmon.record.history_rows import Definition, Row
from dpmon.record.record_types import Call, Event, Record, Step
from dpmon.record.shared_names import MODES
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError
from dpmon.store.span_source import SpanSource
from support.preloaded_python import PipedScript
from support.record_builders import RowReader
from support.run_harness import LONG

PACKAGE = Path(dpmon.__file__).resolve().parent
SITE = PACKAGE / "tracer" / "site"
LIMIT_S = 250.0
TRACED_SCRIPTS_PATH = {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "process" / "traced")}
"""The environment of scripts that import others of `traced/`."""
# One thread, because with several the last bit of a sum may vary; no byte code beside scripts that run once.
# OURS: the first part of the path of each file of dpmon (the name dpmon may also be that of the clone).
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "OURS": f"{PACKAGE}{os.sep}"}


@dataclass(frozen=True)
class TracedRun:
    """Exit status and output of a script, and its records (none if it ran without the tracer)."""

    status: int
    """As in subprocess: minus the signal's number if a signal ended it."""
    out: str
    err: str
    records: tuple[Record, ...]
    """Records of all processes, ring by ring."""
    missed: int
    unreadable: tuple[str, ...]
    """Rows that lack a definition."""
    warnings: tuple[str, ...]
    """Lines of warnings.log, without process and time."""
    stages: tuple[str, ...]
    directory: Path

    @property
    def printed(self) -> Any:
        """Return the JSON in the last line of its output."""
        assert self.status == 0, self.err
        return json.loads(self.out.splitlines()[-1])

    @property
    def processes(self) -> list[int]:
        """Return the numbers of the processes with a ring."""
        return sorted({event.data["process"] for event in self.events("process")})

    def process_of(self, pid: int) -> int:
        """Return the number of the process with `pid`."""
        (event,) = [event for event in self.events("process") if event.data["pid"] == pid]
        return int(event.data["process"])

    def calls(self, root: str | None = None, process: int | None = None) -> list[Call]:
        """Return the calls in order, or only those of one root or process."""
        return [
            record
            for record in self.records
            if isinstance(record, Call) and root in (None, record.root) and process in (None, record.process)
        ]

    def steps(self, process: int | None = None) -> list[Step]:
        """Return the steps in order."""
        return [r for r in self.records if isinstance(r, Step) and process in (None, r.process)]

    def events(self, kind: str, process: int | None = None) -> list[Event]:
        """Return the events of one kind in order."""
        return [
            record
            for record in self.records
            if isinstance(record, Event) and record.kind == kind and process in (None, record.data.get("process"))
        ]

    @property
    def checked_values(self) -> int:
        """Return how many weights and losses all looks at optimizers have read."""
        return sum(len(look.data["weights"]) + len(look.data["losses"]) for look in self.events("check"))

    @property
    def complaints(self) -> list[str]:
        """Return all warnings of dpmon, wherever they were written, and errors of unreadable records."""
        return [*self.unreadable, *self.warnings, *(str(event.data["text"]) for event in self.events("warning"))]


class TracedScript:
    """A script under the tracer that is still running."""

    def __init__(
        self,
        place: Path,
        text: str,
        *words: object,
        mode: str | None = None,
        replicas: int | None = None,
        devices: str | None = None,
        env: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
        run: bool = True,
        name: str = "script.py",
        fresh: bool = False,
    ) -> None:
        """Start `text` in a new directory under `place`; without `run`, without dpmon.

        `fresh`: in a fresh interpreter, as all scripts are in a long run, for tests of the start of an interpreter.
        """
        self.cwd = Path(tempfile.mkdtemp(dir=place))
        self.directory = self.cwd / "run"
        self.directory.mkdir(mode=0o700)
        self.start_ns = time.monotonic_ns()
        (self.cwd / name).write_text(text)
        asked = {"DPMON_MODE": mode, "DPMON_REPLICAS": replicas, "DPMON_DEVICES": devices}
        whole = self._environment(dict(env or {}), asked if run else None)
        argv = [name, *map(str, words)]
        self.process: subprocess.Popen[str] | PipedScript
        if not (fresh or flags or LONG):
            self.process = PipedScript(argv, self.cwd, whole)
            return
        self.process = subprocess.Popen(
            [sys.executable, *flags, *argv],
            cwd=self.cwd,
            env=whole,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __del__(self) -> None:
        """End the script if a test failed before its end."""
        process: subprocess.Popen[str] | PipedScript | None = self.__dict__.get("process")
        if process is None:
            return
        if process.poll() is None:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _environment(self, extra: dict[str, str], asked: Mapping[str, Any] | None) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DPMON_", "PYTHON", "CUDA_"))}
        path = extra.pop("PYTHONPATH", "")
        env = {**kept, **_VARIABLES, **extra}
        if asked is None:
            return {**env, **({"PYTHONPATH": path} if path else {})}
        env["PYTHONPATH"] = os.pathsep.join([str(SITE), *([path] if path else [])])
        env["DPMON_RUN"] = str(self.directory)
        env["DPMON_START_NS"] = str(self.start_ns)
        env |= {name: str(value) for name, value in asked.items() if value is not None}
        return {**env, **extra}

    def line(self) -> str:
        """Return the next line of its output; "" at the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def go_on(self, line: str = "") -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ring(self, process: int = 0) -> ScriptRing:
        """Wait for the ring of a process, and open it."""
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                return ScriptRing(self.directory / f"process-{process}.ring")
            except (OSError, RingError):  # not there yet, or being made
                if time.monotonic() > until:
                    raise
                time.sleep(0.001)

    def end(self, limit: float = LIMIT_S) -> TracedRun:
        """Wait for its end; fail after `limit` seconds."""
        try:
            out, err = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"not over within {limit} s\n{out[-1000:]}\n{err[-3000:]}") from None
        records, missed, unreadable = read_traced_run(self.directory, self.start_ns)
        return TracedRun(
            status=self.process.wait(),
            out=out,
            err=err,
            records=tuple(records),
            missed=missed,
            unreadable=tuple(unreadable),
            warnings=_lines(self.directory / "warnings.log"),
            stages=_lines(self.directory / "stages.log"),
            directory=self.directory,
        )


def traced_script_text(name: str) -> str:
    """Return the text of a script in `traced/`."""
    return (Path(__file__).resolve().parents[1] / "process" / "traced" / f"{name}.py").read_text()


def _lines(path: Path) -> tuple[str, ...]:
    if not path.exists():
        return ()
    return tuple(line.split(" ", 2)[2] for line in path.read_text().splitlines())


class ScriptRing:
    """The ring of a script, with its rows."""

    def __init__(self, path: Path) -> None:
        self._ring = SpanReader(str(path))
        self._source = SpanSource(path, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def read(self, *, gone: bool = False) -> list[Row]:
        """Return the new rows; `gone`: the process has ended."""
        found: list[Row] = []
        more = True
        while more:
            rows, more = self._source.read_rows(time.monotonic_ns(), gone)
            found += rows
        return found

    def rest(self) -> list[Row]:
        """Return the remaining rows of a process that has ended."""
        found: list[Row] = []
        while not self._source.over:
            found += self.read(gone=True)
        return found

    def missed(self) -> int:
        """Return the number of records or spans that were not read."""
        self._source.update_position()
        return self._source.row.missed

    def laps(self) -> float:
        """Return how often the ring has wrapped around, up to the last span that was read."""
        self._source.update_position()
        return self._source.row.position / self._ring.slots

    def close(self) -> None:
        self._source.close()
        self._ring.close()


def read_traced_run(directory: Path, origin_ns: int = 0) -> tuple[list[Record], int, list[str]]:
    """Return the records in a run's rings, the number of missed ones, and those that lack a definition."""
    found: list[Record] = []
    missed = 0
    unreadable: list[str] = []
    for path in sorted(directory.glob("process-*.ring"), key=lambda path: (len(path.name), path.name)):
        reader = ScriptRing(path)
        resolver = RowReader(reader.process, reader.rank, origin_ns)
        for row in reader.rest():
            records = resolver.records(row)
            found += records
            expected = len(row.calls) + row.takes_time if isinstance(row, Step) else not isinstance(row, Definition)
            if len(records) < expected:
                unreadable.append(repr(row))
        missed += reader.missed()
        reader.close()
    return found, missed, unreadable


def run_traced(place: Path, text: str, *words: object, **options: Any) -> TracedRun:
    """Run a script under the tracer to its end; options: those of `TracedScript`, and `limit`."""
    limit = options.pop("limit", LIMIT_S)
    return TracedScript(place, text, *words, **options).end(limit)


def run_untraced(place: Path, text: str, *words: object, **options: Any) -> TracedRun:
    """Run a script without the tracer."""
    return run_traced(place, text, *words, run=False, **options)


_RANDOM_PARTS = re.compile("(?<=^kept).*|(?<=^gone).*")
"""What `tempfile` adds to a name."""


_CHANGING_NUMBERS = re.compile("0x[0-9a-f]+|Thread-[0-9]+")


def results_of_script(run: TracedRun) -> dict[str, Any]:
    """The results of a script: status, output, and its files with their bytes."""
    place = run.directory.parent
    files = {
        _RANDOM_PARTS.sub("", path.name): path.read_bytes()
        for path in sorted(place.iterdir())
        if path.is_file() and path.name != "script.py"
    }
    order = files.pop("order", b"").decode().splitlines()
    errors = _CHANGING_NUMBERS.sub("", run.err.replace(str(place), ""))
    return {"status": run.status, "out": run.out, "err": errors, "order": order, **files}


DP, SINGLE = MODES.index("dp"), MODES.index("single")


class SteeredScript:
    """A script that runs one step for every line of its input."""

    def __init__(self, place: Path, name: str, **options: Any) -> None:
        self.script = TracedScript(place, traced_script_text(name), **options)
        self.acknowledged: list[tuple[int, int]] = []

    def step(self, times: int = 1) -> list[Any]:
        """Run `times` steps; return what the script printed for each."""
        found = []
        for _ in range(times):
            self.script.go_on()
            line = self.script.line()
            while line.startswith("[Gloo]"):  # some builds of torch print connections
                line = self.script.line()
            assert line, self.script.end().err
            found.append(json.loads(line))
        return found

    def ask(self, mode: int) -> int:
        """Request a mode, as a screen does."""
        reader = self.script.ring()
        serial = reader.request(mode)
        reader.close()
        return serial

    def answer(self) -> tuple[int, int]:
        """Return the last request that was answered, and the mode in force."""
        reader = self.script.ring()
        found = reader.acknowledged()
        reader.close()
        return found
