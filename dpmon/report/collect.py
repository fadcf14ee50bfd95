"""Reads a run's directory into a Story. Every figure comes from a query of the run's store."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from dpmon.model.findings import findings
from dpmon.model.history import stretches
from dpmon.model.run_facts import RunFacts
from dpmon.model.state import ended_of
from dpmon.report.story import Story
from dpmon.run.activities import describe_stall, why_nothing
from dpmon.run.condition import run_state
from dpmon.run.files import read_tail
from dpmon.run.first_failure import failure
from dpmon.run.notes import Uncaught, last_lines
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, load_info, stop_asked_unix
from dpmon.store.opened import open_store
from dpmon.store.queries import Store
from dpmon.store.store_at import StoreAt
from dpmon.store.tables import HistoryError
from dpmon.text.traceback_line import READ_BYTES, clean_traceback_line

LINES_KEPT = 12
CHANGES_KEPT = 1000
_TAIL_BYTES = 16384


def collect(directory: Path) -> Story:
    """The story of the run in `directory`, up to now. Raises RunError if it is not a run."""
    info = load_info(directory)
    state, how = run_state(directory, info)
    story = Story(str(directory), info, how, state)
    asked = stop_asked_unix(directory)
    try:
        with open_store(directory) as store:
            facts = facts_of(store, directory, how)
            _read(story, facts, None if asked is None else int((asked - info.started_unix) * 1e9))
    except HistoryError as error:
        story.warnings.append(f"the history cannot be read to its end: {error}")
    reader = RunReader(directory)
    failed = how is not None and how.status and how.signal is None and not how.stopped
    why = failure(directory, info, how.status) if how is not None and failed else None
    raised = None if why is None else why.raised
    end = output_end(reader) if how is not None and how.status else b""
    story.standing = describe_stall(directory, info, state, how)
    death = None if why is None or why.death is None else why.death.text
    story.evidence = replace(story.evidence, stall=story.standing, death=death)
    story.findings = tuple(findings(story.evidence))
    story.steps = sum(mode.all_steps for mode in (*story.evidence.modes, *story.evaluations))
    story.warnings = list(dict.fromkeys(story.warnings))
    story.last_output = _last_output(end, raised, reader.info.command_pid)
    story.raised = clean_traceback_line(end)
    if not story.steps and not story.calls:
        story.nothing = why_nothing(directory, info, how, story.warnings) or "the command was not started"
    return story


def facts_of(store: Store, directory: Path, how: ExitInfo | None) -> RunFacts:
    """The facts of the run in `directory`. `how`: how it ended; None while it runs, or if unknown."""
    with closing(RunReader(directory)) as reader:
        ended = ended_of(reader.activities())
    end_ns = None if how is None or how.by != "supervisor" else int(how.seconds * 1e9)
    return RunFacts(StoreAt(store), ended, end_ns)


def _read(story: Story, facts: RunFacts, stop_asked_ns: int | None) -> None:
    """Fill a story with the facts of its run."""
    store, events, layouts = facts.store, facts.announced, facts.layouts
    story.warnings = [*([] if store.damaged is None else [store.damaged]), *(one.text for one in events.warnings)]
    story.dropped, story.pruned = store.dropped, store.pruned
    story.processes = [events.info[number] for number in sorted(events.info)]
    story.changes = list(events.changes[:CHANGES_KEPT])
    story.open_calls = facts.open_calls
    story.calls, story.distributed = layouts.all_calls + facts.open_calls, layouts.distributed
    story.evaluations = facts.evaluations
    story.evidence = facts.evidence(stop_asked_ns)
    if facts.last_step_ns is not None:
        medians = [mode.median_ns for mode in facts.modes if mode.median_ns is not None]
        shown = {(mode, evaluation): facts.shown(mode, evaluation) for mode, evaluation in facts.window.modes}
        begin_ns, end_ns = facts.first_step_ns, facts.last_step_ns
        story.bin_ns, story.bins = stretches(store, begin_ns, end_ns, max(medians, default=0), shown)
    story.replicas = layouts.replicas(len(facts.processes) > 1)
    story.stages = layouts.stages(facts.window.by_process)
    story.ranks = facts.ranks
    devices = facts.devices
    story.points, story.host, story.gpu_absent = devices.points(), devices.host(facts.paused), devices.gpu_absent
    pauses = facts.pauses
    story.pauses, story.pauses_left_out = pauses.found, pauses.left_out
    story.refusals_left_out = pauses.refusals_left_out
    story.paused = pauses.total(facts.end_ns)
    story.paused_alone_ns = facts.paused_alone_ns


def output_end(reader: RunReader) -> bytes:
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
