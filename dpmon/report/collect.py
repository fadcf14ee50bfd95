"""Reads a run's directory into a Story. Every figure comes from a query of the run's store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmon.model.announced import mode_change
from dpmon.model.compare import Comparison, compare_modes, first_with_both
from dpmon.model.evidence import LoaderStart, LongStep, ModeFacts
from dpmon.model.findings import findings
from dpmon.model.inputs import INPUT, is_wait, waited_ns
from dpmon.model.layouts import Layouts, most_common
from dpmon.model.members import SECOND, ns_in, text_in, whole_in
from dpmon.model.memory import held
from dpmon.model.replica_facts import batch_facts, replica_facts
from dpmon.model.stragglers import RankTimes
from dpmon.record.schema import EVALUATION, SETTLING, STEP, device_series
from dpmon.report.device_totals import Devices
from dpmon.report.mode_facts import mode_facts
from dpmon.report.pauses import Pauses, Span, any_of, pauses_in, together
from dpmon.report.shown import Shown
from dpmon.report.story import ProcessFacts, RankLine, Story
from dpmon.report.stretches import stretches
from dpmon.report.waits import waits_in
from dpmon.report.whole_communication import communication_of
from dpmon.run.activities import describe_stall, why_nothing
from dpmon.run.condition import run_state
from dpmon.run.files import read_tail
from dpmon.run.first_failure import failure
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, load_info, stop_asked_unix
from dpmon.run.uncaught import Uncaught, last_lines
from dpmon.store.answers import LongRow
from dpmon.store.figures import Figures
from dpmon.store.opened import open_store
from dpmon.store.queries import Store
from dpmon.store.sums import END
from dpmon.store.tables import HistoryError
from dpmon.store.tally import WIDTHS, Tally
from dpmon.store.window import Window, accounted
from dpmon.text.traceback_line import READ_BYTES, clean_traceback_line

LINES_KEPT = 12
CHANGES_KEPT = 1000
LONGEST = 64
"""Most long steps to read per mode, and most to pass to the findings."""
GAPS = 10_000
LEAST_STRETCHES = 60
"""Fewest stretches into which a run of a minute or more is cut to find its first and its last third."""
_TAIL_BYTES = 16384


def collect(directory: Path) -> Story:
    """The story of the run in `directory`, up to now. Raises RunError if it is not a run."""
    story = Story(str(directory), load_info(directory))
    builder = _StoryBuilder(story, stop_asked_unix(directory))
    try:
        with open_store(directory) as store:
            builder.read(store, directory)
    except HistoryError as error:
        story.warnings.append(f"the history cannot be read to its end: {error}")
    story.state, story.exit = run_state(directory, story.info)
    builder.finish(story.exit)
    info, how = story.info, story.exit
    reader = RunReader(directory)
    failed = how is not None and how.status and how.signal is None and not how.stopped
    why = failure(directory, info, how.status) if how is not None and failed else None
    raised = None if why is None else why.raised
    end = _output_end(reader) if how is not None and how.status else b""
    story.standing = describe_stall(directory, info, story.state, how)
    pids = {process.process: process.pid for process in story.processes if process.pid is not None}
    death = None if why is None or why.death is None else why.death.text
    story.evidence = replace(story.evidence, stall=story.standing, pids=pids, death=death)
    story.findings = tuple(findings(story.evidence))
    story.steps = sum(mode.all_steps for mode in (*story.evidence.modes, *story.evaluations))
    story.warnings = list(dict.fromkeys(story.warnings))
    story.last_output = _last_output(end, raised, reader.info.command_pid)
    story.raised = clean_traceback_line(end)
    if not story.steps and not story.calls:
        story.nothing = why_nothing(directory, info, how, story.warnings) or "the command was not started"
    return story


class _StoryBuilder:
    """Fills a story from the store of its run; keeps whatever was read before an error."""

    def __init__(self, story: Story, stop_asked_unix: float | None) -> None:
        self._story = story
        self._stop_asked_unix = stop_asked_unix
        self._devices = Devices()
        self._pauses = Pauses()
        self._virtual = False
        self._lives: list[tuple[int, int]] = []
        self._spans: dict[int, Span] = {}
        """By process: the time from its first step to its last."""

    def read(self, store: Store, directory: Path) -> None:
        """Read everything that comes from `store`."""
        story = self._story
        if store.damaged is not None:
            story.warnings.append(store.damaged)
        story.dropped, story.pruned = store.dropped, store.pruned
        self._read_events(store)
        window = Window(store)
        shapes = store.shapes()
        layouts = Layouts(shapes, {ring.process: store.definitions(ring.process) for ring in store.rings.values()})
        self._virtual, story.distributed = layouts.virtual, layouts.distributed
        story.calls = sum(shape.calls for shape in shapes)
        processes = {*store.processes, *layouts.processes}
        several = len(processes) > 1
        for key, tally in window.by_process.items():
            if tally.first_ns is not None and tally.last_ns is not None:
                first, last = self._spans.get(key.process, (tally.first_ns, tally.last_ns))
                self._spans[key.process] = min(first, tally.first_ns), max(last, tally.last_ns)
        shown = Shown(store, window, directory)
        modes, others = self._modes(store, window, shown)
        gaps, spent, self._lives = tuple(store.gaps(GAPS)), window.spent, window.lives
        story.evidence = replace(
            story.evidence,
            modes=modes,
            others=others,
            processes=len(processes),
            names=shown.names,
            spent=spent,
            gaps=gaps,
        )
        medians = [mode.median_ns for mode in modes if mode.median_ns is not None]
        if self._last_ns is not None:
            of = {(mode, evaluation): shown.process(mode, evaluation) for mode, evaluation in window.modes}
            story.bin_ns, story.bins = stretches(store, self._begin_ns, self._last_ns, max(medians, default=0), of)
        story.replicas = layouts.replicas(several)
        story.stages = layouts.stages(window.by_process)
        communicated = communication_of(store, window, {one.process: one.rank for one in story.processes})
        times = {one.rank: one for one in communicated.ranks} if communicated is not None else {}
        ranks = [self._rank(process, store, layouts, window, times) for process in (processes if several else ())]
        story.ranks = sorted(ranks, key=lambda line: (line.rank is None, line.rank or 0, line.process))
        long = [step for step in _longest(store, window) if not self._was_stopped_in(step)]
        story.evidence = replace(
            story.evidence,
            batches=tuple(batch_facts(layouts)),
            replicas=tuple(replica_facts(layouts, window.by_process)),
            longest=tuple(_named(step, story.evidence.inputs) for step in long[:LONGEST]),
            compared=self._compared(window, long),
            communication=communicated,
        )

    def _was_stopped_in(self, step: LongRow) -> bool:
        """Whether the user asked the run to stop during this step. Such a step lasts until the process ends."""
        asked = self._stop_asked_unix
        begin = self._story.info.started_unix + step.start_ns / 1e9
        return asked is not None and begin <= asked < begin + step.wall_ns / 1e9

    def _read_events(self, store: Store) -> None:
        story = self._story
        newest: dict[int, Any] = {}
        facts: dict[int, ProcessFacts] = {}
        loaders: list[LoaderStart] = []
        for event in store.events("process", "mode", "memory", "warning", "loader"):
            data, process = event.data, event.data.get("process")
            if event.kind == "warning" and isinstance(data.get("text"), str):
                story.warnings.append(data["text"])
            elif event.kind == "loader":
                start = _loader_start(data)
                loaders += [start] if start is not None else []
            elif type(process) is not int:
                continue
            elif event.kind == "process":
                facts[process] = _process_facts(data)
            elif event.kind == "memory":
                newest[process] = data
            elif event.kind == "mode" and len(story.changes) < CHANGES_KEPT:
                change = mode_change(data)
                story.changes += [change] if change is not None else []
        story.processes = [facts[number] for number in sorted(facts)]
        self._pauses = pauses_in(store)
        inputs = tuple(waits_in(store.events("process", "input")))
        story.evidence = replace(
            story.evidence, memory=tuple(held(newest.values())), loaders=tuple(loaders), inputs=inputs
        )
        for row in store.device_minutes():
            self._devices.rollup(row)
        for event in store.each_event("device", "host"):
            self._devices.sample(event.kind, event.data)

    def _modes(self, store: Store, window: Window, shown: Shown) -> tuple[tuple[ModeFacts, ...], tuple[ModeFacts, ...]]:
        """The figures of the modes without evaluations: of the shown processes, and of the others.

        Figures of evaluations go into the story.
        """
        modes, others = [], []

        def facts(found: Figures, process: int, rows: Sequence[tuple[int, Tally]] = ()) -> ModeFacts:
            whole = sum(window.tally(found.mode, found.evaluation, each).steps for each in store.processes)
            return mode_facts(found, self._virtual, self._story.distributed, rows)._replace(
                process=process,
                who=shown.name(process),
                rank=shown.rank(process),
                other_steps=whole - found.steps,
            )

        for mode, evaluation in window.modes:
            found, process = shown.figures(mode, evaluation), shown.process(mode, evaluation)
            if evaluation:
                self._story.evaluations.append(facts(found, process))
                continue
            trained = window.trained(mode)
            rows = _rows_in_time(store, process, self._begin_ns, self._last_ns or 0)
            own = [(at, tally) for at, name, evaluates, tally in rows if name == mode and evaluates != trained]
            modes.append(facts(found, process, own))
            for each in store.processes:
                if each != process and (other := window.figures(mode, evaluation, each)).steps:
                    others.append(facts(other._replace(rate=found.rate), each))
        return tuple(modes), tuple(others)

    @property
    def _begin_ns(self) -> int:
        return min((first for first, _ in self._spans.values()), default=0)

    @property
    def _last_ns(self) -> int | None:
        return max((last for _, last in self._spans.values()), default=None)

    def _rank(
        self,
        process: int,
        store: Store,
        layouts: Layouts,
        window: Window,
        times: Mapping[int | None, RankTimes],
    ) -> RankLine:
        sizes, (tally, speed) = layouts.of_process(process), window.of_process(process)
        facts = next((each for each in self._story.processes if each.process == process), None)
        forward = tally.stat(device_series("forward"))
        untimed = next((step.untimed for step in store.steps(1, process=process)), None)
        return RankLine(
            process,
            None if facts is None else facts.rank,
            None if facts is None else facts.world,
            *sizes,
            tally.steps,
            tally.median(STEP),
            speed,
            forward.median,
            None if forward.count else untimed or most_common(layouts.untimed(process)),
            None if facts is None else times.get(facts.rank),
        )

    def _compared(self, window: Window, longest: Sequence[LongRow]) -> Comparison | None:
        devices = next((one.devices for one in self._story.changes if one.mode == "dp" and one.refused is None), ())
        who = first_with_both(window)
        waits = [(begin, end) for process, begin, end in self._story.evidence.inputs if process == who]
        found = compare_modes(window, who, devices=devices, virtual=self._virtual, longest=longest, waits=waits)
        return found if len(found.sides) > 1 else None

    def finish(self, how: ExitInfo | None) -> None:
        """Add the facts that depend on the end of the run."""
        story, devices = self._story, self._devices
        end = None if how is None or how.by != "supervisor" else int(how.seconds * 1e9)
        # A live run is evaluated up to its newest record.
        until = max(self._last_ns or 0, devices.last_ns) if end is None else end
        paused = together(self._pauses, self._spans, until)
        of_any = any_of(self._pauses, until)
        last = max([end or 0, *(stop for _, stop in of_any)])
        devices.paused = paused
        story.evidence = replace(
            story.evidence,
            devices=devices.facts(),
            host=devices.processors(),
            spent=accounted(story.evidence.spent, until, self._lives) if self._spans else {},
            last_step_ns=self._last_ns,
            end_ns=end,
            newest_ns=until,
            paused_ns=waited_ns(paused, 0, last),
            paused_after_ns=waited_ns(paused, self._last_ns or 0, last),
        )
        story.points, story.host, story.gpu_absent = devices.points(), devices.host(), devices.gpu_absent
        story.pauses, story.pauses_left_out = self._pauses.found, self._pauses.left_out
        story.refusals_left_out = self._pauses.refusals_left_out
        story.paused = self._pauses.total(end)
        story.paused_alone_ns = waited_ns(of_any, 0, last) - waited_ns(paused, 0, last)


def _process_facts(data: Mapping[str, Any]) -> ProcessFacts:
    """The content of a `process` record with a number."""
    rank, world, pid = (whole_in(data, key) for key in ("rank", "world", "pid"))
    return ProcessFacts(data["process"], rank, world, pid, text_in(data, "python"), text_in(data, "torch"))


def _loader_start(data: Mapping[str, Any]) -> LoaderStart | None:
    """The content of a `loader` record; None if process, time or duration is missing."""
    process, at, took = whole_in(data, "process"), ns_in(data, "t_s"), ns_in(data, "iter_s")
    if process is None or at is None or took is None:
        return None
    return LoaderStart(
        process,
        at,
        took,
        whole_in(data, "workers"),
        data.get("persistent") is True,
        data.get("pinned") is True,
        whole_in(data, "left_out") or 0,
        (text_in(data, "loader"), whole_in(data, "batches")),
    )


def _rows_in_time(store: Store, process: int, begin_ns: int, end_ns: int) -> list[tuple[int, str, bool, Tally]]:
    """The settled steps of a process by stretch of time, in order: start, mode, whether they are evaluations, tally."""
    seconds = (end_ns - begin_ns) / SECOND
    width = max((width for width in WIDTHS if width * LEAST_STRETCHES <= seconds), default=1)
    rows = store.tally_rows(0, END, process=process, finest=width, widest=width)
    return [(at, key.mode, bool(key.kind & EVALUATION), tally) for at, _, key, tally in rows if not key.kind & SETTLING]


def _longest(store: Store, window: Window) -> list[LongRow]:
    """The longest steps of all modes, including deleted ones but not evaluations, the longest first."""
    found: list[LongRow] = []
    for mode, evaluation in window.modes:
        if not evaluation:
            apart = False if window.trained(mode) else None
            found += store.longest(LONGEST, mode=mode, evaluation=apart)
            found += store.longest_deleted(LONGEST, mode=mode, evaluation=apart)
    return sorted(found, key=lambda step: -step.wall_ns)


def _named(row: LongRow, inputs: Sequence[tuple[int | None, int, int]]) -> LongStep:
    """A long step with the phase that took most of it; INPUT if that was a wait for input."""
    spans = [(begin, end) for process, begin, end in inputs if process == row.process]
    begin, end = row.start_ns, row.start_ns + row.wall_ns
    phase: str | None
    if is_wait(spans, begin, end):
        phase, took = INPUT, waited_ns(spans, begin, end)
    else:
        phase = max(row.phases, key=lambda name: row.phases[name], default=None)
        took = 0 if phase is None else row.phases[phase]
    return LongStep(row.process, row.step, row.mode, begin, row.wall_ns, phase, took)


def _output_end(reader: RunReader) -> bytes:
    """The end of the script's output (of its stderr, if that has a file); empty if it cannot be read."""
    try:
        return read_tail(reader.output_paths[-1], READ_BYTES)
    except OSError:
        return b""


def _last_output(end: bytes, raised: Uncaught | None, command: int | None) -> tuple[str, ...]:
    """The last lines of the script's output. `end`: its last bytes. `command`: the process id of the command."""
    lines = end[-_TAIL_BYTES:].decode("utf-8", "replace").split("\n")
    # A carriage return starts the line again, so only the last state of a progress bar is shown.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return tuple([line for line in last_lines(shown, raised, command) if line.strip()][-LINES_KEPT:])
