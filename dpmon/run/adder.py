"""Adds up what a run has recorded, piece by piece, exactly and without decoding every record."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dpmon.rates import Gap, Paces, Tally, rate_of
from dpmon.record.codec import (
    BACKWARD_AT,
    OPTIMIZER_AT,
    PartTimes,
    bare,
    call_head,
    call_replicas,
    call_stages,
    is_evaluation,
    is_timed,
    known_times,
    part_times,
    why_missing,
)
from dpmon.record.wire import CALL_PHASES, DDP, GRAD, MODES, STEP_PHASES, TRAINING
from dpmon.run.inputs import Wait
from dpmon.run.rollup import Rollup
from dpmon.run.staged import Stages
from dpmon.run.totals import Deleted, ModeTotals, OnDevice, RankLine, ReplicaLine, Totals, why_untimed

__all__ = ["Adder"]

_WAITING = 4096

_Key = TypeVar("_Key", str, tuple[int, str, bool])
_Waiting = tuple[int, str, bool, int, Sequence[int], bytes | None]
"""Step, mode, whether it was called as in an evaluation, start, phases, its record if that has times of devices."""


def _on_devices(mode: ModeTotals, times: Mapping[str, float]) -> None:
    for name, took in times.items():
        mode.device_ms.setdefault(name, array("d")).append(took)


def _times(of: dict[_Key, array[int]], key: _Key) -> array[int]:
    """Those of `key`, made if there are none; `setdefault` would make an empty array every time."""
    found = of.get(key)
    if found is None:
        found = of[key] = array("q")
    return found


class Adder:
    """Takes everything that a run has recorded, in the order in which it came; `result` is what it adds up to."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._groups: Counter[tuple[Any, ...]] = Counter()
        self._definitions: dict[tuple[int, int], Any] = {}
        self._processes: set[int] = set()
        self._ranks: dict[int, tuple[int | None, int | None]] = {}
        """Rank and world of each process, as it said itself."""
        self._walls: dict[tuple[int, str, bool], array[int]] = {}
        """By process, mode, and whether it is an evaluation."""
        self._forwards: dict[tuple[int, str, bool], OnDevice] = {}
        """The same of what the slowest device took for the forward of a step; only of steps that hold times of it."""
        self._paces: dict[int, Paces] = {}
        """By process."""
        self._gone: dict[int, Paces] = {}
        """The same for deleted steps."""
        self._modes: dict[tuple[str, bool], ModeTotals] = {}
        """By mode, and whether it is an evaluation."""
        self._calls: dict[int, list[_Waiting]] = {}
        """Of each process those whose step is not over: then it is known what they are part of."""
        self._stages = Stages()

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
        """What is left of the steps of some seconds that were deleted (0: of all before its start)."""
        begin_s = rollup.start_s if width_s else 0
        found = self.totals.deleted.get(rollup.mode)
        if found is None:
            whole = Rollup(rollup.start_s, -1, rollup.mode)
            found = self.totals.deleted[rollup.mode] = Deleted(whole, begin_s, rollup.start_s)
        found.sums.merge(rollup)
        gone = self._gone.setdefault(rollup.process, Paces())
        gone.sums(rollup.mode, rollup.pace, begin_s * 10**9, (rollup.start_s + width_s) * 10**9)
        found.paces[rollup.process] = gone.of(rollup.mode)
        found.last_s = max(found.last_s, rollup.start_s + width_s)

    def delete_samples(
        self, start_s: int, device: int, name: str, count: int, total: float, low: float, high: float
    ) -> None:
        """What is left of a minute's samples of a device (-1: the host) that were deleted, of one of its figures.

        `start_s` BEFORE_S: of all the time before the first minute that is left.
        """

    def step(
        self,
        process: int,
        number: int,
        mode: str,
        start: int,
        wall: int,
        samples: int | None,
        phases: Sequence[int | None],
        times: bytes | None = None,
    ) -> None:
        """`start` in ns since the run's start; `phases` as in STEP_PHASES; `times` as records.step_times gives them."""
        self._processes.add(process)
        self.totals.pauses.step(process, start)
        evaluation = is_evaluation(phases[BACKWARD_AT], phases[OPTIMIZER_AT])
        gap = self._pace(process).step(number, mode, start, wall, samples, evaluation)
        self.elapsed(mode, start, gap)
        _times(self._walls, (process, mode, evaluation)).append(wall)
        self._settle(process, number, evaluation)
        found = self._mode(mode, evaluation)
        found.walls.append(wall)
        found.steps[process] += 1
        if times is not None:
            known = known_times(times)
            _on_devices(found, known)
            forward = self._forwards.setdefault((process, mode, evaluation), OnDevice())
            forward.take(known.get("forward"), why_missing(times))
        for name, took in zip(STEP_PHASES, phases, strict=True):
            if took is not None:
                _times(found.step_phases, name).append(took)

    def _pace(self, process: int) -> Paces:
        found = self._paces.get(process)
        if found is None:
            found = self._paces[process] = Paces()
        return found

    def elapsed(self, mode: str, start: int, gap: Gap) -> None:
        """Hook for subclasses that need the time before a step that begins at `start`."""

    def _waited(self, waits: Sequence[Wait]) -> None:
        for wait in waits:
            self.waited(*wait)

    def waited(self, process: int, begin: int, end: int) -> None:
        """Leave a wait for input out of the training time."""
        self._pace(process).wait(begin, end)
        if process in self._gone:
            self._gone[process].wait(begin, end)

    def call(self, process: int, payload: bytes) -> None:
        """`payload`: of a call, as in the ring."""
        times, parts = None, None
        if is_timed(payload):
            payload, times = bare(payload), payload
            parts = part_times(times)
        head = call_head(payload)
        shares = call_replicas(payload)
        self.called(process, head, shares, parts)
        mode_number, flags, _, layout, step, _, start, _, _, _, *phases = head
        mode = MODES[mode_number]
        self._processes.add(process)
        waiting = self._calls.setdefault(process, [])
        waiting.append((step, mode, flags & (TRAINING | GRAD) == 0, start, phases, times))
        if len(waiting) > _WAITING:  # a process whose calls are in no step
            self._count_call(*waiting.pop(0)[1:])
        sizes = tuple((got, gave) for got, gave, _, _ in shares)
        self._groups[process, mode, flags & 1, layout, sizes] += 1
        self._stages.call(process, layout, call_stages(payload), parts)

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

    def _count_call(self, mode: str, evaluation: bool, start: int, phases: Sequence[int], times: bytes | None) -> None:
        found = self._mode(mode, evaluation)
        found.calls += 1
        if times is not None:
            _on_devices(found, known_times(times))
        for index, name in enumerate(CALL_PHASES):
            if phases[2 * index] >= 0:
                _times(found.call_phases, name).append(phases[2 * index + 1])
        self.placed(mode, evaluation, start, phases)

    def placed(self, mode: str, evaluation: bool, start: int, phases: Sequence[int]) -> None:
        """For those who want to know what a call was part of, too; `phases` as in `call_head`."""

    def called(
        self,
        process: int,
        head: Sequence[int],
        shares: Sequence[tuple[int, int, int, int]],
        parts: PartTimes | None,
    ) -> None:
        """For those who want more of a call than is added up here: as `call_head` and `call_replicas` give it.

        `parts`: as `part_times` does; None for a call that holds no times of devices.
        """

    def event(self, kind: str, data: Any) -> None:
        """An event; `data` without its kind."""
        if kind == "warning" and isinstance(data.get("text"), str):
            self.totals.warnings.append(data["text"])
        elif kind == "pause" and type(data.get("process")) is int:
            pause = self.totals.pauses.event(data)
            if pause is not None:
                self._pace(data["process"]).pause(*pause)
        elif kind == "input":
            self._waited(self.totals.inputs.event(data))
        elif kind == "memory" and type(data.get("process")) is int:
            self.totals.memory[data["process"]] = data
        elif kind == "process" and type(data.get("process")) is int:
            rank, world = (value if type(value := data.get(key)) is int else None for key in ("rank", "world"))
            self._ranks[data["process"]] = rank, world
            self._waited(self.totals.inputs.process(data))
        elif kind == "mode" and isinstance(data.get("reason"), str) and data["reason"] not in self.totals.reasons:
            self.totals.reasons.append(data["reason"])

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
        self._add_paces()
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
        self.totals.pauses.settle()
        self.totals.stages = self._stages.lines(self.definition, self._text)
        if several:
            ranks = [self._rank_line(process) for process in self._processes]
            self.totals.ranks = sorted(ranks, key=lambda line: (line.rank is None, line.rank or 0, line.process))
        return self.totals

    def _add_paces(self) -> None:
        """Set the tallies of each mode's processes."""
        for process, paces in self._paces.items():
            for mode, pace in paces.modes.items():
                apart = self.totals.evaluations.get(mode)
                if apart is not None:
                    apart.tallies[process] = pace.evaluation
                if mode in self.totals.modes:
                    self.totals.modes[mode].tallies[process] = pace.counted() if apart is None else pace.training

    def _rank_line(self, process: int) -> RankLine:
        groups = [(count, key) for key, count in self._groups.items() if key[0] == process]
        calls = sum(count for count, _ in groups)
        device, got, gave, untimed = "?", None, None, None
        if groups:
            _, (_, _, _, layout_number, sizes) = max(groups, key=lambda group: group[0])
            layout = self._definitions.get((process, layout_number))
            devices = layout.get("devices") if isinstance(layout, dict) else None
            device = " ".join(map(str, devices)) if devices else "?"
            untimed = why_untimed(layout)
            if len(sizes) == 1:
                got, gave = self._text(process, sizes[0][0]), self._text(process, sizes[0][1])
        # Of the steps that the modes' figures are of, too.
        kinds = [(mode, evaluation) for mode, evaluation in self._modes
                 if not evaluation or mode not in self.totals.evaluations]  # fmt: skip
        walls, forward = array("q"), OnDevice()
        for kind in kinds:
            of_kind = self._walls.get((process, *kind), array("q"))
            walls.extend(of_kind)
            forward.add(self._forwards.get((process, *kind), OnDevice()), len(of_kind), untimed)
        whole = Tally()
        for mode in self.totals.modes.values():
            whole.add(mode.tallies.get(process, Tally()))
        rank, world = self._ranks.get(process, (None, None))
        return RankLine(process, rank, world, device, got, gave, calls, len(walls), walls, rate_of([whole]), forward)

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
