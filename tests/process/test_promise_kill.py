"""P1, P2, P17: whatever process of dpmon is stopped or killed, the training computes the same as without dpmon.

`DPMON_LONG=1 pytest -s -k promise` tries the full figures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dpmon.run import proc
from support.run_harness import (
    Dpmon,
    Terminal,
    find_new_supervisor,
    report_measured,
    scaled_size,
    wait_for,
    wait_until_unsupervised,
)

pytestmark = pytest.mark.slow

TRAINING = """
import hashlib, pathlib, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
data = torch.utils.data.DataLoader(torch.randn(400, 8), batch_size=20, shuffle=True)
for epoch in range(4):
    for rows in data:
        model.zero_grad()
        model(rows).pow(2).mean().backward()
        with torch.no_grad():  # by hand: torch.optim takes longer to load than all of this
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    if epoch == 1:
        pathlib.Path("began").touch()
        until = time.monotonic() + 100
        while not pathlib.Path("go").exists() and time.monotonic() < until:
            time.sleep(0.005)
whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
pathlib.Path("weights.new").write_text(hashlib.sha256(whole).hexdigest())
pathlib.Path("weights.new").rename("weights")
sys.exit(int(sys.argv[1]))
"""


def kill_screen(dpmon: Dpmon, foreground: subprocess.Popen[bytes], number: int) -> None:
    foreground.send_signal(number)
    assert foreground.wait(100) in (-number, 128 + number)


def kill_supervisor(dpmon: Dpmon, foreground: subprocess.Popen[bytes], number: int) -> None:
    info = dpmon.info()
    os.kill(info["supervisor_pid"], number)
    if number == signal.SIGKILL:
        wait_until_unsupervised(info)


def kill_both(dpmon: Dpmon, foreground: subprocess.Popen[bytes], number: int) -> None:
    # The screen first: it would start another supervisor.
    kill_screen(dpmon, foreground, number)
    kill_supervisor(dpmon, foreground, number)


KINDS = {
    "screen": (kill_screen, signal.SIGKILL),
    "supervisor": (kill_supervisor, signal.SIGKILL),
    "both": (kill_both, signal.SIGKILL),
    "hang-up": (kill_both, signal.SIGHUP),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of the training without dpmon."""
    place = tmp_path_factory.mktemp("alone")
    (place / "go").touch()
    runner = Dpmon(place / "state", place)
    runner.script(TRAINING)
    done = subprocess.run([runner.python, "script.py", "7"], cwd=place, env=runner.environment(), timeout=100)
    assert done.returncode == 7
    return (place / "weights").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_promise_2_the_training_outlives_us(dpmon: Dpmon, alone: str, kind: str) -> None:
    kill, number = KINDS[kind]
    dpmon.script(TRAINING)
    times = scaled_size(1, 100)
    for _ in range(times):
        for name in ("began", "go", "weights"):
            (dpmon.cwd / name).unlink(missing_ok=True)
        foreground = dpmon.start("--mode", "script", "script.py", 7)
        wait_for((dpmon.cwd / "began").exists)
        info = dpmon.info()
        kill(dpmon, foreground, number)
        assert proc.is_alive(info["command_pid"], info["command_started"])
        (dpmon.cwd / "go").touch()
        wait_for((dpmon.cwd / "weights").exists)
        assert (dpmon.cwd / "weights").read_text() == alone
        if kind != "supervisor":
            wait_for(lambda info=info: not proc.is_alive(info["command_pid"], info["command_started"]))
            dpmon.run("attach")
        else:
            assert foreground.wait(60) == 7
        how = dpmon.exit()
        assert how["by"] == "supervisor" or kind != "screen"
        assert how["status"] == 7 or (kind == "both" and how["status"] is None and how["unknown"])
        steps = [r["step"] for r in dpmon.records() if r["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        is_one_lost = len(steps) == 79 and kind in ("supervisor", "both")  # it was open when its supervisor was killed
        assert len(steps) == 80 or is_one_lost
    report_measured("P2", f"{kind} killed {times} times: status and weights as alone")


def steps_of(dpmon: Dpmon) -> int:
    """Return the number of steps that the training reports."""
    with contextlib.suppress(OSError):
        return int((dpmon.cwd / "count").read_text())
    return 0


BUSY = """
import pathlib, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
line = "x" * 99
count = pathlib.Path("count")
step = 0
while not pathlib.Path("go").exists():
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).pow(2).mean().backward()
        optimizer.step()
        step += 1
    new = count.with_name("count.new")
    new.write_text(str(step))
    new.replace(count)
    if pathlib.Path("print").exists():
        print(*[line] * 1000, sep="\\n")
print("the end", flush=True)
"""


def test_promise_1_the_training_never_waits(dpmon: Dpmon) -> None:
    """While screen and supervisor are stopped, the training goes on and prints; afterwards everything is recorded."""
    seconds, megabytes = scaled_size(1, 60), scaled_size(2, 50)
    dpmon.script(BUSY)
    terminal = Terminal(dpmon, "script.py")
    info = dpmon.info()
    wait_for(lambda: steps_of(dpmon) > 100)

    def rate() -> float:
        before, began = steps_of(dpmon), time.monotonic()
        wait_for(lambda: time.monotonic() - began > seconds, limit=seconds + 30)
        return (steps_of(dpmon) - before) / (time.monotonic() - began)

    free = rate()
    for pid in (terminal.process.pid, info["supervisor_pid"]):
        os.kill(pid, signal.SIGSTOP)
    try:
        # The machine may be busy with something else for a while.
        stopped = wait_for(lambda: found if (found := rate()) > free / 20 else 0.0, what="its pace of before")
        (dpmon.cwd / "print").touch()
        log = dpmon.last() / "output.log"
        wait_for(lambda: log.stat().st_size > megabytes * 1_000_000, limit=200, what="its output")
        before = steps_of(dpmon)
        wait_for(lambda: steps_of(dpmon) > before + 50)
    finally:
        for pid in (terminal.process.pid, info["supervisor_pid"]):
            os.kill(pid, signal.SIGCONT)
    again = rate()
    (dpmon.cwd / "go").touch()
    assert dpmon.exit()["status"] == 0
    terminal.shows("● finished")
    records = dpmon.records()
    seen = len([r for r in records if r["kind"] == "step"])
    dropped = next(r for r in records if r["kind"] == "dropped")
    assert seen * 2 + dropped["count"] + dropped["pruned"] >= steps_of(dpmon) * 2
    assert seen > 0
    assert (dpmon.last() / "output.log").read_bytes().endswith(b"the end\n")
    report_measured(
        "P1",
        f"screen and supervisor stopped for {seconds} s, {megabytes} MB printed: {stopped:.0f} steps/s,"
        f" {free:.0f} before, {again:.0f} after (printing)",
    )


def test_promise_17_no_process_of_ours_has_a_socket(dpmon: Dpmon) -> None:
    dpmon.script("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(100)\n")
    terminal = Terminal(dpmon, "script.py")
    terminal.shows("script.py")
    wait_for((dpmon.cwd / "began").exists)
    info = dpmon.info()
    for pid in (terminal.process.pid, info["supervisor_pid"], info["command_pid"]):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(fd)
                if target.startswith("socket:"):  # asyncio wakes itself with an unnamed pair of sockets
                    assert target[8:-1] in local_sockets() or os.readlink(fd) != target, (pid, target)
    assert find_new_supervisor(dpmon, info) is None


def local_sockets() -> set[str]:
    """Return the inodes of local sockets."""
    return {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
