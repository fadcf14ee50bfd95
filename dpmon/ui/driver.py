"""Textual's driver for a terminal on Linux, with our own keyboard input and our own way to resume after a stop.

Textual 8.2 enters application mode again at every SIGCONT. After ctrl+z this is correct, because Textual has left the
mode. But Textual does not notice a SIGSTOP and is still in the mode. If it entered the mode again, a second thread
would read the keys, only one of the two would ever end, and the changed modes would be saved as the original ones.

The terminal is asked to report clicks and the wheel, but no moves of the mouse, because nothing uses them. It is not
asked to send its size among the keys either, because the kernel knows the size.
"""

from __future__ import annotations

import os
import select
import termios
import tty
from collections import deque
from typing import Any

from textual import events
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from dpmon.ui.key_queue import INTERRUPTS
from dpmon.ui.keyboard import Keyboard

_MOUSE = ("\x1b[?1000h", "\x1b[?1006h")
"""Report clicks and the wheel, in a format that can express every column."""
_MODES = f"\x1b[?1049h{''.join(_MOUSE)}\x1b[?25l\x1b[?1004h\x1b[?2004h\x1b[?7l"
"""The modes that `LinuxDriver.start_application_mode` sets, in the same order."""
_CHUNK = 4096
_LOOK_S = 0.1
_LOOK_WHILE_WAITING_S = 0.02
_MOST = 4096
"""Most messages that wait for the application; later ones are dropped."""
_AHEAD = 32
"""Most messages in the application's queue, so that its timers are not delayed."""
_RETRY_S = 0.01


def _interrupts(message: Message) -> bool:
    return isinstance(message, events.Key) and message.key in INTERRUPTS


class Driver(LinuxDriver):
    """Reads keys through `Keyboard`. A SIGCONT enters application mode only if it was left, else renews the modes."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._coming: deque[Message] = deque()
        """Messages that the input thread sends to the application."""
        self._left = False
        """Whether application mode was left for good: Textual then still closes its widgets, and signals may come."""

    # ------------------------------------------------------------------------------------------ keys

    def run_input_thread(self) -> None:
        """Wait for input and send its messages, until asked to end."""
        keyboard = Keyboard()
        poller = select.poll()
        poller.register(self.fileno, select.POLLIN)
        while not self.exit_event.is_set():
            data = None
            if poller.poll((_LOOK_WHILE_WAITING_S if keyboard.waiting else _LOOK_S) * 1000):
                data = self._read()
                if not data:
                    self._loop.call_soon_threadsafe(self._app.leaves_lost_terminal)  # type: ignore[attr-defined]
                    self.exit_event.wait(_LOOK_S)
            try:
                found = keyboard.tick() + (keyboard.feed(data) if data else [])
            except Exception:  # noqa: BLE001 - no input may stop the next key from working
                keyboard, found = Keyboard(), []
            for message in found:
                self.process_message(message)

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, _CHUNK)
        except OSError:
            return b""

    def send_message(self, message: Message) -> None:
        """Send a message to the application, which takes a few at a time; an interrupt drops the keys before it."""
        if len(self._coming) < _MOST or _interrupts(message):
            self._coming.append(message)
            if len(self._coming) == 1 or _interrupts(message):
                self._loop.call_soon_threadsafe(self._hand_on)

    def _hand_on(self) -> None:
        # Only the application's thread removes messages, and only here.
        known = [self._coming.popleft() for _ in range(len(self._coming))]
        last = max((number for number, one in enumerate(known) if _interrupts(one)), default=0)
        kept = [one for number, one in enumerate(known) if number >= last or not isinstance(one, events.Key)]
        self._coming.extendleft(reversed(kept))
        while self._coming and self._app.message_queue_size < _AHEAD:
            self._app.post_message(self._coming.popleft())
        if self._coming:
            self._loop.call_later(_RETRY_S, self._hand_on)

    def _enable_mouse_support(self) -> None:
        if self._mouse:
            for mode in _MOUSE:
                self.write(mode)

    def _query_in_band_window_resize(self) -> None:
        """Do nothing: a size among the keys may be wrong, and the kernel knows the right one."""

    # ------------------------------------------------------------------------------------------ stopping

    def stop_application_mode(self) -> None:
        """Restore the terminal. No signal sets it up again, except after `suspend_application_mode`."""
        self._left = True
        super().stop_application_mode()

    def suspend_application_mode(self) -> None:
        """Restore the terminal until the process is continued."""
        if not self._left:
            super().suspend_application_mode()
            self._left = False

    def _sigtstp_application(self, *_: object) -> None:
        # Not within the signal handler: it may interrupt code that holds the lock of the queue of writes.
        self._loop.call_soon_threadsafe(super()._sigtstp_application)

    def _sigcont_application(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._go_on)

    def _go_on(self) -> None:
        if self._left or not self._auto_restart:
            return
        if self._key_thread is None or not self._key_thread.is_alive():
            self.resume_application_mode()
        elif not self.exit_event.is_set() and self._set_modes():
            self.write(_MODES)
            self.send_message(self.SignalResume())

    def _set_modes(self) -> bool:
        """Set the modes that keys need, which a shell may have changed; False if another job has the terminal."""
        try:
            modes = termios.tcgetattr(self.fileno)
            modes[tty.LFLAG] = self._patch_lflag(modes[tty.LFLAG])
            modes[tty.IFLAG] = self._patch_iflag(modes[tty.IFLAG])
            modes[tty.CC][termios.VMIN] = 1
            # In a background job, this call stops the process. It fails after the next SIGCONT, which leads here again.
            termios.tcsetattr(self.fileno, termios.TCSANOW, modes)
        except termios.error:
            return False
        return True
