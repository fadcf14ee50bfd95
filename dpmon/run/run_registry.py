"""Creates runs in the directory of all runs, and finds them by name."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dpmon.config import home_directory
from dpmon.run import proc
from dpmon.run.lifecycle import is_live
from dpmon.run.run_directory import ID, INFO_FILE, RunError, RunInfo, check_directory, load_info, write_info

_MAX_IDS = 8
ROOM_BYTES = 24 << 20
"""Free space (bytes) that a run needs for its rings and some other files."""
PERSISTENT_TMP = "/var/tmp"
"""A local directory that does not depend on the environment, so that the user's other shells and jobs find the runs."""
SHARED_MEMORY = "/dev/shm"
MOUNTS = Path("/proc/self/mountinfo")
_NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "fhgfs", "ceph", "afs", "panfs", "wekafs", "dvs"),
    *("orangefs", "pvfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.juicefs", "fuse.s3fs"),
    *("fuse.gcsfuse", "fuse.rclone"),
}
"""Types of file systems that several machines share: SQLite's shared memory and mapped rings do not work on them."""


def runs_directory() -> Path:
    """Return the directory of all runs, which may not exist. Raises RunError without a home directory.

    It is under the user's state directory: XDG_STATE_HOME or ~/.local/state. A relative XDG_STATE_HOME is ignored, as
    the XDG Base Directory Specification requires: processes with other current directories would resolve it
    differently.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "dpmon" / "runs"
    home = home_directory(os.environ)
    if home is None:
        raise RunError("there is no home directory for runs; set XDG_STATE_HOME to an absolute path")
    return home / ".local" / "state" / "dpmon" / "runs"


def fallback_directories() -> list[Path]:
    """Return the directories to try if `runs_directory` cannot store runs: for temporary files, then in memory.

    Their names depend on `runs_directory`, so that runs of different state directories do not mix.
    """
    state_suffix = f"{zlib.crc32(os.fsencode(runs_directory())):08x}"
    temporary = os.environ.get("TMPDIR", "")
    # A process with another current directory, such as the supervisor, would resolve a relative path differently.
    places = dict.fromkeys([PERSISTENT_TMP, temporary if os.path.isabs(temporary) else "/tmp", SHARED_MEMORY])
    return [Path(place) / f"dpmon-{os.getuid()}-{state_suffix}" / "runs" for place in places]


def file_system(path: Path) -> str | None:
    """Return the type of the file system of `path` or of its nearest existing parent; None if unknown."""
    directory = next(candidate for candidate in (path, *path.parents) if os.path.isdir(candidate))
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # opening it makes autofs mount it
        try:
            fd_info = Path(f"/proc/self/fdinfo/{fd}").read_text()
        finally:
            os.close(fd)
        _, _, after_key = fd_info.partition("mnt_id:")
        mount_id = after_key.split()[:1]
        for line in MOUNTS.read_text(errors="replace").splitlines():
            if line.split()[:1] == mount_id:
                _, _, after_options = line.partition(" - ")
                return after_options.split()[0]
    return None


def network_file_system(path: Path) -> str | None:
    """Return the type of the file system of `path` if several machines can share it; else None."""
    fs_type = file_system(path)
    return fs_type if fs_type in _NETWORK_FILE_SYSTEMS else None


def check_place(runs: Path) -> None:
    """Raise RunError if `runs` or its parent is not a directory of this user, or if a home is missing."""
    home = home_directory(os.environ)
    if home is not None and runs.is_relative_to(home) and not home.is_dir():
        raise RunError(f"no run can be kept in {runs}: there is no directory {home}")
    for directory in filter(os.path.lexists, (runs.parent, runs)):
        check_directory(directory)


def check_usable(runs: Path) -> Path:
    """Return `runs`, or its nearest parent that exists. Raises RunError if its place, file system or space is unfit."""
    check_place(runs)
    existing = next(directory for directory in (runs, *runs.parents) if os.path.exists(directory))
    if (fs_type := network_file_system(runs)) is not None:
        raise RunError(f"{runs} is on a network file system ({fs_type})")
    free = shutil.disk_usage(existing).free
    if free < ROOM_BYTES:
        raise RunError(f"{runs} has only {free >> 20} MiB left")
    return existing


def _create_private(runs: Path) -> None:
    """Create a directory of runs if it is missing, and make it private. Raises RunError if that fails."""
    try:
        # The XDG Base Directory Specification requires mode 0700, also for missing parent directories.
        parents = [path for path in reversed(runs.parents[1:]) if runs == runs_directory() and not path.exists()]
        for directory in (*parents, runs.parent, runs):
            directory.mkdir(mode=0o700, exist_ok=True)
            if directory not in parents:
                check_directory(directory)
            directory.chmod(0o700)
    except OSError as error:
        raise RunError(f"no run can be kept in {runs}: {error.strerror}") from None


def create_run(draft: RunInfo) -> tuple[Path, RunInfo]:
    """Create a directory for the run `draft`, fill in its id, and write run.json. Raises RunError if that fails.

    If `runs_directory` cannot be used (on the network, read-only, full, another user's), the run is kept in a fallback
    directory. A sentence in `options["elsewhere"]` says so.
    """
    problems: list[str] = []
    for runs in (runs_directory(), *fallback_directories()):
        options = dict(draft.options)
        if problems:
            hint = "set XDG_STATE_HOME to choose another directory"
            options["elsewhere"] = f"{problems[0]}: this run is kept in {runs}; {hint}"
        try:
            check_usable(runs)
            _create_private(runs)
            return _create_in(runs, replace(draft, options=options))
        except RunError as error:
            problems.append(str(error))
    raise RunError(f"{problems[0]}; set XDG_STATE_HOME to a local directory of yours")


def _create_in(runs: Path, draft: RunInfo) -> tuple[Path, RunInfo]:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(draft.started_unix))
    run_id = f"{stamp}-{draft.name}-{os.urandom(2).hex()}"
    directory, run_info = runs / run_id, replace(draft, id=run_id, host=proc.host_name())
    try:
        directory.mkdir(mode=0o700)
        directory.chmod(0o700)  # whatever the umask
        run_info = replace(run_info, inode=directory.lstat().st_ino)
        write_info(directory, run_info)
    except FileExistsError:
        return _create_in(runs, draft)  # with another number
    except OSError as error:
        with contextlib.suppress(OSError):  # leave no empty run behind
            directory.rmdir()
        raise RunError(f"{directory} cannot be created: {error.strerror}") from None
    return directory, run_info


def list_runs(unreadable: list[str] | None = None) -> list[tuple[Path, RunInfo]]:
    """Return all readable runs of this user, oldest first, including those in fallback directories.

    `unreadable`: a list to which an error is appended for each run with an unreadable run.json.
    """
    readable_runs = []
    for runs in (runs_directory(), *fallback_directories()):
        try:
            check_place(runs)
            names = os.listdir(runs)
        except (OSError, RunError):
            continue
        for name in names:
            if ID.fullmatch(name):
                try:
                    run_info = load_info(runs / name)
                    if run_info.id != name:  # copied under another name, or made to look like another run
                        raise RunError(f"{runs / name} has the id of another run: {run_info.id}")
                    readable_runs.append((runs / name, run_info))
                except RunError as error:
                    # Without the file, the run is just being created, or was just deleted.
                    if unreadable is not None and os.path.lexists(runs / name / INFO_FILE):
                        unreadable.append(str(error))

    def age_key(run: tuple[Path, RunInfo]) -> tuple[float, str]:
        directory, run_info = run
        return run_info.started_unix, directory.name

    return sorted(readable_runs, key=age_key)


def short_name(run_info: RunInfo) -> str:
    """Return the run's display name: its name and the four digits that distinguish it from others of that name."""
    return f"{run_info.name}-{run_info.id[-4:]}"


def find_live_run(name: str | None) -> Path:
    """Return the run named `name`, of several the live one; None: the newest live run, else the newest run."""
    if name is not None:
        return find_run(name, live_test=is_live)
    return next((directory for directory, run_info in reversed(list_runs()) if is_live(run_info)), None) or find_run()


JOB = "job="
"""The prefix of a RUN that means the newest run of a job on this machine: `job=slurm:12.0`."""


def find_run(name: str = "last", *, unique: bool = False, live_test: Callable[[RunInfo], bool] | None = None) -> Path:
    """Return the run named `name`: `last`, an id, a short name, a name (its latest run), or a unique prefix of one.

    The file name of a script also means its latest run.

    Raises RunError if no run or several runs match. `unique`: also if several runs have that name; a prefix of an id
    counts only. With `live_test`, a name means its run that passes the test; raises RunError if several do.
    """
    runs = list_runs()
    if not runs:
        raise RunError(f"there is no run yet in {runs_directory()}")

    def select(is_match: Callable[[RunInfo], bool]) -> list[tuple[Path, RunInfo]]:
        return [(directory, run_info) for directory, run_info in runs if is_match(run_info)]

    matches = runs[-1:]
    if name != "last":
        matches = select(lambda run_info: name in (run_info.id, short_name(run_info), run_info.name))
        matches = matches or select(lambda run_info: name == os.path.basename(run_info.script))
    if live_test is not None and len(matches) > 1:
        matches = [(directory, run_info) for directory, run_info in matches if live_test(run_info)] or matches[-1:]
        unique = True
    if not matches and name:
        matches = select(lambda run_info: run_info.id.startswith(name))
        if not matches and not unique:
            matches = select(lambda run_info: short_name(run_info).startswith(name))
        unique = True
    if not matches:
        raise RunError(f"there is no run {name!r}; `dpmon ls` lists them")
    if unique and len(matches) > 1:
        ids = [run_info.id for _, run_info in reversed(matches)]
        more_text = f" and {len(ids) - _MAX_IDS} more (dpmon ls lists them)" if len(ids) > _MAX_IDS else ""
        raise RunError(f"{name!r} could be any of {len(ids)} runs: {', '.join(ids[:_MAX_IDS])}{more_text}")
    directory, _ = matches[-1]
    return directory
