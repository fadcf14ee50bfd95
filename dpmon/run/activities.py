"""The activity of each process of a run, and when it started: a startup stage before the first call, then a phase."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dpmon.run import proc
from dpmon.run.lifecycle import is_command_alive, may_be_live_elsewhere
from dpmon.run.process_notes import Note, read_notes
from dpmon.run.run_directory import ExitInfo, RunInfo, ring_paths
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError

IMPORTING, IMPORTED, IN_SCRIPT = "importing torch", "torch imported", "in the script"
ONLY_IMPORTS = (IMPORTING, IMPORTED)
"""Stages of every process that imports torch, such as a launcher or a worker of a loader."""
IDLE = (IMPORTED, IN_SCRIPT)
"""Stages without a known operation in progress."""
NO_TORCH, NO_TORCH_NS = "no PyTorch seen yet", 60_000_000_000
"""The text for a run that has not imported torch, and how long after the run's start it is shown."""
_RANK_PATTERN = re.compile(r"\brank ([0-9]{1,6}) of ([0-9]{1,6})")
"""Part of the text of the stage "joining the process group"."""


class StartupStage(NamedTuple):
    """An activity of a process before its first call, and when it started (monotonic ns)."""

    name: str
    start_ns: int


def read_startup_stages(directory: Path, until_ns: int | None = None) -> dict[int, StartupStage]:
    """Return the last stage that each process noted (up to `until_ns`), by process id."""
    notes = read_notes(directory / "stages.log", newest=True)
    return {pid: StartupStage(text, at_ns) for pid, at_ns, text in notes if until_ns is None or at_ns <= until_ns}


def read_startup_ranks(notes: Iterable[Note]) -> dict[int, tuple[int, int]]:
    """Return rank and world size of each process that has noted them in a stage, by process id."""
    matches = [(note.pid, match) for note in notes if (match := _RANK_PATTERN.search(note.text)) is not None]
    return {pid: (int(match[1]), int(match[2])) for pid, match in matches}


def current_startup_stage(
    stages: Mapping[int, StartupStage], is_alive: Callable[[int], bool] = lambda pid: True
) -> StartupStage | None:
    """Return the stage to show for the run; None if there are no stages.

    It is the newest stage with an operation in progress, among living processes. A process that only imported torch (a
    launcher, a worker) does not count if another process is further.
    """
    living = [stage for pid, stage in stages.items() if is_alive(pid)] or list(stages.values())
    further = [stage for stage in living if stage.name not in ONLY_IMPORTS] or living
    busy = [stage for stage in further if stage.name not in IDLE] or further
    return max(busy, key=lambda stage: stage.start_ns, default=None)


def startup_wait_reason(stage: tuple[str, int] | None, run_age_ns: int) -> str:
    """Return what a run without a step waits for; empty if unknown. `run_age_ns`: time since the run's start."""
    if stage is None:
        return NO_TORCH if run_age_ns > NO_TORCH_NS else ""
    name, _ = stage
    return "waiting for the first step" if name in IDLE else name


def iter_ring_activities(directory: Path) -> Iterator[tuple[SpanReader, str, int]]:
    """Yield the ring of each training process, its activity, and the activity's start (monotonic ns).

    The ring is closed when the next item is requested.
    """
    for path in ring_paths(directory):
        with contextlib.suppress(RingError, OSError), contextlib.closing(SpanReader(str(path))) as ring:
            yield ring, *ring.activity()


def nothing_traced_reason(
    directory: Path, run_info: RunInfo, exit_info: ExitInfo | None, warnings: Iterable[str]
) -> str | None:
    """Return why a run has no steps and no calls; None if its command was not started.

    `warnings`: the warnings of training processes, because warnings of dpmon itself do not explain this.
    """
    # A warning from a process without a ring is only in the log.
    logged_texts = (note.text for note in read_notes(directory / "warnings.log") if note.pid)
    if (reason := next(chain(warnings, logged_texts), None)) is not None:
        return reason
    if run_info.command_pid is None:
        return None
    stage = current_startup_stage(read_startup_stages(directory), lambda pid: proc.is_alive(pid, None))
    is_alive = exit_info is None and (is_command_alive(run_info) or may_be_live_elsewhere(directory, run_info, None))
    if stage is None:
        return f"no Python process of the run {'has imported torch yet' if is_alive else 'imported torch'}"
    if stage.name == IMPORTING and not is_alive:
        return "the process ended while it imported torch"
    if stage.name in IDLE:
        return f"torch was imported, but no model was called{' yet' if is_alive else ''}"
    end_ns = time.monotonic_ns() if exit_info is None else exit_info.end_ns
    process = "the process is" if is_alive else "when the process ended, it was"
    return f"no model was called; {process} {stage.name}, for {max(end_ns - stage.start_ns, 0) / 1e9:.0f} s"
