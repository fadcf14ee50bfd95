"""Reads a run's directory into a ReportData. Every figure comes from a query of the run's store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dpmon.model.active_processes import ended_processes
from dpmon.model.findings.all_findings import find_all
from dpmon.model.findings.finding import Finding
from dpmon.model.run_analysis import RunAnalysis
from dpmon.run.activities import nothing_traced_reason
from dpmon.run.failure_cause import find_first_failure
from dpmon.run.lifecycle import run_state
from dpmon.run.process_notes import READ_BYTES, UncaughtException, clean_traceback_line, trim_launcher_lines
from dpmon.run.run_directory import ExitInfo, RunInfo, load_info, stop_requested_unix
from dpmon.run.run_reader import RunReader
from dpmon.run.safe_files import read_tail
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store

LINES_KEPT = 12
_TAIL_BYTES = 16384


@dataclass(frozen=True)
class ReportData:
    """A report on one run: its facts, and what its directory says about it."""

    directory: str
    info: RunInfo
    exit: ExitInfo | None
    state: str
    """A state of `dpmon.run.lifecycle.run_state`."""
    facts: RunAnalysis
    findings: Sequence[Finding]
    warnings: Sequence[str]
    nothing: str | None
    """Why there is no step and no call."""
    last_output: Sequence[str]
    """The last lines of the script's output (of its stderr in a headless run), if it failed."""
    raised: str | None
    """The line that names the exception in the last traceback; None if the script did not fail with one."""


def collect_report_data(directory: Path) -> ReportData:
    """The story of the run in `directory`, up to now. Raises RunError if it is not a run, HistoryError if damaged."""
    info = load_info(directory)
    state, how = run_state(directory, info)
    asked = stop_requested_unix(directory)
    failed = how is not None and how.status and how.signal is None and not how.stopped
    why = find_first_failure(directory, info, how.status) if how is not None and failed else None
    with open_store(directory) as store:
        facts = analyze_run(
            store,
            directory,
            how,
            stop_asked_ns=None if asked is None else int((asked - info.started_unix) * 1e9),
            death=None if why is None or why.rank_exit is None else why.rank_exit.text,
            raised=None if why is None or why.exception is None else why.exception.sentence(info.cwd),
        )
        facts.query_everything()
    damaged, nothing = [] if store.damaged is None else [store.damaged], None
    warnings = list(dict.fromkeys([*damaged, *(one.text for one in facts.announced.warnings)]))
    if not facts.steps and not facts.calls:
        nothing = nothing_traced_reason(directory, info, how, [*damaged, *facts.announced.reasons])
        nothing = nothing or f"the command {'has not started yet' if how is None else 'was not started'}"
    reader = RunReader(directory)
    end = read_output_tail(reader) if how is not None and how.status else b""
    last = _last_output_lines(end, None if why is None else why.exception, reader.info.command_pid)
    raised = clean_traceback_line(end)
    return ReportData(str(directory), info, how, state, facts, find_all(facts), warnings, nothing, last, raised)


def analyze_run(
    store: Store,
    directory: Path,
    how: ExitInfo | None,
    stop_asked_ns: int | None = None,
    death: str | None = None,
    raised: str | None = None,
) -> RunAnalysis:
    """The facts of the run in `directory`. `how`: how it ended; None while it runs, or if unknown."""
    with closing(RunReader(directory)) as reader:
        ended = ended_processes(reader.activities())
    end_ns = None if how is None or how.by != "supervisor" else int(how.seconds * 1e9)
    return RunAnalysis(store, ended, end_ns, stop_asked_ns=stop_asked_ns, death=death, raised=raised)


def read_output_tail(reader: RunReader) -> bytes:
    """The end of the script's output (of its stderr, if that has a file); empty if it cannot be read."""
    try:
        return read_tail(reader.output_paths[-1], READ_BYTES)
    except OSError:
        return b""


def _last_output_lines(end: bytes, raised: UncaughtException | None, command: int | None) -> tuple[str, ...]:
    """The last lines of the script's output. `end`: its last bytes. `command`: the process id of the command."""
    lines = end[-_TAIL_BYTES:].decode("utf-8", "replace").split("\n")
    # A carriage return starts the line again, so only the last state of a progress bar is shown.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return tuple([line for line in trim_launcher_lines(shown, raised, command) if line.strip()][-LINES_KEPT:])
