"""Directories of runs are created and found, and refused if they are invalid."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.cli.doctor import local_checks
from dpmon.run import run_registry
from dpmon.run.run_directory import ExitInfo, RunError, RunInfo, load_exit, load_info, write_info
from dpmon.run.run_registry import (
    create_run,
    fallback_directories,
    find_run,
    list_runs,
    newest_run,
    runs_directory,
    short_name,
)
from support.history_builders import make_run_info


def test_a_saved_run_is_read_back_unchanged(state: Path) -> None:
    directory, info = create_run(
        make_run_info(command=("python", "x.py", "ü"), options={"mode": "auto", "replicas": None})
    )
    assert load_info(directory) == info
    assert directory.name == info.id
    how = ExitInfo(137, "SIGKILL", 1.5, 10**12, 3.25, "supervisor")
    assert load_exit(directory) is None
    write_info(directory, how)
    assert load_exit(directory) == how
    assert sorted(path.name for path in directory.iterdir()) == ["exit.json", "run.json"]


@pytest.fixture(autouse=True)
def _leave_no_run_in_var(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_registry, "PERSISTENT_TMP", str(tmp_path / "no-var"))


def test_a_relative_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", "here")
    monkeypatch.chdir(tmp_path)
    directory, info = create_run(make_run_info())
    try:
        assert directory.is_absolute()
        assert "elsewhere" in info.options
        assert not (tmp_path / "here").exists()
    finally:
        shutil.rmtree(directory.parent.parent)


def test_an_open_directory_is_closed(state: Path) -> None:
    (state / "dpmon" / "runs").mkdir(parents=True, mode=0o755)
    create_run(make_run_info())
    assert runs_directory().stat().st_mode & 0o777 == 0o700


def test_runs_are_found_by_all_their_names(state: Path) -> None:
    old, old_info = create_run(make_run_info(name="a", started_unix=1000.0))
    new, new_info = create_run(make_run_info(name="a", started_unix=2000.0))
    other, other_info = create_run(make_run_info(name="last-one", started_unix=1500.0))
    assert find_run() == find_run("last") == new
    assert newest_run(lambda info: False) == new, "if none goes on, the newest of all"
    assert newest_run(lambda info: info.id == old.name) == old
    assert newest_run(lambda info: True) == new
    assert find_run("a") == new
    assert find_run(short_name(old_info)) == old
    assert find_run(old_info.id) == old
    assert find_run("last-one") == other
    assert find_run(other_info.id[:-2]) == other
    assert [info for _, info in list_runs()] == [old_info, other_info, new_info]
    for unknown in ("b", "", "../" + new.name, str(new)):
        with pytest.raises(RunError):
            find_run(unknown)


def test_among_runs_of_one_name_the_live_one_is_chosen(state: Path) -> None:
    runs = [create_run(make_run_info(name="a", started_unix=1000.0 + number)) for number in range(3)]
    going = {runs[0][1].id}
    assert find_run("a") == runs[2][0]
    assert find_run("a", live_test=lambda info: info.id in going) == runs[0][0]
    assert find_run("a", live_test=lambda _: False) == runs[2][0]
    going.add(runs[1][1].id)
    with pytest.raises(RunError, match=f"could be any of 2 runs: {runs[1][1].id}, {runs[0][1].id}"):
        find_run("a", live_test=lambda info: info.id in going)
    assert find_run(runs[0][1].id, live_test=lambda info: info.id in going) == runs[0][0]


def test_of_two_runs_of_one_second_the_later_one_is_the_last(state: Path) -> None:
    for round_ in range(20):
        create_run(make_run_info(name="a", started_unix=5000.0 + round_ + 0.1))
        later, _ = create_run(make_run_info(name="a", started_unix=5000.0 + round_ + 0.2))
        assert find_run() == later


def test_a_link_is_refused(state: Path, tmp_path: Path) -> None:
    directory, _ = create_run(make_run_info())
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="symbolic link"):
        load_info(directory)
    assert list_runs() == []


def test_a_linked_run_json_is_refused(state: Path, tmp_path: Path) -> None:
    directory, _ = create_run(make_run_info())
    (directory / "run.json").rename(tmp_path / "elsewhere")
    (directory / "run.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError):
        load_info(directory)


def test_a_foreign_owner_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = create_run(make_run_info())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(run_registry, "fallback_directories", list)  # files created there would be left behind
    with pytest.raises(RunError, match="another user"):
        load_info(directory)
    with pytest.raises(RunError, match="another user"):
        create_run(make_run_info())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"id": 3}', "{}", "[" * 100_000, '{"id": "x", "command": "not a list"}', "\x00\xff"],
)
def test_a_damaged_run_json_is_an_error_of_ours(state: Path, text: str) -> None:
    directory, _ = create_run(make_run_info())
    (directory / "run.json").write_text(text)
    with pytest.raises(RunError):
        load_info(directory)
    assert list_runs() == []


@pytest.mark.parametrize("member", [member.name for member in dataclasses.fields(RunInfo)])
@pytest.mark.parametrize("value", [True, 3, [1], {"a": 1}, "x", None])
def test_every_member_is_checked_for_its_type(state: Path, member: str, value: object) -> None:
    directory, info = create_run(make_run_info())
    data = {**json.loads((directory / "run.json").read_text()), member: value}
    (directory / "run.json").write_text(json.dumps(data))
    try:
        found = load_info(directory)
    except RunError:
        return
    kind = type(getattr(info, member))
    same = getattr(found, member)
    assert isinstance(same, kind) or same is None or getattr(info, member) is None or kind is float


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "1e300"])
def test_numbers_out_of_range_are_damage(state: Path, number: str) -> None:
    directory, _ = create_run(make_run_info())
    write_info(directory, ExitInfo(0, None, 1.7e9, 5, 5.0, "supervisor"))
    assert load_exit(directory) is not None
    for name, member in (("run.json", "started_unix"), ("exit.json", "seconds")):
        path = directory / name
        path.write_text(re.sub(rf'"{member}": [^,]*', f'"{member}": {number}', path.read_text()))
    assert load_exit(directory) is None
    with pytest.raises(RunError, match="is not a run"):
        load_info(directory)
    assert list_runs() == []


@pytest.mark.parametrize("text", ["", "{", '{"status": "0"}', '{"status": null}', "[]"])
def test_a_damaged_exit_json_is_none(state: Path, text: str) -> None:
    directory, _ = create_run(make_run_info())
    (directory / "exit.json").write_text(text)
    assert load_exit(directory) is None


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_missing_directories_of_the_state_home_are_made_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: None
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "missing" / "too" / "state"))
    directory, _ = create_run(make_run_info())
    made = [directory, *directory.parents]
    made = made[: made.index(tmp_path)]
    assert len(made) == 6
    assert {path.name: mode(path) for path in made} == dict.fromkeys((path.name for path in made), 0o700)
    assert mode(directory / "run.json") & 0o077 == 0


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: None) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    create_run(make_run_info())
    assert mode(state) == 0o755


def test_a_temporary_directory_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(run_registry, "SHARED_MEMORY", str(tmp_path / "no-memory"))
    for name in ("missing", "file", "link", "missing/deeper"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        assert fallback_directories()[1].is_relative_to(tmp_path / name)
        with pytest.raises(RunError, match="no run can be kept"):
            create_run(make_run_info())
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_only_the_user_can_read_what_is_made_in_a_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: None
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    directory, info = create_run(make_run_info())
    assert "elsewhere" in info.options
    assert directory.is_relative_to(tmp_path / "tmp")
    assert {mode(path) for path in (directory, directory.parent, directory.parent.parent)} == {0o700}
    assert mode(tmp_path / "tmp") == 0o1777


def mounted_as(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the mount of `tmp_path` have another type, as far as dpmon knows."""
    mounts = run_registry.MOUNTS.read_text().replace(f" - {run_registry.file_system(tmp_path)} ", f" - {kind} ")
    (tmp_path / "mountinfo").write_text(mounts)
    monkeypatch.setattr(run_registry, "MOUNTS", tmp_path / "mountinfo")


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("nfs4", True), ("gpfs", True), ("lustre", True), ("fuse.sshfs", True), ("ext4", False), ("fuseblk", False)],
)
def test_the_type_of_a_file_system_is_that_of_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shared: bool
) -> None:
    assert run_registry.file_system(Path("/proc/self")) == "proc"
    assert run_registry.file_system(Path("/proc/missing/too")) == "proc"
    mounted_as(kind, tmp_path, monkeypatch)
    for place in (tmp_path, tmp_path / "missing" / "too", tmp_path / "mountinfo"):
        assert run_registry.file_system(place) == kind
        assert run_registry.network_file_system(place) == (kind if shared else None)
    assert run_registry.file_system(Path("/proc")) == "proc"
    monkeypatch.setattr(run_registry, "MOUNTS", tmp_path / "missing")
    assert run_registry.file_system(tmp_path) is None


def as_nfs(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    def kind_of(place: Path) -> str:
        return "nfs4" if any(place.is_relative_to(one) for one in places) else "ext4"

    monkeypatch.setattr(run_registry, "file_system", kind_of)


def test_a_run_is_not_kept_on_a_network_file_system(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = create_run(make_run_info(name="before"))
    as_nfs(monkeypatch, state)
    for name in ("var", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(run_registry, "PERSISTENT_TMP", str(tmp_path / "var"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    directory, info = create_run(make_run_info())
    assert directory.parent == fallback_directories()[0]
    assert directory.is_relative_to(tmp_path / "var")
    assert mode(directory.parent.parent) == 0o700
    assert info.options["elsewhere"] == (
        f"{state}/dpmon/runs is on a network file system (nfs4): this run is kept in {directory.parent};"
        " set XDG_STATE_HOME to choose another directory"
    )
    assert [found for found, _ in list_runs()] == [before, directory], "runs of earlier days are found, too"
    monkeypatch.setenv("TMPDIR", "/of/another/job")
    assert find_run() == directory
    as_nfs(monkeypatch, state, tmp_path / "var")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert create_run(make_run_info())[0].is_relative_to(tmp_path / "tmp")


def test_without_a_local_file_system_there_is_no_run(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_nfs(monkeypatch, Path("/"))
    with pytest.raises(RunError, match=r"network file system \(nfs4\); set XDG_STATE_HOME to a local directory"):
        create_run(make_run_info())
    assert not state.exists()


@pytest.mark.parametrize("trap", ["link", "file", "foreign"])
def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "theirs").mkdir(mode=0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(run_registry, "SHARED_MEMORY", str(tmp_path / "no-memory"))
    ours = fallback_directories()[1].parent
    if trap == "link":
        ours.symlink_to(tmp_path / "theirs")
    elif trap == "file":
        ours.touch()
    else:
        ours.mkdir(mode=0o777)
        try:
            os.chown(ours, 12345, 12345)
        except PermissionError:
            pytest.skip("only root gives files away")
    with pytest.raises(RunError):
        create_run(make_run_info())
    assert os.listdir(tmp_path / "theirs") == []
    assert mode(tmp_path / "theirs") == 0o755
    if trap == "foreign":
        assert os.listdir(ours) == []
        shutil.rmtree(ours)


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Each directory from the one that holds the state directory down to that of the runs; a replacement works, too."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    home = tmp_path / "shared"
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    below = home / "state" / "dpmon"
    return {"parent": home, "state": home / "state", "dpmon": below, "runs": below / "runs"}


@pytest.mark.parametrize("name", ["dpmon", "runs"])
def test_a_link_in_place_of_our_directories_is_not_followed(tmp_path: Path, way: dict[str, Path], name: str) -> None:
    target = tmp_path / "other-disk"
    target.mkdir(mode=0o755)
    way[name].parent.mkdir(parents=True)
    way[name].symlink_to(target)
    directory, info = create_run(make_run_info())
    assert directory.is_relative_to(tmp_path / "tmp")
    assert info.options["elsewhere"].startswith(f"{way[name]} is a symbolic link")
    (found,) = [check for check in local_checks.check_state_directory() if check.name == "state"]
    assert (found.state, f"{way[name]} is a symbolic link" in found.found) == ("warning", True)
    assert (os.listdir(target), mode(target)) == ([], 0o755), "looking makes nothing"
    assert list_runs() == [(directory, info)]


@pytest.mark.parametrize("name", ["parent", "state"])
def test_a_link_above_our_directories_is_followed(tmp_path: Path, way: dict[str, Path], name: str) -> None:
    target = tmp_path / "other-disk"
    target.mkdir(mode=0o750)
    way[name].parent.mkdir(parents=True, exist_ok=True)
    way[name].symlink_to(target)
    directory, info = create_run(make_run_info())
    assert directory.resolve().is_relative_to(target)
    assert mode(target) == 0o750
    assert list_runs() == [(directory, info)]


def test_a_link_to_itself_is_an_error_of_ours(way: dict[str, Path], tmp_path: Path) -> None:
    way["parent"].symlink_to(way["parent"])
    assert create_run(make_run_info())[0].is_relative_to(tmp_path / "tmp")


CREATE = """\
import json, os, sys
sys.path.insert(0, sys.argv[1])
from support.history_builders import make_run_info
from dpmon.run import run_registry
user = int(sys.argv[2])
os.setgroups([])
os.setgid(user)
os.setuid(user)  # only now: this user may not be able to read this installation
run_registry.PERSISTENT_TMP = "/nowhere"
directory, info = run_registry.create_run(make_run_info())
print(json.dumps([str(directory), info.options.get("elsewhere", "")]))
"""


def created_by(user: int, **environment: str) -> tuple[Path, str]:
    """Let a process of another user create a run; return its directory, and why it is not in the usual one."""
    words = [sys.executable, "-c", CREATE, str(Path(__file__).resolve().parent.parent), str(user)]
    done = subprocess.run(words, env={**os.environ, **environment}, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    directory, why = json.loads(done.stdout)
    return Path(directory), why


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that all users reach; that of a test is closed to them."""
    if os.getuid() != 0:
        pytest.skip("only root gives files away")
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


def test_a_home_directory_is_not_made(open_to_all: Path) -> None:
    (open_to_all / "tmp").mkdir()
    home = open_to_all / "missing" / "home"
    elsewhere = {"XDG_STATE_HOME": "", "TMPDIR": str(open_to_all / "tmp")}
    directory, why = created_by(0, HOME=str(home), **elsewhere)
    assert directory.is_relative_to(open_to_all / "tmp")
    assert f"there is no directory {home}: this run is kept in {directory.parent}" in why
    assert os.listdir(open_to_all) == ["tmp"]
    home.mkdir(parents=True)
    assert created_by(0, HOME=str(home), **elsewhere)[0].is_relative_to(home / ".local" / "state")
