"""The packed entries of a tally's row: the series of one time bucket, each with its number, sum and sketch."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

from dpmon.errors import HistoryError
from dpmon.store import quantile_sketch
from dpmon.store.quantile_sketch import Counts, Packed

_ENTRY = struct.Struct("<HIqI")
"""Number of the series, number of values, their sum, bytes of the sketch that follows."""
_SIZES = struct.Struct("<HI8xI")
"""An entry without the sum."""
_NUMBER, _PAIR = struct.Struct("<H"), struct.Struct("<HH")
_ENTRY_BYTES = _ENTRY.size
_HIGH_BYTES = bytes(range(quantile_sketch.LAST_BIN >> 8))
"""All second bytes of buckets that a number of a record can reach. Another one is damage."""
_MANY_BYTES = 256
"""A joined sketch with more bytes than this is packed again, with one pair for each bucket."""
_MAX = (1 << 63) - 1
_MOST_VALUES = (1 << 32) - 1
"""Most values of a series in an entry."""


def packed_entry(number: int, count: int, total: int, sketch: bytes) -> bytes:
    """Return the entry of a series, with a packed sketch."""
    return _ENTRY.pack(number, min(count, _MOST_VALUES), clamp_to_column(total), len(sketch)) + sketch


def clamp_to_column(value: int) -> int:
    """Return the value, or the nearest one that a column can have."""
    if -_MAX <= value <= _MAX:
        return value
    return _MAX if value > 0 else -_MAX


def decode_entries(
    data: bytes, names: Mapping[int, str], *, sketches: bool
) -> list[tuple[str, int, int, Packed | None]]:
    """Return (name, count, sum, sketch) of the series in a row that are in `names`."""
    found: list[tuple[str, int, int, Packed | None]] = []
    at, end = 0, len(data)
    while at < end:
        number, count, total, size = _ENTRY.unpack_from(data, at)
        begin, at = at + _ENTRY_BYTES, at + _ENTRY_BYTES + size
        name = names.get(number)
        if name is not None:
            found.append((name, count, total, array("H", data[begin:at]) if sketches and size else None))
    return found


def series_total(data: bytes, number: int) -> int:
    """Return the sum of a series in the sketches of a row; 0 without one."""
    at, end, unpack = 0, len(data), _ENTRY.unpack_from
    while at < end:
        found, _, total, size = unpack(data, at)
        if found == number:
            return int(total)
        at += _ENTRY_BYTES + size
    return 0


def renumber_series(data: bytes, numbers: Mapping[int, int]) -> bytes:
    """Return the sketches of another history with its series under their numbers here (by number there).

    Series without a number are left out. Raises HistoryError if the sketches are damaged.
    """
    there: list[int] = []
    high: list[bytes] = []
    at, end, unpack = 0, len(data), _SIZES.unpack_from
    try:
        while at < end:
            number, count, size = unpack(data, at)
            begin, at = at + _ENTRY_BYTES, at + _ENTRY_BYTES + size
            if at > end or size & 3 or count > size // 4 * quantile_sketch.MAX_PAIR_COUNT:
                raise ValueError("too short")
            there.append(number)
            high.append(data[begin + 1 : at : 4])
        if b"".join(high).translate(None, _HIGH_BYTES):
            raise ValueError("too high")
    except (struct.error, ValueError) as error:
        raise HistoryError(f"a damaged tally: {error}") from None
    here = [numbers.get(number) for number in there]
    if here == there:
        return data
    parts, at = [], 0
    for own, pairs in zip(here, high, strict=True):
        begin, at = at + _NUMBER.size, at + _ENTRY_BYTES + 4 * len(pairs)
        if own is not None:
            parts.append(_NUMBER.pack(own) + data[begin:at])
    return b"".join(parts)


def encode_entry(number: int, values: Sequence[int]) -> bytes:
    """Return the entry of a series with these values."""
    if len(values) == 1:
        return _ENTRY.pack(number, 1, values[0], 4) + _PAIR.pack(quantile_sketch.bin_of(values[0]), 1)
    counts: Counts = {}
    quantile_sketch.add_values(counts, values)
    packed = quantile_sketch.pack(counts)
    return _ENTRY.pack(number, len(values), sum(values), len(packed)) + packed


def merge_sketches(sketches: Iterable[bytes], wanted: Collection[int] | None = None, *, leading: bool = False) -> bytes:
    """Return sketches as one, with one entry for each series.

    `wanted`: only these series; None: all. `leading`: in each row, only the wanted ones before the first other series.
    """
    found: dict[int, tuple[int, int, bytes]] = {}
    unpack = _ENTRY.unpack_from
    for data in sketches:
        at, end = 0, len(data)
        while at < end:
            number, count, total, size = unpack(data, at)
            begin, at = at + _ENTRY_BYTES, at + _ENTRY_BYTES + size
            if wanted is None or number in wanted:
                before = found.get(number, (0, 0, b""))
                found[number] = before[0] + count, before[1] + total, before[2] + data[begin:at]
            elif leading:
                break
    parts = []
    for number, (count, total, pairs) in found.items():
        if len(pairs) > _MANY_BYTES:
            counts: Counts = {}
            quantile_sketch.unpack(counts, [array("H", pairs)])
            pairs = quantile_sketch.pack(counts)
        parts.append(packed_entry(number, count, total, pairs))
    return b"".join(parts)
