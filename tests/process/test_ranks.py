"""DistributedDataParallel: every rank is a process of the run, with its rank, its sizes and its steps."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from dpmon.model.run_analysis import toggle_refusal
from dpmon.ui.screen_data import format_mode_and_devices
from support.baseline_comparison import ROOT, records_of_kind, run_unless_aborted
from support.history_builders import snapshot_of_directory
from support.run_harness import CommandResult, Dpmon

EXAMPLE, SHARDED = ROOT / "examples" / "ddp.py", ROOT / "examples" / "fsdp.py"
SPAWNED = Path(__file__).resolve().parent / "scripts" / "spawned_ranks.py"
_INSTALLED = Path(sys.executable).with_name("torchrun")
TORCHRUN = [str(_INSTALLED)] if _INSTALLED.exists() else ["-m", "torch.distributed.run"]

ACCELERATED = """
import torch
import torch.distributed.fsdp
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(160, 5), torch.randn(160, 2)), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
accelerator.end_training()
"""


def until_it_ends_well(dpmon: Dpmon, *words: object) -> CommandResult:
    result = run_unless_aborted(lambda _: dpmon.run("--headless", *words), lambda ended: ended.errors)
    assert result.status == 0, result.errors
    return result


def check_ranks(records: list[dict[str, Any]], steps: int, rows: dict[int, int], widths: tuple[int, int]) -> None:
    """Check process, calls and steps of each rank; `rows`: rows of a batch by rank."""
    processes = records_of_kind(records, "process")
    assert sorted(process["rank"] for process in processes) == sorted(rows)
    assert {process["world"] for process in processes} == {len(rows)}
    assert len({process["pid"] for process in processes}) == len({process["process"] for process in processes})
    for process in processes:
        mine = [r for r in records if r.get("process") == process["process"]]
        calls, steps_of_rank = records_of_kind(mine, "call"), records_of_kind(mine, "step")
        assert {record["rank"] for record in mine} == {process["rank"]}
        assert [call["call"] for call in calls] == [call["step"] for call in calls] == list(range(1, steps + 1))
        assert [each["step"] for each in steps_of_rank] == list(range(1, steps + 1))
        batch = rows[process["rank"]]
        for call in calls:
            assert (call["via"], call["mode"], call["virtual"]) == ("DistributedDataParallel", "single", False)
            assert call["phases"] == {}
            (replica,) = call["replicas"]
            for part in (call, replica):
                (given,), (gave,) = part["inputs"], part["outputs"]
                assert (given["shape"], given["bytes"]) == ([batch, widths[0]], batch * widths[0] * 4)
                assert (gave["shape"], gave["bytes"]) == ([batch, widths[1]], batch * widths[1] * 4)
        for each in steps_of_rank:
            assert {"forward", "backward", "optimizer"} <= set(each["phases"])
            assert each["samples"] == batch


def test_torchrun(dpmon: Dpmon) -> None:
    result = until_it_ends_well(dpmon, *TORCHRUN, "--nproc-per-node", 2, EXAMPLE, "--steps", 20)
    assert b"final loss" in result.out
    check_ranks(dpmon.records(), 20, {0: 30, 1: 30}, (5, 2))
    row = r"  2 equal ranks +cpu +20 +20 .* \[30, 5\] -> \[30, 2\]$"  # each has 20 steps and 20 calls
    assert re.search(row, result.errors, re.M), result.errors

    ranks = snapshot_of_directory(dpmon.last(), over=True).training_processes
    assert [(each.rank, each.info.world) for each in ranks] == [(0, 2), (1, 2)]
    for each in ranks:
        assert each.last_step is not None
        assert each.last_step.step == 20
        forward, backward = (each.figures.phase(name) for name in ("forward", "backward"))
        assert forward is not None
        assert backward is not None
        assert backward.median_ns is not None
        assert (each.figures.median_ns or 0) >= (forward.median_ns or 0) > 0


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="torch 2.6 and later have it there")
def test_fsdp_under_torchrun(dpmon: Dpmon) -> None:
    """Summary, report and toggle treat its ranks as processes that train one model together."""
    result = until_it_ends_well(dpmon, *TORCHRUN, "--nproc-per-node", 2, SHARDED, "--steps", 20)
    assert b"final loss" in result.out
    assert "2 training processes, 20 steps, 40 calls total; fsdp on " in result.errors
    row = next(line.split() for line in result.errors.splitlines() if "rank 1 of 2" in line)
    assert row[5:8] == ["cpu", "20", "20"]
    assert " ".join(row[-5:]) == "[30, 5] -> [30, 2]"
    assert "replica" not in result.errors
    assert {(call["root"], call["via"]) for call in records_of_kind(dpmon.records(), "call")} == {
        ("Model", "fully_shard")
    }

    state = snapshot_of_directory(dpmon.last(), over=True)
    assert "train by fully_shard" in (toggle_refusal(state) or "")
    for each in state.training_processes:
        assert format_mode_and_devices(each)[0] == "fsdp ×2"


def test_mp_spawn_with_batches_of_different_sizes(dpmon: Dpmon, tmp_path: Path) -> None:
    def ranks(number: int) -> tuple[CommandResult, Path]:
        store = tmp_path / f"store-{number}"
        return dpmon.run("--headless", SPAWNED, store), store

    result, store = run_unless_aborted(ranks, lambda ended: ended[0].errors)
    assert result.status == 0, result.errors
    check_ranks(dpmon.records(), 6, {0: 4, 1: 6}, (6, 3))
    torch.manual_seed(0)
    # The gradient of a sum is the sum of the rows: 4 rows of `step` on one rank, 6 of `step + 1` on the other.
    expected = torch.nn.Linear(6, 3).weight - 0.1 * sum((4 * step + 6 * (step + 1)) / 2 for step in range(6))
    for rank in (0, 1):
        weights, comm_hooks = torch.load(f"{store}-{rank}", weights_only=True)
        assert torch.allclose(weights, expected, atol=1e-3)
        assert comm_hooks == 0


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate(dpmon: Dpmon) -> None:
    script = dpmon.script(ACCELERATED)
    # Its launcher starts several processes on one machine only for GPUs, by torchrun.
    until_it_ends_well(dpmon, *TORCHRUN, "--nproc-per-node", 2, script)
    check_ranks(dpmon.records(), 5, {0: 16, 1: 16}, (5, 2))
