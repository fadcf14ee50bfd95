"""The parts of calls in the history: their columns, and the names of the series with their times in tallies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from dpmon.record.history_rows import CallParts, CallRow
from dpmon.record.kinds import RecordError
from dpmon.record.names import MODES
from dpmon.record.plainjson import load_json

_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@lru_cache(4096)
def replica_series(layout: int, index: int) -> str:
    """Return the series name of the replica at `index` in calls of this layout."""
    return f"replica {layout} {index}"


def stage_series(layout: int, index: int, stage: int, inputs: int, outputs: int) -> str:
    """Return the series name of the stage at `index` in calls with these sizes of inputs and outputs."""
    return f"stage {layout} {index} {stage} {inputs} {outputs}"


def check_numbers(values: Iterable[Any]) -> None:
    """Raise TypeError unless all values are whole numbers or None."""
    if not {int, type(None)}.issuperset(map(type, values)):
        raise TypeError("not whole numbers")


def check_times(values: Iterable[Any] | None) -> None:
    """Raise TypeError unless all device times are numbers or None."""
    if not {float, int, type(None)}.issuperset(map(type, values or ())):
        raise TypeError("not times")


def parts_column(parts: CallParts | None) -> str | None:
    """Return the parts of a call for their column."""
    return None if parts is None else _json(parts)


def call_in(columns: Sequence[Any]) -> CallRow:
    """Return the call in CALL_ROW columns (dpmon.store.tables). Raises RecordError if its parts are damaged."""
    row = CallRow._make(columns)
    text: Any = row.parts
    try:
        check_numbers(number for number in columns[:-1] if number is not row.mode)
        if row.mode not in MODES:
            raise ValueError("an unknown mode")
        if text is None:
            return row
        phases, replicas, stages, times, why = load_json(text)
        ran = [None if at is None else (at[0], at[1]) for at in phases]
        check_numbers((why, *(number for part in (*filter(None, ran), *replicas, *stages) for number in part)))
        check_times(times)
        parts = CallParts(ran, [*map(tuple, replicas)], [*map(tuple, stages)], times, why)
        return row._replace(parts=parts)
    except (ValueError, TypeError, LookupError) as error:
        raise RecordError(f"damaged row in calls: {error}") from None
