"""If a run's directory is deleted while the run goes on, the script's exit status still reaches the foreground."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from support.run_harness import Dpmon, wait_for

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


def test_interrupts_reach_the_command(dpmon: Dpmon) -> None:
    script(dpmon)
    process = dpmon.start("script.py")
    begun(dpmon)
    delete(dpmon)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
