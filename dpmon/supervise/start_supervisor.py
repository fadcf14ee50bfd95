"""Starts the supervisor of a run in the background, independent of the caller.

If dpmon was started with SIGCHLD ignored, the kernel reaps children by itself, and their statuses are lost. A handler
that does nothing makes the kernel keep the statuses. For the command, the signal is ignored again, as without dpmon.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dpmon
from dpmon.run.lifecycle import EVENTS_FILE, is_command_alive, needs_supervisor, take_lock, wait_until
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info
from dpmon.run.run_signals import SUPERVISES
from dpmon.run.safe_files import open_file

COLLECTION_THRESHOLD = 100_000
"""How many new objects start a garbage collection in a supervisor or a mirror. Rows create many objects, but no
reference cycles."""

# The interpreter is isolated (-I): neither the current directory nor PYTHON* may put a user's random.py before the
# standard library's. The folder of dpmon comes right after the standard library, the rest of the caller's path last.
_BOOT = """\
import sys
directory, argument, dpmon_parent, *import_paths = sys.argv[1:]
index = next((i for i, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
sys.path.insert(index, dpmon_parent)
sys.path += [path for path in import_paths if path not in sys.path]
from {} import main
main(directory, argument)
"""
_SUPERVISOR, _NOTIFIER = "dpmon.supervise.supervisor", "dpmon.notify.notifier"
_MIRROR = "dpmon.mirror.mirror"
"""Runs instead of the supervisor if the run is on other nodes."""
TAKE_OVER = "take over"
START_DIRECTORY = "DPMON_START_DIRECTORY"
"""Environment variable: the directory in which dpmon was started. The commands for events run there."""
NODE_COMMAND_PREFIX = "DPMON_MACHINE_"
"""Environment variables with this prefix and a node's number give a mirror the command for that node, as JSON."""
SECRET_PREFIX = "DPMON_ARGUMENT_"
"""Environment variables with this prefix and a position give a supervisor the argument at this position of the command,
if the argument contains a secret. run.json does not have it. Other users cannot read the environment of a process."""
MIN_NOTIFIER_WAIT_S, MAX_NOTIFIER_WAIT_S = 5.0, 600.0
"""Shortest and longest time between two starts of the notifier."""


def start_supervisor(directory: Path, *, stdin: bool, secrets: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the supervisor of the run in `directory`. With `stdin`, the command gets dpmon's own standard input.

    `secrets`: environment variables with the arguments that contain secrets (SECRET_PREFIX).
    Raises OSError if the supervisor cannot be started.
    """
    # Take the lock before the process exists, so that the run never seems to have lost its supervisor.
    if (lock_fd := take_lock(directory)) is None:
        raise BlockingIOError(errno.EBUSY, f"another process uses {directory}")
    # The supervisor passes dpmon's own signal settings on to the command.
    return _start_with_lock(directory, lock_fd, stdin=stdin, preexec=sigchld_restorer(), variables=secrets)


class NotifierLauncher:
    """Launcher of a run's notifier (dpmon.notify.notifier), if the user has set a command for events."""

    def __init__(self, directory: Path, warn: Callable[[str], None], *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._directory = directory
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._check_at = 0.0
        self._wait_s = MIN_NOTIFIER_WAIT_S

    def poll(self, now: float) -> None:
        """Start the notifier unless one is already running. If it keeps dying, wait twice as long before each start."""
        if not self._is_enabled or now < self._check_at:
            return
        self._check_at = now + self._wait_s
        if self._process is not None:
            self._process.poll()  # reaps it, if it has ended
        if (lock_fd := take_lock(self._directory, EVENTS_FILE)) is None:
            return
        self._wait_s = min(2 * self._wait_s, MAX_NOTIFIER_WAIT_S)
        try:
            self._process = _start_with_lock(self._directory, lock_fd, module=_NOTIFIER)
        except OSError as error:
            self._warn(f"the event command cannot run now: {error.strerror or error}")


def lost_settings(run_info: RunInfo, *, has_event_command: bool, has_metrics: bool) -> list[str]:
    """Return a warning for each option of the run that the supervisor or mirror that takes over does not have."""
    is_set_by_option = {"on_event": has_event_command, "metrics": has_metrics}
    return [
        f"another background process took over without {option}, which it takes only from your own settings"
        for option, is_set in is_set_by_option.items()
        if run_info.options.get(option) and not is_set
    ]


class SupervisorTakeover:
    """A replacement for a killed supervisor, started only once: whatever killed it may kill each replacement too."""

    def __init__(self, directory: Path, node_commands: Sequence[Sequence[str]] = ()) -> None:
        """`node_commands`: for each node of a mirror, its name, its run or job, and the words that run dpmon there.

        A mirror is not started without them: the commands in a run's directory may come from another person.
        """
        self._directory = directory
        self._node_commands = node_commands
        self._has_started = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor that this object started; None if it has started none."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the supervisor that this object started is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_killed(self) -> bool:
        """Whether the supervisor that this object started was killed or failed."""
        return self._process is not None and self._process.poll() not in (None, 0)

    def start_if_needed(self) -> None:
        """Start a supervisor if the run has none and this object has not started one before.

        The new supervisor ends immediately if another process was faster to start one.
        """
        # If the disk is full or read-only, or the directory was deleted, the run continues without a supervisor.
        with contextlib.suppress(OSError, RunError):
            run_info = load_info(self._directory)
            if self._has_started or bool(run_info.nodes) != bool(self._node_commands):
                return
            if needs_supervisor(self._directory, run_info, load_exit(self._directory)):
                self._has_started = True
                commands = enumerate(self._node_commands)
                variables = {f"{NODE_COMMAND_PREFIX}{node}": json.dumps(command) for node, command in commands}
                module = _MIRROR if run_info.nodes else _SUPERVISOR
                self._process = _start(self._directory, TAKE_OVER, module=module, variables=variables)
                _started.append(self._process)


def ensure_supervisor(directory: Path, node_commands: Sequence[Sequence[str]] = ()) -> SupervisorTakeover:
    """Start a supervisor if the run has none. If the run has ended, wait until its record is complete.

    `node_commands`: see SupervisorTakeover.
    """
    takeover = SupervisorTakeover(directory, node_commands)
    takeover.start_if_needed()
    run_info = load_info(directory)
    if not run_info.nodes and not is_command_alive(run_info):
        wait_until(lambda: not takeover.is_running, 10.0)
    return takeover


_started: list[subprocess.Popen[bytes]] = []
"""Supervisors that may outlive this process. Python would warn if the Popen object of a running process were freed."""


_was_ignored = False


def keep_child_statuses() -> None:
    """Keep the exit statuses of this process's children from now on. Must be called in the main thread."""
    global _was_ignored
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        _was_ignored = True
        signal.signal(signal.SIGCHLD, lambda *_: None)


def sigchld_restorer() -> Callable[[], object] | None:
    """Return a function that ignores SIGCHLD again, for `preexec_fn` of Popen; None if the signal was not ignored.

    Only for a process without other threads, because they could hold locks between fork and exec.
    """
    return partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN) if _was_ignored else None


def _start_with_lock(directory: Path, lock_fd: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that gets the only descriptor of a lock; its argument is the descriptor's number."""
    try:
        os.set_inheritable(lock_fd, True)
        return _start(directory, str(lock_fd), **options)
    finally:
        os.close(lock_fd)


def _start(
    directory: Path,
    argument: str,
    *,
    stdin: bool = False,
    preexec: Callable[[], object] | None = None,
    module: str = _SUPERVISOR,
    variables: Mapping[str, str] = {},
) -> subprocess.Popen[bytes]:
    """Start `main(directory, argument)` of `module` in the background. `variables`: added to its environment."""
    try:
        cwd = os.getcwd()
    except OSError:  # the directory was deleted
        cwd = "/"
    environment = {START_DIRECTORY: cwd, **os.environ, SUPERVISES: str(directory), **variables}
    # Inside another run, it must not look like a process of that run: `dpmon stop` would end it.
    environment.pop("DPMON_RUN", None)
    dpmon_parent = str(Path(dpmon.__file__).resolve().parent.parent)
    import_paths = [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) != cwd]
    # -B is the user's setting, which -I would ignore.
    options = ["-I", "-B", "-c"] if sys.dont_write_bytecode else ["-I", "-c"]
    try:
        log_fd = open_file(directory / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # not a regular file, or the disk is full: the run is more important than its log
        log_fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return subprocess.Popen(
            [sys.executable, *options, _BOOT.format(module), str(directory), argument, dpmon_parent, *import_paths],
            env=environment,
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log_fd,
            close_fds=False,
            start_new_session=True,
            preexec_fn=preexec,
        )
    finally:
        os.close(log_fd)
