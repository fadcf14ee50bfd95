"""`dpmon SCRIPT.py`: creates the run, starts its supervisor, and shows it with or without a screen."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dpmon
from dpmon.cli.headless import HeadlessRun
from dpmon.cli.messages import print_closing_summary, print_message
from dpmon.record.shared_names import hide_secrets
from dpmon.run import proc
from dpmon.run.lifecycle import EVENTS_FILE, take_lock
from dpmon.run.output_target import check_replaceable
from dpmon.run.process_notes import add_note
from dpmon.run.run_directory import ExitInfo, RunError, RunInfo, load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import create_run, short_name
from dpmon.run.safe_files import open_file
from dpmon.supervise.command_resolver import ResolvedCommand, resolve
from dpmon.supervise.foreground_guard import SupervisorGuard, become_reaper, poll_in_background, remember_signals
from dpmon.supervise.start_supervisor import SECRET_PREFIX, keep_child_statuses, start_supervisor

if TYPE_CHECKING:
    from typing import Literal

    from dpmon.cli.status_stream import NonBlockingLineFile
    from dpmon.config import Settings


REFRESH_S = 1.0
_LAST_EVENT_S = 10.0
_START_S = 30.0
"""Most seconds that `--detach` waits for the start of the command, even on a slow disk."""


def has_screen() -> bool:
    """Whether a terminal can provide keys and show a screen (Textual draws on stderr)."""
    if os.environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    return all(os.isatty(fd) for fd in (0, 1, 2))


def run(options: argparse.Namespace) -> int:
    """Start the run and return its exit status. Raises CommandError or RunError if it cannot be started."""
    _open_standard_descriptors()
    command = resolve(options.words, options.module, options.python, os.environ)
    _check_devices(options.devices)
    headless = not options.detach and (options.headless or options.json is not None or not has_screen())
    lines = open_json_target(options.json)
    # If stdin is a terminal, dpmon or the shell reads it, so the command gets a terminal of its own.
    inherit = (headless or options.detach) and not os.isatty(0)
    tells, problem = _event_command(options.on_event or options.settings.on_event)
    early: list[int] = []
    if headless:
        remember_signals(early)  # an interrupt must not leave a run without a command
    metrics = resolve_metrics_path(options.metrics or os.environ.get("DPMON_METRICS"))
    # Every supervisor that this process starts for the run reads these variables.
    if tells is not None:
        os.environ["DPMON_ON_EVENT"] = shlex.join(tells)
    if metrics is not None:
        os.environ["DPMON_METRICS"] = metrics
    draft = _draft_run_info(options, command, headless, inherit, metrics, on_event=tells is not None)
    directory, info = create_run(draft)
    if problem is not None:
        print_message(problem)
        add_note(directory, problem)
    if "elsewhere" in info.options:
        print_message(info.options["elsewhere"])
    state = os.environ.get("XDG_STATE_HOME", "")
    if state.strip() and not os.path.isabs(state):
        print_message(
            f"XDG_STATE_HOME={state} is not an absolute path and is ignored; this run is kept in {directory.parent}"
        )
    keep_child_statuses()
    if not options.detach:
        become_reaper()
    # Before the command starts: from then on the user may delete its record at any moment.
    reader = RunReader(directory)
    if headless:
        _make_logs(reader)
    follower = HeadlessRun(reader, lines=lines) if headless else None
    secrets = {f"{SECRET_PREFIX}{at}": word for at, word in enumerate(command.argv) if word != info.command[at]}
    try:
        supervisor = start_supervisor(directory, stdin=inherit, secrets=secrets)
    except OSError as error:
        raise RunError(f"the supervisor cannot be started: {error.strerror or error}") from None
    if options.detach:
        return _wait_for_detached_start(directory, info, supervisor)
    guard = SupervisorGuard(reader, supervisor)
    if follower is not None:
        how = follower.run_until_end(guard, early)
        status = print_closing_summary(directory, how, None if lines == "stderr" else follower.print_message)
        _wait_for_events(directory, info)
        return status
    return _show_screen(guard, directory, info.refresh, options.settings)


def _make_logs(reader: RunReader) -> None:
    """Create the files of the command's output before the command uses them."""
    for path in reader.output_paths:
        with contextlib.suppress(OSError):  # on a full disk they are created and opened once there is space
            os.close(open_file(path, os.O_WRONLY | os.O_CREAT))


def _check_devices(names: str | None) -> None:
    """Raise RunError if --devices names a missing GPU. The driver is asked only if --devices names a GPU at all."""
    if names is None or "cuda" not in names:
        return
    from dpmon.gpu.nvml import missing_device_reason

    why = missing_device_reason(names)
    if why is not None:
        raise RunError(f"--devices {names}: {why}")


def _open_standard_descriptors() -> None:
    """Open /dev/null for each closed standard descriptor, so that no log file gets its number."""
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    os.close(null)


def _draft_run_info(
    options: argparse.Namespace,
    command: ResolvedCommand,
    headless: bool,
    inherit: bool,
    metrics: str | None,
    *,
    on_event: bool,
) -> RunInfo:
    size = shutil.get_terminal_size((80, 24))
    try:
        cwd = os.getcwd()
    except OSError:  # the directory was deleted; neither the command nor dpmon needs it
        cwd = ""
    return RunInfo(
        id="",
        name=options.name or command.name,
        command=hide_secrets(command.argv),
        script=command.script,
        cwd=cwd,
        python=command.python,
        started_unix=time.time(),
        start_ns=time.monotonic_ns(),
        boot_id=proc.boot_id(),
        headless=headless,
        options={
            "name": options.name,
            "mode": options.mode,
            "replicas": options.replicas,
            "devices": options.devices,
            "replay": options.replay,
            "batch_dim": options.settings.batch_dim if options.batch_dim is None else options.batch_dim,
            "loss": options.loss and options.settings.loss is not False,
            "stdin": "inherit" if inherit else "terminal",
            "window": [size.lines, size.columns],
            "metrics": metrics,
            "on_event": on_event,
            "alive_minutes": options.settings.alive_minutes,
        },
        refresh=options.refresh or options.settings.refresh or REFRESH_S,
        versions={"dpmon": dpmon.__version__, "python": sys.version.split()[0]},
    )


def _event_command(command: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, str | None]:
    """The command for events, with the full path of its program; and the reason if it cannot be started."""
    if command is None:
        return None, None
    program = shutil.which(command[0])
    if program is None:
        return None, f"no event is told: {command[0]} was not found, or is not executable"
    return (os.path.abspath(program), *command[1:]), None


def _wait_for_events(directory: Path, info: RunInfo) -> None:
    """Wait a little for the last event: in a container or a batch job, all processes end with this one."""
    until = time.monotonic() + _LAST_EVENT_S
    while info.options.get("on_event") and time.monotonic() < until and directory.exists():
        lock = take_lock(directory, EVENTS_FILE)
        if lock is not None:
            if lock >= 0:
                os.close(lock)
            return
        time.sleep(0.02)


def _wait_for_detached_start(directory: Path, info: RunInfo, supervisor: subprocess.Popen[bytes]) -> int:
    """Wait for the start of the command and print how to return to the run; RunError if it could not start."""
    until = time.monotonic() + _START_S
    while load_info(directory).command_pid is None and time.monotonic() < until:
        gone = supervisor.poll() is not None  # first: it may write the end and leave between the two lines
        how = load_exit(directory)
        if how is not None and how.error is not None:
            raise RunError(how.error)
        if how is not None or gone:
            break
        time.sleep(0.01)
    name = short_name(info)
    print(name, flush=True)  # nothing else on stdout, for `run=$(dpmon --detach ...)`
    print_message(f"attach: dpmon attach {name}   stop: dpmon stop {name}   output: {directory}/output.log")
    return 0


def open_json_target(asked: str | None) -> NonBlockingLineFile | Literal["stderr"] | None:
    """The opened target of the JSON lines; RunError if it cannot be written."""
    if asked is None:
        return None
    from dpmon.cli.status_stream import NonBlockingLineFile

    return "stderr" if asked == "-" else NonBlockingLineFile(asked)


def resolve_metrics_path(asked: str | None) -> str | None:
    """The absolute path of the metrics; RunError if its directory does not exist or is not writable."""
    if not asked:
        return None
    path = os.path.abspath(asked)
    place = path if os.path.isdir(path) else os.path.dirname(path)
    if not os.access(place, os.W_OK | os.X_OK):
        raise RunError(f"metrics cannot be written to {asked}: {place} is not a writable directory")
    if not os.path.isdir(path):
        try:
            check_replaceable(Path(path))
        except OSError as error:
            raise RunError(f"metrics cannot be written to {asked}: {error.strerror}") from None
    return path


def _show_screen(guard: SupervisorGuard, directory: Path, refresh: float, settings: Settings) -> int:
    with poll_in_background(guard.poll):
        # The supervisor starts the command meanwhile, which takes about as long as importing the screen.
        try:
            from dpmon.ui.app import run_screen

            result = run_screen(
                directory,
                refresh=refresh,
                theme=settings.theme,
                alert=settings.alert,
                known_exit=lambda: guard.outcome,
            )
        except KeyboardInterrupt:  # pressed before the screen could read the keyboard
            result = "left"
        if result == "left":
            print_message(f"the training goes on; back to it: dpmon attach {short_name(guard.info)}")
            return 0
        how = _wait_for_exit_record(guard)
    return print_closing_summary(directory, how, print_message)


def _wait_for_exit_record(guard: SupervisorGuard) -> ExitInfo | None:
    """How the run ended; None if no record of it appears within ten seconds after the screen saw the end."""
    until = time.monotonic() + 10.0
    while (how := guard.exit_info()) is None and time.monotonic() < until:
        time.sleep(0.02)
    return how


if sys.platform != "linux":  # dpmon relies on /proc, pidfd and prctl
    raise RunError(f"dpmon runs on Linux; this is {sys.platform}")
