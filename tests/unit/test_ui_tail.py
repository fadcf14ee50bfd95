"""The log as rows: the newest thousands as in a terminal; they can be searched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpmon.model.run_analysis import RunAnalysis
from dpmon.ui.panels.panel_output import MAX_ROWS, LogTail, OutputView, matches_search, panel_title
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.terminal_emulator import MAX_LINE_CELLS


class Log:
    """A log file that grows, and the output panel over it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "output.log"
        self.path.touch()
        self.output = OutputView([LogTail(self.path)])

    def add(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)
        self.output.refresh()

    def shown(self, height: int = 10) -> list[str]:
        return [plain_text(row) for row in self.output.visible_rows(height)]

    def place(self) -> str:
        return "".join(text for text, _ in panel_title(self.output, ScreenData(RunAnalysis(), 0), 80)[1])

    def find(self, needle: str, by: int = 1, height: int = 10) -> str:
        return self.output.find(needle, by > 0, height)

    @property
    def tail(self) -> LogTail:
        return self.output.tails[0]


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


def test_only_the_newest_rows_can_be_shown(log: Log) -> None:
    for start in range(0, 30_000, 3000):
        log.add(numbered(start, start + 3000))
    log.output.scroll(-1_000_000, 10)
    oldest = log.tail.first
    assert 24_000 < oldest <= 25_000
    assert log.shown() == [f"line {i}" for i in range(oldest, oldest + 10)]
    assert log.place() == f"line 1 of the last {30_000 - oldest:,}"


def test_a_place_stays_while_the_log_grows(log: Log) -> None:
    log.add(numbered(0, 100))
    log.output.scroll(-50, 10)
    before = log.shown()
    assert before[0] == "line 40"
    assert log.place() == "line 41 of 100"
    log.add(numbered(100, 5000))
    assert log.shown() == before
    log.add(numbered(5000, 200_000))
    assert log.output.top == log.tail.first, "the place has gone, so the oldest row is shown"
    log.output.scroll(10_000_000, 10)
    assert log.shown()[-1] == "line 199999"
    assert log.output.top is None, "it follows again"


def test_an_existing_log_is_read_from_near_its_end(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_bytes(numbered(0, 500_000))
    log = Log(tmp_path)
    log.output.refresh()
    assert log.shown()[-1] == "line 499999"
    log.output.scroll(-1_000_000, 1)
    assert log.shown(1) == [f"line {500_000 - log.tail.end + log.tail.first}"]
    assert log.tail.end - log.tail.first >= MAX_ROWS


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    output = OutputView([LogTail(tmp_path / "none.log")])
    output.refresh()
    assert output.visible_rows(5) == []
    assert output.find("x", True, 5) == "no older line with 'x'"


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    os.symlink(tmp_path / "secret", tmp_path / "log")
    output = OutputView([LogTail(tmp_path / "log")])
    output.refresh()
    assert output.visible_rows(5) == []


def test_a_long_line_is_cut_and_a_long_bar_shows_its_end(log: Log) -> None:
    log.add(b"first\n" + b"x" * 100_000 + b"\nlast\n")
    first, long, last = log.shown()
    assert (first, long, last) == ("first", "x" * MAX_LINE_CELLS, "last")
    log.add(b"".join(b"\r%3d%%|%s" % (i % 101, b"#" * 60) for i in range(20_000)))
    assert log.shown()[-1] == f"{19_999 % 101:3d}%|" + "#" * 60


def test_memory_is_bounded(log: Log) -> None:
    for start in range(0, 40_000, 2000):
        log.add(numbered(start, start + 2000))
        assert len(log.tail._page.lines) <= MAX_ROWS + 500
    for _ in range(60):
        log.add((b"w" * 3000 + b"\n") * 100)
    assert log.tail._page.lines[-2].row() == [("w" * MAX_LINE_CELLS, "")]


# ------------------------------------------------------------------------------------------------ finding


def test_finding_goes_from_the_end_back_and_forth_again(log: Log) -> None:
    wanted = (3, 2345, 2900, 2995)
    log.add(b"".join(b"line %d%s\n" % (i, b" Loss: nan" if i in wanted else b"") for i in range(3000)))
    for number in reversed(wanted):
        assert log.find("nan") == f"line {number + 1:,} of 3,000"
        assert f"line {number} Loss: nan" in log.shown()
    assert log.find("nan") == "no older line with 'nan'"
    for number in wanted[1:]:
        assert log.find("nan", -1) == f"line {number + 1:,} of 3,000"
    assert log.find("nan", -1) == "no newer line with 'nan'"
    assert log.output.top is None, "the last one is at the end: it follows again"


def test_only_what_is_shown_is_found(log: Log) -> None:
    log.add(b"50%|#  |\r100%|###|\nx\x1b[31mer\x1b[0mror\n" + numbered(0, 3000))
    assert log.find("50%|") == "no older line with '50%|'"
    assert log.find("xerror") == "line 2 of 3,002"
    assert log.find("XERROR") == "no older line with 'XERROR'"


def test_capitals_count_only_if_there_are_some() -> None:
    assert matches_search("An Error", "error")
    assert not matches_search("An error", "Error")
