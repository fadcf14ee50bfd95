"""Reads a run's directory into a Story: every figure is a query of its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpmon.model.announced import mode_change
from dpmon.model.compare import Comparison, compare_modes, first_with_both
from dpmon.model.evidence import BatchFacts, Evidence, LoaderStart, LongStep, ModeFacts, ReplicaFacts
from dpmon.model.findings import findings
from dpmon.model.inputs import INPUT, is_wait, waited_ns
from dpmon.model.layouts import Layouts, ReplicaSizes, StageSizes, most_common
from dpmon.model.members import ns_in, text_in, whole_in
from dpmon.model.memory import Held, held
from dpmon.model.replica_facts import batch_facts, replica_facts
from dpmon.model.state import ModeChange
from dpmon.record.schema import SETTLING, STEP, device_series
from dpmon.report.devices import Devices
from dpmon.report.figures import mode_facts
from dpmon.report.pauses import Pauses, Span, any_of, pauses_in, together
from dpmon.report.story import Bin, ProcessFacts, RankLine, Story
from dpmon.report.stretches import stretches
from dpmon.report.waits import waits_in
from dpmon.run.files import read_tail
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunInfo, load_info
from dpmon.run.standing import how_it_stands, why_nothing
from dpmon.run.state import run_state
from dpmon.run.uncaught import Uncaught, last_lines, uncaught
from dpmon.store.answers import GapRow, LongRow
from dpmon.store.opened import open_store
from dpmon.store.queries import Store
from dpmon.store.sums import END
from dpmon.store.tables import HistoryError
from dpmon.store.tally import ALL, WIDTHS, Tally
from dpmon.store.window import Window, accounted
from dpmon.text.last_words import READ_BYTES, last_words

__all__ = ["collect"]

LINES_KEPT = 12
CHANGES_KEPT = 1000
LONGEST = 64
"""Long steps of each mode, of which LONGEST are named."""
GAPS = 10_000
THIRDS = 60
"""Stretches of time that a run is cut into to find its first and its last third."""
_TAIL_BYTES = 16384
_SECOND = 1_000_000_000


def collect(directory: Path) -> Story:
    """The story of the run in `directory`, as far as it has come. RunError if it is no run."""
    info = load_info(directory)
    record = _Record()
    try:
        with open_store(directory) as store:
            record.read(store)
    except HistoryError as error:
        record.warnings.append(f"the history cannot be read to its end: {error}")
    state, how = run_state(directory, info)
    reader = RunReader(directory)
    failed = how is not None and how.status and how.signal is None
    raised = uncaught(directory, info, how.status) if how is not None and failed else None
    end = _output_end(reader) if how is not None and how.status else b""
    evidence = record.evidence(how)
    if raised is not None:
        evidence = replace(evidence, raised=raised.sentence(info.cwd))
    steps = sum(mode.steps for mode in (*record.modes, *record.evaluations))
    return Story(
        directory=str(directory),
        info=info,
        exit=how,
        state=state,
        evidence=evidence,
        findings=tuple(findings(evidence)),
        evaluations=tuple(record.evaluations),
        steps=steps,
        calls=record.calls,
        bin_ns=record.bin_ns,
        bins=record.bins,
        points=record.devices.points(),
        processes=tuple(record.processes[number] for number in sorted(record.processes)),
        changes=tuple(record.changes),
        pauses=tuple(record.pauses.found),
        pauses_left_out=record.pauses.left_out,
        refusals_left_out=record.pauses.refusals_left_out,
        paused=record.pauses.total(evidence.end_ns),
        paused_alone_ns=record.paused_alone_ns,
        replicas=tuple(record.replicas),
        ranks=tuple(record.ranks),
        stages=tuple(record.stages),
        warnings=tuple(dict.fromkeys(record.warnings)),
        last_output=_last_output(end, raised, reader.info.command_pid),
        raised=last_words(end),
        host=record.devices.host(),
        gpu_absent=record.devices.gpu_absent,
        distributed=record.distributed,
        dropped=record.dropped,
        pruned=record.pruned,
        standing=how_it_stands(directory, info, state, how),
        nothing=_nothing(directory, info, how, record) if not steps and not record.calls else None,
    )


@dataclass
class _Record:
    """What the store says of a run; what was read before an error stays."""

    modes: list[ModeFacts] = field(default_factory=list)
    evaluations: list[ModeFacts] = field(default_factory=list)
    batches: list[BatchFacts] = field(default_factory=list)
    replica_facts: list[ReplicaFacts] = field(default_factory=list)
    replicas: list[ReplicaSizes] = field(default_factory=list)
    ranks: list[RankLine] = field(default_factory=list)
    stages: list[StageSizes] = field(default_factory=list)
    devices: Devices = field(default_factory=Devices)
    memory: list[Held] = field(default_factory=list)
    longest: list[LongStep] = field(default_factory=list)
    compared: Comparison | None = None
    processes: dict[int, ProcessFacts] = field(default_factory=dict)
    changes: list[ModeChange] = field(default_factory=list)
    pauses: Pauses = field(default_factory=Pauses)
    paused_alone_ns: int = 0
    """As of the evidence."""
    inputs: tuple[tuple[int | None, int, int], ...] = ()
    warnings: list[str] = field(default_factory=list)
    loaders: list[LoaderStart] = field(default_factory=list)
    spans: dict[int, Span] = field(default_factory=dict)
    """By process, from its first step to its last."""
    spent: dict[str, int] = field(default_factory=dict)
    gaps: tuple[GapRow, ...] = ()
    bin_ns: int = 0
    bins: tuple[Bin, ...] = ()
    process_count: int = 0
    calls: int = 0
    virtual: bool = False
    distributed: bool = False
    dropped: int = 0
    pruned: int = 0

    def read(self, store: Store) -> None:
        """Ask everything of `store`."""
        if store.damaged is not None:
            self.warnings.append(store.damaged)
        self.dropped = store.dropped
        self.pruned = store.pruned
        self._read_events(store)
        window = Window(store)
        layouts = Layouts(shapes := store.shapes(), definitions := _definitions(store))
        self.virtual, self.distributed = layouts.virtual, layouts.distributed
        self.calls = sum(shape.calls for shape in shapes)
        self.process_count = len({*store.processes, *layouts.processes})
        for key, tally in window.by_process.items():
            if tally.first_ns is not None and tally.last_ns is not None:
                first, last = self.spans.get(key.process, (tally.first_ns, tally.last_ns))
                self.spans[key.process] = min(first, tally.first_ns), max(last, tally.last_ns)
        self._read_modes(store, window)
        self.spent, self.gaps = window.spent, tuple(store.gaps(GAPS))
        self._read_bins(store)
        several = self.process_count > 1
        self.replicas = layouts.replicas(several)
        self.batches = batch_facts(shapes, definitions)
        self.replica_facts = replica_facts(shapes, definitions, window.by_process)
        self.stages = layouts.stages(window.by_process)
        if several:
            ranks = [self._rank(process, store, layouts, window) for process in {*store.processes, *layouts.processes}]
            self.ranks = sorted(ranks, key=lambda line: (line.rank is None, line.rank or 0, line.process))
        long = _longest(store, window)
        self.longest = [_named(step, self.inputs) for step in long[:LONGEST]]
        self._compare(window, long)

    def _read_events(self, store: Store) -> None:
        newest: dict[int, Any] = {}
        for event in store.events("process", "mode", "memory", "warning", "loader"):
            data, process = event.data, event.data.get("process")
            if event.kind == "warning" and isinstance(data.get("text"), str):
                self.warnings.append(data["text"])
            elif event.kind == "loader":
                start = _loader_start(data)
                self.loaders += [start] if start is not None else []
            elif type(process) is not int:
                continue
            elif event.kind == "process":
                self.processes[process] = _process_facts(data)
            elif event.kind == "memory":
                newest[process] = data
            elif event.kind == "mode" and len(self.changes) < CHANGES_KEPT:
                change = mode_change(data)
                self.changes += [change] if change is not None else []
        self.memory = held(newest.values())
        self.pauses = pauses_in(store)
        self.inputs = tuple(waits_in(store.events("process", "input")))
        for row in store.device_minutes():
            self.devices.rollup(row)
        for event in store.each_event("device", "host"):
            self.devices.sample(event.kind, event.data)

    def _read_modes(self, store: Store, window: Window) -> None:
        rows = _rows_in_time(store, self._begin_ns, self._last_ns or 0)
        for mode, evaluation in window.modes:
            found = window.figures(mode, evaluation)
            if evaluation:
                self.evaluations.append(mode_facts(found, self.virtual, self.distributed))
            else:
                trained = window.trained(mode)
                own = [(at, tally) for at, name, evaluates, tally in rows if name == mode and evaluates != trained]
                self.modes.append(mode_facts(found, self.virtual, self.distributed, own))

    @property
    def _begin_ns(self) -> int:
        return min((first for first, _ in self.spans.values()), default=0)

    @property
    def _last_ns(self) -> int | None:
        return max((last for _, last in self.spans.values()), default=None)

    def _read_bins(self, store: Store) -> None:
        medians = [mode.median_ns for mode in self.modes if mode.median_ns is not None]
        if self._last_ns is not None:
            self.bin_ns, self.bins = stretches(store, self._begin_ns, self._last_ns, max(medians, default=0))

    def _rank(self, process: int, store: Store, layouts: Layouts, window: Window) -> RankLine:
        sizes, (tally, speed) = layouts.of_process(process), window.of_process(process)
        facts = self.processes.get(process)
        forward = tally.stat(device_series("forward"))
        untimed = next((step.untimed for step in store.steps(1, process=process)), None)
        return RankLine(
            process,
            None if facts is None else facts.rank,
            None if facts is None else facts.world,
            sizes.device,
            sizes.inputs,
            sizes.outputs,
            sizes.calls,
            tally.steps,
            tally.median(STEP),
            speed,
            forward.median,
            None if forward.count else untimed or most_common(layouts.untimed(process)),
        )

    def _compare(self, window: Window, longest: Sequence[LongRow]) -> None:
        devices = next((one.devices for one in self.changes if one.mode == "dp" and one.refused is None), ())
        who = first_with_both(window)
        waits = [(begin, end) for process, begin, end in self.inputs if process == who]
        found = compare_modes(window, who, devices=devices, virtual=self.virtual, longest=longest, waits=waits)
        self.compared = found if len(found.sides) > 1 else None

    def evidence(self, how: ExitInfo | None) -> Evidence:
        """What findings are found from."""
        end = None if how is None or how.by != "supervisor" else int(how.seconds * 1e9)
        # Of a run that goes on, as far as anything of it is known.
        until = max(self._last_ns or 0, self.devices.last_ns) if end is None else end
        paused = together(self.pauses, self.spans, until)
        of_any = any_of(self.pauses, until)
        last = max([end or 0, *(stop for _, stop in of_any)])
        self.paused_alone_ns = waited_ns(of_any, 0, last) - waited_ns(paused, 0, last)
        self.devices.paused = paused
        return Evidence(
            modes=tuple(self.modes),
            batches=tuple(self.batches),
            replicas=tuple(self.replica_facts),
            devices=self.devices.facts(),
            host=self.devices.processors(),
            memory=tuple(self.memory),
            longest=tuple(self.longest),
            inputs=self.inputs,
            spent=accounted(self.spent, until, self._begin_ns) if self.spans else {},
            gaps=self.gaps,
            loaders=tuple(self.loaders),
            compared=self.compared,
            processes=self.process_count,
            last_step_ns=self._last_ns,
            end_ns=end,
            paused_ns=waited_ns(paused, 0, last),
            paused_after_ns=waited_ns(paused, self._last_ns or 0, last),
        )


def _process_facts(data: Mapping[str, Any]) -> ProcessFacts:
    """What a `process` record says; its number must be one."""
    rank, world, pid = (whole_in(data, key) for key in ("rank", "world", "pid"))
    return ProcessFacts(data["process"], rank, world, pid, text_in(data, "python"), text_in(data, "torch"))


def _loader_start(data: Mapping[str, Any]) -> LoaderStart | None:
    """What a `loader` record says; None if it does not say of which process, when and how long."""
    process, at, took = whole_in(data, "process"), ns_in(data, "t_s"), ns_in(data, "iter_s")
    if process is None or at is None or took is None:
        return None
    return LoaderStart(process, at, took, whole_in(data, "workers"), data.get("persistent") is True)


def _definitions(store: Store) -> dict[int, dict[int, Any]]:
    return {ring.process: store.definitions(ring.process) for ring in store.rings.values()}


def _rows_in_time(store: Store, begin_ns: int, end_ns: int) -> list[tuple[int, str, bool, Tally]]:
    """Start, mode, whether it evaluates, and tally of all settled steps in order of time, in stretches of one width."""
    seconds = (end_ns - begin_ns) / _SECOND
    width = max((width for width in WIDTHS if width * THIRDS <= seconds), default=1)
    everybody = ALL if len(store.processes) > 1 else None
    rows = store.tally_rows(0, END, process=everybody, finest=width, widest=width)
    return [(at, key.mode, bool(key.kind & 1), tally) for at, _, key, tally in rows if not key.kind & SETTLING]


def _longest(store: Store, window: Window) -> list[LongRow]:
    """The longest steps that the figures are of, deleted ones too, the longest first."""
    found: list[LongRow] = []
    for mode, evaluation in window.modes:
        if not evaluation:
            apart = False if window.trained(mode) else None
            found += store.longest(LONGEST, mode=mode, evaluation=apart)
            found += store.longest_deleted(LONGEST, mode=mode, evaluation=apart)
    return sorted(found, key=lambda step: -step.wall_ns)


def _named(row: LongRow, inputs: Sequence[tuple[int | None, int, int]]) -> LongStep:
    """A long step with the phase that took most of it; one that was mostly a wait for input is called so."""
    spans = [(begin, end) for process, begin, end in inputs if process == row.process]
    begin, end = row.start_ns, row.start_ns + row.wall_ns
    phase: str | None
    if is_wait(spans, begin, end):
        phase, took = INPUT, waited_ns(spans, begin, end)
    else:
        phase = max(row.phases, key=lambda name: row.phases[name], default=None)
        took = 0 if phase is None else row.phases[phase]
    return LongStep(row.process, row.step, row.mode, begin, row.wall_ns, phase, took)


def _nothing(directory: Path, info: RunInfo, how: ExitInfo | None, record: _Record) -> str:
    return why_nothing(directory, info, how, record.warnings) or "the command was not started"


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
