"""What NCCL itself says about ranks that are missing, failed or behind: from 2.24 on, it answers questions (RAS)."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Collection
from contextlib import suppress

from dpmon.sanitize import sanitize_line

_ADDRESS = "localhost:28028"
"""Where NCCL answers, unless NCCL_RAS_ADDR names another place."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
LIMIT_S = 2.0
"""Longest wait for the answer. NCCL waits a second for each of its other processes."""
_QUESTION = b"timeout 1\nverbose status\n"
_MOST_BYTES, _MOST_LINES, _MOST_CHARACTERS = 1 << 20, 20, 200
_PROCESS = re.compile(r"(?i)\bprocess (\d{1,10}) on node\b")


def query_ras_problems(pids: Collection[int]) -> tuple[str, ...]:
    """The lines with which NCCL names ranks that are missing, failed or behind; empty if it names none of these pids.

    Another job may answer at the same address. Takes up to LIMIT_S.
    """
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _ADDRESS).rpartition(":")
    if host.strip("[]") not in _LOCAL:  # nothing of dpmon's connects to another machine
        return ()
    answer, end = b"", time.monotonic() + LIMIT_S
    with (
        suppress(OSError, ValueError, OverflowError),
        socket.create_connection((host.strip("[]"), int(port)), LIMIT_S) as connection,
    ):
        connection.sendall(_QUESTION)
        while len(answer) < _MOST_BYTES and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            part = connection.recv(1 << 16)
            if not part:
                return _parse_problems(answer.decode("utf-8", "replace"), pids)
            answer += part
    return ()


def _parse_problems(text: str, pids: Collection[int]) -> tuple[str, ...]:
    """The lines below the headings "Errors" and "Warnings", if one of them is about one of these processes."""
    lines = [line.rstrip() for line in text.splitlines()]
    below = lines[lines.index("Errors") :] if "Errors" in lines else []
    found = [line for line in below if line.strip("=") not in ("", "Errors", "Warnings")]
    if not any(int(pid) in pids for line in found for pid in _PROCESS.findall(line)):
        return ()
    return tuple(sanitize_line(line, _MOST_CHARACTERS) for line in found[:_MOST_LINES])
