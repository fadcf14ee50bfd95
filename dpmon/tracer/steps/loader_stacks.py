"""Samples the lines in which a loader makes its batches, in the training process and in the loader's workers.

A sample is the innermost line of the script below torch's fetch of a batch. A worker that waits for its next task, or
for room in its queue, makes none. It has no ring: once the training process creates a file, it appends its samples.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from contextlib import suppress
from multiprocessing.process import parent_process
from random import Random
from time import monotonic, sleep
from types import FrameType
from typing import Any

from dpmon.record.shared_names import find_program_frame, shorten_name
from dpmon.tracer.core.hidden_frames import iter_callers
from dpmon.tracer.core.session import Session
from dpmon.tracer.note_files import write_file

SAMPLE_S, INTERVAL_S, POLL_INTERVAL_S, MAX_REPLY_S, MAX_LINES = 30.0, 0.03, 0.25, 2.0, 50
"""Duration of sampling; mean time between samples, and time between a worker's searches for the file; wait for workers;
maximum number of lines in a record."""
SWITCH_INTERVAL_S = 0.0002
"""Python's thread switch interval while samples are taken: a sample waits about this long for the GIL. With the usual
5 ms, it mostly got the GIL where the loader's code released it, which few lines do."""
_usual_switch_interval_s: float | None = None
"""The script's own interval while samples are taken."""


def record_loader_lines(session: Session) -> None:
    """Sample this process and its workers, and record the lines."""
    path = os.path.join(session.config.directory, f"loader-{os.getpid()}.samples")
    with session.guard("samples of the loader", fatal=False):
        write_file("", path, b"", os.O_TRUNC)
        _append_samples(path)
        sleep(MAX_REPLY_S)
        with open(path, encoding="utf-8") as file:
            os.unlink(path)
            lines = sum((Counter[str](json.loads(line)) for line in file), Counter[str]())
        if lines:
            session.record_event("loader_lines", took_s=SAMPLE_S, lines=dict(lines.most_common(MAX_LINES)))


def reply_in_worker(session: Session) -> None:
    """Append this worker's samples to the file of the training process whenever there is one. Never returns."""
    process: Any = parent_process()  # with forkserver, os.getppid() is another process
    path = os.path.join(session.config.directory, f"loader-{process.pid}.samples")
    with session.guard("samples of the loader", fatal=False):
        while True:
            sleep(POLL_INTERVAL_S)
            if os.access(path, os.F_OK):
                _append_samples(path)
                sleep(2 * MAX_REPLY_S)


def _append_samples(path: str) -> None:
    """Take samples for SAMPLE_S, and append the number of samples by line to a file, if it exists."""
    global _usual_switch_interval_s
    _usual_switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        lines = _take_samples()
    finally:
        _restore_switch_interval()
    with suppress(FileNotFoundError), open(os.open(path, os.O_WRONLY | os.O_APPEND), "wb", 0) as file:
        file.write(json.dumps(lines).encode() + b"\n")


def _take_samples() -> Counter[str]:
    """Take samples for SAMPLE_S, and return their number by line."""
    random, lines, due_s = Random(), Counter[str](), monotonic()  # the script's random numbers stay the same
    end_s = due_s + SAMPLE_S
    while due_s < end_s:
        # If C code kept the GIL, several samples are due. A process that stood still for long takes only some of them.
        due_s = max(due_s + random.expovariate(1 / INTERVAL_S), monotonic() - 3 * INTERVAL_S)
        if (wait_s := due_s - monotonic()) > 0:
            sleep(wait_s)
        is_collecting = gc.isenabled()
        gc.disable()  # a collection would run finalizers of the script on this thread
        try:
            lines.update(filter(None, map(_find_line, sys._current_frames().values())))
        finally:
            if is_collecting:
                gc.enable()
    return lines


def _restore_switch_interval() -> None:
    """Set the script's own interval again, also in a child that was forked while samples were taken."""
    global _usual_switch_interval_s
    if _usual_switch_interval_s is not None:
        sys.setswitchinterval(_usual_switch_interval_s)
        _usual_switch_interval_s = None


def _find_line(innermost: FrameType) -> str | None:
    """Return where a thread makes a batch, as "`augment` (data.py:41)"; None if it makes none."""
    frames: list[FrameType] = []
    for frame in iter_callers(innermost):
        frames.append(frame)
        if frame.f_code.co_filename.endswith("/torch/utils/data/_utils/fetch.py"):
            frame = frames[find_program_frame([frame.f_code.co_filename for frame in frames]) or 0]
            file = os.path.basename(shorten_name(frame.f_code.co_filename))
            function, _, _ = frame.f_code.co_qualname.partition(".<locals>.<")  # a comprehension is part of it
            return f"`{shorten_name(function)}` ({file}:{frame.f_lineno})"
    return None


os.register_at_fork(after_in_child=_restore_switch_interval)
