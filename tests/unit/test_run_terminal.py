"""The terminal on a command's standard input: lines reach the command, and are logged as a terminal would show them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpmon.run.stdin_terminal import InputTerminal, has_echo_off, send_input


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "output.log"
    path.write_bytes(b"name? ")
    return path


@pytest.fixture
def terminal(log: Path) -> Iterator[InputTerminal]:
    made = InputTerminal(log.parent, 30, 90, log)
    yield made
    closed(made)


def closed(made: InputTerminal) -> None:
    for fd in (made.master, made.slave, made.fifo):
        os.close(fd)


def serve(terminal: InputTerminal, until: Callable[[], bool]) -> None:
    """Serve the terminal as the supervisor does, until a condition holds."""
    limit = time.monotonic() + 60
    while not until():
        assert time.monotonic() < limit
        poller = select.poll()
        terminal.register(poller)
        poller.poll(20)
        terminal.forward_input()


def given(terminal: InputTerminal, line: bytes) -> bytes:
    """Type text; return what the command reads."""
    assert send_input(terminal_directory(terminal), line)
    serve(terminal, lambda: bool(select.select([terminal.slave], [], [], 0)[0]))
    return os.read(terminal.slave, 4096)


def terminal_directory(terminal: InputTerminal) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{terminal.fifo}")).parent


def echo(terminal: InputTerminal, on: bool) -> None:
    attributes = termios.tcgetattr(terminal.slave)
    attributes[3] = attributes[3] | termios.ECHO if on else attributes[3] & ~termios.ECHO
    termios.tcsetattr(terminal.slave, termios.TCSADRAIN, attributes)


def test_typed_text_is_logged_where_a_terminal_would_show_it(terminal: InputTerminal, log: Path) -> None:
    assert given(terminal, "Zoë\n".encode()) == "Zoë\n".encode()
    with log.open("ab") as file:
        file.write(b"hello\n")
    assert log.read_bytes() == "name? Zoë\nhello\n".encode()


def test_a_password_is_read_by_getpass_without_a_trace(terminal: InputTerminal, log: Path) -> None:
    """getpass switches the echo off itself, in a process with this controlling terminal, as under the supervisor."""
    program = "import getpass, sys; a = input(); print(a, len(getpass.getpass('pass: ')), input(), flush=True)"
    with log.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            stdin=terminal.slave, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        assert not has_echo_off(child.pid)
        assert send_input(log.parent, b"me\n")
        serve(terminal, lambda: b"pass: " in log.read_bytes())
        assert has_echo_off(child.pid)
        assert send_input(log.parent, b"hunter2\n")
        serve(terminal, lambda: b"pass: \n" in log.read_bytes())
        assert not has_echo_off(child.pid)
        assert send_input(log.parent, b"more\n")
        serve(terminal, lambda: child.poll() is not None)
    finally:
        child.kill()
        child.wait()
    said = log.read_bytes()
    assert child.returncode == 0, said
    assert b"hunter2" not in said
    assert b"name? me\n" in said
    assert said.endswith(b"pass: \nmore\nme 7 more\n"), "what it prints comes after what it read"


def test_text_that_the_command_writes_to_its_terminal_input_is_not_logged(terminal: InputTerminal, log: Path) -> None:
    os.write(terminal.slave, b"flood" * 200)
    assert given(terminal, b"x\n") == b"x\n"
    os.write(terminal.slave, b"flood" * 200)
    serve(terminal, lambda: not select.select([terminal.master], [], [], 0)[0])
    assert log.read_bytes() == b"name? x\n"


def test_controls_are_shown_and_do_nothing(terminal: InputTerminal, log: Path) -> None:
    given(terminal, b"a\x1b[2J\tb\n")
    assert log.read_bytes() == b"name? a^[[2J\tb\n"


def test_without_a_log_nothing_is_logged_and_hidden_input_is_still_detected(tmp_path: Path) -> None:
    """As in a headless run: an attached screen shows the typed text itself."""
    terminal = InputTerminal(tmp_path, 30, 90)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=terminal.slave, stdout=subprocess.DEVNULL)
    try:
        assert not has_echo_off(child.pid)
        echo(terminal, False)
        assert has_echo_off(child.pid)
        echo(terminal, True)
        assert send_input(tmp_path, b"go\n")
        serve(terminal, lambda: child.poll() is not None)
        serve(terminal, lambda: not select.select([terminal.master], [], [], 0)[0])
        assert [path.name for path in tmp_path.iterdir()] == ["input.fifo"]
    finally:
        child.kill()
        child.wait()
        closed(terminal)
