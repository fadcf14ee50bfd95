"""No foreign text controls the terminal: names and the script's output are cleaned."""

from __future__ import annotations

import random
import tracemalloc
import unicodedata
from itertools import pairwise

import pyte
import pytest
from rich.cells import cell_len

from dpmon.sanitize import MAX_LINE_CHARS, sanitize_line, strip_control_chars
from dpmon.text.cells import ascii_text
from dpmon.ui.styled_rows import Row, plain_text
from dpmon.ui.terminal_emulator import MAX_CHANGING_ROWS, MAX_LINE_CELLS, TerminalPage

STEERING = [
    *("\x1b]52;c;ZXZpbA==\x07", "\x1bc", "\x1b[6n", "\x1b[2J\x1b[H", "\x1b]0;title\x1b\\", "\x1bP+q544e\x1b\\"),
    *("\x1b_payload\x1b\\", "\x1b^pm\x1b\\", "\x1bX sos \x1b\\", "\x9b31m", "\x9d52;c;ZXZpbA==\x9c", "\x90dcs\x9c"),
    *("\x85", "\x7f", "\x00", "\x08\x08\x08", "\x0e\x0f", "\x1b(0", "\x1b#8", "\x1b[?1049h", "\x1b[5;10r"),
    *("\x1b[200~paste", "\u202eevil\u202c", "\u2066x\u2069", "\u200b\u200d\ufeff", "\u00ad", "\U000e0041", "\ud800"),
    *("\udfff\ud800", "\u2028\u2029", "\uffff", "\U0010ffff", "e" + "\u0301" * 500, "\ufe0f", "\u3164\u115f", "\x1b"),
    *("\x1b[", "\x1b[31", "\x1b]8;;http://x"),
]


def harmless_rows(rows: list[Row]) -> None:
    for row in rows:
        shown(plain_text(row))


def shown(text: str) -> None:
    """Assert that a terminal prints `text` as it is, and nothing else happens."""
    for char in text:
        category = unicodedata.category(char)
        assert category not in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp"), f"{char!r} in {text[:100]!r}"
    text.encode("utf-8")


def interpret(lines: list[bytes]) -> list[Row]:
    """The rows that the lines finally show."""
    page = TerminalPage()
    page.feed(b"\n".join(lines))
    return [line.row() for line in page.lines]


@pytest.mark.parametrize("text", STEERING)
def test_neither_a_name_nor_a_line_of_output_can_steer(text: str) -> None:
    for dirty in (text, "before" + text + "after", text * 50):
        shown(sanitize_line(dirty))
        assert sanitize_line(dirty) == sanitize_line(sanitize_line(dirty)), "cleaning twice changes nothing"
        harmless_rows(interpret([dirty.encode("utf-8", "surrogatepass")]))
    around = sanitize_line("before " + text + " after")
    assert around.startswith("before ")
    assert around.endswith(" after")


def test_random_bytes_never_steer() -> None:
    chance = random.Random(3)
    pieces = [piece.encode("utf-8", "surrogatepass") for piece in STEERING]
    for _ in range(500):
        parts = [chance.choice(pieces) if chance.random() < 0.4 else chance.randbytes(chance.randint(1, 30))]
        raw = b"".join(parts * chance.randint(1, 8)).replace(b"\n", b"")
        harmless_rows(interpret([raw, raw]))
        shown(sanitize_line(raw.decode("utf-8", "replace")))


def test_ordinary_text_is_untouched() -> None:
    for text in ("linear.py", "Größe 3×4 → 漢字 ok", "café", "naïve", "ไทย", "emoji 🚀"):
        assert sanitize_line(text) == text


def test_clean_is_bounded_and_takes_anything() -> None:
    assert len(sanitize_line("x" * 1_000_000)) == MAX_LINE_CHARS
    assert sanitize_line("x" * 1_000_000).endswith("…")
    assert sanitize_line("abc", limit=2) == "a…"
    assert sanitize_line(None) == "None"
    assert sanitize_line(["a"]) == "['a']"
    assert len(strip_control_chars("a" + "\u0301" * 1000)) == 3


# ------------------------------------------------------------------------------------------------ output


def lines(*raw: str) -> list[str]:
    return [plain_text(row) for row in interpret([line.encode() for line in raw])]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("plain", "plain"),
        ("", ""),
        ("windows\r", "windows"),
        ("  0%|  |\r 50%|# |\r100%|##|", "100%|##|"),
        ("long line\rshort", "shortline"),
        ("long line\r\x1b[Kshort", "short"),
        ("abc\b\bX", "aXc"),
        ("a\tb", "a       b"),
        ("\x1b[31mred\x1b[0m plain", "red plain"),
        ("ab\x1b[3CX", "ab   X"),
        ("abcdef\x1b[4D__", "ab__ef"),
        ("abcdef\x1b[2Gxx", "axxdef"),
        ("abc\x1b[1K", ""),
        ("title\x1b]0;evil\x07 after", "title after"),
        ("link \x1b]8;;http://x\x1b\\text\x1b]8;;\x1b\\", "link text"),
        ("\x1b[?25lhidden cursor\x1b[?25h", "hidden cursor"),
        ("cut off \x1b[3", "cut off"),
    ],
)
def test_one_line_as_a_terminal_ends_up_showing_it(raw: str, expected: str) -> None:
    assert lines(raw) == [expected]


def test_colors_reach_the_picture_as_styles() -> None:
    (row,) = interpret([b"\x1b[1;31mbad\x1b[0m \x1b[38;5;208mo\x1b[38;2;1;2;3mt\x1b[39mx"])
    assert row == [
        ("bad", "sgr:bold color(1)"),
        (" ", ""),
        ("o", "sgr:color(208)"),
        ("t", "sgr:#010203"),
        ("x", ""),
    ]


def test_long_rows_that_can_still_change_need_little_memory() -> None:
    page, row = TerminalPage(), b"\x1b[32m" + b"loss 0.12 " * (MAX_LINE_CELLS // 10) + b"\x1b[0m\n"
    tracemalloc.start()
    try:
        page.feed(row * MAX_CHANGING_ROWS)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 16 * MAX_LINE_CELLS * MAX_CHANGING_ROWS, "less than 16 bytes a cell"


def test_a_line_of_a_megabyte_is_bounded() -> None:
    (row,) = interpret([b"x" * 1_000_000])
    assert len(plain_text(row)) == MAX_LINE_CELLS
    (row,) = interpret([b"\x1b[99999C" * 1000 + b"end" + b"\x1b[31mx" * 10_000])
    assert len(plain_text(row)) <= MAX_LINE_CELLS


# ------------------------------------------------------------------------------------------------ growing output


def shown_by(page: TerminalPage) -> list[Row]:
    return [line.row() for line in page.lines]


def fed(raw: bytes, cuts: list[int]) -> list[Row]:
    """Return the rows of `raw`, passed in pieces that end at `cuts`."""
    page = TerminalPage()
    for start, end in pairwise([0, *cuts, len(raw)]):
        page.feed(raw[start:end])
    return shown_by(page)


PIECES = [
    *(piece.encode("utf-8", "surrogatepass") for piece in STEERING),
    *(b"\r", b"\n", b"\n", b"\b", b"\t", b"\x1b[A", b"\x1b[2A", b"\x1b[3B", b"\x1b[K", b"\x1b[J", b"\x1b[5G"),
    *(b"word", b"x" * 30, "漢字".encode(), "é".encode(), "e\u0301".encode(), b"\xff\xc3", b"\x1b[1;38;5;208m"),
    *(b"\x1b[0m", b"\x1b[>4;2m", b"\x1b[?25l", b"\x1b[" + b"1" * 70, b"\x1b[1 A", b"\x1b]0;t\x1b[31mred"),
]


@pytest.mark.parametrize("seed", range(40))
def test_the_result_does_not_depend_on_how_the_input_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    raw = b"".join(chance.choice(PIECES) for _ in range(chance.randint(5, 60)))
    whole = fed(raw, [])
    assert fed(raw, list(range(1, len(raw)))) == whole, "byte by byte"
    for _ in range(5):
        cuts = sorted(chance.sample(range(1, len(raw)), min(len(raw) - 1, chance.randint(1, 12))))
        assert fed(raw, cuts) == whole, cuts
    harmless_rows(whole)


def test_a_growing_log_agrees_with_a_terminal_emulator() -> None:
    """Compare with pyte (a screen of HEIGHT rows, and its history), for sequences that both know."""
    chance = random.Random(21)
    moves = ["\r", *"\n\n\n", "\x1b[A", "\x1b[4A", "\x1b[B", "\x1b[K", "\x1b[J", "\x1b[3C", "\x1b[7G", "\x1b[31m"]
    moves += ["\b", "\t", "\x1b[1K", "\x1b[2K", "\x1b[3D", "\x1b[1m", "\x1b[0m", "12345"]
    for _ in range(8):
        # At the bottom from the beginning: a log has no rows below its last one.
        raw = "\n" * MAX_CHANGING_ROWS + "".join(
            chance.choice([*moves, "word", "x"]) for _ in range(chance.randint(200, 900))
        )
        screen = pyte.HistoryScreen(80, MAX_CHANGING_ROWS, history=10_000)
        screen.set_mode(pyte.modes.LNM)
        pyte.Stream(screen).feed(raw)
        history = ["".join(line[x].data for x in range(80)).rstrip() for line in screen.history.top]
        expected = [*history, *(line.rstrip() for line in screen.display)]
        page = TerminalPage()
        for start in range(0, len(raw), 37):
            page.feed(raw[start : start + 37].encode())
        found = [plain_text(row).rstrip() for row in shown_by(page)]
        assert found == expected[: len(found)]
        assert not any(expected[len(found) :])


@pytest.mark.parametrize(
    "text", ["e\u0301", "\u0928\u093f", "\u00e9t\u00e9", "\u6f22\u5b57", "1\u00d72 \u00b7 \u2588", "a\u20dd"]
)
def test_text_in_ascii_is_as_wide_as_before(text: str) -> None:
    """A combining mark takes no cell of its own."""
    assert ascii_text(text).isascii()
    assert cell_len(ascii_text(text)) == cell_len(text)
