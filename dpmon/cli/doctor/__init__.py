"""`dpmon doctor`: checks whether dpmon works here, and prints the reason and the remedy of each problem."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib.metadata import version

import dpmon
from dpmon.cli.doctor import local_checks, self_test
from dpmon.cli.doctor.local_checks import CONNECTION, OK, PROBLEM, STATES, Check, passed_check
from dpmon.cli.messages import print_message
from dpmon.cli.options import names_remote_hosts
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import supports_color, text_for_stream
from dpmon.text.formatting import format_count_with_noun

WIDTH = 80
_NAME_CELLS = 13
_STATE_CELLS = max(map(len, STATES)) + 2
_COLORS = {"ok": "32", "warning": "33", "problem": "31"}


def doctor(options: argparse.Namespace) -> int:
    """Run all checks, here or on other machines, and print them; return 1 if there is a problem, else 0."""
    checks_by_host: list[tuple[str, list[Check]]] = []
    hosts: Iterable[tuple[str, Iterable[Check]]] = [("", _run_local_checks(options.python))]
    if names_remote_hosts(options):
        hosts = _run_remote_checks(options)
    for name, running_checks in hosts:
        checks: list[Check] = []
        checks_by_host.append((name, checks))
        if name and not options.json:
            print(name)
        for check in running_checks:
            checks.append(check)
            if not options.json:
                _print_check(check)
    all_checks = [check for _, checks in checks_by_host for check in checks]
    if not options.json:
        print(_summary_line(all_checks))
    elif names_remote_hosts(options):
        host_members = [
            {"machine": name, "checks": [check._asdict() for check in checks]} for name, checks in checks_by_host
        ]
        print(json.dumps(host_members, indent=1))
    else:
        worst = STATES[max((STATES.index(check.state) for check in all_checks), default=0)]
        print(json.dumps({"state": worst, "checks": [check._asdict() for check in all_checks]}, indent=1))
    return int(any(check.state == PROBLEM for check in all_checks))


def _run_local_checks(python: str | None) -> Iterator[Check]:
    environ = dict(os.environ)
    yield passed_check("dpmon", f"{dpmon.__version__}, with textual {version('textual')}")
    yield from self_test.run_self_test(python, environ)
    yield from local_checks.check_terminal(environ)
    yield from local_checks.check_state_directory()
    yield local_checks.check_shared_memory()
    yield local_checks.check_logout()


def _run_remote_checks(options: argparse.Namespace) -> Iterator[tuple[str, Iterable[Check]]]:
    from dpmon.cli.doctor.remote_checks import check_remote_hosts
    from dpmon.cli.multi_node import hosts_from_options

    hosts = hosts_from_options(options)
    print_message(
        f"{format_count_with_noun(len(hosts), 'host')}: dpmon doctor runs there and imports torch,"
        " which takes up to two minutes"
    )
    yield from check_remote_hosts(hosts, options.python)


def _print_check(check: Check) -> None:
    lines = _check_lines(check, with_color=supports_color(sys.stdout, os.environ))
    print(text_for_stream("\n".join(lines), sys.stdout), flush=True)


def _check_lines(check: Check, *, with_color: bool) -> list[str]:
    """Return the check in lines of at most WIDTH cells: state, name and result, then the remedy."""
    state = check.state.ljust(_STATE_CELLS)
    if with_color:
        state = f"\x1b[{_COLORS[check.state]}m{state}\x1b[0m"
    text_width = WIDTH - _STATE_CELLS - _NAME_CELLS
    wrap = {"width": text_width, "break_on_hyphens": False}
    first, *more_lines = textwrap.wrap(sanitize_line(check.found), **wrap) or [""]  # type: ignore[arg-type]
    if check.remedy is not None:
        more_lines += textwrap.wrap(sanitize_line(f"-> {check.remedy}"), subsequent_indent="   ", **wrap)  # type: ignore[arg-type]
    return [
        f"{state}{check.name:<{_NAME_CELLS}}{first}",
        *(" " * (_STATE_CELLS + _NAME_CELLS) + line for line in more_lines),
    ]


def _summary_line(checks: list[Check]) -> str:
    counts = {state: sum(check.state == state for check in checks) for state in STATES}
    if counts[OK] == len(checks):
        return "all checks passed"
    parts = [f"{count} {state}{'s' if count > 1 else ''}" for state, count in counts.items() if state != OK and count]
    unreached = sum(check.name == CONNECTION for check in checks)
    if unreached == len(checks):
        return f"{' and '.join(parts)}; no other check was possible"
    return f"{' and '.join(parts)}; all other {'possible ' if unreached else ''}checks passed"
