"""Reads all of a ring, and makes payloads that show any damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpmon.ring import BLOCK_BYTES
from dpmon.ring_reader import RingReader

__all__ = ["SMALL", "everything", "number_of", "numbered", "opened"]

SMALL = 2 * BLOCK_BYTES
"""The smallest capacity of a ring."""


@contextmanager
def opened(path: str, **options: Any) -> Iterator[RingReader]:
    reader = RingReader(path, **options)
    try:
        yield reader
    finally:
        reader.close()


def everything(reader: RingReader) -> list[bytes]:
    """Return all that can be read, past any damage."""
    found: list[bytes] = []
    before = -1
    while reader.position != before:
        before = reader.position
        found += reader.read()
    return found


def numbered(number: int, size: int = 0) -> bytes:
    """Return payload `number`, in which `number_of` finds any wrong byte."""
    text = f"{number}:".encode()
    return text + bytes((number + i) & 0xFF for i in range(max(0, size - len(text))))


def number_of(payload: bytes) -> int:
    """Return the number of a payload made by `numbered`, after a check of all its bytes."""
    number = int(payload.partition(b":")[0])
    assert payload == numbered(number, len(payload))
    return number
