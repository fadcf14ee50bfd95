"""Reads a run's directory, once through, into a Story. Memory is that of the durations, 8 bytes each."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpmon.model.evidence import (
    WARM_UP_STEPS,
    BatchFacts,
    Evidence,
    ReplicaFacts,
    Worth,
)
from dpmon.model.findings import findings
from dpmon.model.memory import held
from dpmon.model.stats import median, percentile
from dpmon.records import GRAD, MODES, TRAINING
from dpmon.report.compared import Settled, compared
from dpmon.report.devices import Devices
from dpmon.report.events import mode_change, process_facts
from dpmon.report.figures import deleted_facts, mode_facts
from dpmon.report.longest import Longest
from dpmon.report.pauses import There, any_of, together, within
from dpmon.report.series import Series
from dpmon.report.story import Compared, Deleted, ModeChange, ProcessFacts, Story
from dpmon.run.add_up import add_up, why_nothing
from dpmon.run.adder import Adder, is_evaluation
from dpmon.run.reader import RunReader
from dpmon.run.rollup import Rollup
from dpmon.run.rundir import ExitInfo, RunInfo, load_info
from dpmon.run.state import run_state
from dpmon.run.totals import Totals
from dpmon.ui.tail import last_words

__all__ = ["collect"]

LINES_KEPT = 12
CHANGES_KEPT = 1000
_TAIL_BYTES = 16384
_DDP = "DistributedDataParallel"
_VIRTUAL = 1
_SECOND = 1_000_000_000
_Share = tuple[int, int, int, int, bool]


def collect(directory: Path) -> Story:
    """The story of the run in `directory`, as far as it has come. RunError if it is no run."""
    info = load_info(directory)
    collector = _Collector(info)
    totals = add_up(directory, collector)
    state, how = run_state(directory, info)
    reader = RunReader(directory)
    gone = tuple(
        Deleted(deleted_facts(name, one, totals.virtual), one.sums.calls, one.first_s, one.last_s)
        for name, one in sorted(totals.deleted.items())
        if one.sums.steps
    )
    verdict = compared(collector.settled, totals.virtual, collector.changes, gone)
    evidence = collector.evidence(totals, how, verdict, gone)
    bin_ns, bins = collector.series.result()
    there = [*totals.modes.values(), *totals.evaluations.values()]
    steps = sum(len(mode.walls) for mode in there) + sum(one.facts.steps for one in gone)
    calls = sum(mode.calls for mode in there) + sum(one.calls for one in gone)
    return Story(
        directory=str(directory),
        info=info,
        exit=how,
        state=state,
        evidence=evidence,
        findings=tuple(findings(evidence)),
        evaluations=tuple(
            mode_facts(name, mode, totals.virtual) for name, mode in sorted(totals.evaluations.items()) if mode.walls
        ),
        deleted=gone,
        steps=steps,
        calls=calls,
        timeless=collector.timeless,
        bin_ns=bin_ns,
        bins=bins,
        points=collector.devices.points(),
        processes=tuple(collector.processes[number] for number in sorted(collector.processes)),
        changes=tuple(collector.changes),
        pauses=tuple(totals.pauses.found),
        pauses_left_out=totals.pauses.left_out,
        refusals_left_out=totals.pauses.refusals_left_out,
        paused=totals.pauses.total(evidence.end_ns),
        paused_alone_ns=collector.paused_alone_ns,
        replicas=tuple(totals.replicas),
        ranks=tuple(totals.ranks),
        stages=tuple(totals.stages),
        warnings=tuple(dict.fromkeys(totals.warnings)),
        last_output=_last_output(reader) if how is not None and how.status else (),
        raised=last_words(reader.output_paths[-1]) if how is not None and how.status else None,
        host=collector.devices.host(),
        gpu_absent=collector.devices.gpu_absent,
        dropped=totals.dropped,
        pruned=totals.pruned,
        compared=verdict,
        nothing=None if steps or calls else why_nothing(totals, reader) or "the command was not started",
    )


class _Collector(Adder):
    """Sees everything on its way into the totals, and keeps what these do not."""

    def __init__(self, info: RunInfo) -> None:
        super().__init__()
        self._origin = info.start_ns
        self.series = Series()
        self.timeless = 0
        self.devices = Devices()
        self.processes: dict[int, ProcessFacts] = {}
        self.changes: list[ModeChange] = []
        self._there = There()
        self.paused_alone_ns = 0
        """As of a story."""
        self._longest = Longest()
        self._seen: Counter[tuple[int, str]] = Counter()
        self._last_ns: int | None = None
        self._shares: dict[_Share, tuple[list[array[int]], Counter[tuple[int, ...]]]] = {}
        """By process, layout, number of the mode and of replicas, whether it evaluates: durations of each replica, and
        how often the batch and they were of these sizes (definitions)."""
        self.settled = Settled()
        self._virtual: set[tuple[int, int]] = set()

    # ------------------------------------------------------------------------------------------ taking

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
        """A step; one whose numbers make no sense is left out."""
        if wall < 0 or start < 0:
            return
        super().step(process, number, mode, start, wall, samples, phases, times)
        self._there.take(process, start, start + wall)
        evaluation = is_evaluation(phases)
        self.series.step(mode, evaluation, start, wall, samples, phases)
        self.settled.step(process, number, mode, start, wall, samples, phases)
        self._last_ns = max(self._last_ns or 0, start + wall)
        self._seen[process, mode] += 1
        if self._seen[process, mode] <= WARM_UP_STEPS:
            return
        self._longest.step(process, number, mode, start, wall, phases, evaluation)

    def called(self, process: int, head: Sequence[int], shares: Sequence[tuple[int, int, int, int]]) -> None:
        """A call, as it lies in the record."""
        mode, flags, _, layout, step, _, start, wall, inputs, _, *phases = head
        self._there.take(process, start - self._origin, start - self._origin + max(wall, 0))
        self.settled.call(process, step, phases)
        if flags & _VIRTUAL:
            self._virtual.add((process, layout))
        key = (process, layout, mode, len(shares), flags & (TRAINING | GRAD) == 0)
        found = self._shares.get(key)
        if found is None:
            found = self._shares[key] = ([array("q") for _ in shares], Counter())
        sizes = (inputs, *[got for got, _, _, _ in shares])
        found[1][sizes] += 1
        for times, (_, _, _, took) in zip(found[0], shares, strict=True):
            times.append(took)

    def placed(self, mode: str, evaluation: bool, start: int, phases: Sequence[int]) -> None:
        """A call whose step is over."""
        self.series.call(mode, evaluation, start - self._origin, phases)

    def delete(self, width_s: int, rollup: Rollup) -> None:
        """What is left of the steps of some seconds that were deleted."""
        super().delete(width_s, rollup)
        warm = self._seen[rollup.process, rollup.mode] > WARM_UP_STEPS
        self._seen[rollup.process, rollup.mode] += max(rollup.steps, 0)
        # Of what has no width it is known only that it was before.
        first_s = rollup.start_s if width_s else 0
        self._there.take(rollup.process, first_s * _SECOND, (rollup.start_s + width_s) * _SECOND)
        if width_s:
            self.series.rollup(width_s, rollup)
            if warm:
                self._longest.rollup(width_s, rollup)
        else:
            self.timeless += rollup.steps

    def delete_samples(
        self, start_s: int, device: int, name: str, count: int, total: float, low: float, high: float
    ) -> None:
        """What is left of a minute's samples of a device that were deleted."""
        self.devices.rollup(start_s, device, name, count, total, high)

    def event(self, kind: str, data: Any) -> None:
        """An event."""
        super().event(kind, data)
        if kind in ("device", "host"):
            self.devices.sample(kind, data)
        elif kind == "process" and type(data.get("process")) is int:
            self.processes[data["process"]] = process_facts(data)
        elif kind == "mode" and type(data.get("process")) is int and len(self.changes) < CHANGES_KEPT:
            self.changes.append(mode_change(data))

    # ------------------------------------------------------------------------------------------ giving

    def evidence(
        self, totals: Totals, how: ExitInfo | None, verdict: Compared | None, deleted: Sequence[Deleted]
    ) -> Evidence:
        """What findings are found from."""
        end = None if how is None or how.by != "supervisor" else int(how.seconds * 1e9)
        # Of a run that goes on as far as anything of it is known.
        until = max(self._last_ns or 0, self.devices.last_ns) if end is None else end
        paused = together(totals.pauses.stretches, self._there.spans, until)
        of_any = any_of(totals.pauses.stretches, until)
        last = max([end or 0, *(stop for _, stop in of_any)])
        self.paused_alone_ns = within(of_any, 0, last) - within(paused, 0, last)
        self.devices.paused = paused
        return Evidence(
            modes=tuple(mode_facts(name, mode, totals.virtual) for name, mode in sorted(totals.modes.items())),
            batches=tuple(self._batch_facts()),
            replicas=tuple(self._replica_facts()),
            devices=self.devices.facts(),
            host=self.devices.processors(),
            memory=tuple(held(totals.memory.values())),
            longest=self._longest.steps(totals),
            deleted=tuple(one.facts for one in deleted),
            worth=_worth(verdict),
            processes=totals.processes,
            last_step_ns=self._last_ns,
            end_ns=end,
            paused_ns=within(paused, 0, last),
            paused_after_ns=within(paused, self._last_ns or 0, last),
        )

    def _layout(self, process: int, layout: int) -> tuple[str, list[str]] | None:
        """Root and devices of a layout; None for one that is unknown or DDP's, whose ranks are no replicas."""
        value = self.definition(process, layout)
        if not isinstance(value, dict) or value.get("via") == _DDP or not isinstance(value.get("devices"), list):
            return None
        return str(value.get("root")), [str(device) for device in value["devices"]]

    def _rows_of(self, process: int, number: int) -> int | None:
        """Rows of a definition of sizes: the first dimension of the first tensor that has one."""
        value = self.definition(process, number) if number else None
        for size in value if isinstance(value, list) else ():
            if isinstance(size, list) and len(size) > 1 and isinstance(size[1], list) and size[1]:
                return size[1][0] if type(size[1][0]) is int else None
        return None

    def _batch_facts(self) -> list[BatchFacts]:
        found: dict[tuple[str, int], list[tuple[int, int | None, int]]] = {}
        for (process, layout, mode, replicas, _), (_, sizes) in self._shares.items():
            about = self._layout(process, layout)
            if about is None or len(about[1]) < 2 or MODES[mode] != "dp":
                continue
            by_rows: Counter[int | None] = Counter()
            for (inputs, *_), calls in sizes.items():
                by_rows[self._rows_of(process, inputs)] += calls
            for rows, calls in by_rows.items():
                found.setdefault((about[0], len(about[1])), []).append((replicas, rows, calls))
        facts = []
        for (root, devices), groups in found.items():
            idle = [(calls, rows, devices - replicas) for replicas, rows, calls in groups if replicas < devices]
            calls = sum(calls for _, _, calls in groups)
            if idle:
                _, rows, without = max(idle, key=lambda group: group[0])
                facts.append(BatchFacts(root, devices, calls, sum(count for count, _, _ in idle), rows, without))
            else:
                facts.append(BatchFacts(root, devices, calls, 0, None, 0))
        return facts

    def _replica_facts(self) -> list[ReplicaFacts]:
        times: dict[tuple[str, str, int, str], array[int]] = {}
        rows: dict[tuple[str, str, int, str], Counter[int | None]] = {}
        virtual: set[tuple[str, str, int, str]] = set()
        trained = {key[:3] for key in self._shares if not key[4]}
        for (process, layout, mode, _, evaluation), (arrays, sizes) in self._shares.items():
            about = self._layout(process, layout)
            if about is None or (evaluation and (process, layout, mode) in trained):
                continue
            for index, took in enumerate(arrays[: len(about[1])]):
                key = (MODES[mode], about[0], index, about[1][index])
                times.setdefault(key, array("q")).extend(took)
                if (process, layout) in self._virtual and MODES[mode] == "dp":
                    virtual.add(key)
                counts = rows.setdefault(key, Counter())
                for (_, *got), count in sizes.items():
                    counts[self._rows_of(process, got[index])] += count
        facts = []
        for key in sorted(times):
            ordered = sorted(times[key])
            often = rows[key].most_common(1)[0][0]
            middle, tail = median(ordered), percentile(ordered, 0.95)
            facts.append(ReplicaFacts(*key, len(ordered), often, middle, tail, key in virtual))
        return facts


def _worth(found: Compared | None) -> Worth | None:
    if found is None or found.speedup is None or found.low is None or found.high is None or found.sentence is None:
        return None
    return Worth(found.speedup, found.low, found.high, found.sentence)


def _last_output(reader: RunReader) -> tuple[str, ...]:
    """The last lines of the script's output (its errors, where they are apart)."""
    try:
        with open(reader.output_paths[-1], "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return ()
    # A carriage return begins the line anew: what a progress bar showed last is what counts.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return tuple([line for line in shown if line.strip()][-LINES_KEPT:])
