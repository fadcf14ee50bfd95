"""Direct drawing without the compositor: on an emulated terminal, its output changes the old row into the new one."""

from __future__ import annotations

import random

import pyte
import pytest

from dpmon.ui.direct import cells_of, patch, patch_row
from dpmon.ui.look import COLOUR, UNICODE, Look
from dpmon.ui.rows import Row, fit, plain

LOOK = Look(UNICODE, COLOUR, True)
STYLES = [
    "",
    "dim",
    "bold",
    "phase.data",
    "phase.apply/gather",
    "chip.scatter",
    "mode.dp",
    "sgr:color(1)::bu",
    "sgr:::r",
]
WORDS = ["abc", "漢字", " ", "━━━", "▁▂▃", "é", "12 340", "─", "x"]


def random_row(chance: random.Random, width: int) -> Row:
    row: Row = []
    for _ in range(chance.randint(0, 12)):
        row.append((chance.choice(WORDS), chance.choice(STYLES)))
    return fit(row, width)


def cells_on(screen: pyte.Screen, y: int, width: int) -> list[tuple[object, ...]]:
    found = []
    for x in range(width):
        cell = screen.buffer[y][x]
        found.append((cell.data, cell.fg, cell.bg, cell.bold, cell.underscore, cell.reverse))
    return found


@pytest.mark.parametrize("system", ["truecolor", "256", "standard", None])
def test_the_terminal_ends_up_with_the_new_row(system: str | None) -> None:
    chance = random.Random(9)
    width = 40
    for _ in range(150):
        before, after = random_row(chance, width), random_row(chance, width)
        screens = []
        for path in ((before, after), (after,)):
            screen = pyte.Screen(width + 4, 3)
            stream = pyte.Stream(screen)
            shown: list[tuple[str, str]] = [("\0", "")] * width
            for row in path:
                stream.feed(patch(2, 1, shown, cells_of(row), LOOK, system))
                shown = cells_of(row)
            screens.append(cells_on(screen, 1, width + 4))
        assert screens[0] == screens[1], (plain(before), plain(after))


def test_rows_that_share_spans_end_up_the_same() -> None:
    chance = random.Random(5)
    words = [*WORDS, "\u0301", "\u0301x"]
    written = 0
    for _ in range(600):
        spans = [(chance.choice(words), chance.choice(STYLES)) for _ in range(8)]
        changed = list(spans)
        for _ in range(chance.randint(0, 2)):
            changed[chance.randrange(8)] = (chance.choice(words), chance.choice(STYLES))
        before, after = fit(spans, 30), fit(changed, 30)
        screen, wanted = pyte.Screen(34, 3), pyte.Screen(34, 3)
        stream = pyte.Stream(screen)
        blank = [("\0", "")] * 30
        stream.feed(patch(2, 1, blank, cells_of(before), LOOK, "truecolor"))
        piece = patch_row(2, 1, before, after, LOOK, "truecolor")
        stream.feed(piece)
        pyte.Stream(wanted).feed(patch(2, 1, blank, cells_of(after), LOOK, "truecolor"))
        assert cells_on(screen, 1, 34) == cells_on(wanted, 1, 34), (before, after)
        assert (piece == "") == (cells_of(before) == cells_of(after))
        written += bool(piece)
    assert 100 < written < 600


def test_nothing_is_written_when_nothing_changed() -> None:
    row = cells_of([("same 漢字", "bold"), (" text", "")])
    assert patch(0, 0, row, row, LOOK, "truecolor") == ""


def test_only_what_changed_is_written() -> None:
    before = cells_of(fit([("step ", "dim"), ("12 340", "bold")], 100))
    after = cells_of(fit([("step ", "dim"), ("12 341", "bold")], 100))
    written = patch(10, 4, before, after, LOOK, "truecolor")
    assert written.startswith("\x1b[5;21H")
    assert written.endswith("1\x1b[m")
    assert len(written) < 60


def test_a_wide_character_is_not_cut_in_two() -> None:
    before, after = cells_of([("漢漢", "")]), cells_of([("漢字", "")])
    assert "字" in patch(0, 0, before, after, LOOK, None)
    assert cells_of([("e\u0301x", "")]) == [("e\u0301", ""), ("x", "")]
    assert cells_of([("漢\u0301", "")]) == [("漢\u0301", ""), ("", "")]
