"""The parts of calls in the history: their columns, and the names of the series with their times in tallies."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.history_rows import CallParts, CallRow
from dpmon.record.kinds import Event
from dpmon.record.plainjson import load_event, load_json

_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@lru_cache(4096)
def replica_series(layout: int, index: int) -> str:
    """Return the series name of the replica at `index` in calls of this layout."""
    return f"replica {layout} {index}"


def stage_series(layout: int, index: int, stage: int, inputs: int, outputs: int) -> str:
    """Return the series name of the stage at `index` in calls with these sizes of inputs and outputs."""
    return f"stage {layout} {index} {stage} {inputs} {outputs}"


_LISTS = re.compile(r"[][0-9,.\-nul]*")
_LONG = re.compile(r"[0-9]{19}")


def numbers_in(text: str) -> Any:
    """Return the nested lists of numbers and None in a column of JSON. Raises HistoryError if it is anything else."""
    try:
        # Nearly every text has only these characters, and no long number: its values need no check.
        usual = _LISTS.fullmatch(text) is not None and _LONG.search(text) is None
        return json.loads(text) if usual else _checked(load_json(text))
    except ValueError as error:
        raise HistoryError(f"a damaged list: {error}") from None


def _checked(found: Any) -> Any:
    left = [found]
    for one in left:
        if isinstance(one, list):
            left += one
        elif not (one is None or type(one) in (int, float)):
            raise ValueError("not a number")
    return found


def parts_column(parts: CallParts | None) -> str | None:
    """Return the parts of a call for their column."""
    return None if parts is None else _json(parts)


def call_in(columns: Sequence[Any]) -> CallRow:
    """Return the call in CALL_ROW columns (dpmon.store.tables). Raises HistoryError if its parts are damaged."""
    row = CallRow._make(columns)
    text: Any = row.parts
    return row if text is None else row._replace(parts=_parts_in(text))


@lru_cache(1024)
def _parts_in(text: str) -> CallParts:
    """Return the parts in a column. Cached, because every picture shows the newest calls."""
    try:
        phases, replicas, stages, times, why = numbers_in(text)
        ran = [None if at is None else (at[0], at[1]) for at in phases]
        if list in map(type, (*chain(*filter(None, ran), *replicas, *stages), *(times or ()), why)):
            raise ValueError("a list in place of a number")
        return CallParts(ran, [*map(tuple, replicas)], [*map(tuple, stages)], times, why)
    except (ValueError, TypeError, LookupError) as error:
        raise HistoryError(f"a damaged call: {error}") from None


def event_in(row: Sequence[str]) -> Event:
    """Return the event in a row with its JSON. Raises HistoryError if it is damaged."""
    try:
        return Event(*load_event(row[0]))
    except ValueError as error:
        raise HistoryError(f"a damaged event: {error}") from None
