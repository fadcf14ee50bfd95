"""One thing that was looked at."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, PROBLEM = STATES = ("ok", "warning", "problem")
"""ok; warning: dpmon works, with less; problem: it does not."""


class Check(NamedTuple):
    """What was looked at, how it is, what was found, and what to do about it (None where all is well)."""

    name: str
    state: str
    found: str
    remedy: str | None = None


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, OK, found)


def warning(name: str, found: str, remedy: str) -> Check:
    """dpmon works, with less."""
    return Check(name, WARNING, found, remedy)


def problem(name: str, found: str, remedy: str) -> Check:
    """dpmon does not work so."""
    return Check(name, PROBLEM, found, remedy)
