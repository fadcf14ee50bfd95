"""Real processes: whether they are alive, their start times and their parents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dpmon.run import proc
from support.run_harness import wait_for

CHAIN = """\
import subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    code = open(sys.argv[2]).read()
    child = subprocess.Popen([sys.executable, sys.argv[2], str(depth - 1), sys.argv[2]], start_new_session=depth == 2)
print(1, flush=True)
time.sleep(60)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, with parentheses and blanks in its name."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) (Z 1 2'); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_and_its_name_full_of_traps(sleeper: subprocess.Popen[bytes]) -> None:
    found = proc.read_process(sleeper.pid)
    assert found is not None
    assert (found.pid, found.parent, found.session) == (sleeper.pid, os.getpid(), os.getsid(0))
    assert not found.is_dead
    assert proc.is_alive(sleeper.pid, found.start_s)
    assert not proc.is_alive(sleeper.pid, found.start_s - 1)


def no_child(_: int) -> int | None:
    raise ChildProcessError


def test_a_zombie_is_dead_and_tells_how(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    since = proc.start_time_s(sleeper.pid)
    assert proc.exit_status(sleeper.pid, since) is None
    monkeypatch.setattr(proc, "ended_child_status", no_child)
    sleeper.kill()
    wait_for(lambda: not proc.is_alive(sleeper.pid, since))
    assert proc.read_process(sleeper.pid) is not None, "it is not reaped yet"
    assert proc.exit_status(sleeper.pid, since) == -9
    sleeper.wait()
    assert proc.read_process(sleeper.pid) is None
    assert proc.start_time_s(sleeper.pid) is None


def test_the_tree_holds_children_in_other_sessions(tmp_path: object) -> None:
    path = f"{tmp_path}/chain.py"
    with open(path, "w") as file:
        file.write(CHAIN)
    root = subprocess.Popen([sys.executable, path, "3", path], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        members = wait_for(lambda: found if len(found := proc.process_tree(root.pid)) == 4 else None)
        assert members is not None
        assert len({member.session for member in members.values()}) == 2
        assert os.getpid() not in members
    finally:
        for pid in proc.process_tree(root.pid):
            os.kill(pid, 9)
        root.wait()
    wait_for(lambda: not proc.process_tree(root.pid))  # a killed process is there until the system has taken it apart


def test_this_boot_has_a_name() -> None:
    assert len(proc.boot_id()) == 36
