"""The commands for several hosts: which of their runs belong to one job, and the mirror of such a job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dpmon.cli.commands import LIST_HEADERS, ListedRun, attach_to_directory, print_table
from dpmon.cli.launch import resolve_metrics_path
from dpmon.cli.messages import print_message
from dpmon.cli.options import UsageError
from dpmon.mirror.mirror_run import find_or_create_mirror
from dpmon.mirror.remote_hosts import (
    PLAIN_WORD,
    HostOutput,
    RemoteHost,
    expand_hostlist,
    resolve_hosts,
    run_dpmon_on_hosts,
    slurm_hosts,
)
from dpmon.record.safe_json import load_json
from dpmon.record.typed_json import from_json
from dpmon.run.lifecycle import has_live_supervisor, wait_until
from dpmon.run.run_directory import ID, RunError, load_info
from dpmon.run.run_registry import JOB
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.supervise.start_supervisor import ensure_supervisor, keep_child_statuses
from dpmon.text.cells import truncate
from dpmon.text.formatting import format_count_with_noun

_ENDED_STATES = ("lost", "elsewhere")
_JOB_CELLS = 24
_MAX_START_S = 30.0
"""Longest wait for the mirror process, even on a busy machine; then a second one is started."""
_SAME_START_S = 30.0
"""Ranks that Slurm starts together all start within this time."""
_STAMP_CHARS, _DIGIT_CHARS = len("20260101-000000-"), len("-0123")
"""Length of the time before the name in a run's id, and of the digits after it."""


class RemoteRun(NamedTuple):
    """A run and the host that listed it."""

    host: RemoteHost
    run: ListedRun

    @property
    def job(self) -> str:
        """The job of the run, equal on all its nodes; empty while it is unknown."""
        return "" if self.run.job is None else f"{self.run.job.get('by')} {self.run.job.get('id')}"

    @property
    def name(self) -> str:
        """The name of the run without its digits, from its id, which was validated."""
        return self.run.id[_STAMP_CHARS:-_DIGIT_CHARS]

    @property
    def is_live(self) -> bool:
        """Whether the command runs, as far as the host knows."""
        return self.run.status is None and self.run.unknown is None and self.run.state not in _ENDED_STATES


def hosts_from_options(options: argparse.Namespace) -> list[RemoteHost]:
    """Return the hosts that the options name, each once. Raises UsageError and HostError."""
    keep_child_statuses()
    names = list(options.host or ())
    if options.hosts is not None:
        names += expand_hostlist(options.hosts)
    hosts = resolve_hosts(names, via=options.via)
    if options.slurm is not None:
        job_hosts = slurm_hosts(options.slurm)
        hosts += job_hosts if options.via is None else resolve_hosts([host.name for host in job_hosts], via=options.via)
    elif options.via is not None and not names:
        raise UsageError("--via needs hosts: name them with --host or --hosts")
    return list({host.name: host for host in hosts}.values())


def list_remote_runs(requested_hosts: Sequence[RemoteHost]) -> tuple[list[RemoteRun], dict[str, HostOutput]]:
    """Return the runs of all hosts by their start, each on one host; and by host, the outputs that list no run."""
    hosts, outputs = run_dpmon_on_hosts(requested_hosts, ("ls", "--json"))
    runs_by_id: dict[str, list[RemoteRun]] = {}
    failed = {}
    for host, output in zip(hosts, outputs, strict=True):
        lines = output.lines
        runs = [run for run in map(_parse_listed_run, lines) if run is not None]
        for run in runs:
            if not run.machines:  # a mirror has no processes of its own
                runs_by_id.setdefault(run.id, []).append(RemoteRun(host, run))
        if output.why:
            failed[host.name] = output
        elif lines and not runs:
            last_line = sanitize_line(lines[-1].decode("utf-8", "replace"), 200)
            failed[host.name] = HostOutput(
                [], f"it lists no run that this dpmon can read, but prints: {last_line}", True
            )
    # Hosts with a shared home directory list each other's runs.
    runs_by_host = dict.fromkeys((host.name for host in hosts), 0)
    remote_runs = []
    for copies in sorted(runs_by_id.values(), key=lambda copies: copies[0].run.started_unix):
        owner = min(copies, key=lambda copy: (copy.run.state == "elsewhere", runs_by_host[copy.host.name]))
        runs_by_host[owner.host.name] += 1
        remote_runs.append(owner)
    return remote_runs, failed


def _parse_listed_run(line: bytes) -> ListedRun | None:
    """Parse a line of `dpmon ls --json`. Return None for anything else, such as a banner."""
    try:
        members = load_json(line)
        run = from_json(ListedRun, [members[name] for name in ListedRun._fields])
    except (ValueError, TypeError, LookupError):
        return None
    if not ID.fullmatch(run.id) or run.name != run.id[_STAMP_CHARS:]:
        return None
    job = run.job and {key: sanitize_line(str(run.job[key]), 200) for key in run.job}
    return run._replace(state=sanitize_line(run.state, 20), job=job)


def group_by_job(runs: Sequence[RemoteRun]) -> list[list[RemoteRun]]:
    """Return the runs of each job, or a single run whose job is unknown; the job with the newest run is the last."""
    groups: dict[str, list[RemoteRun]] = {}
    for remote_run in runs:
        groups.setdefault(remote_run.job or remote_run.run.id, []).append(remote_run)
    return sorted(groups.values(), key=lambda group: group[-1].run.started_unix)


def choose_job_runs(
    runs: Sequence[RemoteRun], job_name: str | None, slurm: str | None = None
) -> dict[str, list[RemoteRun]]:
    """Return the runs of the job `job_name`, else of the newest live job, else of the newest job, by host.

    `job_name`: a job's id, or the name or id of one of its runs. While no job is known, the runs of that name belong
    together. RunError if there is none, or if no live run has reported yet which job it belongs to.

    A host can have several runs of a job: one per rank (`srun dpmon ...`), or one per start of the job. Those of its
    last start are chosen, by their number in the job: its live ones, else those that started with its newest one.
    """
    groups = group_by_job(runs)
    if slurm is not None:
        job_id, _, _ = slurm.partition(".")
        groups = [group for group in groups if f"{group[0].job}.".startswith(f"slurm {job_id}.")]
        if not groups and any(remote_run.is_live and not remote_run.job for remote_run in runs):
            raise RunError(_unknown_job_error(runs))
    if job_name is not None:
        groups = [group for group in groups if any(_matches(remote_run, job_name) for remote_run in group)]
        if groups and not groups[-1][0].job:
            groups = [[remote_run for group in groups for remote_run in group if not remote_run.job]]
    if not groups:
        raise RunError(
            f"no host that replied has a run {job_name or f'of job {slurm}'}: `dpmon ls` with the same hosts lists"
            " their runs and jobs (a job is known once its ranks train)"
        )
    live_groups = [group for group in groups if any(remote_run.is_live for remote_run in group)]
    known_groups = [group for group in live_groups if group[0].job]
    live_hosts = {remote_run.host.name for group in live_groups for remote_run in group}
    if job_name is None and not known_groups and len(live_hosts) > 1:
        raise RunError(_unknown_job_error(runs))
    runs_by_host: dict[str, list[RemoteRun]] = {}
    for remote_run in (known_groups or live_groups or groups)[-1]:
        runs_by_host.setdefault(remote_run.host.name, []).append(remote_run)
    return {name: _newest_start(host_runs) for name, host_runs in runs_by_host.items()}


def _unknown_job_error(runs: Sequence[RemoteRun]) -> str:
    return (
        "no run has reported yet which job it belongs to: attach again when one trains, or give its name,"
        f" such as {runs[-1].run.name}"
    )


def _newest_start(runs: Sequence[RemoteRun]) -> list[RemoteRun]:
    newest_unix = runs[-1].run.started_unix
    live_runs = [remote_run for remote_run in runs if remote_run.is_live]
    last_runs = live_runs or [r for r in runs if r.run.started_unix > newest_unix - _SAME_START_S]
    return sorted(last_runs, key=lambda remote_run: remote_run.run.node or 0)


def _matches(remote_run: RemoteRun, name: str) -> bool:
    run = remote_run.run
    _, _, job_id = remote_run.job.partition(" ")
    return name in (run.id, run.name, remote_run.name, remote_run.job, job_id)


def attach(options: argparse.Namespace) -> int:
    """Show the runs of one job on several hosts as one run."""
    metrics_path = resolve_metrics_path(options.metrics)
    directory, commands = _find_or_create_mirror(options, hosts_from_options(options), metrics_path)
    os.environ["DPMON_METRICS"] = metrics_path or ""
    mirror = ensure_supervisor(directory, commands)
    # Once run.json names it, it is replaced if it is killed.
    wait_until(lambda: not mirror.is_running or has_live_supervisor(load_info(directory)), _MAX_START_S)
    return attach_to_directory(directory, options, commands)


def _find_or_create_mirror(
    options: argparse.Namespace, requested_hosts: Sequence[RemoteHost], metrics_path: str | None
) -> tuple[Path, list[list[str]]]:
    """Return the local run that mirrors the chosen job, created if necessary, and the commands of its nodes.

    RunError if no host has a run.
    """
    runs, failed = list_remote_runs(requested_hosts)
    for name, output in failed.items():
        print_message(f"{name}: {output.why}")
    if not runs:
        raise RunError(_no_run_error(len(requested_hosts) - len(failed)))
    runs_by_host = choose_job_runs(runs, options.run, options.slurm)
    chosen_runs = [remote_run for host_runs in runs_by_host.values() for remote_run in host_runs]
    # Assume the path that dpmon has on another host that is reached in the same way.
    dpmon_command = next(
        (remote_run.host.dpmon for remote_run in chosen_runs if remote_run.host.connection_words), ("dpmon",)
    )
    job = JOB + chosen_runs[0].job.replace(" ", ":", 1)
    node_commands: list[list[str]] = []
    for host in requested_hosts:
        name = host.name
        for number, remote_run in enumerate(runs_by_host.get(name, ()), 1):
            node_name = name if number == 1 else f"{name}:{number}"
            node_commands.append([node_name, remote_run.run.id, *remote_run.host.command_prefix])
        if name in failed and not failed[name].for_good:
            if job != JOB and PLAIN_WORD.fullmatch(job) and len(chosen_runs) == len(runs_by_host):
                node_commands.append([name, job, *host._replace(dpmon=dpmon_command).command_prefix])
                print_message(f"{name}: dpmon keeps trying, and shows it when it replies")
            else:
                print_message(
                    f"{name}: it is unknown which of its runs belongs to this job: attach again when it replies"
                )
        elif name not in runs_by_host and name not in failed:
            print_message(f"{name}: it has no run of this job, so it is not shown")
    age_s = max(remote_run.run.seconds for remote_run in chosen_runs)
    return find_or_create_mirror(chosen_runs[0].name, node_commands, max(age_s, 0.0), metrics_path), node_commands


def _no_run_error(reply_count: int) -> str:
    if not reply_count:
        return "no host replied"
    return f"no run on {format_count_with_noun(reply_count, 'host')} that replied"


def ls(options: argparse.Namespace) -> int:
    """List the runs of all hosts, those of a job together; return 1 if a host did not reply, else 0."""
    requested_hosts = hosts_from_options(options)
    runs, failed = list_remote_runs(requested_hosts)
    ordered = [remote_run for group in group_by_job(runs) for remote_run in group]
    if options.json:
        for remote_run in ordered:
            print(to_safe_json({"machine": remote_run.host.name, **remote_run.run._asdict()}))
        for name, output in failed.items():
            print(to_safe_json({"machine": name, "why": output.why}))
        return int(bool(failed))
    rows = []
    for remote_run in ordered:
        job = truncate(sanitize_line(remote_run.job) or "-", _JOB_CELLS)
        rows.append((job, remote_run.host.name, *remote_run.run.table_cells()))
    if rows:
        print_table(
            [("JOB", "NODE", *LIST_HEADERS), *rows], [[], *(remote_run.run.detail_lines() for remote_run in ordered)]
        )
    for name, output in failed.items():
        print_message(f"{name}: {output.why}")
    if not rows and len(requested_hosts) > len(failed):
        print_message(_no_run_error(len(requested_hosts) - len(failed)))
    return int(bool(failed))
