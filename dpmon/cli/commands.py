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

from dpmon.cleaning import clean, json_text
from dpmon.cli.launch import has_screen, json_lines
from dpmon.cli.speak import closing, speak
from dpmon.run import proc, retention
from dpmon.run.condition import goes_on, goes_on_elsewhere, needs_supervisor, run_state
from dpmon.run.destination import opened, stdout
from dpmon.run.reader import RunReader
from dpmon.run.retention import is_kept
from dpmon.run.rundir import RunError, RunInfo, load_exit, load_info
from dpmon.run.runs import JOB, find_run, list_runs, newest_run, short_name
from dpmon.supervise.guard import repeated
from dpmon.supervise.start import ensure_supervisor
from dpmon.text.cells import cut, has_colours, in_stream
from dpmon.text.quantities import clock, compact, count_of, on_machines

if TYPE_CHECKING:
    from dpmon.report.document import Document
    from dpmon.store.queries import Store

WIDTH_NO_TERMINAL, WIDEST = 80, 120
"""Width of a report without a terminal, and its largest width on a terminal."""
_LAST_OUTPUT = 4096
HEAD = ("NAME", "STATE", "AGE", "TIME", "STEPS", "SAMPLES/S", "EXIT", "COMMAND")
"""The columns of `ls`."""
_COMMAND_CELLS = 12
"""Fewest cells of a command in a list for a terminal."""


def attach(options: argparse.Namespace) -> int:
    """Show a run again on a screen; without a terminal, follow its output and print its summary."""
    return follow(newest_run(goes_on) if options.run is None else find_run(options.run), options)


def follow(directory: Path, options: argparse.Namespace, machines: Sequence[Sequence[str]] = ()) -> int:
    """The same for a run that was found already. `machines`: see dpmon.supervise.start.Successor."""
    info, how = load_info(directory), load_exit(directory)
    if goes_on_elsewhere(directory, info, how):
        # This machine cannot see the run's processes or the other machine's clock, so the run would look finished.
        raise RunError(f"{directory.name} runs on another machine; attach to it there (dpmon report also works here)")
    if info.nodes and not machines and needs_supervisor(directory, info, how):
        raise RunError(
            f"nothing is recorded for {directory.name} any more: name its machines again, as in"
            " dpmon attach --host gpu-1 (dpmon report also works as it is)"
        )
    with repeated(ensure_supervisor(directory, machines).look):
        return _follow(directory, options)


def _follow(directory: Path, options: argparse.Namespace) -> int:
    from dpmon.store.opened import can_be_opened

    readable = can_be_opened(directory)
    if options.headless or options.json is not None or not has_screen():
        from dpmon.cli.headless import Follower

        lines = json_lines(options.json)
        follower = Follower(RunReader(directory), keep=_LAST_OUTPUT, lines=lines)
        if load_exit(directory) is None and lines != "stderr":
            follower.say("the output of the run follows; Ctrl-C leaves, and the training goes on")
        how = follower.follow()
        return closing(directory, how, None if lines == "stderr" else follower.say)
    info = RunReader(directory).info
    from dpmon.ui.app import run_screen

    refresh = options.refresh or options.settings.refresh or info.refresh
    was_over = load_exit(directory) is not None
    settings = options.settings
    plays = was_over and readable
    if run_screen(directory, refresh=refresh, theme=settings.theme, alert=settings.alert, playback=plays) == "left":
        speak(f"the training goes on; back to it: dpmon attach {short_name(info)}")
        return 0
    return closing(directory, load_exit(directory), speak, brief=was_over)


def stop(options: argparse.Namespace) -> int:
    """Stop a run; return 0 when it is over, 1 if it could not be stopped."""
    from dpmon.run.signalling import NOTHING_RUNS, STOPPED_BY, stop_run, wait_for_record

    directory = find_run(options.run, goes_on=goes_on)
    how = load_exit(directory)
    line = ""
    for line in stop_run(directory):
        if line == NOTHING_RUNS and how is not None:
            status = "not known" if how.status is None else how.status
            line = f"{directory.name} is over (exit status {status})"
        elif line.startswith(STOPPED_BY):
            line = f"{line}: {short_name(load_info(directory))}"
        print(clean(line), flush=True)
    ensure_supervisor(directory)
    if line.startswith(STOPPED_BY):
        wait_for_record(directory)
    return 1 if "cannot be stopped" in line else 0


def export(options: argparse.Namespace) -> int:
    """Write a run's records to a file or to standard output."""
    if options.follow:
        from dpmon.export.follow import follow

        of_job = options.rollups and options.run.startswith(JOB)
        directory = _of_job(options.run.removeprefix(JOB)) if of_job else find_run(options.run)
        if options.rollups:
            # Slurm sends SIGTERM at the end of a job, before the last rows are sent. This process ignores it, and ends
            # with its input. It sets a handler, because its children would inherit SIG_IGN.
            signal.signal(signal.SIGTERM, lambda *_: None)
        # An exporter with `rollups` is the arm of `attach` on another machine; any other one only reads.
        with repeated(ensure_supervisor(directory).look) if options.rollups else nullcontext():
            follow(directory, options.start, rollups=options.rollups)
        return 0
    from dpmon.export import export as write

    write(find_run(options.run), options.format, options.output, options.kind)
    return 0


def _of_job(job: str) -> Path:
    """The newest run of a job on this machine; `job`: such as "slurm:12.0". RunError if there is none."""
    from dpmon.errors import HistoryError
    from dpmon.store.opened import open_store

    for directory, info in reversed(list_runs()):
        if not info.nodes and info.host in ("", proc.host()):
            with suppress(HistoryError, RunError), open_store(directory) as store:
                found, _ = store.job()
                if found is not None and f"{found['by']}:{found['id']}" == job:
                    return directory
    raise RunError(f"there is no run of job {job}")


# ------------------------------------------------------------------------------------------------ report


def report(options: argparse.Namespace) -> int:
    """Print the report, or write it to the chosen file."""
    from dpmon.report.asjson import as_object
    from dpmon.report.collect import collect
    from dpmon.report.page import page
    from dpmon.report.sections import document

    directory, output = find_run(options.run), options.output
    story = collect(directory)
    if options.html:
        text = page(document(story))
        output = output or f"{short_name(load_info(directory))}.html"
    elif options.json:
        text = json_text(as_object(story), indent=1) + "\n"
    else:
        text = as_text(document(story), output)
    written(text, output, say=options.html)
    return 0


def written(text: str, output: str | None, *, say: bool = False) -> None:
    """Write to a file, or to standard output (None or "-"). `say`: print the file's name. RunError if that fails."""
    if output in (None, "-"):
        with stdout() as out:
            out.write(text)
        return
    path = Path(output)
    try:
        with opened(path) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
    if say:
        print(path)


def as_text(report: Document, output: str | None) -> str:
    """A document as text; on a terminal with its width and colours."""
    from dpmon.report.text import text_lines

    if output is not None or not sys.stdout.isatty():
        return "\n".join(text_lines(report, WIDTH_NO_TERMINAL)) + "\n"
    lines = text_lines(report, min(get_terminal_size((WIDTH_NO_TERMINAL, 24)).columns, WIDEST))
    if has_colours(sys.stdout, os.environ):
        lines = [f"\x1b[1m{line}\x1b[0m" if line and not line.startswith(" ") else line for line in lines]
    return in_stream("\n".join(lines) + "\n", sys.stdout)


# ------------------------------------------------------------------------------------------------ ls


def ls(options: argparse.Namespace) -> int:
    """List the runs, the newest last: name, state, age, duration, steps, samples/s, exit status, command.

    With a script, show the figures of its runs instead.
    """
    if options.script is not None:
        from dpmon.report import drift

        found = drift.drift(options.script)
        text = (
            json_text(drift.as_object(found), indent=1) + "\n" if options.json else as_text(drift.document(found), None)
        )
        written(text, None)
        return 0
    unreadable: list[str] = []
    listed = list_runs(unreadable)
    if unreadable:
        more = f" (and {len(unreadable) - 1:,} more)" if len(unreadable) > 1 else ""
        speak(f"not listed: {unreadable[0]}{more}")
    if options.json:
        for directory, info in listed:
            print(json_text(_describe(directory, info)._asdict()), flush=True)  # a reader may not wait for all
        return 0
    runs = [_describe(directory, info) for directory, info in listed]
    print_table([HEAD, *(run.row() for run in runs)], [[], *(run.below() for run in runs)])
    return 0


def print_table(rows: Sequence[tuple[str, ...]], below: Sequence[Sequence[str]]) -> None:
    """Print the rows of a list of runs in columns, and the lines below each; the last cell is cut at a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    room = max(get_terminal_size().columns - sum(widths) - 2 * len(widths), _COMMAND_CELLS)
    for row, lines in zip(rows, below, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        command = cut(row[-1], room) if sys.stdout.isatty() else row[-1]
        print("  ".join([*cells, in_stream(command, sys.stdout)]).rstrip())
        for line in lines:
            print(f"    {clean(line)}")


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

    def row(self) -> tuple[str, ...]:
        """The cells of the list."""
        evaluations = f" ({self.evaluation_steps} evaluation)" if self.evaluation_steps else ""
        counted = "-" if self.steps is None else f"{self.steps}{evaluations}"
        if self.steps is None and self.open_calls:
            counted = count_of(self.open_calls, "call")
        return (
            clean(self.name),
            self.state + (", kept" if self.kept else ""),
            _age(time.time() - self.started_unix),
            clock(int(self.seconds * 1e9)),
            counted,
            compact(self.samples_per_s),
            "-" if self.status is None else clean(self.signal or self.status),
            clean(on_machines(self.machines) + " ".join(self.command)),
        )

    def below(self) -> list[str]:
        """The lines below the row: the cause of its end, and where it stalled.

        A launcher that the user stops ends with an exception of its own, which is no fault.
        """
        cause = None if self.state == "stopped" else self.cause
        return [text for text in (cause, self.standing) if text is not None]


def _describe(directory: Path, info: RunInfo) -> ListedRun:
    state, how = run_state(directory, info)
    from dpmon.errors import HistoryError
    from dpmon.report.health import health_in
    from dpmon.store.opened import open_store  # imported here because it loads sqlite

    live, now, counts, job, node = state == "running", None, _NO_STEPS, None, None
    with suppress(HistoryError, RunError), open_store(directory) as store:
        counts = _steps(store)
        job, node = store.job()
        now = health_in(directory, store) if live else None
    steps, evaluation_steps, open_calls, samples_per_s, standing = counts
    if state == "finished":
        standing = None  # whatever it was, it went on
    if live:
        now = now or health_in(directory, None)
        state, standing = now.state, now.reason
    seconds = max(time.time() - info.started_unix, 0.0) if how is None else how.seconds
    words = [*([] if info.python is None else [info.script]), *info.arguments]
    end = (None, None, None, None) if how is None else (how.status, how.signal, how.unknown, how.cause)
    return ListedRun(
        info.id, short_name(info), state, is_kept(directory), info.started_unix, seconds, steps, evaluation_steps,
        open_calls, samples_per_s, *end, standing, job, node, list(info.nodes), words, str(directory),
    )  # fmt: skip


def keep(options: argparse.Namespace) -> int:
    """Protect a run from automatic deletion, or end the protection."""
    directory = find_run(options.run)
    retention.keep(directory, options.kept)
    print(f"{directory.name} is {'kept until you delete it' if options.kept else 'no longer protected from deletion'}")
    return 0


def rm(options: argparse.Namespace) -> int:
    """Delete finished runs; delete none of them if an argument is ambiguous or names a protected run."""
    directories = dict.fromkeys(find_run(run, only=True) for run in options.runs)
    for directory in directories:
        if is_kept(directory):
            raise RunError(f"{directory.name} is kept: run `dpmon keep --not {directory.name}` first")
    for directory in directories:
        retention.remove(directory, load_info(directory))
        print(f"{directory.name} is deleted")
    return 0


_Counts = tuple[int | None, int | None, int | None, float | None, str | None]
_NO_STEPS: _Counts = (None, None, None, None, None)


def _steps(store: Store) -> _Counts:
    """Steps, evaluation steps, open calls, samples/s, and the stall in which the run ended, if it did.

    None if the record has no rings.
    """
    from dpmon.model.announced import TEXTS_READ, stalls_in
    from dpmon.model.stalls_seen import ended_in
    from dpmon.store.figures import Window

    most = max(store.rings.values(), key=lambda row: row.steps, default=None)
    if most is None:
        return _NO_STEPS
    window = Window(store)
    rate = window.rate()
    calls = store.open_calls
    evaluations, samples = window.evaluation_steps(most.process), None if rate is None else rate.samples_per_s
    stalls = stalls_in(event.data for event in store.events("stall", newest=TEXTS_READ))
    last_ns = max((step.start_ns + step.wall_ns for step in store.steps(1)), default=0)
    stall = ended_in(stalls, last_ns)
    standing = None if stall is None else f"stalled: {stall.text}"
    return None if calls and not most.steps else most.steps, evaluations, calls, samples, standing


def _age(seconds: float) -> str:
    if seconds < -60:
        return "-"  # the clock was set back after the start
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
