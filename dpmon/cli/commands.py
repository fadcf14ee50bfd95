"""The commands for existing runs: attach, ls, stop, report, export, keep, rm."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from operator import attrgetter
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.cli.launch import has_screen, open_json_target, show_screen
from dpmon.cli.messages import print_message, print_unread_warning
from dpmon.record.schema import EVALUATION, TRAINING
from dpmon.run import proc, retention
from dpmon.run.lifecycle import has_succeeded, may_be_live_elsewhere, needs_supervisor, wait_until
from dpmon.run.output_target import open_replacement, utf8_stdout
from dpmon.run.retention import is_protected
from dpmon.run.run_directory import ExitInfo, RunError, RunInfo, load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import JOB, find_live_run, find_run, list_runs, short_name
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.supervise.foreground_guard import poll_in_background
from dpmon.supervise.start_supervisor import ensure_supervisor
from dpmon.text.cells import supports_color, text_for_stream, truncate
from dpmon.text.fact_table import fields_of
from dpmon.text.formatting import (
    format_compact,
    format_count,
    format_count_with_noun,
    format_elapsed,
    format_updates,
)

if TYPE_CHECKING:
    from dpmon.report.document import Document
    from dpmon.report.health import Health
    from dpmon.store.store_queries import Store

WIDTH_NO_TERMINAL, MAX_WIDTH = 80, 120
"""Width of a report without a terminal, and its largest width on a terminal."""
_LAST_OUTPUT_BYTES = 4096
PROFILE_WAIT_S = 60.0
"""Longest wait of `profile` for its steps."""
LIST_HEADERS = ("NAME", "STATE", "AGE", "TIME", "STEPS", "SAMPLES/S", "EXIT", "COMMAND")
"""The columns of `ls`."""
_MIN_COMMAND_CELLS = 12
"""Fewest cells of a command in a list for a terminal."""


def attach(options: argparse.Namespace) -> int:
    """Show a run again on a screen; without a terminal, follow its output and print its summary."""
    return attach_to_directory(find_live_run(options.run), options)


def attach_to_directory(
    directory: Path, options: argparse.Namespace, node_commands: Sequence[Sequence[str]] = ()
) -> int:
    """Attach to the run in this directory. `node_commands`: see start_supervisor.SupervisorTakeover."""
    run_info, exit_info = load_info(directory), load_exit(directory)
    if may_be_live_elsewhere(directory, run_info, exit_info):
        # This machine cannot see the run's processes or the other machine's clock, so the run would look finished.
        raise RunError(f"{directory.name} runs on another node; attach to it there (dpmon report also works here)")
    if run_info.nodes and not node_commands and needs_supervisor(directory, run_info, exit_info):
        raise RunError(
            f"{directory.name} is no longer recorded: name its nodes again, as in"
            " dpmon attach --host gpu-1 (dpmon report works without them)"
        )
    from dpmon.store.store_opening import open_store

    with poll_in_background(ensure_supervisor(directory, node_commands).start_if_needed):
        with open_store(directory):  # raises if the history is damaged, or of another version
            pass
        reader = RunReader(directory)
        if not (options.headless or options.json is not None) and has_screen():
            refresh = options.refresh or options.settings.refresh or reader.info.refresh
            return show_screen(reader, refresh, options.settings.theme)
        from dpmon.cli.headless import HeadlessRun

        json_target = open_json_target(options.json)
        headless_run = HeadlessRun(reader, keep=_LAST_OUTPUT_BYTES, json_target=json_target)
        if reader.exit_info() is None and json_target != "stderr":
            headless_run.print_message("the output of the run follows; Ctrl-C detaches, and training continues")
        return headless_run.run_until_end()


def stop(options: argparse.Namespace) -> int:
    """Stop a run; return 0 when it has ended, 1 if it could not be stopped."""
    from dpmon.run.run_signals import NOTHING_RUNS, STOPPED_BY, stop_run, wait_for_record

    directory = find_live_run(options.run)
    exit_info = load_exit(directory)
    line = ""
    for line in stop_run(directory):
        if line == NOTHING_RUNS and exit_info is not None:
            status = "unknown" if exit_info.status is None else exit_info.status
            line = f"{directory.name} has ended (exit status {status})"
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

        names_job = options.rollups and options.run.startswith(JOB)
        directory = _find_run_of_job(options.run.removeprefix(JOB)) if names_job else find_run(options.run)
        if options.rollups:
            # Slurm sends SIGTERM at the end of a job, before the last rows are sent. This process ignores it and ends
            # with its input. It sets a handler because its children would inherit SIG_IGN.
            signal.signal(signal.SIGTERM, lambda *_: None)
        # With `rollups`, this process serves `attach` on another machine; otherwise it only reads.
        with poll_in_background(ensure_supervisor(directory).start_if_needed) if options.rollups else nullcontext():
            stream_rows(directory, options.start, rollups=options.rollups)
        return 0

    from dpmon.export import export as write_export

    write_export(find_run(options.run), options.format, options.output, options.kind)
    return 0


def _find_run_of_job(job: str) -> Path:
    """Return the newest run of a job on this machine; `job`: such as "slurm:12.0". RunError if there is none."""
    from dpmon.errors import HistoryError
    from dpmon.store.events import read_job
    from dpmon.store.store_opening import open_store

    for directory, run_info in reversed(list_runs()):
        if not run_info.nodes and run_info.host in ("", proc.host_name()):
            with suppress(HistoryError, RunError), open_store(directory) as store:
                run_job, _ = read_job(store)
                if run_job is not None and f"{run_job['by']}:{run_job['id']}" == job:
                    return directory
    raise RunError(f"there is no run of job {job}")


def profile(options: argparse.Namespace) -> int:
    """Let a rank profile some steps; print its trace and its top operators. RunError if there is no profile."""
    from dpmon.report.health import read_run
    from dpmon.report.sentences import profile_sentences
    from dpmon.store.events import read_events

    directory, rank = find_live_run(options.run), options.rank
    ensure_supervisor(directory)
    with closing(RunReader(directory)) as reader:
        if rank is None:
            rank = getattr(read_run(reader, attrgetter("straggler")), "rank", 0)
        request, name = reader.request_profile(rank, options.steps), short_name(reader.info)
        if reader.exit_info() is not None:
            raise RunError(f"{name} has ended")
        if request is None:
            raise RunError(f"{name} has no training process of rank {rank} on this machine")

        def read_reply() -> Mapping[str, Any] | None:
            records = read_run(reader, lambda run: [event.data for event in read_events(run.store, "profile")])
            return next((record for record in records if (record["process"], record["request"]) == request), None)

        wait_until(lambda: read_reply() or reader.exit_info(), PROFILE_WAIT_S, 0.2)
        reader.request_profile(rank, 0)
        failure = {"refused": f"rank {rank} ended no step within {PROFILE_WAIT_S:.0f} s, or the run ended"}
        record = read_reply() or failure
    if "refused" in record:
        raise RunError(f"{name} was not profiled: {record['refused']}")
    if options.json:
        print(to_safe_json(dict(record), indent=1))
    else:
        print(text_for_stream("\n".join(profile_sentences(record, str(directory))), sys.stdout))
    return 0


# ------------------------------------------------------------------------------------------------ report


def report(options: argparse.Namespace) -> int:
    """Print the report, or write it to the chosen file."""
    from dpmon.report.html_page import render_page
    from dpmon.report.report_data import open_report_data
    from dpmon.report.report_json import report_as_json
    from dpmon.report.sections import build_document

    directory, output = find_run(options.run), options.output
    with open_report_data(directory) as data:
        if options.html:
            text = render_page(build_document(data))
            output = output or f"{short_name(load_info(directory))}.html"
        elif options.json:
            text = to_safe_json(report_as_json(data), indent=1) + "\n"
        else:
            text = render_document(build_document(data), output)
    write_output(text, output, print_path=options.html)
    return 0


def write_output(text: str, output: str | None, *, print_path: bool = False) -> None:
    """Write to a file, or to standard output (None or "-"). `print_path`: print the path. RunError on failure."""
    if output in (None, "-"):
        with utf8_stdout() as stdout:
            stdout.write(text)
        return
    path = Path(output)
    try:
        with open_replacement(path) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
    if print_path:
        print(path)


def render_document(document: Document, output: str | None) -> str:
    """Return a document as text; for a terminal, with its width and colors."""
    from dpmon.report.plain_text import text_lines

    if output is not None or not sys.stdout.isatty():
        return "\n".join(text_lines(document, WIDTH_NO_TERMINAL)) + "\n"
    lines = text_lines(document, min(get_terminal_size((WIDTH_NO_TERMINAL, 24)).columns, MAX_WIDTH))
    if supports_color(sys.stdout, os.environ):
        lines = [f"\x1b[1m{line}\x1b[0m" if line and not line.startswith(" ") else line for line in lines]
    return text_for_stream("\n".join(lines) + "\n", sys.stdout)


# ------------------------------------------------------------------------------------------------ ls


def ls(options: argparse.Namespace) -> int:
    """List the runs, the newest last: name, state, age, duration, steps, samples/s, exit status, command."""
    unreadable: list[str] = []
    listed = list_runs(unreadable)
    if unreadable:
        first, *others = unreadable
        print_message(f"not listed: {first}" + (f" (and {len(others):,} more)" if others else ""))
    if options.json:
        for directory, run_info in listed:
            # Flushed, because a reader may not wait for all runs.
            print(to_safe_json(_make_listed_run(directory, run_info)._asdict()), flush=True)
        return 0
    runs = [_make_listed_run(directory, run_info) for directory, run_info in listed]
    print_table([LIST_HEADERS, *(run.table_cells() for run in runs)], [[], *(run.detail_lines() for run in runs)])
    return 0


def print_table(rows: Sequence[tuple[str, ...]], details: Sequence[Sequence[str]]) -> None:
    """Print a list of runs in columns, and the lines below each row; a terminal truncates the last cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    command_width = max(get_terminal_size().columns - sum(widths) - 2 * len(widths), _MIN_COMMAND_CELLS)
    for row, detail_lines in zip(rows, details, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        command = truncate(row[-1], command_width) if sys.stdout.isatty() else row[-1]
        print("  ".join([*cells, text_for_stream(command, sys.stdout)]).rstrip())
        for line in detail_lines:
            print(f"    {sanitize_line(line)}")


class ListedRun(NamedTuple):
    """One run, with the members of `ls --json`; None for what is unknown."""

    id: str
    name: str
    state: str
    kept: bool
    started_unix: float
    seconds: float
    steps: int | None
    """Steps of the process with the most steps: ranks step together, so their steps are not added."""
    updates: int | None
    """Optimizer updates of this process."""
    evaluation_steps: int | None
    evaluation_word: str | None
    """The word for these steps: they may only generate data."""
    open_calls: int | None
    """Calls not yet divided into steps, in processes without a step."""
    samples_per_s: float | None
    status: int | None
    signal: str | None
    unknown: str | None
    cause: str | None
    standing: str | None
    """Where it stands or ended in a stall."""
    unreadable: str | None
    """Why its history cannot be read."""
    job: dict[str, str] | None
    """What the runs of one job on several nodes have in common: `by` and `id`."""
    node: int | None
    """The index of this node in the job."""
    machines: tuple[str, ...]
    """The nodes that a mirror reads; empty for a run of this machine."""
    command: tuple[str, ...]
    directory: str

    def table_cells(self) -> tuple[str, ...]:
        """Return the cells of the list."""
        from dpmon.stalls.run_state import format_state  # expensive

        count = self.evaluation_steps
        nodes = f"{format_count_with_noun(len(self.machines), 'node')}: " if self.machines else ""
        evaluations = f" (+{format_count(count)} {self.evaluation_word})" if count else ""
        steps_text = "-"
        if self.steps is not None:
            steps_text = format_count(self.steps) + format_updates(self.steps, self.updates or 0, " · ") + evaluations
        elif self.open_calls:
            steps_text = format_count_with_noun(self.open_calls, "call")
        return (
            sanitize_line(self.name),
            format_state(self.state) + (", kept" if self.kept else ""),
            _format_age(time.time() - self.started_unix),
            format_elapsed(round(self.seconds) * 1_000_000_000),  # as the summary rounds
            steps_text,
            format_compact(self.samples_per_s),
            "-" if self.status is None else sanitize_line(self.signal or self.status),
            sanitize_line(nodes + " ".join(self.command)),
        )

    def detail_lines(self) -> list[str]:
        """Return the lines below the row: the cause of its end or why its status is unknown, where it stalled, and why
        its history is unreadable.

        A launcher that the user stops ends with an exception of its own, which is not shown.
        """
        cause = None if self.state == "stopped" else self.cause
        return [text for text in (cause, self.unknown, self.standing, self.unreadable) if text is not None]


def _make_listed_run(directory: Path, run_info: RunInfo) -> ListedRun:
    from dpmon.errors import HistoryError
    from dpmon.report.health import read_health
    from dpmon.store.store_opening import open_store  # imported here because it loads sqlite

    members: dict[str, Any] = dict.fromkeys(ListedRun._fields)
    health, unreadable = read_health(directory), None
    try:
        with open_store(directory) as store:
            print_unread_warning(run_info, store)
            members |= _query_members(store, health)
    except (HistoryError, RunError) as error:
        unreadable = str(error).removeprefix(f"{directory.name}: ")
    exit_info = health.exit_info
    if health.end is None:
        members["standing"] = health.reason
    if exit_info is None:
        members["seconds"] = max(time.time() - run_info.started_unix, 0.0)
    else:
        members |= fields_of(exit_info, "seconds", "status", "signal", "unknown", "cause")
    return ListedRun(**members)._replace(
        id=run_info.id,
        name=short_name(run_info),
        state=health.word,
        kept=is_protected(directory),
        started_unix=run_info.started_unix,
        unreadable=unreadable,
        machines=tuple(run_info.nodes),
        command=(*([] if run_info.python is None else [run_info.script]), *run_info.arguments),
        directory=str(directory),
    )


def _query_members(store: Store, health: Health) -> dict[str, Any]:
    """Return the members of ListedRun that are in the history; without a ring, no numbers of steps."""
    from dpmon.store.events import read_job
    from dpmon.store.step_stats import StatsWindow

    job, node = read_job(store)
    members: dict[str, Any] = {"job": job, "node": node, "standing": _final_stall_text(store, health.exit_info)}
    longest_ring = max(store.rings.values(), key=lambda row: row.steps, default=None)
    if longest_ring is None:
        return members
    rate = StatsWindow(store).rate()
    _, updates = StatsWindow(store, process=longest_ring.process).step_counts(TRAINING)
    steps = {TRAINING: longest_ring.last_step, EVALUATION: longest_ring.evaluations}
    has_only_calls = bool(store.open_calls and not longest_ring.steps)
    return members | {
        "steps": None if has_only_calls else steps.get(store.main_kind, longest_ring.forward_steps) or 0,
        "updates": updates,
        "evaluation_steps": 0 if store.main_kind == EVALUATION else longest_ring.evaluations,
        "evaluation_word": store.kind_words[EVALUATION],
        "open_calls": store.open_calls,
        "samples_per_s": None if rate is None else rate.samples_per_s,
    }


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
            raise RunError(f"{directory.name} is protected: run `dpmon keep --not {directory.name}` first")
    for directory in directories:
        retention.delete_run(directory, load_info(directory))
        print(f"{directory.name} is deleted")
    return 0


def _final_stall_text(store: Store, exit_info: ExitInfo | None) -> str | None:
    """Return the stall in which the run ended; None if it did not end in one."""
    from dpmon.model.recorded_stalls import final_stall, final_stall_sentence
    from dpmon.model.run_events import TEXTS_READ, parse_stalls
    from dpmon.store.events import read_events
    from dpmon.store.steps import read_steps

    stalls = parse_stalls(event.data for event in read_events(store, "stall", limit=TEXTS_READ))
    last_ns = max((step.start_ns + step.wall_ns for step in read_steps(store, 1)), default=0)
    stall = final_stall(stalls, last_ns, has_succeeded(exit_info))
    end_ns = last_ns if exit_info is None else int(exit_info.seconds * 1e9)
    return None if stall is None else final_stall_sentence(stall.duration_ns(end_ns), stall.text)


def _format_age(seconds: float) -> str:
    if seconds < -60:
        return "-"  # the clock was set back after the start
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
