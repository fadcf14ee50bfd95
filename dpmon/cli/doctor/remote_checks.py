"""Checks other hosts: whether each can be reached, which dpmon it has, and what its own `dpmon doctor` finds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import dpmon
from dpmon.cli.doctor.local_checks import CONNECTION, OK, STATES, Check, failed_check, passed_check, warning_check
from dpmon.cli.multi_node import RemoteRun, list_remote_runs
from dpmon.mirror.remote_hosts import HostOutput, RemoteHost, run_dpmon_on_hosts, run_on_hosts
from dpmon.record.safe_json import load_json
from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import format_state

_MAX_SILENCE_S = 120.0
"""Longest silence of a remote doctor, which imports torch."""


def check_remote_hosts(requested_hosts: Sequence[RemoteHost], python: str | None) -> Iterator[tuple[str, list[Check]]]:
    """Yield the name and the checks of each host."""
    hosts, outputs = run_dpmon_on_hosts(requested_hosts, ("--version",))
    versions = [_parse_version(output.lines) for output in outputs]
    reached_hosts = [host for host, version in zip(hosts, versions, strict=True) if version is not None]
    runs, failed = list_remote_runs(reached_hosts)
    words = ("doctor", "--json", *(() if python is None else ("--python", python)))
    doctor_replies = run_on_hosts(reached_hosts, words, silent_s=_MAX_SILENCE_S)
    doctor_outputs = {host.name: reply for host, reply in zip(reached_hosts, doctor_replies, strict=True)}
    for host, output, version in zip(hosts, outputs, versions, strict=True):
        if version is None:
            last_line = b"".join(output.lines[-1:]).decode("utf-8", "replace")
            reason = output.why or f"it does not print the version of dpmon, but: {sanitize_line(last_line, 200)}"
            remedy = f"when this works, so does dpmon: {shlex.join([*host.command_prefix, '--version'])}"
            yield host.name, [failed_check(CONNECTION, reason, remedy)]
            continue
        host_runs = [remote_run for remote_run in runs if remote_run.host.name == host.name]
        problem = failed[host.name].why if host.name in failed else None
        checks = [_check_version(version), _check_live_run(host_runs, problem, version)]
        yield host.name, [*checks, *_parse_remote_report(doctor_outputs[host.name])]


def _parse_version(lines: Sequence[bytes]) -> str | None:
    version_lines = (line for line in reversed(lines) if line.startswith(b"dpmon "))
    line = next(version_lines, None)
    return None if line is None else sanitize_line(line.removeprefix(b"dpmon ").decode("utf-8", "replace"), 40)


def _check_version(remote_version: str) -> Check:
    if remote_version == dpmon.__version__:
        return passed_check("dpmon", f"{remote_version}, the same as here")
    return warning_check("dpmon", f"{remote_version} there, {dpmon.__version__} here", "install the same version")


def _check_live_run(runs: Sequence[RemoteRun], reason: str | None, version: str) -> Check:
    live_runs = [remote_run for remote_run in runs if remote_run.is_live]
    if reason is not None:
        is_same_version = version == dpmon.__version__
        remedy = "make its start-up files print nothing" if is_same_version else "install the same dpmon there"
        return failed_check("run", reason, remedy)
    if not live_runs:
        return warning_check("run", "no live run there", "start the command under dpmon, as the user of the connection")
    newest = live_runs[-1]
    job = f"job {newest.job}" if newest.job else "job not known yet"
    return passed_check("run", f"{newest.run.name} {format_state(newest.run.state)}, {job}")


def _parse_remote_report(output: HostOutput) -> list[Check]:
    """Return the problems that the remote doctor reports, or one passed check if there are none."""
    lines = output.lines
    try:
        data = load_json(b"\n".join(lines[lines.index(b"{") :] if b"{" in lines else lines))
        checks = [Check(*(member.get(name) for name in Check._fields)) for member in data["checks"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        reason = output.why or "its output cannot be read"
        return [warning_check("doctor", f"its doctor does not reply: {reason}", "run `dpmon doctor` there")]
    texts = [Check(*("" if text is None else sanitize_line(text, 500) for text in check)) for check in checks[:50]]
    faults = [check for check in texts if check.state in STATES and check.state != OK]
    return faults or [passed_check("doctor", "all checks passed there")]
