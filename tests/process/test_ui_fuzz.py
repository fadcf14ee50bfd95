"""After any input, resizes and stops the screen answers the next key, or it has exited properly.

DPMON_LONG=1 tries more of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from dpmon.run import proc
from dpmon.span_ring import HeaderWord
from support.run_harness import Terminal, report_measured, scaled_size
from support.screen_harness import SHOW_RUN, StartTerminal, TerminalRun

pytestmark = pytest.mark.slow

# The screen stops no process, and saves files next to the run. An interrupt after it has closed ends the process as in
# the real command line.
HARMLESS = SHOW_RUN.replace(
    "result =",
    "import os, signal; import dpmon.run.run_signals as e; e.stop_run = lambda *_: iter(()); os.chdir(sys.argv[1])\n"
    "signal.signal(signal.SIGINT, lambda *_: os._exit(130))\n"
    "result =",
)
SEQUENCES = (
    *(b"\x1b[A", b"\x1bOB", b"\x1b[1;5C", b"\x1b[5~", b"\x1b", b"\x1b[<0;5;20M", b"\x1b[<0;5;20m", b"\x1b[<64;9;30M"),
    *(b"\x1b[<35;999;999M", b"\x1b[M \xe9\xff", b"\x1b[I", b"\x1b[O", b"\x1b[?2026;2$y", b"\x1b[?2048;2$y"),
    *(b"\x1b[48;9999;9999;0;0t", b"\x1b[24;80R", b"\x1b[?62;4c", b"\x1b]11;rgb:dd/xx/pp\x07", b"\x1bP1$rdpx\x1b\\"),
    *(b"\x1b[99;5u", b"\x1b[100;1:3u", b"\x1b[9999999u", b"\x1b[200~dpx\n\x03\x1b[201~", b"\x1b[200~", b"\x1b[201~"),
    *(b"/word\r", b"i line\r", b":zoom\r", b"?", b"5", b"\t", b" ", b"t", b"[", b"w", b"q", b"x", b"\x03"),
)
NOT_HERE = bytes.maketrans(b"serSER", b"??????")
"""Keys that are left out, because they start processes, which takes too long."""


def burst(chance: random.Random) -> bytes:
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 300)).translate(NOT_HERE)
    if kind == 1:  # one sequence, repeated
        return chance.choice(SEQUENCES) * chance.choice((1, 10, 100))
    if kind == 2:  # one long write, read only in part
        return chance.randbytes(1 << 14).translate(NOT_HERE)
    data = b"".join(chance.choice(SEQUENCES) for _ in range(chance.randrange(1, 30)))
    if kind == 3:
        return data
    return bytes(byte for byte in data if chance.random() > 0.1)


def shows_or_has_left(seen: Terminal, condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds or the screen has exited; continue the screen whenever it has stopped.

    Each ctrl+z stops it once, and a burst has dozens of them.
    """

    def holds() -> bool:
        if seen.status is None and getattr(proc.read_process(seen.process.pid), "state", "") == "T":
            os.kill(seen.process.pid, signal.SIGCONT)
            return False
        return seen.status is not None or condition()

    seen.until(holds, what, 2)


def answers_or_has_left(seen: Terminal) -> bool:
    """Return whether the screen goes on and shows its panels; otherwise check that it has exited properly."""
    deadline = time.monotonic() + 100
    while seen.status is None:
        assert time.monotonic() < deadline, f"no answer\n{seen.picture()}"
        with contextlib.suppress(OSError):
            seen.type("\x1b")
        with contextlib.suppress(AssertionError):
            shows_or_has_left(seen, lambda: "? help" in seen.picture().split("\n")[-1], "the footer")
            seen.type("?")
            shows_or_has_left(seen, lambda: "where step time goes" in seen.picture(), "the help")
            if seen.status is None:
                seen.type("\x1b")
                return True
    # While the terminal is restored, because ctrl+z has stopped the screen or because it closes, ctrl+c and ctrl+\ are
    # signals. They may also come while the screen is being set up again, and then nothing restores the terminal.
    status = seen.wait()
    assert status in (0, 128 + signal.SIGINT, 128 + signal.SIGQUIT), seen.picture()
    assert b"Traceback" not in seen.raw
    if status == 0:
        seen.sane()
    return False


@pytest.mark.parametrize("seed", range(scaled_size(2, 20)))
def test_random_bytes_from_the_keyboard(run: TerminalRun, terminal: StartTerminal, seed: int) -> None:
    chance = random.Random(seed)
    run.train(50)
    seen, bursts, ends = None, 0, 0
    for _ in range(scaled_size(5, 200)):
        if seen is None:
            seen = terminal(HARMLESS)
            seen.shows("linear.py")
        bursts += 1
        with contextlib.suppress(OSError):
            seen.type(burst(chance))
        if chance.random() < 0.3:
            for _ in range(10):
                seen.resize(chance.randrange(1, 300), chance.randrange(1, 100))
                seen.take()
                time.sleep(0.005)
        if chance.random() < 0.2 and seen.status is None:
            os.kill(seen.process.pid, signal.SIGTSTP)
        seen.resize(120, 40)
        if not answers_or_has_left(seen):
            seen, ends = None, ends + 1
    report_measured("keyboard", f"{bursts} bursts, {ends} screens left by them")


@pytest.mark.parametrize("opener", ["", "q", "i", "/", ":", "?"])
def test_the_terminal_goes_under_a_dialog(run: TerminalRun, terminal: StartTerminal, opener: str) -> None:
    """The screen ignores SIGHUP and checks its terminal only once a minute: the end of its input must make it exit."""
    run.train(50)
    os.mkfifo(run.directory / "input.fifo")
    seen = terminal("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SHOW_RUN, refresh=60.0)
    seen.shows("linear.py")
    seen.type(opener or "t")
    seen.shows(" esc " if opener else "theme light")
    seen.hang_up()
    assert seen.wait(50) == 129


ENDLESS = {
    "paste": b"\x1b[200~dpx never ends",
    "paste after paste": b"\x1b[200~\x1b[200~dpx",
    "half an end": b"\x1b[200~text\x1b[201",
    "OSC": b"\x1b]11;rgb:dddd",
    "DCS": b"\x1bP1$rdpx",
    "APC": b"\x1b_Gdpx",
    "PM": b"\x1b^dpx",
    "SOS": b"\x1bXdpx",
    "CSI": b"\x1b[" + b"1;" * 2000,
    "mouse": b"\x1b[<0;12",
    "X10 mouse": b"\x1b[M!",
    "SS3": b"\x1bO",
    "ESC": b"\x1b" * 99,
}


def test_interrupts_work_in_the_middle_of_anything(run: TerminalRun, terminal: StartTerminal) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("linear.py")
    for name, data in ENDLESS.items():
        seen.type(data)
        seen.type("\x03")
        seen.until(lambda: "leave it running" in seen.picture(), f"the question after {name}", 30)
        seen.type("\x1b")
        seen.until(lambda: "leave it running" not in seen.picture(), "the panels", 30)
    assert run.control is not None
    assert run.control.words[HeaderWord.REQUEST] == 0, "no part of it counted as a key"
    seen.type(ENDLESS["paste"])
    seen.type("\x1a")
    seen.until(lambda: getattr(proc.read_process(seen.process.pid), "state", "") == "T", "the process to stop", 60)
    seen.screen.reset()
    os.kill(seen.process.pid, signal.SIGCONT)
    seen.shows("? help")
    seen.type("\x03")
    seen.shows("leave it running")
    seen.type("l")
    assert seen.wait() == 0
    assert b"RESULT left" in seen.raw
    assert b"Traceback" not in seen.raw
    seen.sane()
