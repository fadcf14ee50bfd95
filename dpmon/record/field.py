"""The classes for a field and a kind of record, and the fields common to many kinds."""

from __future__ import annotations

from dataclasses import dataclass

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
class Field:
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
        return self.odd_unit or next((unit for end, unit in _UNITS.items() if self.name.endswith(end)), "")

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
class RecordKind:
    """A kind of record: its name in `kind`, and its fields in the order of its columns in CSV."""

    name: str
    meaning: str
    fields: tuple[Field, ...]
    row: str = "record"
    """What a row of CSV describes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its table in CSV."""
        return tuple(name for each in self.fields for name in each.in_csv)


PROCESS = Field("process", "integer", "the training process, from 0")
RANK = Field("rank", "integer", "the rank of the process; null if it has none")
WHO = (PROCESS, RANK)
T = Field("t_s", "number", "time since the run's start")
START = Field("start_s", "number", "time of its start, since the run's start")
WALL = Field("wall_ms", "number", "its duration")
MODE = Field("mode", "text", "dp (over several devices) or single (one device, as on every rank); null if unknown")
ABSENT = Field("absent", "object", "why a field is null or missing, by the field's name")
DEVICES = Field("devices", "list", "the devices available to it, by torch's names")
_SIZES = (
    "path, shape, dtype, bytes. Shape and bytes describe the part on this rank; a DTensor, which is divided among"
    " ranks, also has global_shape"
)
INPUTS = Field("inputs", "list", f"each tensor among the arguments: {_SIZES}")
OUTPUTS = Field("outputs", "list", f"each tensor of the result: {_SIZES}")


def only_csv(name: str, type_: str, meaning: str) -> Field:
    return Field(name, type_, meaning, only_csv=True)
