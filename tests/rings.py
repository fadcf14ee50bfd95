"""Readers of a ring to their end, and payloads that show whether they are whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpmon.ring import BLOCK_BYTES
from dpmon.ring_reader import RingReader

__all__ = ["SMALL", "everything", "number_of", "numbered", "opened"]

SMALL = 2 * BLOCK_BYTES
"""The capacity of the smallest ring there is."""


@contextmanager
def opened(path: str, **options: Any) -> Iterator[RingReader]:
    reader = RingReader(path, **options)
    try:
        yield reader
    finally:
        reader.close()


def everything(reader: RingReader) -> list[bytes]:
    """All that can be read, whatever lies between."""
    found: list[bytes] = []
    before = -1
    while reader.position != before:
        before = reader.position
        found += reader.read()
    return found


def numbered(number: int, size: int = 0) -> bytes:
    """A payload that says which one it is, and shows if a byte of it is wrong."""
    text = f"{number}:".encode()
    return text + bytes((number + i) & 0xFF for i in range(max(0, size - len(text))))


def number_of(payload: bytes) -> int:
    """The number of a payload made by `numbered`, which must be whole."""
    number = int(payload.partition(b":")[0])
    assert payload == numbered(number, len(payload))
    return number
