"""Collects the lines from a machine to chunks (dpmon.store.row_exchange), and checks them.

A line may be damaged or hostile. What readers of a history take for granted is checked here: the type and the range of
each value, the mode, JSON and sketches. A damaged row is left out and counted. Rows of all machines are checked
together, because a check of a few rows takes nearly as long as a check of many.
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
from dpmon.store.query_results import call_from_columns
from dpmon.store.row_exchange import CHUNK_BYTES, KEPT, NUMBERED, TIMES, column_default, columns_sent
from dpmon.store.step_queries import step_lists
from dpmon.store.store_queries import shape_from_row
from dpmon.store.tally import WIDTHS

AHEAD_S = 60
"""A time that is later than now by more than this is damaged."""
_MOST = 1 << 47
"""Largest number of most columns: 39 hours, or 140 TB."""
_MOST_SUM, _MOST_ID = 1 << 60, 1 << 53
_MOST_OF_SECOND = 1 << 42
"""Largest sum of a second: the sum over all seconds of a run must fit into a column."""
_MOST_TEXT, _MOST_NAME, MOST_ROWS, MOST_DAMAGED = 1 << 18, 200, 20_000, 1000
"""Most characters of a text and of a name, rows of a line, and damaged rows of a machine in a commit."""
_MOST_COLUMNS = 100
"""Most columns of a line, and most characters of a column's name."""
_MOST_STEPS = 1 << 40
_MOST_FLOAT = 1e300
_LEAST_OF_ROW = 40
"""Bytes that a row counts at least."""
_PLAIN = {int, float, str, bool, type(None)}
_MODES = set(MODES)
_IDS = ("id", "number", "first_id", "last_id", "position", "sequence", "lines", "definition", "layout")


class ProtocolError(DpmonError):
    """A machine does not send records; the text says what is wrong with them."""


class UncheckedChunk(NamedTuple):
    """The unchecked lines of a machine up to a beat (table, columns and rows of each), the beat, and their size."""

    lines: Sequence[tuple[str, tuple[str, ...], list[Any]]]
    beat: Mapping[str, Any]
    size: int = 0
    """Approximate length of their text (bytes)."""


class Chunk(NamedTuple):
    """The sound rows of each table that a machine has sent up to a beat, in the order of its columns, and the beat."""

    rows: Mapping[str, Sequence[tuple[Any, ...]]]
    beat: Mapping[str, Any]
    damaged: int
    """Number of rows that were left out."""


class _ColumnRule(NamedTuple):
    name: str
    kinds: frozenset[type]
    default: Any
    low: int
    high: int | None
    """None: now."""
    of_seconds: bool


@cache
def _columns(table: str) -> tuple[_ColumnRule, ...]:
    found = []
    for name, kinds in columns_sent(table).items():
        low, high = -_MOST, _MOST
        seconds = name == "start_s"
        if name in _IDS:
            low, high = -1, _MOST_ID
        elif name.endswith("_sum"):
            low, high = -_MOST_SUM, _MOST_SUM
        elif table == "tallies" and (name in ("steps", "calls") or name.endswith("_n")):
            low, high = 0, _MOST_STEPS
        elif table == "collective_sums" and not seconds and name not in ("process", "definition"):
            low, high = 0, _MOST_OF_SECOND
        elif table in ("steps", "calls") and name in ("wall_ns", "step", "call", "calls"):
            low = 0
        elif seconds:
            low = -1
        allowed = {str if kind is bytes else kind for kind in kinds} | ({int} if float in kinds else set())
        latest = None if name in TIMES or seconds else high
        found.append(_ColumnRule(name, frozenset(allowed), column_default(table, name), low, latest, seconds))
    return tuple(found)


class ChunkReceiver:
    """The lines from one machine."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, tuple[str, ...], list[Any]]] = []
        self._bytes = 0

    def add_line(self, text: bytes) -> UncheckedChunk | Mapping[str, Any] | None:
        """Take a line; return a chunk when it is complete, and any other message as it is. Raises ProtocolError."""
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            raise ProtocolError("it sent a line that is not JSON") from None
        if not isinstance(line, dict):
            raise ProtocolError("it sent a line that is not an object")
        if "beat" in line:
            sent = UncheckedChunk(self._lines, line, self._bytes + len(text))
            self._lines, self._bytes = [], 0
            return sent
        if "table" not in line:
            return line
        table, columns, rows = (line.get(name) for name in ("table", "columns", "rows"))
        # A short row needs more memory than its text has bytes.
        self._bytes += max(len(text), _LEAST_OF_ROW * len(rows) if isinstance(rows, list) else 0)
        if self._bytes > CHUNK_BYTES:
            raise ProtocolError(f"it sent a chunk of more than {CHUNK_BYTES >> 20} MiB")
        if table not in NUMBERED and table not in KEPT:
            return None  # of another version
        if not isinstance(columns, list) or not isinstance(rows, list):
            raise ProtocolError("it sent rows without columns")
        if len(rows) > MOST_ROWS:
            raise ProtocolError("it sent too many rows at once")
        try:
            _column_positions(table, tuple(columns))
        except TypeError:
            raise ProtocolError("it sent rows without columns") from None
        if not (set(map(type, rows)) <= {list} and set(map(type, chain.from_iterable(rows))) <= _PLAIN):
            # A row with a nested value is damaged. It is dropped now, because it needs much more memory than its text.
            rows = [row if type(row) is list and set(map(type, row)) <= _PLAIN else None for row in rows]
        self._lines.append((table, tuple(columns), rows))
        return None


def validate_chunks(sent: Sequence[tuple[int, UncheckedChunk]], now_ns: int) -> list[Chunk]:
    """Return the chunks that machines have sent, with their sound rows.

    `sent`: what came, each with the number of its machine. `now_ns`: the run's time. The first chunk of a machine has
    the number of all its damaged rows. If there are more than MOST_DAMAGED, the rest of its rows is not checked.
    """
    found: list[dict[str, list[tuple[Any, ...]]]] = [defaultdict(list) for _ in sent]
    damaged: Counter[int] = Counter()
    lines: dict[tuple[str, tuple[str, ...]], list[tuple[int, list[Any]]]] = defaultdict(list)
    for at, (_, one) in enumerate(sent):
        for table, columns, rows in one.lines:
            lines[table, columns].append((at, rows))
    for (table, columns), alike in lines.items():
        together = list(chain.from_iterable(rows for _, rows in alike))
        sound = _valid_rows(table, columns, together, now_ns)
        if len(sound) == len(together):
            each = iter(sound)
            for at, rows in alike:
                found[at][table] += islice(each, len(rows))
            continue
        for at, rows in alike:  # at least one row is damaged
            machine = sent[at][0]
            if damaged[machine] <= MOST_DAMAGED:
                sound = _valid_rows(table, columns, rows, now_ns)
                if len(sound) < len(rows):
                    sound = [good for row in rows for good in _valid_rows(table, columns, [row], now_ns)]
                found[at][table] += sound
                damaged[machine] += len(rows) - len(sound)
    return [Chunk(rows, one.beat, damaged.pop(machine, 0)) for rows, (machine, one) in zip(found, sent, strict=True)]


def _valid_rows(table: str, columns: tuple[str, ...], rows: Sequence[Any], now_ns: int) -> list[tuple[Any, ...]]:
    """Return the sound rows, in the order of the columns of `table`; of an event, its kind is the third.

    Columns that are not known here are left out, and those that are not sent have their default: of another version.
    Empty if a value does not fit into its column.
    """
    try:
        found = list(zip(*_valid_columns(table, columns, rows, now_ns), strict=True))
    except (ValueError, TypeError):
        return []
    if table == "events":
        return [event for row in found for event in _event(*row)]
    if table in ("tallies", "times"):
        return [row for row in found if row[0] in WIDTHS and row[1] >= 0 and row[1] % row[0] == 0]
    check = _CHECKS.get(table)
    if check is None:
        return found
    return [row for row in found if _is_valid(check, row)]


@lru_cache(256)
def _column_positions(table: str, columns: tuple[str, ...]) -> tuple[tuple[_ColumnRule, int], ...]:
    """The columns of a table, and the place of each among `columns`; -1: it is missing.

    Raises TypeError if one has no name, and ProtocolError if they are too many.
    """
    if len(columns) > _MOST_COLUMNS or max(map(len, columns), default=0) > _MOST_COLUMNS:
        raise ProtocolError("it sent rows with too many columns")
    return tuple((rule, columns.index(rule.name) if rule.name in columns else -1) for rule in _columns(table))


def _valid_columns(table: str, columns: tuple[str, ...], rows: Sequence[Any], now_ns: int) -> Iterator[Iterable[Any]]:
    """Yield the values of each column. Raises ValueError or TypeError if one is not sound."""
    sent = list(zip(*rows, strict=True))
    if len(sent) != len(columns):
        raise ValueError("rows with other columns")
    latest = now_ns + AHEAD_S * SECOND
    latest_of = latest, latest // SECOND
    for rule, at in _column_positions(table, columns):
        if at < 0:
            yield repeat(rule.default, len(rows))
            continue
        values = sent[at]
        kinds = set(map(type, values))
        if not kinds <= rule.kinds:
            raise TypeError(rule.name)
        if int in kinds:
            numbers = values if len(kinds) == 1 else [value for value in values if type(value) is int]
            if min(numbers) < rule.low or max(numbers) > (rule.high or latest_of[rule.of_seconds]):
                raise ValueError(rule.name)
        if str in kinds:
            yield _decode_texts(rule.name, values)
        elif float in rule.kinds:
            if not all(value is None or abs(value) < _MOST_FLOAT for value in values):  # NaN is not less
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
    most = _MOST_NAME if name == "name" else _MOST_TEXT
    for value in values:
        if value is not None and (len(value) > most or not value.isascii()):
            value.encode()  # ValueError for a lone surrogate
            if len(value) > most:
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
    """Yield the row of an event with its kind, if it is sound."""
    with suppress(ValueError, RecursionError):
        # Readers of the history look for odd numbers. Here, this would take longer than all other checks.
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
"""Raise HistoryError or ValueError, or return False, for a row that a reader could not read."""
