"""`dpmon try` on a script with a slow loader: what it says, what it leaves, and that each run ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from support.run_harness import Dpmon, wait_for

SCRIPT = """\
import time
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

class Slow(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.02)
        open("loaded", "a").write(".")
        return torch.ones(4)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=2):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_cached_batches_are_loaded_once_and_make_a_slow_loader_fast(dpmon: Dpmon, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SCRIPT)
    done = dpmon.run("try", "--steps", "60", "--rounds", "2", "--only", "cached-batches", "--json", str(script))
    found = json.loads(done.out)
    (trial,) = found["trials"]
    assert trial["ratio"] < 0.5, "a step without the sleeps of its two samples"
    assert trial["saves"] > 0.3
    assert set(found["absent"]) == {"single", "one-rank"}
    runs = [json.loads(line) for line in dpmon.run("ls", "--json").out.splitlines()]
    assert len(runs) == 4
    assert {run["state"] for run in runs} <= {"stopped"}
    assert {run["name"] for run in runs} == {*found["runs"], *trial["runs"]}
    loaded = len((dpmon.cwd / "loaded").read_text())
    unchanged = sum(run["steps"] for run in runs if "as-is" in run["name"])
    assert loaded <= 2 * (unchanged + 2 + 2 * 8), "each run with cached batches loads 8 of them"


def test_a_script_that_fails_at_once_is_not_tried(dpmon: Dpmon) -> None:
    script = dpmon.script("raise ValueError('no such data set')")
    done = dpmon.run("try", "--steps", "5", script)
    assert done.status == 2
    assert done.out == b""
    last = done.err.decode().splitlines()[-1]
    assert " failed with exit status 1 after " in last
    assert last.endswith(": ValueError: no such data set")
    assert len(dpmon.runs()) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_run_in_progress_is_stopped_with_its_trials(dpmon: Dpmon, number: int, status: int) -> None:
    script = dpmon.script("import time\ntime.sleep(600)")
    process = dpmon.start("try", script)
    # Once it has said that the run is there, it waits for its steps.
    errors = process.stderr
    assert errors is not None
    wait_for(lambda: b"as-is, run 1" in errors.readline(), what="the first run")
    process.send_signal(number)
    assert process.wait(60) == status
    assert dpmon.exit()["by"] == "supervisor", "it saw the command end, which would sleep on otherwise"


def test_a_second_interrupt_leaves_no_run_behind(dpmon: Dpmon) -> None:
    script = dpmon.script("import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)")
    process = dpmon.start("try", script)
    errors = process.stderr
    assert errors is not None
    wait_for(lambda: b"as-is, run 1" in errors.readline(), what="the first run")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: b"stopping try-" in errors.readline(), what="the stop")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert dpmon.exit()["by"] == "supervisor"
