"""Rows that change: on an emulated terminal, the changed cells turn the old row into the new one."""

from __future__ import annotations

import random

import pyte
from rich.console import Console
from rich.segment import Segment
from textual.strip import Strip

from dpmon.ui.cell_diff import diff_rows, encode_changes
from dpmon.ui.styled_rows import Row, fit_row, row_width
from support.screen_states import STYLE

CONSOLE = Console(force_terminal=True, color_system="truecolor")
STYLES = ["", "dim", "bold", "phase.data", "phase.apply/gather", "chip.scatter", "sgr:color(1)::bu", "sgr:::r"]
WORDS = ["abc", "漢字", " ", "━━━", "▁▂▃", "é", "12 340", "─", "x", "\u0301", "\u0301x"]


def sgr(style: str) -> str:
    """Return the SGR codes of a style, as the screen does."""
    return (
        Strip([Segment("x", STYLE.rich_style(style))])
        .render(CONSOLE)
        .partition("x")[0]
        .removeprefix("\x1b[")
        .removesuffix("m")
    )


def whole(screen: pyte.Screen, rows: list[Row], x: int = 2) -> None:
    """Write rows from column `x` on."""
    for y, row in enumerate(rows):
        strip = Strip([Segment(text, STYLE.rich_style(name)) for text, name in row])
        pyte.Stream(screen).feed(f"\x1b[{y + 1};{x + 1}H{strip.render(CONSOLE)}")


def cells(screen: pyte.Screen) -> list[tuple[object, ...]]:
    """Return all cells of a screen."""
    found = [screen.buffer[y][x] for y in range(screen.lines) for x in range(screen.columns)]
    return [(cell.data, cell.fg, cell.bg, cell.bold, cell.underscore, cell.reverse) for cell in found]


def changed(before: Row, after: Row) -> list[tuple[int, Row]]:
    """Return the column and the cells of each change."""
    return [(change.x, change.cells) for change in diff_rows(before, after, 0, 0)]


def test_the_changed_cells_turn_the_old_rows_into_the_new_ones() -> None:
    chance = random.Random(5)
    for _ in range(500):
        old, new = [], []
        for _ in range(3):
            spans = [(chance.choice(WORDS), chance.choice(STYLES)) for _ in range(12)]
            other = list(spans)
            for _ in range(chance.randint(0, 3)):
                other[chance.randrange(12)] = (chance.choice(WORDS), chance.choice(STYLES))
            before, after = (fit_row([("│", "frame"), *row], 30) for row in (spans, other))
            old.append(before)
            new.append(after)
        screen, wanted = pyte.Screen(34, 3), pyte.Screen(34, 3)
        whole(screen, old)
        whole(wanted, new)
        changes = [change for y, rows in enumerate(zip(old, new, strict=True)) for change in diff_rows(*rows, 2, y)]
        pyte.Stream(screen).feed(encode_changes(changes, sgr) + "\x1b[3;34H!")
        pyte.Stream(wanted).feed("\x1b[0m\x1b[3;34H!")
        assert cells(screen) == cells(wanted), (old, new)


def test_only_what_changed_is_written() -> None:
    before = fit_row([("step ", "dim"), ("12 340", "bold"), (" of 漢字", "")], 100)
    after = fit_row([("step ", "dim"), ("12 349", "bold"), (" of 漢字", "")], 100)
    assert changed(before, after) == [(10, [("9", "bold")])]
    assert changed(before, before) == []
    before = [("1 step", ""), (" " * 9, ""), ("2 s", "")]
    assert changed(before, [("2 step" + " " * 9, ""), ("3 s", "")]) == [(0, [("2", "")]), (15, [("3", "")])]
    assert changed(before, [("1 step", ""), ("a" + " " * 7 + "b3 s", "")]) == [(6, [("a" + " " * 7 + "b3", "")])]


def test_a_wide_character_is_not_cut_in_two_and_keeps_its_mark() -> None:
    assert changed([("漢漢", "")], [("漢字", "")]) == [(2, [("字", "")])]
    assert changed([("e\u0301x", "")], [("e\u0300x", "")]) == [(0, [("e\u0300", "")])]
    assert changed([("ex", "")], [("e\u0301x", "")]) == [(0, [("e\u0301", "")])]
    assert row_width([("漢\u0301", "")]) == 2
