"""Textual's driver for a terminal on Linux, with what the screen needs beyond it.

Textual's input thread ends at a byte that is not UTF-8, waits forever for the end of a paste, and takes the text of a
terminal's answer for keys. Its signal handlers start a second input thread after a SIGSTOP, and set up the terminal
again while the application exits. `ExitHandlers` restores the terminal when a signal or a hang-up ends the screen.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import time
from asyncio import get_running_loop
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key, MouseMove, Paste
from textual.message import Message

_POLL_INTERVAL_S = 0.05
_ESCAPE_POLLS = 2
"""After this many looks without input, an escape is the key."""
_UNFINISHED_POLLS = 20
"""After this many looks without input, an open sequence is dropped, and an open paste counts as finished."""
_INTERRUPTS = ("\x03", "\x1a")
"""ctrl+c and ctrl+z. At the end of an open paste they are keys: the user may press them if its end never comes."""
_PASTE_START, _PASTE_END = "\x1b[200~", "\x1b[201~"
# OSC, DCS, APC, PM and SOS with their text; an X10 mouse report; CSI, which begins F1 to F5 of the Linux console with
# two brackets; SS3; ST; alt with a key that switches, pauses or stops the training.
_STRING = r"[\]P_^X][^\x03\x07\x1a\x1b]*"
_SEQUENCE = re.compile(
    rf"\x1b(?:{_STRING}(?:\x07|\x1b\\)?|\[(?:M[^\x00-\x1f]{{3}}|\[?[0-?]*[ -/]*[@-Z\\-~]?)|O[ -~]?|\\|[dpx])?"
)
_UNFINISHED_SEQUENCE = re.compile(rf"\x1b(?:{_STRING}\x1b?|\[(?:M[^\x00-\x1f]{{0,2}}|\[?[0-?]*[ -/]*)|O)?\Z")
# Beside the keys of Textual's table: mouse, focus, whether the terminal draws at once, and keys of kitty's protocol and
# xterm's modifyOtherKeys, which a program may have left on.
_KNOWN_SEQUENCE = re.compile(r"\x1b\[(?:<\d{1,4};\d{1,5};\d{1,5}[Mm]|[IO]|\?2026;\d\$y|\d{1,3}(?:;\d{1,3}){0,2}[u~])")


class _InputParser:
    """A parser that takes bytes in pieces of any size, and returns Textual's messages.

    Textual's parser gets only text and complete sequences that it knows, because it takes all others for keys.
    """

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("ignore")
        self._unfinished = ""
        """A sequence without its end."""
        self._pasted: list[str] | None = None
        """The text of an open paste; None without one."""
        self._quiet_polls = 0

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages of these bytes. Call it with no bytes at every poll without input."""
        self._quiet_polls = 0 if data else self._quiet_polls + 1
        if self._quiet_polls == _ESCAPE_POLLS and self._unfinished == "\x1b":
            self._unfinished = ""
            yield from self._sequence_messages("\x1b")
        if self._quiet_polls == _UNFINISHED_POLLS:
            self._unfinished = ""
            last_pasted = self._pasted[-1] if self._pasted else ""
            yield from self._sequence_messages(_PASTE_END)
            if last_pasted.endswith(_INTERRUPTS):
                yield from self._text_messages(last_pasted[-1])
        if not data:
            return
        text = self._unfinished + self._decoder.decode(data)
        unfinished = _UNFINISHED_SEQUENCE.search(text)
        self._unfinished = unfinished[0] if unfinished else ""
        text = text[: len(text) - len(self._unfinished)]
        start = 0
        for match in _SEQUENCE.finditer(text):
            yield from self._text_messages(text[start : match.start()])
            yield from self._sequence_messages(match[0])
            start = match.end()
        yield from self._text_messages(text[start:])

    def _text_messages(self, text: str) -> Iterable[Message]:
        if self._pasted is None:
            return XTermParser().feed(text) if text else ()
        if text:
            self._pasted.append(text)
        return ()

    def _sequence_messages(self, sequence: str) -> Iterable[Message]:
        if sequence == _PASTE_START:
            self._pasted = []
        elif self._pasted is not None:
            if sequence == _PASTE_END:
                text, self._pasted = "".join(self._pasted), None
                return (Paste(text.replace("\x00", "")),)
        elif sequence == "\x1b":
            return (Key("escape", sequence),)
        elif sequence[1:] in ("d", "p", "x"):
            return (Key(f"alt+{sequence[1]}", sequence[1]),)
        elif sequence in ANSI_SEQUENCES_KEYS or _KNOWN_SEQUENCE.fullmatch(sequence):
            return XTermParser().feed(sequence)
        return ()


class TerminalDriver(LinuxDriver):
    """A driver that reads keys until the terminal vanishes, and stops and continues as a shell asks."""

    def __init__(self, app: Any, **more: Any) -> None:
        """Become the `terminal` of the application `app`."""
        super().__init__(app, **more)
        self._monitor = app
        self._is_restored = False
        """Whether the terminal is restored for good."""
        app.terminal = self
        # On the loop, because a signal may interrupt code that holds the lock of the queue of writes.
        get_running_loop().add_signal_handler(signal.SIGTSTP, self._stop)
        get_running_loop().add_signal_handler(signal.SIGCONT, self._resume)

    def is_writable(self) -> bool:
        """Return whether the terminal accepts output now."""
        return sys.__stderr__ is None or bool(select.select([], [sys.__stderr__], [], 0)[1])

    def run_input_thread(self) -> None:
        """Read keys and send them to the application, until asked to end."""
        parser = _InputParser()
        while not self.exit_event.is_set():
            data = b""
            if select.select([self.fileno], [], [], _POLL_INTERVAL_S)[0]:
                with contextlib.suppress(OSError):
                    data = os.read(self.fileno, 4096)
                if not data:
                    self._monitor.call_on_ui_thread(self._monitor.exit_if_terminal_gone)
                    self.exit_event.wait(_POLL_INTERVAL_S)
            try:
                messages = list(parser.feed(data))
            except Exception:  # noqa: BLE001 - no input may stop the next key from working
                parser, messages = _InputParser(), []
            for message in messages:
                self.process_message(message)

    def process_message(self, message: Message) -> None:
        """Send a message to the application, except mouse moves."""
        if not isinstance(message, MouseMove):
            super().process_message(message)

    def _query_in_band_window_resize(self) -> None:
        """Request no reports of the size: SIGWINCH announces it, and Textual would also switch the mouse to pixels."""

    # ------------------------------------------------------------------------------------------ stopping

    @property
    def _is_set_up(self) -> bool:
        """Whether the terminal is set up for the screen.

        If it is not, no writer thread runs, and output would wait in its queue forever.
        """
        return self._writer_thread is not None and self._writer_thread.is_alive()

    def stop_application_mode(self) -> None:
        """Restore the terminal. From now on, no signal sets it up again."""
        self._is_restored = True
        if self._is_set_up:
            super().stop_application_mode()

    def suspend_application_mode(self) -> None:
        """Restore the terminal until the process is continued."""
        super().suspend_application_mode()
        self._is_restored = False

    def _stop(self) -> None:
        if not self._is_restored:
            if self._is_set_up:  # not at a second stop in a row, which discarded the SIGCONT before it
                self.suspend_application_mode()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _resume(self) -> None:
        if self._is_restored:  # the loop may have begun to handle the signal before that
            return
        if self._is_set_up:  # it was stopped by a SIGSTOP, and a shell may have changed the modes
            self.suspend_application_mode()
        self.resume_application_mode()
        self.send_message(self.SignalResume())


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MAX_SIGNAL_EXIT_S = 1.0
_MAX_LEAVE_S = 5.0
_MAX_WRITES, _WRITE_INTERVAL_S = 10, 0.05
_RESTORE_SEQUENCE = (
    b"\x1b[?2026l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1004l\x1b[?2004l\x1b[<u"
    b"\x1b[m\x1b[?1049l\x1b[?25h"
)


class ExitHandlers:
    """Signal handlers that restore the terminal, from `install` to `uninstall`.

    Textual restores it when the application exits, but not on SIGTERM, SIGHUP or SIGQUIT, and it spins when the
    terminal has gone. A SIGINT can end it in the middle of its exit: ctrl+c is a key at first, and a signal as soon as
    the terminal is restored. So these signals ask the application to exit, and a thread ends the process if it still
    runs a second later. If the user leaves, the thread waits longer for a terminal that accepts no output, but not
    forever.
    """

    def __init__(self, ask_app_to_exit: Callable[[int], bool]) -> None:
        """Use `ask_app_to_exit` to make the application exit with a status; it returns whether the application runs.

        A signal handler calls it.
        """
        self._ask_app_to_exit = ask_app_to_exit
        self._old_handlers: dict[int, Any] = {}
        self._terminal_modes: list[Any] | None = None
        self._deadline: threading.Timer | None = None
        self.status = 0
        """128+N after a signal; 0 without one."""

    def install(self) -> None:
        """Remember the terminal's modes and install the handlers; call it before anything changes the terminal."""
        with contextlib.suppress(termios.error, OSError, ValueError):
            self._terminal_modes = termios.tcgetattr(sys.__stdin__.fileno()) if sys.__stdin__ else None
        for signal_number in SIGNALS:
            # An ignored hang-up (nohup) stays ignored; polling detects the vanished terminal.
            if signal.getsignal(signal_number) is not signal.SIG_IGN:
                self._old_handlers[signal_number] = signal.signal(signal_number, self._on_signal)

    def uninstall(self) -> None:
        """Restore the handlers and cancel the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        for signal_number, handler in self._old_handlers.items():
            signal.signal(signal_number, handler)
        self._old_handlers.clear()

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if signal_number != signal.SIGINT:
            self.exit_with_status(128 + signal_number)
        elif self._deadline is None and not self.exit_with_status(128 + signal_number):
            self.uninstall()
            raise KeyboardInterrupt  # no application is there yet: end its start
        # Else ctrl+c was pressed again, and the application exits already.

    def exit_with_status(self, status: int) -> bool:
        """Exit with `status`: ask the application first, and end the process a second later if it still runs.

        Return whether the application could be asked.
        """
        if not self.status:
            self.status = status
            self._force_exit_after(_MAX_SIGNAL_EXIT_S, status)
        return self._ask_app_to_exit(status)

    def start_deadline(self, status: int) -> None:
        """End the process with `status` if the application has not ended after a few seconds; for a user who leaves."""
        if self._old_handlers and self._deadline is None:
            self._force_exit_after(_MAX_LEAVE_S, status)

    def _force_exit_after(self, seconds: float, status: int) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = threading.Timer(seconds, self._force_exit, (status,))
        self._deadline.daemon = True
        self._deadline.start()

    def _force_exit(self, status: int) -> None:
        with contextlib.suppress(Exception):
            if sys.__stderr__ is not None:
                restore_screen(sys.__stderr__.fileno())
        with contextlib.suppress(Exception):
            if self._terminal_modes is not None and sys.__stdin__ is not None:
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, self._terminal_modes)
        os._exit(status)


def restore_screen(descriptor: int) -> None:
    """Tell a terminal to show its normal screen; try for half a second, because another thread may be writing to it."""
    os.set_blocking(descriptor, False)
    for _ in range(_MAX_WRITES):
        try:
            os.write(descriptor, _RESTORE_SEQUENCE)
            break
        except BlockingIOError:
            time.sleep(_WRITE_INTERVAL_S)
    os.set_blocking(descriptor, True)


def is_terminal_gone() -> bool:
    """Return whether the terminal of standard input has hung up."""
    if sys.__stdin__ is None:
        return False
    try:
        poll = select.poll()
        poll.register(sys.__stdin__.fileno(), 0)
        return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True
