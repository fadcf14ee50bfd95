"""If a run's directory is deleted while the run goes on, the script's exit status still reaches the foreground."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from dpmon.run import proc
from support.run_harness import Dpmon, Terminal, wait_for, wait_until_unsupervised

TRACEBACK = "Traceback (most recent call last)"


def script(dpmon: Dpmon, end: str = "sys.exit(7)") -> None:
    dpmon.waiting(f"print('the end', flush=True)\n{end}", "print('began', flush=True)")


def begun(dpmon: Dpmon) -> None:
    dpmon.begun()
    dpmon.info()


def delete(dpmon: Dpmon) -> None:
    """Delete the whole state directory, with files that the run creates meanwhile."""

    def gone() -> bool:
        shutil.rmtree(dpmon.state, ignore_errors=True)
        return not dpmon.state.exists()

    wait_for(gone, what="the state directory to go")


def unmount(dpmon: Dpmon) -> None:
    subprocess.run(["umount", "-l", str(dpmon.state)], check=True)


def no_deletion(dpmon: Dpmon) -> None:
    """Prevent exit.json from being written: a directory that is not empty has its name."""
    (dpmon.last() / "exit.json").mkdir()
    (dpmon.last() / "exit.json" / "full").mkdir()


Vanish = Callable[[Dpmon], None]
ENDS = [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)]


@pytest.mark.parametrize("vanish", [delete, unmount, no_deletion])
@pytest.mark.parametrize(("end", "status"), ENDS)
def test_the_status_reaches_the_foreground(
    dpmon: Dpmon, mount: Callable[[int], Any], vanish: Vanish, end: str, status: int
) -> None:
    if vanish is unmount:
        dpmon.state = mount(64)
    script(dpmon, end)
    process = dpmon.start("script.py", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    begun(dpmon)
    vanish(dpmon)
    dpmon.go()
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert out == b"began\nthe end\n"
    assert TRACEBACK not in err.decode()
    if vanish is not no_deletion:
        assert err.decode().count("the record was deleted (") == 1
        assert f"(exit status {status})" in err.decode()
    assert "supervisor was killed" not in err.decode()


DELETED_AT_ONCE = """\
import pathlib, shutil, sys, time
from dpmon.cli import launch
from dpmon.cli.main import main

start = launch.start_supervisor

def start_and_delete(directory, **options):
    supervisor = start(directory, **options)
    while not pathlib.Path("began").exists():
        time.sleep(0.01)
    while directory.exists():  # the supervisor makes files in it meanwhile
        shutil.rmtree(directory, ignore_errors=True)
    pathlib.Path("go").touch()
    return supervisor

launch.start_supervisor = start_and_delete
sys.exit(main(["script.py"]))
"""


def test_the_output_arrives_though_the_record_went_before_it_was_read(dpmon: Dpmon) -> None:
    script(dpmon)
    process = dpmon.start(argv=[dpmon.python, "-c", DELETED_AT_ONCE])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, b"began\nthe end\n"), err


@pytest.mark.parametrize("first", ["supervisor", "directory"])
def test_the_status_is_given_if_the_supervisor_is_killed_too(dpmon: Dpmon, first: str) -> None:
    script(dpmon)
    process = dpmon.start("script.py")
    begun(dpmon)
    info = dpmon.info()
    if first == "supervisor":
        os.kill(info["supervisor_pid"], signal.SIGKILL)
    delete(dpmon)
    if first == "directory":
        os.kill(info["supervisor_pid"], signal.SIGKILL)
    dpmon.go()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, b"began\nthe end\n"), err
    assert TRACEBACK not in err.decode()


def test_a_supervisor_killed_before_it_could_write_exit_json(dpmon: Dpmon) -> None:
    """The supervisor is killed while it writes the record of the end."""
    script(dpmon)
    process = dpmon.start("script.py")
    begun(dpmon)
    info = dpmon.info()
    os.kill(process.pid, signal.SIGSTOP)
    dpmon.go()
    wait_for(lambda: not proc.is_alive(info["command_pid"], None), what="the command's end")
    with contextlib.suppress(ProcessLookupError):
        os.kill(info["supervisor_pid"], signal.SIGKILL)
    wait_until_unsupervised(info)
    (dpmon.last() / "exit.json").unlink(missing_ok=True)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(60) == 7
    assert dpmon.exit()["status"] == 7, "the foreground writes it down"


def test_lines_of_json_on_stderr_are_all_json(dpmon: Dpmon) -> None:
    script(dpmon)
    process = dpmon.start("--json", "script.py")
    begun(dpmon)
    delete(dpmon)
    dpmon.go()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    said = [json.loads(line) for line in err.splitlines()]
    assert [line["kind"] for line in said if line["kind"] != "status"] == ["message", "exit"]
    assert said[-1]["status"] == 7


def test_a_follower_reports_that_the_exit_status_is_unknown(dpmon: Dpmon) -> None:
    script(dpmon)
    process = dpmon.start("script.py")
    begun(dpmon)
    look = dpmon.start("attach", "last")
    wait_for(lambda: b"began" in os.read(look.stdout.fileno(), 100), what="the follower")  # type: ignore[union-attr]
    delete(dpmon)
    dpmon.go()
    assert process.wait(60) == 7
    _, err = look.communicate(timeout=60)
    assert look.returncode == 2
    assert TRACEBACK not in err.decode()
    assert "no summary: the record " in err.decode()
    assert " was deleted (exit status unknown)" in err.decode()


def test_interrupts_reach_the_command(dpmon: Dpmon) -> None:
    script(dpmon)
    process = dpmon.start("script.py")
    begun(dpmon)
    delete(dpmon)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def test_the_screen_stays_open_after_the_run_is_deleted(dpmon: Dpmon) -> None:
    script(dpmon)
    terminal = Terminal(dpmon, "script.py", TERM="xterm-256color")
    begun(dpmon)
    terminal.shows("began")
    delete(dpmon)
    dpmon.go()
    terminal.shows("status 7")
    terminal.type("q")
    assert terminal.wait() == 7
    assert TRACEBACK not in terminal.raw.decode("utf-8", "replace")
    assert b"no summary: the record " in terminal.raw


def test_stopping_from_the_screen(dpmon: Dpmon) -> None:
    script(dpmon)
    terminal = Terminal(dpmon, "script.py", TERM="xterm-256color")
    begun(dpmon)
    terminal.shows("began")
    delete(dpmon)
    terminal.type("x")
    terminal.shows("Stop the training?")
    terminal.type("y")
    terminal.shows("interrupted SIGINT")
    terminal.type("q")
    assert terminal.wait() == 130
