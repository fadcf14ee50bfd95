"""P7: how a run ended, or that it goes on; its last step, its last lines, remaining processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.run import proc
from dpmon.run.failure_cause import count_oom_kills
from dpmon.run.lifecycle import build_exit_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import create_run
from dpmon.supervise.supervisor import Supervisor
from support.history_builders import make_run_info
from support.run_harness import Dpmon, report_measured, wait_for

pytestmark = pytest.mark.slow

ENDING = """
import os, signal, sys, torch
model = torch.nn.Linear(4, 1)
for number in range(1, 71):
    model(torch.randn(3, 4)).sum()
for line in range(300):
    print("line", line)
def fault():
    import ctypes
    ctypes.string_at(0)
{end}
"""
ENDINGS = {
    "exception": ("raise RuntimeError('no more')", 1, None),
    "os._exit": ("sys.stdout.flush(); os._exit(9)", 9, None),
    "SIGKILL": ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    "SIGSEGV": ("sys.stdout.flush(); fault()", 139, "SIGSEGV"),
    "finished": ("pass", 0, None),
}


def newest_state(dpmon: Dpmon) -> str:
    """Return the state of the newest run; lines below a run's row are indented."""
    return [line for line in dpmon.run("ls").text.splitlines() if not line.startswith(" ")][-1].split()[1]


def test_promise_7_how_it_ended(dpmon: Dpmon) -> None:
    """Status or signal, the last step and the last lines are known, within a limit of time."""
    slowest = 0.0
    for name, (end, status, number) in ENDINGS.items():
        dpmon.script(ENDING.format(end=end))
        python = () if number else dpmon.warm()
        assert dpmon.run(*python, "--detach", "--name", name.replace(".", ""), "script.py").status == 0
        info = dpmon.info()
        wait_for(lambda info=info: not proc.is_alive(info["command_pid"], info["command_started"]))
        began = time.monotonic()
        how = dpmon.exit()
        slowest = max(slowest, time.monotonic() - began)
        assert (how["status"], how["signal"], how["unknown"]) == (status, number, None), name
        records = dpmon.records()
        # 64 calls are written together, then up to 32; those lost by a sudden end are counted.
        calls = [r["call"] for r in records if r["kind"] == "call"]
        dropped = next(r["count"] for r in records if r["kind"] == "dropped")
        assert calls == list(range(1, len(calls) + 1)), name
        assert len(calls) >= 64
        assert len(calls) == 70 or (dropped and status in (9, 137, 139)), (name, len(calls), dropped)
        lines = (dpmon.last() / "output.log").read_text().splitlines()
        assert [f"line {n}" for n in range(100, 300)] == [line for line in lines if line.startswith("line ")][-200:]
        word = "finished" if status == 0 else "killed" if number else "failed"
        assert newest_state(dpmon) == word
    report_measured("P7", f"{len(ENDINGS)} endings, the slowest known after {slowest:.2f} s")
    assert slowest < 60


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group of 300 MB (v1 or v2); skip the test if none can be created."""
    v1, v2 = "memory/{} memory.limit_in_bytes", "{} memory.max"
    for place in (v1, v2):
        where, limit = place.format(f"dpmon-test-{os.getpid()}").split()
        group = Path("/sys/fs/cgroup") / where
        with contextlib.suppress(OSError):
            group.mkdir()
        try:
            if not (group / "cgroup.procs").exists() or not (group / limit).exists():
                continue  # a directory like any other
            (group / limit).write_text(str(300 << 20))
            yield group
            return
        except OSError:
            continue
        finally:
            with contextlib.suppress(AssertionError, OSError):
                wait_for(lambda group=group: not (group / "cgroup.procs").read_text(), 20)
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip("no control group can be made here")


def test_promise_7_out_of_memory(dpmon: Dpmon, small_memory: Path) -> None:
    dpmon.script("data = []\nfor _ in range(100):\n    data.append(bytearray(b'x' * (8 << 20)))\n")
    result = dpmon.run("script.py", before=f"echo $$ > {small_memory}/cgroup.procs")
    how = dpmon.exit()
    assert (result.status, how["signal"]) == (137, "SIGKILL")
    assert "out of memory" in how["cause"]
    assert "out of memory" in result.errors


def test_out_of_memory_kills_are_counted_from_the_start_of_the_run(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 3\n")
    assert count_oom_kills(vmstat) == 3
    vmstat.unlink()
    assert count_oom_kills(vmstat) == 0


def test_a_kill_for_lack_of_memory_is_the_cause(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((3, 5))
    monkeypatch.setattr("dpmon.supervise.supervisor.count_oom_kills", lambda: next(kills, 5))
    run_info = make_run_info()
    directory, _ = create_run(run_info)
    supervisor = Supervisor(directory)
    cause = "out of memory: the kernel killed 2 of this machine's processes during the run"
    assert supervisor._find_exit_cause(build_exit_info(run_info, -9, "supervisor")) == cause
    assert supervisor._find_exit_cause(build_exit_info(run_info, -15, "supervisor")) is None


def test_a_hang_in_the_first_batch_is_not_taken_for_the_end(dpmon: Dpmon) -> None:
    dpmon.script(
        "import pathlib, threading, torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        pathlib.Path('began').touch(); threading.Event().wait()\n"
        "Model(2, 2)(torch.ones(1, 2))\n"
    )
    dpmon.run("--detach", "script.py")
    wait_for((dpmon.cwd / "began").exists)
    dpmon.info()
    reader = RunReader(dpmon.last())
    ((doing, since),) = reader.activities().values()
    reader.close()
    assert doing in ("forward", "other", "data")
    assert since >= 0
    assert reader.exit_info() is None
    assert reader.is_command_alive() is True
    assert newest_state(dpmon) in ("starting", "stalled")
    assert dpmon.run("stop", "last").status == 0
    assert dpmon.exit()["signal"] in ("SIGINT", "SIGTERM", "SIGKILL") or dpmon.exit()["status"]


def test_workers_that_outlive_the_training(dpmon: Dpmon) -> None:
    """The run is over when its command has ended; what such a process records later is given up."""
    dpmon.script(
        "import os, pathlib, time, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "def call(times):\n"
        "    for _ in range(times): model(torch.ones(1, 2))\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    call(10)\n"
        "    pathlib.Path('began').touch()\n"
        "    while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        "    call(5)\n"
        "    pathlib.Path('done').touch()\n"
        "    time.sleep(600)\n"
        "while not pathlib.Path('began').exists(): time.sleep(0.01)\n"
    )
    result = dpmon.run("script.py")
    assert result.status == 0, result.errors
    (dpmon.cwd / "go").touch()
    wait_for((dpmon.cwd / "done").exists)
    calls = [r for r in dpmon.records() if r["kind"] == "call"]
    assert [r["call"] for r in calls] == list(range(1, 11))
    worker = next(r["pid"] for r in dpmon.records() if r["kind"] == "process")
    assert newest_state(dpmon) == "finished"
    os.kill(worker, signal.SIGKILL)
