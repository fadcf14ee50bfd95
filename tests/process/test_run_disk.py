"""The disk of the record is full, too small, read-only or missing: one warning, and the training goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import fill
from running import Dpmon, until_unsupervised, wait_for

pytestmark = pytest.mark.slow

WRITER = Path(__file__).resolve().parent.parent / "writer.py"
MIB = 1 << 20
FLOOD = """\
import os, pathlib, sys
sys.path.insert(0, {tests!r})
import writer
def after(number):
    if number == 3000:
        while not pathlib.Path("go").exists():
            pass
        for line in range(30000):
            print(f"line {{line}} of the script's own output, about a hundred bytes of it in all", "." * 30)
            if line % 2000 == 0:
                import time
                time.sleep(0.4)  # what is left is about half a megabyte a second
print("began", flush=True)
pathlib.Path("began").touch()
writer.main(6000, 3000, 2, after)
print("the end of the training", flush=True)
"""


@pytest.fixture
def other_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files of this test; runs left in memory are deleted."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    before = set(Path("/dev/shm").glob("dpmon-*"))
    yield place
    for left in set(Path("/dev/shm").glob("dpmon-*")) - before:
        shutil.rmtree(left, ignore_errors=True)


def runs_in(place: Path) -> list[Path]:
    return sorted(place.glob("dpmon-*/runs/2*"))


def check_elsewhere(dpmon: Dpmon, place: Path, says: str) -> None:
    """Check that a run works as usual in another place, with one sentence, and that all commands find it there."""
    result = dpmon.run(WRITER, 200, 2000)
    assert result.status == 0, result.errors
    told = [line for line in result.errors.splitlines() if says in line and not line.startswith("dpmon: warning")]
    assert len(told) == 1, result.errors
    assert str(place) in told[0]
    (directory,) = runs_in(place)
    assert os.stat(directory.parent).st_mode & 0o777 == 0o700
    records = dpmon.records()
    assert len([r for r in records if r["kind"] == "step"]) == 100
    assert [says in r["text"] for r in records if r["kind"] == "warning"] == [True]
    assert "finished" in dpmon.run("ls").text
    assert dpmon.run("rm", "last").status == 0
    assert runs_in(place) == []


def test_a_state_directory_that_is_a_file(dpmon: Dpmon, other_places: Path) -> None:
    dpmon.state.write_text("a file where the directory should be")
    check_elsewhere(dpmon, other_places, "no run can be kept")
    dpmon.state.unlink()


def test_a_read_only_state_directory(dpmon: Dpmon, other_places: Path, mount: Callable[..., Path]) -> None:
    dpmon.state = mount(64, "ro")
    check_elsewhere(dpmon, other_places, "Read-only file system")


def test_a_disk_with_too_little_room(dpmon: Dpmon, other_places: Path, mount: Callable[..., Path]) -> None:
    dpmon.state = mount(4)
    check_elsewhere(dpmon, other_places, "MiB left")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_without_temporary_files_memory_takes_it(dpmon: Dpmon, other_places: Path) -> None:
    dpmon.state.write_text("a file where the directory should be")
    other_places.rmdir()
    other_places.write_text("a file too")
    check_elsewhere(dpmon, Path("/dev/shm"), "no run can be kept")
    dpmon.state.unlink()


@pytest.mark.usefixtures("other_places")
def test_a_link_in_the_other_place_is_not_followed(dpmon: Dpmon, other_places: Path, tmp_path: Path) -> None:
    dpmon.state.write_text("a file where the directory should be")
    dpmon.run(WRITER, 2, 0)
    (taken,) = other_places.iterdir()
    shutil.rmtree(taken)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    taken.symlink_to(elsewhere)
    result = dpmon.run(WRITER, 2, 0)
    assert result.status == 0, result.errors
    assert list(elsewhere.iterdir()) == []
    dpmon.state.unlink()


def test_a_disk_that_fills_up_meanwhile(dpmon: Dpmon, mount: Callable[..., Path]) -> None:
    """Another process fills the disk: the script's output and live records go on, with one warning of each kind."""
    dpmon.state = mount(48)
    dpmon.script(FLOOD.format(tests=str(WRITER.parent)))
    dpmon.run("--detach", "script.py")
    dpmon.begun()
    directory = dpmon.last()
    wait_for(lambda: (directory / "output.log").stat().st_blocks * 512 >= MIB, what="room ahead of the output")
    fill(dpmon.state)
    dpmon.go()
    info = dpmon.info()
    until_unsupervised(info)
    output = (directory / "output.log").read_bytes()
    assert output.endswith(b"the end of the training\n"), output[-3000:]
    assert b"line 29999 of the script's own output" in output
    (dpmon.state / "hog").unlink()
    records = dpmon.records()
    assert records[-1]["kind"] == "exit"
    assert records[-1]["status"] == 0
    texts = [r["text"] for r in records if r["kind"] == "warning"]
    assert len([text for text in texts if "the disk is full" in text]) == 1, texts
    assert len([text for text in texts if text.endswith("output were deleted, because the disk was full")]) == 1, texts
    assert len([text for text in texts if "history cannot be written" in text]) <= 1, texts
    found = [r["step"] for r in records if r["kind"] == "step"]
    dropped = next(r["count"] for r in records if r["kind"] == "dropped")
    assert found == sorted(set(found))
    assert len(found) + len([r for r in records if r["kind"] == "call"]) + dropped >= 6000


def test_room_is_given_back(dpmon: Dpmon) -> None:
    dpmon.script("print('one line')")
    dpmon.run("--detach", "script.py")
    dpmon.exit()
    until_unsupervised(dpmon.info())
    assert (dpmon.last() / "output.log").stat().st_blocks * 512 <= 65536
