"""The classes that describe a field and a kind of record, and the fields that many kinds share."""

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
"""Units of fields by the suffix of their names."""
_SCALES = {"%": 0.01, "ms": 1e-3, "MHz": 1e6}
"""Factors from the units of fields to the units of metrics, where they differ."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field of a record. `name` is its name in JSON."""

    name: str
    type: str
    """integer, number, text, boolean, list or object. Any field may be null, with the reason in `absent`."""
    meaning: str
    columns: tuple[str, ...] | None = None
    """Its columns in CSV; None: one column of the same name."""
    only_csv: bool = False
    """Whether JSON omits it, because it follows from other fields there."""
    metric: str = ""
    """Its name as a Prometheus gauge; empty if it is not exported as a metric."""
    explicit_unit: str = ""
    """Its unit, if the suffix of its name does not imply one."""

    @property
    def unit(self) -> str:
        """Its unit; empty if it has none."""
        if self.explicit_unit:
            return self.explicit_unit
        return next((unit for suffix, unit in _UNITS.items() if f"_{self.name}".endswith(suffix)), "")

    @property
    def scale(self) -> float:
        """Factor from its unit to the metric's unit."""
        return _SCALES.get(self.unit, 1)

    @property
    def csv_columns(self) -> tuple[str, ...]:
        """The names of its columns in CSV."""
        return (self.name,) if self.columns is None else self.columns

    @property
    def help(self) -> str:
        """Its meaning as a sentence."""
        return f"{self.meaning[:1].upper()}{self.meaning[1:]}."


@dataclass(frozen=True, slots=True)
class RecordSpec:
    """A kind of record. `name` is its `kind` in JSON; `fields` are in the order of the CSV columns."""

    name: str
    meaning: str
    fields: tuple[FieldSpec, ...]
    row: str = "record"
    """The thing that a CSV row describes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its CSV table."""
        return tuple(name for field in self.fields for name in field.csv_columns)


def _parse_fields(lines: Iterable[str], fields_by_name: Mapping[str, FieldSpec]) -> Iterator[FieldSpec]:
    """Yield the fields that the lines of a table define; see `parse_record_spec`."""
    for line in lines:
        if ": " not in line:
            yield from (fields_by_name[name] for name in line.split())
            continue
        definition, _, metric = line.partition(" -> ")
        definition, _, note = definition.partition(" [")
        signature, meaning = definition.split(": ", 1)
        name, type_, *unit = signature.split(", ")
        csv_note, _, csv_names = note.removesuffix("]").partition("in CSV")
        columns = () if csv_note == "not " else tuple(csv_names[2:].split()) or None
        yield FieldSpec(name, type_, meaning, columns, csv_note == "only ", metric, "".join(unit))


def _join_indented(table: str) -> list[str]:
    """Return the lines of a table. A line that is indented further continues the previous line."""
    return re.sub(r"\n +", " ", dedent(table).strip()).splitlines()


def parse_record_spec(table: str, *more_fields: FieldSpec, row: str = "record") -> RecordSpec:
    """Return the kind of record that a table of fields describes.

    The first line is `name: meaning`. A field is a line `name, type: meaning`, or `name, type, unit: meaning` if the
    suffix of the name does not imply the unit. It may be followed by `[only in CSV]`, `[not in CSV]` or
    `[in CSV: names]`, then by ` -> ` and the name of its metric. Any other line lists names of fields that are defined
    in `more_fields` or shared by many kinds.
    """
    header, *lines = _join_indented(table)
    name, meaning = header.split(": ", 1)
    fields_by_name = {**_COMMON_FIELDS, **{field.name: field for field in more_fields}}
    return RecordSpec(name, meaning, tuple(_parse_fields(lines, fields_by_name)), row)


_COMMON_FIELDS = {
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
"""The fields that many kinds share."""
