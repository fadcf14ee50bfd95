"""dpmon signals only processes that are proven to belong to the run, whatever the run's files contain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpmon.run import proc
from dpmon.run.run_signals import NOTHING_RUNS
from support.run_harness import Dpmon, wait_for, wait_until_unsupervised

pytestmark = pytest.mark.slow

SLEEPER = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]


def ended_run(dpmon: Dpmon, *, recorded: bool, **changed: Any) -> Path:
    """A run whose processes have gone, with changes in its run.json; `recorded`: with an exit.json."""
    dpmon.script("pass")
    dpmon.run("--name", "old", *dpmon.warm(), "script.py")
    directory = dpmon.last()
    path = directory / "run.json"
    info = json.loads(path.read_text())
    wait_until_unsupervised(info)
    path.write_text(json.dumps({**info, **changed}))
    if not recorded:
        (directory / "exit.json").unlink()
    return directory


def started(process: subprocess.Popen[bytes]) -> float:
    since = proc.start_time_s(process.pid)
    assert since is not None
    return since


@pytest.mark.parametrize("start", [None, "its own"])
def test_process_ids_of_a_finished_run_are_not_used(
    dpmon: Dpmon, stranger: subprocess.Popen[bytes], start: str | None
) -> None:
    since = None if start is None else started(stranger)
    ended_run(dpmon, recorded=True, command_pid=stranger.pid, command_started=since)
    result = dpmon.run("stop", "old")
    assert result.status == 0, result.errors
    assert "has ended (exit status 0)" in result.text
    assert stranger.poll() is None


@pytest.mark.parametrize("earlier", [None, 0.02])
def test_a_process_that_is_not_proven_to_be_the_command_is_not_signalled(
    dpmon: Dpmon, stranger: subprocess.Popen[bytes], earlier: float | None
) -> None:
    since = None if earlier is None else started(stranger) - earlier
    ended_run(dpmon, recorded=False, command_pid=stranger.pid, command_started=since)
    result = dpmon.run("stop", "old")
    assert result.status == 0, result.errors
    assert result.text.splitlines()[-1] == NOTHING_RUNS
    assert stranger.poll() is None


def test_processes_left_by_a_finished_run_are_stopped(dpmon: Dpmon) -> None:
    """Its environment proves it, because the command's number no longer proves anything."""
    dpmon.script(
        "import os, subprocess, sys\n"
        f"quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"print(subprocess.Popen({SLEEPER!r}, **quiet).pid, subprocess.Popen({SLEEPER!r}, env={{}}, **quiet).pid)\n"
    )
    result = dpmon.run("--name", "leaves", "script.py")
    left, nameless = map(int, result.text.split())
    try:
        assert proc.is_alive(left, None)
        result = dpmon.stop("leaves")
        assert result.status == 0, result.errors
        assert "stopped by SIGINT" in result.text
        assert not proc.is_alive(left, None)
        assert "finished" in dpmon.run("ls").text, "a later stop does not change how the run ended"
    finally:
        for pid in (left, nameless):
            if proc.is_alive(pid, None):
                os.kill(pid, signal.SIGKILL)


DAEMON = """\
import os, pathlib, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {ignored}
        pathlib.Path("daemon").write_text(str(os.getpid()))
        while True:
            time.sleep(1)
    os._exit(0)
os.wait()
pathlib.Path("began").touch()
while True:
    time.sleep(1)
"""
IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def daemon_of(dpmon: Dpmon) -> int:
    return wait_for(lambda: int((dpmon.cwd / "daemon").read_text() or 0), what="the daemon")


def test_a_daemon_of_the_training_is_stopped_with_it(dpmon: Dpmon) -> None:
    dpmon.script(DAEMON.format(ignored="pass"))
    dpmon.run("--detach", "--name", "daemons", "script.py")
    dpmon.begun()
    daemon = daemon_of(dpmon)
    result = dpmon.stop("daemons")
    assert result.status == 0, result.errors
    assert "SIGINT to 2 processes" in result.text
    assert not proc.is_alive(daemon, None)


def test_the_third_interrupt_also_kills_processes_that_left_the_session(dpmon: Dpmon) -> None:
    """torchrun's workers leave it: once torchrun is killed, no other process would end them."""
    dpmon.script(
        "import pathlib, signal, subprocess, time\n"
        f'code = "import signal, time; {IGNORES}; print(1, flush=True); time.sleep(600)"\n'
        "import sys\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "for n in ('SIGINT', 'SIGTERM'):\n"
        "    signal.signal(getattr(signal, n), lambda *_, n=n: pathlib.Path(n).touch())\n"
        "pathlib.Path('began').touch()\n"
        "while True: time.sleep(1)\n"
    )
    process = dpmon.start("script.py")
    dpmon.begun()
    child = int((dpmon.cwd / "child").read_text())
    for name in ("SIGINT", "SIGTERM"):
        process.send_signal(signal.SIGINT)
        wait_for((dpmon.cwd / name).exists, what=name)
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 137
    wait_for(lambda: not proc.is_alive(child, None), what="the child's end")
