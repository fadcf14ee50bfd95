"""Describes an exception in one line."""

from __future__ import annotations

import json
import os
import re
import sys
from types import TracebackType, WrapperDescriptorType
from typing import Any

from dpmon.record.shared_names import find_program_frame, shorten_name

_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_DPMON = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")

_Frame = tuple[str, str, int]
"""Function, file and line of a call in a traceback."""
_SAFE_TYPES = (str, bytes, int, float, bool, type(None))
# Python's own descriptors: no attribute or metaclass of the script can hide them.
_ARGS: Any = BaseException.__dict__["args"]
_OS_ERROR_FILES: Any = (OSError.__dict__["filename"], OSError.__dict__["filename2"])
_CLASS_NAME: Any = type.__dict__["__name__"]
_MRO: Any = type.__dict__["__mro__"]
_CLASS_MEMBERS: Any = type.__dict__["__dict__"]

_TRACEBACK_LINE = re.compile(r'^ *File "([^"\n]+)", line (\d{1,9})(?:, in (.+))?', re.MULTILINE)
MAX_CHARACTERS = 300
MAX_PATH = 1000
"""Maximum length of a file name in a note."""
MAX_NOTE_CHARS, MAX_FRAMES = 4000, 12
"""Maximum length of a note, because a longer one would be truncated, and of a traceback in it."""
_STOP_ITERATION_ADVICE = (
    "(next() found nothing: a replica has no parameters, so take device and dtype from an input,"
    " not from next(self.parameters()))"
)
"""Explanation of a StopIteration, which has no message."""


def one_line_text(error: BaseException | str) -> str:
    """Return the class and the first line of an error. If `error` repeats another one with a traceback, use that one.

    The first line of a torch error is the message; the rest is advice. parallel_apply raises a replica's error again,
    with a text that begins with "Caught ..." and contains the whole traceback.
    """
    class_name = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    name, message = class_name, lines[0]
    indented = [index for index, line in enumerate(lines) if line.startswith(" ")]
    if message.startswith("Caught ") and indented:
        message = lines[min(indented[-1] + 1, len(lines) - 1)]  # the line after the traceback
        repeated_name, _, repeated_message = message.partition(": ")
        if repeated_name.rpartition(".")[-1] == class_name:
            name, message = repeated_name, repeated_message
    if message:
        return f"{name}: {message}"[:MAX_CHARACTERS]
    return f"{name} {_STOP_ITERATION_ADVICE if class_name == 'StopIteration' else 'without a message'}"


def describe_uncaught(rank: int | None) -> str | None:
    """Return the entry of endings.log for this process's uncaught exception: class name, then JSON; None without it."""
    exception_class = getattr(sys, "last_type", None)
    if exception_class is None:
        return None
    value = getattr(sys, "last_value", None)
    name, message = _CLASS_NAME.__get__(exception_class), _message(value)
    frames = _traceback_frames(getattr(sys, "last_traceback", None))
    spawned = _parse_spawn_exception(name, value)
    if spawned is not None:
        name, message, rank, frames = spawned
    details: dict[str, object] = {"message": message, "rank": rank}
    index = find_program_frame([file for _, file, _ in frames], is_script_file)
    if index is not None:
        _, file, line = frames[index]
        if len(file) <= MAX_PATH:
            details["file"], details["line"] = os.path.abspath(file), line
    shown_frames = frames[:MAX_FRAMES]
    while len(text := json.dumps({**details, "frames": shown_frames})) > MAX_NOTE_CHARS and shown_frames:
        shown_frames.pop()
    return f"{shorten_name(''.join(name.split()))} {text}"


def _parse_spawn_exception(class_name: str, value: object) -> tuple[str, str, int | None, list[_Frame]] | None:
    """Return class, message, rank and frames of an exception that torch's spawn repeats as text; None for others."""
    if class_name != "ProcessRaisedException" or not isinstance(value, Exception):
        return None
    arguments = _ARGS.__get__(value)
    text = arguments[0] if arguments else None
    if type(text) is not str:
        return None
    lines = text.strip().splitlines()
    name, _, message = (lines[-1] if lines else "").partition(": ")
    frames = [(function, file, int(line)) for file, line, function in reversed(_TRACEBACK_LINE.findall(text))]
    index = getattr(value, "error_index", None)  # set by torch's class
    rank = index if type(index) is int else None
    return name.rpartition(".")[-1] or class_name, message[:MAX_CHARACTERS], rank, frames


def _message(error: BaseException | None) -> str:
    """Return the first line of an exception's text; empty if reading it would run code of the script.

    Python has already printed the traceback. Without dpmon, no method of the exception would be called after that.
    """
    if not isinstance(error, BaseException) or not _has_builtin_str(type(error)):
        return ""
    values = [*_ARGS.__get__(error)]
    if isinstance(error, OSError):
        values += [descriptor.__get__(error) for descriptor in _OS_ERROR_FILES]
    lines = str(error).strip().splitlines() if all(map(_has_safe_str, values)) else []
    return lines[0][:MAX_CHARACTERS] if lines else ""


def _has_builtin_str(cls: type) -> bool:
    """Return whether the `__str__` of a class is built in."""
    # The look-up avoids getattr, because a metaclass or descriptor of the script may run its own code.
    tables = (_CLASS_MEMBERS.__get__(base) for base in _MRO.__get__(cls))
    return type(next(members["__str__"] for members in tables if "__str__" in members)) is WrapperDescriptorType


def _has_safe_str(value: object) -> bool:
    """Return whether only Python's own code runs when a value is printed as an argument of an exception."""
    if type(value) is tuple:
        return all(map(_has_safe_str, value))
    return type(value) in _SAFE_TYPES


def is_script_file(file: str) -> bool:
    """Return whether a file belongs to the script, not to an installed package or Python's library."""
    return not (file.startswith((_LIBRARY, _DPMON, "<")) or any(folder in file for folder in _PACKAGE_FOLDERS))


def _traceback_frames(traceback: TracebackType | None) -> list[_Frame]:
    """Return the calls in a traceback, innermost first."""
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_name, code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return [frame for frame in reversed(frames) if not frame[1].startswith(_DPMON)]
