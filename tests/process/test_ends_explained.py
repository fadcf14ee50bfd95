"""After an end, the report says how a loader's worker was killed, and where each rank stood when one ended first."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from support.baseline_comparison import run_unless_aborted
from support.findings_table import check_row, saving
from support.run_harness import Dpmon

_INSTALLED = Path(sys.executable).with_name("torchrun")
TORCHRUN = [str(_INSTALLED)] if _INSTALLED.exists() else ["-m", "torch.distributed.run"]

WORKER = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset
class Samples(Dataset):
    def __len__(self): return 400
    def __getitem__(self, i):
        if i == 211 and KILLED: os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(16)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n, x in enumerate(DataLoader(Samples(), 8, num_workers=2)):
    model(x).sum().backward()
    optimizer.step()
    if n == RAISES: raise ValueError("on purpose")
"""

RANKS = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
class Shard(IterableDataset):
    def __iter__(self):
        for _ in range(8 * (34 if rank else FIRST)):
            yield torch.randn(16)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n, x in enumerate(DataLoader(Shard(), batch_size=8), 1):
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    if n == RAISES:
        dist.barrier()
        raise ValueError("on purpose")
dist.all_reduce(torch.ones(1))
print("done", flush=True)
"""


def report(dpmon: Dpmon, text: str, *launcher: object, **values: object) -> dict[str, Any]:
    """Run a script with values for its upper-case names, and return the report on the run."""
    begin = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    dpmon.run("--headless", *launcher, dpmon.script(begin + text, "train.py"))
    found: dict[str, Any] = json.loads(dpmon.run("report", "--json").text)
    return found


def failure(found: dict[str, Any]) -> dict[str, Any]:
    """Return the finding about the failure, which must come first."""
    first: dict[str, Any] = found["findings"][0]
    assert first["kind"] == "failed"
    return first


def test_a_killed_worker_is_named_with_signal_batch_and_memory(dpmon: Dpmon) -> None:
    finding = failure(report(dpmon, WORKER, KILLED=True, RAISES=-1))
    pattern = (
        r"a DataLoader worker \(pid \d+\) was killed by SIGKILL before batch (\d+), with at most ([\d,]+) MiB resident"
    )
    said = re.search(rf"(?<=; ){pattern}(?=\.)", finding["text"])
    assert said is not None, finding
    condition, silence = "the status of an ended worker", "an exception while the workers live"
    check_row(pattern, said[0], condition, silence, saving(finding["saves_s"]))
    assert int(said[1]) in range(20, 29), "batches 27 and later need the sample that kills"
    assert 20 < int(said[2].replace(",", "")) < 4000
    assert "OOM killer" in finding["advice"]
    assert dpmon.exit()["cause"] in finding["text"]


def test_an_exception_with_living_workers_names_none(dpmon: Dpmon) -> None:
    finding = failure(report(dpmon, WORKER, KILLED=False, RAISES=30))
    assert finding["text"] == "An exception ended the run: ValueError: on purpose (train.py:16)."
    assert "OOM" not in finding["advice"]


def test_a_normal_end_with_workers_names_none(dpmon: Dpmon) -> None:
    found = report(dpmon, WORKER, KILLED=False, RAISES=-1)
    assert "failed" not in {finding["kind"] for finding in found["findings"]}
    assert "cause" not in dpmon.exit() or dpmon.exit()["cause"] is None


def test_a_rank_with_fewer_batches_is_named_with_its_batch(dpmon: Dpmon) -> None:
    """It starts another collective than the rank in its backward pass, and gloo aborts one of them."""
    finding = failure(report(dpmon, RANKS, *TORCHRUN, "--nproc-per-node", "2", FIRST=40, RAISES=-1))
    sentence = "rank 1 left its loop after batch 34; rank 0 was in batch 35"
    assert sentence in finding["ground"], finding
    condition = "ranks that were in different batches at an end by failure"
    silence = "an exception of ranks in the same batch"
    check_row(sentence, sentence, condition, silence, saving(finding["saves_s"]))


def test_ranks_in_the_same_batch_are_not_listed(dpmon: Dpmon) -> None:
    finding = failure(report(dpmon, RANKS, *TORCHRUN, "--nproc-per-node", "2", FIRST=34, RAISES=20))
    assert "ValueError: on purpose" in finding["text"]
    assert "batch" not in finding["ground"], finding


def test_ranks_that_end_together_are_not_listed(dpmon: Dpmon) -> None:
    script = dpmon.script(f"FIRST, RAISES = 34, -1\n{RANKS}", "train.py")
    words = "--headless", *TORCHRUN, "--nproc-per-node", "2", script
    result = run_unless_aborted(lambda _: dpmon.run(*words), lambda ended: ended.errors)
    assert result.status == 0, result.errors
    assert "left its loop" not in dpmon.run("report", "--json").text
    assert dpmon.exit()["status"] == 0
