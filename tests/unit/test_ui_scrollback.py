"""The log as rows: the newest thousands as in a terminal, older ones from the file; all can be searched."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dpmon.model.state import State
from dpmon.ui.find import Hunt, found_in, marked
from dpmon.ui.look import COLOUR, UNICODE, Look
from dpmon.ui.panel_output import Output, title
from dpmon.ui.rows import plain
from dpmon.ui.scene import Scene
from dpmon.ui.scrollback import ROWS, Scrollback
from dpmon.ui.tail import Tail

LOOK = Look(UNICODE, COLOUR, True)


class Log:
    """A log file that grows, and the output panel over it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "output.log"
        self.path.touch()
        self.output = Output([Tail(self.path)])

    def add(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)
        self.output.refresh()

    def shown(self, height: int = 10) -> list[str]:
        return [plain(row) for row in self.output.visible(height)]

    def place(self) -> str:
        return "".join(text for text, _ in title(self.output, Scene(State(), 0), 80, LOOK)[1])

    def find(self, needle: str, by: int = 1, height: int = 10) -> str | None:
        job = self.output.search(needle, by, height)
        assert job is not None
        said = job()
        self.output.show_hit(height, 80)
        return said


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def numbered(first: int, end: int) -> bytes:
    return b"".join(b"line %d\n" % i for i in range(first, end))


def test_progress_bars_stay_correct_for_hours(log: Log) -> None:
    """An outer bar that is rarely drawn, an inner one that is drawn often, and text printed before them."""
    log.add(b"epoch 1 begins\n\router 0/2")
    for start in range(0, 20_000, 1000):
        log.add(b"".join(b"\n\rinner %d\x1b[A" % i for i in range(start, start + 1000)))
    assert log.shown() == ["epoch 1 begins", "outer 0/2", "inner 19999"]


def test_a_log_of_bars_scrolls_back_row_by_row(log: Log) -> None:
    for epoch in range(300):
        log.add(b"epoch %d\n" % epoch + b"".join(b"\ra %d\n\rb %d\x1b[A" % (i, i) for i in range(5)) + b"\n\n")
    log.output.scroll(-1_000_000, 10)
    assert log.shown(6) == ["epoch 0", "a 4", "b 4", "epoch 1", "a 4", "b 4"]
    log.output.scroll(450, 6)
    assert log.shown(3) == ["epoch 150", "a 4", "b 4"]
    log.output.scroll(1_000_000, 6)
    assert log.shown(3) == ["epoch 299", "a 4", "b 4"]


def test_lines_that_are_no_longer_kept_come_from_the_file(log: Log) -> None:
    for start in range(0, 30_000, 3000):
        log.add(numbered(start, start + 3000))
    back = log.output.back
    assert back is not None
    assert back.first > 20_000, "most are not kept"
    chance = random.Random(4)
    for top in [0, 1, back.first - 5, back.first, 29_990, *(chance.randrange(30_000 - 10) for _ in range(20))]:
        log.output.top = top
        assert log.shown() == [f"line {i}" for i in range(top, top + 10)]
        assert log.place() == f"line {top + 1:,} of 30,000"


def test_a_place_stays_while_the_log_grows_even_in_a_flood(log: Log) -> None:
    log.add(numbered(0, 100))
    log.output.scroll(-50, 10)
    before = log.shown()
    assert before[0] == "line 40"
    log.add(numbered(100, 5000))
    assert log.shown() == before
    log.add(numbered(5000, 200_000))
    assert log.shown() == before, "more than is read at once"
    assert log.place() == "line 41 of 200,000"
    log.output.scroll(10_000_000, 10)
    assert log.shown()[-1] == "line 199999"


def test_an_existing_log_is_read_from_near_its_end(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_bytes(numbered(0, 500_000))
    log = Log(tmp_path)
    log.output.refresh()
    assert log.shown()[-1] == "line 499999"
    log.output.scroll(-400_000, 10)
    assert log.shown()[0] == "line 99990"
    log.output.scroll(-1_000_000, 10)
    assert log.shown()[0] == "line 0"


def test_memory_is_bounded(log: Log) -> None:
    back = log.output.back
    assert back is not None
    for start in range(0, 40_000, 2000):
        log.add(numbered(start, start + 2000))
        assert len(back._settled) <= ROWS
        assert len(back._page.lines) <= 600
    for _ in range(60):
        log.add((b"w" * 3000 + b"\n") * 100)
    assert back._characters <= 4_000_000
    assert log.shown()[-1] == "w" * 3000


def test_a_colour_is_carried_into_old_lines_too(log: Log) -> None:
    log.add(b"\x1b[31mred\nstill\n\x1b[0mplain\n" + numbered(0, 12_000))
    log.add(numbered(12_000, 24_000))
    log.output.top = 1
    assert log.output.visible(2) == [[("still", "sgr:color(1)::")], [("plain", "")]]


# ------------------------------------------------------------------------------------------------ finding


def test_finding_goes_from_the_end_back_into_the_file_and_forth_again(log: Log) -> None:
    wanted = (3, 12_345, 29_000, 29_995)
    data = b"".join(b"line %d%s\n" % (i, b" Loss: nan" if i in wanted else b"") for i in range(30_000))
    for start in range(0, len(data), 200_000):
        log.add(data[start : start + 200_000])
    for number in reversed(wanted):
        assert log.find("nan") == f"line {number + 1:,} of 30,000"
        assert f"line {number} Loss: nan" in log.shown()
    assert log.find("nan") == "no older line with 'nan'"
    for number in wanted[1:]:
        assert log.find("nan", -1) == f"line {number + 1:,} of 30,000"
    assert log.find("nan", -1) == "no newer line with 'nan'"
    assert log.output.top is None, "the last one is at the end: it follows again"


def test_only_what_is_shown_is_found(log: Log) -> None:
    log.add(b"50%|#  |\r100%|###|\nx\x1b[31mer\x1b[0mror\n" + numbered(0, 30_000))
    log.add(numbered(30_000, 60_000))
    assert log.find("50%|") == "no older line with '50%|'"
    assert log.find("xerror") == "line 2 of 60,002"
    assert log.find("XERROR") == "no older line with 'XERROR'"


def test_the_column_of_a_hit_comes_into_sight(log: Log) -> None:
    log.add(b"." * 300 + b"here" + b"." * 300 + b"\nhere\n")
    assert log.find("here") == "line 2 of 2"
    assert log.output.left == 0
    assert log.find("here") == "line 1 of 2"
    assert log.output.left < 300 < log.output.left + 76


def test_a_word_in_a_line_of_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first needle\n" + b"x" * 3_000_000 + b"\nlast\n")
    tail = Tail(path)
    tail.refresh()
    back = Scrollback(tail)
    back.follow()
    first, texts = back.texts()
    hunt = Hunt("needle", True, back.end - 1, first, texts, tail, first - back.oldest)
    assert hunt.run() == back.oldest
    tail.close()


def test_capitals_count_only_if_there_are_some() -> None:
    assert found_in("An Error", "error") == 3
    assert found_in("An error", "Error") == -1
    assert found_in("anything", "") == -1
    assert marked([("An Err", "a"), ("or, error", "b")], "error") == [
        ("An ", "a"),
        ("Error", "found"),
        (", ", "b"),
        ("error", "found"),
    ]
    assert marked([("none", "")], "x") == [("none", "")]
