"""The rows of a history on their way from one machine to another: lines of JSON.

A line has some rows of one table: `{"table": "steps", "columns": ["id", ...], "rows": [[1, ...], ...]}`. A column is
left out if it has only the values that its reader puts in its place. Sketches are text in base64. A chunk is some such
lines, and a last line that says what the rows are complete up to: `{"beat": 1, "from": 0, "offset": 100, ...}`.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from dpmon.store.database import TABLES, columns_of

RECORDS, VERSION = "dpmon-records ", 1
"""The first word of the first line, and the version of this form."""
MARK = f"{RECORDS}{VERSION} "
"""The beginning of the first line."""
CHUNK_BYTES = 16 << 20
"""Most bytes of the lines of a chunk."""
_LINE_BYTES = 1 << 19
"""Most bytes of the rows of a line, but for a single longer one."""
SENT = {table.name: table for table in TABLES if table.sent}
"""The tables whose rows are sent, by name."""
TIMES = ("start_ns", "t_ns", "begin_ns", "end_ns", "first_ns", "last_ns")
"""Columns with times, in all tables."""
_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@cache
def columns_sent(table: str) -> Mapping[str, tuple[type, ...]]:
    """Return the columns of a table that are sent, and their types before sketches become text."""
    left_out = {"seq", *SENT[table].not_sent}
    return {name: kinds for name, kinds in columns_of(table).items() if name not in left_out}


@cache
def column_default(table: str, column: str) -> Any:
    """Return the value of a column that is left out."""
    kinds = columns_sent(table)[column]
    return None if type(None) in kinds else kinds[0]()


def encode_rows(table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield rows as lines."""
    rows = list(rows)
    if not rows:
        return
    by_column = list(zip(*rows, strict=True))
    if "sketch" in columns:
        at = columns.index("sketch")
        by_column[at] = tuple(b2a_base64(data, newline=False).decode() for data in by_column[at])
    sent = [i for i, name in enumerate(columns) if {column_default(table, name)} != set(by_column[i])] or [0]
    head = f'{{"table":"{table}","columns":{_json([columns[i] for i in sent])},"rows":['
    texts: list[str] = []
    size = 0
    for row in zip(*(by_column[i] for i in sent), strict=True):
        text = _json(row)
        if texts and size + len(text) > _LINE_BYTES:
            yield f"{head}{','.join(texts)}]}}"
            texts, size = [], 0
        texts.append(text)
        size += len(text) + 1
    yield f"{head}{','.join(texts)}]}}"
