"""The line of progress of a run without a screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from dpmon.model.pace import speed
from dpmon.model.snapshot import Snapshots
from dpmon.model.state import Process, State, Wanted, ended_of
from dpmon.model.stragglers import in_short
from dpmon.run.activities import IDLE
from dpmon.run.reader import RunReader
from dpmon.run.rundir import RunError
from dpmon.store.opened import open_store
from dpmon.store.store_at import StoreAt
from dpmon.store.tables import HistoryError
from dpmon.text.quantities import calls_so_far, compact, group, within_words

_SHOWN_NS = 1_000_000_000


class ProgressLines:
    """Makes lines of progress, with the figures that a screen would show."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._snapshots = Snapshots()
        self._last_ns = 0
        """End of the newest step (ns since the run's start); 0 before the first step."""

    def line(self) -> str:
        """The run's progress and its speed; if there is no new step since the last line, the reason."""
        activities, state = self._reader.activities(), State()
        with suppress(HistoryError, RunError), open_store(self._reader.directory) as store:
            state = self._snapshots.take(StoreAt(store), Wanted(), ended_of(activities))
        focus = state.focus
        step = None if focus is None else focus.last_step
        if focus is None or step is None or step.start_ns + step.wall_ns <= self._last_ns:
            return self._waiting(activities, 0 if self._last_ns else state.open_calls)
        self._last_ns = step.start_ns + step.wall_ns
        return self._stepped(state, focus, step.step)

    def _stepped(self, state: State, focus: Process, step: int) -> str:
        parts = [f"step {group(step)}"]
        if (count := len(state.training)) > 1:
            parts.append(f"{count} processes")
        found = speed(focus, state, time.monotonic_ns() - self._reader.info.start_ns)
        if found.rate is None:
            parts.append(found.reason or "")
        else:
            parts.append(f"{compact(found.rate.steps_per_s)} steps/s")
            if found.rate.samples_per_s is not None:
                parts.append(f"{compact(found.rate.samples_per_s)} samples/s")
            parts[-1] += within_words(found.rate)
        ranks = (focus.info.world or 0) > 1
        if focus.mode and not (ranks and focus.mode == "single"):
            parts.append(focus.mode + (" (virtual)" if focus.virtual and focus.mode == "dp" else ""))
        slow = state.straggler
        return "  ".join(parts if slow is None else [*parts, in_short(slow)])

    def _waiting(self, activities: Mapping[int, tuple[str, int]], calls: int) -> str:
        """The line if no step has ended since the last line. `calls`: calls so far if no step has ended at all."""
        now = time.monotonic_ns()
        reads = self._reader.waits_for_input()
        if reads is not None and now - reads > _SHOWN_NS:
            return f"waiting for input for {(now - reads) / 1e9:.0f} s"
        for name, since in activities.values():
            if name == "paused":
                return f"paused for {(now - since) / 1e9:.0f} s"
            if since and name != "ended":
                return calls_so_far(calls) if calls else f"{_no_step(now - since)}in {name}"
        stage = self._reader.stage()
        last = self._last_ns + self._reader.info.start_ns if self._last_ns else 0
        if last and (stage is None or stage[1] < last):
            return f"{_no_step(now - last)}the training process has ended"
        if stage is None:
            return "waiting for the first step"
        text, at = stage
        text = f"waiting for the first step, {text}" if text in IDLE else text
        return f"{text} ({(now - at) / 1e9:.0f} s)"


def _no_step(ns: int) -> str:
    """The words "no step for 5 s, "; empty for less than a second."""
    return f"no step for {ns / 1e9:.0f} s, " if ns >= 1_000_000_000 else ""
