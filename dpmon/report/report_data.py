"""Reads a run's directory into a ReportData. Every metric comes from a query of the run's store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dpmon.model.active_processes import ended_processes
from dpmon.model.findings.all_findings import find_all
from dpmon.model.findings.finding import Finding
from dpmon.model.run_analysis import EVERYTHING, RunAnalysis, Selection
from dpmon.report.health import Health, read_health
from dpmon.run.activities import iter_ring_activities, nothing_traced_reason
from dpmon.run.failure_cause import find_first_failure
from dpmon.run.process_notes import READ_BYTES, UncaughtException, trim_launcher_lines
from dpmon.run.run_directory import ExitInfo, RunInfo, load_info, stop_requested_unix
from dpmon.run.run_reader import RunReader
from dpmon.run.safe_files import read_tail
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store

MAX_OUTPUT_LINES = 12
_TAIL_BYTES = 16384


@dataclass(frozen=True)
class ReportData:
    """The data of a report: the analysis of a run, and what its directory says about it."""

    directory: str
    run_info: RunInfo
    health: Health
    outcome: str
    """The sentence of `health`."""
    run: RunAnalysis
    findings: Sequence[Finding]
    warnings: Sequence[str]
    untraced_reason: str | None
    """Why there is no step and no call."""
    last_output: Sequence[str]
    """The last lines of the script's output (of its stderr in a headless run), if it failed."""

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.health.end is not None


@contextmanager
def open_report_data(directory: Path) -> Iterator[ReportData]:
    """Open the data of the run in `directory`, so far: facts are read when a report needs them.

    Raises RunError if it is no run, HistoryError if it is damaged.
    """
    run_info, health, stop_requested = load_info(directory), read_health(directory), stop_requested_unix(directory)
    exit_info, failure, output_tail = health.exit_info, None, b""
    if health.end == "failed" and exit_info is not None:
        failure = find_first_failure(directory, run_info, exit_info.status)
    exception = None if failure is None else failure.exception
    with open_store(directory) as store:
        run = analyze_run(
            store,
            directory,
            exit_info,
            stop_requested_ns=None if stop_requested is None else int((stop_requested - run_info.started_unix) * 1e9),
            death=None if failure is None or failure.rank_exit is None else failure.rank_exit.text,
            raised=None if exception is None else exception.sentence(run_info.cwd),
        )
        warnings, untraced_reason = list(dict.fromkeys(warning.text for warning in run.announced.warnings)), None
        if not run.steps and not run.calls:
            untraced_reason = nothing_traced_reason(directory, run_info, exit_info, run.announced.reasons)
            if not untraced_reason:
                untraced_reason = f"the command {'has not started yet' if exit_info is None else 'was not started'}"
        if exit_info is not None and exit_info.status:
            with suppress(OSError):
                output_tail = read_tail(RunReader(directory).output_paths[-1], READ_BYTES)
        yield ReportData(
            str(directory),
            run_info,
            health,
            health.sentence(time.time() - run_info.started_unix),
            run,
            find_all(run),
            warnings,
            untraced_reason,
            _last_output_lines(output_tail, exception, run_info.command_pid),
        )


def analyze_run(
    store: Store,
    directory: Path,
    exit_info: ExitInfo | None,
    stop_requested_ns: int | None = None,
    death: str | None = None,
    raised: str | None = None,
    selection: Selection = EVERYTHING,
) -> RunAnalysis:
    """Return the analysis of the run in `directory`. `exit_info`: how it ended; None while it runs, or if unknown."""
    with closing(RunReader(directory)) as reader:
        ended, start_ns = ended_processes(reader.activities()), reader.info.start_ns
    end_ns = None if exit_info is None or exit_info.by != "supervisor" else int(exit_info.seconds * 1e9)
    run = RunAnalysis(
        store, selection, ended, end_ns=end_ns, stop_asked_ns=stop_requested_ns, death=death, raised=raised
    )
    rings = iter_ring_activities(directory)
    run.last_times = {ring.process: (ns - start_ns, ring.last_loop_end_ns() - start_ns) for ring, _, ns in rings}
    return run


def _last_output_lines(
    output_tail: bytes, exception: UncaughtException | None, command_pid: int | None
) -> tuple[str, ...]:
    """Return the last lines of `output_tail`, the end of the script's output, without lines of launchers."""
    lines = output_tail[-_TAIL_BYTES:].decode("utf-8", "replace").split("\n")
    # A carriage return restarts the line, so only the last state of a progress bar is shown.
    visible_lines = [line.rstrip("\r").split("\r")[-1] for line in lines]
    kept_lines = [line for line in trim_launcher_lines(visible_lines, exception, command_pid) if line.strip()]
    return tuple(kept_lines[-MAX_OUTPUT_LINES:])
