"""What grows on GPUs: the names with their device, and torch's own history of allocations."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from support.fake_devices import SimulatedCuda
from support.run_harness import Dpmon
from support.tracer_harness import TracedRun, TracedScript

pytestmark = pytest.mark.simulated

TRAINS = """import os, time, torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
kept = []
while not os.path.exists("stop"):
    out = net(torch.ones(64, 64, device="cuda"))
    optimizer.zero_grad()
    out.sum().backward()
    optimizer.step()
    kept.append(out.detach().clone())
    time.sleep(0.005)
print(torch._C._cuda_isHistoryEnabled())
"""


def walked(place: Path, text: str, gpus: SimulatedCuda) -> TracedRun:
    """Run a script that trains until it has been looked at."""
    script = TracedScript(place, text, mode="script", env=gpus.environment(1))
    ring = script.ring()
    ring.request_walk()
    lines = script.directory / "process-0.jsonl"
    until = time.monotonic() + 120
    while '"kind":"growth"' not in (lines.read_text() if os.path.exists(lines) else "") and time.monotonic() < until:
        assert script.process.poll() is None
        time.sleep(0.05)
    (script.cwd / "stop").touch()
    return script.end()


def test_the_lines_of_allocations_that_were_not_freed(tmp_path: Path, gpus: SimulatedCuda) -> None:
    run = walked(tmp_path, TRAINS, gpus)
    assert (run.status, run.complaints, run.out) == (0, [], "False\n")
    (growth,) = [event.data for event in run.events("growth")]
    (name,) = growth["names"]
    assert (name["name"], name["type"], name["items"], name["device"], name["place"]) == (
        "kept", "list", "tensor", "cuda:0", "script.py:10"
    )  # fmt: skip
    top = growth["allocations"][0]
    assert top["place"] == "script.py:10"
    assert top["bytes"] >= growth["steps"] * 64 * 64 * 4


def test_a_history_of_the_script_is_left_alone(tmp_path: Path, gpus: SimulatedCuda) -> None:
    text = TRAINS.replace("kept = []", "torch.cuda.memory._record_memory_history(max_entries=100)\nkept = []")
    run = walked(tmp_path, text, gpus)
    assert (run.status, run.complaints, run.out) == (0, [], "True\n")
    (growth,) = [event.data for event in run.events("growth")]
    assert growth["allocations"] == []
    assert growth["absent"] == {"allocations": "the script itself lets torch record allocations"}


def test_an_oom_of_a_gpu_is_the_cause_with_what_was_asked_and_free(dpmon: Dpmon, gpus: SimulatedCuda) -> None:
    text = TRAINS.replace('while not os.path.exists("stop"):', "for _ in range(20):").replace("time.sleep", "#")
    text += 'torch.empty(2 << 30, dtype=torch.uint8, device="cuda")\n'
    env = gpus.environment(1)
    run = dpmon.run(*dpmon.warm(env), "--headless", "--mode", "script", dpmon.script(text), env=env)
    assert run.status == 1
    cause = dpmon.exit()["cause"]
    assert "(script.py:13); cuda:0: 2.00 GiB were requested, " in cause
    assert cause.endswith(" of 1.00 GiB were free")
