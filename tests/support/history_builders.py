"""Builds histories and run directories from rows, and reads them back for comparison."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from dpmon.model.efficiency import Efficiency
from dpmon.model.layouts import CallLayouts
from dpmon.model.run_analysis import RunAnalysis, RunCaches, Selection
from dpmon.model.run_events import RunEvents
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.record.schema import (
    EVALUATION,
    QUANTITIES,
    REST,
    STEP,
    STEP_KINDS,
    TRAINING,
    WARM_UP,
    device_series,
)
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.report.report_data import ReportData, open_report_data
from dpmon.run import proc
from dpmon.run.run_directory import ExitInfo, RunInfo, write_info
from dpmon.run.run_registry import create_run
from dpmon.store.activity_times import read_times
from dpmon.store.database import HISTORY_FILE, HistoryConnection
from dpmon.store.events import read_events
from dpmon.store.gaps import read_gaps
from dpmon.store.history_writer import LIMIT_BYTES, HistoryWriter, WriteBatch
from dpmon.store.process_accounts import ProcessAccounts
from dpmon.store.quantile_sketch import pack_values
from dpmon.store.ring_drain import COMMIT_S, RingDrain
from dpmon.store.ring_intake import RingIntake
from dpmon.store.rings import RINGS, RingRow
from dpmon.store.shapes import read_shapes
from dpmon.store.steps import StepRow, read_called_steps, read_steps
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import read_tallies, read_tally_rows
from dpmon.store.time_buckets import WIDTHS
from support.record_builders import SECOND, step_row

SUPERVISOR = -1
_SUPERVISOR_KINDS = ("device", "host", "input", "exit")
_BATCH = 2000
ORIGIN_S = 1_700_000_000
"""The second in which the runs of tests start, so that their time buckets do not begin with them."""


class Recording:
    """A run written by a test from rows: by the intake and the writer of the supervisor, into a real history."""

    def __init__(
        self,
        origin_ns: int = 0,
        directory: Path | None = None,
        limit_bytes: int = LIMIT_BYTES,
        origin_s: int = ORIGIN_S,
    ) -> None:
        """`origin_ns`: start of the run on the clock of the rows. `directory`: of a run; None: write to memory.

        `origin_s`: the second of the run's start in the tables.
        """
        self.origin_ns, self._origin_s = origin_ns, origin_s
        about = {"run": "test", "origin_s": origin_s}
        if directory is None:
            self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._history = HistoryWriter(self._db, about, limit_bytes)
        else:
            self._history = HistoryWriter.open(directory, about, limit_bytes)
            self._db = self._history._db
        self._accounts = ProcessAccounts()
        self._intakes: dict[int, RingIntake] = {}
        self._evaluations: Counter[int] = Counter()
        """Evaluation steps so far, by process."""
        self._next_id = self._history.next_id
        self._caches = RunCaches()

    def add(self, rows: Iterable[Row], process: int = 0, rank: int | None = None) -> Recording:
        """Write the rows of a process. Samples, waits for input and the exit are stored as the supervisor's."""
        batch = WriteBatch(self._origin_s)
        for count, row in enumerate(self._with_kinds(list(rows), process), start=1):
            intake = self._intake(_source(row, process), rank)
            self._next_id += intake.add(batch, self._next_id, row)
            if count % _BATCH == 0:
                batch = self._write(batch)
        self._write(batch)
        return self

    def _with_kinds(self, rows: Sequence[Row], process: int) -> Sequence[Row]:
        """Return the rows with the kind of each step that follows from its phases; its number counts those of its kind.

        Rows with other kinds than training are as the assembler makes them.
        """
        if any(isinstance(row, Step) and row.kind != TRAINING for row in rows):
            return rows
        found: list[Row] = []
        for row in rows:
            if isinstance(row, Step) and row.step > 0:
                if {"backward", "optimizer"} & row.phases.keys():
                    row = row._replace(step=row.step - self._evaluations[process])
                else:
                    self._evaluations[process] += 1
                    row = row._replace(kind=EVALUATION, step=self._evaluations[process])
            found.append(row)
        return found

    def end(self) -> None:
        """Note that the run has ended."""
        self._history.merge_last_buckets()

    def missed(self, count: int) -> None:
        """Set how many records were overwritten before they could be read."""
        self._intake(0, None).row.missed = count
        self._write(WriteBatch(self._origin_s))

    def _write(self, batch: WriteBatch) -> WriteBatch:
        batch.rows[RINGS] = [intake.row for process, intake in self._intakes.items() if process >= 0]
        self._history.write(batch)
        return WriteBatch(self._origin_s)

    def _intake(self, process: int, rank: int | None) -> RingIntake:
        found = self._intakes.get(process)
        if found is None:
            row = RingRow(f"process-{process}.ring", process, rank if process >= 0 else None, 4242)
            found = self._intakes[process] = RingIntake(row, self.origin_ns, self._accounts)
        return found

    def close(self) -> None:
        """Close the history in a directory."""
        self._history.close()

    def store(self) -> Store:
        """Return the store with all records so far."""
        return Store(self._history.connection)

    def state(self, t_ns: int | None = None, ended: Iterable[int] = (), **selected: Any) -> RunAnalysis:
        """Return the state at the end of the records so far, or at time `t_ns`; `selected`: fields of Selection."""
        return snapshot_of_copy(self._db, t_ns, Selection(**selected), frozenset(ended), self._caches)


def snapshot_of_copy(
    db: sqlite3.Connection, t_ns: int | None, selection: Selection, ended: frozenset[int], caches: RunCaches
) -> RunAnalysis:
    """Return the state of a copy of a history: its facts are queried later, when the history may have more records."""
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.backup(copy)
    return RunAnalysis(Store(HistoryConnection(copy)).as_of(t_ns), selection, ended, caches)


def open_store_with(rows: Iterable[Row] | Mapping[int, Iterable[Row]], origin_ns: int = 0) -> Store:
    """Return the store of a run of one process, or of several."""
    return _record_run(rows, origin_ns).store()


def snapshot_of_rows(
    rows: Iterable[Row] | Mapping[int, Iterable[Row]],
    t_ns: int | None = None,
    *,
    origin_ns: int = 0,
    **selected: Any,
) -> RunAnalysis:
    """Return the state of the screen at the end, or at time `t_ns`, from rows of one process or of several."""
    return _record_run(rows, origin_ns).state(t_ns, **selected)


def snapshot_of_directory(directory: Path, t_ns: int | None = None, **selected: Any) -> RunAnalysis:
    """Return the state of the screen of the run in `directory`, at the end or at time `t_ns`."""
    with open_store(directory) as store:
        return snapshot_of_copy(store.connection.db, t_ns, Selection(**selected), frozenset(), RunCaches())


_OPEN_REPORTS: deque[ExitStack] = deque()
_MAX_OPEN_REPORTS = 16


def read_report(directory: Path) -> ReportData:
    """Return the data of a report. Its history stays open until some later ones were read."""
    stack = ExitStack()
    report = stack.enter_context(open_report_data(directory))
    _OPEN_REPORTS.append(stack)
    if len(_OPEN_REPORTS) > _MAX_OPEN_REPORTS:
        _OPEN_REPORTS.popleft().close()
    return report


def _record_run(rows: Iterable[Row] | Mapping[int, Iterable[Row]], origin_ns: int) -> Recording:
    found = Recording(origin_ns)
    by_process: Mapping[int, Iterable[Row]] = rows if isinstance(rows, Mapping) else {0: rows}
    for process, own in by_process.items():
        found.add(own, process)
    return found


def _source(row: Row, process: int) -> int:
    if not isinstance(row, Event):
        return process
    ours = row.kind in _SUPERVISOR_KINDS or (row.kind == "warning" and row.data.get("process") is None)
    return SUPERVISOR if ours else process


# ------------------------------------------------------------------------------------------------ steps


def account_step(number: int, mode: str, start_ns: int, wall_ns: int, evaluation: bool = False) -> tuple[Step, int]:
    """Return the arguments of `TimeAccount.add_step`."""
    kind = EVALUATION if evaluation else TRAINING
    return Step(0, None, number, mode, start_ns, wall_ns, None, {}, kind=kind), start_ns


# ------------------------------------------------------------------------------------------------ run directories


def make_run_info(**about: Any) -> RunInfo:
    """Return a run that started at clock 0, and has no directory yet; `about`: other fields."""
    facts = {
        "id": "", "name": "linear", "command": ("python", "linear.py"), "script": "linear.py", "cwd": "/home/me",
        "python": "python", "started_unix": 1.7e9, "start_ns": 0, "boot_id": "", "headless": True,
        "versions": {"dpmon": "0", "python": "3.11"}, "command_pid": 4_000_000,
    }  # fmt: skip
    return RunInfo(**{**facts, **about})


def make_live_run(directory: Path, **about: Any) -> RunInfo:
    """Write run.json of a run that has just begun, and has this process as its command; return the contents."""
    directory.chmod(0o700)
    now = {"started_unix": time.time(), "start_ns": time.monotonic_ns(), "boot_id": proc.boot_id()}
    us = {"command_pid": os.getpid(), "command_started": proc.start_time_s(os.getpid()), "python": sys.executable}
    info = make_run_info(
        id="20261120-141502-linear-7f3a", headless=False, options={"mode": "auto"}, **now, **us, **about
    )
    write_info(directory, info)
    return info


def write_run_directory(
    processes: Mapping[int, Iterable[Row]],
    *,
    status: int | None = 0,
    seconds: float = 60.0,
    limit_bytes: int = LIMIT_BYTES,
    **about: Any,
) -> Path:
    """Make a run that started at clock 0, with the rows of each process (-1: the supervisor); return its directory.

    `status` None: the run has not ended. `limit_bytes`: limit of the history, which is then written in 64 parts.
    `about`: as of `make_run_info`. The test must use the fixture `state`.
    """
    directory, _ = create_run(make_run_info(**about))
    run = Recording(0, directory, limit_bytes)
    for process, rows in processes.items():
        every = list(rows)
        part = len(every) // 64 + 1 if limit_bytes != LIMIT_BYTES else len(every) + 1
        for at in range(0, len(every) + 1, part):
            run.add(every[at : at + part], process)
    run.close()
    if status is not None:
        write_info(directory, ExitInfo(status, None, 1.7e9 + seconds, int(seconds * 1e9), seconds, "supervisor"))
    return directory


# ------------------------------------------------------------------------------------------------ steps for tallies


class StepFacts(NamedTuple):
    """The facts of a step for a tally, ns."""

    number: int
    wall: int
    quantities: Sequence[int | None]
    phases: Sequence[int | None]
    rest: int | None = None
    calls: int = 0
    device: Mapping[str, int] = {}
    parts: Sequence[tuple[str, int]] = ()

    @property
    def series(self) -> list[tuple[str, int]]:
        """Values of further series."""
        return [*((device_series(name), took) for name, took in self.device.items()), *self.parts]

    def row(self, start: int, key: TallyKey, row_id: Any = None) -> StepRow:
        """Return its row of the table."""
        place = row_id, key.process, self.number, key.mode, start, self.wall, key.kind, self.calls
        return StepRow(*place, (*self.quantities, *self.phases), rest_ns=self.rest)


def quantities(**known: int | None) -> tuple[int | None, ...]:
    """Return the quantities of a step in the order of the schema."""
    return tuple(known.get(quantity.name) for quantity in QUANTITIES)


_STEP_KINDS = (0, EVALUATION, WARM_UP, EVALUATION | WARM_UP)


class StoredStep(NamedTuple):
    """A step, its start (ns), and the key of its tally."""

    key: TallyKey
    start: int
    facts: StepFacts

    @property
    def end(self) -> int:
        """Return the end, ns."""
        return self.start + self.facts.wall

    @property
    def tally(self) -> Tally:
        """Return the tally of this step alone."""
        facts = self.facts
        phases = zip((phase.name for phase in SCHEMA), facts.phases, strict=True)
        counted = zip((quantity.name for quantity in QUANTITIES), facts.quantities, strict=True)
        found = Tally(1, facts.calls, facts.number, facts.wall, facts.wall, self.start, self.end)
        for name, value in ((STEP, facts.wall), (REST, facts.rest), *phases, *counted, *facts.series):
            if value is not None:
                found.stats.setdefault(name, SeriesStats()).merge(series_stats([value]))
        return found

    def add_to(self, batch: WriteBatch) -> None:
        """Add the step to a batch."""
        batch.add_step(self.key, self.facts.row(self.start, self.key), self.facts.series)


def random_quantities(chance: random.Random, number: int, wall: int, samples: int | None = 8) -> StepFacts:
    """Return a step with random phases, device times and replicas."""
    phases = [None if chance.random() < 0.2 else int(wall * chance.random()) for _ in SCHEMA]
    parts = [(f"replica 1 {index}", int(wall * chance.random())) for index in range(chance.randrange(3))]
    device = {"forward": int(wall * chance.random())} if chance.random() < 0.5 else {}
    rest = None if chance.random() < 0.5 else wall // 3
    copied = chance.choice((None, 4096))
    counted = quantities(samples=samples, copied_bytes=copied)
    return StepFacts(number, wall, counted, phases, rest, chance.randrange(3), device, parts)


def random_steps(
    chance: random.Random, count: int, seconds: float, processes: Sequence[int] = (0,), begin: float = 0.0
) -> list[StoredStep]:
    """Return random steps of some processes between two times, ordered by number and time."""
    found = []
    ends = sorted(int((begin + chance.random() * (seconds - begin)) * SECOND) for _ in range(count))
    for number, end in enumerate(ends, start=1):
        wall = min(int(chance.lognormvariate(18, 1)), end)
        samples = chance.choice((None, 8, 16))
        batch = -1 if samples is None else samples
        key = TallyKey(chance.choice(processes), chance.choice(("dp", "single")), chance.choice(_STEP_KINDS), batch)
        found.append(StoredStep(key, end - wall, random_quantities(chance, number, wall, samples)))
    return found


def expected_tallies(steps: Iterable[StoredStep]) -> dict[int, dict[tuple[int, TallyKey], Tally]]:
    """Return, by width, the tally of each start and key."""
    found: dict[int, dict[tuple[int, TallyKey], Tally]] = {width: defaultdict(Tally) for width in WIDTHS}
    for step in steps:
        for width in WIDTHS:
            start = step.end // SECOND // width * width
            found[width][start, step.key].merge(step.tally)
    return found


def series_stats(values: Sequence[int]) -> SeriesStats:
    """Return the series with these values."""
    return SeriesStats(len(values), sum(values), pack_values(values)) if values else SeriesStats()


def open_unlimited_store(db: sqlite3.Connection) -> Store:
    """Return the store of a history without a limit on reading."""
    return Store(HistoryConnection(db))


@contextmanager
def open_history(directory: Path) -> Iterator[Store]:
    """Open the store of a history."""
    with closing(sqlite3.connect(directory / HISTORY_FILE, isolation_level=None)) as db:
        db.execute("BEGIN")
        yield open_unlimited_store(db)


# ------------------------------------------------------------------------------------------------ all of a store

_NO_LIMIT = 1 << 40


def read_all_of_store(store: Store) -> dict[str, Any]:
    """Return the rows of each query. Rows of different processes may interleave in any order, so they are sorted."""
    kinds = ("process", "mode", "pause", "input", "host", "device", "warning", "exit")
    everybody = sorted({ring.process for ring in store.rings.values()})
    return {
        "tallies": {process: dict(sorted(read_tallies(store, process=process).items())) for process in everybody},
        "seconds": {
            (start, key): tally
            for process in everybody
            for start, _, key, tally in read_tally_rows(store, process=process, widest=1)
        },
        "times": _sums_of_times(store),
        "seconds of times": _sorted_reprs(read_times(store, widest=1)),
        "gaps": _sorted_reprs(read_gaps(store, _NO_LIMIT)),
        "shapes": _sorted_reprs(read_shapes(store)),
        "steps": {process: read_steps(store, _NO_LIMIT, process=process) for process in everybody},
        "calls": {process: read_called_steps(store, process, _NO_LIMIT) for process in everybody},
        "events": {kind: _sorted_reprs(read_events(store, kind)) for kind in kinds},
        "dropped": store.dropped,
        "processes": store.processes,
    }


def _sums_of_times(store: Store) -> dict[tuple[int, str, str], int]:
    """Return the time of each activity of the whole run by process and mode, whichever buckets it is in."""
    sums: dict[tuple[int, str, str], int] = defaultdict(int)
    for row in read_times(store):
        for activity, ns in row.spent.items():
            sums[row.process, row.mode, activity] += ns
    return sums


def _sorted_reprs(rows: Any) -> list[str]:
    return sorted(map(repr, rows))


def assert_same_contents(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Assert that the answers of all queries are equal."""
    for name in wanted:
        assert found[name] == wanted[name], name


# ------------------------------------------------------------------------------------------------ analyses

HEALTHY_STORE = SimpleNamespace(
    pruned=0,
    kind_words=STEP_KINDS,
    between_activities=["between"],
    until_ns=0,
    connection=SimpleNamespace(rows=lambda *_: ()),
    query=lambda *_: (),
)
"""The store of a run without events."""
_EMPTY_ANALYSIS: dict[str, Any] = {
    **dict.fromkeys(("modes", "other_process_modes", "batches", "replicas", "device_usage", "device_memory"), ()),
    **dict.fromkeys(("longest_steps", "gaps", "loaders", "paused", "whole_losses", "first_invalid_losses"), ()),
    **dict.fromkeys(("host_usage", "mode_comparison", "whole_communication", "last_step_ns", "end_ns", "death")),
    "time_by_activity": {}, "final_evaluation_ns": lambda _: 0, "names": {}, "process_numbers": [], "nodes": (),
    "order": (0,), "until_ns": 0, "_ranks": {}, "announced": RunEvents(), "raised": None, "memory_trends": [],
    "whole_efficiency": Efficiency(), "layouts": CallLayouts([], {}),
    "memory_events": dict.fromkeys(("growth", "host", "exit", "loader_lines", "compiles", "host_syncs"), ()),
    "store": HEALTHY_STORE,
}  # fmt: skip


def run_analysis_with(**facts: Any) -> RunAnalysis:
    """Return a run with these facts and no others. A run that has ended lasts until `end_ns`."""
    return with_changes(object.__new__(RunAnalysis), **{**_EMPTY_ANALYSIS, **facts})


def with_changes(before: RunAnalysis, **facts: Any) -> RunAnalysis:
    """Return the facts of a run with some of them replaced."""
    found = object.__new__(RunAnalysis)
    vars(found).update({**vars(before), **facts})
    if "time_by_activity" in facts:
        found.spent_by_process = facts.get("spent_by_process", {0: facts["time_by_activity"]})
    found.steps = max((stats.steps for stats in (*found.modes, *found.other_process_modes)), default=0)
    if facts.get("end_ns") is not None:
        found.until_ns = facts["end_ns"]
    return found


# ------------------------------------------------------------------------------------------------ a supervisor


class SupervisedRun:
    """A run, and a supervisor of it that can be killed."""

    def __init__(self) -> None:
        self.directory, self.info = create_run(make_run_info(command_pid=None))
        self.warnings: list[str] = []
        self.warned_of: list[int | None] = []
        self.now = time.monotonic()
        self._killed: list[RingDrain] = []
        self.drain = self._new()

    def ring(self, process: int = 0) -> str:
        return str(self.directory / f"process-{process}.ring")

    def _new(self) -> RingDrain:
        drain = RingDrain(self.directory, self.info)
        drain.warn = self._warn  # type: ignore[method-assign]
        return drain

    def look(self, seconds: float = COMMIT_S) -> None:
        """Let time pass, then drain until nothing more can be read."""
        self.now += seconds
        while self.drain.poll(self.now):
            pass

    def kill(self) -> None:
        """Kill the supervisor: records that it has read but not written are lost."""
        self._killed.append(self.drain)
        self.drain = self._new()

    def end(self) -> None:
        """Drain as at the end of the run."""
        self.drain.flush(command_ended=True)
        self.close()

    def close(self) -> None:
        for drain in (self.drain, *self._killed):
            drain.close()
        self._killed.clear()

    def _warn(self, text: str, process: int | None = None) -> None:
        self.warnings.append(text)
        self.warned_of.append(process)

    def rows(self, query: str) -> list[Any]:
        """Query the history."""
        with closing(sqlite3.connect(self.directory / "history.sqlite")) as db:
            return db.execute(query).fetchall()

    def steps(self) -> list[int]:
        return [step for (step,) in self.rows("SELECT step FROM steps ORDER BY id")]


PLAYBACK_STEPS = 600
"""Two steps a second, by two processes alternately."""


def write_playback_run() -> Path:
    rows: dict[int, list[Row]] = {
        n: [Event("process", {"process": n, "rank": n, "world": 2, "t_s": 0.1})] for n in range(2)
    }
    rows[-1] = [
        Event("host", {"t_s": float(t), "cpu_pct": 5.0, "gpu_absent": "none"})
        for t in range(1, PLAYBACK_STEPS // 2 + 1)
    ]
    for number in range(1, PLAYBACK_STEPS + 1):
        at, mode = number * SECOND // 2, ("dp", "single")[number % 2]
        rows[number % 2].append(step_row(mode, number, at - 1000, 1000, 4, (1, 2, 3, 4)))
        if number == PLAYBACK_STEPS // 2:
            rows[0].append(Event("warning", {"process": 0, "t_s": at / SECOND, "text": "half-way"}))
    directory = write_run_directory(rows, seconds=PLAYBACK_STEPS / 2 + 1, name="n", script="s.py", headless=False)
    (directory / "stages.log").write_text(f"1 7 importing torch\n1 {SECOND} torch imported\n")
    return directory
