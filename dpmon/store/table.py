"""A table of the history: its SQL, the class of its rows, how they are written, and how they reach another machine.

Each table has a module with its declaration and its queries. `dpmon.store.database` lists all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
NUMBERED, CHANGING, WITH_TALLY = "numbered", "changing", "with its tally"
"""How rows reach another machine. NUMBERED: a row has an id from the common counter, and is sent once. CHANGING: the
table has a column `seq`, the number of the last transaction that changed the row. A changed row is sent again, and
replaces the one with its key. Deletions are not sent. WITH_TALLY: a row is sent again with its row of `tallies`."""
SEQ = "(SELECT value FROM meta WHERE key = 'seq')"
"""The SQL for the number of the current transaction."""
SUM, FLOAT_SUM, MIN, MAX, SKETCH = "sum", "float sum", "min", "max", "sketch"
_BOTH = {
    SUM: "{0} + excluded.{0}",
    FLOAT_SUM: "{0} + excluded.{0}",
    MIN: "min({0}, excluded.{0})",
    MAX: "max({0}, excluded.{0})",
    SKETCH: "CAST({0} || excluded.{0} AS BLOB)",
}
"""The SQL for both values, by how a column is combined. A sketch after a sketch is a sketch of both."""
_ALL = {
    SUM: "CAST(total({0}) AS INTEGER)",
    FLOAT_SUM: "total({0})",
    MIN: "min({0})",
    MAX: "max({0})",
    SKETCH: "merged_sketch({0})",
}
"""The SQL for many values. total() is exact below 2^53 and cannot overflow, so a node's huge numbers fail no merge."""


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
    """How a row changes the row with the same key: by column, SUM, FLOAT_SUM, MIN, MAX or SKETCH. Rows of
    several times become one row in the same way (`merge_sql`)."""
    sent: str = ""
    """NUMBERED, CHANGING or WITH_TALLY; empty if rows stay on this machine."""
    not_sent: Collection[str] = ()
    """Columns that have values of their own on each machine."""

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns without `seq`."""
        return tuple(get_annotations(self.row))

    @property
    def has_seq(self) -> bool:
        """Whether the table has the column `seq`."""
        return self.sent == CHANGING

    @cached_property
    def column_list(self) -> str:
        """The names of its columns for a query."""
        return ", ".join(self.columns)

    @cached_property
    def insert_sql(self) -> str:
        """The statement that writes a row."""
        marks = ", ".join("?" * len(self.columns))
        seq, number = (", seq", f", {SEQ}") if self.has_seq else ("", "")
        columns = f"{self.name} ({self.column_list}{seq})"
        return f"{self.insertion} INTO {columns} VALUES ({marks}{number}) {self.on_conflict}"

    @cached_property
    def on_conflict(self) -> str:
        """The end of a statement that inserts rows; empty if no row changes another one."""
        if not self.combined:
            return ""
        changes = [f"{name} = {_BOTH[function].format(name)}" for name, function in self.combined.items()]
        if self.has_seq:
            changes.append("seq = excluded.seq")
        return f"ON CONFLICT DO UPDATE SET {', '.join(changes)}"

    def merged_rows_sql(self, source: str, group_by: Sequence[str] = (), **times: str) -> str:
        """Return a query that makes one row for each key, and each value of `group_by`.

        `source`: FROM and WHERE. `times`: the SQL for width and start_s.
        """
        values = times | {name: _ALL[function].format(name) for name, function in self.combined.items()}
        selected = ", ".join(values.get(name, name) for name in self.columns)
        key = [name for name in self.columns if name not in ("width", "start_s", *self.combined)]
        return f"SELECT {selected} {source} GROUP BY {', '.join([*group_by, *key])}"

    def merge_sql(self, source: str, group_by: Sequence[str] = (), insertion: str = "INSERT", **times: str) -> str:
        """Return a statement that writes the rows of `merged_rows_sql`.

        `insertion`: INSERT (a row is added to the one with the same key), INSERT OR IGNORE or INSERT OR REPLACE.
        """
        rows = self.merged_rows_sql(source, group_by, **times)
        columns, values = (f"{self.column_list}, seq", f"*, {SEQ}") if self.has_seq else (self.column_list, "*")
        end = self.on_conflict if insertion == "INSERT" else ""
        return f"{insertion} INTO {self.name} ({columns}) SELECT {values} FROM ({rows}) WHERE true {end}"

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
