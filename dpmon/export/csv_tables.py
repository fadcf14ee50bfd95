"""CSV: one table per kind and one row per record, with the declared fields as columns (`dpmon.record.record_specs`).

An empty cell means that a value is unknown or that a phase did not run (`absent` tells which). A list or an object is
JSON; the phases of a step or a call have a column each.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from dpmon.record.jsonl import as_json
from dpmon.record.record_specs import COLUMNS
from dpmon.record.record_types import Record, kind_of
from dpmon.sanitize import strip_control_chars, to_safe_json

_FORMULA = re.compile(r" *[=+@-]")


class CsvTables:
    """Writer of records into one CSV file per kind. `open_table` is called for a kind's first record."""

    def __init__(self, open_table: Callable[[str], TextIO]) -> None:
        self._open = open_table
        self._tables: dict[str, Callable[[Iterable[Sequence[str]]], object]] = {}

    def row_writer(self, kind: str) -> Callable[[Iterable[Sequence[str]]], object]:
        """Return the function that writes rows of one kind, after its header."""
        if kind not in self._tables:
            self._tables[kind] = csv.writer(self._open(kind), lineterminator="\n").writerows
            self._tables[kind]([COLUMNS[kind]])
        return self._tables[kind]

    def write(self, records: Iterable[Record]) -> None:
        """Write the rows of all records."""
        for record in records:
            self.row_writer(kind_of(record))([csv_row(record)])


def csv_row(record: Record) -> list[str]:
    """Return the cells of a record, in the order of its kind's columns."""
    members = as_json(record)
    for phase, times in (members.get("phases") or {}).items():
        if isinstance(times, dict):  # of a call
            members |= {f"{phase}_{name}": ms for name, ms in times.items()}
        else:
            members[f"{phase}_ms"] = times
    if kind_of(record) == "step":
        members |= {f"{phase}_device_ms": ms for phase, ms in (members.get("device_ms") or {}).items()}
    return [_format_value(members.get(column)) for column in COLUMNS[kind_of(record)]]


def _format_value(value: Any) -> str:
    if value in (None, {}):
        return ""
    if isinstance(value, str):
        # A formula gets an apostrophe, so that no spreadsheet runs it.
        text = strip_control_chars(value)
        return f"'{text}" if _FORMULA.match(text) else text
    return to_safe_json(value, separators=(",", ":"))
