"""The checks of `dpmon doctor`, and the result of one check."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, PROBLEM = STATES = ("ok", "warning", "problem")
"""ok: no fault; warning: dpmon works, with limits; problem: dpmon does not work."""


class Check(NamedTuple):
    """One check: its name, state, result, and remedy (None if ok)."""

    name: str
    state: str
    found: str
    remedy: str | None = None


def ok(name: str, found: str) -> Check:
    """A check without a fault."""
    return Check(name, OK, found)


def warning(name: str, found: str, remedy: str) -> Check:
    """A fault that limits dpmon."""
    return Check(name, WARNING, found, remedy)


def problem(name: str, found: str, remedy: str) -> Check:
    """A fault that stops dpmon."""
    return Check(name, PROBLEM, found, remedy)
