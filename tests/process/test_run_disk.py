"""The disk of the record is full, too small, read-only or missing: one warning, and the training goes on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpmon.run.run_registry import fallback_directories, network_file_system
from support.hostile_inputs import fill_disk
from support.ring_writers import TESTS, WRITE_RUN
from support.run_harness import Dpmon, wait_for, wait_until_unsupervised

pytestmark = pytest.mark.slow

MIB = 1 << 20
FLOOD = """\
import os, pathlib, sys, time
sys.path.insert(0, {tests!r})
from support.ring_writers import write_run
def after(number):
    if number == 3000:
        while not pathlib.Path("go").exists():
            pass
        for line in range(30000):
            print(f"line {{line}} of the script's own output, about a hundred bytes of it in all", "." * 30)
            if line % 2000 == 0:
                # Print about half a megabyte a second, or less if the supervisor is too busy to make room.
                time.sleep(0.4)
                until = time.monotonic() + 10
                while room() < 500_000 and time.monotonic() < until:
                    time.sleep(0.05)
def room():
    log = os.fstat(1)
    return log.st_blocks * 512 - (log.st_size - os.lseek(1, 0, os.SEEK_DATA))
print("began", flush=True)
pathlib.Path("began").touch()
write_run(6000, 3000, 2, after)
print("the end of the training", flush=True)
"""


SFTP_SERVERS = [
    *map(Path, ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server"))
]


@pytest.fixture
def shared_directory(tmp_path: Path) -> Iterator[Path]:
    """A directory on a network file system: sshfs, with its server as a child process and no network."""
    server = next((path for path in SFTP_SERVERS if path.exists()), None)
    if server is None or shutil.which("sshfs") is None:
        pytest.skip("sshfs or sftp-server is not installed")
    place, behind = tmp_path / "shared", tmp_path / "behind"
    place.mkdir()
    behind.mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        processes = [
            subprocess.Popen([str(server)], stdin=ours.fileno(), stdout=ours.fileno()),
            subprocess.Popen(
                ["sshfs", "-f", "-o", "passive", f":{behind}", str(place)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
            ),
        ]
    try:
        wait_for(lambda: network_file_system(place) or processes[1].poll() is not None, what="the file system")
        if processes[1].poll() is not None:
            pytest.skip("no file system can be mounted here")
        yield place
    finally:
        for process in reversed(processes):  # sshfs first, which unmounts its file system
            process.terminate()
            process.wait()
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


@pytest.fixture
def other_places(dpmon: Dpmon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Path]]]:
    """The other directories for runs, best first, with one for temporary files of this test; they are deleted."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))

    def places() -> list[Path]:
        monkeypatch.setenv("XDG_STATE_HOME", str(dpmon.state))
        return fallback_directories()

    yield places
    for place in places():
        if place.parent.is_symlink() or place.parent.is_file():
            place.parent.unlink()
        shutil.rmtree(place.parent, ignore_errors=True)


def check_elsewhere(dpmon: Dpmon, place: Path, says: str) -> None:
    """Check that a run works as usual in another place, with one sentence, and that all commands find it there."""
    result = dpmon.run(*WRITE_RUN, 200, 2000)
    assert result.status == 0, result.errors
    told = [line for line in result.errors.splitlines() if says in line and not line.startswith("dpmon: warning")]
    assert len(told) == 1, result.errors
    assert f"this run is kept in {place}; set XDG_STATE_HOME to choose another directory" in told[0]
    assert len(list(place.iterdir())) == 1
    assert os.stat(place).st_mode & 0o777 == 0o700
    records = dpmon.records()
    assert len([r for r in records if r["kind"] == "step"]) == 100
    assert [says in r["text"] for r in records if r["kind"] == "warning"] == [True]
    assert "finished" in dpmon.run("ls").text
    assert dpmon.run("rm", "last").status == 0
    assert list(place.iterdir()) == []


Places = Callable[[], list[Path]]


def test_a_read_only_state_directory(dpmon: Dpmon, other_places: Places, mount: Callable[..., Path]) -> None:
    dpmon.state = mount(64, "ro")
    check_elsewhere(dpmon, other_places()[0], "Read-only file system")


def test_a_disk_with_too_little_room(dpmon: Dpmon, other_places: Places, mount: Callable[..., Path]) -> None:
    dpmon.state = mount(4)
    check_elsewhere(dpmon, other_places()[0], "MiB left")


def test_a_network_file_system(dpmon: Dpmon, other_places: Places, shared_directory: Path) -> None:
    dpmon.state = shared_directory
    check_elsewhere(dpmon, other_places()[0], "is on a network file system (fuse.sshfs)")
    found = dpmon.run("doctor").text
    assert "network file system" in found
    assert str(other_places()[0]) in found
    assert list(shared_directory.iterdir()) == [], "nothing is written there"


def test_other_places_are_tried_in_turn(dpmon: Dpmon, other_places: Places) -> None:
    dpmon.state.write_text("a file where the directory should be")
    lasting, temporary, memory = other_places()
    lasting.parent.write_text("a file too")
    check_elsewhere(dpmon, temporary, "no run can be kept")
    shutil.rmtree(temporary.parent)
    temporary.parent.write_text("a file too")
    if os.access(memory.parent.parent, os.W_OK):
        check_elsewhere(dpmon, memory, "no run can be kept")
    dpmon.state.unlink()


def test_a_disk_that_fills_up_meanwhile(dpmon: Dpmon, mount: Callable[..., Path]) -> None:
    """Another process fills the disk: the script's output and live records go on, with one warning of each kind."""
    dpmon.state = mount(48)
    dpmon.script(FLOOD.format(tests=str(TESTS)))
    dpmon.run("--detach", "script.py")
    dpmon.begun()
    directory = dpmon.last()
    wait_for(lambda: (directory / "output.log").stat().st_blocks * 512 >= MIB, what="room ahead of the output")
    fill_disk(dpmon.state)
    dpmon.go()
    info = dpmon.info()
    wait_until_unsupervised(info)
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
    wait_until_unsupervised(dpmon.info())
    assert (dpmon.last() / "output.log").stat().st_blocks * 512 <= 65536
