"""Records the checkpoints that the training thread saves: their duration, size, and type of file system."""

from __future__ import annotations

import os
import sys
from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import find_program_frame
from dpmon.tracer.core.hidden_frames import iter_callers, replace_in_modules, wrap_rare_function
from dpmon.tracer.steps.span_recorder import SpanRecorder

MIN_SAVE_NS = 10_000_000
"""Shorter saves are not recorded, so that one in every step does not fill the record."""


def trace_checkpoints(recorder: SpanRecorder) -> None:
    """Replace torch.save wherever torch exports it, to record the calls on the training thread."""
    guard = recorder.session.guard("checkpoint", fatal=False)
    replace_in_modules("torch", "save", torch.save, wrap_rare_function(torch.save, guard, partial(_record, recorder)))


def _record(recorder: SpanRecorder, _: object, start_ns: int, *args: object, **kwargs: object) -> None:
    save_ns = monotonic_ns() - start_ns
    if save_ns < MIN_SAVE_NS or recorder.threads.get(get_ident()) is not recorder.training_thread:
        return
    places = [(frame.f_code.co_filename, frame.f_lineno) for frame in iter_callers(sys._getframe(2))]
    file, line = places[find_program_frame([file for file, _ in places]) or 0]
    t_s, facts = (start_ns - recorder.session.config.start_ns) / 1e9, _measure([*args[1:2], kwargs.get("f")][0])
    facts |= {"place": f"{os.path.basename(file)}:{line}", "save_s": save_ns / 1e9}
    recorder.session.record_event("checkpoint", t_s=t_s, **facts)


def _measure(target: Any) -> dict[str, Any]:
    """Return bytes and filesystem of a saved file, by its path or as an open file; empty if it has no path."""
    path = target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", None)
    if not isinstance(path, (str, os.PathLike)):
        return {}
    status = os.stat(path)
    device = f" {os.major(status.st_dev)}:{os.minor(status.st_dev)} "
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        types = [line.partition(" - ")[2].split()[0] for line in file if device in line]
    return {"bytes": status.st_size, "filesystem": next(iter(types), None)}
