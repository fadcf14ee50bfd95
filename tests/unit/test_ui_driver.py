"""Bytes from a terminal: whatever they are, the next key works, and no answer of the terminal counts as a key."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from running import wait_for
from textual import events
from textual.message import Message

from dpmon.ui.driver import Driver


class Typist:
    """A terminal to type into, and the messages of its driver's input thread."""

    def __init__(self, write: int) -> None:
        self._write = write
        self.found: list[Message] = []

    def type(self, data: bytes) -> None:
        os.write(self._write, data)

    def names(self) -> list[str]:
        """Return the messages: keys by name, others by class."""
        return [each.key if isinstance(each, events.Key) else type(each).__name__ for each in self.found]

    def until(self, last: str) -> list[str]:
        """Wait for a message, and return all."""
        wait_for(lambda: last in self.names()[-1:], 20, last)
        return self.names()


@contextmanager
def keyboard() -> Iterator[Typist]:
    """Run the input thread of a driver without a terminal."""
    read, write = os.pipe()
    typist = Typist(write)
    driver = Driver.__new__(Driver)
    driver.fileno, driver.exit_event = read, threading.Event()
    driver.process_message = typist.found.append  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=driver.run_input_thread)
    thread.start()
    yield typist
    driver.exit_event.set()
    thread.join()
    os.close(read)
    os.close(write)


NOTHING = [
    b"\xe9",
    b"\xff\xfe\xc3",
    b"\x1b]11;rgb:dddd/xxxx/pppp\x07",
    b"\x1b]11;rgb:dddd/xxxx/pppp\x1b\\",
    b"\x1bP1$rdpx\x1b\\\x1b_Gdpx\x1b\\\x1b^dpx\x1b\\\x1bXdpx\x1b\\",
    b"\x1b[?62;1;4c\x1b[>0;276;0c\x1b[0n",
    b"\x1b[48;99999;99999;0;0t",
    b"\x1b[?2048;2$y",
    b"\x1b[100;1u",
    b"\x1b[201~",
]


@pytest.mark.parametrize("data", NOTHING, ids=repr)
def test_what_is_no_key(data: bytes) -> None:
    with keyboard() as typist:
        typist.type(data)
        time.sleep(0.1)
        typist.type(b"q")
        assert typist.until("q") == ["q"]


CUT = [
    (b"\x1b", b"]11;rgb:dddd/xxxx/pppp\x07", []),
    (b"\x1b]11;rgb:dddd/", b"dddd/pppp\x1b\\", []),
    (b"\x1b]11;rgb:dddd/xxxx/pppp\x1b", b"\\", []),
    (b"\x1b]52;c;" + b"d" * 5000, b"dpx" * 100 + b"\x07", []),
    (b"\x1bP>|xterm(3", b"90)dpx\x1b\\", []),
    (b"\x1b", b"[?62;1;4c", []),
    (b"\x1b[", b"?62;1;4c", []),
    (b"\x1b[?62;1", b";4c", []),
    (b"\x1b[100", b";1u", []),
    (b"\x1b[<0;3", b";4M", ["MouseDown"]),
    (b"\x1b[1", b";2A", ["shift+up"]),
]


@pytest.mark.parametrize(("first", "second", "names"), CUT, ids=repr)
def test_a_sequence_cut_between_two_reads(first: bytes, second: bytes, names: list[str]) -> None:
    with keyboard() as typist:
        typist.type(first)
        time.sleep(0.15 if len(first) > 1 else 0.02)
        typist.type(second)
        typist.type(b"q")
        assert typist.until("q") == [*names, "q"]


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"\x1b[99;5u", ["ctrl+c"]),
        (b"\x1b[99;133u", ["ctrl+c"]),  # with the lock of the number pad
        (b"\x1b[27;5;99~", ["ctrl+c"]),
        (b"\x1b[27u", ["escape"]),
        (b"\x1b2", ["escape", "2"]),
        (b"\x1bq", ["escape", "q"]),
        (b"\x1bdq", ["alt+d", "q"]),
    ],
    ids=repr,
)
def test_codes_of_keys(data: bytes, names: list[str]) -> None:
    with keyboard() as typist:
        typist.type(data)
        assert typist.until(names[-1]) == names


def test_keys_clicks_and_pastes() -> None:
    with keyboard() as typist:
        typist.type(b"2\x1b[A\x1bOA\x1b[Z\x1b[21~\xc3")
        typist.type(b"\xa9\x1b[<0;3;4M\x1b[<0;3;4m\x1b[<64;3;4M\x1b[I\x1b[200~dpx\n\x03\x1b[201~q")
        names = ["2", "up", "up", "shift+tab", "f10", "é", "MouseDown", "MouseUp", "MouseScrollUp", "AppFocus", "Paste"]
        assert typist.until("q") == [*names, "q"]
        typist.type(b"\x1b")
        assert typist.until("escape")[-2:] == ["q", "escape"]
        typist.type(b"\x1bd")
        assert typist.until("alt+d")[-2:] == ["escape", "alt+d"]  # bound to nothing, because d acts on the training


def test_a_paste_without_an_end_ends() -> None:
    with keyboard() as typist:
        typist.type(b"\x1b[200~one")
        time.sleep(0.2)
        typist.type(b" two")
        typist.until("Paste")
        typist.type(b"q")
        assert typist.until("q") == ["Paste", "q"]
        assert typist.found[0].text == "one two"  # type: ignore[attr-defined]


def test_a_paste_is_bounded() -> None:
    with keyboard() as typist:
        typist.type(b"\x1b[200~")
        for _ in range(50):
            typist.type(b"dpx\n" * 1000)
        typist.type(b"\x1b[201~q")
        assert typist.until("q") == ["Paste", "q"]
        assert typist.found[0].text == "dpx\n" * (1 << 14)  # type: ignore[attr-defined]


class Busy:
    """An application that does not take its messages."""

    def __init__(self) -> None:
        self.waiting: list[Message] = []

    @property
    def message_queue_size(self) -> int:
        return len(self.waiting)


def test_keys_typed_ahead_are_bounded_but_an_interrupt_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, driver = Busy(), Driver.__new__(Driver)
    driver._drawing = busy
    monkeypatch.setattr(
        "textual.drivers.linux_driver.LinuxDriver.process_message", lambda _, key: busy.waiting.append(key)
    )
    for name in [*"z" * 20000, "ctrl+c"]:
        driver.process_message(events.Key(name, None))
    assert len(busy.waiting) < 100
    assert busy.waiting[-1].key == "ctrl+c"  # type: ignore[attr-defined]


def test_the_terminal_is_not_asked_for_reports_of_its_size() -> None:
    driver, written = Driver.__new__(Driver), list[str]()
    driver.write = written.append  # type: ignore[method-assign, assignment]
    driver._query_in_band_window_resize()
    assert written == []
