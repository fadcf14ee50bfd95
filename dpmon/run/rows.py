"""Between a ring's payloads, the history's rows and records: what is in which column is known here only."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from dpmon.rates import Between
from dpmon.record.codec import (
    BACKWARD_AT,
    OPTIMIZER_AT,
    Decoder,
    Event,
    Record,
    RecordError,
    Step,
    call_head,
    copied_bytes,
    definition,
    is_evaluation,
    kept_step_times,
    kind_of,
    step_fields,
    step_times,
)
from dpmon.record.plainjson import load_event
from dpmon.record.wire import MODES, STEP_PHASES, pack_definition
from dpmon.run.history import Batch
from dpmon.run.kept import Kept
from dpmon.run.tables import RingRow

__all__ = ["Sorter", "decoders_of", "record_of", "step_columns", "step_device"]

_MAX_INT = (1 << 63) - 1
_DEVICE_AT = 9 + 5
_COPY_AT = _DEVICE_AT + 1
_WHOLE, _WHOLE_OR_NONE = {int}, {int, type(None)}


class Sorter:
    """Puts one ring's payloads into the rows they belong to, without decoding more than the columns need."""

    def __init__(self, row: RingRow, start_ns: int) -> None:
        self.row = row
        self._start_ns = start_ns
        self._rows: dict[int, int | None] = {}
        self._between = Between()

    def learn(self, number: int, value: Any) -> None:
        """Remember how many rows a batch has whose inputs are this definition (None: not to be known)."""
        if isinstance(value, list):
            shapes = (size[1] for size in value if size[1])
            rows = next((shape[0] for shape in shapes), None)
            self._rows[number] = rows if type(rows) is int and 0 <= rows <= _MAX_INT else None

    def add(self, batch: Batch, number: int, payload: bytes) -> bool:
        """Put `payload` into `batch` under the id `number`; False if it was a definition, which takes no id.

        Raises RecordError for bytes that are no record.
        """
        kind = kind_of(payload)
        try:
            if kind == "call":
                batch.calls.append(self._call(batch, number, payload))
            elif kind == "step":
                batch.steps.append(self._step(batch, number, payload))
            elif kind == "event":
                batch.events.append(self._event(batch, number, payload))
            elif kind == "definition":
                which, value = definition(payload)
                _check(which)
                self.learn(which, value)
                batch.definitions.append((self.row.process, which, json.dumps(value, separators=(",", ":"))))
                return False
            else:
                raise RecordError("unknown kind of record")
        except (LookupError, ValueError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise RecordError(f"unreadable record: {type(error).__name__}") from None
        return True

    def _call(self, batch: Batch, number: int, payload: bytes) -> tuple[Any, ...]:
        mode, _, _, _, step, call, start, wall, inputs, _, *phases = call_head(payload)
        began = start - self._start_ns
        _check(step, call, began, wall, began + wall)
        batch.rollup(began + wall, self.row.process, MODES[mode]).calls.append(phases)
        row = (
            number, self.row.process, call, step, MODES[mode], began, wall,
            self._rows.get(inputs), payload,
        )  # fmt: skip
        self._place(number)
        self.row.calls += 1
        return row

    def _step(self, batch: Batch, number: int, payload: bytes) -> tuple[Any, ...]:
        mode, step, start, wall, samples, *phases = step_fields(payload)
        began = start - self._start_ns
        _check(step, began, wall, began + wall)
        data, copy, *known = [took if took >= 0 else None for took in phases]
        other = max(0, wall - sum(took for took in phases if took >= 0))
        count = samples if samples >= 0 else None
        gap = self._between.step(step, began, wall, is_evaluation(phases[BACKWARD_AT], phases[OPTIMIZER_AT]))
        between = min(gap.ns, _MAX_INT)
        row = (
            number, self.row.process, step, MODES[mode], began, wall, count,
            data, *known, other, step_times(payload), copy, copied_bytes(payload),
            -between if gap.evaluation else between,
        )  # fmt: skip
        batch.rollup(began + wall, self.row.process, MODES[mode]).steps.append(row)
        self._place(number)
        self.row.steps += 1
        self.row.last_step = step
        return row

    def _place(self, number: int) -> None:
        row = self.row
        if row.first_id is not None:
            row.last_id = number
        elif row.calls == row.steps == 0:  # else where it began is not known: an earlier version has begun it
            row.first_id = row.last_id = number

    def _event(self, batch: Batch, number: int, payload: bytes) -> tuple[Any, ...]:
        text = payload[1:].decode()
        kind, data = load_event(text)
        seconds = data.get("t_s")
        t_ns = int(seconds * 1e9) if isinstance(seconds, (int, float)) and abs(seconds) < 1e9 else None
        process = self.row.process if self.row.process >= 0 else None
        kind.encode()  # ValueError: half a character, which the database does not take
        if kind == "pause" and data.get("refused") is None:
            took = data.get("paused_s")
            took_ns = int(took * 1e9) if isinstance(took, (int, float)) and 0 <= took < 1e9 else None
            self._between.pause(data.get("paused") is True, t_ns, took_ns)
        if process is None and t_ns is not None and kind in ("device", "host"):
            _add_sample(batch, t_ns, kind, data)
        return (number, process, kind, t_ns, text)


def _add_sample(batch: Batch, t_ns: int, kind: str, data: Mapping[str, Any]) -> None:
    index = data.get("index") if kind == "device" else -1
    if type(index) is not int or not -1 <= index <= 0xFFFF:
        return
    for name, value in data.items():
        if type(value) in (int, float) and name not in ("t_s", "index") and abs(value) < 1e18:
            name.encode()
            batch.device(t_ns, index, name[:64], float(value))


def _check(*numbers: int) -> None:
    """RecordError for what the database has no room for: a damaged record."""
    if min(numbers) < -_MAX_INT or max(numbers) > _MAX_INT:
        raise RecordError("numbers beyond reason")


def decoders_of(kept: Kept, origin_ns: int) -> dict[int, Decoder]:
    """For every process that a history knows, a decoder that knows its definitions."""
    found = {}
    for row in kept.rings.values():
        decoder = found[row.process] = Decoder(row.process, row.rank, origin_ns)
        for number, value in kept.definitions(row.process):
            try:
                decoder.decode(pack_definition(number, value))
            except (RecordError, struct.error):
                continue  # its calls will be found unreadable, and counted
    return found


def record_of(row: tuple[Any, ...], decoders: Mapping[int, Decoder]) -> Record:
    """The record in a row as `Kept.rows` gives it; RecordError if it is damaged."""
    table = row[1]
    try:
        if table == "calls":
            record = decoders[row[3]].decode(row[-1])
        elif table == "steps":
            record = _step_of(row, decoders)
        else:
            record = Event(*load_event(row[-1]))
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise RecordError(f"damaged row in {table}: {type(error).__name__}") from None
    if record is None:
        raise RecordError(f"damaged row in {table}")
    return record


def step_columns(row: tuple[Any, ...]) -> tuple[int, int, str, int, int, int | None, list[int | None]]:
    """process, step, mode, start_ns, wall_ns, samples and the phases of a row of steps; RecordError if damaged."""
    _, _, _, process, step, mode, start_ns, wall_ns, samples = row[:9]
    phases = [*row[9:10], _later(row, _COPY_AT), *row[10:_DEVICE_AT]]
    # SQLite holds whatever was written into a column, of any type.
    if mode not in MODES or len(phases) != len(STEP_PHASES):
        raise RecordError("damaged row in steps")
    # By their types at once: this is done for every step of a report.
    if {type(process), type(step), type(start_ns), type(wall_ns)} != _WHOLE:
        raise RecordError("damaged row in steps")
    if not {type(samples), *map(type, phases)} <= _WHOLE_OR_NONE:
        raise RecordError("damaged row in steps")
    return process, step, mode, start_ns, wall_ns, samples, phases


def _step_of(row: tuple[Any, ...], decoders: Mapping[int, Decoder]) -> Step:
    process, step, mode, start_ns, wall_ns, samples, phases = step_columns(row)
    found = Step(
        process=process,
        rank=decoders[process].rank,
        step=step,
        mode=mode,
        start_ns=start_ns,
        wall_ns=wall_ns,
        samples=samples,
        phases={name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None},
        copied=copied if type(copied := _later(row, _COPY_AT + 1)) is int else None,
    )
    times = step_device(row)
    return found if times is None else kept_step_times(found, times)


def step_device(row: tuple[Any, ...]) -> bytes | None:
    """What a row of steps has of its devices, as dpmon.record.codec.step_times."""
    kept = _later(row, _DEVICE_AT)
    return kept if isinstance(kept, bytes) else None


def _later(row: tuple[Any, ...], at: int) -> Any:
    """A column that a history lacks which an earlier version began."""
    return row[at] if at < len(row) else None
