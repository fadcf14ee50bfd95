"""Checks whether the terminal can show the screen, and how well."""

from __future__ import annotations

import locale
import os
import shutil
from collections.abc import Iterator, Mapping

from dpmon.cli.checks.check import Check, ok, warning

FULL_SIZE = (80, 24)
"""Columns and rows for which the screen is made. A smaller terminal cuts or hides panels."""


def terminal(environ: Mapping[str, str]) -> Iterator[Check]:
    """Size, colours, characters, and whether the session survives a lost connection."""
    missing = [name for fd, name in enumerate(("stdin", "stdout", "stderr")) if not os.isatty(fd)]
    if missing:
        yield ok("terminal", f"none at {', '.join(missing)}: dpmon runs without a screen (headless)")
    elif environ.get("TERM", "dumb") in ("", "dumb"):
        yield warning(
            "terminal", "TERM is dumb or not set: no screen can be drawn", "set TERM, for example to xterm-256color"
        )
    else:
        yield _size()
        yield _colours(environ)
    yield _characters()
    yield from _session(environ)


def _size() -> Check:
    size = shutil.get_terminal_size((0, 0))
    found = f"{size.columns}x{size.lines}"
    if size.columns < FULL_SIZE[0] or size.lines < FULL_SIZE[1]:
        return warning("terminal", f"{found} is small: panels are cut or hidden", "use 80x24 or more, best 110x27")
    return ok("terminal", found)


def _colours(environ: Mapping[str, str]) -> Check:
    if environ.get("NO_COLOR"):
        return ok("colours", "none: NO_COLOR is set")
    term = environ.get("TERM", "")
    if environ.get("COLORTERM", "") in ("truecolor", "24bit"):
        return ok("colours", f"16 million (TERM={term})")
    if "256" in term or "direct" in term:
        return ok("colours", f"256 (TERM={term})")
    return warning(
        "colours", f"16 (TERM={term})", "if the terminal has more: TERM=xterm-256color, in tmux tmux-256color"
    )


def _characters() -> Check:
    encoding = locale.getpreferredencoding(False)
    if encoding.upper().replace("-", "") == "UTF8":
        return ok("characters", "UTF-8")
    return warning(
        "characters",
        f"{encoding}: charts cannot be drawn with blocks",
        "export LC_ALL=C.UTF-8 (or another UTF-8 locale)",
    )


def _session(environ: Mapping[str, str]) -> Iterator[Check]:
    if environ.get("TMUX"):
        yield ok("session", "inside tmux")
    elif environ.get("STY"):
        yield ok("session", "inside screen")
    elif environ.get("SSH_CONNECTION"):
        yield ok("session", "over SSH: if it drops, the training goes on; `dpmon attach` shows it again")
