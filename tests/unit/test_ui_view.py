"""Rows that change: on an emulated terminal, the changed cells turn the old row into the new one."""

from __future__ import annotations

import random
import re

import pyte
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from textual.strip import Strip

from dpmon.ui.cell_diff import StyleCodes, encode_changes, style_codes
from dpmon.ui.styled_rows import Row, fit_row
from support.screen_states import STYLE

CONSOLE = Console(force_terminal=True, color_system="truecolor")
STYLES = [
    "",
    "dim",
    "bold",
    "phase.data",
    "phase.apply/gather",
    "chip.scatter",
    "sgr:bold underline color(1)",
    "sgr:reverse",
]
WORDS = ["abc", "漢字", " ", "━━━", "▁▂▃", "é", "12 340", "─", "x", "e\u0301x"]


def codes(style: str) -> StyleCodes:
    return style_codes(STYLE.rich_style(style), ColorSystem.TRUECOLOR)


def whole(screen: pyte.Screen, rows: list[Row]) -> None:
    """Write rows."""
    for y, row in enumerate(rows):
        strip = Strip([Segment(text, STYLE.rich_style(name)) for text, name in row])
        pyte.Stream(screen).feed(f"\x1b[{y + 1};1H{strip.render(CONSOLE)}")


def cells(screen: pyte.Screen) -> list[tuple[object, ...]]:
    """Return all cells of a screen."""
    found = [screen.buffer[y][x] for y in range(screen.lines) for x in range(screen.columns)]
    return [(cell.data, cell.fg, cell.bg, cell.bold, cell.underscore, cell.reverse) for cell in found]


def written(before: Row, after: Row) -> str:
    """Return what is written, without styles."""
    return re.sub(r"\x1b\[[0-9;]*m", "", encode_changes([before], [after], codes))


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
        screen, wanted = pyte.Screen(30, 3), pyte.Screen(30, 3)
        whole(screen, old)
        whole(wanted, new)
        pyte.Stream(screen).feed(encode_changes(old, new, codes) + "\x1b[3;30H!")
        pyte.Stream(wanted).feed("\x1b[0m\x1b[3;30H!")
        assert cells(screen) == cells(wanted), (old, new)


def test_only_what_changed_is_written() -> None:
    before = fit_row([("step ", "dim"), ("12 340", "bold"), (" of 漢字", "")], 100)
    after = fit_row([("step ", "dim"), ("12 349", "bold"), (" of 漢字", "")], 100)
    assert encode_changes([before], [after], codes).count("m") == 2, "one style, and its end"
    assert written(before, after) == "\x1b[1;11H9"
    assert written(before, before) == ""
    before = [("1 step", ""), (" " * 9, ""), ("2 s", "")]
    assert written(before, [("2 step" + " " * 9, ""), ("3 s", "")]) == "\x1b[1;1H2\x1b[14C3"
    assert written(before, [("1 step", ""), ("a" + " " * 7 + "b3 s", "")]) == "\x1b[1;7Ha       b3"


def test_only_the_codes_that_differ_are_sent() -> None:
    after: Row = [("a", "bold"), ("b", ""), ("c", "dim"), ("d", "bad")]
    text = encode_changes([[("....", "")]], [after], codes)
    parts = re.findall(r"\x1b\[([0-9;]*)m", text)
    plain, bold, dim = (codes(name) for name in ("", "bold", "dim"))
    assert parts[1] == f"{plain[0]};22"
    assert parts[2] == dim[0]
    assert parts[3] == f"{codes('bad')[0]};{bold[2]}"
    assert parts[4] == "0"


def test_a_wide_character_is_not_cut_in_two_and_keeps_its_mark() -> None:
    assert written([("漢漢", "")], [("漢字", "")]) == "\x1b[1;3H字"
    assert written([("e\u0301x", "")], [("e\u0300x", "")]) == "\x1b[1;1He\u0300"
    assert written([("ex", "")], [("e\u0301x", "")]) == "\x1b[1;1He\u0301"
    assert written([("漢  ", "")], [("  漢", "")]) == "\x1b[1;1H  漢"
    assert written([("漢\u0301x", "")], [("漢\u0301y", "")]) == "\x1b[1;3Hy"
