"""The rows of a history on their way from one machine to another: lines of JSON.

A line has some rows of one table: `{"table": "steps", "columns": ["id", ...], "rows": [[1, ...], ...]}`. Sketches are
text in base64. A chunk is some such lines, and a last line that says what the rows are complete up to: `{"beat": 1,
"from": 0, "offset": 100, ...}`. The first line describes the run.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from dpmon.store.database import TABLES, columns_of

MARK = "dpmon-records "
"""The beginning of the first line."""
CHUNK_BYTES = 16 << 20
"""Most bytes of the lines of a chunk."""
_LINE_BYTES = 1 << 19
"""Most bytes of the rows of a line, but for a single longer one."""
SENT = {table.name: table for table in TABLES if table.sent}
"""The tables whose rows are sent, by name."""
TIMES = ("start_ns", "t_ns", "begin_ns", "end_ns", "first_ns", "last_ns")
"""Columns with times, in all tables."""
_to_json = json.JSONEncoder(
    separators=(",", ":"), check_circular=False, default=lambda sketch: b2a_base64(sketch, newline=False).decode()
).encode


@cache
def columns_sent(table: str) -> Mapping[str, tuple[type, ...]]:
    """Return the columns of a table that are sent, and their types before sketches become text."""
    left_out = {"seq", *SENT[table].not_sent}
    return {name: kinds for name, kinds in columns_of(table).items() if name not in left_out}


def encode_rows(table: str, rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield rows as lines. A row has the values of `columns_sent`."""
    columns = list(columns_sent(table))
    head = f'{{"table":"{table}","columns":{_to_json(columns)},"rows":['
    texts: list[str] = []
    size = 0
    for row in rows:
        text = _to_json(row)
        if texts and size + len(text) > _LINE_BYTES:
            yield f"{head}{','.join(texts)}]}}"
            texts, size = [], 0
        texts.append(text)
        size += len(text) + 1
    if texts:
        yield f"{head}{','.join(texts)}]}}"
