"""The screen in a real terminal with a real ring: its pictures, its output and its end."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

from dpmon.run import proc
from dpmon.span_ring import HeaderWord
from support.run_harness import Dpmon, Terminal, wait_for
from support.screen_harness import SHOW_RUN, StartTerminal, TerminalRun

_BREAK = """
import dpmon.ui.monitor as monitor
real = monitor.paint_screen
def paint(*args, **named):
    if Path(sys.argv[1], "break").exists():
        raise RuntimeError("a fault of ours")
    return real(*args, **named)
monitor.paint_screen = paint
"""


def test_from_the_first_second_to_the_end(run: TerminalRun, terminal: StartTerminal) -> None:
    seen = terminal()
    seen.shows("starting")
    (run.directory / "stages.log").write_text(f"{os.getpid()} {time.monotonic_ns()} importing torch\n")
    seen.shows("importing torch")
    with (run.directory / "stages.log").open("a") as file:
        file.write(f"{os.getpid()} {time.monotonic_ns()} torch imported\n")
    seen.shows("waiting for the first step")
    began = time.monotonic_ns() - 2_000_000_000

    def asks() -> bool:
        """Note the wait again, because a note is valid for a few seconds; return whether the screen says it."""
        (run.directory / "waits-for-input").write_text(f"{began} {time.monotonic_ns()}")
        return "waiting for input" in seen.picture()

    seen.until(asks, "waiting for input")
    (run.directory / "waits-for-input").unlink()
    seen.shows("waiting for the first step")
    run.train(100)
    run.log.write(b"epoch 1\n  0%|   |\r100%|###|\n")
    for word in ("linear.py", "dp ×3", "[10, 5]", "[10, 2]", "epoch 1", "100%|###|", "virtual replicas: no GPU"):
        seen.shows(word)
    run.log.write(b"Traceback (most recent call last):\n  x\nRuntimeError: it broke\n")
    run.end(1)
    seen.shows("✗ failed")
    seen.shows("RuntimeError: it broke")
    seen.type("q")
    assert seen.wait() == 0
    assert b"RESULT ended" in seen.raw
    seen.sane()


def test_a_toggle_is_requested_and_answered_through_the_ring(run: TerminalRun, terminal: StartTerminal) -> None:
    run.train(50)
    assert run.recording is not None
    assert run.control is not None
    seen = terminal()
    seen.shows("d → single")
    seen.type("d")
    seen.shows("single pending")
    assert (run.control.words[HeaderWord.REQUEST], run.control.words[HeaderWord.REQUESTED_MODE]) == (1, 2)
    run.recording.add(run.training.switch("single"))
    run.train(5)
    run.control.words[HeaderWord.MODE], run.control.words[HeaderWord.ACKNOWLEDGED] = 2, 1
    seen.shows("single from step 51 on")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_signals_give_the_terminal_back(run: TerminalRun, terminal: StartTerminal, number: signal.Signals) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("linear.py")
    os.kill(seen.process.pid, number)
    assert seen.wait() == 128 + number
    seen.sane()


def test_stopped_and_continued_it_draws_everything_again(run: TerminalRun, terminal: StartTerminal) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("linear.py")
    seen.shows("virtual: the replicas share this machine's CPU")
    before = seen.picture().splitlines()[2:6]
    seen.type("\x1a")
    seen.until(lambda: b"\x1b[?1049l" in seen.raw, "the terminal to be given back")
    seen.until(lambda: getattr(proc.read_process(seen.process.pid), "state", "") == "T", "the process to stop")
    seen.screen.reset()
    mark = len(seen.raw)
    os.kill(seen.process.pid, signal.SIGCONT)
    seen.until(lambda: b"\x1b[?1049h" in seen.raw[mark:], "the screen to come back")
    seen.until(lambda: seen.picture().splitlines()[2:6] == before, "the whole picture")


def test_a_screen_stopped_by_sigstop_goes_on_with_one_reader_of_the_keys(
    run: TerminalRun, terminal: StartTerminal
) -> None:
    """No process can handle SIGSTOP: the terminal is still set up afterwards, and must not be set up twice."""
    run.train(50)
    seen = terminal()
    seen.shows("linear.py")
    threads = Path(f"/proc/{seen.process.pid}/task")
    before = len(list(threads.iterdir()))
    for _ in range(2):
        os.kill(seen.process.pid, signal.SIGSTOP)
        seen.until(lambda: getattr(proc.read_process(seen.process.pid), "state", "") == "T", "the process to stop")
        seen.take()
        mark = len(seen.raw)
        # In the mode in which a shell leaves the terminal.
        termios.tcsetattr(seen.fd, termios.TCSANOW, seen.modes)
        seen.screen.reset()
        os.kill(seen.process.pid, signal.SIGCONT)
        seen.until(lambda at=mark: b"\x1b[?1049h" in seen.raw[at:], "the screen to come back")
        seen.shows("linear.py")
        seen.shows("? help")
    assert len(list(threads.iterdir())) == before
    assert not termios.tcgetattr(seen.fd)[3] & (termios.ICANON | termios.ECHO)
    seen.type("q")
    seen.shows("leave it running")
    seen.type("l")
    assert seen.wait() == 0
    seen.sane()


def test_leaving_does_not_wait_forever_for_a_blocked_terminal(run: TerminalRun, terminal: StartTerminal) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("linear.py")
    seen.type("q")
    seen.shows("leave it running")
    slave = os.open(os.readlink(f"/proc/{seen.process.pid}/fd/0"), os.O_RDWR | os.O_NOCTTY)
    termios.tcflow(slave, termios.TCOOFF)
    seen.type("l")
    assert seen.wait() == 0
    assert seen.after[:4] == seen.modes[:4]
    os.close(slave)


def test_a_stalled_terminal_does_not_stop_the_screen(run: TerminalRun, terminal: StartTerminal) -> None:
    """A key still works when the terminal has taken no output for many pictures, and it shows the newest one later."""
    os.mkfifo(run.directory / "input.fifo")
    script = os.open(run.directory / "input.fifo", os.O_RDWR | os.O_NONBLOCK)
    run.train(50)
    seen = terminal(refresh=0.02)
    seen.shows("linear.py")
    slave = os.open(os.readlink(f"/proc/{seen.process.pid}/fd/0"), os.O_RDWR | os.O_NOCTTY)
    termios.tcflow(slave, termios.TCOOFF)
    for number in range(60):
        run.train(1)
        run.log.write(b"line %d\n" % number)
        seen.take()
        time.sleep(0.025)
    seen.type("iy\r")
    wait_for(lambda: select.select([script], [], [], 0)[0], what="the typed line")
    assert os.read(script, 9) == b"y\n"
    termios.tcflow(slave, termios.TCOON)
    seen.shows("line 59")
    os.close(slave)
    os.close(script)


def test_a_fault_of_ours_exits_non_zero_and_gives_the_terminal_back(run: TerminalRun, terminal: StartTerminal) -> None:
    run.train(50)
    seen = terminal(SHOW_RUN.replace("result =", _BREAK + "result ="))
    seen.shows("linear.py")
    (run.directory / "break").touch()
    assert seen.wait() == 1
    seen.sane()
    assert b"a fault of ours" in seen.raw


def test_hostile_output_and_names_reach_the_terminal_as_text(run: TerminalRun, terminal: StartTerminal) -> None:
    run.training.root = "Net\x1b]52;c;ZXZpbA==\x07"
    run.train(20)
    run.log.write(b"\x1b]52;c;ZXZpbA==\x07\x1bc\x1b[6n\x9b5n\xc2\x9b5n\x1b]0;evil title\x07 shown\n")
    seen = terminal()
    seen.shows(" shown")
    seen.shows("Net\ufffd]52;c;ZXZpbA==\ufffd")
    for forbidden in (b"\x1b]52", b"\x1bc", b"\x1b[6n", b"\x9b5n", b"evil title\x07"):
        assert forbidden not in seen.raw


def test_no_color_and_no_unicode(run: TerminalRun, terminal: StartTerminal) -> None:
    run.train(50)
    run.log.write("größe 漢\n".encode())
    seen = terminal(
        NO_COLOR="1", LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii"
    )
    seen.shows("gr??e ??")
    seen.shows("dp x3")
    assert all(byte < 128 for byte in seen.raw)
    assert b"38;2;" not in seen.raw
    assert b"38;5;" not in seen.raw


def test_little_is_written_and_nothing_when_nothing_changes(run: TerminalRun, terminal: StartTerminal) -> None:
    run.train(100)
    seen = terminal()
    seen.shows("linear.py")
    run.end(0)
    seen.shows("● finished")
    written, since = len(seen.raw), time.monotonic()

    def quiet() -> bool:
        """Return whether nothing has been written for many times the interval of the pictures."""
        nonlocal written, since
        if len(seen.raw) != written:
            written, since = len(seen.raw), time.monotonic()
        return time.monotonic() - since > 1.5

    seen.until(quiet, "the last picture")


def test_the_screen_imports_neither_torch_nor_nvml_nor_numpy() -> None:
    import subprocess

    code = (
        "import os, sys; from dpmon.ui.app import prepare; prepare(os.environ); import dpmon.ui.monitor;"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'pynvml', 'numpy', 'psutil', 'sqlite3', 'aiohttp', '_ssl'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("environ", "size", "colors"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80", "LINES": "24"}, (250, 70), {b"38;2;"}),
        ({"TERM": "screen", "COLORTERM": ""}, (80, 24), set()),
        ({"TERM": "screen-256color", "COLORTERM": ""}, (200, 60), {b"38;5;"}),
        ({"TERM": "tmux-256color", "COLORTERM": "", "TMUX": "/tmp/x,1,0"}, (120, 40), {b"38;5;"}),
        ({"TERM": "linux", "COLORTERM": ""}, (100, 30), set()),
        ({"TERM": "vt100", "COLORTERM": ""}, (80, 24), set()),
        ({"TERM": "xterm", "COLORTERM": "", "NO_COLOR": "1"}, (80, 24), set()),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, (40, 10), {b"38;2;"}),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, (12, 3), {b"38;2;"}),
    ],
    ids=lambda value: value["TERM"] if isinstance(value, dict) else None,
)
def test_every_terminal_and_size(
    run: TerminalRun, terminal: StartTerminal, environ: dict[str, str], size: tuple[int, int], colors: set[bytes]
) -> None:
    """Correct at the start and after a change of size, and only with colors that the terminal has."""
    run.train(50)
    seen = terminal(size=size, **environ)
    width, height = size
    mark = "linear"
    seen.shows(mark)
    if width >= 80:
        for text in ("2 Replicas", "dp ", "[10, 5]", "? help", "q leave"):
            seen.shows(text)
    for columns, rows in ((width + 10, height + 3), (60, 15), size):
        seen.resize(columns, rows)
        if columns >= 40:
            seen.until(lambda r=rows: "leave" in seen.picture().split("\n")[r - 1], "the footer in the last row")
        else:
            seen.shows(mark)
    raw = bytes(seen.raw)
    for code in (b"38;2;", b"38;5;", b"48;2;", b"48;5;"):
        if not colors or (code[3:] == b"2;" and b"38;2;" not in colors):
            assert code not in raw, code
    if environ["TERM"] in ("vt100", "linux"):
        assert all(byte < 128 for byte in raw)
    os.kill(seen.process.pid, signal.SIGTERM)
    assert seen.wait() == 128 + signal.SIGTERM
    seen.sane()


def test_a_wrong_theme_is_reported_before_the_screen_opens(dpmon: Dpmon) -> None:
    dpmon.script("print('never')")
    session = Terminal(dpmon, "script.py", TERM="xterm", DPMON_THEME="pink")
    assert session.wait() == 2
    assert session.raw.count(b"\n") == 1
    assert b"DPMON_THEME is one of dark, light, color-blind, mono, ascii, not 'pink'" in session.raw
    assert b"\x1b" not in session.raw
    assert not dpmon.runs()
