"""What an exception says, in one line."""

from __future__ import annotations

import json
import os
import sys
from types import TracebackType

from dpmon.packing import shortened

__all__ = ["in_a_line", "uncaught"]

_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

MAX_CHARACTERS = 300
_SILENT = {
    "StopIteration": (
        "(next() found nothing: a replica has no parameters, so take device and dtype from an input,"
        " not from next(self.parameters()))"
    ),
}
"""Explanations of exceptions that have no message."""


def in_a_line(error: BaseException | str) -> str:
    """Its kind and the first line of what it says; of one that torch retells with its traceback, those of that one.

    torch's errors say first what has happened and then where to look further; parallel_apply raises a replica's error
    again, under "Caught ...", with the whole traceback in its text.
    """
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    indented = [number for number, line in enumerate(lines) if line.startswith(" ")]
    retold = lines[0].startswith("Caught ") and bool(indented)
    text = lines[min(indented[-1] + 1, len(lines) - 1) if retold else 0]
    name, _, said = text.partition(": ") if retold else (kind, "", text)
    if retold and name.rpartition(".")[2] != kind:
        name, said = kind, text
    if said:
        return f"{name}: {said}"[:MAX_CHARACTERS]
    return f"{name} {_SILENT.get(kind, 'without a message')}"


def uncaught(rank: int | None) -> str | None:
    """The exception that ends this process, for endings.log: its class name, then JSON; None if there is none."""
    kind = getattr(sys, "last_type", None)
    if kind is None:
        return None
    lines = str(getattr(sys, "last_value", "")).strip().splitlines()
    said: dict[str, object] = {"message": lines[0][:MAX_CHARACTERS] if lines else "", "rank": rank}
    place = _place(getattr(sys, "last_traceback", None))
    if place is not None:
        said["file"], said["line"] = place
    return f"{shortened(kind.__name__)} {json.dumps(said)}"


def _place(traceback: TracebackType | None) -> tuple[str, int] | None:
    """The innermost line of the script itself, not of an installed package or of Python's library."""
    found = None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not (file.startswith((_LIBRARY, "<")) or any(part in file for part in _INSTALLED)):
            found = os.path.abspath(file), traceback.tb_lineno
        traceback = traceback.tb_next
    return found
