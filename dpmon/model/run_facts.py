"""The facts of a whole run, for report, summary and findings. Each is queried once, when it is first needed. Pure.

Medians over several processes describe none of them, so the times of a mode are those of the process that the screen
shows. Counts of steps and rates cover all processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.announced import Announced, loader_start
from dpmon.model.communication import Communication, communication, ranks_in
from dpmon.model.compare import Comparison, compare_modes, first_with_both
from dpmon.model.devices import DeviceTotals
from dpmon.model.evidence import Evidence, LoaderStart, LongStep, ModeFacts
from dpmon.model.layouts import Layouts, batch_facts, most_common, replica_facts
from dpmon.model.memory import Held, held_by
from dpmon.model.pauses import Pauses, Span, all_paused, any_paused, pauses_of
from dpmon.model.process import ProcessFacts
from dpmon.model.ranks import training
from dpmon.model.snapshot import processes_in
from dpmon.model.stragglers import RankTimes
from dpmon.model.uneven import INPUT, is_wait, waited_ns
from dpmon.record.names import CALL_PHASES
from dpmon.record.schema import EVALUATION, SECOND, SETTLING, STEP, STEP_PHASES, device_series
from dpmon.store.answers import LongRow
from dpmon.store.figures import Rate
from dpmon.store.tally import WIDTHS, Tally
from dpmon.store.window import Window, accounted, thirds

if TYPE_CHECKING:
    from dpmon.store.store_at import StoreAt

LONGEST = 64
"""Most long steps to read per mode, and most to pass to the findings."""
GAPS = 10_000
LEAST_STRETCHES = 60
"""Fewest stretches into which a run of a minute or more is cut to find its first and its last third."""
_LEAST_OF_THIRD = 30
"""Fewest steps in each of the two thirds for a comparison."""


class RankLine(NamedTuple):
    """One process of several: the most frequent inputs and outputs of its calls, and its steps; None if unknown.

    `steps` excludes evaluations of modes that otherwise train; `calls` includes them.
    """

    process: int
    rank: int | None
    world: int | None
    device: str
    inputs: str | None
    outputs: str | None
    calls: int
    steps: int
    median_ns: float | None
    rate: Rate | None
    forward_ns: float | None
    """Median device time of the forward of a step, on the slowest device."""
    untimed: str | None
    """Why `forward_ns` is unknown, if the record has a reason."""
    times: RankTimes | None = None
    """Mean times of training steps, without the first ones, of all processes with its rank. None without a rank."""

    @property
    def label(self) -> str:
        """Its rank, or its process: "rank 0 of 2", "process 1"."""
        return f"process {self.process}" if self.rank is None else f"rank {self.rank} of {self.world or '?'}"


class RunFacts:
    """The facts of one run, from its beginning to now or to its end."""

    def __init__(self, rows: StoreAt, ended: frozenset[int] = frozenset(), end_ns: int | None = None) -> None:
        """`ended`: processes that have ended. `end_ns`: when the run ended; None while it runs, or if unknown."""
        self._rows = rows
        self.store = rows.store
        self.end_ns = end_ns
        self.announced = Announced.read(rows, every=True)
        self.open_calls = rows.open_calls
        self._state = state = processes_in(rows, self.announced, ended)
        self._ranks = {number: process.rank for number, process in state.processes.items()}
        focus = state.focus()
        self._focus = 0 if focus is None else focus.process
        self.window = Window(self.store)
        there = self.store.processes
        self.names = {process: self._name(process) for process in there} if len(there) > 1 else {}
        """The names of the processes with steps, such as "rank 0"; empty if there is only one."""

    # ------------------------------------------------------------------------------------------ processes

    def rank(self, process: int) -> int | None:
        """The rank of a process; None if it has none."""
        return self._ranks.get(process)

    def _name(self, process: int) -> str:
        rank = self.rank(process)
        if rank is None:
            return f"process {process}"
        again = sum(self.rank(each) == rank for each in self.store.processes) > 1
        return f"rank {rank} (process {process})" if again else f"rank {rank}"

    def _by_rank(self, process: int) -> tuple[bool, int, int]:
        rank = self.rank(process)
        return rank is None, rank or 0, process

    @cached_property
    def layouts(self) -> Layouts:
        """The sizes of all calls."""
        shapes = self.store.shapes()
        return Layouts(
            shapes, {process: self.store.definitions(process) for process in {one.process for one in shapes}}
        )

    @cached_property
    def processes(self) -> list[int]:
        """The processes with steps or calls, by rank."""
        return sorted({*self.store.processes, *self.layouts.processes}, key=self._by_rank)

    @cached_property
    def communication(self) -> Communication | None:
        """The communication of the ranks; None if no ranks train together."""
        ranks = ranks_in(self.window, self.announced.info)
        steps = sum(one.steps for one in ranks)
        return communication(ranks, self.announced.wrappers, self._rows.communicated(), steps, lately=False)

    @cached_property
    def ranks(self) -> list[RankLine]:
        """Each process, by rank; empty if there is only one."""
        communicated = self.communication
        times = {one.rank: one for one in communicated.ranks} if communicated is not None else {}
        return [self._rank(process, times) for process in self.processes] if len(self.processes) > 1 else []

    def _rank(self, process: int, times: Mapping[int | None, RankTimes]) -> RankLine:
        sizes, (tally, speed) = self.layouts.of_process(process), self.window.of_process(process)
        facts = self.announced.info.get(process, ProcessFacts(process))
        forward = tally.stat(device_series("forward"))
        untimed = next((step.untimed for step in self.store.steps(1, process=process)), None)
        return RankLine(
            process,
            facts.rank,
            facts.world,
            *sizes,
            tally.steps,
            tally.median(STEP),
            speed,
            forward.median,
            None if forward.count else untimed or most_common(self.layouts.untimed(process)),
            None if facts.rank is None else times.get(facts.rank),
        )

    @cached_property
    def memory(self) -> list[Held]:
        """The memory of each device, of the processes that trained last."""
        return held_by(training(self._state), self._state.focus())

    # ------------------------------------------------------------------------------------------ modes

    def shown(self, mode: str, evaluation: bool) -> int:
        """The process that represents the run; if it has no step in this mode, the lowest rank that has one."""
        there = [self._focus, *sorted(self.store.processes, key=self._by_rank)]
        return next((each for each in there if self.window.tally(mode, evaluation, each).steps), self._focus)

    def mode(self, mode: str, evaluation: bool = False, process: int | None = None) -> ModeFacts:
        """The figures of a mode for `process`, or for the shown process; the rate is that of all processes."""
        process = self.shown(mode, evaluation) if process is None else process
        found = self.window.figures(mode, evaluation, process)
        whole = sum(self.window.tally(mode, evaluation, each).steps for each in self.store.processes)
        phases = {phase.name: phase for phase in found.phases if phase.ran}
        return ModeFacts(
            mode=mode,
            virtual=self.layouts.virtual and mode == "dp",
            distributed=self.layouts.distributed if mode == "single" else None,
            steps=found.steps,
            median_ns=found.median_ns,
            p95_ns=found.p95_ns,
            rate=self.window.rate(mode, evaluation),
            phases=tuple(phases[name] for name in (*STEP_PHASES, *CALL_PHASES) if name in phases),
            early={},
            late={},
            mean_ns=found.mean_ns,
            counted=found.counted,
            process=process,
            who=self.names.get(process),
            rank=self.rank(process),
            other_steps=whole - found.steps,
            calls=found.calls,
        )

    @cached_property
    def evaluations(self) -> list[ModeFacts]:
        """The evaluations of each mode that otherwise trains."""
        return [self.mode(mode, True) for mode, evaluation in self.window.modes if evaluation]

    @cached_property
    def modes(self) -> tuple[ModeFacts, ...]:
        """Each mode without evaluations, with the medians of the first and last third of its steps."""
        return tuple(self._with_thirds(self.mode(mode)) for mode, evaluation in self.window.modes if not evaluation)

    def _with_thirds(self, facts: ModeFacts) -> ModeFacts:
        """Add the medians of the first and last third of the steps, if there are enough steps."""
        seconds = ((self.last_step_ns or 0) - self.first_step_ns) / SECOND
        width = max((width for width in WIDTHS if width * LEAST_STRETCHES <= seconds), default=1)
        trained = self.window.trained(facts.mode)
        rows = [
            (at, tally)
            for at, _, key, tally in self.store.tally_rows(process=facts.process, finest=width, widest=width)
            if key.mode == facts.mode and not key.kind & SETTLING and bool(key.kind & EVALUATION) != trained
        ]
        first, last = thirds(rows, sum(tally.steps for _, tally in rows))
        if min(first.steps, last.steps) < _LEAST_OF_THIRD:
            return facts
        return facts._replace(
            early=_medians(first),
            late=_medians(last),
            early_p75_ns=first.quantile(STEP, 0.75),
            late_p25_ns=last.quantile(STEP, 0.25),
        )

    @property
    def _others(self) -> tuple[ModeFacts, ...]:
        """The figures of the same modes for each of the other processes."""
        others = (
            self.mode(one.mode, process=process)
            for one in self.modes
            for process in self.store.processes
            if process != one.process
        )
        return tuple(one for one in others if one.steps)

    # ------------------------------------------------------------------------------------------ time

    @cached_property
    def _spans(self) -> dict[int, Span]:
        """By process: the time from its first step to its last."""
        found: dict[int, Span] = {}
        for key, tally in self.window.by_process.items():
            if tally.first_ns is not None and tally.last_ns is not None:
                first, last = found.get(key.process, (tally.first_ns, tally.last_ns))
                found[key.process] = min(first, tally.first_ns), max(last, tally.last_ns)
        return found

    @property
    def first_step_ns(self) -> int:
        """The start of the first step; 0 without steps."""
        return min((first for first, _ in self._spans.values()), default=0)

    @property
    def last_step_ns(self) -> int | None:
        """The end of the last step."""
        return max((last for _, last in self._spans.values()), default=None)

    @property
    def until_ns(self) -> int:
        """The end of the run; of a live run, its newest record."""
        return max(self.last_step_ns or 0, self.devices.last_ns) if self.end_ns is None else self.end_ns

    def spent_until(self, until_ns: int) -> Mapping[str, int]:
        """The time of each activity (ns) from the run's start to `until_ns`; empty without steps."""
        return accounted(self.window.spent, until_ns, self.window.lives) if self._spans else {}

    @cached_property
    def pauses(self) -> Pauses:
        """All pauses, and refused requests."""
        newest_ns = max((step.start_ns for step in self.store.steps(1)), default=-1)
        return pauses_of(self.announced.pauses, self.store.next_step_ns, newest_ns)

    @cached_property
    def paused(self) -> list[Span]:
        """The times in which all present processes were paused."""
        return all_paused(self.pauses, self._spans, self.until_ns)

    @property
    def paused_alone_ns(self) -> int:
        """Time in which one process was paused and another was not."""
        of_any = any_paused(self.pauses, self.until_ns)
        return sum(end - begin for begin, end in of_any) - sum(end - begin for begin, end in self.paused)

    @cached_property
    def devices(self) -> DeviceTotals:
        """The samples of GPUs and host."""
        found = DeviceTotals()
        for row in self.store.device_minutes():
            found.rollup(row)
        for event in self.store.each_event("device", "host"):
            found.sample(event.kind, event.data)
        return found

    # ------------------------------------------------------------------------------------------ findings

    def evidence(self, stop_asked_ns: int | None = None) -> Evidence:
        """The facts that findings need. `stop_asked_ns`: when the user asked the run to stop.

        A step that was running at this time does not count as long, because it lasts until the process ends.
        """
        long = [
            step
            for step in self._longest()
            if stop_asked_ns is None or not step.start_ns <= stop_asked_ns < step.start_ns + step.wall_ns
        ]
        last_ns = self.last_step_ns
        return Evidence(
            modes=self.modes,
            others=self._others,
            batches=tuple(batch_facts(self.layouts)),
            replicas=tuple(replica_facts(self.layouts, self.window.by_process)),
            devices=self.devices.facts(self.paused),
            host=self.devices.processors(self.paused),
            memory=tuple(self.memory),
            longest=tuple(self._named(step) for step in long[:LONGEST]),
            spent=self.spent_until(self.until_ns),
            gaps=tuple(self.store.gaps(GAPS)),
            loaders=self._loaders(),
            compared=self._compared(long),
            communication=self.communication,
            processes=len(self.processes),
            names=self.names,
            pids={one.process: one.pid for one in self.announced.info.values() if one.pid is not None},
            last_step_ns=last_ns,
            end_ns=self.end_ns,
            newest_ns=self.until_ns,
            paused_ns=sum(end - begin for begin, end in self.paused),
            inputs=self.announced.inputs,
            paused_after_ns=waited_ns(self.paused, last_ns or 0, max([0, *(end for _, end in self.paused)])),
        )

    def _loaders(self) -> tuple[LoaderStart, ...]:
        starts = (loader_start(event.data) for event in self._rows.lasting("loader"))
        return tuple(one for one in starts if one is not None)

    def _longest(self) -> list[LongRow]:
        """The longest steps of all modes, including deleted ones but not evaluations, the longest first."""
        found: list[LongRow] = []
        for mode, evaluation in self.window.modes:
            if not evaluation:
                apart = False if self.window.trained(mode) else None
                found += self.store.longest(LONGEST, mode=mode, evaluation=apart)
                found += self.store.longest_deleted(LONGEST, mode=mode, evaluation=apart)
        return sorted(found, key=lambda step: -step.wall_ns)

    def _named(self, row: LongRow) -> LongStep:
        """A long step with the phase that took most of it; INPUT if that was a wait for input."""
        spans = self.announced.waits_of(row.process)
        begin, end = row.start_ns, row.start_ns + row.wall_ns
        phase: str | None
        if is_wait(spans, begin, end):
            phase, took = INPUT, waited_ns(spans, begin, end)
        else:
            phase = max(row.phases, key=lambda name: row.phases[name], default=None)
            took = 0 if phase is None else row.phases[phase]
        return LongStep(row.process, row.step, row.mode, begin, row.wall_ns, phase, took)

    def _compared(self, longest: Sequence[LongRow]) -> Comparison | None:
        changes = self.announced.changes
        devices = next((one.devices for one in changes if one.mode == "dp" and one.refused is None), ())
        who = first_with_both(self.window)
        waits, virtual = self.announced.waits_of(who), self.layouts.virtual
        found = compare_modes(self.window, who, devices=devices, virtual=virtual, longest=longest, waits=waits)
        return found if len(found.sides) > 1 else None


def _medians(tally: Tally) -> dict[str, float]:
    medians = {name: tally.median(name) for name in (STEP, *STEP_PHASES)}
    return {name: value for name, value in medians.items() if value is not None}
