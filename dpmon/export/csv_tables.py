"""CSV: one table per kind, one row per record (for memory, one per device), the same columns for every run.

An empty cell means that a value is unknown or a phase did not run (`absent` says which). A list takes one cell. Spaces
separate names and numbers, and ` | ` separates replicas and stages. A size is `path:30x5:float32:600` (path, shape,
dtype, bytes; a DTensor adds its global shape), and a span is `forward:0.25:1.5` (phase, start and duration in ms). The
last column, `more`, has all members without a column as JSON, so that nothing is lost.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO

from dpmon.record.jsonl import as_json
from dpmon.record.record_specs import COLUMNS, RECORDS
from dpmon.record.record_types import Call, Event, PhaseSpan, Record, Size, Step, count_rows, kind_of
from dpmon.record.shared_names import MORE
from dpmon.sanitize import strip_control_chars, to_safe_json

_SPREAD = ("kind", *(one.name for one in RECORDS["step"].fields if one.csv_columns != (one.name,)))
"""Members of a step in JSON that have no column of the same name."""
_OTHER: tuple[str, ...] = ("kind",)
_FORMULA = re.compile(r" *[=+@-]")
_NUMBERS = re.compile(r"[-+.e0-9 ]*")
"""Numbers separated by spaces; some may be unknown (`-`)."""


class CsvTables:
    """Writes records into one CSV file per kind; `open_table` opens the file of a kind on its first record."""

    def __init__(self, open_table: Callable[[str], TextIO]) -> None:
        self._open = open_table
        self._tables: dict[str, Callable[[Iterable[Sequence[str]]], object]] = {}

    def row_writer(self, which: str) -> Callable[[Iterable[Sequence[str]]], object]:
        """Return the function that writes rows of one kind, after its header. Unknown kinds share the table `other`."""
        which = which if which in COLUMNS else "other"
        if which not in self._tables:
            self._tables[which] = csv.writer(self._open(which), lineterminator="\n").writerows
            self._tables[which]([(*COLUMNS.get(which, _OTHER), "more")])
        return self._tables[which]

    def write(self, records: Iterable[Record]) -> None:
        """Write every record's row."""
        for record in records:
            self.row_writer(kind_of(record))(csv_rows_of(record))


def csv_rows_of(record: Record) -> list[list[str]]:
    """The cells of a record in the order of its kind's columns; several rows for a memory record of several devices."""
    if isinstance(record, Event):
        if record.kind == "memory":
            return _memory(record.data)
        if record.kind not in COLUMNS:
            return [[record.kind, _text(record.data)]]
        return [_cells(record.kind, record.data)]
    values, ignore = as_json(record), _OTHER
    values["absent"] = values["absent"] or None
    if isinstance(record, Call):
        values, ignore = values | _call(record), ("kind", "phases")
    elif isinstance(record, Step):
        values, ignore = values | _step(record), _SPREAD
    return [_cells(kind_of(record), values, ignore)]


def _cells(which: str, values: Mapping[str, object], ignore: tuple[str, ...] = ()) -> list[str]:
    columns = COLUMNS[which]
    more = {key: value for key, value in values.items() if key not in columns and key not in ignore}
    return [*(_text(values.get(column)) for column in columns), _text(more or None)]


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _cell(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)) and all(isinstance(one, (str, int, float)) for one in value):
        return _cell(" ".join(map(str, value)))
    return _cell(to_safe_json(value, separators=(",", ":")))


def _cell(text: str) -> str:
    """`text` made harmless, with an apostrophe before what a spreadsheet would take for a formula."""
    text = strip_control_chars(text)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBERS.fullmatch(text) else text


# ------------------------------------------------------------------------------------------------ kinds


def _step(step: Step) -> dict[str, object]:
    on_device = {f"{name}_device_ms": took for name, took in (step.device_ms or {}).items()}
    phases = {f"{name}_ms": took / 1e6 for name, took in step.phases.items()}
    return {**phases, **on_device, "spans": " ".join(map(_span, step.spans))}


def _span(span: PhaseSpan) -> str:
    return f"{span.phase}:{span.offset_ns / 1e6!r}:{span.host_ns / 1e6!r}"


def _call(call: Call) -> dict[str, object]:
    cells: dict[str, object] = {
        "mode": call.mode or None,
        "failed": call.failed,
        "rows": call.rows,
        "inputs": _sizes(call.inputs),
        "outputs": _sizes(call.outputs),
    }
    for name, phase in call.phases.items():
        cells[f"{name}_host_ms"], cells[f"{name}_device_ms"] = phase.host_ns / 1e6, phase.device_ms
    if call.stages:
        cells["stages"], cells["replicas"] = len(call.stages), None
        cells["stage_devices"] = [stage.device for stage in call.stages]
        cells["stage_parts"] = " | ".join(" ".join(stage.parts) for stage in call.stages)
        cells["stage_host_ms"] = _join_numbers(None if s.host_ns is None else s.host_ns / 1e6 for s in call.stages)
        if any(stage.device_ms is not None for stage in call.stages):
            cells["stage_device_ms"] = _join_numbers(stage.device_ms for stage in call.stages)
        cells["stage_crossed_bytes"] = _join_numbers(stage.crossed_bytes for stage in call.stages)
        return cells
    shares = call.replicas
    cells["replicas"] = len(shares)
    cells["idle_devices"] = list(call.devices[len(shares) :]) if call.mode == "dp" else None
    cells["replica_devices"] = [share.device for share in shares]
    cells["replica_rows"] = _join_numbers(count_rows(share.inputs, call.dim) for share in shares)
    cells["replica_host_ms"] = _join_numbers(share.host_ns / 1e6 for share in shares)
    if any(share.device_ms is not None for share in shares):
        cells["replica_device_ms"] = _join_numbers(share.device_ms for share in shares)
    cells["replica_inputs"] = " | ".join(_sizes(share.inputs) or "" for share in shares)
    cells["replica_outputs"] = " | ".join(_sizes(share.outputs) or "" for share in shares)
    return cells


def _join_numbers(values: Iterable[float | int | None]) -> str:
    """Numbers separated by spaces; `-` stands for an unknown one."""
    return " ".join("-" if value is None else repr(value) for value in values)


def _sizes(sizes: tuple[Size, ...] | None) -> str | None:
    if sizes is None:
        return None
    return " ".join(_size(size) for size in sizes if size.path != MORE)


def _size(size: Size) -> str:
    parts = [size.path, _format_shape(size.shape), size.dtype, str(size.bytes)]
    if size.global_shape is not None:
        parts.append(_format_shape(size.global_shape))
    return ":".join(parts)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _memory(data: Mapping[str, object]) -> list[list[str]]:
    """One row per device; each repeats the record's other members."""
    common = {key: value for key, value in data.items() if key not in ("devices", "absent")}
    if data.get("absent"):
        common["record_absent"] = data["absent"]
    devices = data.get("devices")
    rows = []
    for one in devices if isinstance(devices, list) else ():
        with contextlib.suppress(TypeError):
            rows.append(_cells("memory", {**common, **one}))
    return rows
