"""The directory of a run: reads and writes run.json and exit.json, and knows its other files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpmon.errors import DpmonError
from dpmon.record.safe_json import load_json
from dpmon.record.typed_json import from_json
from dpmon.run.safe_files import open_file, read_file, write_atomically

INFO_FILE = "run.json"
EXIT_FILE = "exit.json"
STOP_FILE = "stop-asked"
"""A file whose modification time is the time of the user's last request to stop the run."""
_MAX_JSON_BYTES = 1 << 22
_RING_NAME = re.compile(r"process-(\d{1,6})\.ring")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
ID = re.compile(rf"\d{{8}}-\d{{6}}-{_NAME.pattern}-[0-9a-f]{{4}}")


class RunError(DpmonError):
    """A run that does not exist, or whose directory cannot be used; the text is one sentence for the user."""


@dataclass(frozen=True)
class RunInfo:
    """The contents of run.json. `started_unix` in s since 1970, `start_ns` monotonic, `*_started` in s since boot."""

    id: str
    name: str
    command: tuple[str, ...]
    script: str
    cwd: str
    python: str | None
    started_unix: float
    start_ns: int
    boot_id: str
    headless: bool
    options: dict[str, Any] = field(default_factory=dict)
    refresh: float = 1.0
    versions: dict[str, str] = field(default_factory=dict)
    supervisor_pid: int | None = None
    supervisor_started: float | None = None
    command_pid: int | None = None
    command_started: float | None = None
    host: str = ""
    """The machine of the run; other machines may share the directory."""
    inode: int = 0
    """Inode of the directory. A copied directory has another one."""
    nodes: tuple[str, ...] = ()
    """For a mirror (dpmon.mirror): the names of the nodes. A process, the mirror, writes their records here. It takes
    the place of the supervisor, and there is no command."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words after Python and the script or module; all words of a launcher."""
        first = 3 if self.script.startswith("-m ") else 2
        return self.command if self.python is None else self.command[first:]

    @property
    def origin_s(self) -> int:
        """The second of its start, counted since 1970 (dpmon.store.time_buckets)."""
        return round(self.started_unix)


@dataclass(frozen=True)
class ExitInfo:
    """The end of a run: status 0..255 (128+N for signal N; None: unknown), the signal's name, time, and observer."""

    status: int | None
    signal: str | None
    ended_unix: float
    end_ns: int
    seconds: float
    by: str
    error: str | None = None
    """Why the command could not be started; the status is then dpmon's own."""
    unknown: str | None = None
    """Why the status is unknown, if it is."""
    cause: str | None = None
    """The cause of this end, if more is known, for example a lack of memory."""
    drained: bool = True
    """Whether the history has everything that was in the rings at the end."""
    stopped: bool = False
    """Whether the user asked the run to stop shortly before its end; `load_exit` sets it."""


def load_info(directory: Path) -> RunInfo:
    """Return the contents of run.json. Raises RunError if the directory is not a run of this user."""
    check_directory(directory)
    try:
        run_info = from_json(RunInfo, load_json(read_file(directory / INFO_FILE, _MAX_JSON_BYTES)))
    except (OSError, ValueError) as error:
        raise RunError(f"{directory} is not a run: {error}") from None
    if not _FILE_NAME.fullmatch(run_info.id) or not _NAME.fullmatch(run_info.name):  # they become parts of file names
        raise RunError(f"{directory / INFO_FILE}: the id or the name is not valid")
    return run_info


def load_exit(directory: Path) -> ExitInfo | None:
    """Return the contents of exit.json; None if there is no valid one."""
    try:
        exit_info = from_json(ExitInfo, load_json(read_file(directory / EXIT_FILE, _MAX_JSON_BYTES)))
    except (OSError, ValueError):
        return None
    if exit_info.status is not None and not 0 <= exit_info.status <= 255:
        return None
    stop_s = stop_requested_unix(directory)
    return replace(exit_info, stopped=stop_s is not None and exit_info.ended_unix - stop_s < 300.0)


def record_stop_request(directory: Path) -> None:
    """Record that the user is stopping the run, so that its end does not count as a failure."""
    # If this fails on a full disk, the only effect is that the run is not called "stopped".
    with contextlib.suppress(OSError):
        fd = open_file(directory / STOP_FILE, os.O_WRONLY | os.O_CREAT)
        os.utime(fd)
        os.close(fd)


def stop_requested_unix(directory: Path) -> float | None:
    """Return the time of the user's last request to stop the run (seconds since 1970); None if there is none."""
    try:
        return os.lstat(directory / STOP_FILE).st_mtime
    except OSError:
        return None


def write_info(directory: Path, content: RunInfo | ExitInfo) -> None:
    """Write run.json or exit.json atomically. Raises OSError if that fails."""
    name = INFO_FILE if isinstance(content, RunInfo) else EXIT_FILE
    write_atomically(directory / name, json.dumps(asdict(content), indent=1) + "\n")


def check_directory(directory: Path) -> None:
    """Raise RunError unless `directory` is a real directory of this user (a link could lead anywhere)."""
    try:
        directory_stat = os.lstat(directory)
    except OSError as error:
        raise RunError(f"{directory} cannot be used: {error.strerror}") from None
    if stat.S_ISLNK(directory_stat.st_mode):
        raise RunError(f"{directory} is a symbolic link, not a run's directory")
    if not stat.S_ISDIR(directory_stat.st_mode):
        raise RunError(f"{directory} is not a directory")
    if directory_stat.st_uid != os.getuid():
        raise RunError(f"{directory} belongs to another user")


def is_run_directory(directory: Path) -> bool:
    """Return whether a directory has the name and the run.json of a run, because others also have such files."""
    return ID.fullmatch(directory.name) is not None and os.path.lexists(directory / INFO_FILE)


def output_paths(directory: Path, run_info: RunInfo) -> tuple[Path, ...]:
    """Return the files with the script's output: one, or two for a headless run (output, then errors)."""
    names = ("stdout.log", "stderr.log") if run_info.headless else ("output.log",)
    return tuple(directory / name for name in names)


def ring_paths(directory: Path, skipped_names: Container[str] = ()) -> list[Path]:
    """Return the paths of the rings of a run, sorted by the index of their process, without `skipped_names`."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    numbered_paths = []
    for name in names:
        match = None if name in skipped_names else _RING_NAME.fullmatch(name)
        if match:
            numbered_paths.append((int(match[1]), directory / name))
    return [path for _, path in sorted(numbered_paths)]
