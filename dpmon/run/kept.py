"""Reads what a run keeps for good: history.sqlite, at one instant (`tables` has what lies in it)."""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dpmon.record.plainjson import load_json
from dpmon.record.schema import QUANTITIES, STEP_PHASES
from dpmon.run.files import check_database
from dpmon.store.tables import (
    HISTORY_FILE,
    Bounds,
    HistoryError,
    check_schema,
    check_version,
    columns_in,
    rings_in,
    size_of,
)

__all__ = ["STEP_NAMES", "Kept", "named"]

_CALL_COLUMNS = "id, process, call, step, mode, start_ns, wall_ns, rows, payload"
STEP_NAMES = (
    *("id", "process", "step", "mode", "start_ns", "wall_ns", "device"),
    *(quantity.name for quantity in QUANTITIES),
    *(f"{name}_ns" for name in STEP_PHASES),
)
"""Columns of a row of steps, in their order."""


def named(row: Sequence[Any]) -> dict[str, Any]:
    """A row of steps, as `Kept.rows` gives it, by the names of its columns."""
    return dict(zip(STEP_NAMES, row[2:], strict=True))


class Kept:
    """A snapshot of a history: what it holds at one instant, whatever is written meanwhile."""

    def __init__(self, directory: Path) -> None:
        """HistoryError if it cannot be read, FileNotFoundError if it does not exist, OSError if it is not a file."""
        path = directory / HISTORY_FILE
        check_database(path)
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            # A damaged letter is no reason to read nothing that follows it.
            self._db.text_factory = partial(str, encoding="utf-8", errors="replace")
        except sqlite3.Error as error:
            raise HistoryError(str(error)) from None
        try:
            self._bounds = Bounds(self._db, size_of(path))
            self._db.execute("BEGIN")
            check_schema(self._db)
            check_version(self._db)
            self.rings = rings_in(self._db)
            steps = ", ".join(columns_in(self._db, "steps", STEP_NAMES))
            self._columns = {"events": "*", "calls": _CALL_COLUMNS, "steps": steps}
            row = self._db.execute("SELECT value FROM meta WHERE key = 'pruned'").fetchone()
            self.pruned = int(row[0]) if row else 0
        except (HistoryError, sqlite3.Error, OSError, ValueError, TypeError, OverflowError) as error:
            self._db.close()
            raise HistoryError(str(error)) from None

    def _select(self, table: str) -> str:
        return f"SELECT id, '{table}', {self._columns[table]} FROM {table}"

    def definitions(self, process: int) -> list[tuple[int, Any]]:
        """Number and value of every definition of one process."""
        query = "SELECT number, value FROM definitions WHERE process = ?"
        found = []
        for number, value in self._all(query, (process,)):
            with suppress(ValueError, TypeError):  # its calls then count as unreadable
                found.append((number, load_json(value)))
        return found

    def rows(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Everything with an id above `after` in order: (id, table name, columns after the id ...)."""
        return heapq.merge(
            *(
                self._all(
                    f"SELECT id, '{table}', {self._columns[table]} FROM {table} WHERE id > ? ORDER BY id", (after,)
                )
                for table in ("calls", "steps", "events")
            )
        )

    def _all(self, query: str, parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        self._bounds.begin()
        try:
            for number, row in enumerate(self._db.execute(query, parameters)):
                if number > self._bounds.rows:
                    raise HistoryError("it is damaged: it has more rows than its size allows")
                self._bounds.begin()
                yield row
        except (sqlite3.Error, UnicodeError) as error:  # the latter: of a damaged schema's names
            raise HistoryError(str(error)) from None

    def close(self) -> None:
        """Let go of the snapshot."""
        self._db.close()
