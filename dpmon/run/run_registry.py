"""The directory of all runs: creates runs in it, and finds them by their names."""

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
from dpmon.run.run_directory import ID, INFO_FILE, RunError, RunInfo, check_directory, load_info, write_info
from dpmon.run.safe_files import open_directory

_IDS_NAMED = 8
ROOM_BYTES = 24 << 20
"""Free space that a run needs, in bytes: its rings, and some for the rest."""
LASTING = "/var/tmp"
"""A local directory that does not depend on the environment: other shells and jobs of the user find the runs there."""
SHARED_MEMORY = "/dev/shm"
MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "fhgfs", "ceph", "afs", "panfs", "wekafs", "dvs"),
    *("orangefs", "pvfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.juicefs", "fuse.s3fs"),
    *("fuse.gcsfuse", "fuse.rclone"),
}
"""Types of file systems that several machines share: SQLite's shared memory and mapped rings do not work on them."""


def runs_directory() -> Path:
    """The directory of all runs, under the user's state directory; it may not exist. RunError without a home directory.

    The state directory is XDG_STATE_HOME or ~/.local/state. A relative XDG_STATE_HOME is ignored, as the XDG Base
    Directory Specification asks, because processes with other current directories would resolve it differently.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "dpmon" / "runs"
    at_home = home_directory(os.environ)
    if at_home is None:
        raise RunError("there is no home directory for runs; set XDG_STATE_HOME to an absolute path")
    return at_home / ".local" / "state" / "dpmon" / "runs"


def fallback_directories() -> list[Path]:
    """Replacements for `runs_directory` if it cannot store runs: directories for temporary files, then memory.

    Their names depend on the usual place, so that runs of different state directories do not mix.
    """
    mark = f"{zlib.crc32(os.fsencode(runs_directory())):08x}"
    temporary = os.environ.get("TMPDIR", "")
    # A process with another current directory, such as the supervisor, would resolve a relative path differently.
    places = dict.fromkeys([LASTING, temporary if os.path.isabs(temporary) else "/tmp", SHARED_MEMORY])
    return [Path(place) / f"dpmon-{os.getuid()}-{mark}" / "runs" for place in places]


def file_system(place: Path) -> str | None:
    """The type of the file system of `place`, or of its nearest existing directory; None if the kernel does not say."""
    directory = next(path for path in (place, *place.parents) if os.path.isdir(path))
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # mounts what autofs has there
        try:
            about = Path(f"/proc/self/fdinfo/{fd}").read_text()
        finally:
            os.close(fd)
        mount = about.partition("mnt_id:")[2].split()[:1]
        for line in MOUNTS.read_text(errors="replace").splitlines():
            if line.split()[:1] == mount:
                return line.partition(" - ")[2].split()[0]
    return None


def network_file_system(place: Path) -> str | None:
    """The type of the file system of `place`, if several machines share it; else None."""
    kind = file_system(place)
    return kind if kind in _NETWORK else None


def _check_way(runs: Path) -> None:
    """Raise RunError if a link that neither this user nor root made leads to `runs`: it could lead anywhere."""
    places = [*reversed(runs.parents), runs]
    for place in places:
        if place.is_symlink():
            if os.lstat(place).st_uid not in (0, os.getuid()):
                raise RunError(f"{place} is a link that another user made; set XDG_STATE_HOME to a directory of yours")
            target = Path(os.path.realpath(place.parent), os.readlink(place))
            places += [each for each in (*reversed(target.parents), target) if each not in places]


def check_place(runs: Path) -> None:
    """Raise RunError if no run may be kept in `runs`, or OSError; nothing is created."""
    _check_way(runs)
    at_home = home_directory(os.environ)
    if at_home is not None and runs.is_relative_to(at_home) and not at_home.is_dir():
        raise RunError(f"no run can be kept in {runs}: there is no directory {at_home}; set XDG_STATE_HOME")
    for directory in (runs.parent, runs):
        if directory.is_symlink() and os.stat(directory).st_mode & 0o077:
            raise RunError(f"{directory} is a link to a directory that is open to others; chmod 700 {directory}/")


def _make_private(directory: Path) -> None:
    """Create a directory of mode 0700, whatever the umask; FileExistsError if the path exists."""
    directory.mkdir(mode=0o700)
    with open_directory(directory) as fd:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)  # not by its name, which may have become a link


def _create_private(runs: Path) -> None:
    """Create a directory of runs if it is missing, and make it private; RunError if that fails."""
    usual = runs == runs_directory()
    try:
        check_place(runs)
        # The XDG Base Directory Specification asks for mode 0700, also for missing parent directories.
        for directory in [place for place in reversed(runs.parents[1:]) if usual and not place.exists()]:
            with contextlib.suppress(FileExistsError):  # another dpmon made it first
                _make_private(directory)
        for directory in (runs.parent, runs):
            with contextlib.suppress(FileExistsError):
                _make_private(directory)
            linked = usual and directory.is_symlink()  # what it leads to is not changed
            with open_directory(directory, linked=linked) as fd:
                info = os.fstat(fd)
                if info.st_uid != os.getuid():
                    raise RunError(f"{directory} belongs to another user; set XDG_STATE_HOME to a directory of yours")
                if info.st_mode & 0o077 and not linked:
                    os.chmod(f"/proc/self/fd/{fd}", 0o700)
    except OSError as error:
        raise RunError(f"no run can be kept in {runs}: {error.strerror}; set XDG_STATE_HOME") from None


def create_run(draft: RunInfo) -> tuple[Path, RunInfo]:
    """Create a directory for the run `draft`, fill in its id, and write run.json; RunError if that fails.

    If the usual place cannot be used (on the network, read-only, full, another user's), the run gets a replacement. A
    sentence in `options["elsewhere"]` says so.
    """
    problem, local = "", list[Path]()
    for runs in (runs_directory(), *fallback_directories()):
        options = dict(draft.options)
        if problem:
            why = problem.partition(";")[0]
            options["elsewhere"] = f"{why}: this run is kept in {runs}; set XDG_STATE_HOME to choose another directory"
        try:
            if (kind := network_file_system(runs)) is not None:
                raise RunError(f"{runs} is on a network file system ({kind})")
            local.append(runs)
            _create_private(runs)
            free = shutil.disk_usage(runs).free
            if free < ROOM_BYTES:
                raise RunError(f"{runs} has only {free >> 20} MiB left")
            return _create_in(runs, replace(draft, options=options))
        except RunError as error:
            problem = problem or str(error)
    # No place has enough space: use what is left in the usual place, or raise its error.
    if not local:
        raise RunError(f"{problem}; set XDG_STATE_HOME to a local directory")
    _create_private(local[0])
    return _create_in(local[0], replace(draft, options={**draft.options, "elsewhere": problem}))


def _create_in(runs: Path, draft: RunInfo) -> tuple[Path, RunInfo]:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(draft.started_unix))
    for _ in range(1000):
        run_id = f"{stamp}-{draft.name}-{os.urandom(2).hex()}"
        directory, info = runs / run_id, replace(draft, id=run_id, host=proc.host_name())
        try:
            _make_private(directory)
            write_info(directory, info)
        except FileExistsError:
            continue
        except OSError as error:
            with contextlib.suppress(OSError):  # leave no empty run behind
                directory.rmdir()
            raise RunError(f"{directory} cannot be created: {error.strerror}") from None
        return directory, info
    raise RunError(f"no free name for a run in {runs}")


def list_runs(unreadable: list[str] | None = None) -> list[tuple[Path, RunInfo]]:
    """All readable runs of this user, oldest first, including those in replacement directories.

    `unreadable`: a list that receives an error for each run with an unreadable run.json.
    """
    found = []
    for runs in (runs_directory(), *fallback_directories()):
        try:
            _check_way(runs)
            if runs != runs_directory():
                check_directory(runs.parent)
            names = os.listdir(runs)
        except (OSError, RunError):
            continue
        for name in names:
            if ID.fullmatch(name):
                try:
                    info = load_info(runs / name)
                    if info.id != name:  # copied under another name, or made to look like another run
                        raise RunError(f"{runs / name} has the id of another run: {info.id}")
                    found.append((runs / name, info))
                except RunError as error:
                    # Without the file the run is just being created, or was just deleted.
                    if unreadable is not None and os.path.lexists(runs / name / INFO_FILE):
                        unreadable.append(str(error))
    return sorted(found, key=lambda run: (run[1].started_unix, run[0].name))


def short_name(info: RunInfo) -> str:
    """The run's display name: its name and the four digits that distinguish it from others of that name."""
    return f"{info.name}-{info.id[-4:]}"


def newest_run(goes_on: Callable[[RunInfo], bool]) -> Path:
    """The newest live run, else the newest of all; RunError if there is none."""
    going = [directory for directory, info in reversed(list_runs()) if goes_on(info)]
    return going[0] if going else find_run()


JOB = "job="
"""The prefix of a RUN that means the newest run of a job on this machine: `job=slurm:12.0`."""


def find_run(what: str = "last", *, only: bool = False, goes_on: Callable[[RunInfo], bool] | None = None) -> Path:
    """The run named `what`: `last`, an id, a short name, a name (its latest run), or a unique prefix of one.

    RunError if no run or several runs match. `only`: RunError also if several runs have that name. With `goes_on`, a
    name means its live run; RunError if several are live.
    """
    runs = list_runs()
    if not runs:
        raise RunError(f"there is no run yet in {runs_directory()}")
    if what == "last":
        return runs[-1][0]
    for meaning in (lambda run: run.id, short_name, lambda run: run.name):
        same = [(directory, info) for directory, info in runs if meaning(info) == what]
        if only and len(same) > 1:
            raise RunError(f"{what!r} could be any of {len(same)} runs: {_format_ids([info.id for _, info in same])}")
        going = [run for run in same if goes_on is not None and goes_on(run[1])] if len(same) > 1 else []
        if len(going) > 1:
            raise RunError(f"{what!r} matches {len(going)} live runs: {_format_ids([info.id for _, info in going])}")
        if same:
            return (going or same)[-1][0]
    starts = [run for run in runs if what and _has_prefix(run[1], what, only)]
    if len(starts) > 1:
        names = _format_ids([short_name(info) for _, info in starts])
        raise RunError(f"{what!r} could be any of {len(starts)} runs: {names}")
    if not starts:
        raise RunError(f"there is no run {what!r}; `dpmon ls` lists them")
    return starts[0][0]


def _has_prefix(info: RunInfo, what: str, only: bool) -> bool:
    """Whether the run's id or short name begins with `what`; with `only`, only the id counts."""
    return info.id.startswith(what) or (not only and short_name(info).startswith(what))


def _format_ids(ids: list[str]) -> str:
    """The newest ids, the newest first."""
    shown = ", ".join(ids[: -_IDS_NAMED - 1 : -1])
    return shown if len(ids) <= _IDS_NAMED else f"{shown} and {len(ids) - _IDS_NAMED} more (dpmon ls lists them)"
