"""Queries NCCL's own report of ranks that are missing, failed or behind. NCCL 2.24 and later answer (RAS)."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Collection
from contextlib import suppress

from dpmon.sanitize import sanitize_line

_ADDRESS = "localhost:28028"
"""The address at which NCCL answers, unless NCCL_RAS_ADDR names another one."""
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_WAIT_S = 2.0
"""Maximum wait for the answer. NCCL waits a second for each of its other processes."""
_REQUEST = b"timeout 1\nverbose status\n"
_MAX_BYTES, _MAX_LINES, _MAX_LINE_CHARS = 1 << 20, 20, 200
_PROCESS_PATTERN = re.compile(r"(?i)\bprocess (\d{1,10}) on node\b")


def query_ras_problems(pids: Collection[int]) -> tuple[str, ...]:
    """Return the lines in which NCCL names ranks that are missing, failed or behind.

    Empty if it names none of these pids, because another job may answer at the same address. Takes up to MAX_WAIT_S.
    """
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _ADDRESS).rpartition(":")
    if host.strip("[]") not in _LOCAL_HOSTS:  # dpmon never opens a connection to another machine
        return ()
    answer, deadline = b"", time.monotonic() + MAX_WAIT_S
    with (
        suppress(OSError, ValueError, OverflowError),
        socket.create_connection((host.strip("[]"), int(port)), MAX_WAIT_S) as connection,
    ):
        connection.sendall(_REQUEST)
        while len(answer) < _MAX_BYTES and (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            chunk = connection.recv(1 << 16)
            if not chunk:
                return _parse_problems(answer.decode("utf-8", "replace"), pids)
            answer += chunk
    return ()


def _parse_problems(text: str, pids: Collection[int]) -> tuple[str, ...]:
    """Return the lines below the headings "Errors" and "Warnings", if one of them names one of these processes."""
    lines = [line.rstrip() for line in text.splitlines()]
    problem_lines = lines[lines.index("Errors") :] if "Errors" in lines else []
    problems = [line for line in problem_lines if line.strip("=") not in ("", "Errors", "Warnings")]
    if not any(int(pid) in pids for line in problems for pid in _PROCESS_PATTERN.findall(line)):
        return ()
    return tuple(sanitize_line(line, _MAX_LINE_CHARS) for line in problems[:_MAX_LINES])
