"""After any keyboard input the screen answers the next key, and restores the terminal at its end."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from screens import Run, Start, Terminal

from dpmon.run import proc
from dpmon.span_ring import Word

pytestmark = pytest.mark.slow

PROBE_S, LIMIT_S = 1.5, 30
"""A key that may be part of an incomplete sequence is pressed again after PROBE_S; a sure answer may take LIMIT_S."""
ESC = b"\x1b"
PASTE = b"\x1b[200~"


def answers(seen: Terminal, times: int = 1) -> None:
    """Wait until the screen answers a key, at most the last of `times`."""
    for left in reversed(range(times)):
        seen.press("?")
        with contextlib.suppress(AssertionError) if left else contextlib.nullcontext():
            seen.until(lambda: "Phases of a step" in seen.text(), "the help", PROBE_S if left else LIMIT_S)
            break
        seen.press("\x1b")  # closes the help if it opened late
    seen.press("\x1b")
    seen.until(lambda: "Phases of a step" not in seen.text(), "the end of the help", LIMIT_S)


def leaves(seen: Terminal) -> None:
    """Check that ctrl+c is answered and the terminal is restored."""
    seen.press("\x03")
    seen.until(lambda: "leave it running" in seen.text(), "the question", LIMIT_S)
    seen.press("l")
    assert seen.ended() == 0
    assert b"RESULT left" in seen.raw
    assert b"Traceback" not in seen.raw
    seen.sane()


NO_TEXT = (
    b"\xe9",
    b"\xff\xfe\xc3",
    b"\xc3(",
    b"\xed\xa0\x80\xf5\x80\x80\x80",
    b"\x1b[M \xe9\xff",
    b"\x1b[M\xc3\xa9\xa9\x1b[M#\xff\xff",
    b"\x1b[M \xe9",
    b"\x1b\xe9",
    b"\x1b[1;\xe9",
    b"\x1b\xe0\x80\x80",
    b"\x1b\xed\xa0\x80",
    b"\x1b\xf0\x80\x80\x80\x1b\xf4\x90\x80\x80",
)


def test_bytes_that_are_not_text_are_not_keys(run: Run, terminal: Start) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("● running")
    for data in NO_TEXT:
        seen.press(data)
        answers(seen, 2)  # the first key may be the last byte of an incomplete sequence
    leaves(seen)


ENDLESS = {
    "paste": PASTE + b"dpx never ends",
    "paste after paste": PASTE + PASTE + b"dpx",
    "half an end": PASTE + b"text\x1b[201",
    "OSC": b"\x1b]11;rgb:dddd",
    "DCS": b"\x1bP1$rdpx",
    "APC": b"\x1b_Gdpx",
    "PM": b"\x1b^dpx",
    "SOS": b"\x1bXdpx",
    "CSI": b"\x1b[" + b"1;" * 2000,
    "mouse": b"\x1b[<0;12",
    "X10 mouse": b"\x1b[M!",
    "SS3": b"\x1bO",
    "ESC": ESC * 99,
}


def test_an_endless_sequence_blocks_the_keys_only_for_a_moment(run: Run, terminal: Start) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("● running")
    assert run.control is not None
    for name in ("paste", "half an end", "OSC", "CSI", "X10 mouse"):  # the others in tests/unit
        seen.press(ENDLESS[name])
        answers(seen, 3)
        assert "pending" not in seen.text(), name
        assert run.control.words[Word.REQUEST] == 0, f"{name}: no part of it counted as a key"
    leaves(seen)


def test_ctrl_c_works_in_the_middle_of_anything(run: Run, terminal: Start) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("● running")
    for name, data in ENDLESS.items():
        seen.press(data)
        seen.press("\x03")
        seen.until(lambda: "leave it running" in seen.text(), f"the question after {name}", LIMIT_S)
        seen.press("\x1b")
        seen.until(lambda: "leave it running" not in seen.text(), "the panels", LIMIT_S)
    leaves(seen)


def test_ctrl_z_works_in_a_paste_that_never_ends(run: Run, terminal: Start) -> None:
    run.train(50)
    seen = terminal()
    seen.shows("● running")
    seen.press(PASTE + b"text")
    seen.press("\x1a")
    seen.until(lambda: getattr(proc.read(seen.pid), "state", "") == "T", "the process to stop", 60)
    os.kill(seen.pid, signal.SIGCONT)
    answers(seen, 3)
    leaves(seen)
