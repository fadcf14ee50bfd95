"""The classes for a field and a kind of record, and the fields common to many kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import dedent

_UNITS = {
    "_bytes_s": "bytes/s",
    "_bytes": "bytes",
    "_ms": "ms",
    "_s": "s",
    "_mhz": "MHz",
    "_pct": "%",
    "_c": "degrees Celsius",
    "_w": "W",
    "_j": "J",
}
"""Units of fields by the ends of their names."""
_SCALES = {"%": 0.01, "ms": 1e-3, "MHz": 1e6}
"""Factors from units of fields to units of metrics, other than 1."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field of a record, under its name in JSON."""

    name: str
    type: str
    """integer, number, text, boolean, list or object; each may be null, with the reason in `absent`."""
    meaning: str
    columns: tuple[str, ...] | None = None
    """Its columns in CSV; None: one column of the same name."""
    only_csv: bool = False
    """Whether JSON lacks it, because it follows from other fields there."""
    metric: str = ""
    """Its name as a Prometheus gauge; empty if it is not one."""
    odd_unit: str = ""
    """Its unit, if the end of its name does not tell."""

    @property
    def unit(self) -> str:
        """Its unit; empty if it has none."""
        return self.odd_unit or next((unit for end, unit in _UNITS.items() if f"_{self.name}".endswith(end)), "")

    @property
    def scale(self) -> float:
        """Factor from its unit to the metric's unit."""
        return _SCALES.get(self.unit, 1)

    @property
    def in_csv(self) -> tuple[str, ...]:
        """The names of its columns in CSV."""
        return (self.name,) if self.columns is None else self.columns

    @property
    def help(self) -> str:
        """Its meaning as a sentence."""
        return f"{self.meaning[0].upper()}{self.meaning[1:]}."


@dataclass(frozen=True, slots=True)
class RecordSpec:
    """A kind of record: its name in `kind`, and its fields in the order of its columns in CSV."""

    name: str
    meaning: str
    fields: tuple[FieldSpec, ...]
    row: str = "record"
    """What a row of CSV describes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its table in CSV."""
        return tuple(name for each in self.fields for name in each.in_csv)


def _parse_fields(lines: Iterable[str], known: Mapping[str, FieldSpec]) -> Iterator[FieldSpec]:
    """Yield the fields in the lines of a table; see `parse_record_spec`."""
    for line in lines:
        if ": " not in line:
            yield from (known[name] for name in line.split())
            continue
        about, _, metric = line.partition(" -> ")
        about, _, note = about.partition(" [")
        head, meaning = about.split(": ", 1)
        name, type_, *unit = head.split(", ")
        whether, _, names = note.removesuffix("]").partition("in CSV")
        columns = () if whether == "not " else tuple(names[2:].split()) or None
        yield FieldSpec(name, type_, meaning, columns, whether == "only ", metric, "".join(unit))


def _join_indented(table: str) -> list[str]:
    """Return the lines of a table; a line that is indented further continues the line before it."""
    return re.sub(r"\n +", " ", dedent(table).strip()).splitlines()


def parse_record_spec(table: str, *more: FieldSpec, row: str = "record") -> RecordSpec:
    """Return a kind of record from a table of its fields.

    The first line is `name: meaning`. The line of a field is `name, type: meaning`, or `name, type, unit: meaning` if
    the end of the name does not tell the unit. After it may come `[only in CSV]`, `[not in CSV]` or `[in CSV: names]`,
    then ` -> ` and the name of its metric. Other lines name fields of `more`, or fields of many kinds.
    """
    head, *lines = _join_indented(table)
    name, meaning = head.split(": ", 1)
    known = {**_SHARED, **{field.name: field for field in more}}
    return RecordSpec(name, meaning, tuple(_parse_fields(lines, known)), row)


_SHARED = {
    field.name: field
    for field in _parse_fields(
        _join_indented("""
    process, integer: the training process, from 0
    rank, integer: the rank of the process; null if it has none
    t_s, number: time since the run's start
    start_s, number: time of its start, since the run's start
    wall_ms, number: its duration
    mode, text: dp (over several devices) or single (one device, as on every rank); null if unknown
    absent, object: why a field is null or missing, by the field's name
    devices, list: the devices available to it, by torch's names
    inputs, list: each tensor among the arguments: path, shape, dtype, bytes. Shape and bytes describe the part on this
        rank; a DTensor, which is divided among ranks, also has global_shape
    outputs, list: each tensor of the result: path, shape, dtype, bytes. Shape and bytes describe the part on this rank;
        a DTensor, which is divided among ranks, also has global_shape
    """),
        {},
    )
}
"""The fields that many kinds have."""
