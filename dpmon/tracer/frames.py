"""Wrappers that stay out of sight: their names and signatures, and the tracebacks that pass through them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["drop_frames", "named_like"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def drop_frames(error: BaseException) -> None:
    """Take our frames off the head of the traceback of an exception that the caller is about to raise again.

    Python 3.11 and later keep the change when the exception is raised again by a bare `raise`.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_HERE):
        traceback = traceback.tb_next
    if traceback is not None:
        error.__traceback__ = traceback


def named_like(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Give a wrapper the name, module and signature of what it stands for."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(wrapper, name, getattr(original, name))
    wrapper.__dict__["__wrapped__"] = original
    return wrapper
