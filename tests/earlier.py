"""Converts the history of a run to the schema of an earlier version of dpmon."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from dpmon.store.tables import LASTING

__all__ = ["as_earlier"]

STEPS = (
    *("id", "process", "step", "mode", "start_ns", "wall_ns", "samples", "data_ns", "forward_ns", "backward_ns"),
    *("optimizer_ns", "other_ns", "device", "copy_ns", "copied_bytes", "between_ns", "spans"),
)
CALLS = ("id", "process", "call", "step", "mode", "start_ns", "wall_ns", "rows", "payload")
RINGS = (
    *("name", "process", "rank", "pid", "position", "sequence", "missed", "lost", "calls", "steps", "last_step"),
    *("first_id", "last_id"),
)
LATER = {
    6: {"steps": ("spans",)},
    4: {"steps": ("between_ns",)},
    3: {"steps": ("copy_ns", "copied_bytes")},
    2: {"steps": ("device",), "rings": ("first_id", "last_id")},
}
"""Columns added in each version."""


def as_earlier(path: Path, version: int = 6, *, rows_from: int = 0) -> None:
    """Convert the history at `path` to `version`, without the rows below an id."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        for table in ("tallies", "times", "gaps", "shapes", "series", "keys", "collectives", "collective_sums"):
            db.execute(f"DROP TABLE {table}")
        for table, columns in (("steps", STEPS), ("calls", CALLS), ("rings", RINGS)):
            absent = {name for since, lacking in LATER.items() if version < since for name in lacking.get(table, ())}
            kept = [name for name in columns if name not in absent]
            db.execute(f"ALTER TABLE {table} RENAME TO before")
            kinds = {row[1]: row[2] for row in db.execute("PRAGMA table_info(before)")}
            made = ", ".join(f"{name} {kinds.get(name, 'INTEGER')}" for name in kept)
            db.execute(f"CREATE TABLE {table} ({made}, PRIMARY KEY ({kept[0]}))")
            there = [name for name in kept if name in kinds]
            db.execute(f"INSERT INTO {table} ({', '.join(there)}) SELECT {', '.join(there)} FROM before")
            db.execute("DROP TABLE before")
        gone = sum(
            db.execute(f"DELETE FROM {table} WHERE id < ? {only}", (rows_from,)).rowcount
            for table, only in (("steps", ""), ("calls", ""), ("events", f"AND NOT ({LASTING})"))
        )
        db.execute("CREATE TABLE rollups (width INTEGER, start_s INTEGER, histogram BLOB)")
        db.execute("DELETE FROM meta WHERE key LIKE 'whole%' OR key LIKE 'pruned%'")
        db.executemany("INSERT INTO meta VALUES (?, ?)", [("pruned", gone)])
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (version,))
        db.execute("COMMIT")
        db.execute("VACUUM")  # leave no free pages
