"""`dpmon try`: short runs of a script, one after the other, that measure the effect of a change.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dpmon.cli.commands import render_document, write_output
from dpmon.cli.messages import print_message
from dpmon.errors import HistoryError
from dpmon.model.compared_run import ComparedRun
from dpmon.model.comparison_stats import Change
from dpmon.model.findings.finding_evidence import data_share
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_comparison import ComparedMetric, RunComparison, format_interval
from dpmon.report.comparison_report import read_compared_run
from dpmon.report.document import Document, Paragraph, Part, Section, Table
from dpmon.report.outcome import exit_sentence
from dpmon.report.report_data import analyze_run, open_report_data
from dpmon.run.lifecycle import run_state
from dpmon.run.run_directory import RunError, load_exit, load_info
from dpmon.run.run_registry import find_run, short_name
from dpmon.run.run_signals import stop_run, wait_for_record
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import UNKNOWN, format_count_with_noun, format_percent

SCHEMA = 1
"""Version of the JSON."""
CACHED_BATCHES = 8
"""How many batches of each loader are loaded and then repeated."""
_POLL_S = 0.2
_RANKS_OPTION = re.compile(r"--nproc[-_]per[-_]node(=|$)")
_THREADS_PREFIX = "threads-"
_LIVE_STATES = ("running", "starting", "ending", "unsupervised")
_BASELINE = "as-is"
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MEANINGLESS_NOTE = (
    "The losses and checkpoints of these runs are meaningless: they are short, and trials change the computation."
)
_GAIN_NOTE = (
    "max. gain: the largest share of step time that the change can save, by the times of the first unchanged run."
)


class Trial(NamedTuple):
    """One change to the command."""

    name: str
    changes: str
    """What it changes in the computation."""
    options: tuple[str, ...] = ()
    """Options of dpmon."""
    command: tuple[str, ...] | None = None
    """The command; None for the unchanged one."""
    variables: Mapping[str, str] = {}
    """Environment variables."""
    metric: str = "step"
    max_saving: float | None = None
    """The largest share of step time (0 to 1) that the change can save; None if no bound is known."""


def try_changes(options: argparse.Namespace) -> int:
    """Run the trials and print their results. RunError if the unchanged command fails or has no step."""
    for signal_number in _END_SIGNALS[1:]:
        if signal.getsignal(signal_number) != signal.SIG_IGN:
            signal.signal(signal_number, _exit_on_signal)
    print_message(
        f"each run ends after {options.steps} steps: what the script writes (checkpoints, results) is meaningless"
    )
    base = Trial(_BASELINE, "nothing")
    first_directory = _run_trial(options, base, 1)
    runs = {_BASELINE: [read_compared_run(first_directory)]}
    if runs[_BASELINE][0].mode is None:
        raise RunError(f"no step was traced in {runs[_BASELINE][0].name}: there is nothing to try")
    with open_store(first_directory) as store:
        run = analyze_run(store, first_directory, load_exit(first_directory))
        requested = options.only or ()
        thread_counts = [
            int(name.removeprefix(_THREADS_PREFIX)) for name in requested if name.startswith(_THREADS_PREFIX)
        ]
        trials, absent = plan_trials(run, tuple(options.words), os.environ.get("OMP_NUM_THREADS"), thread_counts)
    trials = [trial for trial in trials if not requested or trial.name in requested]
    if not trials:
        raise RunError(f"nothing to try; {'; '.join(f'{name}: {reason}' for name, reason in absent.items())}")
    for round_number in range(1, options.rounds + 1):
        order = [*([base] if round_number > 1 else []), *trials]
        for trial in order if round_number % 2 else reversed(order):
            if trial.name in absent:
                continue
            try:
                directory = _run_trial(options, trial, round_number)
            except RunError as error:
                if trial is base:
                    raise
                absent[trial.name] = str(error)
                print_message(f"stopped trying {trial.name}: {error}")
            else:
                runs.setdefault(trial.name, []).append(read_compared_run(directory))
    results = [
        TrialResult(trial, RunComparison((runs[_BASELINE], runs[trial.name])).compared.get(trial.metric))
        for trial in trials
        if trial.name not in absent
    ]
    if options.json:
        members = {
            "schema": SCHEMA,
            "runs": [run.name for run in runs[_BASELINE]],
            "trials": [result.as_json(runs[result.trial.name]) for result in results],
            "absent": absent,
        }
        text = to_safe_json(members, indent=1) + "\n"
    else:
        text = render_document(_build_document(results, runs, absent, options), None)
    write_output(text, None)
    return 0


def _exit_on_signal(number: int, _: object) -> None:
    """Exit with the status of this signal, which stops the run in progress."""
    raise SystemExit(128 + number)


def _run_trial(options: argparse.Namespace, trial: Trial, round_number: int) -> Path:
    """Run the command once and stop it after its steps; return the run's directory. RunError if the command fails."""
    name = f"try-{os.getpid()}-{trial.name}-{round_number}"
    passed_options = [
        f"--{option}={value}" for option in ("python", "replicas", "devices") if (value := getattr(options, option))
    ]
    words = [*passed_options, *trial.options, "--no-loss", "--name", name, "--detach"]
    words += ["--"] if options.module is None else ["-m", options.module]
    try:
        started = subprocess.run(
            [sys.executable, "-m", "dpmon", *words, *(trial.command or options.words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **trial.variables},
            check=False,
        )
        if started.returncode:
            _, _, last_line = started.stderr.strip().rpartition("\n")
            raise RunError(sanitize_line(last_line.removeprefix("dpmon: "), 500))
        directory = find_run(name)
        run_name = short_name(load_info(directory))
        print_message(f"{trial.name}, run {round_number} of {options.rounds}: {run_name}")
        _wait_for_steps(directory, options.steps, options.timeout)
    except (KeyboardInterrupt, SystemExit):
        print_message(f"stopping {name}")
        raise
    finally:
        _stop_run_named(name)
    exit_info, steps = load_exit(directory), _max_steps(directory)
    has_ended_alone = exit_info is not None and not exit_info.stopped
    if exit_info is not None and has_ended_alone and exit_info.status:
        with open_report_data(directory) as report:
            last_lines = report.last_output
        line = f": {sanitize_line(last_lines[-1], 300)}" if last_lines else ""
        raise RunError(f"{run_name} {exit_sentence(exit_info)}{line}")
    if steps < options.steps:
        reason = "ended on its own" if has_ended_alone else "was stopped by --timeout"
        print_message(f"{run_name} {reason} after {format_count_with_noun(steps, 'step')}")
    return directory


def _wait_for_steps(directory: Path, steps: int, timeout_s: float) -> None:
    """Wait until a process has this many steps, the run has ended, or the time is over."""
    run_info, deadline = load_info(directory), time.monotonic() + timeout_s
    while time.monotonic() < deadline and _max_steps(directory) < steps:
        state, _ = run_state(directory, run_info)
        if state not in _LIVE_STATES:
            return
        time.sleep(_POLL_S)


def _max_steps(directory: Path) -> int:
    """Return the largest number of steps of a process so far."""
    with suppress(HistoryError, RunError), open_store(directory) as store:
        return max((ring.last_step or 0 for ring in store.rings.values()), default=0)
    return 0


def _stop_run_named(name: str) -> None:
    """Stop the run of this name, if there is one. The command that started it may have been interrupted.

    A signal that would end this process takes effect afterwards, because nothing else would stop the run.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    try:
        with suppress(RunError):
            directory = find_run(name)
            for _ in stop_run(directory):
                pass
            wait_for_record(directory)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def plan_trials(
    run: RunAnalysis, command: tuple[str, ...], threads: str | None, thread_counts: Sequence[int] = ()
) -> tuple[list[Trial], dict[str, str]]:
    """Return the trials that make sense for a run, and by name why the others do not.

    `threads`: the current OMP_NUM_THREADS. `thread_counts`: other numbers of threads to try.
    """
    trials: list[Trial] = []
    absent: dict[str, str] = {}
    mode = max(run.modes, key=lambda mode: mode.steps, default=None)
    rank_count = len(run.names) or 1
    if mode is None or mode.phase("data") is None:
        absent["cached-batches"] = "no DataLoader was used"
    else:
        changes = f"the data: the first {CACHED_BATCHES} batches of each loader, repeated"
        saves = data_share(mode.settled_stats) if rank_count == 1 else None
        replay = {"DPMON_REPLAY": str(CACHED_BATCHES)}
        trials.append(Trial("cached-batches", changes, variables=replay, max_saving=saves))
    if mode is None or mode.mode != "dp":
        absent["single"] = "the script does not run under DataParallel"
    else:
        trials.append(Trial("single", "the devices: one device computes the whole batch", ("--mode", "single")))
    one_rank_command = _with_one_rank(command) if rank_count > 1 else None
    if one_rank_command is None:
        absent["one-rank"] = "no torchrun with --nproc-per-node and several ranks"
    else:
        changes = f"the ranks: 1 instead of {rank_count}, so a step has a smaller total batch"
        trials.append(Trial("one-rank", changes, command=one_rank_command, metric="samples_per_s"))
    cpus = len(os.sched_getaffinity(0))
    for count in map(str, sorted({1, max(cpus // rank_count, 1), *thread_counts})):
        name = f"{_THREADS_PREFIX}{count}"
        if count == threads:
            absent[name] = f"OMP_NUM_THREADS is {count}"
        else:
            trials.append(Trial(name, "OMP_NUM_THREADS", variables={"OMP_NUM_THREADS": count}))
    return trials, absent


def _with_one_rank(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return the launcher's command with one rank; None if it has no option for the number of ranks."""
    for index, word in enumerate(command):
        if _RANKS_OPTION.match(word):
            name, separator, _ = word.partition("=")
            return (*command[:index], f"{name}=1", *command[index + (1 if separator else 2) :])
    return None


class TrialResult(NamedTuple):
    """The result of a trial."""

    trial: Trial
    row: ComparedMetric | None
    """Its metric, unchanged and changed; None if it is unknown."""

    @property
    def change(self) -> Change | None:
        """The change of the metric; None if it is unknown."""
        return None if self.row is None else self.row.change

    @property
    def table_cells(self) -> tuple[str, ...]:
        """The cells of its table row."""
        gain_text = "" if self.trial.max_saving is None else format_percent(self.trial.max_saving)
        if self.row is None or self.row.change is None:
            return (self.trial.name, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, gain_text)
        label, *values = self.row.cells
        return (self.trial.name, label.strip(), *values, gain_text)

    @property
    def explanation(self) -> str:
        """What the trial changes, and the interval of its result."""
        if self.row is None:
            interval_text = "no interval: this metric is unknown in its runs"
        elif self.row.change is None or self.row.change.least is None:
            interval_text = f"no interval: {self.row.missing}"
        else:
            interval_text = f"{self.row.figure.label.strip()} {format_interval(self.row.change)}"
        return f"{self.trial.name} changes {self.trial.changes}; {interval_text}"

    def as_json(self, runs: Sequence[ComparedRun]) -> dict[str, object]:
        """Return its members in JSON. `runs`: with the change."""
        return {
            "trial": self.trial.name,
            "changes": self.trial.changes,
            "figure": self.trial.metric,
            "saves": self.trial.max_saving,
            "runs": [run.name for run in runs],
            **{name: getattr(self.change, name, None) for name in Change._fields},
        }


def _build_document(
    results: Sequence[TrialResult],
    runs: Mapping[str, Sequence[ComparedRun]],
    absent: Mapping[str, str],
    options: argparse.Namespace,
) -> Document:
    base = runs[_BASELINE][0]
    parts: list[Part] = []
    if results:
        headers = ("trial", "metric", _BASELINE, "changed", "change", "max. gain")
        parts.append(Table(headers, [result.table_cells for result in results]))
    for result in results:
        if result.trial.name == "one-rank" and result.change is not None:
            ranks = base.set_up["ranks"] or "1"
            efficiency = format_percent(1 / result.change.ratio / int(ranks))
            parts.append(
                Paragraph(f"scaling efficiency: {ranks} ranks reach {efficiency} of {ranks} times one rank's samples/s")
            )
    if any(result.trial.max_saving is not None for result in results):
        parts.append(Paragraph(_GAIN_NOTE))
    sections = (
        Section("Trial results", parts),
        Section("What each trial changes", [Paragraph(result.explanation) for result in results], ", and its interval"),
        Section("Not tried", [Paragraph(f"{name}: {reason}") for name, reason in absent.items()]),
    )
    return Document(
        f"trials of {sanitize_line(base.set_up['script'] or '', 200)}",
        f"{format_count_with_noun(options.rounds, 'run')} of up to {options.steps} steps each, alternating",
        "tried",
        "dpmon ls lists them",
        [_MEANINGLESS_NOTE],
        [section for section in sections if section.parts],
    )
