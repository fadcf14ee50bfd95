"""The commands that look at several machines: which of their runs belong together, and the mirror of such a job."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import NamedTuple

from dpmon.cli.commands import HEAD, ListedRun, attach_to_directory, print_table
from dpmon.cli.launch import resolve_metrics_path
from dpmon.cli.messages import print_message
from dpmon.cli.options import UsageError
from dpmon.mirror.mirror_run import find_or_create_mirror
from dpmon.mirror.remote_hosts import (
    PLAIN_WORD,
    HostOutput,
    RemoteHost,
    expand_hostlist,
    read_hostfile,
    resolve_hosts,
    run_dpmon_on_hosts,
    slurm_hosts,
)
from dpmon.record.safe_json import load_json
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.run_directory import ID, RunError, load_info
from dpmon.run.run_registry import JOB
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.supervise.start_supervisor import ensure_supervisor, keep_child_statuses
from dpmon.text.cells import truncate
from dpmon.text.formatting import format_count_with_noun

_OVER = ("lost", "elsewhere")
_JOB_CELLS = 24
_JOB_S, _ASK_AGAIN_S = 60.0, 5.0
"""Longest wait until the ranks of a job that starts have said which job it is, and the time between two questions."""
_START_S = 30.0
"""Longest wait, even on a busy machine, for the process that mirrors the runs; then a second one is started."""
_TOGETHER_S = 30.0
"""Ranks that Slurm starts together begin within this time."""
_STAMP, _DIGITS = len("20260101-000000-"), len("-0123")
"""Length of the time before the name in a run's id, and of the digits after it."""
_MOST_S = 1e10
_TYPES = {
    "str": str,
    "bool": bool,
    "float": (int, float),
    "list[str]": list,
    "str | None": (str, NoneType),
    "int | None": (int, NoneType),
    "float | None": (int, float, NoneType),
    "dict[str, str] | None": (dict, NoneType),
}


class RemoteRun(NamedTuple):
    """A run and the machine that listed it."""

    machine: RemoteHost
    run: ListedRun

    @property
    def job(self) -> str:
        """The job of the run, equal on all its machines; empty while it is unknown."""
        return "" if self.run.job is None else f"{self.run.job.get('by')} {self.run.job.get('id')}"

    @property
    def name(self) -> str:
        """The name of the run without its digits, from its id: a checked text."""
        return self.run.id[_STAMP:-_DIGITS]

    @property
    def is_live(self) -> bool:
        """Whether its command runs, as far as its machine knows."""
        return self.run.status is None and self.run.unknown is None and self.run.state not in _OVER


def hosts_from_options(options: argparse.Namespace) -> list[RemoteHost]:
    """The machines that the options name, each once; none if they name none. Raises UsageError and HostError."""
    keep_child_statuses()
    names = list(options.host or ())
    if options.hosts is not None:
        names += expand_hostlist(options.hosts)
    if options.hostfile is not None:
        names += read_hostfile(options.hostfile)
    found = resolve_hosts(names, via=options.via)
    if options.slurm is not None:
        of_job = slurm_hosts(options.slurm)
        found += of_job if options.via is None else resolve_hosts([machine.name for machine in of_job], via=options.via)
    elif options.via is not None and not names:
        raise UsageError("--via is a way to machines: name them with --host, --hosts or --hostfile")
    return list({machine.name: machine for machine in found}.values())


def list_remote_runs(asked: Sequence[RemoteHost]) -> tuple[list[RemoteRun], dict[str, HostOutput]]:
    """The runs of all machines by their start, each on one machine; and by machine, the answers that list no run."""
    found, answers = run_dpmon_on_hosts(asked, ("ls", "--json"))
    listed: dict[str, list[RemoteRun]] = {}
    failed = {}
    for machine, answer in zip(found, answers, strict=True):
        lines = answer.lines
        runs = [run for run in map(_parse_listed_run, lines) if run is not None]
        for run in runs:
            if not run.machines:  # a mirror there has nothing of its own
                listed.setdefault(run.id, []).append(RemoteRun(machine, run))
        if answer.why:
            failed[machine.name] = answer
        elif lines and not runs:
            last = sanitize_line(lines[-1].decode("utf-8", "replace"), 200)
            failed[machine.name] = HostOutput([], f"it lists no run that this dpmon can read, but prints: {last}", True)
    # Machines with a common home list each other's runs.
    count = dict.fromkeys((machine.name for machine in found), 0)
    runs_there = []
    for same in sorted(listed.values(), key=lambda same: same[0].run.started_unix):
        here = min(same, key=lambda there: (there.run.state == "elsewhere", count[there.machine.name]))
        count[here.machine.name] += 1
        runs_there.append(here)
    return runs_there, failed


def _parse_listed_run(line: bytes) -> ListedRun | None:
    """A line of `dpmon ls --json`; None for anything else, such as a banner."""
    try:
        data = load_json(line)
    except ValueError:
        return None
    values = {name: data.get(name) for name in ListedRun._fields} if isinstance(data, dict) else {}
    for name, declared in ListedRun.__annotations__.items():
        if not isinstance(values.get(name), _TYPES[declared.__forward_arg__]):  # type: ignore[arg-type]
            return None
    run = ListedRun(**values)  # type: ignore[arg-type]  # checked just now
    texts = (*run.command, *run.machines, *(run.job or {}).values())
    if not ID.fullmatch(run.id) or not all(isinstance(text, str) for text in texts):
        return None
    if run.name != run.id[_STAMP:] or not all(0 <= at < _MOST_S for at in (run.started_unix, run.seconds)):
        return None
    return run._replace(
        state=sanitize_line(run.state, 20), job=run.job and {key: sanitize_line(run.job[key], 200) for key in run.job}
    )


def group_by_job(runs: Sequence[RemoteRun]) -> list[list[RemoteRun]]:
    """The runs of each job, or a single run whose job is unknown; the job with the newest run is the last."""
    groups: dict[str, list[RemoteRun]] = {}
    for there in runs:
        groups.setdefault(there.job or there.run.id, []).append(there)
    return sorted(groups.values(), key=lambda group: group[-1].run.started_unix)


def choose_job_runs(
    runs: Sequence[RemoteRun], what: str | None, slurm: str | None = None
) -> dict[str, list[RemoteRun]]:
    """The runs of the job `what`, else of the newest live job, else of the newest one, by machine.

    `what`: a job's id, or the name or id of one of its runs. While no job is known, the runs of that name belong
    together. RunError if there is none. None are chosen while no live run has said which job it belongs to.

    A machine can have several runs of a job: one for each rank (`srun dpmon ...`), or one for each start of the job.
    Those of its last start are chosen, by their number in the job: its live ones, else those that started with its
    newest one.
    """
    groups = group_by_job(runs)
    if slurm is not None:
        groups = [group for group in groups if f"{group[0].job}.".startswith(f"slurm {slurm.partition('.')[0]}.")]
        if not groups and any(there.is_live and not there.job for there in runs):
            return {}
    if what is not None:
        groups = [group for group in groups if any(_matches(there, what) for there in group)]
        if groups and not groups[-1][0].job:
            groups = [[there for group in groups for there in group if not there.job]]
    if not groups:
        raise RunError(
            f"no machine that answered has a run {what or f'of job {slurm}'}: `dpmon ls` with the same machines lists"
            " their runs and jobs (a job is known once its ranks train)"
        )
    live = [group for group in groups if any(there.is_live for there in group)]
    known = [group for group in live if group[0].job]
    if what is None and not known and len({there.machine.name for group in live for there in group}) > 1:
        return {}
    by_machine: dict[str, list[RemoteRun]] = {}
    for there in (known or live or groups)[-1]:
        by_machine.setdefault(there.machine.name, []).append(there)
    return {name: _newest_start(same) for name, same in by_machine.items()}


def _newest_start(runs: Sequence[RemoteRun]) -> list[RemoteRun]:
    newest = runs[-1].run.started_unix
    live = [one for one in runs if one.is_live]
    last = live or [one for one in runs if one.run.started_unix > newest - _TOGETHER_S]
    return sorted(last, key=lambda one: one.run.node or 0)


def _matches(there: RemoteRun, what: str) -> bool:
    run = there.run
    return what in (run.id, run.name, there.name, there.job, there.job.partition(" ")[2])


def attach(options: argparse.Namespace) -> int:
    """Show the runs of one job on several machines as one run."""
    metrics = resolve_metrics_path(options.metrics)
    directory, commands = _find_or_create_mirror(options, hosts_from_options(options), metrics)
    os.environ["DPMON_METRICS"] = metrics or ""
    mirror, until = ensure_supervisor(directory, commands), time.monotonic() + _START_S
    # Once it is named in run.json, what looks after it knows it, and replaces it if it is killed.
    while mirror.is_running and not has_live_supervisor(load_info(directory)) and time.monotonic() < until:
        time.sleep(0.02)
    return attach_to_directory(directory, options, commands)


def _find_or_create_mirror(
    options: argparse.Namespace, asked: Sequence[RemoteHost], metrics: str | None
) -> tuple[Path, list[list[str]]]:
    """The local run that mirrors the chosen job, which is made unless there is one, and the commands of its machines.

    RunError if no machine has a run.
    """
    until = time.monotonic() + _JOB_S
    on_machine: dict[str, list[RemoteRun]] = {}
    while not on_machine:
        runs, failed = list_remote_runs(asked)
        for name, answer in failed.items():
            print_message(f"{name}: {answer.why}")
        if not runs:
            raise RunError(_no_run_error(len(asked) - len(failed)))
        on_machine = choose_job_runs(runs, options.run, options.slurm)
        if not on_machine and time.monotonic() > until:
            raise RunError(f"no run has said yet which job it belongs to: give its name, such as {runs[-1].run.name}")
        if not on_machine:
            print_message(
                "no run has said yet which job it belongs to: waiting until one trains (or give the name of a run)"
            )
            time.sleep(_ASK_AGAIN_S)
    chosen_runs = [there for same in on_machine.values() for there in same]
    # Look for dpmon where it is on another machine that is reached in the same way.
    place = next((there.machine.dpmon for there in chosen_runs if there.machine.connection_words), ("dpmon",))
    job = JOB + chosen_runs[0].job.replace(" ", ":", 1)
    ways: list[list[str]] = []
    for machine in asked:
        name = machine.name
        for number, there in enumerate(on_machine.get(name, ()), 1):
            ways.append([name if number == 1 else f"{name}:{number}", there.run.id, *there.machine.command_prefix])
        if name in failed and not failed[name].for_good:
            if job != JOB and PLAIN_WORD.fullmatch(job) and len(chosen_runs) == len(on_machine):
                ways.append([name, job, *machine._replace(dpmon=place).command_prefix])
                print_message(f"{name}: dpmon tries again, and shows it when it answers")
            else:
                print_message(
                    f"{name}: it is unknown which of its runs belongs to this job: attach again when it answers"
                )
        elif name not in on_machine and name not in failed:
            print_message(f"{name}: it has no run of this job, so it is not shown")
    age_s = max(there.run.seconds for there in chosen_runs)
    return find_or_create_mirror(chosen_runs[0].name, ways, max(age_s, 0.0), metrics), ways


def _no_run_error(answered: int) -> str:
    return (
        f"no run on {format_count_with_noun(answered, 'machine')} that answered" if answered else "no machine answered"
    )


def ls(options: argparse.Namespace) -> int:
    """List the runs of all machines, those of a job together; return 1 if a machine did not answer, else 0."""
    if options.script is not None:
        raise UsageError("--script shows the runs of this machine only")
    asked = hosts_from_options(options)
    runs, failed = list_remote_runs(asked)
    ordered = [there for group in group_by_job(runs) for there in group]
    if options.json:
        for there in ordered:
            print(to_safe_json({"machine": there.machine.name, **there.run._asdict()}))
        for name, answer in failed.items():
            print(to_safe_json({"machine": name, "why": answer.why}))
        return int(bool(failed))
    rows = [
        (truncate(sanitize_line(there.job) or "-", _JOB_CELLS), there.machine.name, *there.run.table_cells())
        for there in ordered
    ]
    if rows:
        print_table([("JOB", "MACHINE", *HEAD), *rows], [[], *(there.run.detail_lines() for there in ordered)])
    for name, answer in failed.items():
        print_message(f"{name}: {answer.why}")
    if not rows and len(asked) > len(failed):
        print_message(_no_run_error(len(asked) - len(failed)))
    return int(bool(failed))
