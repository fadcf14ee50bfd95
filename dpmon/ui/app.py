"""The doorway to the screen: what has to be settled before Textual is imported, and how a screen came to its end."""

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
    """The screen had to go: told by a signal (128+N), its terminal vanished (129), or a fault of its own (1)."""


def prepare(environ: MutableMapping[str, str]) -> None:
    """Settle what Textual reads when it is imported, in this process's environment."""
    environ.setdefault("TEXTUAL_DISABLE_KITTY_KEY", "1")
    # Textual looks these up in a table without asking whether they are in it.
    if environ.get("TEXTUAL_COLOR_SYSTEM", "auto") not in _COLOUR_SYSTEMS:
        del environ["TEXTUAL_COLOR_SYSTEM"]
    environ.pop("TEXTUAL_THEME", None)
    # Heard already (`dpmon.ui.look.choose`); Textual would grey the colours of whoever asks for some all the same.
    environ.pop("NO_COLOR", None)
    # Where these are exported Textual would keep to them, whatever size the terminal is given later.
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
    """Show the run in `directory` until the user has seen enough; `theme` as `dpmon.config` knows them.

    With `playback`, a run that is over can be played back. `told`: how the run ended, if known without a file.

    Returns "left": the training goes on; "ended": the run is over; "stopped": the user stopped it and it has ended.
    Raises ScreenClosed, a SystemExit with the status, if the screen closed without a request of its user, and RunError
    if the directory is not a run.
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
