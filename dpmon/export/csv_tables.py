"""CSV: one table per kind and one row per record (for memory, one per device), with the same columns for every run.

An empty cell means that a value is unknown or that a phase did not run (`absent` tells which). A list takes one cell.
Spaces separate names and numbers, and ` | ` separates replicas and stages. A size is `path:30x5:float32:600` (path,
shape, dtype, bytes; a DTensor adds its global shape), and a span is `forward:0.25:1.5` (phase, start and duration in
ms). The last column, `more`, has all members without a column as JSON, so that nothing is lost.
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

_STEP_MEMBERS_WITHOUT_COLUMN = (
    "kind",
    *(field.name for field in RECORDS["step"].fields if field.csv_columns != (field.name,)),
)
"""Members of a step in JSON that have no column of the same name."""
_OTHER_COLUMNS: tuple[str, ...] = ("kind",)
_FORMULA = re.compile(r" *[=+@-]")
_NUMBER_LIST = re.compile(r"[-+.e0-9 ]*")
"""Numbers separated by spaces. `-` stands for an unknown number."""


class CsvTables:
    """Writer of records into one CSV file per kind. `open_table` is called for a kind's first record."""

    def __init__(self, open_table: Callable[[str], TextIO]) -> None:
        self._open = open_table
        self._tables: dict[str, Callable[[Iterable[Sequence[str]]], object]] = {}

    def row_writer(self, table_name: str) -> Callable[[Iterable[Sequence[str]]], object]:
        """Return the function that writes rows of one kind, after its header. Unknown kinds share the table `other`."""
        table_name = table_name if table_name in COLUMNS else "other"
        if table_name not in self._tables:
            self._tables[table_name] = csv.writer(self._open(table_name), lineterminator="\n").writerows
            self._tables[table_name]([(*COLUMNS.get(table_name, _OTHER_COLUMNS), "more")])
        return self._tables[table_name]

    def write(self, records: Iterable[Record]) -> None:
        """Write the rows of all records."""
        for record in records:
            self.row_writer(kind_of(record))(csv_rows_of(record))


def csv_rows_of(record: Record) -> list[list[str]]:
    """Return the rows of a record, with cells in the order of its kind's columns. Only a memory record has several."""
    if isinstance(record, Event):
        if record.kind == "memory":
            return _memory_rows(record.data)
        if record.kind not in COLUMNS:
            return [[record.kind, _format_value(record.data)]]
        return [_row_cells(record.kind, record.data)]
    members, ignored_members = as_json(record), _OTHER_COLUMNS
    members["absent"] = members["absent"] or None
    if isinstance(record, Call):
        members, ignored_members = members | _call_cells(record), ("kind", "phases")
    elif isinstance(record, Step):
        members, ignored_members = members | _step_cells(record), _STEP_MEMBERS_WITHOUT_COLUMN
    return [_row_cells(kind_of(record), members, ignored_members)]


def _row_cells(record_kind: str, members: Mapping[str, object], ignored_members: tuple[str, ...] = ()) -> list[str]:
    columns = COLUMNS[record_kind]
    other_members = {key: value for key, value in members.items() if key not in columns and key not in ignored_members}
    return [*(_format_value(members.get(column)) for column in columns), _format_value(other_members or None)]


def _format_value(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _neutralize_formula(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int, float)) for item in value):
        return _neutralize_formula(" ".join(map(str, value)))
    return _neutralize_formula(to_safe_json(value, separators=(",", ":")))


def _neutralize_formula(text: str) -> str:
    """Return `text` without control characters. A formula gets an apostrophe, so that no spreadsheet runs it."""
    text = strip_control_chars(text)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER_LIST.fullmatch(text) else text


# ------------------------------------------------------------------------------------------------ kinds


def _step_cells(step: Step) -> dict[str, object]:
    device_cells = {f"{name}_device_ms": duration for name, duration in (step.device_ms or {}).items()}
    phase_cells = {f"{name}_ms": duration / 1e6 for name, duration in step.phases.items()}
    return {**phase_cells, **device_cells, "spans": " ".join(map(_format_span, step.spans))}


def _format_span(span: PhaseSpan) -> str:
    return f"{span.phase}:{span.offset_ns / 1e6!r}:{span.host_ns / 1e6!r}"


def _call_cells(call: Call) -> dict[str, object]:
    cells: dict[str, object] = {
        "mode": call.mode or None,
        "failed": call.failed,
        "rows": call.rows,
        "inputs": _format_sizes(call.inputs),
        "outputs": _format_sizes(call.outputs),
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
    replicas = call.replicas
    cells["replicas"] = len(replicas)
    cells["idle_devices"] = list(call.devices[len(replicas) :]) if call.mode == "dp" else None
    cells["replica_devices"] = [replica.device for replica in replicas]
    cells["replica_rows"] = _join_numbers(count_rows(replica.inputs, call.dim) for replica in replicas)
    cells["replica_host_ms"] = _join_numbers(replica.host_ns / 1e6 for replica in replicas)
    if any(replica.device_ms is not None for replica in replicas):
        cells["replica_device_ms"] = _join_numbers(replica.device_ms for replica in replicas)
    cells["replica_inputs"] = " | ".join(_format_sizes(replica.inputs) or "" for replica in replicas)
    cells["replica_outputs"] = " | ".join(_format_sizes(replica.outputs) or "" for replica in replicas)
    return cells


def _join_numbers(values: Iterable[float | int | None]) -> str:
    """Return the numbers separated by spaces. `-` stands for an unknown number."""
    return " ".join("-" if value is None else repr(value) for value in values)


def _format_sizes(sizes: tuple[Size, ...] | None) -> str | None:
    if sizes is None:
        return None
    return " ".join(_format_size(size) for size in sizes if size.path != MORE)


def _format_size(size: Size) -> str:
    parts = [size.path, _format_shape(size.shape), size.dtype, str(size.bytes)]
    if size.global_shape is not None:
        parts.append(_format_shape(size.global_shape))
    return ":".join(parts)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _memory_rows(data: Mapping[str, object]) -> list[list[str]]:
    """Return one row per device. Each row repeats the record's other members."""
    shared_members = {key: value for key, value in data.items() if key not in ("devices", "absent")}
    if data.get("absent"):
        shared_members["record_absent"] = data["absent"]
    devices = data.get("devices")
    rows = []
    for device in devices if isinstance(devices, list) else ():
        with contextlib.suppress(TypeError):
            rows.append(_row_cells("memory", {**shared_members, **device}))
    return rows
