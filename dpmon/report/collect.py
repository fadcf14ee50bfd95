"""Reads a run's directory, once through, into a Story. Memory is that of the durations, 8 bytes each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmon.model.evidence import WARM_UP_STEPS, Evidence, LongStep, Worth
from dpmon.model.findings import findings
from dpmon.model.inputs import INPUT, is_wait, waited_ns
from dpmon.model.memory import held
from dpmon.rates import Gap
from dpmon.record.codec import BACKWARD_AT, OPTIMIZER_AT, PartTimes, is_evaluation
from dpmon.report.compared import Settled, compared
from dpmon.report.devices import Devices
from dpmon.report.events import mode_change, process_facts
from dpmon.report.figures import deleted_facts, mode_facts
from dpmon.report.longest import Longest
from dpmon.report.pauses import There, any_of, together, within
from dpmon.report.series import Series
from dpmon.report.shares import Shares
from dpmon.report.story import Compared, Deleted, ModeChange, ProcessFacts, Story
from dpmon.run.add_up import add_up, why_nothing
from dpmon.run.adder import Adder
from dpmon.run.files import read_tail
from dpmon.run.reader import RunReader
from dpmon.run.rollup import Rollup
from dpmon.run.rundir import ExitInfo, RunInfo, load_info
from dpmon.run.standing import how_it_stands
from dpmon.run.state import run_state
from dpmon.run.totals import Totals
from dpmon.run.uncaught import Uncaught, last_lines, uncaught
from dpmon.text.last_words import READ_BYTES, last_words

__all__ = ["collect"]

LINES_KEPT = 12
CHANGES_KEPT = 1000
_TAIL_BYTES = 16384
_SECOND = 1_000_000_000


def collect(directory: Path) -> Story:
    """The story of the run in `directory`, as far as it has come. RunError if it is no run."""
    info = load_info(directory)
    collector = _Collector(info)
    totals = add_up(directory, collector)
    state, how = run_state(directory, info)
    reader = RunReader(directory)
    gone = tuple(
        Deleted(deleted_facts(name, one, totals.virtual, totals.distributed), one.sums.calls, one.first_s, one.last_s)
        for name, one in sorted(totals.deleted.items())
        if one.sums.steps
    )
    verdict = compared(collector.settled, totals.virtual, collector.changes, gone, totals.inputs.spans())
    failed = how is not None and how.status and how.signal is None
    raised = uncaught(directory, info, how.status) if how is not None and failed else None
    end = _output_end(reader) if how is not None and how.status else b""
    evidence = collector.evidence(totals, how, verdict, gone)
    if raised is not None:
        evidence = replace(evidence, raised=raised.sentence(info.cwd))
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
            mode_facts(name, mode, totals.virtual, totals.distributed)
            for name, mode in sorted(totals.evaluations.items())
            if mode.walls
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
        last_output=_last_output(end, raised, reader.info.command_pid),
        raised=last_words(end),
        host=collector.devices.host(),
        gpu_absent=collector.devices.gpu_absent,
        distributed=totals.distributed,
        dropped=totals.dropped,
        pruned=totals.pruned,
        compared=verdict,
        standing=how_it_stands(directory, info, state, how),
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
        self._shares = Shares(self.definition)
        self.settled = Settled()

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
        evaluation = is_evaluation(phases[BACKWARD_AT], phases[OPTIMIZER_AT])
        self.series.step(mode, evaluation, start, wall, samples, phases)
        self.settled.step(process, number, mode, start, wall, samples, phases)
        self._last_ns = max(self._last_ns or 0, start + wall)
        self._seen[process, mode] += 1
        if self._seen[process, mode] <= WARM_UP_STEPS:
            return
        self._longest.step(process, number, mode, start, wall, phases, evaluation)

    def elapsed(self, mode: str, start: int, gap: Gap) -> None:
        """The time before a step."""
        self.series.gap(mode, start, gap)

    def waited(self, process: int, begin: int, end: int) -> None:
        """A process waited for input."""
        super().waited(process, begin, end)
        self.series.wait(begin, end)

    def called(
        self,
        process: int,
        head: Sequence[int],
        shares: Sequence[tuple[int, int, int, int]],
        parts: PartTimes | None,
    ) -> None:
        """A call, as it lies in the record."""
        _, _, _, _, step, _, start, wall, _, _, *phases = head
        self._there.take(process, start - self._origin, start - self._origin + max(wall, 0))
        self.settled.call(process, step, phases)
        self._shares.call(process, head, shares, parts)

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
        inputs = tuple((process, *span) for process, span in totals.inputs.spans())
        return Evidence(
            modes=tuple(
                mode_facts(name, mode, totals.virtual, totals.distributed)
                for name, mode in sorted(totals.modes.items())
            ),
            batches=tuple(self._shares.batches()),
            replicas=tuple(self._shares.replicas()),
            devices=self.devices.facts(),
            host=self.devices.processors(),
            memory=tuple(held(totals.memory.values())),
            longest=tuple(_named(step, inputs) for step in self._longest.steps(totals)),
            inputs=inputs,
            deleted=tuple(one.facts for one in deleted),
            worth=_worth(verdict),
            processes=totals.processes,
            last_step_ns=self._last_ns,
            end_ns=end,
            paused_ns=within(paused, 0, last),
            paused_after_ns=within(paused, self._last_ns or 0, last),
        )


def _named(step: LongStep, inputs: Sequence[tuple[int | None, int, int]]) -> LongStep:
    """The same; one that was mostly a wait for input is called so."""
    spans = [(begin, end) for process, begin, end in inputs if process == step.process]
    if not is_wait(spans, step.start_ns, step.start_ns + step.wall_ns):
        return step
    return step._replace(phase=INPUT, phase_ns=waited_ns(spans, step.start_ns, step.start_ns + step.wall_ns))


def _worth(found: Compared | None) -> Worth | None:
    if found is None or found.speedup is None or found.low is None or found.high is None or found.sentence is None:
        return None
    return Worth(found.speedup, found.low, found.high, found.sentence)


def _output_end(reader: RunReader) -> bytes:
    """The end of the script's output (of its errors, where they are apart); empty if it cannot be read."""
    try:
        return read_tail(reader.output_paths[-1], READ_BYTES)
    except OSError:
        return b""


def _last_output(end: bytes, raised: Uncaught | None, command: int | None) -> tuple[str, ...]:
    """The last lines of the script's output, given its end; `command`: the process id of the command."""
    lines = end[-_TAIL_BYTES:].decode("utf-8", "replace").split("\n")
    # A carriage return begins the line anew: what a progress bar showed last is what counts.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return tuple([line for line in last_lines(shown, raised, command) if line.strip()][-LINES_KEPT:])
