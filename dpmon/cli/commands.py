"""The commands that look at runs which are there already: attach, ls, stop, export."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from dpmon.cli.launch import has_screen
from dpmon.cli.speak import closing, speak
from dpmon.run.reader import RunReader
from dpmon.run.rundir import RunError, RunInfo, find_run, list_runs, load_exit, short_name
from dpmon.run.start import look_after
from dpmon.run.state import run_state
from dpmon.ui.text import clean

__all__ = ["attach", "export", "ls", "stop"]

_LAST_OUTPUT = 4096


def attach(options: argparse.Namespace) -> int:
    """Show a run again: on a screen, or, without a terminal, its output from now on and its summary."""
    directory = find_run(options.run)
    look_after(directory)
    if options.headless or not has_screen():
        from dpmon.cli.headless import Follower

        follower = Follower(directory, None, keep=_LAST_OUTPUT)
        how = follower.follow()
        return closing(directory, how, follower.say)
    info = RunReader(directory).info
    from dpmon.ui.app import run_screen

    if run_screen(directory, refresh=options.refresh or info.refresh) == "left":
        speak(f"the training goes on; back to it: dpmon attach {short_name(info)}")
        return 0
    return closing(directory, load_exit(directory), speak)


def stop(options: argparse.Namespace) -> int:
    """Stop a run; 0 when it is over, 1 if it could not be stopped."""
    from dpmon.run.stop import NOTHING_RUNS, stop_run

    directory = find_run(options.run)
    how = load_exit(directory)
    line = ""
    for line in stop_run(directory):
        if line == NOTHING_RUNS and how is not None:
            status = "not known" if how.status is None else how.status
            line = f"{directory.name} is over (exit status {status})"
        print(line, flush=True)
    look_after(directory)
    return 1 if "cannot be stopped" in line else 0


def export(options: argparse.Namespace) -> int:
    """Write a run's records to a file or to standard output."""
    from dpmon.run.export import write_jsonl

    directory = find_run(options.run)
    if options.output in (None, "-"):
        write_jsonl(directory, sys.stdout)
        sys.stdout.flush()
        return 0
    try:
        with open(options.output, "w", encoding="utf-8") as file:
            write_jsonl(directory, file)
    except OSError as error:
        raise RunError(f"{options.output} cannot be written: {error.strerror or error}") from None
    return 0


# ------------------------------------------------------------------------------------------------ ls


def ls(_: argparse.Namespace) -> int:
    """List the runs, the newest last: name, state, age, steps, exit status, what was run."""
    rows: list[tuple[str, ...]] = [("NAME", "STATE", "AGE", "STEPS", "EXIT", "COMMAND")]
    rows += [_row(directory, info) for directory, info in list_runs()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())
    return 0


def _row(directory: Path, info: RunInfo) -> tuple[str, ...]:
    state, how = run_state(directory, info)
    status = "-" if how is None or how.status is None else how.signal or str(how.status)
    steps = _steps(directory)
    return (
        clean(short_name(info)),
        state,
        _age(time.time() - info.started_unix),
        "-" if steps is None else f"{steps}",
        status,
        clean(" ".join([info.script, *_arguments(info)]))[:60],
    )


def _arguments(info: RunInfo) -> tuple[str, ...]:
    """The words after the script, module or launcher."""
    skip = 1 if info.python is None else 3 if info.script.startswith("-m ") else 2
    return info.command[skip:]


def _steps(directory: Path) -> int | None:
    """Steps that the history has counted, over all processes; None if there is no history."""
    from dpmon.run.history import HistoryError, Kept

    try:
        kept = Kept(directory)
    except (HistoryError, OSError):
        return None
    counts = [row.steps for row in kept.rings.values()]
    kept.close()
    return max(counts, default=None)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
