"""Describes an exception in one line."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from types import TracebackType, WrapperDescriptorType

from dpmon.record.shared_names import find_program_frame, shorten_name

_DPMON = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

_Frame = tuple[str, str, int]
"""Function, file and line of a call in a traceback."""
_SAFE_TYPES = (str, bytes, int, float, bool, type(None))
"""Types of arguments that only Python's own code prints."""
_TRACEBACK_LINE = re.compile(r'^ *File "([^"\n]+)", line (\d{1,9})(?:, in (.+))?', re.MULTILINE)
_UNUSED_INDICES = re.compile(r"did not receive grad for rank \d+: (\d[\d ]*)")
"""Indices in an error of DistributedDataParallel. With TORCH_DISTRIBUTED_DEBUG, the error has names instead."""
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


def describe_uncaught(rank: int | None, worker: str | None = None, synced_names: Sequence[str] = ()) -> str | None:
    """Return the entry of endings.log for this process's uncaught exception: class name, then JSON; None without it.

    `worker`: how a worker of a loader was killed. `synced_names`: names of parameters by their index in the wrapper.
    """
    exception_class = getattr(sys, "last_type", None)
    if exception_class is None:
        return None
    value = getattr(sys, "last_value", None)
    name, message = exception_class.__name__, _message(value, synced_names)
    frames = _traceback_frames(getattr(sys, "last_traceback", None))
    spawned = _parse_spawn_exception(name, value)
    if spawned is not None:
        name, message, rank, frames = spawned
    details: dict[str, object] = {"message": message, "rank": rank, "worker": worker}
    index = find_program_frame([file for _, file, _ in frames])
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
    text = value.args[0] if value.args else None
    if type(text) is not str:
        return None
    lines = text.strip().splitlines()
    name, _, message = (lines[-1] if lines else "").partition(": ")
    frames = [(function, file, int(line)) for file, line, function in reversed(_TRACEBACK_LINE.findall(text))]
    index = getattr(value, "error_index", None)  # set by torch's class
    rank = index if type(index) is int else None
    return name.rpartition(".")[-1] or class_name, message[:MAX_CHARACTERS], rank, frames


def _message(error: BaseException | None, synced_names: Sequence[str]) -> str:
    """Return the first line of an exception's text; empty if reading it would run code of the script.

    Python has already printed the traceback. Without dpmon, no method of the exception would be called after that.
    """
    is_builtin = isinstance(type(error).__str__, WrapperDescriptorType)
    if error is None or not is_builtin or not all(type(value) in _SAFE_TYPES for value in error.args):
        return ""
    text = str(error)
    indices = [int(index) for found in _UNUSED_INDICES.findall(text) for index in found.split()]
    if indices and max(indices) < len(synced_names):
        text = f"no gradient for {', '.join(synced_names[index] for index in indices)}. {text.lstrip()}"
    lines = (line.strip() for line in text.splitlines())
    return next((line[:MAX_CHARACTERS] for line in lines if line.strip("=-")), "")  # torchrun's begins with a rule


def _traceback_frames(traceback: TracebackType | None) -> list[_Frame]:
    """Return the calls in a traceback, innermost first."""
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_name, code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return [frame for frame in reversed(frames) if not frame[1].startswith(_DPMON)]
