"""Widths on a terminal are the same as in Rich, which Textual uses."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len, set_cell_size

from dpmon.cleaning import harmless, visible
from dpmon.text.cells import char_width, cropped, span_width, wrapped


def test_every_character_is_as_wide_as_rich_says() -> None:
    shown = [char for char in map(chr, range(0x110000)) if visible(char) == char]
    assert [f"{ord(char):X}" for char in shown if char_width(char) != cell_len(char)] == []


def test_texts_are_cropped_as_rich_does() -> None:
    chance = random.Random(7)
    signs = ["a", " ", "é", "漢", "…", "─", "🚀", "e\u0301", "한", "\u1112\u1161", "क\u093f", "👍\U0001f3fd", "䷀"]
    for _ in range(2000):
        text = harmless("".join(chance.choices(signs, k=chance.randint(1, 30))))
        assert span_width(text) == cell_len(text)
        width = chance.randint(0, cell_len(text))
        assert cropped(text, width) == set_cell_size(text, width)


def test_wrapping() -> None:
    assert wrapped("one two three four", 9) == ["one two", "three", "four"]


@pytest.mark.parametrize("width", range(1, 20))
def test_wrapped_lines_fit(width: int) -> None:
    assert all(span_width(line) <= width for line in wrapped("one 漢字漢字漢字 three e\u0301 five", width))
