"""The commands for existing runs: attach, ls, stop, report, export, keep, rm."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, NamedTuple

from dpmon.cli.launch import has_screen, open_json_target
from dpmon.cli.messages import print_closing_summary, print_message
from dpmon.run import proc, retention
from dpmon.run.lifecycle import is_live, may_be_live_elsewhere, needs_supervisor, run_state
from dpmon.run.output_target import open_replacement, utf8_stdout
from dpmon.run.retention import is_protected
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import JOB, find_run, list_runs, newest_run, short_name
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.supervise.foreground_guard import poll_in_background
from dpmon.supervise.start_supervisor import ensure_supervisor
from dpmon.text.cells import encode_for_stream, supports_color, truncate
from dpmon.text.formatting import format_clock, format_compact, format_count_with_noun, node_count_prefix

if TYPE_CHECKING:
    from dpmon.report.document import Document
    from dpmon.store.store_queries import Store

WIDTH_NO_TERMINAL, WIDEST = 80, 120
"""Width of a report without a terminal, and its largest width on a terminal."""
_LAST_OUTPUT = 4096
HEAD = ("NAME", "STATE", "AGE", "TIME", "STEPS", "SAMPLES/S", "EXIT", "COMMAND")
"""The columns of `ls`."""
_COMMAND_CELLS = 12
"""Fewest cells of a command in a list for a terminal."""


def attach(options: argparse.Namespace) -> int:
    """Show a run again on a screen; without a terminal, follow its output and print its summary."""
    return attach_to_directory(newest_run(is_live) if options.run is None else find_run(options.run), options)


def attach_to_directory(directory: Path, options: argparse.Namespace, machines: Sequence[Sequence[str]] = ()) -> int:
    """The same for a run that was found already. `machines`: see start_supervisor.SupervisorTakeover."""
    info, how = load_info(directory), load_exit(directory)
    if may_be_live_elsewhere(directory, info, how):
        # This machine cannot see the run's processes or the other machine's clock, so the run would look finished.
        raise RunError(f"{directory.name} runs on another machine; attach to it there (dpmon report also works here)")
    if info.nodes and not machines and needs_supervisor(directory, info, how):
        raise RunError(
            f"nothing is recorded for {directory.name} any more: name its machines again, as in"
            " dpmon attach --host gpu-1 (dpmon report also works as it is)"
        )
    with poll_in_background(ensure_supervisor(directory, machines).start_if_needed):
        return _attach_headless(directory, options)


def _attach_headless(directory: Path, options: argparse.Namespace) -> int:
    from dpmon.store.store_opening import is_readable

    readable = is_readable(directory)
    if options.headless or options.json is not None or not has_screen():
        from dpmon.cli.headless import HeadlessRun

        lines = open_json_target(options.json)
        follower = HeadlessRun(RunReader(directory), keep=_LAST_OUTPUT, lines=lines)
        if load_exit(directory) is None and lines != "stderr":
            follower.print_message("the output of the run follows; Ctrl-C leaves, and the training goes on")
        how = follower.run_until_end()
        return print_closing_summary(directory, how, None if lines == "stderr" else follower.print_message)
    info = RunReader(directory).info
    from dpmon.ui.app import run_screen

    refresh = options.refresh or options.settings.refresh or info.refresh
    was_over = load_exit(directory) is not None
    settings = options.settings
    plays = was_over and readable
    if run_screen(directory, refresh=refresh, theme=settings.theme, alert=settings.alert, playback=plays) == "left":
        print_message(f"the training goes on; back to it: dpmon attach {short_name(info)}")
        return 0
    return print_closing_summary(directory, load_exit(directory), print_message, brief=was_over)


def stop(options: argparse.Namespace) -> int:
    """Stop a run; return 0 when it is over, 1 if it could not be stopped."""
    from dpmon.run.run_signals import NOTHING_RUNS, STOPPED_BY, stop_run, wait_for_record

    directory = find_run(options.run, is_live=is_live)
    how = load_exit(directory)
    line = ""
    for line in stop_run(directory):
        if line == NOTHING_RUNS and how is not None:
            status = "not known" if how.status is None else how.status
            line = f"{directory.name} is over (exit status {status})"
        elif line.startswith(STOPPED_BY):
            line = f"{line}: {short_name(load_info(directory))}"
        print(sanitize_line(line), flush=True)
    ensure_supervisor(directory)
    if line.startswith(STOPPED_BY):
        wait_for_record(directory)
    return 1 if "cannot be stopped" in line else 0


def export(options: argparse.Namespace) -> int:
    """Write a run's records to a file or to standard output."""
    if options.follow:
        from dpmon.export.row_stream import stream_rows

        of_job = options.rollups and options.run.startswith(JOB)
        directory = _find_run_of_job(options.run.removeprefix(JOB)) if of_job else find_run(options.run)
        if options.rollups:
            # Slurm sends SIGTERM at the end of a job, before the last rows are sent. This process ignores it, and ends
            # with its input. It sets a handler, because its children would inherit SIG_IGN.
            signal.signal(signal.SIGTERM, lambda *_: None)
        # An exporter with `rollups` is the arm of `attach` on another machine; any other one only reads.
        with poll_in_background(ensure_supervisor(directory).start_if_needed) if options.rollups else nullcontext():
            stream_rows(directory, options.start, rollups=options.rollups)
        return 0
    from dpmon.export import export as write

    write(find_run(options.run), options.format, options.output, options.kind)
    return 0


def _find_run_of_job(job: str) -> Path:
    """The newest run of a job on this machine; `job`: such as "slurm:12.0". RunError if there is none."""
    from dpmon.errors import HistoryError
    from dpmon.store.store_opening import open_store

    for directory, info in reversed(list_runs()):
        if not info.nodes and info.host in ("", proc.host_name()):
            with suppress(HistoryError, RunError), open_store(directory) as store:
                found, _ = store.job()
                if found is not None and f"{found['by']}:{found['id']}" == job:
                    return directory
    raise RunError(f"there is no run of job {job}")


# ------------------------------------------------------------------------------------------------ report


def report(options: argparse.Namespace) -> int:
    """Print the report, or write it to the chosen file."""
    from dpmon.report.html_page import render_page
    from dpmon.report.report_data import collect_report_data
    from dpmon.report.report_json import report_as_json
    from dpmon.report.sections import build_document

    directory, output = find_run(options.run), options.output
    story = collect_report_data(directory)
    if options.html:
        text = render_page(build_document(story))
        output = output or f"{short_name(load_info(directory))}.html"
    elif options.json:
        text = to_safe_json(report_as_json(story), indent=1) + "\n"
    else:
        text = render_document(build_document(story), output)
    write_output(text, output, say=options.html)
    return 0


def write_output(text: str, output: str | None, *, say: bool = False) -> None:
    """Write to a file, or to standard output (None or "-"). `say`: print the file's name. RunError if that fails."""
    if output in (None, "-"):
        with utf8_stdout() as out:
            out.write(text)
        return
    path = Path(output)
    try:
        with open_replacement(path) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
    if say:
        print(path)


def render_document(report: Document, output: str | None) -> str:
    """A document as text; on a terminal with its width and colors."""
    from dpmon.report.plain_text import text_lines

    if output is not None or not sys.stdout.isatty():
        return "\n".join(text_lines(report, WIDTH_NO_TERMINAL)) + "\n"
    lines = text_lines(report, min(get_terminal_size((WIDTH_NO_TERMINAL, 24)).columns, WIDEST))
    if supports_color(sys.stdout, os.environ):
        lines = [f"\x1b[1m{line}\x1b[0m" if line and not line.startswith(" ") else line for line in lines]
    return encode_for_stream("\n".join(lines) + "\n", sys.stdout)


# ------------------------------------------------------------------------------------------------ ls


def ls(options: argparse.Namespace) -> int:
    """List the runs, the newest last: name, state, age, duration, steps, samples/s, exit status, command.

    With a script, show the figures of its runs instead.
    """
    if options.script is not None:
        from dpmon.report import drift

        found = drift.read_run_trend(options.script)
        text = (
            to_safe_json(drift.trend_as_json(found), indent=1) + "\n"
            if options.json
            else render_document(drift.build_document(found), None)
        )
        write_output(text, None)
        return 0
    unreadable: list[str] = []
    listed = list_runs(unreadable)
    if unreadable:
        more = f" (and {len(unreadable) - 1:,} more)" if len(unreadable) > 1 else ""
        print_message(f"not listed: {unreadable[0]}{more}")
    if options.json:
        for directory, info in listed:
            print(
                to_safe_json(_make_listed_run(directory, info)._asdict()), flush=True
            )  # a reader may not wait for all
        return 0
    runs = [_make_listed_run(directory, info) for directory, info in listed]
    print_table([HEAD, *(run.table_cells() for run in runs)], [[], *(run.detail_lines() for run in runs)])
    return 0


def print_table(rows: Sequence[tuple[str, ...]], below: Sequence[Sequence[str]]) -> None:
    """Print the rows of a list of runs in columns, and the lines below each; the last cell is cut at a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    room = max(get_terminal_size().columns - sum(widths) - 2 * len(widths), _COMMAND_CELLS)
    for row, lines in zip(rows, below, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        command = truncate(row[-1], room) if sys.stdout.isatty() else row[-1]
        print("  ".join([*cells, encode_for_stream(command, sys.stdout)]).rstrip())
        for line in lines:
            print(f"    {sanitize_line(line)}")


class ListedRun(NamedTuple):
    """One run, with the members of `ls --json`."""

    id: str
    name: str
    state: str
    kept: bool
    started_unix: float
    seconds: float
    steps: int | None
    """Steps of the process with the most: steps of ranks are not added up, because ranks step together. None if
    unknown, also while the end of a step is not known."""
    evaluation_steps: int | None
    open_calls: int | None
    """Calls that are not divided into steps yet, in processes without a step."""
    samples_per_s: float | None
    status: int | None
    signal: str | None
    unknown: str | None
    cause: str | None
    standing: str | None
    job: dict[str, str] | None
    """What is equal in the runs of one job on several machines: `by` and `id`."""
    node: int | None
    """The number of this machine in the job."""
    machines: list[str]
    """The machines that a mirror reads; empty for a run of this machine."""
    command: list[str]
    directory: str

    def table_cells(self) -> tuple[str, ...]:
        """The cells of the list."""
        evaluations = f" ({self.evaluation_steps} evaluation)" if self.evaluation_steps else ""
        counted = "-" if self.steps is None else f"{self.steps}{evaluations}"
        if self.steps is None and self.open_calls:
            counted = format_count_with_noun(self.open_calls, "call")
        return (
            sanitize_line(self.name),
            self.state + (", kept" if self.kept else ""),
            _format_age(time.time() - self.started_unix),
            format_clock(int(self.seconds * 1e9)),
            counted,
            format_compact(self.samples_per_s),
            "-" if self.status is None else sanitize_line(self.signal or self.status),
            sanitize_line(node_count_prefix(self.machines) + " ".join(self.command)),
        )

    def detail_lines(self) -> list[str]:
        """The lines below the row: the cause of its end, and where it stalled.

        A launcher that the user stops ends with an exception of its own, which is no fault.
        """
        cause = None if self.state == "stopped" else self.cause
        return [text for text in (cause, self.standing) if text is not None]


def _make_listed_run(directory: Path, info: RunInfo) -> ListedRun:
    state, how = run_state(directory, info)
    from dpmon.errors import HistoryError
    from dpmon.report.health import health_from_store
    from dpmon.store.store_opening import open_store  # imported here because it loads sqlite

    live, now, counts, job, node = state == "running", None, _NO_STEPS, None, None
    with suppress(HistoryError, RunError), open_store(directory) as store:
        counts = _query_step_counts(store)
        job, node = store.job()
        now = health_from_store(directory, store) if live else None
    steps, evaluation_steps, open_calls, samples_per_s, standing = counts
    if state == "finished":
        standing = None  # whatever it was, it went on
    if live:
        now = now or health_from_store(directory, None)
        state, standing = now.state, now.reason
    seconds = max(time.time() - info.started_unix, 0.0) if how is None else how.seconds
    words = [*([] if info.python is None else [info.script]), *info.arguments]
    end = (None, None, None, None) if how is None else (how.status, how.signal, how.unknown, how.cause)
    return ListedRun(
        info.id, short_name(info), state, is_protected(directory), info.started_unix, seconds, steps, evaluation_steps,
        open_calls, samples_per_s, *end, standing, job, node, list(info.nodes), words, str(directory),
    )  # fmt: skip


def keep(options: argparse.Namespace) -> int:
    """Protect a run from automatic deletion, or end the protection."""
    directory = find_run(options.run)
    retention.set_protected(directory, options.kept)
    print(f"{directory.name} is {'kept until you delete it' if options.kept else 'no longer protected from deletion'}")
    return 0


def rm(options: argparse.Namespace) -> int:
    """Delete finished runs; delete none of them if an argument is ambiguous or names a protected run."""
    directories = dict.fromkeys(find_run(run, unique=True) for run in options.runs)
    for directory in directories:
        if is_protected(directory):
            raise RunError(f"{directory.name} is kept: run `dpmon keep --not {directory.name}` first")
    for directory in directories:
        retention.delete_run(directory, load_info(directory))
        print(f"{directory.name} is deleted")
    return 0


_Counts = tuple[int | None, int | None, int | None, float | None, str | None]
_NO_STEPS: _Counts = (None, None, None, None, None)


def _query_step_counts(store: Store) -> _Counts:
    """Steps, evaluation steps, open calls, samples/s, and the stall in which the run ended, if it did.

    None if the record has no rings.
    """
    from dpmon.model.recorded_stalls import final_stall
    from dpmon.model.run_events import TEXTS_READ, parse_stalls
    from dpmon.store.step_stats import StatsWindow

    most = max(store.rings.values(), key=lambda row: row.steps, default=None)
    if most is None:
        return _NO_STEPS
    window = StatsWindow(store)
    rate = window.rate()
    calls = store.open_calls
    evaluations, samples = window.evaluation_steps(most.process), None if rate is None else rate.samples_per_s
    stalls = parse_stalls(event.data for event in store.events("stall", limit=TEXTS_READ))
    last_ns = max((step.start_ns + step.wall_ns for step in store.steps(1)), default=0)
    stall = final_stall(stalls, last_ns)
    standing = None if stall is None else f"stalled: {stall.text}"
    return None if calls and not most.steps else most.steps, evaluations, calls, samples, standing


def _format_age(seconds: float) -> str:
    if seconds < -60:
        return "-"  # the clock was set back after the start
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
