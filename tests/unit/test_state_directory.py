"""dpmon creates nothing outside its own directories, and nothing that other users can read."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept import draft

from dpmon.run import runs
from dpmon.run.rundir import RunError
from dpmon.run.runs import create_run, stand_ins


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
    directory, _ = create_run(draft())
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
    create_run(draft())
    assert mode(state) == 0o755


def test_a_temporary_directory_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(runs, "SHARED_MEMORY", str(tmp_path / "no-memory"))
    for name in ("missing", "file", "link", "missing/deeper"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        assert stand_ins()[0].is_relative_to(tmp_path / name)
        with pytest.raises(RunError, match="no run can be kept"):
            create_run(draft())
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_only_the_user_can_read_what_is_made_in_a_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: None
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    directory, info = create_run(draft())
    assert "elsewhere" in info.options
    assert directory.is_relative_to(tmp_path / "tmp")
    assert {mode(path) for path in (directory, directory.parent, directory.parent.parent)} == {0o700}
    assert mode(tmp_path / "tmp") == 0o1777


@pytest.mark.parametrize("trap", ["link", "file", "foreign"])
def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "theirs").mkdir(mode=0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(runs, "SHARED_MEMORY", str(tmp_path / "no-memory"))
    ours = stand_ins()[0].parent
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
        create_run(draft())
    assert os.listdir(tmp_path / "theirs") == []
    assert mode(tmp_path / "theirs") == 0o755
    if trap == "foreign":
        assert os.listdir(ours) == []
        shutil.rmtree(ours)
