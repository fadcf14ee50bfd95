"""Describes an exception in one line."""

from __future__ import annotations

import json
import os
import re
import sys
from types import TracebackType, WrapperDescriptorType
from typing import Any

from dpmon.record.shared_names import shorten_name

_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_PLAIN = (str, bytes, int, float, bool, type(None))
# Python's own descriptors: no attribute or metaclass of the script can hide them.
_ARGS: Any = BaseException.__dict__["args"]
_FILE_NAMES: Any = (OSError.__dict__["filename"], OSError.__dict__["filename2"])
_NAME: Any = type.__dict__["__name__"]
_MRO: Any = type.__dict__["__mro__"]
_MEMBERS: Any = type.__dict__["__dict__"]

_IN_TRACEBACK = re.compile(r'^ *File "([^"\n]+)", line (\d{1,9})', re.MULTILINE)
MAX_CHARACTERS = 300
MAX_PATH = 1000
"""Longest file name in a note, because a note is cut off at a fixed length."""
_NOTHING_LEFT = (
    "(next() found nothing: a replica has no parameters, so take device and dtype from an input,"
    " not from next(self.parameters()))"
)
"""Explanation of a StopIteration, which has no message."""


def one_line_text(error: BaseException | str) -> str:
    """Return class and first line of an error, or of the original error if `error` repeats it with a traceback.

    The first line of a torch error is the message; the rest is advice. parallel_apply raises a replica's error again,
    with a text that begins with "Caught ..." and contains the whole traceback.
    """
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    indented = [number for number, line in enumerate(lines) if line.startswith(" ")]
    repeats = lines[0].startswith("Caught ") and bool(indented)
    text = lines[min(indented[-1] + 1, len(lines) - 1) if repeats else 0]
    name, _, message = text.partition(": ") if repeats else (kind, "", text)
    if repeats and name.rpartition(".")[2] != kind:
        name, message = kind, text
    if message:
        return f"{name}: {message}"[:MAX_CHARACTERS]
    return f"{name} {_NOTHING_LEFT if kind == 'StopIteration' else 'without a message'}"


def describe_uncaught(rank: int | None) -> str | None:
    """Return the entry of endings.log for the exception that ends this process: class name, then JSON; or None."""
    kind = getattr(sys, "last_type", None)
    if kind is None:
        return None
    value = getattr(sys, "last_value", None)
    name, message = _NAME.__get__(kind), _message(value)
    place = _script_location(getattr(sys, "last_traceback", None))
    repeated = _parse_spawn_exception(name, value)
    if repeated is not None:
        name, message, rank, place = repeated
    facts: dict[str, object] = {"message": message, "rank": rank}
    if place is not None and len(place[0]) <= MAX_PATH:
        facts["file"], facts["line"] = place
    return f"{shorten_name(''.join(name.split()))} {json.dumps(facts)}"


def _parse_spawn_exception(kind: str, value: object) -> tuple[str, str, int | None, tuple[str, int] | None] | None:
    """Return class, message, rank and place of a rank's exception that torch.multiprocessing.spawn repeats as text."""
    arguments = _ARGS.__get__(value) if isinstance(value, Exception) else ()
    if kind != "ProcessRaisedException" or not arguments or type(arguments[0]) is not str:
        return None
    lines = arguments[0].strip().splitlines()
    name, _, message = (lines[-1] if lines else "").partition(": ")
    places = [(file, int(line)) for file, line in _IN_TRACEBACK.findall(arguments[0]) if _is_script(file)]
    index = getattr(value, "error_index", None)  # set by torch's class
    rank = index if type(index) is int else None
    return name.rpartition(".")[2] or kind, message[:MAX_CHARACTERS], rank, places[-1] if places else None


def _message(error: BaseException | None) -> str:
    """Return the first line of an exception's text; empty if reading it would run code of the script.

    Python has already printed the traceback. Without dpmon, no method of the exception would be called after that.
    """
    if not isinstance(error, BaseException) or not _has_builtin_str(type(error)):
        return ""
    values = [*_ARGS.__get__(error)]
    if isinstance(error, OSError):
        values += [part.__get__(error) for part in _FILE_NAMES]
    lines = str(error).strip().splitlines() if all(map(_has_safe_str, values)) else []
    return lines[0][:MAX_CHARACTERS] if lines else ""


def _has_builtin_str(kind: type) -> bool:
    """Whether the `__str__` of a class is built in."""
    # The look-up avoids getattr, because a metaclass or descriptor of the script may run its own code.
    members = (_MEMBERS.__get__(base) for base in _MRO.__get__(kind))
    return type(next(found["__str__"] for found in members if "__str__" in found)) is WrapperDescriptorType


def _has_safe_str(value: object) -> bool:
    """Whether only Python's own code runs when a value is printed as an argument of an exception."""
    if type(value) is tuple:
        return all(map(_has_safe_str, value))
    return type(value) in _PLAIN


def _is_script(file: str) -> bool:
    """Whether a file belongs to the script, not to an installed package or Python's library."""
    return not (file.startswith((_LIBRARY, _OURS, "<")) or any(part in file for part in _INSTALLED))


def _script_location(traceback: TracebackType | None) -> tuple[str, int] | None:
    """Return file and number of the innermost line of the script itself; None if there is none."""
    found = None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _is_script(file):
            found = os.path.abspath(file), traceback.tb_lineno
        traceback = traceback.tb_next
    return found
