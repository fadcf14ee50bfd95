"""The ring file that a training has mapped never shrinks, because that would end the training with SIGBUS.

Nothing can protect the file from a person who truncates it. These tests try everything in dpmon that touches a run.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dpmon.run import proc
from dpmon.span_ring import SLOT_BYTES, SLOTS, SpanRing
from support.hostile_inputs import fill_disk
from support.run_harness import Dpmon, wait_for

pytestmark = pytest.mark.slow

TRAINS = """\
import pathlib, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
steps = 0
while not pathlib.Path("go").exists():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    steps += 1
    if steps % 50 == 0:
        pathlib.Path("steps").write_text(str(steps))
sys.exit(7)
"""


class Watch:
    """Checks a file's length and inode, by name and by descriptor, as often as it can."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY)
        self.lengths = {os.fstat(self._fd).st_size}
        self.inodes = {os.fstat(self._fd).st_ino}
        self.looks = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self.looks += 1
            self.lengths.add(os.fstat(self._fd).st_size)
            if self._path.exists():
                self.inodes.add(self._path.stat().st_ino)

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        os.close(self._fd)


@pytest.fixture
def disk(dpmon: Dpmon, mount: Callable[..., Path]) -> Path:
    """A state directory on its own small file system."""
    dpmon.state = mount(96)
    return dpmon.state


def steps(dpmon: Dpmon) -> int:
    try:
        return int((dpmon.cwd / "steps").read_text() or 0)
    except OSError:
        return 0


def trains_on(dpmon: Dpmon) -> None:
    before = steps(dpmon)
    wait_for(lambda: steps(dpmon) > before, what="the next steps")


def start(dpmon: Dpmon) -> tuple[Path, Watch]:
    dpmon.script(TRAINS)
    dpmon.run("--detach", "--name", "train", *dpmon.warm(), "script.py")
    directory = dpmon.last()
    ring = directory / "process-0.ring"
    wait_for(ring.exists, what="the ring")
    trains_on(dpmon)
    return directory, Watch(ring)


@pytest.mark.slow
def test_every_command_leaves_the_ring_as_it_is(dpmon: Dpmon, disk: Path) -> None:
    _, watch = start(dpmon)
    (length,) = watch.lengths
    commands = [
        ("ls",), ("ls", "--json"), ("report", "train"), ("report", "train", "--json"), ("doctor",),
        *(("export", "train", "--format", form, "-o", f"out-{form}") for form in ("jsonl", "csv", "perfetto")),
        ("keep", "train"), ("keep", "--not", "train"),
    ]  # fmt: skip
    try:
        for words in commands:
            result = dpmon.run(*words)
            assert "Traceback" not in result.errors, (words, result.errors)
        refused = dpmon.run("rm", "train")
        assert refused.status == 2
        assert "is running" in refused.errors
        dpmon.script("pass", "other.py")
        for _ in range(2):  # after the second run, the retention finds more than one
            assert dpmon.run(*dpmon.warm(), "other.py", env={"DPMON_KEEP_RUNS": "1"}).status == 0
        trains_on(dpmon)
        info = dpmon.info(watch._path.parent)
        os.kill(info["supervisor_pid"], signal.SIGKILL)
        attached = dpmon.start("attach", "--json=/dev/null", "train")
        wait_for(lambda: dpmon.info(watch._path.parent)["supervisor_pid"] != info["supervisor_pid"])
        fill_disk(disk)
        dpmon.run("ls")
        dpmon.run("export", "train", "-o", "when-full")
        dpmon.run(*dpmon.warm(), "other.py", env={"DPMON_KEEP_RUNS": "1"})
        trains_on(dpmon)
        (disk / "hog").unlink()
        stopped = dpmon.stop("train")
        assert "stopped by SIGINT" in stopped.text, stopped.text + stopped.errors
        attached.wait(60)
    finally:
        watch.close()
    assert watch.lengths == {length}
    assert len(watch.inodes) == 1
    assert watch.looks > 1000
    assert dpmon.exit()["signal"] != "SIGBUS"


@pytest.mark.parametrize("what", ["ring", "directory"])
def test_deleting_it_leaves_the_training_alone(dpmon: Dpmon, what: str) -> None:
    directory, watch = start(dpmon)
    info = dpmon.info(directory)
    try:
        if what == "ring":
            (directory / "process-0.ring").unlink()
        else:

            def deleted() -> bool:
                shutil.rmtree(directory, ignore_errors=True)
                return not directory.exists()

            wait_for(deleted)
        trains_on(dpmon)
        trains_on(dpmon)
        assert proc.is_alive(info["command_pid"], info["command_started"])
    finally:
        (dpmon.cwd / "go").touch()
        watch.close()
    assert len(watch.lengths) == 1
    if what == "ring":
        assert dpmon.exit()["status"] == 7


@pytest.mark.parametrize("full", [False, True])
def test_a_ring_has_all_its_disk_space_or_is_not_made(disk: Path, full: bool) -> None:
    path = disk / "process-0.ring"
    if not full:
        SpanRing(str(path), process=0)
        assert path.stat().st_blocks * 512 >= SLOTS * SLOT_BYTES
        return
    fill_disk(disk)
    os.truncate(disk / "hog", (disk / "hog").stat().st_size - (1 << 20))
    with pytest.raises(OSError, match="No space left"):
        SpanRing(str(path), process=0)
    assert not path.exists()
