"""Bytes from a terminal: whatever they are, the next key works, and no answer of the terminal counts as a key."""

from __future__ import annotations

import os
import random
import time

import pytest
from textual import events
from textual.message import Message

from dpmon.ui import terminal_driver as module
from dpmon.ui.terminal_driver import _ESCAPE_POLLS, _UNFINISHED_POLLS, _InputParser
from support.run_harness import scaled_size

SOON, LATER, END = [b""] * (_ESCAPE_POLLS - 1), [b""] * (_ESCAPE_POLLS + 1), [b""] * _UNFINISHED_POLLS
"""Looks without input: before an escape is a key, after that, and until an open sequence is dropped."""
PASTE = b"\x1b[200~"


def messages(pieces: list[bytes]) -> list[Message]:
    keys = _InputParser()
    return [message for piece in pieces for message in keys.feed(piece)]


def names(*pieces: bytes) -> list[str]:
    """Return the messages of these bytes: keys by name, others by class."""
    found = messages(list(pieces))
    return [each.key if isinstance(each, events.Key) else type(each).__name__ for each in found]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # What is no key.
        ([b"\xe9"], []),
        ([b"\xff\xfe\xc3"], []),
        ([b"\x1b]11;rgb:dddd/xxxx/pppp\x07"], []),
        ([b"\x1b]11;rgb:dddd/xxxx/pppp\x1b\\"], []),
        ([b"\x1bP1$rdpx\x1b\\\x1b_Gdpx\x1b\\\x1b^dpx\x1b\\\x1bXdpx\x1b\\"], []),
        ([b"\x1b[?62;1;4c\x1b[>0;276;0c\x1b[0n"], []),
        ([b"\x1b[48;99999;99999;0;0t"], []),
        ([b"\x1b[?2048;2$y"], []),
        ([b"\x1b[201~"], []),
        # Sequences that are cut between two reads.
        ([b"\x1b", *SOON, b"]11;rgb:dddd/xxxx/pppp\x07"], []),
        ([b"\x1b]11;rgb:dddd/", *LATER, b"dddd/pppp\x1b\\"], []),
        ([b"\x1b]11;rgb:dddd/xxxx/pppp\x1b", *LATER, b"\\"], []),
        ([b"\x1b]52;c;" + b"d" * 5000, *LATER, b"dpx" * 100 + b"\x07"], []),
        ([b"\x1bP>|xterm(3", *LATER, b"90)dpx\x1b\\"], []),
        ([b"\x1b", *SOON, b"[?62;1;4c"], []),
        ([b"\x1b[", *LATER, b"?62;1;4c"], []),
        ([b"\x1b[?62;1", *LATER, b";4c"], []),
        ([b"\x1b[100", *LATER, b";1u"], ["d"]),
        ([b"\x1b[<0;3", *LATER, b";4M"], ["MouseDown"]),
        ([b"\x1b[1", *LATER, b";2A"], ["shift+up"]),
        ([b"\xc3", *LATER, b"\xa9"], ["é"]),
        # Sequences without an end.
        ([b"\x1b]0;dpx", *END], []),
        ([b"\x1b[?62;1", *END], []),
        ([b"\x1b[<0;3;", *END], []),
        ([b"\x1b]0;dpx", b"\x03"], ["ctrl+c"]),
        # Keys, clicks and pastes. alt with d is bound to nothing, because d acts on the training.
        ([b"\x1b", *LATER], ["escape"]),
        ([b"\x1bd"], ["alt+d"]),
        ([b"2\x1b[A\x1bOA\x1b[Z\x1b[21~"], ["2", "up", "up", "shift+tab", "f10"]),
        ([b"\x1b[<0;3;4M\x1b[<0;3;4m\x1b[<64;3;4M\x1b[I"], ["MouseDown", "MouseUp", "MouseScrollUp", "AppFocus"]),
        ([b"\x1b[99;5u"], ["ctrl+c"]),
        ([b"\x1b[99;133u"], ["ctrl+c"]),  # with the lock of the number pad
        ([b"\x1b[27;5;99~"], ["ctrl+c"]),
        ([b"\x1b[27u"], ["escape"]),
        ([b"\x1b2"], ["escape", "2"]),
        ([b"\x1bq"], ["escape", "q"]),
        ([b"\x1bdq"], ["alt+d", "q"]),
        ([PASTE + b"dpx\n\x03\x1b[201~"], ["Paste"]),
        ([PASTE + b"text", *END], ["Paste"]),
        ([b"\x1b[M!", b"\x03"], ["exclamation_mark", "ctrl+c"]),
        ([PASTE + b"text", *LATER, b"\x03", *END], ["Paste", "ctrl+c"]),
        ([PASTE + b"text\x1a", *END], ["Paste", "ctrl+z"]),
    ],
    ids=repr,
)
def test_bytes_and_the_keys_that_they_are(pieces: list[bytes], expected: list[str]) -> None:
    assert names(*pieces, b"q") == [*expected, "q"]


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([PASTE + b"one", *LATER, b" two", *END], "one two"),
        ([PASTE, *[b"dpx\n" * 1000] * 50, b"\x1b[201~"], "dpx\n" * 50_000),
    ],
    ids=["without an end", "long"],
)
def test_the_text_of_a_paste(pieces: list[bytes], text: str) -> None:
    (paste,) = messages(pieces)
    assert isinstance(paste, events.Paste)
    assert paste.text == text


PARTS = [
    *(b"\xe9", b"\xc3(", b"\xed\xa0\x80\xf5\x80\x80\x80", b"\x1b\xe9", b"\x1b[1;\xe9", b"\x1b\xf0\x80\x80\x80"),
    *(b"\x1b[M\xc3\xa9\xa9\x1b[M#\xff\xff", b"\x1b[M!", b"\x1b_Gdpx", b"\x1b^dpx", b"\x1bXdpx", b"\x1b[" + b"1;" * 999),
    *(b"\x1b]0;dpx", b"\x1b[1;2A", b"\x1b[M \xe9\xff", PASTE, b"\x1b[201~", b"\x1b", b"\x1b[", b"\x1b[<0;999999;"),
    *(b"\x1bO", b"\x1bP1$rdpx\x1b\\", b"\x1b[?62;1;4c", b"\xff\xfe\xc3", b"\x1b[48;99999;99999;0;0t", b"", b"", b""),
]


@pytest.mark.parametrize("seed", range(10))
def test_after_any_input_the_next_key_works(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(scaled_size(50, 5000)):
        pieces = []
        for _ in range(chance.randrange(1, 60)):
            data = chance.choice(PARTS) if chance.random() < 0.7 else chance.randbytes(chance.randrange(1, 200))
            pieces.append(data[: chance.randrange(len(data) or 1) + 1] if chance.random() < 0.3 else data)
        assert names(*pieces, *END, b"q")[-1] == "q", pieces


def test_a_terminal_that_takes_no_output_for_a_moment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, another thread may be writing to it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.write(writing, bytes(1 << 20))
    monkeypatch.setattr(time, "sleep", lambda _: os.read(reading, 1 << 20))
    module.restore_screen(writing)
    assert os.read(reading, 1 << 20) == module._RESTORE_SEQUENCE
    os.close(reading)
    os.close(writing)
