"""Removes the outermost entry of a traceback, so that a wrapper does not appear in it."""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType

_KEEPS_TRACEBACK = sys.version_info < (3, 11)
"""Whether a bare `raise` restores the traceback that was caught, and so undoes a change of `__traceback__`."""


def drop_outermost(error: BaseException) -> None:
    """Remove the outermost entry of the traceback of an exception that is being handled.

    On Python 3.10 it stays if it is the only one.
    """
    entry = error.__traceback__
    if entry is None:
        return
    following = entry.tb_next
    if _KEEPS_TRACEBACK and following is not None:
        _overwrite(entry, following)
    else:
        error.__traceback__ = following


class _Entry(ctypes.Structure):
    """A traceback object of CPython 3.10 (Include/cpython/traceback.h)."""

    _fields_ = (
        ("head", ctypes.c_char * object.__basicsize__),
        ("tb_next", ctypes.c_void_p),
        ("tb_frame", ctypes.c_void_p),
        ("tb_lasti", ctypes.c_int),
        ("tb_lineno", ctypes.c_int),
    )


def _overwrite(entry: TracebackType, following: TracebackType) -> None:
    """Make `entry` a copy of `following`, which comes after it."""
    old, new = entry.tb_frame, following.tb_frame
    # In this order, a frame's reference count is never lower than the number of traceback objects that refer to it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(new))
    target, source = _Entry.from_address(id(entry)), _Entry.from_address(id(following))
    target.tb_frame, target.tb_lasti, target.tb_lineno = source.tb_frame, source.tb_lasti, source.tb_lineno
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(old))
    entry.tb_next = following.tb_next
