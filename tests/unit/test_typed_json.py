"""Dataclasses and NamedTuples as JSON, and back with a check of every type."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from dpmon.record.typed_json import OMIT_EMPTY, from_json, to_json


class Point(NamedTuple):
    name: str
    height: float = 0.0


@dataclass(frozen=True)
class Path:
    points: tuple[Point, ...]
    length: float | None
    is_closed: bool = False
    owner: str | None = field(default=None, metadata=OMIT_EMPTY)


WHOLE = Path((Point("a", 1.5), Point("b")), None, True, "me")


def test_what_was_converted_comes_back() -> None:
    assert to_json(WHOLE) == {"points": [["a", 1.5], ["b", 0.0]], "length": None, "is_closed": True, "owner": "me"}
    assert from_json(Path, json.loads(json.dumps(to_json(WHOLE)))) == WHOLE


def test_only_marked_fields_are_omitted_while_empty() -> None:
    assert to_json(Path((), None)) == {"points": [], "length": None, "is_closed": False}
    assert from_json(Path, {"points": [], "length": 3, "more": 1}) == Path((), 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"points": None}, {"points": [7]}, {"points": [["a"]]}, {"points": [["a", 1.0, 2]]}, {"points": [[1, 1.0]]},
        {"length": "3"}, {"length": True}, {"length": float("nan")}, {"length": float("inf")}, {"length": 10**400},
        {"is_closed": 1},
        {"owner": ["me"]},
    ],
)  # fmt: skip
def test_another_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no valid Path"):
        from_json(Path, {**to_json(WHOLE), **wrong})


@pytest.mark.parametrize("value", [None, 7, "points", [], {}, {"points": []}])
def test_what_is_no_object_with_all_fields_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no valid Path"):
        from_json(Path, value)
