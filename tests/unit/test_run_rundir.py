"""Directories of runs are created and found, and refused if they are invalid."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.cli.doctor import _check_state_directory
from dpmon.run import run_registry
from dpmon.run.run_directory import RunError, load_exit, load_info
from dpmon.run.run_registry import (
    create_run,
    fallback_directories,
    find_live_run,
    find_run,
    list_runs,
    short_name,
)
from support.history_builders import make_run_info


@pytest.fixture(autouse=True)
def _leave_no_run_in_var(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_registry, "PERSISTENT_TMP", str(tmp_path / "no-var"))


def test_runs_are_found_by_all_their_names(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, old_info = create_run(make_run_info(name="a", started_unix=1000.0))
    new, new_info = create_run(make_run_info(name="a", started_unix=2000.0))
    other, other_info = create_run(make_run_info(name="last-one", started_unix=1500.0))
    assert find_run() == find_run("last") == new
    assert find_live_run(None) == new, "if none goes on, the newest of all"
    for live, found in ((lambda info: info.id == old.name, old), (lambda info: True, new)):
        with monkeypatch.context() as patch:
            patch.setattr(run_registry, "is_live", live)
            assert find_live_run(None) == found
    assert find_run("a") == new
    assert find_run(short_name(old_info)) == old
    assert find_run(old_info.id) == old
    assert find_run(Path(old_info.script).name) == new, "the script's latest run"
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


def test_a_link_is_refused(state: Path, tmp_path: Path) -> None:
    directory, _ = create_run(make_run_info())
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="symbolic link"):
        load_info(directory)
    assert list_runs() == []


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
    found = _check_state_directory()
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
