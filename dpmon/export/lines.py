"""JSON lines: one object a record, as PRODUCT and README describe them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TextIO

from dpmon.records import Call, Record, Step, as_json

__all__ = ["kind", "write_lines"]


def kind(record: Record) -> str:
    """The record's kind as it stands in its JSON."""
    return "call" if isinstance(record, Call) else "step" if isinstance(record, Step) else record.kind


def write_lines(records: Iterable[Record], file: TextIO) -> None:
    """Write each record as one line of ASCII."""
    for record in records:
        file.write(json.dumps(as_json(record), separators=(",", ":"), ensure_ascii=True) + "\n")
