"""Adds up a whole run from its history and rings."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

from dpmon.record.codec import Event, RecordError, definition, kind_of, step_fields, step_times
from dpmon.record.plainjson import load_event
from dpmon.record.wire import MODES
from dpmon.run.adder import Adder
from dpmon.run.export import Snapshot
from dpmon.run.past import deleted
from dpmon.run.reader import RunReader
from dpmon.run.rows import record_of, step_columns, step_device
from dpmon.run.standing import IDLE
from dpmon.run.tables import HistoryError
from dpmon.run.totals import Totals

__all__ = ["add_up", "why_nothing"]


def add_up(directory: Path, adder: Adder | None = None) -> Totals:
    """Everything the run in `directory` has recorded, added up; RunError if the directory is no run.

    `adder`: one that wants to see everything too.
    """
    snapshot = Snapshot.take(directory)
    adder = adder or Adder()
    if snapshot.damaged is not None:
        adder.totals.warnings.append(snapshot.damaged)
    try:
        if snapshot.kept is not None:
            try:
                for width, rollup in deleted(snapshot.kept):
                    adder.delete(width, rollup)
                for row in snapshot.kept.deleted_samples():
                    adder.delete_samples(*row)
                _add_kept(adder, snapshot)
            except (HistoryError, ValueError) as error:
                adder.totals.warnings.append(f"the history cannot be read to its end: {error}")
        for process, payload in _payloads(snapshot):
            try:
                _add_payload(adder, process, payload, snapshot.info.start_ns)
            except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, struct.error):
                snapshot.dropped += 1
        totals = adder.result()
        totals.dropped = snapshot.dropped
        totals.pruned = snapshot.kept.pruned if snapshot.kept is not None else 0
        return totals
    finally:
        snapshot.close()


def why_nothing(totals: Totals, reader: RunReader) -> str | None:
    """Why a run without steps and calls has none; None for one whose command was not started."""
    # Where the record is kept is told as a warning too, but is no reason.
    warnings = [text for text in totals.warnings if text != reader.info.options.get("elsewhere")]
    if warnings:
        return warnings[0]
    stage = reader.stage()
    if reader.info.command_pid is None:
        return None
    if stage is None:
        return "no Python process of the run imported torch"
    if stage[0] == "importing torch":
        return "the process ended while it imported torch"
    if stage[0] in IDLE:
        return "torch was imported, but no model was called"
    how = reader.exit()
    end_ns = time.monotonic_ns() if how is None else how.end_ns
    process = "the process is" if how is None else "when the process ended, it was"
    return f"no model was called; {process} {stage[0]}, for {max(end_ns - stage[1], 0) / 1e9:.0f} s"


def _payloads(snapshot: Snapshot) -> Iterator[tuple[int, bytes]]:
    for rest in snapshot.rest:
        for payload in rest.payloads:
            yield rest.process, payload


def _add_kept(adder: Adder, snapshot: Snapshot) -> None:
    assert snapshot.kept is not None
    for ring in snapshot.kept.rings.values():
        for number, value in snapshot.kept.definitions(ring.process):
            adder.define(ring.process, number, value)
    for row in snapshot.kept.rows():
        try:
            if row[1] == "calls":
                adder.call(row[3], row[-1])
            elif row[1] == "steps":
                adder.step(*step_columns(row), step_device(row))
            else:
                event = record_of(row, {})
                if isinstance(event, Event):
                    adder.event(event.kind, event.data)
        except (RecordError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, struct.error):
            snapshot.dropped += 1


def _add_payload(adder: Adder, process: int, payload: bytes, origin: int) -> None:
    kind = kind_of(payload)
    if kind == "definition":
        adder.define(process, *definition(payload))
    elif kind == "call":
        adder.call(process, payload)
    elif kind == "step":
        mode, number, start, wall, samples, *phases = step_fields(payload)
        known: list[int | None] = [took if took >= 0 else None for took in phases]
        other = max(0, wall - sum(took for took in phases if took >= 0))
        known_samples = samples if samples >= 0 else None
        began, times = start - origin, step_times(payload)
        adder.step(process, number, MODES[mode], began, wall, known_samples, [*known, other], times)
    elif kind == "event":
        adder.event(*load_event(payload[1:]))
