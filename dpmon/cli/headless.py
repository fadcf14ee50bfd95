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

from dpmon.cli.messages import command_status, format_error, print_closing_summary
from dpmon.run.lifecycle import run_state
from dpmon.run.run_directory import ExitInfo, record_stop_request
from dpmon.run.run_registry import short_name
from dpmon.run.safe_files import open_file
from dpmon.run.stdin_terminal import send_input
from dpmon.sanitize import sanitize_line
from dpmon.supervise.foreground_guard import FORWARDED_SIGNALS
from dpmon.text.cells import text_for_stream

if TYPE_CHECKING:
    from dpmon.cli.status_stream import NonBlockingLineFile, ProgressReporter, StatusStream
    from dpmon.run.run_reader import RunReader
    from dpmon.supervise.foreground_guard import SupervisorGuard


CHUNK_BYTES = 1 << 18
IDLE_S = 0.03
LOOK_S = 0.05
STATUS_S = 10.0
GIVE_UP_S, LAST_S = 4.0, 1.0
"""Output is abandoned this long after a signal to end the run, but not before LAST_S after the run's end was seen."""
_ESCALATION = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


class DescriptorWriter:
    """A writer to stdout or stderr that waits for a slow reader until `gives_up` returns true."""

    def __init__(self, fd: int, gives_up: Callable[[], bool] = lambda: False) -> None:
        with contextlib.suppress(OSError):  # O_NONBLOCK on `fd` itself would also hold for the user's shell
            if os.isatty(fd):
                fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self._fd = fd
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self._gives_up = gives_up
        self.is_open = True
        self.is_at_line_start = True
        """Whether the next byte begins a line."""

    def write(self, data: bytes) -> int:
        """Write all of `data`; return how many bytes a slow reader missed. Without a reader, stop writing."""
        view = memoryview(data)
        while view and self.is_open:
            try:
                if self._poller.poll(IDLE_S * 1000):  # a pipe that is ready takes PIPE_BUF bytes at once
                    count = os.write(self._fd, view[: select.PIPE_BUF])
                    self.is_at_line_start, view = view[count - 1] == ord("\n"), view[count:]
            except BlockingIOError:
                time.sleep(IDLE_S)
            except OSError:
                self.is_open = False
                return 0
            if view and self._gives_up():
                self.is_open = False
        return len(view)


class LogCopier:
    """A copier of one growing log file, byte for byte."""

    def __init__(self, path: Path, writer: DescriptorWriter, keep: int | None = None) -> None:
        """Open the log. `keep`: begin this many bytes before its end; None: at its beginning."""
        self._path = path
        self.writer = writer
        self.left_bytes = 0
        """Number of bytes that were not copied, because the reader did not read them."""
        self._log_fd: int | None = None
        self.gap: str | None = None
        """How much before the current position was not copied; None if nothing, or if it was reported."""
        self._open_log()
        self._position = 0
        if keep is not None:
            self._position = max(0, self._size - keep)

    def _open_log(self) -> None:
        with contextlib.suppress(OSError):
            self._log_fd = open_file(self._path)

    @property
    def _size(self) -> int:
        return 0 if self._log_fd is None else os.fstat(self._log_fd).st_size

    def copy_chunk(self) -> bool:
        """Copy one chunk of new data. Return whether there was any."""
        if self._log_fd is None:
            self._open_log()
        if self._log_fd is None:
            return False
        data = os.pread(self._log_fd, CHUNK_BYTES, self._position)
        if not data:
            return False
        # After the read, because the supervisor may delete the oldest output meanwhile.
        start = os.lseek(self._log_fd, self._position, os.SEEK_DATA)
        if start > self._position:
            self.gap = f"{start - self._position:,} bytes"
            data = b"" if self.writer.is_at_line_start else b"\n"
            self._position = start
        else:
            self._position += len(data)
        missed_bytes = self.writer.write(data) if self.writer.is_open else 0
        if missed_bytes:
            self.left_bytes = missed_bytes + self._size - self._position
        return True


class HeadlessRun:
    """A run followed to its end without a screen."""

    def __init__(
        self,
        reader: RunReader,
        *,
        keep: int | None = None,
        json_target: NonBlockingLineFile | Literal["stderr"] | None = None,
    ) -> None:
        """Open the run's output: from here on the user may delete the run's directory.

        `keep`: show only this many bytes of the existing output. `json_target`: where to write one line of JSON per
        second; with "stderr", all messages are JSON too.
        """
        self._directory = reader.directory
        self._reader = reader
        self._guard: SupervisorGuard | None = None
        stderr = stdout = DescriptorWriter(2, self._gives_up)
        if not _same_file(1, 2):
            stdout = DescriptorWriter(1, self._gives_up)
        self._stderr = stderr
        writers = (stdout, stderr)
        self._copiers = [
            LogCopier(path, writer, keep) for path, writer in zip(reader.output_paths, writers, strict=False)
        ]
        self._speaks_json = json_target == "stderr"
        self._json_target = json_target
        self._status_stream: StatusStream | None = None
        self._interrupt_count = 0
        self._give_up_at = math.inf
        """When to stop waiting for readers that do not read the output (monotonic s)."""
        self._unsent_signals: deque[int] = deque()
        """Signals that arrived before the command was started and must still be sent to it."""
        self._has_printed_name = False
        self._printed_messages: set[str] = set()
        """Messages that are printed only once."""

    @cached_property
    def _progress(self) -> ProgressReporter:
        # Import the store on its first use: loading it at the start would delay the first output.
        from dpmon.cli.status_stream import ProgressReporter

        return ProgressReporter(self._reader)

    def run_until_end(self, guard: SupervisorGuard | None = None, early_signals: Sequence[int] = ()) -> int:
        """Copy and report until the run has ended, and print its summary; return its status, 2 if unknown.

        `guard` watches the supervisor that this process started; None to follow an existing run. `early_signals`:
        signals received before this call.
        """
        self._guard = guard
        if self._json_target is not None:
            from dpmon.cli.status_stream import StatusStream

            write = self._write_line if isinstance(self._json_target, str) else self._json_target.write
            self._status_stream = StatusStream(self._reader, write)
        self._handle_signals(early_signals)
        status_due = time.monotonic() + STATUS_S
        check_due = 0.0
        while True:
            now = time.monotonic()
            if now >= check_due:
                check_due = now + LOOK_S
                exit_info, has_ended = self._check_for_end()
                if not self._directory.exists():
                    self._print_once(f"the record was deleted ({self._directory}); training continues")
                if has_ended:
                    self._drain_output()
                    if self._status_stream is not None:
                        self._report_errors_once("last line of JSON", self._status_stream.write_final, exit_info)
                    if self._speaks_json:
                        return command_status(exit_info)
                    return print_closing_summary(self._directory, exit_info, self.print_message)
                if self._status_stream is not None:
                    self._report_errors_once("line of JSON", self._status_stream.write_if_due, now)
            copied = [self._copy_output(copier) for copier in self._copiers]
            if now >= status_due:
                status_due = now + STATUS_S
                self._report_errors_once("line of progress", self._print_progress)
            if not any(copied):
                self._wait_for_input()

    def _report_errors_once(self, name: str, action: Callable[..., None], *args: object) -> None:
        """Run `action`; report an error in dpmon once instead of raising it, which would lose the run's status."""
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self._print_once(f"no {name}: {format_error(error)}")

    def _check_for_end(self) -> tuple[ExitInfo | None, bool]:
        """Return how the run ended, and whether it has ended."""
        guard = self._guard
        if guard is None:
            # Check the state first: `exit_info` then sees everything that the supervisor wrote before it exited.
            state, _ = run_state(self._reader.directory, self._reader.refresh())
            exit_info = self._reader.exit_info()
            return exit_info, exit_info is not None or state == "lost"
        for _ in range(
            len(self._unsent_signals)
        ):  # `_forward_signal` may put a signal back, and a new signal may add one
            self._forward_signal(self._unsent_signals.popleft())
        guard.poll()
        exit_info = guard.exit_info()
        if exit_info is None:
            self._give_up_at = max(self._give_up_at, time.monotonic() + LAST_S)
        if guard.is_supervisor_killed:
            self._print_once("the supervisor was killed; training continues, and another supervisor takes over")
        if guard.is_takeover_killed and exit_info is None:
            name = short_name(self._reader.info)
            self._print_once(f"that supervisor was killed as well; nothing is recorded until dpmon attach {name}")
        return exit_info, exit_info is not None

    def _drain_output(self) -> None:
        for copier in self._copiers:
            while copier.writer.is_open and self._copy_output(copier):
                pass
        if left_bytes := sum(copier.left_bytes for copier in self._copiers):
            self.print_message(
                f"{left_bytes:,} bytes of the script's output were not copied: their reader did not read them"
            )

    def _gives_up(self) -> bool:
        """Return whether the run has ended and its readers have had enough time since a signal to end it."""
        if time.monotonic() <= self._give_up_at:
            return False
        _, has_ended = self._check_for_end()
        return has_ended

    def _copy_output(self, copier: LogCopier) -> bool:
        copied = copier.copy_chunk()
        if copier.gap is not None:
            self.print_message(
                f"the disk is full: {copier.gap} of the script's output were deleted before they were copied"
            )
            copier.gap = None
        return copied

    # ------------------------------------------------------------------------------------------ input, signals

    def _wait_for_input(self) -> None:
        """Wait briefly; if a line is typed meanwhile, send it to the command."""
        if self._guard is None or not _is_in_foreground():
            time.sleep(IDLE_S)
            return
        with contextlib.suppress(OSError, ValueError):
            readable, _, _ = select.select([0], [], [], IDLE_S)
            if readable:
                data = os.read(0, 4096)
                send_input(self._directory, data or b"\x04")
                if not data:  # a closed terminal is always ready, so `select` does not wait
                    time.sleep(IDLE_S)

    def _handle_signals(self, early_signals: Sequence[int]) -> None:
        if self._guard is None:
            return
        for signal_number in FORWARDED_SIGNALS:
            # A shell script starts its background jobs with signals ignored: leave these ignored.
            if signal.getsignal(signal_number) != signal.SIG_IGN:
                signal.signal(signal_number, self._on_signal)
        for early_signal in early_signals:
            self._on_signal(early_signal)

    def _on_signal(self, signal_number: int, *_: object) -> None:
        """Forward a signal to the command; each further interrupt is sent as a stronger signal."""
        if signal_number == signal.SIGINT:
            record_stop_request(self._directory)
            signal_number = _ESCALATION[min(self._interrupt_count, len(_ESCALATION) - 1)]
            self._interrupt_count += 1  # first, because the next interrupt may arrive while this one is forwarded
        if signal_number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL):
            self._give_up_at = min(self._give_up_at, time.monotonic() + GIVE_UP_S)
        self._forward_signal(signal_number)

    def _forward_signal(self, signal_number: int) -> None:
        if self._guard is not None and not self._guard.send(signal_number):
            self._unsent_signals.append(signal_number)

    # ------------------------------------------------------------------------------------------ messages

    def print_message(self, text: str) -> None:
        """Print a message of dpmon on stderr, never within a line of the script's output."""
        if self._speaks_json:
            self._write_line(json.dumps({"kind": "message", "text": text}).encode() + b"\n")
        else:
            self._write_line(text_for_stream(f"dpmon: {sanitize_line(text)}\n", sys.stderr).encode("utf-8", "replace"))

    def _print_once(self, text: str) -> None:
        if text not in self._printed_messages:
            self._printed_messages.add(text)
            self.print_message(text)

    def _write_line(self, line: bytes) -> bool:
        self._stderr.write((b"" if self._stderr.is_at_line_start else b"\n") + line)
        return True

    def _print_progress(self) -> None:
        """Print a progress line, unless the script's last line is incomplete (a bar, a prompt)."""
        if self._speaks_json:
            return
        for problem in self._progress.wrong_trainings():
            self._print_once(problem)
        text = self._progress.line()
        if text and self._stderr.is_at_line_start:
            if not self._has_printed_name:  # the name helps to find the run again if this terminal closes
                self._has_printed_name = True
                text = f"{text}  (run {short_name(self._reader.info)})"
            self.print_message(text)


def _same_file(fd: int, other_fd: int) -> bool:
    """Return whether two descriptors refer to the same file or terminal."""
    try:
        return os.path.sameopenfile(fd, other_fd)
    except OSError:
        return False


def _is_in_foreground() -> bool:
    """Return whether this process is in the foreground job of stdin's terminal; reading stops a background job."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
