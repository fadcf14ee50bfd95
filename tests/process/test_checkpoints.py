"""Checkpoints are records with size, file system and line; while one is saved, the run has a state of its own."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dpmon.stalls.stall_detection import MAX_SAVE_NS, MIN_STALL_NS
from support.baseline_comparison import run_unless_aborted
from support.findings_table import check_row, saving
from support.run_harness import Dpmon, wait_for

_INSTALLED = Path(sys.executable).with_name("torchrun")
TORCHRUN = [str(_INSTALLED)] if _INSTALLED.exists() else ["-m", "torch.distributed.run"]

SCRIPT = """
import io, time
import torch
class Slow:  # the time that a slow disk takes
    def __init__(self, seconds): self.seconds = seconds
    def __reduce__(self):
        time.sleep(self.seconds)
        return float, (self.seconds,)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
weights = torch.zeros(1 << 20)
for step in range(1, 61):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if step % 20 == 0:
        saved = {"weights": weights, "slow": Slow(SECONDS)}
        SAVE
    torch.save(step, io.BytesIO())
try:
    torch.save(model, "/no/such/directory/model.pt")
except RuntimeError:
    print(torch.save.__name__, torch.save.__module__)
"""


def run(dpmon: Dpmon, save: str, seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the script; return its findings about checkpoints, and the records."""
    script = dpmon.script(SCRIPT.replace("SAVE", save).replace("SECONDS", str(seconds)), "train.py")
    result = dpmon.run("--headless", script)
    assert (result.status, result.text) == (0, "save torch.serialization\n"), result.errors
    assert "dpmon's tracer failed" not in result.errors
    report = json.loads(dpmon.run("report", "--json").text)
    records = [record for record in dpmon.records() if record["kind"] == "checkpoint"]
    return [finding for finding in report["findings"] if finding["kind"] == "checkpoints"], records


@pytest.mark.parametrize(
    "save", ["torch.save(saved, 'model.pt')", "with open('model.pt', 'wb') as f: torch.save(saved, f)"]
)
def test_long_saves_are_named(dpmon: Dpmon, save: str) -> None:
    findings, records = run(dpmon, save, 0.5)
    own = [record for record in records if record["place"] == "train.py:18"]
    assert len(own) == 3
    size = (dpmon.cwd / "model.pt").stat().st_size
    assert all(record["save_s"] >= 0.5 and record["bytes"] == size for record in own)
    types = {line.split(" - ")[1].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    assert {record["filesystem"] for record in own} <= {*types, "an unknown file system"}
    (finding,) = findings
    pattern = r"Checkpoints take \d+% of the elapsed time: 4\.00 MiB each at [\d.]+ [KM]iB/s to [\w ]+ \(train\.py:18\)"
    assert re.fullmatch(rf"{pattern}\.", finding["text"])
    condition = "5% of the training and half a second in one line"
    check_row(pattern, finding["text"][:-1], condition, "short saves", saving(finding["saves_s"]))
    assert finding["saves_s"] == pytest.approx(sum(record["save_s"] for record in own))
    assert "async_save" in finding["advice"]


def test_a_save_to_memory_has_no_size(dpmon: Dpmon) -> None:
    findings, records = run(dpmon, "torch.save(saved, io.BytesIO())", 0.5)
    own = [record for record in records if record["save_s"] >= 0.5]
    assert len(own) == 3
    reason = "not in a file when the call returned"
    for record in own:
        assert record["bytes"] is record["filesystem"] is None
        assert record["absent"] == {"bytes": reason, "filesystem": reason}
    (finding,) = findings
    assert re.fullmatch(rf"Checkpoints take \d+% of the elapsed time: {reason} \(train\.py:18\)\.", finding["text"])


def test_short_saves_are_silent(dpmon: Dpmon) -> None:
    findings, _ = run(dpmon, "torch.save(saved, 'model.pt')", 0)
    assert not findings


DISTRIBUTED = """
import os, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
warnings.filterwarnings("ignore")
if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Linear(16, 1)
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"weights": torch.zeros(1 << 24), "step": "a text, which torch.save writes"}
for step in range(1, 41):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    if step == 20:
        checkpoint.save(state, checkpoint_id="saved")
    if step == 30 and dist.is_initialized():
        checkpoint.async_save(state, checkpoint_id="saved in the background").result()
    if step == 40:
        try:
            checkpoint.save(state, checkpoint_id="/dev/null/not/a/directory")
        except BaseException as error:  # not an Exception
            assert type(error).__name__ == "CheckpointException"
        torch.save(state, f"{os.environ.get('RANK', 0)}.pt")
print(checkpoint.save.__name__, flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_distributed_checkpoint_is_recorded_once(dpmon: Dpmon, ranks: int) -> None:
    launcher = [*TORCHRUN, "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = "--headless", *launcher, dpmon.script(DISTRIBUTED, "train.py")
    result = run_unless_aborted(lambda _: dpmon.run(*words), lambda ended: ended.errors)
    assert (result.status, result.text.split()) == (0, ["save"] * ranks), result.errors
    assert "dpmon's tracer failed" not in result.errors
    records = [record for record in dpmon.records() if record["kind"] == "checkpoint"]
    module = "torch.distributed.checkpoint"
    size = sum(file.stat().st_size for file in (dpmon.cwd / "saved").glob("*.distcp"))
    for rank in range(ranks):
        own = [record for record in records if record.get("process") == rank]
        saves = [record for record in own if record["function"] == f"{module}.save"]
        (save,) = saves
        assert save["place"] == "train.py:18"
        assert save["bytes"] == size
        assert not save["absent"]
        assert [record["place"] for record in own if record["function"] == "torch.save"] == ["train.py:26"]
        background = [record for record in own if record["function"] == f"{module}.async_save"]
        assert [(record["place"], record["bytes"]) for record in background] == [("train.py:20", None)] * (ranks > 1)
        assert len(own) == 2 + (ranks > 1)


def test_safetensors_are_recorded_however_they_were_imported(dpmon: Dpmon) -> None:
    """The module stands for the installed one, which is no dependency of the tests; it has the same structure."""
    library = dpmon.cwd / "site-packages" / "safetensors"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(
        "import pathlib, time\n"
        "def serialize_file(tensors, filename, metadata=None):\n"
        "    time.sleep(0.02)\n"
        "    pathlib.Path(filename).write_bytes(bytes(1000))\n"
    )
    (library / "torch.py").write_text(
        "from safetensors import serialize_file\n"
        "def save_file(tensors, filename, metadata=None):\n"
        "    serialize_file(dict(tensors), filename, metadata=metadata)\n"
    )
    script = dpmon.script(
        "import sys, torch\n"
        f"sys.path.append({str(library.parent)!r})\n"
        "from safetensors.torch import save_file\n"
        "model = torch.nn.Linear(16, 1)\n"
        "for step in range(20):\n"
        "    model(torch.ones(2, 16)).sum().backward()\n"
        "save_file(model.state_dict(), 'model.safetensors')\n"
        "print(save_file.__module__)\n",
        "train.py",
    )
    result = dpmon.run("--headless", script)
    assert (result.status, result.text) == (0, "safetensors.torch\n"), result.errors
    (record,) = [record for record in dpmon.records() if record["kind"] == "checkpoint"]
    assert record["function"] == "safetensors.torch.serialize_file"
    assert (record["place"], record["bytes"]) == ("train.py:7", 1000)


WAITS = """
import io, os, torch
from torch.utils.data import DataLoader
class Gate:  # a disk that does not answer
    def __reduce__(self):
        with open("gate", "rb") as file: file.read()
        return str, ()
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for x in DataLoader(torch.ones(64, 16), batch_size=2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    if epoch == 0:
        torch.save(Gate(), "model.pt")
"""


def test_a_long_save_is_a_state_and_no_stall_and_no_time_between_steps(dpmon: Dpmon) -> None:
    os.mkfifo(dpmon.cwd / "gate")
    process = dpmon.start("--headless", dpmon.script(WAITS, "train.py"))

    def status() -> dict[str, Any]:
        health: dict[str, Any] = json.loads(dpmon.run("status", "--json").text)["health"]
        return health

    wait_for(lambda: status()["state"] == "saving a checkpoint", what="the state")
    assert status()["fine"]
    assert "  saving a checkpoint for " in dpmon.run("status").text
    seen_ns = time.monotonic_ns()
    wait_for(lambda: time.monotonic_ns() > seen_ns + 1.2 * MIN_STALL_NS, what="the time of a stall elsewhere")
    state = status()["state"]
    with (dpmon.cwd / "gate").open("wb"):
        pass
    assert process.wait(100) == 0
    records = dpmon.records()
    (save,) = [record for record in records if record["kind"] == "checkpoint"]
    if save["save_s"] < MAX_SAVE_NS / 1e9:  # the machine did not stand still
        assert state == "saving a checkpoint"
        assert not [record for record in records if record["kind"] == "stall"]
    report = json.loads(dpmon.run("report", "--json").text)
    kinds = [finding["kind"] for finding in report["findings"]]
    assert "checkpoints" in kinds
    assert "between" not in kinds
