"""Tables that are declared once: columns over facts, with their words for people and their members in JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from dpmon.text.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_duration,
    format_long_duration,
    format_percent,
)

Row = TypeVar("Row", contravariant=True)

_SECONDS = {
    "t_ns": "t_s",
    "begin_ns": "t_s",
    "start_ns": "start_s",
    "since_ns": "since_s",
    "end_ns": "end_s",
    "ns": "seconds",
    "took_ns": "seconds",
    **{f"{name}_ns": f"{name}_s" for name in ("left", "error", "evaluation", "pause")},
}
"""The members with a time since the run's start, or with a long duration; other times are in ms."""
_UNITS = {
    **{name: f"{name}_bytes" for name in ("mem_used_max", "mem_run_max", "mem_total")},
    "util_median": "util_median_pct",
    "temperature_max": "temperature_max_c",
    "power_max": "power_max_w",
}


def ms(ns: float | None) -> float | None:
    """Return a time in ms instead of ns."""
    return None if ns is None else ns / 1e6


def fields_of(fact: object, *names: str) -> dict[str, object]:
    """Return fields of an object by their names in JSON, with times in s or ms instead of ns."""
    members: dict[str, object] = {}
    for name in names:
        value = getattr(fact, name)
        if name in _SECONDS:
            members[_SECONDS[name]] = None if value is None else value / 1e9
        elif name.endswith("_ns"):
            members[f"{name[:-3]}_ms"] = ms(value)
        elif isinstance(value, Mapping):
            members[name] = dict(value)
        else:
            members[_UNITS.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return members


class Form(NamedTuple):
    """How the known values of a column are shown to people, and in JSON."""

    words: Callable[[Any], str]
    to_json: Callable[[Any], object] = lambda value: value
    is_text: bool = False
    """True for text, which is aligned at the left."""


TEXT = Form(str, is_text=True)
NUMBER = Form(lambda value: f"{value:.0f}")
COUNT = Form(format_count)
BYTES = Form(format_bytes)
SHARE = Form(format_percent)
DURATION = Form(format_duration, ms)
"""A time in ns; ms in JSON."""
LONG_DURATION = Form(format_long_duration, lambda ns: ns / 1e9)
"""A time in ns; s in JSON."""


@dataclass(frozen=True)
class FactColumn(Generic[Row]):
    """One column of a table: a fact of each row."""

    head: str
    """The title for people."""
    fact: Callable[[Row], object]
    """The value of a row; None if unknown."""
    form: Form = DURATION
    member: str = ""
    """The name in JSON; empty if the table's `fields` have it, or only people need it."""
    why: Callable[[Row], str | None] | None = None
    """Why the value of a row is unknown, if there is a reason."""
    short: str = ""
    """The title where there is little room."""
    is_optional: bool = False
    """Whether the column is left out if no row has a value."""
    on_screen: bool = True
    """Whether panels show it, too."""

    def cell(self, row: Row) -> str:
        """Return the value of a row in words."""
        value = self.fact(row)
        return UNKNOWN if value is None else self.form.words(value)

    def json_value(self, row: Row) -> object:
        """Return the value of a row in the unit of JSON; None if unknown."""
        value = self.fact(row)
        return None if value is None else self.form.to_json(value)


@dataclass(frozen=True)
class FactTable(Generic[Row]):
    """A table: the column that names its rows, the others, and the fields of a row that only JSON has."""

    label: FactColumn[Row]
    columns: Sequence[FactColumn[Row]]
    fields: Sequence[str] = ()
    """Names of attributes, for `fields_of`."""

    def shown_columns(self, rows: Sequence[Row], *, on_screen: bool = False) -> list[FactColumn[Row]]:
        """Return the columns for people, without optional ones that no row has; `on_screen`: those of panels."""
        return [
            column
            for column in self.columns
            if (column.on_screen or not on_screen)
            and not (column.is_optional and all(column.fact(row) is None for row in rows))
        ]

    def as_json(self, row: Row) -> dict[str, object]:
        """Return the members of a row; `absent` has the reasons for unknown values, if the table has any."""
        members = fields_of(row, *self.fields)
        reasons: dict[str, str] = {}
        for column in self.columns:
            value = column.json_value(row)
            if column.member:
                members[column.member] = value
            if column.why is not None and value is None and (reason := column.why(row)) is not None:
                reasons[column.member] = reason
        if any(column.why is not None for column in self.columns):
            members["absent"] = reasons
        return members
