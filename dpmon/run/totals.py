"""Adds up a whole run from its history and rings, exactly and without decoding every record."""

from __future__ import annotations

import json
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpmon.records import (
    CALL_PHASES,
    GRAD,
    MODES,
    STEP_PHASES,
    TRAINING,
    Event,
    RecordError,
    call_head,
    call_replicas,
    call_stages,
    definition,
    kind_of,
    step_fields,
)
from dpmon.run.export import Snapshot
from dpmon.run.past import deleted
from dpmon.run.reader import RunReader
from dpmon.run.rollup import Rollup
from dpmon.run.rows import record_of, step_columns
from dpmon.run.tables import HistoryError

__all__ = [
    "Adder",
    "Deleted",
    "ModeTotals",
    "RankLine",
    "ReplicaLine",
    "StageLine",
    "Totals",
    "add_up",
    "is_evaluation",
    "why_nothing",
]

DDP = "DistributedDataParallel"
_BACKWARD, _OPTIMIZER = STEP_PHASES.index("backward"), STEP_PHASES.index("optimizer")
_WAITING = 4096

_Waiting = tuple[int, str, bool, int, Sequence[int]]
"""Step, mode, whether it was called as in an evaluation, start, phases."""


def _speed(samples: Counter[int], step_ns: Counter[int]) -> float | None:
    if not step_ns or not all(ns > 0 for ns in step_ns.values()):
        return None
    return sum(samples[process] * 1e9 / ns for process, ns in step_ns.items())


@dataclass
class ModeTotals:
    """All steps and calls of one mode; every duration in ns."""

    walls: array[int] = field(default_factory=lambda: array("q"))
    step_phases: dict[str, array[int]] = field(default_factory=dict)
    call_phases: dict[str, array[int]] = field(default_factory=dict)
    samples: Counter[int] = field(default_factory=Counter)
    """Samples by process."""
    step_ns: Counter[int] = field(default_factory=Counter)
    """Time of the steps by process."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps by process; processes that train together take theirs together, so the most is the run's."""
    unknown_samples: int = 0
    """Steps that did not know their samples."""
    calls: int = 0

    def add(self, other: ModeTotals) -> None:
        """Add all of `other`."""
        self.walls.extend(other.walls)
        for ours, theirs in ((self.step_phases, other.step_phases), (self.call_phases, other.call_phases)):
            for name, times in theirs.items():
                ours.setdefault(name, array("q")).extend(times)
        for mine, its in ((self.samples, other.samples), (self.step_ns, other.step_ns), (self.steps, other.steps)):
            mine.update(its)
        self.unknown_samples += other.unknown_samples
        self.calls += other.calls

    def samples_per_s(self) -> float | None:
        """Samples per second of step time, added over the processes; None if a step did not know its samples,
        and where there was no step.
        """
        return None if self.unknown_samples else _speed(self.samples, self.step_ns)


@dataclass
class Deleted:
    """Sums of the steps of one mode that are in the record no more; evaluations among them cannot be told apart."""

    sums: Rollup
    """Of the whole time: its start and its process mean nothing."""
    first_s: int
    last_s: int
    """They ended from the one second to the other."""
    samples: Counter[int] = field(default_factory=Counter)
    """By process."""
    step_ns: Counter[int] = field(default_factory=Counter)

    def samples_per_s(self) -> float | None:
        """As of `ModeTotals`."""
        return None if self.sums.unknown else _speed(self.samples, self.step_ns)


class ReplicaLine(NamedTuple):
    """What one replica got and gave, in how many calls; None: the sizes were not seen."""

    mode: str
    root: str
    replica: int
    device: str
    inputs: Any
    outputs: Any
    calls: int


class RankLine(NamedTuple):
    """One process of several: what its calls got and gave most often, and all of its steps; ns, None if unknown."""

    process: int
    rank: int | None
    world: int | None
    device: str
    inputs: Any
    outputs: Any
    calls: int
    steps: int
    walls: array[int]
    samples_per_s: float | None


class StageLine(NamedTuple):
    """What one stage of a spread model got and gave, in how many calls; `walls` in ns of those that ended."""

    root: str
    stage: int
    device: str
    parts: tuple[str, ...]
    inputs: Any
    outputs: Any
    calls: int
    walls: array[int]


@dataclass
class Totals:
    """One run, added up."""

    modes: dict[str, ModeTotals] = field(default_factory=dict)
    evaluations: dict[str, ModeTotals] = field(default_factory=dict)
    """Steps without a backward pass and an optimizer, of modes in which others have them: these are not in `modes`."""
    deleted: dict[str, Deleted] = field(default_factory=dict)
    """What is left, by mode, of the steps that were deleted to bound the history: they are in neither."""
    replicas: list[ReplicaLine] = field(default_factory=list)
    ranks: list[RankLine] = field(default_factory=list)
    """A line a process, if several have trained."""
    stages: list[StageLine] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)
    """The newest record of each process of what the devices' memory holds."""
    processes: int = 0
    pauses: int = 0
    """Of the process that was paused most often."""
    paused_s: float = 0.0
    """Of the process that was paused longest, in the pauses that ended."""
    virtual: bool = False
    distributed: bool = False
    """Whether a call was of a DistributedDataParallel: its ranks have no mode of their own."""
    reasons: list[str] = field(default_factory=list)
    """Why the run is in the mode it is in, as the training says, and what it warned of."""
    warnings: list[str] = field(default_factory=list)
    dropped: int = 0
    pruned: int = 0


def is_evaluation(phases: Sequence[int | None]) -> bool:
    """Whether a step with these (in the order of STEP_PHASES) is one of an evaluation, if others of its mode train."""
    return phases[_BACKWARD] is None and phases[_OPTIMIZER] is None


class Adder:
    """Takes everything that a run has recorded, in the order in which it came; `result` is what it adds up to."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._groups: Counter[tuple[Any, ...]] = Counter()
        self._definitions: dict[tuple[int, int], Any] = {}
        self._processes: set[int] = set()
        self._ranks: dict[int, tuple[int | None, int | None]] = {}
        """Rank and world of each process, as it said itself."""
        self._pauses: Counter[int] = Counter()
        self._paused_s: dict[int, float] = {}
        self._walls: dict[int, array[int]] = {}
        self._modes: dict[tuple[str, bool], ModeTotals] = {}
        """By mode, and whether it is an evaluation."""
        self._calls: dict[int, list[_Waiting]] = {}
        """Of each process those whose step is not over: then it is known what they are part of."""
        self._stages: dict[tuple[int, ...], list[Any]] = {}
        """By process, layout, number of the stage, its definition and sizes: calls, durations."""

    def define(self, process: int, number: int, value: Any) -> None:
        """Remember a definition."""
        self._definitions[process, number] = value

    def definition(self, process: int, number: int) -> Any:
        """A definition's value; None if it was not seen."""
        return self._definitions.get((process, number))

    def _mode(self, mode: str, evaluation: bool) -> ModeTotals:
        found = self._modes.get((mode, evaluation))
        if found is None:
            found = self._modes[mode, evaluation] = ModeTotals()
        return found

    def delete(self, width_s: int, rollup: Rollup) -> None:
        """What is left of the steps of some seconds that were deleted."""
        found = self.totals.deleted.get(rollup.mode)
        if found is None:
            whole = Rollup(rollup.start_s, -1, rollup.mode)
            found = self.totals.deleted[rollup.mode] = Deleted(whole, rollup.start_s, rollup.start_s)
        found.sums.merge(rollup)
        found.samples[rollup.process] += rollup.samples
        if rollup.steps:
            found.step_ns[rollup.process] += rollup.sums[0] or 0
        found.last_s = max(found.last_s, rollup.start_s + width_s)

    def step(
        self,
        process: int,
        number: int,
        mode: str,
        start: int,
        wall: int,
        samples: int | None,
        phases: Sequence[int | None],
    ) -> None:
        """`start` in ns since the run's start; `phases` as in STEP_PHASES."""
        self._processes.add(process)
        self._walls.setdefault(process, array("q")).append(wall)
        evaluation = is_evaluation(phases)
        self._settle(process, number, evaluation)
        found = self._mode(mode, evaluation)
        found.walls.append(wall)
        found.step_ns[process] += wall
        found.steps[process] += 1
        if samples is None:
            found.unknown_samples += 1
        else:
            found.samples[process] += samples
        for name, took in zip(STEP_PHASES, phases, strict=True):
            if took is not None:
                found.step_phases.setdefault(name, array("q")).append(took)

    def call(self, process: int, payload: bytes) -> None:
        """`payload`: of a call, as in the ring."""
        head = call_head(payload)
        shares = call_replicas(payload)
        self.called(process, head, shares)
        mode_number, flags, _, layout, step, _, start, _, _, _, *phases = head
        mode = MODES[mode_number]
        self._processes.add(process)
        waiting = self._calls.setdefault(process, [])
        waiting.append((step, mode, flags & (TRAINING | GRAD) == 0, start, phases))
        if len(waiting) > _WAITING:  # a process whose calls are in no step
            self._count_call(*waiting.pop(0)[1:])
        sizes = tuple((got, gave) for got, gave, _, _ in shares)
        self._groups[process, mode, flags & 1, layout, sizes] += 1
        for index, (number, got, gave, _, took) in enumerate(call_stages(payload)):
            entry = self._stages.setdefault((process, layout, index, number, got, gave), [0, array("q")])
            entry[0] += 1
            if took >= 0:
                entry[1].append(took)

    def _settle(self, process: int, step: int, evaluation: bool) -> None:
        """A step is over: its calls are what it is."""
        waiting = self._calls.get(process)
        if not waiting:
            return
        self._calls[process] = []
        for call in waiting:
            if call[0] <= step:
                self._count_call(call[1], evaluation, *call[3:])
            else:
                self._calls[process].append(call)

    def _count_call(self, mode: str, evaluation: bool, start: int, phases: Sequence[int]) -> None:
        found = self._mode(mode, evaluation)
        found.calls += 1
        for index, name in enumerate(CALL_PHASES):
            if phases[2 * index] >= 0:
                found.call_phases.setdefault(name, array("q")).append(phases[2 * index + 1])
        self.placed(mode, evaluation, start, phases)

    def placed(self, mode: str, evaluation: bool, start: int, phases: Sequence[int]) -> None:
        """For those who want to know what a call was part of, too; `phases` as in `call_head`."""

    def called(self, process: int, head: Sequence[int], shares: Sequence[tuple[int, int, int, int]]) -> None:
        """For those who want more of a call than is added up here: as `call_head` and `call_replicas` give it."""

    def event(self, kind: str, data: Any) -> None:
        """An event; `data` without its kind."""
        if kind == "warning" and isinstance(data.get("text"), str):
            self.totals.warnings.append(data["text"])
        elif kind == "pause" and type(data.get("process")) is int:
            self._pause(data["process"], data)
        elif kind == "memory" and type(data.get("process")) is int:
            self.totals.memory[data["process"]] = data
        elif kind == "process" and type(data.get("process")) is int:
            rank, world = (value if type(value := data.get(key)) is int else None for key in ("rank", "world"))
            self._ranks[data["process"]] = rank, world
        elif kind == "mode" and isinstance(data.get("reason"), str) and data["reason"] not in self.totals.reasons:
            self.totals.reasons.append(data["reason"])

    def _pause(self, process: int, data: Any) -> None:
        self._pauses[process] += data.get("paused") is True
        seconds = data.get("paused_s")
        if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9:
            self._paused_s[process] = self._paused_s.get(process, 0.0) + seconds

    def result(self) -> Totals:
        """What it all adds up to."""
        for waiting in self._calls.values():
            for call in waiting:
                self._count_call(*call[1:])
        self._calls.clear()
        for (mode, evaluation), found in self._modes.items():
            training = self._modes.get((mode, False))
            if not evaluation:
                self.totals.modes.setdefault(mode, ModeTotals()).add(found)
            elif training is not None and training.walls:
                self.totals.evaluations[mode] = found
            else:  # nothing is trained in this mode: these are its steps
                self.totals.modes.setdefault(mode, ModeTotals()).add(found)
        lines: Counter[tuple[Any, ...]] = Counter()
        several = len(self._processes) > 1
        for (process, mode, virtual, layout_number, sizes), count in self._groups.items():
            layout = self._definitions.get((process, layout_number))
            if not isinstance(layout, dict):
                continue
            self.totals.virtual |= bool(virtual)
            self.totals.distributed |= layout.get("via") == DDP
            if several and layout.get("via") == DDP:
                continue  # its ranks have lines of their own
            for replica, (got, gave) in enumerate(sizes):
                devices = layout.get("devices") or []
                device = str(devices[replica]) if replica < len(devices) else "?"
                key = (mode, str(layout.get("root")), replica, device, self._text(process, got),
                       self._text(process, gave))  # fmt: skip
                lines[key] += count
        self.totals.replicas = [ReplicaLine._make((*key, count)) for key, count in sorted(lines.items(), key=_order)]
        self.totals.processes = len(self._processes)
        self.totals.pauses = max(self._pauses.values(), default=0)
        self.totals.paused_s = max(self._paused_s.values(), default=0.0)
        self.totals.stages = self._stage_lines()
        if several:
            ranks = [self._rank_line(process) for process in self._processes]
            self.totals.ranks = sorted(ranks, key=lambda line: (line.rank is None, line.rank or 0, line.process))
        return self.totals

    def _stage_lines(self) -> list[StageLine]:
        lines: dict[tuple[Any, ...], StageLine] = {}
        for (process, layout_number, index, number, got, gave), (calls, walls) in self._stages.items():
            layout, stage = (self._definitions.get((process, which)) for which in (layout_number, number))
            if not isinstance(layout, dict) or not isinstance(stage, dict):
                continue
            names = tuple(str(name) for name in stage.get("parts") or ())
            key = (str(layout.get("root")), index, str(stage.get("device")), names, self._text(process, got),
                   self._text(process, gave))  # fmt: skip
            before = lines.get(key)
            lines[key] = StageLine(
                *key, calls + (before.calls if before else 0), walls + before.walls if before else walls
            )
        return sorted(lines.values(), key=lambda line: (line.root, line.stage, -line.calls))

    def _rank_line(self, process: int) -> RankLine:
        groups = [(count, key) for key, count in self._groups.items() if key[0] == process]
        calls = sum(count for count, _ in groups)
        device, got, gave = "?", None, None
        if groups:
            _, (_, _, _, layout_number, sizes) = max(groups, key=lambda group: group[0])
            layout = self._definitions.get((process, layout_number))
            devices = layout.get("devices") if isinstance(layout, dict) else None
            device = " ".join(map(str, devices)) if devices else "?"
            if len(sizes) == 1:
                got, gave = self._text(process, sizes[0][0]), self._text(process, sizes[0][1])
        walls = self._walls.get(process, array("q"))
        spent = sum(walls)
        unknown = any(mode.unknown_samples for mode in self._modes.values())
        samples = sum(mode.samples[process] for mode in self._modes.values())
        speed = samples * 1e9 / spent if spent and not unknown else None
        rank, world = self._ranks.get(process, (None, None))
        return RankLine(process, rank, world, device, got, gave, calls, len(walls), walls, speed)

    def _text(self, process: int, number: int) -> str | None:
        """Sizes as people write them, None if they were not seen: [30, 5] or x [30, 5], mask [30]."""
        value = self._definitions.get((process, number)) if number else None
        if not isinstance(value, list):
            return None
        texts = [f"{list(shape)}" if path in ("", "0") else f"{path} {list(shape)}" for path, shape, *_ in value]
        return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _order(item: tuple[tuple[Any, ...], int]) -> tuple[Any, ...]:
    (mode, root, replica, device, got, gave), count = item
    return (mode, root, replica, device, -count, got or "", gave or "")


def add_up(directory: Path, adder: Adder | None = None) -> Totals:
    """Everything the run in `directory` has recorded, added up; RunError if the directory is no run.

    `adder`: one that wants to see everything too.
    """
    snapshot = Snapshot.take(directory)
    adder = adder or Adder()
    try:
        if snapshot.kept is not None:
            try:
                for width, rollup in deleted(snapshot.kept):
                    adder.delete(width, rollup)
                _add_kept(adder, snapshot)
            except (HistoryError, ValueError) as error:
                adder.totals.warnings.append(f"the history cannot be read to its end: {error}")
        for process, payload in _payloads(snapshot):
            try:
                _add_payload(adder, process, payload, snapshot.info.start_ns)
            except (LookupError, ValueError, TypeError, struct.error):
                snapshot.dropped += 1
        totals = adder.result()
        totals.dropped = snapshot.dropped
        totals.pruned = snapshot.kept.pruned if snapshot.kept is not None else 0
        return totals
    finally:
        snapshot.close()


def why_nothing(totals: Totals, reader: RunReader) -> str | None:
    """Why a run without steps and calls has none; None for one whose command was not started."""
    # Where the record is kept is told as a warning too, but is no reason.
    warnings = [text for text in totals.warnings if text != reader.info.options.get("elsewhere")]
    if warnings:
        return warnings[0]
    stage = reader.stage()
    if reader.info.command_pid is None:
        return None
    if stage is None:
        return "no Python process of it imported torch"
    if stage[0] == "importing torch":
        return "it ended while torch was being imported"
    return "torch was imported, but no model was called"


def _payloads(snapshot: Snapshot) -> Iterator[tuple[int, bytes]]:
    for rest in snapshot.rest:
        for payload in rest.payloads:
            yield rest.process, payload


def _add_kept(adder: Adder, snapshot: Snapshot) -> None:
    assert snapshot.kept is not None
    for ring in snapshot.kept.rings.values():
        for number, value in snapshot.kept.definitions(ring.process):
            adder.define(ring.process, number, value)
    for row in snapshot.kept.rows():
        try:
            if row[1] == "calls":
                adder.call(row[3], row[-1])
            elif row[1] == "steps":
                adder.step(*step_columns(row))
            else:
                event = record_of(row, {})
                if isinstance(event, Event):
                    adder.event(event.kind, event.data)
        except (RecordError, LookupError, ValueError, TypeError, OverflowError, struct.error):
            snapshot.dropped += 1


def _add_payload(adder: Adder, process: int, payload: bytes, origin: int) -> None:
    kind = kind_of(payload)
    if kind == "definition":
        adder.define(process, *definition(payload))
    elif kind == "call":
        adder.call(process, payload)
    elif kind == "step":
        mode, _, _, number, start, wall, samples, *phases = step_fields(payload)
        known: list[int | None] = [took if took >= 0 else None for took in phases]
        other = max(0, wall - sum(took for took in phases if took >= 0))
        known_samples = samples if samples >= 0 else None
        adder.step(process, number, MODES[mode], start - origin, wall, known_samples, [*known, other])
    elif kind == "event":
        data = json.loads(payload[1:])
        adder.event(str(data.pop("kind")), data)
