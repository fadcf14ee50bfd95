"""Checks of other machines: whether each can be reached, which dpmon it has, and what its own `dpmon doctor` finds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import dpmon
from dpmon.cli.doctor.local_checks import CONNECTION, OK, STATES, Check, failed_check, passed_check, warning_check
from dpmon.cli.multi_node import RemoteRun, list_remote_runs
from dpmon.mirror.remote_hosts import HostOutput, RemoteHost, run_dpmon_on_hosts, run_on_hosts
from dpmon.record.safe_json import load_json
from dpmon.sanitize import sanitize_line

_TRIAL_S = 120.0
"""Longest silence of a doctor, which imports torch."""


def check_remote_hosts(asked: Sequence[RemoteHost], python: str | None) -> Iterator[tuple[str, list[Check]]]:
    """The checks of each machine, by its name."""
    found, answers = run_dpmon_on_hosts(asked, ("--version",))
    versions = [_parse_version(answer.lines) for answer in answers]
    reached = [machine for machine, version in zip(found, versions, strict=True) if version is not None]
    runs, failed = list_remote_runs(reached)
    words = ("doctor", "--json", *(() if python is None else ("--python", python)))
    own = dict(zip((machine.name for machine in reached), run_on_hosts(reached, words, silent_s=_TRIAL_S), strict=True))
    for machine, answer, version in zip(found, answers, versions, strict=True):
        if version is None:
            last = b"".join(answer.lines[-1:]).decode("utf-8", "replace")
            why = answer.why or f"it does not print the version of dpmon, but: {sanitize_line(last, 200)}"
            by_hand = f"when this works, so does dpmon: {shlex.join([*machine.command_prefix, '--version'])}"
            yield machine.name, [failed_check(CONNECTION, why, by_hand)]
            continue
        there = [there for there in runs if there.machine.name == machine.name]
        trouble = failed[machine.name].why if machine.name in failed else None
        yield (
            machine.name,
            [
                _check_version(version),
                _check_live_run(there, trouble, version),
                *_parse_remote_report(own[machine.name]),
            ],
        )


def _parse_version(lines: Sequence[bytes]) -> str | None:
    found = (line for line in reversed(lines) if line.startswith(b"dpmon "))
    return next((sanitize_line(line.removeprefix(b"dpmon ").decode("utf-8", "replace"), 40) for line in found), None)


def _check_version(found: str) -> Check:
    if found == dpmon.__version__:
        return passed_check("dpmon", f"{found}, as here")
    return warning_check("dpmon", f"{found} there, {dpmon.__version__} here", "install the same")


def _check_live_run(runs: Sequence[RemoteRun], why: str | None, version: str) -> Check:
    live = [there for there in runs if there.is_live]
    if why is not None:
        same = version == dpmon.__version__
        remedy = "make its start-up files print nothing" if same else "install the same dpmon there as here"
        return failed_check("run", why, remedy)
    if not live:
        return warning_check("run", "no run goes on there", "start the command under dpmon, as the user who is reached")
    there = live[-1]
    return passed_check(
        "run", f"{there.run.name} {there.run.state}, {f'job {there.job}' if there.job else 'job not known yet'}"
    )


def _parse_remote_report(answer: HostOutput) -> list[Check]:
    """What the doctor there finds; its faults, or one line if there are none."""
    lines = answer.lines
    try:
        data = load_json(b"\n".join(lines[lines.index(b"{") :] if b"{" in lines else lines))
        found = [Check(*(one.get(name) for name in Check._fields)) for one in data["checks"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        why = answer.why or "its output cannot be read"
        return [warning_check("doctor", f"its doctor does not answer: {why}", "run `dpmon doctor` there")]
    texts = [Check(*("" if text is None else sanitize_line(text, 500) for text in check)) for check in found[:50]]
    faults = [check for check in texts if check.state in STATES and check.state != OK]
    return faults or [passed_check("doctor", "all checks passed there")]
