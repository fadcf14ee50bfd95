"""Whatever process of dpmon is killed, the training goes on; whatever ends the training, its end is recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from functools import partial

import pytest

from dpmon.run import proc
from support.run_harness import Dpmon, wait_for, wait_until_unsupervised, write_slow_script

pytestmark = pytest.mark.slow


def has_runs(dpmon: Dpmon, count: int) -> bool:
    return len(dpmon.runs()) == count


def test_interrupt_reaches_the_script_and_its_children(dpmon: Dpmon) -> None:
    dpmon.script(
        "import pathlib, subprocess, sys, time\n"
        "code = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "try:\n"
        "    pathlib.Path('began').touch()\n"
        "    while True: time.sleep(0.05)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', child.wait()); sys.exit(11)\n"
    )
    process = dpmon.start("script.py")
    dpmon.begun()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert (process.returncode, out) == (11, b"interrupted -2\n")


def test_an_ignored_interrupt_stays_ignored(dpmon: Dpmon) -> None:
    dpmon.script(
        "import signal; print(*(signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGINT, signal.SIGHUP)))"
    )
    result = dpmon.run("script.py", before="trap '' INT HUP")
    assert result.out == b"True True\n"


def test_a_stopped_run_that_did_not_end_by_the_signal_is_listed_as_stopped(dpmon: Dpmon) -> None:
    """For example, torch's threads may abort the process while the interpreter ends."""
    dpmon.script(
        "import os, pathlib, resource, time\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "try:\n"
        "    pathlib.Path('began').touch()\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    os.abort()\n"
    )
    dpmon.run("--detach", "--name", "aborts", "script.py")
    dpmon.begun()
    result = dpmon.stop("aborts")
    assert result.status == 0, result.errors
    assert result.text.splitlines()[-1].startswith("stopped by SIGINT: aborts-")
    (row,) = [line.split() for line in dpmon.run("ls").text.splitlines() if line.startswith("aborts")]
    assert row[1] == "stopped"
    assert "SIGABRT" in row


def test_stop_interrupts_then_kills_the_tree_of_processes(dpmon: Dpmon) -> None:
    dpmon.script(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " signal.signal(signal.SIGINT, signal.SIG_IGN); print(1, flush=True); time.sleep(100)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "pathlib.Path('began').touch()\n"
        "time.sleep(100)\n"
    )
    process = dpmon.start("--name", "stubborn", "script.py")
    dpmon.begun()
    child = int((dpmon.cwd / "child").read_text())
    result = dpmon.run("stop", "stubborn")
    assert result.status == 0, result.errors
    said = result.text.splitlines()
    assert [line.split()[0] for line in said] == ["SIGINT", "SIGTERM", "SIGKILL", "stopped"]
    assert said[-1].startswith("stopped by SIGKILL: stubborn-")
    assert not proc.is_alive(child, None)
    assert process.wait(100) == 128 + signal.SIGTERM
    assert "has ended" in dpmon.run("stop", "stubborn").text
    (row,) = [line.split() for line in dpmon.run("ls").text.splitlines() if line.startswith("stubborn")]
    assert row[1] == "stopped", "what the user stopped has not failed"


@pytest.mark.parametrize("detached", [[], ["--detach"]])
def test_a_command_that_cannot_be_executed_is_reported(dpmon: Dpmon, detached: list[str]) -> None:
    path = dpmon.cwd / "tool"
    path.write_text("no header, so the kernel refuses it")
    path.chmod(0o755)
    result = dpmon.run(*detached, "./tool")
    assert (result.status, result.text) == (2, "")
    assert "./tool cannot be started: Exec format error" in result.errors


def test_a_limit_on_files_below_a_ring_is_named_as_the_reason_for_no_record(dpmon: Dpmon) -> None:
    """The supervisor's own ring cannot be made either, so the warning is only in the log."""
    dpmon.script("import torch; torch.nn.Linear(2, 1)(torch.ones(3, 2)); print('trained')")
    process = dpmon.start("--headless", "script.py", before="ulimit -S -f 1024")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, b"trained\n"), err
    assert re.search(rb"nothing was traced: no record of process \d+: .*File too large", err), err


def test_an_interrupt_before_the_command_is_there_reaches_it(dpmon: Dpmon) -> None:
    """At any moment of the start, the command ends as usual, and is never left running."""
    dpmon.script("import time; time.sleep(60)")
    for delay in range(6):
        before = len(dpmon.runs())
        process = dpmon.start("script.py")
        wait_for(partial(has_runs, dpmon, before + 1))
        time.sleep(delay * 0.03)  # this varies the moment of the interrupt
        process.send_signal(signal.SIGINT)
        assert process.wait(100) in (130, 1, -signal.SIGINT), delay
        for directory in dpmon.runs():
            info = json.loads((directory / "run.json").read_text())
            pid, since = info["command_pid"], info["command_started"]
            wait_for(
                lambda pid=pid, since=since: pid is None or not proc.is_alive(pid, since), what="the command's end"
            )


def test_a_users_signal_goes_to_the_command_alone(dpmon: Dpmon) -> None:
    dpmon.script(
        "import pathlib, signal, subprocess, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: got.append(1))\n"
        "code = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "pathlib.Path('began').touch()\n"
        "while not got: time.sleep(0.05)\n"
        "print(child.poll()); child.kill(); child.wait()\n"
    )
    process = dpmon.start("script.py")
    dpmon.begun()
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=100)[0] == b"None\n"
    assert process.returncode == 0


def test_a_supervisor_that_gets_sigterm_still_records_the_end_of_the_command(dpmon: Dpmon) -> None:
    """For example, a shutdown of the machine sends SIGTERM to all processes together."""
    write_slow_script(dpmon)
    dpmon.run("--detach", "script.py")
    info = dpmon.info()
    dpmon.begun()
    both = info["supervisor_pid"], info["command_pid"]
    subprocess.run(
        ["kill", "-TERM", *map(str, both)], check=True
    )  # a pause between the two would be a pause of this test
    found = dpmon.exit()
    assert (found["signal"], found["by"]) == ("SIGTERM", "supervisor")


def test_a_supervisor_that_gets_sigterm_leaves_the_training(dpmon: Dpmon) -> None:
    write_slow_script(dpmon)
    dpmon.run("--detach", "script.py")
    info = dpmon.info()
    dpmon.begun()
    os.kill(info["supervisor_pid"], signal.SIGTERM)
    wait_until_unsupervised(info)
    assert proc.is_alive(info["command_pid"], info["command_started"])
    dpmon.go()
    wait_for((dpmon.cwd / "done").exists)
