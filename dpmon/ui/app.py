"""The entry to the screen: settings made before Textual is imported, and the reason a screen closed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpmon.run.rundir import ExitInfo


_COLOUR_SYSTEMS = ("auto", "standard", "256", "truecolor")


class ScreenClosed(SystemExit):
    """The screen closed without its user: by a signal (128+N), with its terminal (129), or by an error (1)."""


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set the environment variables that Textual reads when it is imported."""
    environ.setdefault("TEXTUAL_DISABLE_KITTY_KEY", "1")
    # Textual looks these up in a table without checking that they are in it.
    if environ.get("TEXTUAL_COLOR_SYSTEM", "auto") not in _COLOUR_SYSTEMS:
        del environ["TEXTUAL_COLOR_SYSTEM"]
    environ.pop("TEXTUAL_THEME", None)
    # `dpmon.ui.look.choose` has applied it already; Textual would turn even explicitly chosen colours grey.
    environ.pop("NO_COLOR", None)
    # Textual would stick to exported values, whatever the terminal's later size.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if all(os.get_terminal_size(sys.__stdout__.fileno())):  # type: ignore[union-attr]
            environ.pop("COLUMNS", None)
            environ.pop("LINES", None)


def run_screen(
    directory: Path,
    *,
    refresh: float = 1.0,
    theme: str | None = None,
    playback: bool = False,
    told: Callable[[], ExitInfo | None] = lambda: None,
) -> str:
    """Show the run in `directory` until the user leaves; `theme`: a name from `dpmon.config`.

    With `playback`, a finished run can be played back. `told`: how the run ended, if known without a file.

    Returns "left": the training goes on; "ended": the run is over; "stopped": the user stopped it and it has ended.
    Raises ScreenClosed, a SystemExit with the status, if the screen closed without a request of its user; raises
    RunError if the directory is not a run.
    """
    wishes = dict(os.environ)
    prepare(os.environ)
    from dpmon.run.reader import RunReader
    from dpmon.ui.look import choose
    from dpmon.ui.monitor import Monitor
    from dpmon.ui.playback import Playback

    look = choose(wishes, getattr(sys.__stderr__, "encoding", None), theme)
    if playback:
        monitor: Monitor = Playback(directory, look, refresh=refresh)
    else:
        monitor = Monitor(directory, look, refresh=refresh, open_reader=lambda: RunReader(directory, told=told))
    monitor.leaving.begin()
    try:
        result = monitor.run()
    finally:
        monitor.leaving.end()
        monitor.feed.close()
    if monitor.problem is not None:
        raise monitor.problem
    status = monitor.leaving.status or monitor.return_code
    if status or result is None:
        raise ScreenClosed(status or 1)
    return result
