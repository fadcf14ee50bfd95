"""Writes records into a history in memory, as a supervisor does, and reads the state of the screen from it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpmon.model.snapshot import Snapshots
from dpmon.model.state import State, Wanted
from dpmon.record.kinds import Call, Record, RecordError, Size, Step
from dpmon.record.payloads import UNTIMED, kind_of
from dpmon.record.plainjson import load_event
from dpmon.record.schema import SPAN_PHASES
from dpmon.record.step_spans import span_words
from dpmon.record.wire import (
    BODY_PHASES,
    CALL_PHASES,
    STEP_EXTRAS,
    TIMED_PHASES,
    call_flags,
    mode_number,
    pack_call,
    pack_definition,
    pack_event,
    pack_step,
    pack_timed,
    with_extras,
)
from dpmon.store.accounts import Accounts
from dpmon.store.batch import Batch
from dpmon.store.intake import Intake
from dpmon.store.opened import open_store
from dpmon.store.queries import Store
from dpmon.store.store_at import StoreAt
from dpmon.store.tables import RingRow
from dpmon.store.writer import History

__all__ = ["Recording", "packed", "state_in", "state_of", "store_of"]

SUPERVISOR = -1
_OF_SUPERVISOR = ("device", "host", "input", "exit")
_BATCH = 2000


class Recording:
    """A run written by a test, from payloads or records."""

    def __init__(self, origin_ns: int = 0) -> None:
        """`origin_ns`: start of the run on the clock of the payloads."""
        self.origin_ns = origin_ns
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._history = History(self._db, {"run": "test", "start_ns": origin_ns})
        self._accounts = Accounts()
        self._intakes: dict[int, Intake] = {}
        self._packers: dict[int, _Packer] = {}
        self._next_id = 1
        self._snapshots = Snapshots()

    def add(self, records: Iterable[bytes | Record], process: int = 0, rank: int | None = None) -> Recording:
        """Write the records of a process. Samples, waits for input and the exit are stored as the supervisor's."""
        batch = Batch()
        for count, record in enumerate(records, start=1):
            for payload in [record] if isinstance(record, bytes) else self._packer(process).pack(record):
                intake = self._intake(_source(payload, process), rank)
                if intake.add(batch, self._next_id, payload):
                    self._next_id += 1
            if count % _BATCH == 0:
                batch = self._write(batch)
        self._write(batch)
        return self

    def try_to_add(self, record: Record, process: int = 0) -> None:
        """Write one record, or ignore it if it is refused, as a supervisor does."""
        with suppress(RecordError):
            self.add([record], process)

    def missed(self, count: int) -> None:
        """Set how many records were overwritten before they could be read."""
        self._intake(0, None).row.missed = count
        self._write(Batch())

    def _write(self, batch: Batch) -> Batch:
        batch.rings = [intake.row for intake in self._intakes.values()]
        self._history.write(batch)
        return Batch()

    def _intake(self, process: int, rank: int | None) -> Intake:
        found = self._intakes.get(process)
        if found is None:
            name = "gpu.ring" if process < 0 else f"process-{process}.ring"
            row = RingRow(name, process, rank if process >= 0 else None, 4242)
            found = self._intakes[process] = Intake(row, self.origin_ns, self._accounts)
        return found

    def _packer(self, process: int) -> _Packer:
        return self._packers.setdefault(process, _Packer())

    def store(self) -> Store:
        """Return the store with all records so far."""
        return Store(self._db, self._history.query_limits, self.origin_ns)

    def state(self, t_ns: int | None = None, ended: Iterable[int] = (), **wanted: Any) -> State:
        """Return the state at the end, or at time `t_ns`; `wanted`: fields of Wanted."""
        store = self.store()
        return self._snapshots.take(StoreAt(store, t_ns), Wanted(**wanted), frozenset(ended))


def store_of(records: Iterable[bytes | Record] | Mapping[int, Iterable[bytes | Record]], origin_ns: int = 0) -> Store:
    """Return the store of a run of one process, or of several."""
    return _recorded(records, origin_ns).store()


def state_of(
    records: Iterable[bytes | Record] | Mapping[int, Iterable[bytes | Record]],
    t_ns: int | None = None,
    *,
    origin_ns: int = 0,
    **wanted: Any,
) -> State:
    """Return the state of the screen at the end, or at time `t_ns`, from records of one process or of several."""
    return _recorded(records, origin_ns).state(t_ns, **wanted)


def state_in(directory: Path, t_ns: int | None = None, **wanted: Any) -> State:
    """Return the state of the screen of the run in `directory`, at the end or at time `t_ns`."""
    with open_store(directory) as store:
        return Snapshots().take(StoreAt(store, t_ns), Wanted(**wanted), frozenset())


def _recorded(records: Iterable[Any] | Mapping[int, Iterable[Any]], origin_ns: int) -> Recording:
    found = Recording(origin_ns)
    for process, own in records.items() if isinstance(records, Mapping) else [(0, records)]:
        found.add(own, process)
    return found


def _source(payload: bytes, process: int) -> int:
    if kind_of(payload) != "event":
        return process
    kind, data = load_event(payload[1:].decode())
    ours = kind in _OF_SUPERVISOR or (kind == "warning" and data.get("process") is None)
    return SUPERVISOR if ours else process


# ------------------------------------------------------------------------------------------------ records


def packed(records: Iterable[Record]) -> list[bytes]:
    """Return the payloads of records, with the definitions that they need."""
    packer = _Packer()
    return [payload for record in records for payload in packer.pack(record)]


class _Packer:
    """Makes payloads from records of one process."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def pack(self, record: Record) -> list[bytes]:
        """Return new definitions, then the record."""
        if isinstance(record, Call):
            return self._call(record)
        return [_step(record) if isinstance(record, Step) else pack_event(record.kind, record.data)]

    def _define(self, out: list[bytes], value: Any) -> int:
        key = repr(value)
        if key not in self._numbers:
            # Larger than the numbers in payloads that the same test may have written.
            self._numbers[key] = 1000 + len(self._numbers)
            out.append(pack_definition(self._numbers[key], value))
        return self._numbers[key]

    def _sizes(self, out: list[bytes], sizes: Sequence[Size] | None) -> int:
        if sizes is None:
            return 0
        written = [[size.path, list(size.shape), size.dtype, size.bytes] for size in sizes]
        for one, size in zip(written, sizes, strict=True):
            if size.global_shape is not None:
                one.append(list(size.global_shape))
        return self._define(out, written)

    def _call(self, call: Call) -> list[bytes]:
        out: list[bytes] = []
        layout = {
            "root": call.root, "via": call.via, "virtual": call.virtual, "devices": list(call.devices),
            "absent": dict(call.absent),
        }  # fmt: skip
        number, inputs, outputs = (
            self._define(out, layout), self._sizes(out, call.inputs), self._sizes(out, call.outputs)
        )  # fmt: skip
        phases: list[int] = []
        for name in CALL_PHASES:
            phase = call.phases.get(name)
            phases += (-1, 0) if phase is None else (phase.offset_ns, phase.host_ns)
        replicas: list[int] = []
        for each in call.replicas:
            replicas += (self._sizes(out, each.inputs), self._sizes(out, each.outputs), each.offset_ns, each.host_ns)
        stages: list[int] = []
        for stage in call.stages:
            about = self._define(out, {"device": stage.device, "parts": list(stage.parts)})
            took = -1 if stage.host_ns is None else stage.host_ns
            stages += (about, self._sizes(out, stage.inputs), self._sizes(out, stage.outputs), stage.offset_ns, took)
        flags = call_flags(call.virtual, call.training, call.grad, call.failed)
        payload = pack_call(
            mode_number(call.mode), flags, number, call.step, call.call, call.start_ns, call.wall_ns, inputs, outputs,
            phases, replicas, stages,
        )  # fmt: skip
        parts: Sequence[Any] = call.replicas or call.stages
        times = [phase.device_ms if (phase := call.phases.get(name)) else None for name in CALL_PHASES]
        times += [part.device_ms for part in parts]
        timed = any(time is not None for time in times)
        return [*out, pack_timed(payload, times, 0) if timed else payload]


def _spans(step: Step) -> list[int]:
    if not step.spans:
        return []
    spans = [(SPAN_PHASES.index(name), step.start_ns + begin, took) for name, begin, took in step.spans]
    return span_words(spans, step.start_ns, step.wall_ns, step.missing_spans)


def _step(step: Step) -> bytes:
    took = [step.phases.get(name, -1) for name in BODY_PHASES]
    samples = -1 if step.samples is None else step.samples
    numbers = step.step, step.start_ns, step.wall_ns, samples
    payload = pack_step(mode_number(step.mode), *numbers, took, _spans(step))
    known = {**step.phases, **step.quantities}
    extras = {name: value for name in STEP_EXTRAS if (value := known.get(name)) is not None}
    payload = with_extras(payload, extras) if extras else payload
    if step.device_ms is None:
        return payload
    why = UNTIMED.index(step.untimed) if step.untimed in UNTIMED else 0
    names = [name for name in TIMED_PHASES if name in BODY_PHASES or name in step.phases]
    return pack_timed(payload, [step.device_ms.get(name) for name in names], why)
