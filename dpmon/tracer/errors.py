"""What an exception says, in one line."""

from __future__ import annotations

import json
import os
import sys
from types import TracebackType, WrapperDescriptorType
from typing import Any

from dpmon.packing import shortened

__all__ = ["in_a_line", "uncaught"]

_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_PLAIN = (str, bytes, int, float, bool, type(None))
# Descriptors of Python's own, which no attribute or metaclass of the script's can stand in front of.
_ARGS: Any = BaseException.__dict__["args"]
_FILE_NAMES: Any = (OSError.__dict__["filename"], OSError.__dict__["filename2"])
_NAME: Any = type.__dict__["__name__"]
_MRO: Any = type.__dict__["__mro__"]
_MEMBERS: Any = type.__dict__["__dict__"]

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
    said: dict[str, object] = {"message": _message(getattr(sys, "last_value", None)), "rank": rank}
    place = _place(getattr(sys, "last_traceback", None))
    if place is not None:
        said["file"], said["line"] = place
    return f"{shortened(_NAME.__get__(kind))} {json.dumps(said)}"


def _message(error: BaseException | None) -> str:
    """The first line of what an exception says; empty where finding that out would run code of the script's.

    Alone, nothing calls a method of the script's once its traceback is printed.
    """
    if not isinstance(error, BaseException) or not _speaks_itself(type(error)):
        return ""
    values = [*_ARGS.__get__(error)]
    if isinstance(error, OSError):
        values += [part.__get__(error) for part in _FILE_NAMES]
    lines = str(error).strip().splitlines() if all(map(_is_plain, values)) else []
    return lines[0][:MAX_CHARACTERS] if lines else ""


def _speaks_itself(kind: type) -> bool:
    """Whether `__str__` of a class is a built-in type's own."""
    # Looked up by hand: a metaclass or a descriptor of the script's may have code of its own for it.
    members = (_MEMBERS.__get__(base) for base in _MRO.__get__(kind))
    return type(next(found["__str__"] for found in members if "__str__" in found)) is WrapperDescriptorType


def _is_plain(value: object) -> bool:
    """Whether to show a value, as an exception does with its arguments, runs no code but Python's own."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _place(traceback: TracebackType | None) -> tuple[str, int] | None:
    """The innermost line of the script itself, not of an installed package or of Python's library."""
    found = None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not (file.startswith((_LIBRARY, "<")) or any(part in file for part in _INSTALLED)):
            found = os.path.abspath(file), traceback.tb_lineno
        traceback = traceback.tb_next
    return found
