"""Rings of rows, which take the place of rings of spans: a test writes what an assembler would return."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from dpmon.record.history_rows import Row
from dpmon.span_ring import RingError
from dpmon.store.history_schema import RingRow


class RowRing:
    """A ring that holds the newest `capacity` rows. Its file is empty."""

    made: ClassVar[dict[Path, RowRing]] = {}

    def __init__(self, path: Path, capacity: int = 1 << 20) -> None:
        path.touch()
        self.made[path] = self
        self.process = int(path.stem.removeprefix("process-"))
        self.capacity = capacity
        self.rows: list[Row] = []
        self.first = 0
        """Number of the first row that is still there."""

    def write(self, *rows: Row) -> None:
        self.rows += rows
        gone = max(len(self.rows) - self.capacity, 0)
        self.first += gone
        del self.rows[:gone]

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


class _Source:
    """Takes the place of dpmon.store.span_source.SpanSource."""

    def __init__(self, path: Path, row: RingRow | None) -> None:
        if path not in RowRing.made:
            raise RingError(f"{path}: not a ring")
        self._ring = RowRing.made[path]
        self.resumes = row is not None and row.pid == os.getpid()
        self.row = RingRow(path.name, self._ring.process, None, os.getpid(), missed=0 if row is None else row.missed)
        if row is not None and self.resumes:
            self.row = replace(row)
        self.over = False
        self.unreadable = 0
        self._at = self.row.sequence
        self._missed = self.row.missed

    def read_rows(self, now_ns: int, gone: bool) -> tuple[list[Row], bool]:
        first = max(self._at, self._ring.first)
        self._missed += first - self._at
        self._at = self._ring.end
        self.over = self.over or gone
        return self._ring.rows[first - self._ring.first :], False

    def update_position(self) -> None:
        row = self.row
        row.sequence, row.ended, row.missed = self._at, self.over, self._missed + self.unreadable

    def close(self) -> None:
        pass


def _holds_more(path: Path, row: RingRow | None, over: bool) -> bool:
    return row is None or row.sequence < RowRing.made[path].end or (over and not row.ended)


def use_row_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let supervisors and readers of this process read rings of rows in place of spans."""
    monkeypatch.setattr(RowRing, "made", {})
    monkeypatch.setattr("dpmon.store.ring_drain.SpanSource", _Source)
    monkeypatch.setattr("dpmon.store.store_opening.has_unread_spans", _holds_more)


def fill(path: Path, rows: Iterable[Row]) -> RowRing:
    """Make a ring that holds `rows`."""
    found = RowRing(path)
    found.write(*rows)
    return found
