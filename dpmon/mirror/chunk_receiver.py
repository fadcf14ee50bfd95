"""Collects the lines from a node into chunks (dpmon.store.row_exchange), and checks them.

What another machine sends is checked here, once: each value has the type that its column declares, and lines, texts,
numbers and times have limits. A node that sends anything else is disconnected.
"""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from dpmon.errors import DpmonError
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import MODES
from dpmon.store.events import parse_event
from dpmon.store.node_table import NODE_DEVICES
from dpmon.store.quantile_sketch import SKETCH_PAIR_BYTES
from dpmon.store.row_exchange import CHUNK_BYTES, SENT, TIMES, columns_sent
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
_KEYS = range(1 << 16)
_VALUES: Mapping[str | tuple[str, str], Collection[Any]] = {
    "mode": frozenset(MODES),
    "width": frozenset(WIDTHS),
    "activity": frozenset(ACTIVITIES),
    "process": range(-1, 1 << 16),  # -1: the supervisor
    "key": _KEYS,
    ("keys", "number"): _KEYS,
    ("gaps", "id"): range(1 << 40),
    ("device_rollups", "device"): range(-1, NODE_DEVICES),  # -1: the host
}
"""The possible values of some columns, by column, or by table and column."""


class ProtocolError(DpmonError):
    """Data that are not records of dpmon; the text says what is wrong with them."""


class RowLine(NamedTuple):
    """A line with rows of one table."""

    table: str
    rows: list[list[Any]]
    """Each with the values of `columns_sent`."""

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield the rows by column."""
        columns = columns_sent(self.table)
        for row in self.rows:
            yield dict(zip(columns, row, strict=True))

    def column(self, name: str) -> list[Any]:
        """Return the values of a column."""
        index = list(columns_sent(self.table)).index(name)
        return [row[index] for row in self.rows]


class Chunk(NamedTuple):
    """The rows that a node has sent up to a beat, and the beat."""

    lines: Sequence[RowLine]
    beat: Mapping[str, Any]
    size: int = 0
    """Approximate length of its lines (bytes)."""


class ChunkReceiver:
    """The receiver of the lines from one node."""

    def __init__(self, origin_s: int = 0) -> None:
        """`origin_s`: the second of the start of the mirror's run (dpmon.store.time_buckets)."""
        self._origin_s = origin_s
        self._lines: list[RowLine] = []
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
            chunk = Chunk(self._lines, line, self._bytes + len(text))
            self._lines, self._bytes = [], 0
            return chunk
        if "table" not in line:
            return line
        table, columns, rows = (line.get(name) for name in ("table", "columns", "rows"))
        if table not in SENT or columns != list(columns_sent(table)) or not isinstance(rows, list):
            raise ProtocolError("it sent rows of an unknown table")
        # A short row needs more memory than its text has bytes.
        self._bytes += max(len(text), _MIN_ROW_BYTES * len(rows))
        if len(rows) > MAX_ROWS or self._bytes > CHUNK_BYTES:
            raise ProtocolError(f"it sent a chunk of more than {CHUNK_BYTES >> 20} MiB")
        is_valid = self._are_valid(table, rows, now_ns)
        if is_valid and _LONG_NUMBER in text.translate(_AS_ZERO):
            limit = 1 << 63 if table == "series" else _MAX_NUMBER  # FLOPs of hours
            is_valid = all(abs(value) < limit for row in rows for value in row if isinstance(value, int))
        if not is_valid:
            raise ProtocolError(f"it sent invalid rows of the table {table}")
        if "sketch" in columns:
            _decode_sketches(rows, columns.index("sketch"))
        row_line = RowLine(table, rows)
        if table == "events":
            events = map(parse_event, row_line.column("json"))
            if row_line.column("kind") != [event.kind for event in events]:
                raise ProtocolError("it sent an event of another kind than it says")
        elif table == "rings":
            for ring in row_line.dicts():
                if ring["name"] not in (f"process-{ring['process']}.ring", "supervisor"):
                    raise ProtocolError("it sent a ring of another name than its process has")
        self._lines.append(row_line)
        return None

    def _are_valid(self, table: str, rows: Sequence[list[Any]], now_ns: int) -> bool:
        """Return whether all values have the types of their columns, and are within their limits."""
        columns = columns_sent(table)
        if not all(type(row) is list and len(row) == len(columns) for row in rows):
            return False
        latest_ns = now_ns + AHEAD_S * SECOND
        latest = {"start_s": latest_ns // SECOND + self._origin_s, **dict.fromkeys(TIMES, latest_ns)}
        for (name, kinds), values in zip(columns.items(), zip(*rows, strict=True), strict=False):
            types = {str if kind is bytes else kind for kind in kinds} | ({int} if float in kinds else set())
            if not types.issuperset(map(type, values)):
                return False
            if str in types:
                texts = [value or "" for value in values]
                if max(map(len, texts)) > _MAX_CHARS_OF.get(name, _MAX_CHARS):
                    return False
                "".join(texts).encode()  # ValueError for half a surrogate pair, which SQLite rejects
            possible = _VALUES.get((table, name)) or _VALUES.get(name)
            if possible is not None and not all(value in possible for value in set(values)):
                return False
            if name in latest and max(value or 0 for value in values) > latest[name]:
                return False
            if float in kinds and table != "losses" and not all(map(isfinite, values)):  # only a loss may be infinite
                return False
        return True


def _decode_sketches(rows: Sequence[list[Any]], index: int) -> None:
    for row in rows:
        row[index] = a2b_base64(row[index])
        if len(row[index]) % SKETCH_PAIR_BYTES:
            raise ProtocolError("it sent a sketch that ends in the middle")
