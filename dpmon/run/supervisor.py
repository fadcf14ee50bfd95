"""The background process of a run: starts the command, keeps its history, records how it ended.

It runs in a session of its own, outlives the terminal, and the training never waits for it: everything it does could
stop at any moment without the training noticing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dpmon.run import proc
from dpmon.run.ending import exit_info
from dpmon.run.launch import start_command
from dpmon.run.rundir import load_info, save
from dpmon.run.terminal import Terminal

if TYPE_CHECKING:
    from dpmon.run.metrics import Metrics

__all__ = ["main"]

LEAVE_S = 2.0
DRAIN_S = 0.2
"""A ring of 4 MiB is filled in 0.4 s by 100,000 records a second; that is as long as it may stay unread."""


class _Sampler(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def emit(self, kind: str, data: Mapping[str, Any]) -> None: ...
    def heard(self, payload: bytes) -> None: ...


class _Silent:
    """Stands in for the sampler where its ring could not be made: what it would record goes to supervisor.log."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        _log(f"{kind}: {dict(data)}")

    def heard(self, payload: bytes) -> None:
        pass


def _log(text: str) -> None:
    # Disk full: there is nobody left to tell.
    with contextlib.suppress(OSError):
        os.write(2, f"{time.strftime('%F %T')} {text}\n".encode("utf-8", "replace"))


class _WarningsLog:
    """The file in which a training process says what it could not say in its ring."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "warnings.log"
        self._at = 0

    def new(self) -> list[str]:
        """The texts of the lines that were added since the last time."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read(1 << 16)
        except OSError:
            return []
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return []
        self._at += len(whole) + 1
        lines = whole.decode("utf-8", "replace").split("\n")
        return [fields[2] for line in lines if len(fields := line.split(" ", 2)) == 3]


class Supervisor:
    """One run from the start of its command to its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._info = load_info(directory)
        self._terminal: Terminal | None = None
        self._leave_at: float | None = None
        self._command: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start the command and stay until it has ended; 0, or 2 if it could not be started."""
        inherited = _descriptors()
        self._handle_signals()
        try:
            if self._info.options.get("stdin") != "inherit":
                self._terminal = Terminal(self._directory, *self._window())
            command = start_command(self._info, self._directory, self._terminal, os.environ)
        except OSError as error:
            text = f"{self._info.command[0]} cannot be started: {error.strerror or error}"
            _log(text)
            save(self._directory, exit_info(self._info, 2, "supervisor", text))
            return 2
        self._command = command
        self._let_go(inherited)
        self._announce(command.pid)
        self._watch(command)
        return 0

    # ------------------------------------------------------------------------------------------ start

    def _window(self) -> tuple[int, int]:
        window = self._info.options.get("window")
        if isinstance(window, (list, tuple)) and len(window) == 2 and all(type(n) is int for n in window):
            return min(window[0], 9999), min(window[1], 9999)
        return 24, 80

    def _handle_signals(self) -> None:
        # Handlers, not SIG_IGN: what is ignored stays ignored in the command, a handler does not. What dpmon was
        # itself started with as ignored (nohup) is left so, as the command alone would have it.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._asked_to_leave)

    def _asked_to_leave(self, *_: object) -> None:
        # When the machine goes down everybody is told at once: wait a moment, to see the command's end too.
        if self._leave_at is None:
            self._leave_at = time.monotonic() + LEAVE_S

    def _let_go(self, inherited: list[int]) -> None:
        """Close what was only passed on to the command: a pipe's end held here would keep its reader waiting."""
        for fd in inherited:
            with contextlib.suppress(OSError):
                os.close(fd)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.close(null)
        os.chdir("/")  # the directory may be unmounted or deleted while the run goes on
        os.umask(0o077)
        with contextlib.suppress(OSError):  # where processors are short, the training comes first
            os.nice(5)

    def _announce(self, pid: int) -> None:
        self._info = replace(
            self._info,
            supervisor_pid=os.getpid(),
            supervisor_started=proc.started(os.getpid()),
            command_pid=pid,
            command_started=proc.started(pid),
        )
        try:
            save(self._directory, self._info)
        except OSError as error:
            _log(f"run.json cannot be written: {error}")

    # ------------------------------------------------------------------------------------------ watch

    def _sampler(self, pid: int) -> _Sampler:
        from dpmon.gpu.sampler import DeviceSampler

        try:
            return DeviceSampler(self._directory / "gpu.ring", self._info.start_ns, lambda: pid)
        except OSError as error:
            _log(f"no device samples: {error}")
            return _Silent()

    def _watch(self, command: subprocess.Popen[bytes]) -> None:
        from dpmon.run.drain import Drain  # sqlite is loaded while the command loads torch, not before

        sampler = self._sampler(command.pid)
        sampler.start()
        drain = Drain(
            self._directory, self._info, lambda text: sampler.emit("warning", {"process": None, "text": text})
        )
        warnings = _WarningsLog(self._directory)
        metrics = self._metrics(sampler)
        poller = self._poller(command.pid)
        drain.heard = sampler.heard
        while self._leave_at is None or time.monotonic() < self._leave_at:
            ended = command.poll() is not None
            for text in warnings.new():
                sampler.emit("warning", {"process": None, "text": text})
            busy = drain.drain(time.monotonic())
            if metrics is not None:
                metrics.tick(time.monotonic())
            if ended:
                break
            if self._terminal is not None:
                self._terminal.register(poller)
            if poller.poll(0 if busy else DRAIN_S * 1000) and self._terminal is not None:
                self._terminal.serve()
        if command.returncode is not None:
            self._finish(command.returncode, drain, sampler, metrics)
        else:
            drain.flush()
            drain.close()
            sampler.stop()

    def _poller(self, pid: int) -> select.poll:
        """What ends the wait between two drains: the command's end, and what is typed for it."""
        poller = select.poll()
        with contextlib.suppress(OSError, AttributeError):  # a kernel without pidfd: its end is seen a moment later
            poller.register(os.pidfd_open(pid), select.POLLIN)
        return poller

    def _metrics(self, sampler: _Sampler) -> Metrics | None:
        """What keeps the metrics file, if one was asked for."""
        asked = self._info.options.get("metrics")
        if not isinstance(asked, str):
            return None
        from dpmon.run.metrics import Metrics, metrics_path

        return Metrics(
            metrics_path(asked, self._info),
            self._directory,
            lambda text: sampler.emit("warning", {"process": None, "text": text}),
        )

    def _finish(self, returncode: int, drain: Any, sampler: _Sampler, metrics: Metrics | None) -> None:
        how = exit_info(self._info, returncode, "supervisor")
        drain.flush(over=True)
        seconds = (how.end_ns - self._info.start_ns) / 1e9
        sampler.emit("exit", {"status": how.status, "signal": how.signal, "t_s": seconds})
        drain.flush()
        drain.close()
        try:
            save(self._directory, how)
        except OSError as error:
            _log(f"exit.json cannot be written: {error}")
        if metrics is not None:
            metrics.end(how)
        sampler.stop()


def _descriptors() -> list[int]:
    """Open descriptors beyond the usual three, before any was opened here."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in found if fd > 2 and _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # the one that the list itself was read through
        return False
    return True


def main(directory: str) -> None:
    """Run the supervisor of the run in `directory` and end the process."""
    try:
        sys.exit(Supervisor(Path(directory)).run())
    except Exception as error:  # the trace goes to supervisor.log, the training goes on
        _log(f"{type(error).__name__}: {error}")
        raise
