"""The line of progress of a run without a screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from dpmon.model.announced import Announced
from dpmon.model.communication import communication, ranks_in
from dpmon.model.stragglers import Straggler, in_short
from dpmon.record.schema import EVALUATION, SECOND
from dpmon.run.activities import IDLE
from dpmon.run.reader import RunReader
from dpmon.run.rundir import RunError
from dpmon.store.figures import elapsed, rate
from dpmon.store.opened import open_store
from dpmon.store.queries import Store
from dpmon.store.store_at import StoreAt
from dpmon.store.tables import HistoryError
from dpmon.store.tally import Key, Sum, Tally
from dpmon.store.window import Window
from dpmon.text.quantities import calls_so_far, compact, group, within_words

_SHOWN_NS = 1_000_000_000
_LATELY_S = 30
"""Ranks are compared over this many seconds."""
_NOTHING = (0, 0)


class _StepSums(NamedTuple):
    """Steps of one process, and two times in ns: with the time between the steps, and without it."""

    tally: Tally
    times: tuple[int, int]

    def since(self, then: _StepSums | None) -> _StepSums:
        """The steps and times since an earlier state."""
        if then is None:
            return self
        samples, before = self.tally.sum("samples"), then.tally.sum("samples")
        fresh = Tally(
            steps=self.tally.steps - then.tally.steps,
            first_ns=then.tally.last_ns or self.tally.first_ns,
            last_ns=self.tally.last_ns,
            sums={"samples": Sum(samples.count - before.count, samples.total - before.total)},
        )
        return _StepSums(fresh, (self.times[0] - then.times[0], self.times[1] - then.times[1]))


class ProgressLines:
    """Makes lines of progress, each about the time since the previous line."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._steps = 0
        self._before: dict[tuple[int, bool], _StepSums] = {}
        """The sums at the last line, by process and by whether they cover only training steps."""
        self._last_ns = 0
        """End of the newest step (ns since the run's start); 0 before the first step."""

    def line(self) -> str:
        """The run's progress and its speed since the last line; if there is no new step, the reason."""
        try:
            with open_store(self._reader.directory) as store:
                return self._stepped(store) or self._waiting(0 if self._steps else StoreAt(store).open_calls)
        except (HistoryError, RunError):  # the history is damaged or deleted
            return self._waiting()

    def _stepped(self, store: Store) -> str | None:
        """The line about new steps; None if there are none."""
        counts = store.sums()
        steps = sum(tally.steps for tally in counts.values())
        if steps <= self._steps:
            return None
        self._steps = steps
        newest = max(counts, key=lambda key: counts[key].last_ns or 0)
        self._last_ns = counts[newest].last_ns or 0
        parts = [f"step {group(max(tally.last_step or 0 for tally in counts.values()))}"]
        processes = {key.process for key in counts}
        if len(processes) > 1:
            parts.append(f"{len(processes)} processes")
        parts += self._rates(store, counts)
        events = Announced.read(StoreAt(store))
        ranks = any((facts.world or 0) > 1 for facts in events.info.values())
        if newest.mode and not (ranks and newest.mode == "single"):
            virtual = bool(events.changes) and events.changes[-1].virtual
            parts.append(newest.mode + (" (virtual)" if virtual and newest.mode == "dp" else ""))
        slow = self._straggler(store, events) if ranks else None
        return "  ".join(parts if slow is None else [*parts, in_short(slow)])

    def _straggler(self, store: Store, events: Announced) -> Straggler | None:
        """The rank that the others waited for in the last _LATELY_S seconds."""
        end_s = self._last_ns // SECOND + 1
        times = ranks_in(Window(store, max(end_s - _LATELY_S, 0), end_s), events.info)
        found = communication(times, events.wrappers, lately=True)
        return None if found is None else found.straggler()

    def _rates(self, store: Store, counts: Mapping[Key, Tally]) -> list[str]:
        """The rates of training since the last line; a process that has not trained yet counts its evaluations."""
        times = store.time_sums()
        tallies: dict[int, Tally] = {}
        spent: dict[int, tuple[int, int]] = {}
        for process in {key.process for key in counts}:
            own = {key: tally for key, tally in counts.items() if key.process == process}
            trained = any(not key.kind & EVALUATION for key in own)
            for training in (True, False):
                whole = Tally()
                for key, tally in own.items():
                    if not training or not key.kind & EVALUATION:
                        whole.merge(tally)
                now = _StepSums(whole, elapsed(times, None, False, training).get(process, _NOTHING))
                fresh = now.since(self._before.get((process, training)))
                self._before[process, training] = now
                if training == trained:
                    tallies[process], spent[process] = fresh
        found = rate(tallies, spent)
        if found is None:
            return ["evaluation"]
        parts = [f"{compact(found.steps_per_s)} steps/s"]
        if found.samples_per_s is not None:
            return [*parts, f"{compact(found.samples_per_s)} samples/s{within_words(found)}"]
        return [parts[0] + within_words(found)]

    def _waiting(self, calls: int = 0) -> str:
        """The line if no step has ended since the last line. `calls`: calls so far if no step has ended at all."""
        activities = self._reader.activities()
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
