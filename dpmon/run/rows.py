"""Between a ring's payloads, the history's rows and records: what is in which column is known here only."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from dpmon.record.codec import Decoder, Event, Record, RecordError, Step, kept_step_times
from dpmon.record.plainjson import load_event
from dpmon.record.schema import QUANTITIES, STEP_PHASES
from dpmon.record.wire import MODES, pack_definition
from dpmon.run.kept import STEP_NAMES, Kept

__all__ = ["decoders_of", "record_of"]

_MAX_INT = (1 << 63) - 1
_DEVICE_AT = 2 + STEP_NAMES.index("device")
_QUANTITIES_AT = 2 + STEP_NAMES.index(QUANTITIES[0].name)
_PHASES_AT = _QUANTITIES_AT + len(QUANTITIES)
_SAMPLES_AT = 2 + STEP_NAMES.index("samples")
_WHOLE, _WHOLE_OR_NONE = {int}, {int, type(None)}


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


def _step_columns(row: tuple[Any, ...]) -> tuple[int, int, str, int, int, int | None, list[int | None]]:
    """process, step, mode, start_ns, wall_ns, samples and the phases of a row of steps; RecordError if damaged."""
    process, step, mode, start_ns, wall_ns = row[3:8]
    samples, phases = row[_SAMPLES_AT], list(row[_PHASES_AT:])
    # SQLite holds whatever was written into a column, of any type.
    if mode not in MODES:
        raise RecordError("damaged row in steps")
    if {type(process), type(step), type(start_ns), type(wall_ns)} != _WHOLE:
        raise RecordError("damaged row in steps")
    if not {type(samples), *map(type, phases)} <= _WHOLE_OR_NONE:
        raise RecordError("damaged row in steps")
    return process, step, mode, start_ns, wall_ns, samples, phases


def _step_of(row: tuple[Any, ...], decoders: Mapping[int, Decoder]) -> Step:
    process, step, mode, start_ns, wall_ns, samples, phases = _step_columns(row)
    found = Step(
        process=process,
        rank=decoders[process].rank,
        step=step,
        mode=mode,
        start_ns=start_ns,
        wall_ns=wall_ns,
        samples=samples,
        phases={name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None},
        quantities={
            quantity.name: count
            for quantity, count in zip(QUANTITIES, row[_QUANTITIES_AT:_PHASES_AT], strict=True)
            if type(count) is int and quantity.name != "samples"
        },
    )
    times = row[_DEVICE_AT]
    return kept_step_times(found, times) if isinstance(times, bytes) else found
