"""A command is started for each event of a run: in order, once, soon, and without holding anything up."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dpmon.run import proc
from dpmon.supervise.start_supervisor import ensure_supervisor
from support.run_harness import Dpmon, report_measured, scaled_size, wait_for, wait_until_unsupervised

pytestmark = pytest.mark.slow

SOON_S = 5.0
TRAINING = """
import os, sys, time, torch
model = torch.nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.randn(10, 5)).pow(2).mean().backward()
    optimizer.step()
for number in range(50):
    step()
"""
STUCK = """
def wait_here():
    open("go").read()
wait_here()
while not os.path.exists("end"):
    step()
    time.sleep(0.05)
sys.exit(3)
"""
RECEIVE = "#!/bin/sh\ndate +%s.%N >>times\ncat >>received\n"


def command(dpmon: Dpmon, text: str = RECEIVE) -> str:
    """Write the command for events into the working directory, and return its name."""
    path = dpmon.cwd / "tell"
    path.write_text(text)
    path.chmod(0o755)
    return "./tell"


def received(dpmon: Dpmon) -> list[dict[str, Any]]:
    """The events that the command has received so far."""
    text = (dpmon.cwd / "received").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def types(dpmon: Dpmon) -> list[str]:
    return [event["type"].removeprefix("dpmon.run.") for event in received(dpmon)]


def times(dpmon: Dpmon) -> list[float]:
    """The times at which the events arrived (s since 1970)."""
    return [float(line) for line in (dpmon.cwd / "times").read_text().split()]


def tellers(directory: Path) -> list[int]:
    """The processes that tell the events of this run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in words and b"dpmon.notify" in words:
            found.append(int(entry.name))
    return found


def sockets(pid: int) -> list[str]:
    """The sockets of a process, which may close other files meanwhile."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return [each for each in found if "socket" in each]


def test_the_events_of_a_run_that_stalls_and_fails_arrive_soon_and_in_order(dpmon: Dpmon) -> None:
    dpmon.script(TRAINING + STUCK)
    os.mkfifo(dpmon.cwd / "go")
    name = command(dpmon)
    run = dpmon.start("--headless", "--on-event", name, "script.py", env={"DPMON_ALIVE_MINUTES": "1"})
    wait_for(lambda: "stalled" in types(dpmon), what="the event of the stall")
    (stall,) = [record for record in dpmon.records() if record["kind"] == "stall"]
    began = dpmon.info()["started_unix"]
    arrived = dict(zip(types(dpmon), times(dpmon), strict=False))["stalled"] - began
    report_measured("an event arrives", f"{arrived - stall['t_s']:.1f} s after the record of the stall")
    assert arrived - stall["t_s"] < scaled_size(60.0, SOON_S)
    assert stall["text"].removeprefix("it is stopped (SIGSTOP), ").startswith("in wait_here (script.py:")
    assert dpmon.run("status").status == 5
    (dpmon.cwd / "go").write_text("")
    wait_for(lambda: "resumed" in types(dpmon), what="the event of the stall's end")
    (dpmon.cwd / "end").touch()
    _, errors = run.communicate(timeout=100)
    left = time.time()
    assert run.returncode == 3
    wait_for(lambda: "failed" in types(dpmon), what="the last event")
    # The foreground process waits at most ten seconds for the last event.
    assert times(dpmon)[-1] <= left or left >= dpmon.exit()["ended_unix"] + 10
    events = received(dpmon)
    assert [each for each in types(dpmon) if each != "alive"] == ["started", "stalled", "resumed", "failed"]
    assert types(dpmon).count("alive") >= 1
    assert len({event["id"] for event in events}) == len(events)
    failed = events[-1]["data"]
    assert failed["end"] == "failed"
    assert failed["text"].startswith("failed with exit status 3 after ")
    assert next(e for e in events if e["type"].endswith("stalled"))["data"]["health"]["state"] == "stalled"
    assert f"stalled at 00:{stall['since_s'] // 60:02.0f}:" in errors.decode()
    wait_for(lambda: not tellers(dpmon.last()), what="the end of the teller")


def test_a_hanging_command_holds_up_neither_the_run_nor_other_events(dpmon: Dpmon) -> None:
    hang = "grep -q started event && { echo $$ >hangs; exec sleep 1000; }"
    name = command(dpmon, f"#!/bin/sh\ncat >event\n{hang}\ncat event >>received\n")
    dpmon.waiting("sys.exit(4)")
    run = dpmon.start("--headless", "--on-event", name, "script.py")
    dpmon.begun()
    hangs = int(wait_for(lambda: (dpmon.cwd / "hangs").read_text(), what="the first command"))
    dpmon.go()
    assert run.wait(timeout=100) == 4
    assert dpmon.exit()["drained"]
    wait_for(lambda: types(dpmon) == ["failed"], what="the next event")
    assert proc.is_alive(hangs, None)


def test_a_run_without_a_supervisor_is_told_and_nothing_listens(dpmon: Dpmon) -> None:
    name = command(dpmon)
    dpmon.waiting()
    dpmon.run("--detach", "--on-event", name, "script.py")
    dpmon.begun()
    wait_for(lambda: types(dpmon) == ["started"])
    (teller,) = tellers(dpmon.last())
    assert not sockets(teller)
    dpmon.kill_supervisor()
    wait_for(lambda: len(received(dpmon)) == 2)
    assert received(dpmon)[1]["id"].endswith("dpmon.finding/unsupervised")
    dpmon.go()
    wait_for(lambda: len(received(dpmon)) == 3)
    assert types(dpmon)[2] == "failed"
    wait_for(lambda: not tellers(dpmon.last()))


@pytest.mark.parametrize("how", ["command", "both"])
def test_no_teller_stays_behind(dpmon: Dpmon, how: str) -> None:
    name = command(dpmon)
    dpmon.waiting()
    dpmon.run("--detach", "--on-event", name, "script.py")
    dpmon.begun()
    wait_for(lambda: types(dpmon) == ["started"])
    directory, info = dpmon.last(), dpmon.info()
    if how == "both":
        os.kill(info["supervisor_pid"], signal.SIGSTOP)  # it cannot record the end
        os.kill(info["command_pid"], signal.SIGKILL)
        dpmon.kill_supervisor()
    else:
        assert dpmon.run("stop", "last").status == 0
    wait_for(lambda: not tellers(directory), what="the end of the teller")
    assert types(dpmon) == ["started", "ended" if how == "command" else "failed"]
    assert dpmon.run("rm", directory.name).status == 0
    assert not directory.exists()


def test_no_id_is_told_twice_over_many_kills_of_the_supervisor(dpmon: Dpmon, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = scaled_size(8, 100)
    name = command(dpmon)
    monkeypatch.chdir(dpmon.cwd)
    monkeypatch.setenv("DPMON_ON_EVENT", name)  # those that take over have only this process's settings
    dpmon.waiting()
    dpmon.run("--detach", "--on-event", name, "script.py", env={"DPMON_ALIVE_MINUTES": "1"})
    dpmon.begun()
    wait_for(lambda: types(dpmon)[:1] == ["started"])
    directory, path = dpmon.last(), dpmon.last() / "run.json"
    info = json.loads(path.read_text())
    info["options"]["alive_minutes"] = 0.1 / 60  # an event every tenth of a second
    path.write_text(json.dumps(info))
    chance = random.Random(1)
    for number in range(kills):
        old = dpmon.kill_supervisor()
        if number % 4 == 0:
            for pid in tellers(directory):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not tellers(directory))
        successor = ensure_supervisor(directory)
        wait_for(lambda old=old: dpmon.info()["supervisor_pid"] != old["supervisor_pid"])
        assert successor.pid is not None
        before = len(received(dpmon))
        wait_for(lambda before=before: len(received(dpmon)) > before, what="an event")
        time.sleep(chance.random() * 0.3)
    last = dpmon.info()
    dpmon.go()
    wait_for(lambda: (directory / "exit.json").exists())
    wait_until_unsupervised(last)
    wait_for(lambda: not tellers(directory))
    told = Counter(event["id"] for event in received(dpmon))
    assert max(told.values()) == 1
    claimed = (directory / "events.log").read_text().splitlines()
    assert len(claimed) == len(set(claimed))
    missed = set(claimed) - set(told)
    report_measured("events", f"{len(told)} told, {len(missed)} missed in {kills} kills of the supervisor")
    assert not set(told) - set(claimed)
    assert len(missed) <= kills // 4 + 1
