"""Collects the lines from a node into chunks (dpmon.store.row_exchange), and checks them.

What another machine sends is checked here, once: each value has the type that its column declares, and lines, texts,
numbers and times have limits. A node that sends anything else is disconnected.
"""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from dpmon.errors import DpmonError
from dpmon.record.safe_json import load_event
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import MODES
from dpmon.store.quantile_sketch import SKETCH_PAIR_BYTES
from dpmon.store.row_exchange import CHUNK_BYTES, KEPT, NUMBERED, TIMES, column_default, columns_sent
from dpmon.store.time_accounting import ACTIVITIES
from dpmon.store.time_buckets import WIDTHS

AHEAD_S = 60
"""How far in the future a time may be: clocks are only measured."""
MAX_ROWS = 20_000
"""Most rows of a line."""
_MAX_CHARS, _MAX_CHARS_OF = 1 << 18, {"name": 200}
"""Most characters of a text, and of the texts in some columns."""
_MAX_NUMBER = 1 << 60
_LONG_NUMBER, _AS_ZERO = b"0" * 19, bytes.maketrans(b"123456789", b"000000000")
"""A line with a number beyond _MAX_NUMBER has so many digits in a row. A regular expression would take much longer."""
_MIN_ROW_BYTES = 40
"""A row is counted with at least this many bytes."""
_KNOWN_VALUES = {"mode": frozenset(MODES), "width": frozenset(WIDTHS), "activity": frozenset(ACTIVITIES)}


class ProtocolError(DpmonError):
    """Data that are not records of dpmon; the text says what is wrong with them."""


class Chunk(NamedTuple):
    """The rows that a node has sent up to a beat, by table and in the order of its columns, and the beat.

    Events have their kind as third column.
    """

    rows: Mapping[str, Sequence[tuple[Any, ...]]]
    beat: Mapping[str, Any]
    size: int = 0
    """Approximate length of its lines (bytes)."""


class _SentColumns(NamedTuple):
    """The columns of the lines of a table, as a node sends them."""

    types: tuple[frozenset[type], ...]
    """The possible types of each."""
    texts: tuple[tuple[int, int], ...]
    """Position and most characters of each text."""
    known_values: tuple[tuple[int, frozenset[Any]], ...]
    """Position and possible values of the columns in _KNOWN_VALUES."""
    times: tuple[tuple[int, int], ...]
    """Position of each time, and how many of its units a second has."""
    defaults: list[Any]
    """The values of the columns of the table that are not sent."""
    arrange: Callable[[list[Any]], tuple[Any, ...]]
    """Returns a row, followed by `defaults`, in the order of the table's columns."""


class ChunkReceiver:
    """The receiver of the lines from one node."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._bytes = 0

    def add_line(self, text: bytes, now_ns: int) -> Chunk | Mapping[str, Any] | None:
        """Add a line. Return the chunk that it completes, the message that it is, or None.

        `now_ns`: the current time of the run. Raises ProtocolError, TypeError or ValueError for invalid data.
        """
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            raise ProtocolError("it sent a line that is not JSON") from None
        if not isinstance(line, dict):
            raise ProtocolError("it sent a line that is not an object")
        if "beat" in line:
            chunk = Chunk(self._rows, line, self._bytes + len(text))
            self._rows, self._bytes = defaultdict(list), 0
            return chunk
        if "table" not in line:
            return line
        table, columns, rows = (line.get(name) for name in ("table", "columns", "rows"))
        if not (table in NUMBERED or table in KEPT) or not isinstance(columns, list) or not isinstance(rows, list):
            raise ProtocolError("it sent rows without a table or columns")
        # A short row needs more memory than its text has bytes.
        self._bytes += max(len(text), _MIN_ROW_BYTES * len(rows))
        if len(rows) > MAX_ROWS or self._bytes > CHUNK_BYTES:
            raise ProtocolError(f"it sent a chunk of more than {CHUNK_BYTES >> 20} MiB")
        sent = _sent_columns(table, tuple(columns))
        has_long_number = _LONG_NUMBER in text.translate(_AS_ZERO)
        if not _are_valid(sent, rows, now_ns) or (has_long_number and not _fit_in_columns(rows)):
            raise ProtocolError(f"it sent invalid rows of the table {table}")
        arranged = [sent.arrange(row + sent.defaults) for row in rows]
        if table == "events":
            arranged = [(*row[:2], load_event(row[-1])[0], *row[2:]) for row in arranged]
        elif table == "series":
            arranged = [(*row[:-1], a2b_base64(row[-1])) for row in arranged]
            if any(len(sketch) % SKETCH_PAIR_BYTES for *_, sketch in arranged):
                raise ProtocolError("it sent a sketch that ends in the middle")
        self._rows[table] += arranged
        return None


@lru_cache(256)
def _sent_columns(table: str, columns: tuple[str, ...]) -> _SentColumns:
    """Return the description of these columns. Raises ProtocolError if the table has no such columns."""
    declared = columns_sent(table)
    if not declared.keys() >= set(columns) or len(set(columns)) < len(columns):
        raise ProtocolError(f"it sent unknown columns of the table {table}")
    missing = [name for name in declared if name not in columns]
    names = [*columns, *missing]
    types = [{str if kind is bytes else kind for kind in declared[name]} for name in columns]
    return _SentColumns(
        types=tuple(frozenset(kinds | {int}) if float in kinds else frozenset(kinds) for kinds in types),
        texts=tuple(
            (index, _MAX_CHARS_OF.get(columns[index], _MAX_CHARS)) for index, kinds in enumerate(types) if str in kinds
        ),
        known_values=tuple((index, _KNOWN_VALUES[name]) for index, name in enumerate(columns) if name in _KNOWN_VALUES),
        times=tuple(
            (index, 1 if name == "start_s" else SECOND)
            for index, name in enumerate(columns)
            if name == "start_s" or name in TIMES
        ),
        defaults=[column_default(table, name) for name in missing],
        arrange=itemgetter(*map(names.index, declared)),
    )


def _are_valid(sent: _SentColumns, rows: Sequence[list[Any]], now_ns: int) -> bool:
    """Return whether all values have the types of their columns, and texts and times are within their limits."""
    for types in {tuple(map(type, row)) for row in rows}:
        if len(types) != len(sent.types) or not all(map(frozenset.__contains__, sent.types, types)):
            return False
    for index, max_chars in sent.texts:
        texts = [row[index] or "" for row in rows]
        if max(map(len, texts), default=0) > max_chars:
            return False
        "".join(texts).encode()  # ValueError for half a surrogate pair, which SQLite rejects
    for index, values in sent.known_values:
        if not {row[index] for row in rows} <= values:
            return False
    latest_s = now_ns // SECOND + AHEAD_S
    return all((row[index] or 0) <= latest_s * units for index, units in sent.times for row in rows)


def _fit_in_columns(rows: Sequence[list[Any]]) -> bool:
    """Return whether all integers are small enough for SQLite."""
    return all(abs(value) < _MAX_NUMBER for row in rows for value in row if isinstance(value, int))
