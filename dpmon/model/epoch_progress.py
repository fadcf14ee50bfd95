"""The progress of a process's training: its epoch, batch n of N, and the time left in the epoch.

An epoch is a loop over a DataLoader with training steps (dpmon.store.loops). The number of epochs to come is
unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.slow_steps import overlap_ns
from dpmon.record.record_types import Step
from dpmon.record.schema import SECOND, TRAINING
from dpmon.store.events import read_events
from dpmon.store.loops import LoaderLoop, estimate_epoch_time_left, find_epoch, read_epochs
from dpmon.store.steps import read_loop_steps
from dpmon.text.formatting import format_count, format_minutes

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

EPOCHS = 100
"""Most epochs in a picture."""
OVER = "the run has ended"
OTHER_RANK = "only the process that represents the run has it"
ALONE_STEPS = 8
"""After more training steps than this without a batch of the loader, the training continues without it."""
Spans = Sequence[tuple[int, int]]
"""Starts and ends in ns since the run's start."""
LARGE = 0.1
"""An uncertainty of more than this part of the time left is shown."""


class Epoch(NamedTuple):
    """A loop over a loader with training steps; ns since the run's start."""

    epoch: int
    """Its number, from 1 (dpmon.store.loops)."""
    begin_ns: int
    end_ns: int
    """End of its last batch so far."""
    batches: int | None
    """Batches that its steps have used; None until it is known how many batches the loop prefetches."""
    length: int | None
    """Batches of the loader; None if unknown."""
    evaluation_ns: int | None
    """Evaluation in it, and after it up to the next epoch; None in playback, while it is unknown."""
    pause_ns: int | None
    """Time since the end of the previous epoch, without evaluation and pauses of the user; None for the first."""
    took_ns: int
    """How long it took, with the evaluations in it, without pauses of the user."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a process's training. `absent` has the reason for each None, by the name in JSON."""

    process: int = 0
    epoch: int | None = None
    batch: int | None = None
    """Number of batches that the steps of this epoch have used."""
    batches: int | None = None
    """Number of batches of the loader."""
    left_ns: float | None = None
    """Time left in this epoch at `at_ns` (dpmon.store.loops.estimate_epoch_time_left)."""
    error_ns: float | None = None
    """Uncertainty of the time left: one standard deviation."""
    at_ns: int = 0
    """End of the last batch."""
    epochs: tuple[Epoch, ...] = ()
    """The newest epochs, in order."""
    evaluated: int | None = None
    """While the newest step is an evaluation: number of batches that its loop has used."""
    evaluated_of: int | None = None
    """Number of batches of that loop's loader."""
    absent: Mapping[str, str] = field(default_factory=dict)


_NAMES = ("epoch", "batch", "batches", "left_s", "error_s")


def progress_of(
    store: Store, process: int, last: Step | None, *, limit: int = EPOCHS, no_time: str | None = None
) -> Progress:
    """Return the progress of a process as of the time of `store`.

    `last`: its newest step. `limit`: number of epochs to read. `no_time`: why the time left is left out.
    """
    if last is None:
        return replace(NO_STEP, process=process)
    loops = read_epochs(store, process, limit + 1)
    if not loops:
        return _unknown_progress(process, _no_epoch_reason(last))
    current, pauses = loops[-1], _read_pauses(store, process)
    if last.kind == TRAINING and last.loop is None and last.step > current.last_step + ALONE_STEPS:
        epochs = _epochs(loops, limit, pauses)
        return _unknown_progress(process, "the training continues without a batch of the loader", epochs)
    batch, at_ns = current.batches_used, current.end_ns
    if current.end_ns > store.until_ns:
        ends = [(last.batch, last.start_ns + last.wall_ns)] if last.loop == current.loop else []
        ends = ends or [(step.loop_batch, step.end_ns) for step in read_loop_steps(store, process, [current.loop], 1)]
        batch, at_ns = ends[0] if ends else (None, current.begin_ns)
    absent = {}
    if batch is None:
        absent["batch"] = "it is not known yet how many batches are read ahead"
    if current.length is None:
        absent["batches"] = _unknown_length_reason(store, current)
    time_left = no_time or estimate_epoch_time_left(store, loops, batch)
    times: tuple[float | None, float | None] = (None, None)
    if isinstance(time_left, str):
        absent |= dict.fromkeys(("left_s", "error_s"), time_left)
    else:
        times = time_left
    epochs = _epochs(loops, limit, pauses, at_ns, batch)
    evaluated: tuple[int | None, int | None] = (None, None)
    if last.kind != TRAINING and last.loop is not None:
        _, length = find_epoch(store, process, last.loop)
        evaluated = last.batch, length
    return Progress(process, current.epoch, batch, current.length, *times, at_ns, epochs, *evaluated, absent)


def without_time(progress: Progress, reason: str) -> Progress:
    """Return the progress without the time left, which is valid only while the training runs; `reason`: the reason."""
    if progress.left_ns is None:
        return progress
    absent = {**progress.absent, **dict.fromkeys(("left_s", "error_s"), reason)}
    return replace(progress, left_ns=None, error_ns=None, absent=absent)


def _unknown_progress(process: int, reason: str, epochs: tuple[Epoch, ...] = ()) -> Progress:
    return Progress(process, epochs=epochs, absent=dict.fromkeys(_NAMES, reason))


NO_STEP = _unknown_progress(0, "no step has finished yet")


def _no_epoch_reason(last: Step) -> str:
    if last.loop is None:
        return "the newest step took no batch from a DataLoader on the training thread"
    if last.kind != TRAINING:
        return "no step with a batch of a DataLoader has trained yet"
    return "the script takes only one batch from each start of its DataLoader"


def _unknown_length_reason(store: Store, loop: LoaderLoop) -> str:
    """Return why the length of the loader is unknown."""
    for event in reversed(read_events(store, "loader", limit=64)):
        same = (event.data["process"], event.data.get("dataset")) == (loop.process, loop.dataset)
        if same and (reason := event.data.get("absent", {}).get("batches")) is not None:
            return str(reason)
    return "the loader does not tell its length, or gave more batches"


def _epochs(
    loops: Sequence[LoaderLoop], limit: int, pauses: Spans, at_ns: int | None = None, batch: int | None = None
) -> tuple[Epoch, ...]:
    """Return the newest epochs, at most `limit`. `at_ns`: end of the last one's `batch`."""
    epochs = []
    for previous, loop in pairwise((None, *loops)):
        assert loop is not None
        pause_ns = None
        if previous is not None:
            paused_ns = overlap_ns(pauses, previous.end_ns, loop.begin_ns)
            pause_ns = max(loop.begin_ns - previous.end_ns - previous.after_ns - paused_ns, 0)
        evaluation_ns: int | None = loop.evaluation_ns + loop.after_ns
        end_ns, batches = loop.end_ns, loop.batches_used
        if loop is loops[-1] and at_ns is not None and at_ns < end_ns:
            end_ns, batches, evaluation_ns = at_ns, batch, None
        took_ns = end_ns - loop.begin_ns - overlap_ns(pauses, loop.begin_ns, end_ns)
        values = loop.epoch or 0, loop.begin_ns, end_ns, batches, loop.length, evaluation_ns, pause_ns, took_ns
        epochs.append(Epoch(*values))
    return tuple(epochs[-limit:])


def _read_pauses(store: Store, process: int) -> Spans:
    """Return start and end of the pauses of a process that the user has ended."""
    ends = [event.data for event in read_events(store, "pause") if event.data["process"] == process]
    spans = [(end["t_s"], end["paused_s"]) for end in ends if end.get("paused_s")]
    return [(int((end_s - paused_s) * SECOND), int(end_s * SECOND)) for end_s, paused_s in spans]


# ------------------------------------------------------------------------------------------------ words


def format_progress(progress: Progress) -> str:
    """Return the progress in short: "epoch 3 · 412/1,563 · 2 min 10 s left in the epoch"; "" without one."""
    if progress.epoch is None:
        return ""
    parts = [f"epoch {format_count(progress.epoch)}"]
    if progress.batch is not None:
        number, total = format_count(progress.batch), progress.batches
        parts.append(f"batch {number}" if total is None else f"{number}/{format_count(total)}")
    if progress.left_ns is not None:
        parts.append(f"{format_time_left(progress.left_ns, progress.error_ns)} left in the epoch")
    return " · ".join(parts)


def format_time_left(left_ns: float, error_ns: float | None) -> str:
    """Return a time left: "2 min 10 s", or "2 min 10 s ± 40 s" if it is uncertain."""
    is_uncertain = error_ns is not None and error_ns > LARGE * left_ns and error_ns >= SECOND
    return _time(left_ns) + (f" ± {_time(error_ns)}" if is_uncertain and error_ns is not None else "")


def _time(ns: float) -> str:
    return f"{ns / 1e9:.0f} s" if ns < 99.5e9 else format_minutes(ns / 1e9)
