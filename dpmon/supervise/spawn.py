"""Starts the user's command with the arguments, directory, descriptors and signals that it has without dpmon."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import dpmon
from dpmon.run.files import open_file
from dpmon.run.rundir import RunInfo
from dpmon.run.terminal import Terminal
from dpmon.supervise.signals import ignored_again

_SITE = Path(dpmon.__file__).resolve().parent / "tracer" / "site"


def environment(info: RunInfo, directory: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """The command's environment: `outer`, and the variables that load and configure the tracer.

    Changes PYTHONPATH; sets DPMON_*, PYTHONUNBUFFERED and, for a run with a screen, variables that ask for colour.
    """
    env = {name: value for name, value in outer.items() if not name.startswith("DPMON_")}
    old = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{_SITE}{os.pathsep}{old}" if old else str(_SITE)
    # Keep an empty value: Python treats it like an unset one, but the user has set it.
    env.setdefault("PYTHONUNBUFFERED", "1")
    env["DPMON_RUN"] = str(directory)
    env["DPMON_START_NS"] = str(info.start_ns)
    env["DPMON_MODE"] = str(info.options.get("mode") or "auto")
    for option in ("replicas", "devices", "batch_dim"):
        value = info.options.get(option)
        if value is not None:
            env[f"DPMON_{option.upper()}"] = str(value)
    colour = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE")
    if not info.headless and not any(name in env for name in colour):
        env["FORCE_COLOR"] = env["CLICOLOR_FORCE"] = "1"
    return env


def _log(path: Path) -> int:
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def start_command(info: RunInfo, directory: Path, terminal: Terminal | None, outer: Mapping[str, str]) -> int:
    """Start the command in its own session and return its process id; OSError if it cannot be started.

    This process never reaps it, so that the foreground, which is a subreaper, can always learn how it ended. Its output
    goes straight into the log files. It inherits the descriptors that the user's shell gave to dpmon, which `<(...)`
    needs. Descriptors that dpmon opened itself are closed on exec.
    """
    if info.headless:
        out, err = _log(directory / "stdout.log"), _log(directory / "stderr.log")
    else:
        out = err = _log(directory / "output.log")
    try:
        process = subprocess.Popen(
            info.command,
            stdin=None if terminal is None else terminal.slave,
            stdout=out,
            stderr=err,
            env=environment(info, directory, outer),
            close_fds=False,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=ignored_again(),
        )
    finally:
        os.close(out)
        if err != out:
            os.close(err)
    process.returncode = 0  # nobody waits with it, and without this it would reap the command when it is collected
    return process.pid
