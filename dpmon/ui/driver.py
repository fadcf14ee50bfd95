"""Textual's driver for a terminal on Linux, with what the screen needs beyond it.

Textual's input thread ends at a byte that is not UTF-8, waits forever for the end of a paste, and takes the text of a
terminal's answer for keys. Its signal handlers start a second input thread after a SIGSTOP, and set up the terminal
again while the application exits.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from asyncio import get_running_loop
from codecs import getincrementaldecoder
from typing import Any

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.events import MouseMove
from textual.message import Message

_LOOK_S = 0.05
_PASTE_LOOKS = 20
"""After this many looks without input, an open paste counts as finished."""
_PASTE_END = "\x1b[201~"
_INTERRUPTS = (b"\x03", b"\x1a")
"""ctrl+c and ctrl+z. They end a paste, because the user may press them if its end never comes."""
# OSC, DCS, APC, PM and SOS with their text; reports of the device, its status, its size and its keyboard.
_ANSWER = re.compile(rb"\x1b(?:[\]P_^X][^\x03\x07\x1a\x1b]*(?:\x07|\x1b\\)?|\[[?>=]?[\d;:]*[cntu])")


class Driver(LinuxDriver):
    """Reads keys until the terminal vanishes; stops and continues as a shell asks."""

    def __init__(self, app: Any, **more: Any) -> None:
        """`app`: the application; it gets this driver as its `terminal`."""
        super().__init__(app, **more)
        self._drawing = app
        self._reading = False
        """Whether the input thread runs."""
        app.terminal = self
        self._handle_signals()

    def ready(self) -> bool:
        """Whether the terminal takes output now."""
        return sys.__stderr__ is None or bool(select.select([], [sys.__stderr__], [], 0)[1])

    def run_input_thread(self) -> None:
        """Read keys and send them to the application, until asked to end."""
        self._reading = True
        parser, decoder = XTermParser(), getincrementaldecoder("utf-8")("ignore")
        quiet = 0
        while not self.exit_event.is_set():
            data = b""
            if select.select([self.fileno], [], [], _LOOK_S)[0]:
                data = self._read()
                if not data:
                    self._drawing.from_thread(self._drawing.leaves_lost_terminal)
                    self.exit_event.wait(_LOOK_S)
            quiet = 0 if data else quiet + 1
            text = decoder.decode(_ANSWER.sub(b"", data))
            if quiet == _PASTE_LOOKS or data in _INTERRUPTS:
                text = _PASTE_END + text  # without an open paste, it has no effect
            try:
                messages = [*parser.tick(), *(parser.feed(text) if text else ())]
            except Exception:  # noqa: BLE001 - no input may stop the next key from working
                parser, messages = XTermParser(), []
            for message in messages:
                self.process_message(message)
        self._reading = False

    def process_message(self, message: Message) -> None:
        """Send a message to the application, but no moves of the mouse, which nothing uses."""
        if not isinstance(message, MouseMove):
            super().process_message(message)

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, 4096)
        except OSError:
            return b""

    # ------------------------------------------------------------------------------------------ stopping

    def _handle_signals(self) -> None:
        # On the loop, because a signal may interrupt code that holds the lock of the queue of writes.
        get_running_loop().add_signal_handler(signal.SIGTSTP, self._stop)
        get_running_loop().add_signal_handler(signal.SIGCONT, self._go_on)

    def stop_application_mode(self) -> None:
        """Restore the terminal. From now on, no signal sets it up again."""
        get_running_loop().remove_signal_handler(signal.SIGTSTP)
        get_running_loop().remove_signal_handler(signal.SIGCONT)
        super().stop_application_mode()

    def suspend_application_mode(self) -> None:
        """Restore the terminal until the process is continued."""
        super().suspend_application_mode()
        self._handle_signals()

    def _stop(self) -> None:
        self.suspend_application_mode()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _go_on(self) -> None:
        if self._reading:  # it was stopped by a SIGSTOP, and a shell may have changed the modes
            self.suspend_application_mode()
        self.resume_application_mode()
        self.send_message(self.SignalResume())
