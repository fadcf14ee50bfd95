"""Notes of the processes of a run, damaged files of notes, and the exception in the output of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.cli.status_stream import ProgressReporter
from dpmon.run.activities import current_startup_stage, read_startup_stages
from dpmon.run.process_notes import (
    Note,
    NoteReader,
    parse_notes,
    read_uncaught_exceptions,
    traceback_line,
)
from support.run_harness import STATUS_NOW_NS, fake_status_reader, stop_status_clock

DAMAGE = {
    "5000 digits for a time": "7 " + "9" * 5000 + " ValueError {}",
    "400 digits for a time": "7 " + "9" * 400 + " ValueError {}",
    "5000 digits for a process": "9" * 5000 + " 7 ValueError {}",
    "digits of another script": "٧ ٧ ValueError {}",
    "a sign": "-7 7 ValueError {}",
    "no text": "7 7 ",
    "no process": "\0\x1b[2J",
}


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_status_clock(monkeypatch)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_line_that_is_no_note_hides_no_other(tmp_path: Path, damage: str) -> None:
    lines = f"7 1 First {{}}\n{damage}\n8 {STATUS_NOW_NS} Second {{}}\n9 3 Unfin"
    for name in ("stages.log", "endings.log", "warnings.log"):
        (tmp_path / name).write_text(lines)
    assert [(note.pid, note.text) for note in parse_notes(lines.encode())] == [(7, "First {}"), (8, "Second {}")]
    assert [(one.pid, one.kind) for one in read_uncaught_exceptions(tmp_path)] == [(7, "First"), (8, "Second")]
    assert {pid: text for pid, (text, _) in read_startup_stages(tmp_path).items()} == {7: "First {}", 8: "Second {}"}
    assert [note.text for note in NoteReader(tmp_path / "warnings.log").read_new()] == ["First {}", "Second {}"]
    reader = fake_status_reader(tmp_path)
    reader.startup_stage = lambda: current_startup_stage(read_startup_stages(tmp_path))
    assert ProgressReporter(reader).line() == "starting: Second {}"


def test_a_note_is_of_three_parts() -> None:
    assert parse_notes(b"7 12 in the script: a b\n\n") == [Note(7, 12, "in the script: a b")]
    assert parse_notes(b"9999999999 9999999999999999999 x\n") == [Note(9999999999, 9999999999999999999, "x")]
    assert parse_notes(b"7 12 x") == parse_notes(b"") == []


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (b"all fine\n", None),
        (b'Traceback (most recent call last):\n  File "a.py", line 1\n    x\nRuntimeError: no\n', "RuntimeError: no"),
        (b"Traceback (most recent call last):\n  x\nKeyError: 1\nlater output\n", "KeyError: 1"),
        (b'  File "a.py", line 3\n    foo(\n       ^\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
        (
            b"\x1b[1;35mTraceback (most recent call last):\x1b[0m\n  x\n\x1b[31mValueError\x1b[0m: no\n",
            "ValueError: no",
        ),
        (b"Traceback (most recent call last):\n  x\nmypkg.errors.Custom: no\n", "mypkg.errors.Custom: no"),
        (b"An Error: is only a word in a sentence here\n", None),
    ],
)
def test_the_last_line_of_the_traceback(log: bytes, expected: str | None) -> None:
    assert traceback_line(log) == expected


def test_the_clean_line_is_short_and_harmless() -> None:
    log = b"Traceback (most recent call last):\n  x\nKeyError: \x1b]0;title\x07" + b"x" * 1000 + b"\n"
    said = traceback_line(log)
    assert said is not None
    assert said.startswith("KeyError: \N{REPLACEMENT CHARACTER}]0;title")
    assert len(said) == 300
