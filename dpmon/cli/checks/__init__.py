"""What `dpmon doctor` looks at: a module a subject, each a function that gives Checks."""

from dpmon.cli.checks.check import Check

__all__ = ["Check"]
