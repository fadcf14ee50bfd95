"""The line that a run without a screen shows now and then."""

from __future__ import annotations

import time

from dpmon.records import Event, Step
from dpmon.run.reader import RunReader
from dpmon.run.standing import IDLE
from dpmon.ui.format import compact, group

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
        self._paused: dict[int, float] = {}
        """By process, seconds of the pauses that have ended since the last line."""

    def line(self) -> str:
        """How far the run is and how fast since the last line; what it waits for if there was no step."""
        self._paused.clear()
        steps = self._new_steps()
        if not steps:
            return self._waiting()
        parts = [f"step {group(max(step.step for step in steps))}"]
        if len(self._processes) > 1:
            parts.append(f"{len(self._processes)} processes")
        began = min(step.start_ns for step in steps)
        seconds = (max(step.start_ns + step.wall_ns for step in steps) - began) / 1e9
        seconds -= max(self._paused.values(), default=0.0)
        if seconds > 0:
            # The processes of a distributed run take their steps together: steps once, samples added up.
            parts.append(f"{compact(len(steps) / len({step.process for step in steps}) / seconds)} steps/s")
            samples = [step.samples for step in steps if step.samples is not None]
            if len(samples) == len(steps):
                parts.append(f"{compact(sum(samples) / seconds)} samples/s")
        if steps[-1].mode and not (self._ranks and steps[-1].mode == "single"):
            parts.append(steps[-1].mode + (" (virtual)" if self._virtual and steps[-1].mode == "dp" else ""))
        return "  ".join(parts)

    def _new_steps(self) -> list[Step]:
        """The steps since the last line; modes are remembered on the way."""
        steps: list[Step] = []
        for _ in range(_POLLS):  # a writer that is faster than this is not chased for ever
            records = self._reader.poll()
            for record in records:
                if isinstance(record, Step):
                    steps.append(record)
                    self._processes.add(record.process)
                elif isinstance(record, Event) and record.kind == "mode":
                    self._virtual = record.data.get("virtual") is True
                elif isinstance(record, Event) and record.kind == "process":
                    world = record.data.get("world")
                    self._ranks = self._ranks or (isinstance(world, int) and world > 1)
                elif isinstance(record, Event) and record.kind == "pause" and steps:
                    self._add_pause(record)
            if not records:
                break
        return steps

    def _add_pause(self, record: Event) -> None:
        """A pause between two of the steps that are counted is no part of their time."""
        process, seconds = record.data.get("process"), record.data.get("paused_s")
        if isinstance(process, int) and isinstance(seconds, (int, float)) and 0 <= seconds < 1e9:
            self._paused[process] = self._paused.get(process, 0.0) + seconds

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
        if stage is None:
            return "waiting for the first step"
        text, at = stage
        text = f"waiting for the first step, {text}" if text in IDLE else text
        return f"{text} ({(now - at) / 1e9:.0f} s)"
