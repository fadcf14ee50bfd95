"""A process that changes its user or its root directory is recorded as before; if it cannot be, a warning says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpmon.record.jsonl import as_json
from support.run_harness import Dpmon, wait_for
from support.tracer_harness import run_traced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

NOBODY = 65534
CHANGES = {
    "user": f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})",
    "root": "os.mkdir('empty'); os.chroot('empty')",
}
HOW = {"user": f"as another user (uid {NOBODY})", "root": "with another root directory"}

TRAINS = """
import os, sys
import torch
def made():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), 0.01)
def train(model, optimizer, rows, times):
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(rows, 4)).sum().backward()
        optimizer.step()
first, second = made(), made()
train(*first, 3, 5)
if sys.argv[1] == "closed":
    os.closerange(3, 1024)
    train(*first, 4, 1)
CHANGE
train(*first, 5, 6)
train(*second, 6, 7)
"""
"""After the change come batches of another size, and another model."""


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("before", ["as usual", "closed"])
def test_all_steps_are_recorded(tmp_path: Path, how: str, before: str) -> None:
    run = run_traced(tmp_path, TRAINS.replace("CHANGE", CHANGES[how]), before)
    assert run.status == 0, run.err
    rows = [call.inputs[0].shape[0] for call in run.calls() if call.inputs]
    assert rows == [3] * 5 + [4] * (before == "closed") + [5] * 6 + [6] * 7
    assert len(run.steps()) == len(rows)
    assert len({as_json(call)["root"] for call in run.calls()}) == 2
    assert run.complaints == []


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_before_the_first_call_is_said(dpmon: Dpmon, how: str) -> None:
    """Once, in the records, in the status while it runs, in the summary and in the report."""
    dpmon.cwd.chmod(0o777)  # for the files with which it and the test wait for each other
    dpmon.waiting(begin=CHANGES[how])
    process = dpmon.start("--headless", "script.py")
    text = f"a Python process runs {HOW[how]}, so dpmon cannot record what it trains"

    def said() -> list[str]:
        return [record["text"] for record in dpmon.records() if record["kind"] == "warning"]

    dpmon.begun()
    wait_for(said, what="the warning")
    status = json.loads(dpmon.run("status", "--json").text)
    assert status["health"]["reason"] == f"running {HOW[how]}, which cannot be recorded"
    dpmon.go()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert said() == [text]
    assert f"nothing was traced: {text}" in errors.decode()
    assert text in " ".join(dpmon.run("report").text.split())


def test_a_launcher_of_another_user(dpmon: Dpmon) -> None:
    launcher = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", sys.executable]
    if shutil.which(launcher[0]) is None or subprocess.run([*launcher, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip("another user cannot run this Python")
    dpmon.cwd.chmod(0o777)
    text = dpmon.waiting().read_text()  # only root can open the file by its path
    process = dpmon.start("--headless", *launcher, "-c", text)
    dpmon.begun()
    wait_for(lambda: any(HOW["user"] in str(record) for record in dpmon.records()), what="the warning")
    dpmon.go()
    process.communicate(timeout=300)
    assert process.returncode == 0
