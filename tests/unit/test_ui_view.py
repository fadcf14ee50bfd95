"""Rows that change: on an emulated terminal, the changed cells turn the old row into the new one."""

from __future__ import annotations

import random

import pyte
from rich.console import Console
from rich.segment import Segment
from situations import LOOK
from textual.strip import Strip

from dpmon.ui.rows import Row, fit, plain, width_of
from dpmon.ui.view import changed_cells

CONSOLE = Console(force_terminal=True, color_system="truecolor")
STYLES = ["", "dim", "bold", "phase.data", "phase.apply/gather", "chip.scatter", "sgr:color(1)::bu", "sgr:::r"]
WORDS = ["abc", "漢字", " ", "━━━", "▁▂▃", "é", "12 340", "─", "x", "\u0301", "\u0301x"]


def drawn(screen: pyte.Screen, x: int, row: Row) -> list[tuple[object, ...]]:
    """Write the cells of `row` at column `x`; return all cells of the screen's row."""
    strip = Strip([Segment(text, LOOK.style(name)) for text, name in row])
    pyte.Stream(screen).feed(f"\x1b[1;{x + 1}H{strip.render(CONSOLE)}")
    cells = (screen.buffer[0][column] for column in range(34))
    return [(cell.data, cell.fg, cell.bg, cell.bold, cell.underscore, cell.reverse) for cell in cells]


def test_the_changed_cells_turn_the_old_row_into_the_new_one() -> None:
    chance = random.Random(5)
    for _ in range(1500):
        spans = [(chance.choice(WORDS), chance.choice(STYLES)) for _ in range(12)]
        changed = list(spans)
        for _ in range(chance.randint(0, 2)):
            changed[chance.randrange(12)] = (chance.choice(WORDS), chance.choice(STYLES))
        before, after = (fit([("│", "frame"), *row], 30) for row in (spans, changed))
        screen, wanted = pyte.Screen(34, 1), pyte.Screen(34, 1)
        drawn(screen, 2, before)
        x, cells = changed_cells(before, after)
        assert drawn(screen, 2 + x, cells) == drawn(wanted, 2, after), (before, after)


def test_only_what_changed_is_written() -> None:
    before = fit([("step ", "dim"), ("12 340", "bold"), (" of 漢字", "")], 100)
    after = fit([("step ", "dim"), ("12 349", "bold"), (" of 漢字", "")], 100)
    assert changed_cells(before, after) == (10, [("9", "bold")])
    assert plain(changed_cells(before, before)[1]) == ""


def test_a_wide_character_is_not_cut_in_two_and_keeps_its_mark() -> None:
    assert changed_cells([("漢漢", "")], [("漢字", "")]) == (2, [("字", "")])
    assert changed_cells([("e\u0301x", "")], [("e\u0300x", "")]) == (0, [("e\u0300", "")])
    assert changed_cells([("ex", "")], [("e\u0301x", "")]) == (0, [("e\u0301", "")])
    assert width_of([("漢\u0301", "")]) == 2
