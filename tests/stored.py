"""Writes records into a history, as a supervisor does, and reads the state of the screen from it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from synthetic import flags_of

from dpmon.model.run_snapshot import RunSnapshot, SnapshotRequest
from dpmon.model.snapshot_builder import SnapshotBuilder
from dpmon.record.history_rows import CallParts, CallRow, Definition, Row
from dpmon.record.record_types import Call, Event, Record, RecordError, Size
from dpmon.record.shared_names import CALL_PHASES
from dpmon.store.history_schema import RingRow
from dpmon.store.history_writer import LIMIT_BYTES, HistoryWriter
from dpmon.store.process_accounts import ProcessAccounts
from dpmon.store.ring_intake import RingIntake
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store
from dpmon.store.write_batch import WriteBatch

SUPERVISOR = -1
_OF_SUPERVISOR = ("device", "host", "input", "exit")
_BATCH = 2000


class Recording:
    """A run written by a test, from rows or records."""

    def __init__(self, origin_ns: int = 0, directory: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        """`origin_ns`: start of the run on the clock of the rows. `directory`: of a run; None: write to memory."""
        self.origin_ns = origin_ns
        self.now_s = 0
        """The time of the next writes (s since the run's start)."""
        about = {"run": "test", "start_ns": origin_ns}
        if directory is None:
            self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._history = HistoryWriter(self._db, about, limit_bytes)
        else:
            self._history = HistoryWriter.open(directory, about, limit_bytes)
            self._db = self._history._db
        self._accounts = ProcessAccounts()
        self._intakes: dict[int, RingIntake] = {}
        self._makers: dict[int, _Maker] = {}
        self._next_id = self._history.next_id
        self._snapshots = SnapshotBuilder()

    def add(
        self, records: Iterable[Row | Record], process: int = 0, rank: int | None = None, skip: bool = False
    ) -> Recording:
        """Write the records of a process. Samples, waits for input and the exit are stored as the supervisor's.

        `skip`: leave out those that are refused, as a supervisor does.
        """
        batch = WriteBatch()
        for count, record in enumerate(records, start=1):
            for row in self._makers.setdefault(process, _Maker()).rows(record):
                intake = self._intake(_source(row, process), rank)
                with suppress(RecordError) if skip else nullcontext():
                    self._next_id += intake.add(batch, self._next_id, row)
            if count % _BATCH == 0:
                batch = self._write(batch)
        self._write(batch)
        return self

    def end(self) -> None:
        """Count the last calls, as at the end of the run."""
        batch = WriteBatch()
        for process, intake in self._intakes.items():
            if process >= 0:
                intake.finish_process(batch)
        self._write(batch)

    def missed(self, count: int) -> None:
        """Set how many records were overwritten before they could be read."""
        self._intake(0, None).row.missed = count
        self._write(WriteBatch())

    def _write(self, batch: WriteBatch) -> WriteBatch:
        batch.rings = [intake.row for process, intake in self._intakes.items() if process >= 0]
        batch.now_s = self.now_s
        self._history.write(batch)
        return WriteBatch()

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
        return Store(self._history.checked_connection)

    def state(self, t_ns: int | None = None, ended: Iterable[int] = (), **wanted: Any) -> RunSnapshot:
        """Return the state at the end, or at time `t_ns`; `wanted`: fields of SnapshotRequest."""
        store = self.store()
        return self._snapshots.build(store.as_of(t_ns), SnapshotRequest(**wanted), frozenset(ended))


def store_of(records: Iterable[Row | Record] | Mapping[int, Iterable[Row | Record]], origin_ns: int = 0) -> Store:
    """Return the store of a run of one process, or of several."""
    return _recorded(records, origin_ns).store()


def state_of(
    records: Iterable[Row | Record] | Mapping[int, Iterable[Row | Record]],
    t_ns: int | None = None,
    *,
    origin_ns: int = 0,
    **wanted: Any,
) -> RunSnapshot:
    """Return the state of the screen at the end, or at time `t_ns`, from records of one process or of several."""
    return _recorded(records, origin_ns).state(t_ns, **wanted)


def state_in(directory: Path, t_ns: int | None = None, **wanted: Any) -> RunSnapshot:
    """Return the state of the screen of the run in `directory`, at the end or at time `t_ns`."""
    with open_store(directory) as store:
        return SnapshotBuilder().build(store.as_of(t_ns), SnapshotRequest(**wanted), frozenset())


def _recorded(records: Iterable[Any] | Mapping[int, Iterable[Any]], origin_ns: int) -> Recording:
    found = Recording(origin_ns)
    for process, own in records.items() if isinstance(records, Mapping) else [(0, records)]:
        found.add(own, process)
    return found


def _source(row: Row, process: int) -> int:
    if not isinstance(row, Event):
        return process
    ours = row.kind in _OF_SUPERVISOR or (row.kind == "warning" and row.data.get("process") is None)
    return SUPERVISOR if ours else process


# ------------------------------------------------------------------------------------------------ records


def rows_of(records: Iterable[Row | Record]) -> list[Row]:
    """Return the rows of records, with the definitions that they need."""
    maker = _Maker()
    return [row for record in records for row in maker.rows(record)]


class _Maker:
    """Makes rows from records of one process."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def rows(self, record: Row | Record) -> list[Row]:
        """Return new definitions, then the record."""
        if isinstance(record, Call):
            return self._call(record)
        return [record]  # type: ignore[list-item]

    def _define(self, out: list[Row], value: Any) -> int:
        key = repr(value)
        if key not in self._numbers:
            # Larger than the numbers in rows that the same test may have written.
            self._numbers[key] = 1000 + len(self._numbers)
            out.append(Definition(self._numbers[key], value))
        return self._numbers[key]

    def _sizes(self, out: list[Row], sizes: Sequence[Size] | None) -> int:
        if sizes is None:
            return 0
        written = [[size.path, list(size.shape), size.dtype, size.bytes] for size in sizes]
        for one, size in zip(written, sizes, strict=True):
            if size.global_shape is not None:
                one.append(list(size.global_shape))
        return self._define(out, written)

    def _call(self, call: Call) -> list[Row]:
        out: list[Row] = []
        layout = {
            "root": call.root, "via": call.via, "virtual": call.virtual, "devices": list(call.devices),
            "absent": dict(call.absent),
        }  # fmt: skip
        number, inputs, outputs = (
            self._define(out, layout), self._sizes(out, call.inputs), self._sizes(out, call.outputs)
        )  # fmt: skip
        ran = [call.phases.get(name) for name in CALL_PHASES]
        replicas = [
            (self._sizes(out, each.inputs), self._sizes(out, each.outputs), each.offset_ns, each.host_ns)
            for each in call.replicas
        ]
        stages = [
            (
                self._define(out, {"device": stage.device, "parts": list(stage.parts)}),
                self._sizes(out, stage.inputs), self._sizes(out, stage.outputs), stage.offset_ns, stage.host_ns,
            )
            for stage in call.stages
        ]  # fmt: skip
        parts = CallParts([phase and (phase.offset_ns, phase.host_ns) for phase in ran], replicas, stages)
        flags = flags_of(call.virtual, call.training, call.grad, call.failed)
        row = CallRow(
            call.step, call.call, call.mode, flags, number, call.start_ns, call.wall_ns, inputs, outputs, parts
        )
        times = [phase and phase.device_ms for phase in ran]
        times += [part.device_ms for part in (*call.replicas, *call.stages)]
        return [*out, row.with_device_times(times, 0) if any(time is not None for time in times) else row]
