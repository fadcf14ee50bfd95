"""Collects the lines from a node into chunks (dpmon.store.row_exchange), and checks them.

A line may be damaged or hostile. Everything that readers of a history rely on is checked here: the type and the range
of each value, the mode, JSON and sketches. A damaged row is dropped and counted. Rows of all nodes are checked
together, because checking a few rows takes nearly as long as checking many.
"""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from dpmon.errors import DpmonError, HistoryError
from dpmon.record.safe_json import MAX_DEPTH, load_json
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import MODES
from dpmon.store.history_schema import CALL_COLUMNS, STEP_COLUMNS, definition_from_row
from dpmon.store.query_results import call_from_columns, shape_from_row, step_lists
from dpmon.store.row_exchange import CHUNK_BYTES, KEPT, NUMBERED, TIMES, column_default, columns_sent
from dpmon.store.tally import WIDTHS

AHEAD_S = 60
"""A time that is further in the future than this is damaged."""
_MAX_NUMBER = 1 << 47
"""Largest number in most columns: 39 hours, or 140 TB."""
_MAX_SUM, _MAX_ID = 1 << 60, 1 << 53
_MAX_SECOND_SUM = 1 << 42
"""Largest sum of a second, so that the sum over all seconds of a run fits into a column."""
_MAX_TEXT_CHARS, _MAX_NAME_CHARS, MAX_ROWS, MAX_DAMAGED = 1 << 18, 200, 20_000, 1000
"""Limits: characters of a text and of a name, rows of a line, and damaged rows of a node in a commit."""
_MAX_COLUMNS = 100
"""Limit of the columns of a line, and of the characters of a column's name."""
_MAX_STEPS = 1 << 40
_MAX_FLOAT = 1e300
_MIN_ROW_BYTES = 40
"""A row is counted with at least this many bytes."""
_PLAIN_TYPES = {int, float, str, bool, type(None)}
_MODES = set(MODES)
_IDS = ("id", "number", "first_id", "last_id", "position", "sequence", "lines", "definition", "layout")


class ProtocolError(DpmonError):
    """Data that are not records of dpmon; the text says what is wrong with them."""


class UncheckedChunk(NamedTuple):
    """The unchecked lines of a node up to a beat (table, columns and rows of each), the beat, and their size."""

    lines: Sequence[tuple[str, tuple[str, ...], list[Any]]]
    beat: Mapping[str, Any]
    size: int = 0
    """Approximate length of their text (bytes)."""


class Chunk(NamedTuple):
    """The valid rows that a node has sent up to a beat, by table and in the order of its columns, and the beat."""

    rows: Mapping[str, Sequence[tuple[Any, ...]]]
    beat: Mapping[str, Any]
    damaged: int
    """Number of damaged rows, which were dropped."""


class _ColumnRule(NamedTuple):
    name: str
    kinds: frozenset[type]
    default: Any
    low: int
    high: int | None
    """None means the current time."""
    of_seconds: bool


@cache
def _columns(table: str) -> tuple[_ColumnRule, ...]:
    rules = []
    for name, kinds in columns_sent(table).items():
        low, high = -_MAX_NUMBER, _MAX_NUMBER
        is_seconds = name == "start_s"
        if name in _IDS:
            low, high = -1, _MAX_ID
        elif name.endswith("_sum"):
            low, high = -_MAX_SUM, _MAX_SUM
        elif table == "tallies" and (name in ("steps", "calls") or name.endswith("_n")):
            low, high = 0, _MAX_STEPS
        elif table == "collective_sums" and not is_seconds and name not in ("process", "definition"):
            low, high = 0, _MAX_SECOND_SUM
        elif table in ("steps", "calls") and name in ("wall_ns", "step", "call", "calls"):
            low = 0
        elif is_seconds:
            low = -1
        allowed = {str if kind is bytes else kind for kind in kinds} | ({int} if float in kinds else set())
        latest = None if name in TIMES or is_seconds else high
        rules.append(_ColumnRule(name, frozenset(allowed), column_default(table, name), low, latest, is_seconds))
    return tuple(rules)


class ChunkReceiver:
    """The receiver of the lines from one node."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, tuple[str, ...], list[Any]]] = []
        self._bytes = 0

    def add_line(self, text: bytes) -> UncheckedChunk | Mapping[str, Any] | None:
        """Add a line. Return the chunk that it completes, the message that it is, or None. Raises ProtocolError."""
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            raise ProtocolError("it sent a line that is not JSON") from None
        if not isinstance(line, dict):
            raise ProtocolError("it sent a line that is not an object")
        if "beat" in line:
            chunk = UncheckedChunk(self._lines, line, self._bytes + len(text))
            self._lines, self._bytes = [], 0
            return chunk
        if "table" not in line:
            return line
        table, columns, rows = (line.get(name) for name in ("table", "columns", "rows"))
        # A short row needs more memory than its text has bytes.
        self._bytes += max(len(text), _MIN_ROW_BYTES * len(rows) if isinstance(rows, list) else 0)
        if self._bytes > CHUNK_BYTES:
            raise ProtocolError(f"it sent a chunk of more than {CHUNK_BYTES >> 20} MiB")
        if table not in NUMBERED and table not in KEPT:
            return None  # of another version
        if not isinstance(columns, list) or not isinstance(rows, list):
            raise ProtocolError("it sent rows without columns")
        if len(rows) > MAX_ROWS:
            raise ProtocolError("it sent too many rows at once")
        try:
            _column_positions(table, tuple(columns))
        except TypeError:
            raise ProtocolError("it sent rows without columns") from None
        if not (set(map(type, rows)) <= {list} and set(map(type, chain.from_iterable(rows))) <= _PLAIN_TYPES):
            # A row with a nested value is damaged. Drop it now, because it needs much more memory than its text.
            rows = [row if type(row) is list and set(map(type, row)) <= _PLAIN_TYPES else None for row in rows]
        self._lines.append((table, tuple(columns), rows))
        return None


def validate_chunks(chunks: Sequence[tuple[int, UncheckedChunk]], now_ns: int) -> list[Chunk]:
    """Return the chunks that nodes have sent, with their valid rows.

    `chunks`: the unchecked chunks, each with the number of its node. `now_ns`: the run's time. The first chunk of a
    node counts all damaged rows of the node. If there are more than MAX_DAMAGED, the rest of its rows is not checked.
    """
    valid_rows: list[dict[str, list[tuple[Any, ...]]]] = [defaultdict(list) for _ in chunks]
    damaged_counts: Counter[int] = Counter()
    lines: dict[tuple[str, tuple[str, ...]], list[tuple[int, list[Any]]]] = defaultdict(list)
    for index, (_, chunk) in enumerate(chunks):
        for table, columns, rows in chunk.lines:
            lines[table, columns].append((index, rows))
    for (table, columns), alike in lines.items():
        together = list(chain.from_iterable(rows for _, rows in alike))
        valid = _valid_rows(table, columns, together, now_ns)
        if len(valid) == len(together):
            remaining = iter(valid)
            for index, rows in alike:
                valid_rows[index][table] += islice(remaining, len(rows))
            continue
        for index, rows in alike:  # at least one row is damaged
            node = chunks[index][0]
            if damaged_counts[node] <= MAX_DAMAGED:
                valid = _valid_rows(table, columns, rows, now_ns)
                if len(valid) < len(rows):
                    valid = [good for row in rows for good in _valid_rows(table, columns, [row], now_ns)]
                valid_rows[index][table] += valid
                damaged_counts[node] += len(rows) - len(valid)
    return [
        Chunk(rows, chunk.beat, damaged_counts.pop(node, 0))
        for rows, (node, chunk) in zip(valid_rows, chunks, strict=True)
    ]


def _valid_rows(table: str, columns: tuple[str, ...], rows: Sequence[Any], now_ns: int) -> list[tuple[Any, ...]]:
    """Return the valid rows, in the order of the columns of `table`. Events get their kind as third column.

    Unknown columns are dropped, and missing columns have their default, because the node may have another version.
    Empty if a value does not fit into its column.
    """
    try:
        valid = list(zip(*_valid_columns(table, columns, rows, now_ns), strict=True))
    except (ValueError, TypeError):
        return []
    if table == "events":
        return [event for row in valid for event in _event(*row)]
    if table in ("tallies", "times"):
        return [row for row in valid if row[0] in WIDTHS and row[1] >= 0 and row[1] % row[0] == 0]
    check = _CHECKS.get(table)
    if check is None:
        return valid
    return [row for row in valid if _is_valid(check, row)]


@lru_cache(256)
def _column_positions(table: str, columns: tuple[str, ...]) -> tuple[tuple[_ColumnRule, int], ...]:
    """Return the rules of a table's columns, and the position of each among `columns`; -1 if it is missing.

    Raises TypeError if a column has no name, and ProtocolError if there are too many columns.
    """
    if len(columns) > _MAX_COLUMNS or max(map(len, columns), default=0) > _MAX_COLUMNS:
        raise ProtocolError("it sent rows with too many columns")
    return tuple((rule, columns.index(rule.name) if rule.name in columns else -1) for rule in _columns(table))


def _valid_columns(table: str, columns: tuple[str, ...], rows: Sequence[Any], now_ns: int) -> Iterator[Iterable[Any]]:
    """Yield the values of each column. Raises ValueError or TypeError if a value is not valid."""
    column_values = list(zip(*rows, strict=True))
    if len(column_values) != len(columns):
        raise ValueError("rows with other columns")
    latest = now_ns + AHEAD_S * SECOND
    latest_of = latest, latest // SECOND
    for rule, position in _column_positions(table, columns):
        if position < 0:
            yield repeat(rule.default, len(rows))
            continue
        values = column_values[position]
        types = set(map(type, values))
        if not types <= rule.kinds:
            raise TypeError(rule.name)
        if int in types:
            numbers = values if len(types) == 1 else [value for value in values if type(value) is int]
            if min(numbers) < rule.low or max(numbers) > (rule.high or latest_of[rule.of_seconds]):
                raise ValueError(rule.name)
        if str in types:
            yield _decode_texts(rule.name, values)
        elif float in rule.kinds:
            if not all(value is None or abs(value) < _MAX_FLOAT for value in values):  # NaN is not less
                raise ValueError(rule.name)
            yield [None if value is None else float(value) for value in values]
        else:
            yield values


def _decode_texts(name: str, values: Sequence[str | None]) -> Sequence[Any]:
    if name == "sketches":
        return [a2b_base64(value or "") for value in values]
    if name == "mode":
        if not set(values) <= _MODES:
            raise ValueError(name)
        return values
    max_chars = _MAX_NAME_CHARS if name == "name" else _MAX_TEXT_CHARS
    for value in values:
        if value is not None and (len(value) > max_chars or not value.isascii()):
            value.encode()  # ValueError for a lone surrogate
            if len(value) > max_chars:
                raise ValueError(name)
    return values


# ------------------------------------------------------------------------------------------------ rows

_DEVICE, _SPANS = (list(STEP_COLUMNS).index(name) for name in ("device", "spans"))
_CALL = len(CALL_COLUMNS) - len(tuple(CALL_COLUMNS)[2:])


def _is_valid(check: Callable[[tuple[Any, ...]], object], row: tuple[Any, ...]) -> bool:
    try:
        return check(row) is not False
    except (HistoryError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
        return False


def _step(row: tuple[Any, ...]) -> None:
    if row[_SPANS] is not None or row[_DEVICE] is not None:
        step_lists(row[_SPANS], row[_DEVICE])


def _call(row: tuple[Any, ...]) -> None:
    if row[-1] is not None:
        call_from_columns(row[_CALL:])


def _event(number: int, process: int, t_ns: int | None, text: str) -> Iterator[tuple[Any, ...]]:
    """Yield the row of an event with its kind, if it is valid."""
    with suppress(ValueError, RecursionError):
        # Numbers are checked by the readers of the history. Here, this would take longer than all other checks.
        deep = text.count("[") + text.count("{") > MAX_DEPTH
        data = load_json(text) if deep else json.loads(text)
        if isinstance(data, dict) and isinstance(kind := data.get("kind"), str):
            yield number, process, kind, t_ns, text


_CHECKS: Mapping[str, Callable[[tuple[Any, ...]], object]] = {
    "steps": _step,
    "calls": _call,
    "definitions": lambda row: definition_from_row(row[1:]),
    "shapes": shape_from_row,
}
"""Checks by table. They raise HistoryError or ValueError, or return False, for a row that readers cannot read."""
