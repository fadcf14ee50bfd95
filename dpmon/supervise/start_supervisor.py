"""Starts the supervisor of a run in the background, independent of the caller.

If dpmon was started with SIGCHLD ignored, the kernel reaps children itself, and their status is lost. A handler that
does nothing makes the kernel keep the status. The command gets the signal ignored again, as it would without dpmon.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import dpmon
from dpmon.run.lifecycle import EVENTS_FILE, is_command_alive, needs_supervisor, take_lock
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info
from dpmon.run.run_signals import SUPERVISES
from dpmon.run.safe_files import open_file

FINISH_S = 10.0
"""Longest wait until the record of a run is complete; some milliseconds per megabyte are usual."""

# The interpreter is isolated (-I): neither the current directory nor PYTHON* may put a user's random.py before the
# standard library's. The folder of dpmon comes right after the standard library, the rest of the caller's path last.
_BOOT = """\
import sys
directory, how, home, *places = sys.argv[1:]
at = next((i for i, p in enumerate(sys.path) if p.endswith("-packages")), len(sys.path))
sys.path.insert(at, home)
sys.path += [p for p in places if p not in sys.path]
from {} import main
main(directory, how)
"""
_SUPERVISOR, _TELLER = "dpmon.supervise.supervisor", "dpmon.notify.notifier"
_MIRROR = "dpmon.mirror.mirror"
"""In the place of the supervisor of a run on other machines."""
TAKE_OVER = "take over"
START_DIRECTORY = "DPMON_START_DIRECTORY"
"""The variable with the directory in which dpmon was started, and in which the commands for events run."""
MACHINE = "DPMON_MACHINE_"
"""Begins the names of the variables that give a mirror the words of its machines, as JSON. The number follows."""
ARGUMENT = "DPMON_ARGUMENT_"
"""Begins the names of the variables that give a supervisor the words with secrets, which run.json does not have. The
word's position in the command follows. Other users cannot read the environment of a process."""
TELLER_WAIT_S, MOST_TELLER_WAIT_S = 5.0, 600.0
"""Shortest and longest time between two starts of the process that tells the events."""


def start_supervisor(directory: Path, *, stdin: bool, secrets: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the supervisor for the run in `directory`; with `stdin`, the command gets dpmon's own input.

    `secrets`: the words with secrets, as variables (ARGUMENT). OSError if it cannot be started.
    """
    # Take the lock before the process exists, so that the run never seems to have lost its supervisor.
    lock = take_lock(directory)
    try:
        if lock is not None and lock >= 0:
            os.set_inheritable(lock, True)
        # The supervisor passes dpmon's own signal settings on to the command.
        how = "" if lock is None else str(lock)
        return _start(directory, how, stdin=stdin, before=sigchld_restorer(), more=secrets)
    finally:
        if lock is not None and lock >= 0:
            os.close(lock)


class NotifierLauncher:
    """Starts the process that tells the events of a run (dpmon.notify.notifier), if the user wants that."""

    def __init__(self, directory: Path, warn: Callable[[str], None], *, wanted: bool) -> None:
        self._wanted = wanted
        self._directory = directory
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._look_at = 0.0
        self._wait_s = TELLER_WAIT_S

    def is_at_work(self) -> bool:
        """Whether the process is alive, perhaps that of an earlier supervisor."""
        lock = take_lock(self._directory, EVENTS_FILE)
        if lock is not None and lock >= 0:
            os.close(lock)
        return lock is None

    def poll(self, now: float) -> None:
        """Start it unless one is at work, perhaps of an earlier supervisor. Ever more rarely, if it always dies."""
        if not self._wanted or now < self._look_at:
            return
        self._look_at = now + self._wait_s
        if self._process is not None:
            self._process.poll()  # if it has ended, it is no zombie any more
        lock = take_lock(self._directory, EVENTS_FILE)
        if lock is None:
            return
        self._wait_s = min(2 * self._wait_s, MOST_TELLER_WAIT_S)
        try:
            if lock < 0:
                raise OSError(f"{EVENTS_FILE} cannot be written and locked")
            os.set_inheritable(lock, True)
            self._process = _start(self._directory, str(lock), module=_TELLER)
        except OSError as error:
            self._warn(f"no event is told: {error.strerror or error}")
        finally:
            if lock >= 0:
                os.close(lock)


def lost_settings(info: RunInfo, *, has_event_command: bool, has_metrics: bool) -> list[str]:
    """Return a warning for each setting of the run that the supervisor or mirror taking over lacks."""
    has = {"on_event": has_event_command, "metrics": has_metrics}
    return [
        f"another background process took over without {option}, which it takes only from your own settings"
        for option, is_set in has.items()
        if info.options.get(option) and not is_set
    ]


class SupervisorTakeover:
    """Replaces the killed supervisor of a run, once: whatever killed it may kill each further one too."""

    def __init__(self, directory: Path, machines: Sequence[Sequence[str]] = ()) -> None:
        """`machines`: for each machine of a mirror, the words from which the mirror makes its command.

        A mirror is not started without them: the commands in a run's directory may come from another person.
        """
        self._directory = directory
        self._machines = machines
        self._tried = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the supervisor started here."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether a supervisor started here is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def killed(self) -> bool:
        """Whether a supervisor started here was killed, or failed."""
        return self._process is not None and self._process.poll() not in (None, 0)

    def start_if_needed(self) -> None:
        """Start a supervisor if the run has none, and none was started here before.

        It ends at once if another one was quicker.
        """
        # With a full or read-only disk, or without the directory, the run goes on as it is.
        with contextlib.suppress(OSError, RunError):
            info = load_info(self._directory)
            if self._tried or bool(info.nodes) != bool(self._machines):
                return
            if needs_supervisor(self._directory, info, load_exit(self._directory)):
                self._tried = True
                machines = {f"{MACHINE}{number}": json.dumps(words) for number, words in enumerate(self._machines)}
                module = _MIRROR if info.nodes else _SUPERVISOR
                self._process = _start(self._directory, TAKE_OVER, module=module, more=machines)
                _started.append(self._process)

    def wait_for_end(self) -> None:
        """Wait for the supervisor started here, which reads the rest of the rings of a run that is over."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(FINISH_S)


def ensure_supervisor(directory: Path, machines: Sequence[Sequence[str]] = ()) -> SupervisorTakeover:
    """Start a supervisor if the run has none; if the run is over, wait until its record is complete.

    `machines`: see SupervisorTakeover.
    """
    successor = SupervisorTakeover(directory, machines)
    successor.start_if_needed()
    info = load_info(directory)
    if not info.nodes and not is_command_alive(info):
        successor.wait_for_end()
    return successor


_started: list[subprocess.Popen[bytes]] = []
"""Supervisors that may outlive this process. Python warns about a running process whose Popen is collected."""


_was_ignored = False


def keep_child_statuses() -> None:
    """Keep the statuses of this process's children from now on; call it in the main thread."""
    global _was_ignored
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        _was_ignored = True
        signal.signal(signal.SIGCHLD, lambda *_: None)


def sigchld_restorer() -> Callable[[], object] | None:
    """A function for a child to call before exec (`preexec_fn`); None if it needs none.

    Only for a process without threads: between fork and exec other threads could hold locks.
    """
    return partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN) if _was_ignored else None


def _is_current_directory(place: str) -> bool:
    """Whether a path is the current directory, which may have been deleted."""
    try:
        return os.path.samefile(place, os.curdir)
    except OSError:
        return not os.path.isabs(place)


def _start(
    directory: Path,
    how: str,
    *,
    stdin: bool = False,
    before: Callable[[], object] | None = None,
    module: str = _SUPERVISOR,
    more: Mapping[str, str] = {},
) -> subprocess.Popen[bytes]:
    """Start a background process of the run. `more`: further variables of its environment."""
    try:
        cwd = os.getcwd()
    except OSError:  # the directory was deleted
        cwd = "/"
    env = {START_DIRECTORY: cwd, **os.environ, SUPERVISES: str(directory), **more}
    # Inside another run it must not look like one of that run's processes: `dpmon stop` would end it.
    env.pop("DPMON_RUN", None)
    home = str(Path(dpmon.__file__).resolve().parent.parent)
    places = [place for place in sys.path if place and not _is_current_directory(place)]
    bytecode = ["-B"] if sys.dont_write_bytecode else []  # the user's setting, which -I would ignore
    try:
        log = open_file(directory / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # another kind of file is in its place, or the disk is full: the run matters more than its log
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", *bytecode, "-c", _BOOT.format(module), str(directory), how, home, *places],
            env=env,
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            close_fds=False,
            start_new_session=True,
            preexec_fn=before,
        )
    finally:
        os.close(log)
