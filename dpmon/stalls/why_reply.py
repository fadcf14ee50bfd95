"""The request for what each rank does (`dpmon why`), and the reply to it: two files in the run's directory."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from dpmon.record.safe_json import load_json
from dpmon.record.typed_json import from_json, to_json
from dpmon.run.safe_files import open_file, read_file, write_atomically
from dpmon.stalls.stall_report import StallReport

ASKED_FILE, ANSWER_FILE = "why-asked", "why.json"
STANDING_FILE = "standing.json"
"""The activities of this node's ranks while one makes no progress, for a reader that sees all nodes of their job."""
WAIT_S = 8.0
"""Maximum wait for the supervisor's reply."""
_POLL_S = 0.02
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Reply:
    """The content of ANSWER_FILE: a reply and the number of its request."""

    asked: int
    report: StallReport


def request_reply(directory: Path) -> int:
    """Request a reply from the supervisor. Return the number of the request."""
    fd = open_file(directory / ASKED_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        now = time.time_ns()  # the kernel's own times are some ms apart, so two requests could have the same time
        os.utime(fd, ns=(now, now))
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def last_request_number(directory: Path) -> int:
    """Return the number of the last request; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.lstat(directory / ASKED_FILE).st_mtime_ns
    return 0


def request_and_wait(directory: Path) -> StallReport | None:
    """Request a reply from the supervisor. Return it; None if it does not come. Raises OSError if that fails."""
    with contextlib.suppress(FileNotFoundError):
        (directory / ANSWER_FILE).unlink()  # after the clock was set back, an old reply could pass for a new one
    number = request_reply(directory)
    deadline = time.monotonic() + WAIT_S
    while (reply := read_reply(directory, number)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return reply


def write_reply(directory: Path, number: int, reply: StallReport) -> None:
    """Write the reply to a request in one step."""
    with contextlib.suppress(OSError):
        write_atomically(directory / ANSWER_FILE, json.dumps(to_json(_Reply(number, reply))))


def read_reply(directory: Path, number: int) -> StallReport | None:
    """Return the reply to a request; None while there is none."""
    with contextlib.suppress(OSError, ValueError):
        reply = from_json(_Reply, load_json(read_file(directory / ANSWER_FILE, _MAX_BYTES)))
        if reply.asked >= number:
            return reply.report
    return None
