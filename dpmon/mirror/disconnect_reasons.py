"""Explains in a sentence, with a remedy, why a command that brings records from another node has ended."""

from __future__ import annotations

import re

from dpmon.run.lifecycle import signal_name
from dpmon.sanitize import sanitize_line

_MAX_REASON_CELLS = 300
MISSING = "dpmon is not there, or not in the PATH of its commands"
"""The reason after which another path of dpmon may be tried on the node."""
_CAUSES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), text, for_good)
    for pattern, text, for_good in (
        (r"temporary failure in name resolution", "its name cannot be looked up: no DNS server answers", False),
        (r"could not resolve hostname|name or service not known", "its name has no address: check the name", True),
        (r"connection refused", "it refused the connection: no ssh server at its port", False),
        (r"host key verification failed", "its host key is unknown or has changed: connect to it once by hand", True),
        (
            r"permission denied \(|too many authentication failures",
            "it asks for a password, or refuses your key: set up a key that needs none",
            True,
        ),
        (r"no route to host|network is unreachable|(connection|operation) timed out", "it cannot be reached", False),
        (
            r"timeout, server .* not responding|broken pipe|closed by remote|reset by peer",
            "the connection was cut",
            False,
        ),
        (
            r"dpmon\S{0,40} (command )?not found|no such file or directory.*dpmon|dpmon.*no such file or directory"
            r"|executable file not found|no module named dpmon",
            MISSING,
            True,
        ),
        (
            r"slurm job \S+ has expired|invalid job id specified|job/step already complet",
            "its Slurm job has ended: its last records may be missing",
            True,
        ),
        (r"unknown option|is not expected here|invalid choice", "its dpmon is of another version: update it", True),
        (r"dpmon: (there is no run[^\n]*)", None, True),
    )
)
"""A pattern of what commands write to stderr, the sentence for it, and whether trying again is useless."""


def explain_disconnect(status: int | None, stderr: bytes, stdout: bytes, *, was_open: bool) -> tuple[str, bool]:
    """Return the reason why a command ended, safe to show, and whether trying again is useless.

    `status` as in subprocess, None if the command still runs. `stderr`: the end of its standard error. `stdout`: what
    it printed instead of records. `was_open`: whether records had arrived.
    """
    message = stderr.decode("utf-8", "replace").strip()
    for pattern, text, for_good in _CAUSES:
        if (match := pattern.search(message)) is not None:
            return text or sanitize_line(match[1], _MAX_REASON_CELLS), for_good
    if status == 127:
        return MISSING, True
    message = message or stdout.decode("utf-8", "replace").strip()
    last_line = sanitize_line(message.rpartition("\n")[2].removeprefix("dpmon: "), _MAX_REASON_CELLS)
    if status is None:
        reason = "it stopped sending"
    elif status < 0:
        reason = f"the command was ended by {signal_name(-status)}"
    else:
        reason = "the connection was closed" if was_open else f"the command ended with status {status}"
    return f"{reason}: {last_line}" if last_line else reason, False
