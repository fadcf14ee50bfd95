"""Runs a script in a Python with the tracer in it, as the supervisor would start it, and reads what it recorded.

No command line, no supervisor: the environment is all there is between them and the tracer. The Python is a fork of one
that has torch already (`warm`), for the import takes longer than what most scripts do; a fresh one where asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizes import LONG
from warm import Piped

import dpmon
from dpmon.record.codec import Decoder
from dpmon.record.kinds import Call, Event, Record, RecordError, Step
from dpmon.ring_file import RingError
from dpmon.run.rings import ProcessRing
from dpmon.store.sources import open_source
from dpmon.store.tables import RingRow

__all__ = ["SITE", "Script", "Traced", "alone", "read_run", "text_of", "traced"]

PACKAGE = Path(dpmon.__file__).resolve().parent
SITE = PACKAGE / "tracer" / "site"
LIMIT_S = 250.0
# One thread, so that the last bit of a sum hangs on nothing; no byte code beside scripts that live for a second.
# OURS: how the path of each file of dpmon begins. Its name alone does not tell: it may be that of the clone, too.
SAME = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "OURS": f"{PACKAGE}{os.sep}"}


@dataclass(frozen=True)
class Traced:
    """How a script ended, what it wrote, and what the tracer recorded of it (nothing if it ran alone)."""

    status: int
    """As subprocess has it: minus the signal's number, if it was killed."""
    out: str
    err: str
    records: tuple[Record, ...]
    """Of all processes, ring by ring."""
    missed: int
    unreadable: tuple[str, ...]
    """What is wrong with payloads that no decoder understands."""
    warnings: tuple[str, ...]
    """Lines of warnings.log, without process and time."""
    stages: tuple[str, ...]
    directory: Path

    @property
    def said(self) -> Any:
        """The JSON that the script printed as its last line."""
        assert self.status == 0, self.err
        return json.loads(self.out.splitlines()[-1])

    @property
    def processes(self) -> list[int]:
        """The processes that have a ring."""
        return sorted({event.data["process"] for event in self.events("process")})

    def process_of(self, pid: int) -> int:
        """The number of the process that had `pid`."""
        (event,) = [event for event in self.events("process") if event.data["pid"] == pid]
        return int(event.data["process"])

    def calls(self, root: str | None = None, process: int | None = None) -> list[Call]:
        """Calls in their order, of one root's class or one process only."""
        return [
            record
            for record in self.records
            if isinstance(record, Call) and root in (None, record.root) and process in (None, record.process)
        ]

    def steps(self, process: int | None = None) -> list[Step]:
        """Steps in their order."""
        return [r for r in self.records if isinstance(r, Step) and process in (None, r.process)]

    def events(self, kind: str, process: int | None = None) -> list[Event]:
        """Events of one kind in their order."""
        return [
            record
            for record in self.records
            if isinstance(record, Event) and record.kind == kind and process in (None, record.data.get("process"))
        ]

    @property
    def complaints(self) -> list[str]:
        """Every warning of ours, wherever it was written, and every record that cannot be read."""
        return [*self.unreadable, *self.warnings, *(str(event.data["text"]) for event in self.events("warning"))]


class Script:
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
        """Start `text` in a directory of its own under `place`; without `run`, as if there were no dpmon.

        `fresh`: in an interpreter that has imported nothing, as in a long run all are; for what hangs on that.
        """
        self.cwd = Path(tempfile.mkdtemp(dir=place))
        self.directory = self.cwd / "run"
        self.directory.mkdir(mode=0o700)
        self.start_ns = time.monotonic_ns()
        (self.cwd / name).write_text(text)
        asked = {"DPMON_MODE": mode, "DPMON_REPLICAS": replicas, "DPMON_DEVICES": devices}
        whole = self._environment(dict(env or {}), asked if run else None)
        argv = [name, *map(str, words)]
        self.process: subprocess.Popen[str] | Piped
        if not (fresh or flags or LONG):
            self.process = Piped(argv, self.cwd, whole)
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
        """A test that fails half-way leaves nothing running."""
        process: subprocess.Popen[str] | Piped | None = self.__dict__.get("process")
        if process is None:
            return
        if process.poll() is None:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _environment(self, extra: dict[str, str], asked: Mapping[str, object] | None) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DPMON_", "PYTHON", "CUDA_"))}
        path = extra.pop("PYTHONPATH", "")
        env = {**kept, **SAME, **extra}
        if asked is None:
            return {**env, **({"PYTHONPATH": path} if path else {})}
        env["PYTHONPATH"] = os.pathsep.join([str(SITE), *([path] if path else [])])
        env["DPMON_RUN"] = str(self.directory)
        env["DPMON_START_NS"] = str(self.start_ns)
        env |= {name: str(value) for name, value in asked.items() if value is not None}
        return {**env, **extra}

    def line(self) -> str:
        """The next line of its output; "" at the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def go_on(self, line: str = "") -> None:
        """Give it a line of input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ring(self, process: int = 0) -> ScriptRing:
        """The ring of a process, which is waited for."""
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                return ScriptRing(self.directory / f"process-{process}.ring")
            except (OSError, RingError):  # not there yet, or being made
                if time.monotonic() > until:
                    raise
                time.sleep(0.001)

    def end(self, limit: float = LIMIT_S) -> Traced:
        """Wait for its end, which must come within `limit` seconds."""
        try:
            out, err = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"not over within {limit} s\n{out[-1000:]}\n{err[-3000:]}") from None
        records, missed, unreadable = read_run(self.directory, self.start_ns)
        return Traced(
            status=self.process.returncode,
            out=out,
            err=err,
            records=tuple(records),
            missed=missed,
            unreadable=tuple(unreadable),
            warnings=_lines(self.directory / "warnings.log"),
            stages=_lines(self.directory / "stages.log"),
            directory=self.directory,
        )


def text_of(name: str) -> str:
    """The text of a script kept in `traced/`."""
    return (Path(__file__).resolve().parent / "traced" / f"{name}.py").read_text()


def _lines(path: Path) -> tuple[str, ...]:
    if not path.exists():
        return ()
    return tuple(line.split(" ", 2)[2] for line in path.read_text().splitlines())


class ScriptRing(ProcessRing):
    """The ring of a script, from which its payloads are taken, too."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._source = open_source(path, None)
        self._row = RingRow(path.name, self.process, self.rank, self.pid)

    def read(self, *, gone: bool = False) -> list[bytes]:
        """The payloads that are new; `gone`: its process is not there any more."""
        found: list[bytes] = []
        more = True
        while more:
            payloads, more = self._source.take(time.monotonic_ns(), gone)
            found += payloads
        return found

    def rest(self) -> list[bytes]:
        """All that is left of a process that is gone."""
        found: list[bytes] = []
        while not self._source.over:
            found += self.read(gone=True)
        return found

    def missed(self) -> int:
        """Records or spans that were not read."""
        return self._source.note(self._row)

    def laps(self) -> float:
        """How often the ring went round until what was read last."""
        self._source.note(self._row)
        return self._row.position / self._ring.slots

    def close(self) -> None:
        self._source.close()
        super().close()


def read_run(directory: Path, origin_ns: int = 0) -> tuple[list[Record], int, list[str]]:
    """All records of a run's rings, how many were missed or lost, and why some could not be read."""
    found: list[Record] = []
    missed = 0
    unreadable: list[str] = []
    for path in sorted(directory.glob("process-*.ring"), key=lambda path: (len(path.name), path.name)):
        reader = ScriptRing(path)
        decoder = Decoder(reader.process, reader.rank, origin_ns)
        for payload in reader.rest():
            try:
                record = decoder.decode(payload)
            except RecordError as error:
                unreadable.append(str(error))
            else:
                found += [] if record is None else [record]
        missed += reader.missed()
        reader.close()
    return found, missed, unreadable


def traced(place: Path, text: str, *words: object, **options: Any) -> Traced:
    """Run a script under the tracer to its end; options as `Script` takes them, and `limit`."""
    limit = options.pop("limit", LIMIT_S)
    return Script(place, text, *words, **options).end(limit)


def alone(place: Path, text: str, *words: object, **options: Any) -> Traced:
    """The same without the tracer."""
    return traced(place, text, *words, run=False, **options)
