"""Textual's driver for a terminal on Linux, but for how it goes on after a stop.

Textual 8.2 enters application mode again at every SIGCONT. That is right after its own answer to ctrl+z, which has left
it. A SIGSTOP leaves nothing: there would be a second reader of the keys, of which only one is told to end, and the
terminal's changed modes would be remembered as those from before.
"""

from __future__ import annotations

import termios
import tty

from textual.drivers.linux_driver import LinuxDriver

__all__ = ["Driver"]

_MODES = "\x1b[?1049h\x1b[?1000h\x1b[?1003h\x1b[?1015h\x1b[?1006h\x1b[?25l\x1b[?1004h\x1b[?2004h\x1b[?7l"
"""What `LinuxDriver.start_application_mode` asks of a terminal, in its order."""


class Driver(LinuxDriver):
    """Enters application mode only where it was left; after any other stop it sets the terminal's modes again."""

    def _sigtstp_application(self, *_: object) -> None:
        # Not within the handler: the main thread may just hold the lock of the queue that it would write to.
        self._loop.call_soon_threadsafe(super()._sigtstp_application)

    def _sigcont_application(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._go_on)

    def _go_on(self) -> None:
        if not self._auto_restart:
            return
        if self._key_thread is None or not self._key_thread.is_alive():
            self.resume_application_mode()
        elif not self.exit_event.is_set() and self._set_modes():
            self.write(_MODES)
            self.send_message(self.SignalResume())

    def _set_modes(self) -> bool:
        """The modes that keys need, which a shell may have changed; False where another job has the terminal."""
        try:
            modes = termios.tcgetattr(self.fileno)
            modes[tty.LFLAG] = self._patch_lflag(modes[tty.LFLAG])
            modes[tty.IFLAG] = self._patch_iflag(modes[tty.IFLAG])
            modes[tty.CC][termios.VMIN] = 1
            # In the background this stops the process, and fails when it is continued: then there is a SIGCONT more.
            termios.tcsetattr(self.fileno, termios.TCSANOW, modes)
        except termios.error:
            return False
        return True
