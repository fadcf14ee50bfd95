"""A table of the history: its SQL, the class of its rows, how they are written, and how they reach another machine.

Each table has a module with its declaration and its queries. `dpmon.store.database` lists all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import get_annotations
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.database import HistoryConnection

RowT = TypeVar("RowT")
Parameters = Sequence[Any] | Mapping[str, Any]
"""Values of a query's parameters."""
LAST_NS = (1 << 63) - 1
"""A number that is at least as large as any time (ns) and any id."""
NUMBERED, KEPT = "numbered", "kept"
"""How rows are sent to another machine. NUMBERED: a row has an id from the common counter, and is sent once. KEPT: a
row may change, and the receiver replaces the row with the same key."""
SUM, MIN, MAX, SKETCH = "sum", "min", "max", "sketch"
_BOTH = {
    SUM: "{0} + excluded.{0}",
    MIN: "min({0}, excluded.{0})",
    MAX: "max({0}, excluded.{0})",
    SKETCH: "CAST({0} || excluded.{0} AS BLOB)",
}
"""The SQL for both values, by how a column is combined. A sketch after a sketch is a sketch of both."""
_ALL = {SUM: "total({0})", MIN: "min({0})", MAX: "max({0})", SKETCH: "merged_sketch({0})"}
"""The SQL for many values. Unlike sum(), total() cannot overflow; it is exact below 2^53. So one node of a mirror
cannot stop it with numbers beyond reason."""


@dataclass(frozen=True, eq=False)
class StoreTable(Generic[RowT]):
    """A table of the history. The fields of its row class are its columns, in the same order."""

    name: str
    row: Callable[..., RowT]
    """A NamedTuple or a dataclass."""
    schema: str
    """The SQL that creates the table and its indexes."""
    insertion: str = "INSERT"
    """How a row is written; INSERT OR REPLACE if it takes the place of an earlier row."""
    combined: Mapping[str, str] = field(default_factory=dict)
    """How a row changes the row with the same key: by column, one of SUM, MIN, MAX and SKETCH. Rows of several times
    become one row in the same way (`merge_sql`)."""
    sent: str = ""
    """NUMBERED or KEPT; empty if rows stay on this machine."""
    not_sent: str = ""
    """A column that has a value of its own on each machine."""

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns."""
        return tuple(get_annotations(self.row))

    @cached_property
    def column_list(self) -> str:
        """The names of its columns for a query."""
        return ", ".join(self.columns)

    @cached_property
    def insert_sql(self) -> str:
        """The statement that writes a row."""
        marks = ", ".join("?" * len(self.columns))
        return f"{self.insertion} INTO {self.name} ({self.column_list}) VALUES ({marks}) {self.on_conflict}"

    @cached_property
    def on_conflict(self) -> str:
        """The end of a statement that inserts rows; empty if no row changes another one."""
        changes = [f"{name} = {_BOTH[function].format(name)}" for name, function in self.combined.items()]
        return f"ON CONFLICT DO UPDATE SET {', '.join(changes)}" if changes else ""

    @cached_property
    def key_columns(self) -> list[str]:
        """The columns whose rows are combined over the time: all others but the time."""
        return [name for name in self.columns if name not in ("width", "start_s", *self.combined)]

    def merge_sql(self, source: str, group_by: Sequence[str] = (), **times: str) -> str:
        """Return a query that makes one row for each key, and each value of `group_by`.

        `source`: FROM and WHERE. `times`: the SQL for width and start_s.
        """
        columns = times | {name: _ALL[function].format(name) for name, function in self.combined.items()}
        selected = ", ".join(columns.get(name, name) for name in self.columns)
        return f"SELECT {selected} {source} GROUP BY {', '.join([*group_by, *self.key_columns])}"

    def insert(self, db: sqlite3.Connection, rows: Iterable[RowT]) -> None:
        """Write rows."""
        db.executemany(self.insert_sql, map(self.to_values, rows))

    def select(self, connection: HistoryConnection, condition: str = "", values: Parameters = ()) -> Iterator[RowT]:
        """Yield the rows of a query. `condition`: what follows the name of the table. Raises HistoryError."""
        for row in connection.rows(f"SELECT {self.column_list} FROM {self.name} {condition}", values):
            yield self.from_values(row)

    @cached_property
    def to_values(self) -> Callable[[RowT], tuple[Any, ...]]:
        """A function that returns the values of a row, in the order of the columns."""
        # sqlite3 reads a tuple faster than a NamedTuple, by more than the copy costs.
        is_tuple = isinstance(self.row, type) and issubclass(self.row, tuple)
        return cast("Callable[[RowT], tuple[Any, ...]]", tuple if is_tuple else attrgetter(*self.columns))

    def from_values(self, values: Sequence[Any]) -> RowT:
        """Return the row with these values, in the order of the columns."""
        return self.row(*values)
