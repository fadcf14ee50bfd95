"""JSON of a record is short, however long its texts are."""

from __future__ import annotations

import json

import pytest

from dpmon.record.names import MAX_JSON, MORE, packed_json, shortened


def test_a_name_is_cut_with_a_mark() -> None:
    assert shortened("short") == "short"
    assert shortened("x" * 200) == "x" * 200
    assert shortened("x" * 201) == "x" * 199 + MORE
    assert shortened("abcdef", 3) == "ab" + MORE


@pytest.mark.parametrize("character", ["x", "\U0001f600", "\udcff", '"'])
@pytest.mark.parametrize(("count", "length"), [(1, 1_000_000), (64, 120), (64, 5000)])
def test_a_definition_always_fits(character: str, count: int, length: int) -> None:
    packed = packed_json([(character * length, [3, 4], "float32", 48)] * count)
    assert len(packed) <= MAX_JSON
    found = json.loads(packed)
    assert [size[1:] for size in found] == [[[3, 4], "float32", 48]] * count
    assert found[0][0].rstrip(MORE) in character * length


def test_an_event_always_fits() -> None:
    packed = packed_json({"text": "t" * 1_000_000, "absent": {"devices": "d" * 100_000}})
    assert len(packed) <= MAX_JSON
    assert json.loads(packed)["text"] == "t" * 4095 + MORE


def test_a_text_that_fits_is_not_changed() -> None:
    text = "t" * 50_000
    assert json.loads(packed_json({"text": text}))["text"] == text
