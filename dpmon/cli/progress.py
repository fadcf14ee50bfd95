"""The line that a run without a screen shows now and then."""

from __future__ import annotations

import time

from dpmon.model.numbers import group
from dpmon.rates import Pace, Paces, rate_of
from dpmon.record.codec import Event, Step
from dpmon.run.inputs import Inputs
from dpmon.run.pauses import Pauses
from dpmon.run.reader import RunReader
from dpmon.run.standing import IDLE
from dpmon.text.quantities import compact, within_words

__all__ = ["Progress"]

_POLLS = 16
_SHOWN_NS = 1_000_000_000


class Progress:
    """Counts what a reader sees between two lines."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._processes: set[int] = set()
        self._virtual = False
        self._ranks = False
        """Whether the processes are ranks of one training, for which the modes do not hold."""
        self._paces: dict[int, Paces] = {}
        """By process."""
        self._said: dict[int, Pace] = {}
        """The same as it was at the last line."""
        self._inputs, self._pauses = Inputs(), Pauses()
        self._last_ns = 0
        """When the newest step ended (monotonic); 0 before the first step."""

    def line(self) -> str:
        """How far the run is and how fast since the last line; what it waits for if there was no step."""
        steps = self._new_steps()
        if not steps:
            return self._waiting()
        parts = [f"step {group(max(step.step for step in steps))}"]
        if len(self._processes) > 1:
            parts.append(f"{len(self._processes)} processes")
        parts += self._rates()
        if steps[-1].mode and not (self._ranks and steps[-1].mode == "single"):
            parts.append(steps[-1].mode + (" (virtual)" if self._virtual and steps[-1].mode == "dp" else ""))
        return "  ".join(parts)

    def _rates(self) -> list[str]:
        """Of the training since the last line; of evaluations where a process has not trained yet."""
        fresh = []
        for process, paces in self._paces.items():
            now = paces.total()
            since = now.copy()
            since.add(self._said.get(process, Pace()), -1)
            fresh.append(since.training if now.training.steps else since.counted())
            self._said[process] = now
        rate = rate_of(fresh)
        if rate is None:
            return ["evaluation"]
        parts = [f"{compact(rate.steps_per_s)} steps/s"]
        if rate.samples_per_s is not None:
            return [*parts, f"{compact(rate.samples_per_s)} samples/s{within_words(rate)}"]
        return [parts[0] + within_words(rate)]

    def _new_steps(self) -> list[Step]:
        """The steps since the last line; modes are remembered on the way."""
        steps: list[Step] = []
        for _ in range(_POLLS):  # a writer that is faster than this is not chased for ever
            records = self._reader.poll()
            for record in records:
                if isinstance(record, Step):
                    steps.append(record)
                    self._processes.add(record.process)
                    self._pace(record.process).record(record)
                    self._last_ns = max(self._last_ns, record.start_ns + record.wall_ns)
                elif isinstance(record, Event) and record.kind == "mode":
                    self._virtual = record.data.get("virtual") is True
                elif isinstance(record, Event) and record.kind == "process":
                    self._leave_out(record)
                    world = record.data.get("world")
                    self._ranks = self._ranks or (isinstance(world, int) and world > 1)
                elif isinstance(record, Event) and record.kind in ("pause", "input"):
                    self._leave_out(record)
            if not records:
                break
        return steps

    def _pace(self, process: int) -> Paces:
        return self._paces.setdefault(process, Paces())

    def _leave_out(self, record: Event) -> None:
        """Leave a pause or a wait for input out of the rates; a process record may bring earlier waits."""
        process = record.data.get("process")
        if record.kind == "input" or (record.kind == "process" and type(process) is int):
            take = self._inputs.event if record.kind == "input" else self._inputs.process
            for wait in take(record.data):
                self._pace(wait.process).wait(wait.begin_ns, wait.end_ns)
        elif type(process) is int:
            pause = self._pauses.event(record.data)
            if pause is not None:
                self._pace(process).pause(*pause)

    def _waiting(self) -> str:
        activities = self._reader.activities()
        now = time.monotonic_ns()
        reads = self._reader.waits_for_input()
        if reads is not None and now - reads > _SHOWN_NS:
            return f"waiting for input for {(now - reads) / 1e9:.0f} s"
        for name, since in activities.values():
            if name == "paused":
                return f"paused for {(now - since) / 1e9:.0f} s"
            if since and name != "ended":
                return f"no step for {(now - since) / 1e9:.0f} s, in {name}"
        stage = self._reader.stage()
        if self._last_ns and (stage is None or stage[1] < self._last_ns):
            return f"no step for {(now - self._last_ns) / 1e9:.0f} s, the training process has ended"
        if stage is None:
            return "waiting for the first step"
        text, at = stage
        text = f"waiting for the first step, {text}" if text in IDLE else text
        return f"{text} ({(now - at) / 1e9:.0f} s)"
