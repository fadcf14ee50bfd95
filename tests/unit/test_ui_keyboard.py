"""The meaning of bytes from a terminal: complete, in pieces, cut short and random."""

from __future__ import annotations

import random

import pytest
from sizes import size
from textual import events
from textual.message import Message

from dpmon.ui.keyboard import PASTE_MOST, Keyboard

ESCAPE_S, SOON_S, CUT_S = 0.1, 0.11, 1.1


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


class Typist:
    """A keyboard and all its messages."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.keyboard = Keyboard(self.clock, ESCAPE_S)
        self.found: list[Message] = []

    def type(self, data: bytes) -> Typist:
        self.found += self.keyboard.feed(data)
        return self

    def wait(self, seconds: float) -> Typist:
        """Let time pass, with the ticks of the driver."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += 0.02
            self.found += self.keyboard.tick()
        return self

    def keys(self) -> list[str]:
        return [each.key for each in self.found if isinstance(each, events.Key)]

    def names(self) -> list[str]:
        """Return the messages: keys by name, others by class."""
        return [each.key if isinstance(each, events.Key) else type(each).__name__ for each in self.found]


MEANINGS = [
    (b"\x1b2", ["escape", "2"]),
    (b"\x1bd", ["alt+d"]),  # bound to nothing, because d acts on the training
    (b"\x1bx", ["alt+x"]),
    (b"\x1bf", ["escape", "f"]),
    (b"\x1bN", ["escape", "N"]),
    (b"\x1b", ["escape"]),
    (b"\x1b\x1b", ["escape", "escape"]),
    (b"\x1b\x03", ["escape", "ctrl+c"]),
    (b"\x1b[", ["escape", "left_square_bracket"]),
    (b"\x1bO", ["escape", "O"]),
    (b"\x1bO?", ["escape", "O", "question_mark"]),
    (b"2d", ["2", "d"]),
    (b"\x1b\xe0\x80\x80", ["escape"]),
    (b"\x1b\xed\xa0\x80", ["escape"]),
    (b"\x1b\xf0\x80\x80\x80", ["escape"]),
    (b"\x1b\xf4\x90\x80\x80", ["escape"]),
    (b"\x1b[A", ["up"]),
    (b"\x1bOA", ["up"]),
    (b"\x1b[1;3A", ["alt+up"]),
    (b"\x1b[5;5~", ["ctrl+pageup"]),
    (b"\x1b[99;1~", []),
    (b"\x1b[21~", ["f10"]),
    (b"\x1b[[A", ["f1"]),
    (b"\x1b[Z", ["shift+tab"]),
    (b"\xe2\x84\xa2", ["trade_mark_sign"]),
    (b"\x1b\xc3\xa9q", ["escape", "é", "q"]),
    # Bytes that are not text.
    (b"\xe9", []),
    (b"\xe9q", ["q"]),
    (b"\xc3", []),
    (b"\xff\xc3\x1b[A", ["up"]),
    (b"\xef\xbf\xbd", []),
    # Mouse reports, focus reports and a terminal's answers.
    (b"\x1b[M \xe9\xff2", ["2"]),
    (b"\x1b[<0;3;4M", ["MouseDown"]),
    (b"\x1b[<0;3;4m", ["MouseUp"]),
    (b"\x1b[<64;3;4M", ["MouseScrollUp"]),
    (b"\x1b[<35;3;4M", []),
    (b"\x1b[<0;999999999999;1M", []),
    (b"\x1b[32;10;20M", []),
    (b"\x1b[I\x1b[O", ["AppFocus", "AppBlur"]),
    (b"\x1b[24;80R", []),
    (b"\x1b[?62;1;4c\x1b[>0;276;0c\x1b[0n", []),
    (b"\x1b[48;99999;99999;0;0t", []),
    (b"\x1b[?2026;2$y", ["TerminalSupportsSynchronizedOutput"]),
    (b"\x1b[?2048;2$y", []),
    (b"\x1b]11;rgb:dddd/xxxx/pppp\x07q", ["q"]),
    (b"\x1b]11;rgb:dddd/xxxx/pppp\x1b\\q", ["q"]),
    (b"\x1bP1$rdpx\x1b\\\x1b_Gdpx\x1b\\\x1b^dpx\x1b\\\x1bXdpx\x1b\\q", ["q"]),
    (b"\x1bPdpx\x1b[A", ["up"]),
    (b"\x1b\\", []),
    # A keyboard left by another program in a special mode.
    (b"\x1b[100;1u", ["d"]),
    (b"\x1b[99;5u", ["ctrl+c"]),
    (b"\x1b[99;5:1u", ["ctrl+c"]),
    (b"\x1b[99;5:3u", []),
    (b"\x1b[27;5;99~", ["ctrl+c"]),
    (b"\x1b[27u", ["escape"]),
    (b"\x1b[9999999u\x1b[55296u\x1b[99999999999u", []),
    # Interrupted sequences.
    (b"\x1b[1;2\x03", ["ctrl+c"]),
    (b"\x1b[1;2\x1b[A", ["up"]),
    (b"\x1b]dpx\x03", ["ctrl+c"]),
    (b"\x1b]dpx\x1a", ["ctrl+z"]),
    (b"\x1b[" + b"1;" * 9999 + b"~q", ["q"]),
    # Pastes.
    (b"\x1b[200~dpx\x1b[201~q", ["Paste", "q"]),
    (b"\x1b[200~d\x03px\x1b[201~q", ["Paste", "q"]),
    (b"\x1b[201~q", ["q"]),
]


@pytest.mark.parametrize(("typed", "means"), MEANINGS, ids=lambda value: repr(value)[:40] if value else "nothing")
def test_keys_of_byte_sequences(typed: bytes, means: list[str]) -> None:
    assert Typist().type(typed).wait(SOON_S + CUT_S).names() == means
    slow = Typist()
    for byte in typed:
        slow.type(bytes((byte,)))
    assert slow.wait(SOON_S + CUT_S).names() == means, "byte by byte"


CUT = [b"\x1b]11;d", b"\x1bPd", b"\x1b_d", b"\x1b^d", b"\x1bXd", b"\x1b[1;", b"\x1b[<0;1", b"\x1b[M", b"\x1b[M\xff"]


@pytest.mark.parametrize("begun", CUT, ids=repr)
def test_an_incomplete_sequence_is_dropped(begun: bytes) -> None:
    assert Typist().type(begun).wait(CUT_S).type(b"q").wait(SOON_S).keys() == ["q"]
    assert Typist().type(begun).type(b"\x03").wait(SOON_S).keys()[-1:] == ["ctrl+c"] or begun.startswith(b"\x1b[M")


def test_an_endless_string_is_dropped_as_long_as_its_bytes_come_fast() -> None:
    typist = Typist().type(b"\x1b]0;")
    for _ in range(100):
        typist.wait(0.1).type(b"dpx" * 1000)
    assert typist.keys() == []
    assert typist.wait(CUT_S).type(b"q").keys() == ["q"]


@pytest.mark.parametrize("begun", [b"\x1b]0;dpx", b"\x1b[" + b"1;" * 200, b"\x1b[200~" + b"text " * 100], ids=repr)
def test_keys_pressed_by_a_person_end_an_endless_sequence(begun: bytes) -> None:
    typist = Typist().type(begun)
    for _ in range(60):
        typist.wait(0.1).type(b"\xc3\xa9")
    assert typist.keys()[-1:] == ["é"]


def test_a_paste_without_an_end_ends() -> None:
    typist = Typist().type(b"\x1b[200~one").wait(0.5).type(b" two").wait(CUT_S).type(b"q").wait(SOON_S)
    assert typist.names() == ["Paste", "q"]
    assert typist.found[0].text == "one two"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "ctrl+c"), (b"\x1a", "ctrl+z")])
def test_ctrl_c_and_ctrl_z_work_in_a_paste_that_does_not_end(key: bytes, name: str) -> None:
    typist = Typist().type(b"\x1b[200~text").type(key)
    assert typist.names() == [], "more bytes may follow"
    assert typist.wait(SOON_S).names() == [name]
    assert typist.type(b"q").keys() == [name, "q"]


@pytest.mark.parametrize("piece", [1, 7, 4096, 1 << 20])
def test_a_paste_of_a_megabyte_is_cut_to_the_limit(piece: int) -> None:
    typist = Typist()
    data = b"\x1b[200~" + "dpx\n\0é".encode() * (size(15, 150) << 10) + b"\x1b[201~q"
    for start in range(0, len(data), piece):
        typist.type(data[start : start + piece])
    assert typist.names() == ["Paste", "q"]
    assert PASTE_MOST * 0.8 < len(typist.found[0].text.encode()) <= PASTE_MOST  # type: ignore[attr-defined]
    assert "\0" not in typist.found[0].text  # type: ignore[attr-defined]


PIECES = [typed for typed, _ in MEANINGS] + [*CUT, b"\x1b[200~", b"\x1b[201~", b"\x1b", b"\x1b[", b"\x1b]", b"\x07"]


@pytest.mark.parametrize("seed", range(4))
def test_after_any_input_the_next_key_works(seed: int) -> None:
    """Complete and cut sequences and random bytes raise nothing and leave nothing behind; the next key works."""
    chance = random.Random(seed)
    for _ in range(size(300, 30_000)):
        typist = Typist()
        for _ in range(chance.randrange(1, 12)):
            data = chance.choice(PIECES) if chance.random() < 0.7 else chance.randbytes(chance.randrange(1, 40))
            if chance.random() < 0.2:  # bytes that look like characters but are not
                data = bytes(chance.choices(b"\x1b\xe0\xed\xf0\xf4\x80\xa0\x90", k=chance.randrange(2, 12)))
            data = data[: chance.randrange(len(data)) + 1] if chance.random() < 0.3 else data
            typist.type(data).wait(chance.choice((0, 0, 0.02, SOON_S, CUT_S)))
        typist.wait(CUT_S + SOON_S)
        assert not typist.keyboard.waiting
        typist.found.clear()
        assert typist.type(b"q").wait(SOON_S).keys() == ["q"]


@pytest.mark.parametrize("seed", range(4))
def test_the_sizes_of_the_pieces_make_no_difference(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(size(200, 20_000)):
        data = b"".join(chance.choice(PIECES[: len(MEANINGS)]) for _ in range(6))
        whole, pieces = Typist().type(data), Typist()
        at = 0
        while at < len(data):
            end = at + chance.randrange(1, 9)
            pieces.type(data[at:end])
            at = end
        assert pieces.wait(2 * CUT_S).names() == whole.wait(2 * CUT_S).names(), data
