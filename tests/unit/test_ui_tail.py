"""The log by line: the same lines as in the complete file, however long it is and however it grows."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from dpmon.ui.panel_output import Output
from dpmon.ui.rows import plain
from dpmon.ui.tail import Tail


def tail_of(path: Path, data: bytes) -> Tail:
    path.write_bytes(data)
    tail = Tail(path)
    tail.refresh()
    return tail


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "none.log")
    tail.refresh()
    assert tail.at(0, 5) == []


def test_every_line_is_found(tmp_path: Path) -> None:
    chance = random.Random(5)
    written = [b"%d " % i + b"y" * chance.randint(0, 200) for i in range(5000)]
    tail = tail_of(tmp_path / "log", b"\n".join(written) + b"\n")
    assert tail.size > 4 * (1 << 16), "the index has several blocks"
    for first in [0, 1, 4990, *(chance.randrange(5000) for _ in range(50))]:
        assert tail.at(first, 10) == written[first : first + 10]
    assert tail.at(5000, 3) == []
    tail.close()


def test_an_unfinished_line_counts(tmp_path: Path) -> None:
    tail = tail_of(tmp_path / "log", b"one\ntwo")
    assert tail.at(1, 5) == [b"two"]
    tail.close()


def test_it_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = tail_of(path, b"")
    written: list[bytes] = []
    with path.open("ab", buffering=0) as file:
        for batch in range(40):
            new = [b"line %d" % (batch * 500 + i) for i in range(500)]
            written += new
            file.write(b"\n".join(new) + b"\n")
            tail.refresh()
            middle = len(written) // 2
            assert tail.at(middle, 3) == written[middle : middle + 3]
    tail.close()


def test_a_truncated_file_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = tail_of(path, b"old line\n" * 50_000)
    path.write_bytes(b"new\n")
    tail.refresh()
    assert tail.at(0, 5) == [b"new"]
    tail.close()


@pytest.mark.parametrize("size", [1 << 14, (1 << 16) - 1, 1 << 16, 1_000_000])
def test_long_lines_are_read_in_part(tmp_path: Path, size: int) -> None:
    tail = tail_of(tmp_path / "log", b"first\n" + b"x" * size + b"\nlast\n")
    shown = tail.at(0, 3)
    assert shown[0] == b"first"
    assert shown[2] == b"last"
    assert len(shown[1]) <= (1 << 16) + 100
    if size > 1 << 16:
        assert b"1,000,000 bytes" in shown[1]
    tail.close()


def test_a_long_bar_shows_its_end(tmp_path: Path) -> None:
    bar = b"".join(b"\r%3d%%|%s" % (i % 101, b"#" * 60) for i in range(20_000))
    tail = tail_of(tmp_path / "log", b"start\n" + bar)
    output = Output([tail])
    rows = [plain(row) for row in output.visible(5)]
    assert rows[-1] == f"{19_999 % 101:3d}%|" + "#" * 60
    tail.close()


def test_refusing_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    os.symlink(tmp_path / "secret", tmp_path / "log")
    tail = Tail(tmp_path / "log")
    tail.refresh()
    assert tail.at(0, 5) == []


def test_the_index_is_small(tmp_path: Path) -> None:
    tail = tail_of(tmp_path / "log", b"a line of the log\n" * 1_000_000)
    assert len(tail._before) * 8 < 10_000
    assert tail.at(765_432, 1) == [b"a line of the log"]
    tail.close()


def test_scrolling_leaves_the_end_and_finds_it_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = tail_of(path, b"".join(b"line %d\n" % i for i in range(100)))
    output = Output([tail])
    assert [plain(r) for r in output.visible(3)] == ["line 97", "line 98", "line 99"]
    output.scroll(-5, 3)
    assert [plain(r) for r in output.visible(3)] == ["line 92", "line 93", "line 94"]
    with path.open("ab") as file:
        file.write(b"line 100\n")
    output.refresh()
    assert [plain(r) for r in output.visible(3)] == ["line 92", "line 93", "line 94"], "it stays where it is"
    output.scroll(-1000, 3)
    assert output.top == 0
    output.scroll(1000, 3)
    assert output.top is None
    assert [plain(r) for r in output.visible(2)] == ["line 99", "line 100"]
    tail.close()
