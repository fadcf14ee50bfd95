"""Checks of other machines: whether each can be reached, which dpmon it has, and what its own `dpmon doctor` finds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import dpmon
from dpmon.cleaning import clean
from dpmon.cli.doctor.machine import OK, STATES, Check, ok, problem, warning
from dpmon.cli.machines import RunThere, runs_of
from dpmon.mirror.hosts import Machine, ask, ask_dpmon
from dpmon.record.plainjson import load_json

_TRIAL_S = 120.0
"""Longest silence of a doctor, which imports torch."""


def checks_there(asked: Sequence[Machine], python: str | None) -> Iterator[tuple[str, list[Check]]]:
    """The checks of each machine, by its name."""
    found, answers = ask_dpmon(asked, ("--version",))
    reached = [machine for machine, answer in zip(found, answers, strict=True) if not answer.why]
    runs, failed = runs_of(reached)
    words = ("doctor", "--json", *(() if python is None else ("--python", python)))
    own = dict(zip((machine.name for machine in reached), ask(reached, words, silent_s=_TRIAL_S), strict=True))
    for machine, answer in zip(found, answers, strict=True):
        if answer.why:
            by_hand = f"when this works, so does dpmon: {shlex.join([*machine.words, '--version'])}"
            yield machine.name, [problem("connection", answer.why, by_hand)]
            continue
        there = [there for there in runs if there.machine.name == machine.name]
        trouble = failed[machine.name].why if machine.name in failed else None
        checks = [_version(answer.lines), _run(there, trouble), *_own_checks(own[machine.name].lines)]
        yield machine.name, checks


def _version(lines: Sequence[bytes]) -> Check:
    found = next((line.removeprefix(b"dpmon ") for line in reversed(lines) if line.startswith(b"dpmon ")), b"").decode(
        "utf-8", "replace"
    )
    if found == dpmon.__version__:
        return ok("dpmon", f"{found}, as here")
    return warning("dpmon", f"{clean(found, 40) or 'no version'} there, {dpmon.__version__} here", "install the same")


def _run(runs: Sequence[RunThere], why: str | None) -> Check:
    live = [there for there in runs if there.goes_on]
    if why is not None:
        return problem("run", why, "install the same dpmon there as here")
    if not live:
        return warning("run", "no run goes on there", "start the command under dpmon, as the user who is reached")
    there = live[-1]
    return ok("run", f"{there.run.name} {there.run.state}, {f'job {there.job}' if there.job else 'job not known yet'}")


def _own_checks(lines: Sequence[bytes]) -> list[Check]:
    """What the doctor there finds; its faults, or one line if there are none."""
    try:
        data = load_json(b"\n".join(lines[lines.index(b"{") :] if b"{" in lines else lines))
        found = [Check(*(one.get(name) for name in Check._fields)) for one in data["checks"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return [warning("doctor", "its doctor does not answer", "run `dpmon doctor` there")]
    texts = [Check(*("" if text is None else clean(text, 500) for text in check)) for check in found[:50]]
    faults = [check for check in texts if check.state in STATES and check.state != OK]
    return faults or [ok("doctor", "all checks passed there")]
