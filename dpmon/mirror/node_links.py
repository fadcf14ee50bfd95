"""The commands that bring lines from other machines: starts them, reads them, and starts them again.

A command is the user's own way to a machine, such as `ssh node2 dpmon export ...`. Its output is hostile: what is read,
kept and waited for has a limit, and text from it is shown only after `sanitize_line`. One machine's trouble never
delays the others: nothing here waits for a single command.
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
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any, NamedTuple

from dpmon.mirror.disconnect_reasons import explain_disconnect
from dpmon.record.safe_json import load_json
from dpmon.run.proc import ended_child_status
from dpmon.store.row_exchange import RECORDS, VERSION

MAX_LINE = 1 << 20
MAX_BANNER = 1 << 16
"""Most bytes before the marker, and of the marker line."""
_MAX_ERRORS = 4096
_MAX_UNSENT = 1 << 16
_PIECE = 1 << 16
"""Bytes of one read: what a pipe holds."""
_STARTING = 8
"""Most commands that have not reached their machine yet: sshd refuses more than about 10 at a time (MaxStartups)."""
_SILENT_S = 5.0
_CONNECT_S = 15.0
"""Longest wait for the marker."""
_LONGEST_WAIT_S = 30.0
_STEADY_S = 10.0
"""A connection that was open for this long has worked: the next one is tried soon."""
_LEAVE_S = 1.0
"""Time to end after the output has ended, and after SIGTERM."""
_LOOK_S = 0.1

_MARK = RECORDS.encode()
_MARKER = re.compile(_MARK + rb"(\d{1,9}) (\{.*\})\s*")


class LinkOpened(NamedTuple):
    """A machine was reached, and its dpmon sends records; `marker`: its first line."""

    node: int
    marker: Mapping[str, Any]


class LineReceived(NamedTuple):
    """A line of at most MAX_LINE bytes, without its end."""

    node: int
    text: bytes


class LinkClosed(NamedTuple):
    """A command has ended, or was ended; `why`: one sentence, harmless to show; empty if it did what it should.

    `for_good`: trying again is useless, so it is not started again.
    """

    node: int
    why: str
    for_good: bool


Report = LinkOpened | LineReceived | LinkClosed


@dataclass(slots=True)
class _NodeLink:
    """One machine's command, and what it has sent that was not passed on."""

    node: int
    due_s: float = 0.0
    failures: int = 0
    process: subprocess.Popen[bytes] | None = None
    open: bool = False
    was_open: bool = False
    began_s: float = 0.0
    heard_s: float = 0.0
    ended_s: float | None = None
    """When its output ended."""
    rest: bytearray = field(default_factory=bytearray)
    """The start of a line."""
    banner: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class NodeLinks:
    """A command for each of `count` machines; `command(node)` gives its words, for each start anew.

    With `once`, the commands need no marker and get no input, each runs once, and all output is passed on as lines.
    `silent_s`: how long an open command may say nothing (with `once`: any command).
    """

    def __init__(
        self, count: int, command: Callable[[int], list[str]], *, once: bool = False, silent_s: float = _SILENT_S
    ) -> None:
        self._command = command
        self._once = once
        self._silent_s = silent_s
        self._links = [_NodeLink(node) for node in range(count)]
        self._idle = list(self._links)
        self._leaving: list[tuple[subprocess.Popen[bytes], float, signal.Signals]] = []
        """Commands that are to end, and when they get which signal if they have not."""
        self._selector = DefaultSelector()
        self._look_at = 0.0

    def poll(self, timeout_s: float) -> list[Report]:
        """What has happened; waits for at most `timeout_s` for something to happen."""
        until = time.monotonic() + timeout_s
        while True:
            # The time is from before the wait: with a later one, a stop of this process looks like silent machines.
            now = time.monotonic()
            reports = self._start_due_commands(now)
            wait = 0.0 if reports else min(max(until - now, 0.0), _LOOK_S)
            for key, _ in self._selector.select(wait):
                key.data(reports)
            if now >= self._look_at:
                self._look_at = now + _LOOK_S
                self._check_ended_commands(now, reports)
            if reports or now >= until:
                return reports

    def send(self, node: int, line: str) -> bool:
        """Send a line to the machine's command; never waits. False if it is not open, or does not read."""
        link = self._links[node]
        data = line.encode() + b"\n"
        if not link.open or len(link.unsent) + len(data) > _MAX_UNSENT:
            return False
        link.unsent += data
        return self._write(link)

    def close_link(self, node: int, why: str, *, for_good: bool) -> LinkClosed:
        """End the machine's command because of what it sent; unless `for_good`, it is started again later."""
        link = self._links[node]
        if link.process is not None:
            return self._closed(link, why, for_good)
        if for_good and link in self._idle:
            self._idle.remove(link)
        return LinkClosed(node, why, for_good)  # it has ended by itself, and when it is started again is known

    def close_all(self) -> None:
        """End all commands; takes at most about three seconds."""
        for link in self._links:
            self._hang_up(link, _LEAVE_S)
        self._idle.clear()
        until = time.monotonic() + 3 * _LEAVE_S
        while self._leaving and time.monotonic() < until:
            self._reap(time.monotonic())
            time.sleep(0.01)
        for _ in range(2):  # both signals at once: if this process was stopped meanwhile, a command may still run
            self._reap(math.inf)
        self._selector.close()

    # -------------------------------------------------------------------------------------------- starting

    def _start_due_commands(self, now: float) -> list[Report]:
        """Start the commands that are due, the longest due first."""
        if not self._idle:
            return []
        room = _STARTING - sum(link.process is not None and not link.open for link in self._links)
        due = sorted((link for link in self._idle if link.due_s <= now), key=lambda link: link.due_s)[: max(room, 0)]
        reports: list[Report] = []
        for link in due:
            self._idle.remove(link)
            words = self._command(link.node)
            try:
                link.process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL if self._once else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    # On this machine, `-m` would find another dpmon in the current directory.
                    cwd="/" if words[0] == sys.executable else None,
                    start_new_session=True,  # without a terminal, nothing can ask for a password
                )
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                reports.append(self._closed(link, f"{words[0]} cannot be started: {reason}", for_good=True))
                continue
            self._watch(link, link.process, now)
        return reports

    def _watch(self, link: _NodeLink, process: subprocess.Popen[bytes], now: float) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        link.began_s = link.heard_s = now
        os.set_blocking(process.stderr.fileno(), False)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdout, EVENT_READ, lambda reports: self._read(link, reports))
        self._selector.register(process.stderr, EVENT_READ, lambda _: self._read_errors(link))

    # -------------------------------------------------------------------------------------------- reading

    def _read(self, link: _NodeLink, reports: list[Report]) -> None:
        if link.process is None or link.process.stdout is None:
            return  # ended while its neighbors were read
        data = os.read(link.process.stdout.fileno(), _PIECE)
        link.heard_s = time.monotonic()
        if not data:
            self._selector.unregister(link.process.stdout)
            link.ended_s = link.heard_s
            if self._once and link.rest:
                self._handle_line(link, bytes(link.rest), reports)
            return
        link.rest += data
        if b"\n" in data:
            *lines, rest = bytes(link.rest).split(b"\n")
            link.rest = bytearray(rest)
            for line in lines:
                self._handle_line(link, line, reports)
                if link.process is None:
                    return
        if len(link.rest) + len(link.banner) > (MAX_LINE if link.open or self._once else MAX_BANNER):
            reports.append(self._closed(link, self._overflow_reason(link)))

    def _handle_line(self, link: _NodeLink, line: bytes, reports: list[Report]) -> None:
        if len(line) > MAX_LINE:
            reports.append(self._closed(link, self._overflow_reason(link)))
        elif link.open or self._once:
            link.banner[:] = line[:_MAX_ERRORS] if self._once else b""  # the reason, if it fails
            reports.append(LineReceived(link.node, line.removesuffix(b"\r")))
        elif (found := _MARKER.fullmatch(line, max(line.find(_MARK), 0))) is None:
            link.banner += line + b"\n"
        else:
            self._handle_header(link, int(found[1]), found[2], reports)

    def _handle_header(self, link: _NodeLink, version: int, text: bytes, reports: list[Report]) -> None:
        try:
            marker = load_json(text)
        except ValueError:
            reports.append(self._closed(link, "it does not send the records of dpmon"))
            return
        if version != VERSION:
            why = f"its dpmon sends records of version {version}, and this one reads version {VERSION}"
            reports.append(self._closed(link, why, for_good=True))
            return
        link.open = link.was_open = True
        link.banner.clear()
        reports.append(LinkOpened(link.node, marker))

    def _overflow_reason(self, link: _NodeLink) -> str:
        if link.open or self._once:
            return f"it sent a line of more than {MAX_LINE >> 20} MiB"
        return f"it printed more than {MAX_BANNER >> 10} KiB before any record"

    def _read_errors(self, link: _NodeLink) -> None:
        if link.process is None or link.process.stderr is None:
            return
        data = b""
        with suppress(BlockingIOError):
            data = os.read(link.process.stderr.fileno(), _PIECE)
            if not data and link.process.stderr in self._selector.get_map():
                self._selector.unregister(link.process.stderr)
        link.errors = (link.errors + data)[-_MAX_ERRORS:]

    def _write(self, link: _NodeLink) -> bool:
        """Send what the pipe takes, the rest when it takes more; False if the command does not read any more."""
        if link.process is None or link.process.stdin is None or link.process.stdin.closed:
            return False
        stdin = link.process.stdin
        waited = stdin in self._selector.get_map()
        try:
            del link.unsent[: os.write(stdin.fileno(), link.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            link.unsent.clear()
            if waited:
                self._selector.unregister(stdin)
            stdin.close()
            return False
        if link.unsent and not waited:
            self._selector.register(stdin, EVENT_WRITE, lambda _: self._write(link))
        elif waited and not link.unsent:
            self._selector.unregister(stdin)
        return True

    # -------------------------------------------------------------------------------------------- ending

    def _check_ended_commands(self, now: float, reports: list[Report]) -> None:
        """Report the commands that have ended, or say nothing; end those that outlive that."""
        for link in self._links:
            if link.process is None:
                continue
            if link.ended_s is not None:
                status = _status(link.process)
                if status is not None or now - link.ended_s > _LEAVE_S:
                    self._read_errors(link)
                    shown = bytes(link.banner + link.rest)
                    why, for_good = "", True
                    if not (self._once and status == 0):
                        why, for_good = explain_disconnect(status, bytes(link.errors), shown, was_open=link.open)
                    # What is useless at first may pass later: without its directory of users, a machine refuses all.
                    reports.append(self._closed(link, why, for_good and not link.was_open))
            elif now - link.heard_s > self._silent_s and (link.open or self._once):
                reports.append(self._closed(link, f"it has sent nothing for {self._silent_s:.0f} s"))
            elif not link.open and not self._once and now - link.began_s > _CONNECT_S:
                reports.append(self._closed(link, f"it did not answer within {_CONNECT_S:.0f} s"))
        self._reap(now)

    def _closed(self, link: _NodeLink, why: str, for_good: bool = False) -> LinkClosed:
        """End the command, and plan the next start unless it ends `for_good`."""
        link.failures = 1 if link.open and time.monotonic() - link.began_s > _STEADY_S else link.failures + 1
        self._hang_up(link)
        if not (for_good or self._once):
            wait_s = min(2.0 ** min(link.failures - 1, 9), _LONGEST_WAIT_S)  # the power has no limit of its own
            link.due_s = time.monotonic() + wait_s * random.uniform(0.5, 1.0)
            self._idle.append(link)
        return LinkClosed(link.node, why, for_good)

    def _hang_up(self, link: _NodeLink, wait_s: float = 0.0) -> None:
        """Stop listening to a command, which ends it; send it signals after `wait_s` seconds."""
        process, link.process = link.process, None
        link.open, link.ended_s = False, None
        link.rest, link.banner, link.errors, link.unsent = bytearray(), bytearray(), bytearray(), bytearray()
        if process is None:
            return
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None and not stream.closed:
                if stream in self._selector.get_map():
                    self._selector.unregister(stream)
                stream.close()
        self._leaving.append((process, time.monotonic() + wait_s, signal.SIGTERM))
        self._reap(time.monotonic())

    def _reap(self, now: float) -> None:
        """Collect the commands that have ended, and send signals to those that have not.

        A command that ends by itself leaves its children alone: ssh may leave a connection that the user shares
        (ControlPersist), which goes on over a child (ProxyCommand). Of a command that got signals, nothing is left.
        """
        leaving, self._leaving = self._leaving, []
        for process, due_s, number in leaving:
            ended = _status(process) is not None
            if number == signal.SIGKILL if ended else now >= due_s:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)  # the number is still its own: it was not collected
                due_s, number = now + _LEAVE_S, signal.SIGKILL
            if ended:
                process.wait()
            else:
                self._leaving.append((process, due_s, number))


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status of a command that has ended, which stays a zombie until it is collected; else None."""
    try:
        return ended_child_status(process.pid)
    except ChildProcessError:  # whoever started dpmon lets the kernel collect its children
        return 0
