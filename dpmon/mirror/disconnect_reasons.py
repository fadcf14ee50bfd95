"""Why a command that should bring records from another machine has ended, in a sentence with the remedy."""

from __future__ import annotations

import re

from dpmon.run.lifecycle import signal_name
from dpmon.sanitize import sanitize_line

_WHY_CELLS = 300
MISSING = "dpmon is not there, or not in the PATH of its commands"
"""Of a machine where another path of dpmon may be tried."""
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
            "its job of Slurm is over: its last records may be missing",
            True,
        ),
        (r"unknown option|is not expected here|invalid choice", "its dpmon is of another version: update it", True),
        (r"dpmon: (there is no run[^\n]*)", None, True),
    )
)
"""What commands write on stderr; the sentence for it; whether trying again is useless."""


def explain_disconnect(status: int | None, errors: bytes, shown: bytes, *, was_open: bool) -> tuple[str, bool]:
    """Why a command ended, harmless to show, and whether trying again is useless.

    `status` as in subprocess, None if it still runs; `errors`: the end of its standard error; `shown`: what it printed
    in place of records; `was_open`: whether records had come.
    """
    said = errors.decode("utf-8", "replace").strip()
    for pattern, text, for_good in _CAUSES:
        if (found := pattern.search(said)) is not None:
            return text or sanitize_line(found[1], _WHY_CELLS), for_good
    if status == 127:
        return MISSING, True
    said = said or shown.decode("utf-8", "replace").strip()
    last = sanitize_line(said.rpartition("\n")[2].removeprefix("dpmon: "), _WHY_CELLS)
    if status is None:
        how = "it sends no more"
    elif status < 0:
        how = f"the command was ended by {signal_name(-status)}"
    else:
        how = "the connection was closed" if was_open else f"the command ended with status {status}"
    return f"{how}: {last}" if last else how, False
