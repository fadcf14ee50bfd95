"""Starts the commands that bring lines from other nodes, reads their output, and restarts them.

A command begins with the user's own connection command, as in `ssh node2 dpmon export ...`. Its output is not trusted:
there are limits for what is read, kept or waited for, and its text is shown only after `sanitize_line`. Problems of one
node never delay the others: nothing here waits for a single command.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple

from dpmon.mirror.disconnect_reasons import explain_disconnect
from dpmon.record.safe_json import load_json
from dpmon.run.proc import ended_child_status
from dpmon.store.row_exchange import MARK

MAX_LINE_BYTES = 1 << 20
MAX_BANNER_BYTES = 1 << 16
"""Largest size of what precedes the header line, and of that line itself."""
_MAX_STDERR_BYTES = 4096
_READ_BYTES = 1 << 16
"""Size of one read: the capacity of a pipe."""
_MAX_STARTING = 8
"""How many commands may be connecting at once. sshd refuses more than about 10 at a time (MaxStartups)."""
_MAX_SILENCE_S = 5.0
_MAX_CONNECT_S = 15.0
"""Longest wait for the header line."""
_MAX_RETRY_WAIT_S = 30.0
_MIN_STEADY_S = 10.0
"""After a connection that was open for this long, the next one is tried soon."""
_GRACE_S = 1.0
"""How long a command may run after its output has ended, and after SIGTERM."""
_CHECK_INTERVAL_S = 0.1

_MARK = MARK.encode()
_HEADER = re.compile(_MARK + rb"(\{.*\})\s*")


class LinkOpened(NamedTuple):
    """A report that a node was reached and its dpmon sends records. `header`: its first line."""

    node: int
    header: Mapping[str, Any]


class LineReceived(NamedTuple):
    """A line of at most MAX_LINE_BYTES, without its line end."""

    node: int
    text: bytes


class LinkClosed(NamedTuple):
    """A report that a command has ended or was ended.

    `why`: the reason, one sentence, safe to show; empty if the command has succeeded. `for_good`: trying again is
    useless, so the command is not started again.
    """

    node: int
    why: str
    for_good: bool


Report = LinkOpened | LineReceived | LinkClosed


@dataclass(slots=True)
class _NodeLink:
    """One node's command, and what it has sent that was not reported yet."""

    node: int
    start_at_s: float = 0.0
    failures: int = 0
    process: subprocess.Popen[bytes] | None = None
    is_open: bool = False
    was_open: bool = False
    start_s: float = 0.0
    heard_s: float = 0.0
    end_s: float | None = None
    """When its output ended (monotonic s)."""
    partial_line: bytearray = field(default_factory=bytearray)
    """The beginning of a line whose end has not arrived."""
    banner: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)


class NodeLinks:
    """The commands for `count` nodes. `command(node)` returns the words of a command, and is called for each start.

    With `once`, commands need no header line and get no input, each runs once, and all output is reported as lines.
    `silent_s`: how long an open command may send nothing (with `once`: any command).
    """

    def __init__(
        self, count: int, command: Callable[[int], list[str]], *, once: bool = False, silent_s: float = _MAX_SILENCE_S
    ) -> None:
        self._command = command
        self._once = once
        self._silent_s = silent_s
        self._links = [_NodeLink(node) for node in range(count)]
        self._idle = list(self._links)
        self._leaving: list[tuple[subprocess.Popen[bytes], float, signal.Signals]] = []
        """Commands that should end, with the time and number of the signal that they get otherwise."""
        self._selector = DefaultSelector()
        self._check_at_s = 0.0

    def poll(self, timeout_s: float) -> list[Report]:
        """Return new reports. Wait for at most `timeout_s` for the first one."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            # Take the time before the wait. Otherwise, nodes seem to be silent if this process was stopped in it.
            now_s = time.monotonic()
            reports = self._start_due_commands(now_s)
            wait_s = 0.0 if reports else min(max(deadline_s - now_s, 0.0), _CHECK_INTERVAL_S)
            for key, _ in self._selector.select(wait_s):
                key.data(reports)
            if now_s >= self._check_at_s:
                self._check_at_s = now_s + _CHECK_INTERVAL_S
                self._check_ended_commands(now_s, reports)
            if reports or now_s >= deadline_s:
                return reports

    def send(self, node: int, line: str) -> bool:
        """Send a line to a node's command. Never blocks. Return False if the command is not open or does not read.

        A pipe accepts all of a line, or nothing. Only a line above 4 KiB may be cut, which also spoils the next one.
        """
        link, data = self._links[node], line.encode() + b"\n"
        if not link.is_open or link.process is None or link.process.stdin is None:
            return False
        with suppress(OSError):
            return os.write(link.process.stdin.fileno(), data) == len(data)
        return False

    def close_link(self, node: int, reason: str, *, for_good: bool) -> LinkClosed:
        """End a node's command because of what it sent. Unless `for_good`, it is started again later."""
        link = self._links[node]
        if link.process is not None:
            return self._close(link, reason, for_good)
        if for_good and link in self._idle:
            self._idle.remove(link)
        return LinkClosed(node, reason, for_good)  # it has already ended, and its restart is planned

    def close_all(self) -> None:
        """End all commands. Takes at most about three seconds."""
        for link in self._links:
            self._hang_up(link, _GRACE_S)
        self._idle.clear()
        deadline_s = time.monotonic() + 3 * _GRACE_S
        while self._leaving and time.monotonic() < deadline_s:
            self._reap(time.monotonic())
            time.sleep(0.01)
        # SIGTERM and SIGKILL at once: if this process was stopped meanwhile, a command may still run.
        for _ in range(2):
            self._reap(math.inf)
        self._selector.close()

    # -------------------------------------------------------------------------------------------- starting

    def _start_due_commands(self, now_s: float) -> list[Report]:
        """Start the commands that are due, those first that have waited longest."""
        if not self._idle:
            return []
        free_starts = _MAX_STARTING - sum(link.process is not None and not link.is_open for link in self._links)
        due_links = sorted((link for link in self._idle if link.start_at_s <= now_s), key=lambda link: link.start_at_s)
        reports: list[Report] = []
        for link in due_links[: max(free_starts, 0)]:
            self._idle.remove(link)
            words = self._command(link.node)
            try:
                link.process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL if self._once else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    # For this node, `-m` could import another dpmon from the current directory.
                    cwd="/" if words[0] == sys.executable else None,
                    start_new_session=True,  # without a terminal, no command can ask for a password
                )
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                reports.append(self._close(link, f"{words[0]} cannot be started: {reason}", for_good=True))
                continue
            self._watch(link, link.process, now_s)
        return reports

    def _watch(self, link: _NodeLink, process: subprocess.Popen[bytes], now_s: float) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        link.start_s = link.heard_s = now_s
        os.set_blocking(process.stderr.fileno(), False)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdout, EVENT_READ, lambda reports: self._read(link, reports))
        self._selector.register(process.stderr, EVENT_READ, lambda _: self._read_errors(link))

    # -------------------------------------------------------------------------------------------- reading

    def _read(self, link: _NodeLink, reports: list[Report]) -> None:
        if link.process is None or link.process.stdout is None:
            return  # it was ended while other links were read
        data = os.read(link.process.stdout.fileno(), _READ_BYTES)
        link.heard_s = time.monotonic()
        if not data:
            self._selector.unregister(link.process.stdout)
            link.end_s = link.heard_s
            if self._once and link.partial_line:
                self._handle_line(link, bytes(link.partial_line), reports)
            return
        link.partial_line += data
        if b"\n" in data:
            *lines, partial_line = bytes(link.partial_line).split(b"\n")
            link.partial_line = bytearray(partial_line)
            for line in lines:
                self._handle_line(link, line, reports)
                if link.process is None:
                    return
        max_bytes = MAX_LINE_BYTES if link.is_open or self._once else MAX_BANNER_BYTES
        if len(link.partial_line) + len(link.banner) > max_bytes:
            reports.append(self._close(link, self._overflow_reason(link)))

    def _handle_line(self, link: _NodeLink, line: bytes, reports: list[Report]) -> None:
        if len(line) > MAX_LINE_BYTES:
            reports.append(self._close(link, self._overflow_reason(link)))
        elif link.is_open or self._once:
            link.banner[:] = line[:_MAX_STDERR_BYTES] if self._once else b""  # explains a failure
            reports.append(LineReceived(link.node, line.removesuffix(b"\r")))
        elif (match := _HEADER.fullmatch(line, max(line.find(_MARK), 0))) is None:
            link.banner += line + b"\n"
        else:
            self._handle_header(link, match[1], reports)

    def _handle_header(self, link: _NodeLink, text: bytes, reports: list[Report]) -> None:
        try:
            header = load_json(text)
        except ValueError:
            reports.append(self._close(link, "it does not send the records of dpmon"))
            return
        link.is_open = link.was_open = True
        link.banner.clear()
        reports.append(LinkOpened(link.node, header))

    def _overflow_reason(self, link: _NodeLink) -> str:
        if link.is_open or self._once:
            return f"it sent a line of more than {MAX_LINE_BYTES >> 20} MiB"
        return f"it printed more than {MAX_BANNER_BYTES >> 10} KiB before any record"

    def _read_errors(self, link: _NodeLink) -> None:
        if link.process is None or link.process.stderr is None:
            return
        data = b""
        with suppress(BlockingIOError):
            data = os.read(link.process.stderr.fileno(), _READ_BYTES)
            if not data and link.process.stderr in self._selector.get_map():
                self._selector.unregister(link.process.stderr)
        link.stderr = (link.stderr + data)[-_MAX_STDERR_BYTES:]

    # -------------------------------------------------------------------------------------------- ending

    def _check_ended_commands(self, now_s: float, reports: list[Report]) -> None:
        """Report commands that have ended, and end commands that are silent or do not connect."""
        for link in self._links:
            if link.process is None:
                continue
            if link.end_s is not None:
                status = _status(link.process)
                if status is not None or now_s - link.end_s > _GRACE_S:
                    self._read_errors(link)
                    printed = bytes(link.banner + link.partial_line)
                    reason, for_good = "", True
                    if not (self._once and status == 0):
                        stderr = bytes(link.stderr)
                        reason, for_good = explain_disconnect(status, stderr, printed, was_open=link.is_open)
                    # An error that is final for a new link may be temporary for one that has worked before.
                    reports.append(self._close(link, reason, for_good and not link.was_open))
            elif now_s - link.heard_s > self._silent_s and (link.is_open or self._once):
                reports.append(self._close(link, f"it has sent nothing for {self._silent_s:.0f} s"))
            elif not link.is_open and not self._once and now_s - link.start_s > _MAX_CONNECT_S:
                reports.append(self._close(link, f"it did not answer within {_MAX_CONNECT_S:.0f} s"))
        self._reap(now_s)

    def _close(self, link: _NodeLink, reason: str, for_good: bool = False) -> LinkClosed:
        """End the command, and plan the next start unless `for_good`. Return the report."""
        link.failures = 1 if link.is_open and time.monotonic() - link.start_s > _MIN_STEADY_S else link.failures + 1
        self._hang_up(link)
        if not (for_good or self._once):
            wait_s = min(2.0 ** min(link.failures - 1, 9), _MAX_RETRY_WAIT_S)  # the power must not overflow
            link.start_at_s = time.monotonic() + wait_s * random.uniform(0.5, 1.0)
            self._idle.append(link)
        return LinkClosed(link.node, reason, for_good)

    def _hang_up(self, link: _NodeLink, wait_s: float = 0.0) -> None:
        """Close the streams of a command, so that it ends. Send it signals if it has not ended after `wait_s`."""
        process, link.process = link.process, None
        link.is_open, link.end_s = False, None
        link.partial_line, link.banner, link.stderr = bytearray(), bytearray(), bytearray()
        if process is None:
            return
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None and not stream.closed:
                if stream in self._selector.get_map():
                    self._selector.unregister(stream)
                stream.close()
        self._leaving.append((process, time.monotonic() + wait_s, signal.SIGTERM))
        self._reap(time.monotonic())

    def _reap(self, now_s: float) -> None:
        """Reap the commands that have ended, and send signals to those that have not.

        Children of a command that ends by itself are not killed: ssh may leave a connection that the user shares
        (ControlPersist), which needs a child process (ProxyCommand). A command that gets signals is killed completely.
        """
        leaving, self._leaving = self._leaving, []
        for process, signal_at_s, signal_number in leaving:
            has_ended = _status(process) is not None
            should_signal = signal_number == signal.SIGKILL if has_ended else now_s >= signal_at_s
            if should_signal:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal_number)  # the id is not reused before the process is reaped
                signal_at_s, signal_number = now_s + _GRACE_S, signal.SIGKILL
            if has_ended:
                process.wait()
            else:
                self._leaving.append((process, signal_at_s, signal_number))


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a command, None while it runs. An ended command stays a zombie until it is reaped."""
    try:
        return ended_child_status(process.pid)
    except ChildProcessError:  # SIGCHLD was ignored when dpmon was started, so the kernel has reaped it
        return 0
