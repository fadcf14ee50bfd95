"""`dpmon try`: short runs of a script, one after the other, that measure what a change brings.

Each trial changes one thing in the command. Its runs alternate with runs of the unchanged command, so that a change of
the machine's load affects both.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dpmon.cli.commands import render_document, write_output
from dpmon.cli.messages import print_message
from dpmon.errors import HistoryError
from dpmon.model.compared_run import ComparedRun
from dpmon.model.findings.finding_evidence import data_ceiling
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_comparison import ComparedMetric, compare_runs, format_change, format_interval
from dpmon.report.comparison_report import read_compared_run
from dpmon.report.document import Document, Paragraph, Part, Section, Table
from dpmon.report.report_data import analyze_run, collect_report_data
from dpmon.report.sentences import exit_sentence
from dpmon.run.lifecycle import run_state
from dpmon.run.run_directory import RunError, load_info
from dpmon.run.run_registry import find_run, short_name
from dpmon.run.run_signals import stop_run, wait_for_record
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import UNKNOWN, format_count_with_noun, format_percent

SCHEMA = 1
"""Version of the JSON."""
REPLAYED = 8
"""Batches of each loader that are loaded and then repeated."""
_LOOK_S = 0.2
_RANKS = re.compile(r"--nproc[-_]per[-_]node(=|$)")
_THREADS = "threads-"
_GOES_ON = ("running", "starting", "ending", "unsupervised")
_BASE = "as-is"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROMISED = (
    "promised: the largest part of a step's time that the change can save, by the times of the first unchanged run."
)


class Trial(NamedTuple):
    """One change of the command."""

    name: str
    changes: str
    """What it changes in the computation."""
    own: tuple[str, ...] = ()
    """Options of dpmon."""
    words: tuple[str, ...] | None = None
    """The command; None for the unchanged one."""
    threads: int | None = None
    """OMP_NUM_THREADS."""
    figure: str = "step"
    saves: float | None = None
    """The largest share of the steps' time (0 to 1) that the change can save; None if no bound is known."""


def try_changes(options: argparse.Namespace) -> int:
    """Run the trials and print what each of them brought. RunError if the unchanged command fails or has no step."""
    for number in _ENDING[1:]:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit_on_signal)
    print_message(
        f"each run ends after {options.steps} steps: what the script writes (checkpoints, results) is worthless"
    )
    bench = _TrialRunner(options)
    base = Trial(_BASE, "nothing")
    runs: dict[str, list[ComparedRun]] = {_BASE: []}
    first = bench.run(base, 1)
    with open_store(first) as store:
        facts = analyze_run(store, first, run_state(first, load_info(first))[1])
        counts = [int(name.removeprefix(_THREADS)) for name in options.only or () if name.startswith(_THREADS)]
        trials, absent = plan_trials(facts, tuple(options.words), os.environ.get("OMP_NUM_THREADS"), counts)
    runs[_BASE].append(read_compared_run(first))
    if runs[_BASE][0].mode is None:
        raise RunError(f"no step was traced in {runs[_BASE][0].name}: there is nothing to try")
    asked = options.only or [trial.name for trial in trials]
    for name in asked:
        if name in absent:
            print_message(f"{name} is not tried: {absent[name]}")
    trials = [trial for trial in trials if trial.name in asked]
    if not trials:
        raise RunError("nothing is left to try")
    for trial in trials:
        print_message(f"trial {trial.name}: changes {trial.changes}")
    for turn in range(1, options.rounds + 1):
        order = [*([base] if turn > 1 else []), *trials]
        for trial in order if turn % 2 else reversed(order):
            if trial.name in absent:
                continue
            try:
                runs.setdefault(trial.name, []).append(read_compared_run(bench.run(trial, turn)))
            except RunError as error:
                if trial is base:
                    raise
                absent[trial.name] = str(error)
                print_message(f"{trial.name} is not tried any more: {error}")
    trials = [trial for trial in trials if trial.name not in absent]
    found = [
        TrialResult(trial, compare_runs(runs[_BASE], runs[trial.name]).compared.get(trial.figure)) for trial in trials
    ]
    write_output(
        _json(found, runs, absent) if options.json else render_document(_document(found, runs, absent, options), None),
        None,
    )
    return 0


def _exit_on_signal(number: int, _: object) -> None:
    """End with the status of this signal. The run in progress is stopped on the way."""
    raise SystemExit(128 + number)


class _TrialRunner:
    """Starts short runs and ends them after a number of steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._name = f"try-{os.getpid()}"

    def run(self, trial: Trial, turn: int) -> Path:
        """Run the command once; return the run's directory. RunError if the command fails."""
        options = self._options
        name = f"{self._name}-{trial.name}-{turn}"
        given = [f"--{each}={value}" for each in ("python", "replicas", "devices") if (value := getattr(options, each))]
        own = [*given, *trial.own, "--no-loss", "--name", name, "--detach"]
        own += ["--"] if options.module is None else ["-m", options.module]
        environ = dict(os.environ)
        if trial.threads is not None:
            environ["OMP_NUM_THREADS"] = str(trial.threads)
        command = [sys.executable, "-m", "dpmon", *own, *(options.words if trial.words is None else trial.words)]
        try:
            started = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, check=False
            )
            if started.returncode:
                raise RunError(sanitize_line(started.stderr.strip().rpartition("\n")[2].removeprefix("dpmon: "), 500))
            directory = find_run(name)
            print_message(f"{trial.name}, run {turn} of {options.rounds}: {short_name(load_info(directory))}")
            self._wait(directory)
        except (KeyboardInterrupt, SystemExit):
            print_message(f"stopping {name}")
            raise
        finally:
            _stop(name)
        self._check(directory)
        return directory

    def _wait(self, directory: Path) -> None:
        info, until = load_info(directory), time.monotonic() + self._options.timeout
        while run_state(directory, info)[0] in _GOES_ON and time.monotonic() < until:
            if _steps(directory) >= self._options.steps:
                return
            time.sleep(_LOOK_S)

    def _check(self, directory: Path) -> None:
        """Print a line if a run has fewer steps than asked for; RunError if the command has failed."""
        info = load_info(directory)
        how, steps = run_state(directory, info)[1], _steps(directory)
        if how is not None and how.status and not how.stopped:
            last = collect_report_data(directory).last_output
            line = f": {sanitize_line(last[-1], 300)}" if last else ""
            raise RunError(f"{short_name(info)} {exit_sentence(how, '')}{line}")
        if steps < self._options.steps:
            why = "ended by itself" if how is not None and not how.stopped else "was stopped by --timeout"
            print_message(f"{short_name(info)} {why} after {format_count_with_noun(steps, 'step')}")


def _steps(directory: Path) -> int:
    """The largest number of steps of a process so far."""
    with suppress(HistoryError, RunError), open_store(directory) as store:
        return max((ring.last_step or 0 for ring in store.rings.values()), default=0)
    return 0


def _stop(name: str) -> None:
    """Stop the run of this name, if there is one. The command that started it may have been interrupted.

    A signal that would end this process meanwhile takes effect afterwards: nothing else would stop the run.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        with suppress(RunError):
            directory = find_run(name)
            for _ in stop_run(directory):
                pass
            wait_for_record(directory)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def plan_trials(
    facts: RunAnalysis, words: tuple[str, ...], threads: str | None, counts: Sequence[int] = ()
) -> tuple[list[Trial], dict[str, str]]:
    """The trials that make sense for a run, and by name why the others do not.

    `threads`: the current OMP_NUM_THREADS. `counts`: further numbers of threads to try.
    """
    found: list[Trial] = []
    absent: dict[str, str] = {}
    mode = max(facts.modes, key=lambda mode: mode.steps, default=None)
    ranks = len(facts.names) or 1
    if mode is None or mode.phase("data") is None:
        absent["cached-batches"] = "no DataLoader was used"
    else:
        changes = f"the data: the first {REPLAYED} batches of each loader again and again"
        saves = data_ceiling(mode.settled_stats, facts)
        found.append(Trial("cached-batches", changes, ("--replay", str(REPLAYED)), figure="mean_step", saves=saves))
    if mode is None or mode.mode != "dp":
        absent["single"] = "the script does not run under DataParallel"
    else:
        found.append(Trial("single", "the devices: one device computes the whole batch", ("--mode", "single")))
    alone = _with_one_rank(words) if ranks > 1 else None
    if alone is None:
        absent["one-rank"] = "no torchrun with --nproc-per-node and several ranks"
    else:
        changes = f"the ranks: 1 instead of {ranks}, so a step has a smaller batch in all"
        found.append(Trial("one-rank", changes, words=alone, figure="samples_per_s"))
    cpus = len(os.sched_getaffinity(0))
    for count in sorted({1, max(cpus // ranks, 1), *counts}):
        if str(count) == threads:
            absent[f"{_THREADS}{count}"] = f"OMP_NUM_THREADS is {count}"
        else:
            found.append(Trial(f"{_THREADS}{count}", "OMP_NUM_THREADS", threads=count))
    return found, absent


def _with_one_rank(words: Sequence[str]) -> tuple[str, ...] | None:
    """The launcher's command with one rank; None if it has no option for the number of ranks."""
    for at, word in enumerate(words):
        if _RANKS.match(word):
            name, sign, _ = word.partition("=")
            return (*words[:at], f"{name}=1", *words[at + (1 if sign else 2) :])
    return None


class TrialResult(NamedTuple):
    """What a trial brought."""

    trial: Trial
    row: ComparedMetric | None
    """Its figure, unchanged and changed; None if it is unknown."""

    @property
    def table_cells(self) -> tuple[str, ...]:
        """The row of the table."""
        promised = "" if self.trial.saves is None else f"at most {format_change(1 - self.trial.saves)}"
        row = self.row
        if row is None or row.change is None:
            return (self.trial.name, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, promised)
        values = [row.figure.format(row.typical_value(side)) for side in (0, 1)]
        return (self.trial.name, row.figure.label.strip(), *values, format_change(row.change.ratio), promised)

    @property
    def explanation(self) -> str:
        """What the trial changes, and the interval of its result."""
        row = self.row
        if row is None or row.change is None or row.change.least is None:
            sure = f"no interval: {'this figure is unknown in its runs' if row is None else row.missing}"
        else:
            sure = f"{row.figure.label.strip()} {format_interval(row.change)}"
        return f"{self.trial.name} changes {self.trial.changes}; {sure}"


def _document(
    found: Sequence[TrialResult],
    runs: dict[str, list[ComparedRun]],
    absent: dict[str, str],
    options: argparse.Namespace,
) -> Document:
    base = runs[_BASE][0]
    head = ("trial", "figure", _BASE, "changed", "change", "promised")
    scaling = []
    for each in found:
        if each.trial.name == "one-rank" and each.row is not None and each.row.change is not None:
            many = base.set_up["ranks"] or "1"
            part = format_percent(1 / each.row.change.ratio / int(many))
            scaling.append(
                f"scaling efficiency: {many} ranks make {part} of the samples/s that {many} times one rank would"
            )
    brought: list[Part] = [Table(head, [each.table_cells for each in found])] if found else []
    brought += map(Paragraph, scaling)
    if any(each.trial.saves is not None for each in found):
        brought.append(Paragraph(_PROMISED))
    sections = [
        Section("What each trial brought", brought),
        Section("What each trial changes", [Paragraph(one.explanation) for one in found], ", and its interval"),
        Section("Not tried", [Paragraph(f"{name}: {why}") for name, why in absent.items()]),
    ]
    facts = [
        "The losses and checkpoints of these runs are worthless: they are short, and trials change the computation.",
    ]
    title = f"trials of {sanitize_line(base.set_up['script'] or '', 200)}"
    how = f"{format_count_with_noun(options.rounds, 'run')} of up to {options.steps} steps for each, in turn"
    there = tuple(one for one in sections if one.parts)
    return Document(title, how, "tried", "dpmon ls lists them", facts, there)


def _json(found: Sequence[TrialResult], runs: dict[str, list[ComparedRun]], absent: dict[str, str]) -> str:
    def row(each: TrialResult) -> dict[str, Any]:
        told = None if each.row is None else each.row.change
        return {
            "trial": each.trial.name,
            "changes": each.trial.changes,
            "figure": each.trial.figure,
            "saves": each.trial.saves,
            "runs": [one.name for one in runs[each.trial.name]],
            **{name: getattr(told, name, None) for name in ("ratio", "low", "high", "least", "most")},
        }

    names = [one.name for one in runs[_BASE]]
    return (
        to_safe_json({"schema": SCHEMA, "runs": names, "trials": [*map(row, found)], "absent": absent}, indent=1) + "\n"
    )
