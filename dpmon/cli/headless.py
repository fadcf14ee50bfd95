"""A run without a screen: passes the script's output through and prints a line of progress every few seconds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dpmon.cli.messages import format_error
from dpmon.run.lifecycle import run_state
from dpmon.run.run_directory import ExitInfo, deleted_bytes, record_stop_request
from dpmon.run.run_registry import short_name
from dpmon.run.safe_files import open_file
from dpmon.run.stdin_terminal import send_input
from dpmon.sanitize import sanitize_line
from dpmon.supervise.foreground_guard import FORWARDED_SIGNALS
from dpmon.text.cells import encode_for_stream

if TYPE_CHECKING:
    from dpmon.cli.status_stream import NonBlockingLineFile, ProgressReporter, StatusStream
    from dpmon.run.run_reader import RunReader
    from dpmon.supervise.foreground_guard import SupervisorGuard


CHUNK = 1 << 18
SETTLE_S = 1.0
"""Longest time that the supervisor takes to cut a log off and to count what it deleted."""
IDLE_S = 0.03
LOOK_S = 0.05
STATUS_S = 10.0
GIVE_UP_S, LAST_S = 4.0, 1.0
"""Output is given up this long after a signal to end the run, but not before LAST_S after the run's end was seen."""
_ESCALATION = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


class LogCopier:
    """Copies one log file to one descriptor, byte for byte, as the file grows."""

    def __init__(self, path: Path, fd: int, gives_up: Callable[[], bool] = lambda: False) -> None:
        self._path = path
        self._fd = fd
        with contextlib.suppress(OSError):  # O_NONBLOCK on `fd` itself would also hold for the user's shell
            if os.isatty(fd):
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self._gives_up = gives_up
        self.left = 0
        """Number of bytes that were not passed on, because `gives_up` returned true."""
        self._file: int | None = None
        self._at = 0
        self._deleted = deleted_bytes(path)
        """Bytes deleted before the beginning of the log that `_at` refers to."""
        self._short_since: float | None = None
        self.gap: str | None = None
        """How much before the current position was not passed on; None if nothing, or if it was reported."""
        self.open = True
        self.last = b"\n"
        """The last byte written, which shows whether a line begins."""
        self._open_log()

    def _open_log(self) -> None:
        with contextlib.suppress(OSError):
            self._file = open_file(self._path)

    def copy_chunk(self) -> bool:
        """Copy one chunk of new data; True if there was any."""
        if self._file is None:
            self._open_log()
        if self._file is None:
            return False
        data = os.pread(self._file, CHUNK, self._at)
        deleted = deleted_bytes(self._path)
        if deleted > self._deleted:  # the supervisor has cut the log off, because the disk is full
            missed = deleted - self._deleted - self._at
            self._deleted, self._at = deleted, max(0, -missed)
            if missed > 0:
                self.gap = f"{missed:,} bytes"
                if self.last != b"\n" and self.open:
                    self.write(b"\n")
            return True
        if not data and os.fstat(self._file).st_size < self._at:  # somebody else has cut it off to free space
            self._short_since = self._short_since or time.monotonic()
            if time.monotonic() < self._short_since + SETTLE_S:
                return False
            self._at, self.gap = 0, "perhaps a part"
        self._short_since = None
        self._at += len(data)
        if data and self.open:
            self.write(data)
        return bool(data)

    def write(self, data: bytes) -> None:
        """Write all of `data`, unless its reader is slow and `gives_up`; a missing reader ends only the copying."""
        view = memoryview(data)
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while view and self.open:
            try:
                if poller.poll(IDLE_S * 1000):  # a pipe that is ready takes PIPE_BUF bytes at once
                    count = os.write(self._fd, view[: select.PIPE_BUF])
                    self.last, view = bytes(view[count - 1 : count]), view[count:]
            except BlockingIOError:
                time.sleep(IDLE_S)
            except OSError:
                self.open = False
            if view and self._gives_up():
                self.open = False
                self.left = len(view) + (0 if self._file is None else os.fstat(self._file).st_size - self._at)

    def seek_before_end(self, keep: int) -> None:
        """Continue `keep` bytes before the current end of the log."""
        if self._file is not None:
            self._at = max(0, os.fstat(self._file).st_size - keep)


class HeadlessRun:
    """Follows one run to its end."""

    def __init__(
        self,
        reader: RunReader,
        *,
        keep: int | None = None,
        lines: NonBlockingLineFile | Literal["stderr"] | None = None,
    ) -> None:
        """Open the run's output: from here on the user may delete the run's directory.

        `keep`: show only this many bytes of the existing output. `lines`: where to write one line of JSON per second;
        with "stderr", all messages are JSON too.
        """
        self._directory = reader.directory
        self._reader = reader
        self._guard: SupervisorGuard | None = None
        paths = self._reader.output_paths
        self._streams = [LogCopier(path, fd, self._gives_up) for fd, path in enumerate(paths, start=1)]
        if keep is not None:
            for stream in self._streams:
                stream.seek_before_end(keep)
        self._err = self._streams[-1] if len(paths) > 1 else LogCopier(self._directory / "none", 2, self._gives_up)
        self._speaks_json = lines == "stderr"
        self._lines_to = lines
        self._lines: StatusStream | None = None
        self._interrupts = 0
        self._until = math.inf
        """When to stop waiting for readers that do not take the output (monotonic s)."""
        self._owed: deque[int] = deque()
        """Signals that came before the command was started and must still be sent to it."""
        self._named = False
        self._said: set[str] = set()
        """Messages that are printed only once."""

    @cached_property
    def _progress(self) -> ProgressReporter:
        # Import the store on its first use: loading it at the start would delay the first output.
        from dpmon.cli.status_stream import ProgressReporter

        return ProgressReporter(self._reader)

    def run_until_end(self, guard: SupervisorGuard | None = None, early: Sequence[int] = ()) -> ExitInfo | None:
        """Copy and report until the run has ended; return how it ended, None if unknown.

        `guard` watches the supervisor that this process started; None to follow an existing run. `early`: signals
        received before this call.
        """
        self._guard = guard
        if self._lines_to is not None:
            from dpmon.cli.status_stream import StatusStream

            write = self._put_line if isinstance(self._lines_to, str) else self._lines_to.write
            self._lines = StatusStream(self._reader, write)
        self._handle_signals(early)
        status_due = time.monotonic() + STATUS_S
        look_due = 0.0
        while True:
            now = time.monotonic()
            if now >= look_due:
                look_due = now + LOOK_S
                how, over = self._check_for_end()
                if not self._directory.exists():
                    self._say_once(f"the record was deleted ({self._directory}); the training goes on")
                if over:
                    self._drain_output()
                    if self._lines is not None:
                        self._report_errors_once("last line of JSON", self._lines.write_final, how)
                    return how
                if self._lines is not None:
                    self._report_errors_once("line of JSON", self._lines.write_if_due, now)
            moved = [self._copy_output(stream) for stream in self._streams]
            if now >= status_due:
                status_due = now + STATUS_S
                self._report_errors_once("line of progress", self._print_progress)
            if not any(moved):
                self._wait()

    def _report_errors_once(self, what: str, do: Callable[..., None], *args: object) -> None:
        """Run `do`; an error in dpmon is reported once and not raised, because it must not lose the run's status."""
        try:
            do(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self._say_once(f"no {what}: {format_error(error)}")

    def _check_for_end(self) -> tuple[ExitInfo | None, bool]:
        """How the run ended, and whether it is over."""
        guard = self._guard
        if guard is None:
            # Check the state first: everything that the supervisor wrote before it left is then visible to `exit_info`.
            gone = run_state(self._reader.directory, self._reader.refresh())[0] == "lost"
            how = self._reader.exit_info()
            return how, how is not None or gone
        for _ in range(len(self._owed)):  # `_forward_signal` may put a signal back, and a new signal may add one
            self._forward_signal(self._owed.popleft())
        guard.poll()
        how = guard.exit_info()
        if how is None:
            self._until = max(self._until, time.monotonic() + LAST_S)
        if guard.is_supervisor_killed:
            self._say_once("the supervisor was killed; the training goes on, and another supervisor takes over")
        if guard.is_takeover_killed and how is None:
            name = short_name(self._reader.info)
            self._say_once(f"that supervisor was killed too; nothing is recorded until dpmon attach {name}")
        return how, how is not None

    def _drain_output(self) -> None:
        for stream in self._streams:
            while stream.open and self._copy_output(stream):
                pass
        if left := sum(stream.left for stream in self._streams):
            self.print_message(
                f"{left:,} bytes of the script's output were not passed on: their reader did not take them"
            )

    def _gives_up(self) -> bool:
        """Whether the run is over, and its readers have had enough time since a signal to end it."""
        return time.monotonic() > self._until and self._check_for_end()[1]

    def _copy_output(self, stream: LogCopier) -> bool:
        moved = stream.copy_chunk()
        if stream.gap is not None:
            self.print_message(
                f"the log was cut off (full disk?): {stream.gap} of the script's output was not passed on"
            )
            stream.gap = None
        return moved

    # ------------------------------------------------------------------------------------------ input, signals

    def _wait(self) -> None:
        """Wait a moment; if a line is typed meanwhile, send it to the command."""
        if self._guard is None or not _is_in_foreground():
            time.sleep(IDLE_S)
            return
        with contextlib.suppress(OSError, ValueError):
            if select.select([0], [], [], IDLE_S)[0]:
                data = os.read(0, 4096)
                send_input(self._directory, data or b"\x04")
                if not data:  # a closed terminal is always ready, so `select` does not wait
                    time.sleep(IDLE_S)

    def _handle_signals(self, early: Sequence[int]) -> None:
        if self._guard is None:
            return
        for number in FORWARDED_SIGNALS:
            # A shell script starts its background jobs with signals ignored: leave these ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        for came_before in early:
            self._on_signal(came_before)

    def _on_signal(self, number: int, *_: object) -> None:
        """Pass a signal on to the command; each further interrupt is sent as a stronger signal."""
        if number == signal.SIGINT:
            record_stop_request(self._directory)
            number = _ESCALATION[min(self._interrupts, len(_ESCALATION) - 1)]
            self._interrupts += 1  # first, because the next interrupt may come while this one is passed on
        if number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL):
            self._until = min(self._until, time.monotonic() + GIVE_UP_S)
        self._forward_signal(number)

    def _forward_signal(self, number: int) -> None:
        if self._guard is not None and not self._guard.send(number):
            self._owed.append(number)

    # ------------------------------------------------------------------------------------------ messages

    def print_message(self, text: str) -> None:
        """Print a message of dpmon on stderr, never within a line of the script's."""
        if self._speaks_json:
            self._put_line(json.dumps({"kind": "message", "text": text}).encode() + b"\n")
        else:
            self._put_line(encode_for_stream(f"dpmon: {sanitize_line(text)}\n", sys.stderr).encode("utf-8", "replace"))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.print_message(text)

    def _put_line(self, line: bytes) -> bool:
        shared = _same_file(1, 2)
        self._err.write((b"" if self._is_at_line_start(shared) else b"\n") + line)
        if shared:
            self._streams[0].last = b"\n"
        return True

    def _is_at_line_start(self, shared: bool) -> bool:
        """Whether text written to stderr now begins a line; `shared`: stdout is the same file."""
        return self._err.last == b"\n" and (not shared or self._streams[0].last == b"\n")

    def _print_progress(self) -> None:
        """Print the line of progress, unless the script's last line is incomplete (a bar, a prompt)."""
        if self._speaks_json:
            return
        text = self._progress.line()
        if text and self._is_at_line_start(_same_file(1, 2)):
            if not self._named:  # the name helps to find the run again if this terminal closes
                self._named = True
                text = f"{text}  (run {short_name(self._reader.info)})"
            self.print_message(text)


def _same_file(one: int, other: int) -> bool:
    """Whether two descriptors refer to the same file or terminal."""
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _is_in_foreground() -> bool:
    """Whether stdin is a terminal and this process is in its foreground job; reading would stop a background job."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
