"""What each process of a run is doing: its stage before the first call, its phase afterwards, and since when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from dpmon.run import proc
from dpmon.run.lifecycle import is_command_alive, may_be_live_elsewhere
from dpmon.run.process_notes import read_notes
from dpmon.run.run_directory import ExitInfo, RunInfo, ring_paths
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError

IMPORTING, IMPORTED, IN_SCRIPT = "importing torch", "torch imported", "in the script"
IDLE = (IMPORTED, IN_SCRIPT)
"""Stages without a known operation in progress."""
NO_TORCH, NO_TORCH_NS = "no PyTorch seen yet", 60_000_000_000
"""Shown of a run that has not imported torch for this long after its start."""
_MAX_BYTES = 1 << 16

Stage = tuple[str, int]


def read_startup_stages(directory: Path, until_ns: int | None = None) -> dict[int, Stage]:
    """The last stage that each process noted (up to `until_ns`) and its time (monotonic ns), by process id."""
    notes = read_notes(directory / "stages.log", _MAX_BYTES, newest=True)
    return {pid: (text, at_ns) for pid, at_ns, text in notes if until_ns is None or at_ns <= until_ns}


def current_startup_stage(found: Mapping[int, Stage], alive: Callable[[int], bool] = lambda pid: True) -> Stage | None:
    """The stage shown for the run: the newest with an operation in progress, among living processes.

    A process that only imported torch (a launcher, a worker) does not count if another process is further.
    """
    living = [stage for pid, stage in found.items() if alive(pid)] or list(found.values())
    further = [stage for stage in living if stage[0] not in (IMPORTING, IMPORTED)] or living
    busy = [stage for stage in further if stage[0] not in IDLE] or further
    return max(busy, key=lambda stage: stage[1], default=None)


def startup_wait_reason(stage: Stage | None, age_ns: int) -> str:
    """What a run without a step waits for; empty if unknown. `age_ns`: how long ago it started."""
    if stage is None:
        return NO_TORCH if age_ns > NO_TORCH_NS else ""
    return "waiting for the first step" if stage[0] in IDLE else stage[0]


def iter_ring_activities(directory: Path) -> Iterator[tuple[SpanReader, str, int]]:
    """Yield the ring of each training process, its activity, and the activity's start (monotonic ns).

    The ring is open until the next item is requested.
    """
    for path in ring_paths(directory):
        with contextlib.suppress(RingError, OSError), contextlib.closing(SpanReader(str(path))) as ring:
            yield ring, *ring.activity()


def nothing_traced_reason(directory: Path, info: RunInfo, how: ExitInfo | None, warnings: Iterable[str]) -> str | None:
    """Why a run has no steps and no calls; None if its command was not started.

    `warnings`: those of training processes; warnings of dpmon itself explain nothing.
    """
    # A warning that no ring could take is only in the log.
    noted = (note.text for note in read_notes(directory / "warnings.log", _MAX_BYTES) if note.pid)
    if (reason := next(chain(warnings, noted), None)) is not None:
        return reason
    if info.command_pid is None:
        return None
    stage = current_startup_stage(read_startup_stages(directory), lambda pid: proc.is_alive(pid, None))
    is_alive = how is None and (is_command_alive(info) or may_be_live_elsewhere(directory, info, how))
    if stage is None:
        return f"no Python process of the run {'has imported torch yet' if is_alive else 'imported torch'}"
    if stage[0] == IMPORTING and not is_alive:
        return "the process ended while it imported torch"
    if stage[0] in IDLE:
        return f"torch was imported, but no model was called{' yet' if is_alive else ''}"
    end_ns = time.monotonic_ns() if how is None else how.end_ns
    process = "the process is" if is_alive else "when the process ended, it was"
    return f"no model was called; {process} {stage[0]}, for {max(end_ns - stage[1], 0) / 1e9:.0f} s"
