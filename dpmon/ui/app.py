"""The entry to the screen: settings made before Textual is imported, and the reason a screen closed."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpmon.run.run_directory import ExitInfo


_COLOR_SYSTEMS = ("auto", "standard", "256", "truecolor")


_GC_THRESHOLD = 100_000
"""New objects between two garbage collections. Python's default takes a seventh of the time with a thousand ranks."""


class ScreenClosed(SystemExit):
    """The end of a screen that its user did not close: a signal (128+N), a hang-up (129) or an error (1) did."""


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set the environment variables that Textual reads when it is imported."""
    environ.setdefault("TEXTUAL_DISABLE_KITTY_KEY", "1")
    # Textual looks the value up in a table, and fails if it is not there.
    if environ.get("TEXTUAL_COLOR_SYSTEM", "auto") not in _COLOR_SYSTEMS:
        del environ["TEXTUAL_COLOR_SYSTEM"]
    environ.pop("TEXTUAL_THEME", None)
    # `terminal_style.choose_style` reads it from a copy. Textual would turn even explicitly chosen colors gray.
    environ.pop("NO_COLOR", None)
    # Textual would keep to exported values even after the terminal is resized.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if all(os.get_terminal_size(sys.__stdout__.fileno())):  # type: ignore[union-attr]
            environ.pop("COLUMNS", None)
            environ.pop("LINES", None)


def run_screen(
    directory: Path,
    *,
    refresh: float = 1.0,
    theme: str | None = None,
    known_exit: Callable[[], ExitInfo | None] = lambda: None,
) -> str:
    """Show the run in `directory` until the user leaves. Return why the screen closed.

    `theme`: a name from `dpmon.config`. `known_exit` returns how the run ended, if the caller knows it without a file.

    The result is "left" if the training continues, "ended" if the run has ended, "stopped" if the user stopped the run
    and it has ended. Raises ScreenClosed, a SystemExit with the status, if the user did not close the screen, and
    RunError if the directory is not a run.
    """
    wishes = dict(os.environ)
    prepare(os.environ)
    gc.disable()  # imports make no garbage; looking for it takes a tenth of the time to the first picture
    from dpmon.run.run_reader import RunReader
    from dpmon.ui.monitor import Monitor
    from dpmon.ui.terminal_style import choose_style

    style = choose_style(wishes, getattr(sys.__stderr__, "encoding", None), theme)
    monitor = Monitor(
        directory,
        style,
        refresh=refresh,
        open_reader=lambda: RunReader(directory, known_exit=known_exit),
    )
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    gc.enable()
    monitor.exit_handlers.install()
    try:
        result = monitor.run()
    finally:
        monitor.exit_handlers.uninstall()
        monitor.live_run.close()
    if monitor.open_error is not None:
        raise monitor.open_error
    status = monitor.exit_handlers.status or monitor.return_code
    if status or result is None:
        raise ScreenClosed(status or 1)
    return result
