"""Notes of the processes of a run, damaged files of notes, and the exception in the output of a script."""

from __future__ import annotations

import pytest

from dpmon.run.process_notes import (
    Note,
    parse_notes,
    traceback_line,
)
from support.run_harness import stop_status_clock


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_status_clock(monkeypatch)


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
