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
from dpmon.run.lifecycle import EVENTS_FILE, is_locked, wait_until
from dpmon.run.output_target import check_replaceable
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import create_run, short_name
from dpmon.run.safe_files import open_file
from dpmon.supervise.command_resolver import ResolvedCommand, resolve
from dpmon.supervise.foreground_guard import SupervisorGuard, become_reaper, poll_in_background, remember_signals
from dpmon.supervise.start_supervisor import SECRET_PREFIX, keep_child_statuses, start_supervisor

if TYPE_CHECKING:
    from typing import Literal

    from dpmon.cli.status_stream import NonBlockingLineFile


REFRESH_S = 1.0
_MAX_EVENT_WAIT_S = _MAX_RECORD_WAIT_S = 10.0
_MAX_START_S = 30.0
"""How long `--detach` waits for the start of the command, even on a slow disk."""


def has_screen() -> bool:
    """Return whether a terminal can provide keys and show a screen (Textual draws on stderr)."""
    if os.environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    return all(os.isatty(fd) for fd in (0, 1, 2))


def run(options: argparse.Namespace) -> int:
    """Start the run and return its exit status. Raises CommandError or RunError if it cannot be started."""
    _open_standard_descriptors()
    command = resolve(options.words, options.module, options.python, os.environ)
    headless = not options.detach and (options.headless or options.json is not None or not has_screen())
    json_target = open_json_target(options.json)
    # If stdin is a terminal, dpmon or the shell reads it, so the command gets a terminal of its own.
    inherits_stdin = (headless or options.detach) and not os.isatty(0)
    event_command = options.on_event or options.settings.on_event
    early_signals: list[int] = []
    if headless:
        remember_signals(early_signals)  # an interrupt must not leave a run without a command
    metrics_path = resolve_metrics_path(options.metrics or os.environ.get("DPMON_METRICS"))
    # Every supervisor that this process starts for the run reads these variables.
    if event_command is not None:
        os.environ["DPMON_ON_EVENT"] = shlex.join(event_command)
    if metrics_path is not None:
        os.environ["DPMON_METRICS"] = metrics_path
    run_info_draft = _draft_run_info(
        options, command, headless, inherits_stdin, metrics_path, has_event_command=event_command is not None
    )
    directory, run_info = create_run(run_info_draft)
    if "elsewhere" in run_info.options:
        print_message(run_info.options["elsewhere"])
    keep_child_statuses()
    if not options.detach:
        become_reaper()
    # Before the command starts, because the user may delete its record at any time after that.
    reader = RunReader(directory)
    headless_run = None
    if headless:
        for path in reader.output_paths:
            with contextlib.suppress(OSError):  # on a full disk they are created and opened once there is space
                os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
        headless_run = HeadlessRun(reader, json_target=json_target)
    secrets = {
        f"{SECRET_PREFIX}{index}": word for index, word in enumerate(command.argv) if word != run_info.command[index]
    }
    try:
        supervisor = start_supervisor(directory, stdin=inherits_stdin, secrets=secrets)
    except OSError as error:
        raise RunError(f"the supervisor cannot be started: {error.strerror or error}") from None
    if options.detach:
        return _wait_for_detached_start(directory, run_info, supervisor)
    guard = SupervisorGuard(reader, supervisor)
    if headless_run is None:
        # The supervisor starts the command meanwhile, which takes about as long as importing the screen.
        with poll_in_background(guard.poll):
            return show_screen(reader, run_info.refresh, options.settings.theme, guard)
    status = headless_run.run_until_end(guard, early_signals)
    if run_info.options.get("on_event"):
        # In a container or a batch job, all processes end with this one, also the last command for an event.
        wait_until(lambda: not is_locked(directory, EVENTS_FILE), _MAX_EVENT_WAIT_S)
    return status


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
    inherits_stdin: bool,
    metrics_path: str | None,
    *,
    has_event_command: bool,
) -> RunInfo:
    """Return the RunInfo of a run that has no directory yet."""
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
            "replay": os.environ.get("DPMON_REPLAY"),  # set by `dpmon try`
            "batch_dim": options.settings.batch_dim if options.batch_dim is None else options.batch_dim,
            "loss": options.loss and options.settings.loss is not False,
            "stdin": "inherit" if inherits_stdin else "terminal",
            "window": [size.lines, size.columns],
            "metrics": metrics_path,
            "on_event": has_event_command,
            "alive_minutes": options.settings.alive_minutes,
        },
        refresh=options.refresh or options.settings.refresh or REFRESH_S,
        versions={"dpmon": dpmon.__version__, "python": sys.version.split()[0]},
    )


def _wait_for_detached_start(directory: Path, run_info: RunInfo, supervisor: subprocess.Popen[bytes]) -> int:
    """Wait for the start of the command and print how to reattach; RunError if it could not start."""

    def has_started() -> bool:
        has_supervisor_exited = supervisor.poll() is not None  # first, because it may write the end and exit meanwhile
        is_ended = load_exit(directory) is not None
        return load_info(directory).command_pid is not None or is_ended or has_supervisor_exited

    wait_until(has_started, _MAX_START_S)
    exit_info = load_exit(directory)
    if exit_info is not None and exit_info.error is not None:
        raise RunError(exit_info.error)
    name = short_name(run_info)
    print(name, flush=True)  # nothing else on stdout, for `run=$(dpmon --detach ...)`
    print_message(f"attach: dpmon attach {name}   stop: dpmon stop {name}   output: {directory}/output.log")
    return 0


def open_json_target(target: str | None) -> NonBlockingLineFile | Literal["stderr"] | None:
    """Return the opened target of the JSON lines; RunError if it cannot be written."""
    if target is None:
        return None
    from dpmon.cli.status_stream import NonBlockingLineFile

    return "stderr" if target == "-" else NonBlockingLineFile(target)


def resolve_metrics_path(target: str | None) -> str | None:
    """Return the absolute path of the metrics; RunError if its directory does not exist or is not writable."""
    if not target:
        return None
    path = os.path.abspath(target)
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise RunError(f"metrics cannot be written to {target}: {directory} is not a writable directory")
    if not os.path.isdir(path):
        try:
            check_replaceable(Path(path))
        except OSError as error:
            raise RunError(f"metrics cannot be written to {target}: {error.strerror}") from None
    return path


def show_screen(reader: RunReader, refresh: float, theme: str | None, guard: SupervisorGuard | None = None) -> int:
    """Show the run on a screen until the user leaves or it ends; return its exit status, 0 if it continues.

    `guard` watches the supervisor that this process started; None for an existing run, which is played back if it has
    ended.
    """
    directory = reader.directory
    had_ended = guard is None and load_exit(directory) is not None
    try:
        from dpmon.ui.app import run_screen

        result = run_screen(
            directory,
            refresh=refresh,
            theme=theme,
            known_exit=lambda: None if guard is None else guard.outcome,
        )
    except KeyboardInterrupt:  # pressed before the screen could read the keyboard
        result = "left"
    if result == "left":
        print_message(f"training continues; reattach with: dpmon attach {short_name(reader.info)}")
        return 0
    exit_info = load_exit(directory)
    if guard is not None:  # the screen may see the end before it is recorded
        wait_until(lambda: guard.exit_info() is not None, _MAX_RECORD_WAIT_S)
        exit_info = guard.exit_info()
    return print_closing_summary(directory, exit_info, print_message, brief=had_ended)


if sys.platform != "linux":  # dpmon relies on /proc, pidfd and prctl
    raise RunError(f"dpmon runs on Linux; this is {sys.platform}")
