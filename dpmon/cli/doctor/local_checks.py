"""Checks the terminal, the directory of the runs, shared memory, and the effect of logging out."""

from __future__ import annotations

import locale
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dpmon.run.run_directory import RunError
from dpmon.run.run_registry import check_place, fallback_directories, network_file_system, runs_directory
from dpmon.text.formatting import format_bytes

MIN_COLUMNS, MIN_ROWS = 80, 24
"""The size for which the screen is designed. A smaller terminal truncates or hides panels."""
MIN_SPACE_BYTES = 300 << 20
"""With less free space than this, the history of one run (256 MiB at most) may not fit."""
ENOUGH_SPACE_BYTES = 2 << 30
MIN_SHM_BYTES = 1 << 30
"""DataLoader workers pass batches through /dev/shm; a container has 64 MB of it by default."""
_COMMAND_TIMEOUT_S = 5.0
OK, WARNING, PROBLEM = STATES = ("ok", "warning", "problem")
"""ok: no problem; warning: dpmon works, with limits; problem: dpmon does not work."""
CONNECTION = "connection"
"""The only check of a host that cannot be reached."""


class Check(NamedTuple):
    """One check: its name, state, result, and remedy (None if ok)."""

    name: str
    state: str
    found: str
    remedy: str | None = None


def passed_check(name: str, found: str) -> Check:
    """Return a passed check."""
    return Check(name, OK, found)


def warning_check(name: str, found: str, remedy: str) -> Check:
    """Return a check for a problem that limits dpmon."""
    return Check(name, WARNING, found, remedy)


def failed_check(name: str, found: str, remedy: str) -> Check:
    """Return a check for a problem that stops dpmon."""
    return Check(name, PROBLEM, found, remedy)


# ------------------------------------------------------------------------------------------------ terminal


def check_terminal(environ: Mapping[str, str]) -> Iterator[Check]:
    """Check size, colors and encoding of the terminal."""
    missing = [name for fd, name in enumerate(("stdin", "stdout", "stderr")) if not os.isatty(fd)]
    if missing:
        yield passed_check("terminal", f"none at {', '.join(missing)}: dpmon runs without a screen (headless)")
    elif environ.get("TERM", "dumb") in ("", "dumb"):
        yield warning_check(
            "terminal", "TERM is dumb or not set: no screen can be drawn", "set TERM, for example to xterm-256color"
        )
    else:
        yield _check_size()
        yield _check_colors(environ)
    yield _check_encoding()


def _check_size() -> Check:
    size = shutil.get_terminal_size((0, 0))
    found = f"{size.columns}x{size.lines}"
    if size.columns < MIN_COLUMNS or size.lines < MIN_ROWS:
        return warning_check(
            "terminal", f"{found} is small: panels are truncated or hidden", "use 80x24 or more, ideally 110x27"
        )
    return passed_check("terminal", found)


def _check_colors(environ: Mapping[str, str]) -> Check:
    if environ.get("NO_COLOR"):
        return passed_check("colors", "none: NO_COLOR is set")
    term = environ.get("TERM", "")
    if environ.get("COLORTERM", "") in ("truecolor", "24bit"):
        return passed_check("colors", f"16 million (TERM={term})")
    if "256" in term or "direct" in term:
        return passed_check("colors", f"256 (TERM={term})")
    return warning_check(
        "colors", f"16 (TERM={term})", "if the terminal has more: TERM=xterm-256color, in tmux tmux-256color"
    )


def _check_encoding() -> Check:
    encoding = locale.getpreferredencoding(False)
    if encoding.upper().replace("-", "") == "UTF8":
        return passed_check("characters", "UTF-8")
    return warning_check(
        "characters",
        f"{encoding}: charts cannot be drawn with blocks",
        "export LC_ALL=C.UTF-8 (or another UTF-8 locale)",
    )


# ------------------------------------------------------------------------------------------------ state directory


def check_state_directory() -> Iterator[Check]:
    """Check whether runs can be stored: the directory exists, is writable, private, and has space."""
    try:
        default_directory = runs_directory()
    except RunError as error:
        yield failed_check("state", str(error), "set XDG_STATE_HOME, or HOME, to an absolute path")
        return
    remedy = "set XDG_STATE_HOME to a directory of yours on a local disk"
    runs, *fallbacks = [
        directory
        for directory in (default_directory, *fallback_directories())
        if network_file_system(directory) is None
    ] or [default_directory]
    if (file_system := network_file_system(default_directory)) is not None:
        found = f"{default_directory} is on a network file system ({file_system})"
        if runs == default_directory:
            yield failed_check("state", f"{found}, and so are /var/tmp, $TMPDIR and /dev/shm", remedy)
            return
        yield warning_check("state", f"{found}: runs are kept in {runs}", remedy)
    directory = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        check_place(runs)
        directory_stat = os.stat(directory)
        if directory == runs and directory_stat.st_uid != os.getuid():
            yield failed_check("state", f"{runs} belongs to another user", remedy)
            return
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".dpmon-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 16)
    except (OSError, RunError) as error:
        problem = f"{directory} cannot be used: {getattr(error, 'strerror', None) or error}".partition(";")[0]
        if fallbacks:
            yield warning_check("state", f"{problem}; runs are kept in {fallbacks[0]}, which may be temporary", remedy)
        else:
            yield failed_check("state", problem, remedy)
        return
    if directory == runs and directory_stat.st_mode & 0o077:
        found = f"{runs} is open to others ({stat.filemode(directory_stat.st_mode)})"
        yield warning_check("state", found, "the next run makes it private; or chmod 700")
    else:
        yield passed_check("state", str(runs) if directory == runs else f"{runs} (the first run creates it)")
    yield _check_free_space(directory, remedy)


def _check_free_space(directory: Path, remedy: str) -> Check:
    free = shutil.disk_usage(directory).free
    if free < MIN_SPACE_BYTES:
        return failed_check(
            "disk", f"{format_bytes(free)} free: a run's record may not fit", f"free some space, or {remedy}"
        )
    if free < ENOUGH_SPACE_BYTES:
        return warning_check(
            "disk", f"{format_bytes(free)} free: room for a few runs (256 MiB each at most)", "free some space"
        )
    return passed_check("disk", f"{format_bytes(free)} free")


# ------------------------------------------------------------------------------------------------ shared memory


def check_shared_memory(directory: Path = Path("/dev/shm")) -> Check:
    """Check whether DataLoader workers have room for their batches."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        remedy = "DataLoader workers need it: mount a tmpfs there"
        return warning_check("/dev/shm", f"cannot be used: {error.strerror}", remedy)
    found = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if usage.free < MIN_SHM_BYTES:
        remedy = "DataLoader workers pass batches through it: docker run --shm-size=8g, or --ipc=host"
        return warning_check("/dev/shm", found, remedy)
    return passed_check("/dev/shm", found)


# ------------------------------------------------------------------------------------------------ logging out


def check_logout() -> Check:
    """Check whether systemd's logind ends a user's processes when the last session closes."""
    ends_processes = _kill_user_processes()
    if ends_processes is None:
        return passed_check("logging out", "no systemd-logind that could end processes")
    if not ends_processes:
        return passed_check("logging out", "processes keep running when you log out")
    return warning_check(
        "logging out",
        "systemd-logind ends your processes when you log out (KillUserProcesses=yes)",
        f"loginctl enable-linger {pwd.getpwuid(os.getuid()).pw_name}, then: systemd-run --user --scope dpmon ...",
    )


def _kill_user_processes() -> bool | None:
    """Return the setting of the running logind; None without logind."""
    reply = _command_output(
        "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
        "org.freedesktop.login1.Manager", "KillUserProcesses",
    )  # fmt: skip
    return reply == "b true" if reply in ("b true", "b false") else None


def _command_output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
