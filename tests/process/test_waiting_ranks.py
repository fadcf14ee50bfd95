"""Ranks that wait for another one are told from the rank that they wait for, with real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dpmon.stalls.stacks import find_py_spy
from support.run_harness import LIMIT_S, Dpmon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_py_spy() is None, reason="only py-spy shows where a process without a ring is"),
]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
WAIT_S = 300

SKIPPED = """\
import torch, datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=20))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(30):
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() != 1:
    handle = dist.all_reduce(torch.ones(3), async_op=True)
    handle.wait()
dist.barrier()
"""


def start(dpmon: Dpmon, ranks: int, source: str) -> Path:
    """Start a script with torchrun; return its path."""
    script = dpmon.script(source, "job.py")
    quiet = subprocess.DEVNULL
    dpmon.start("--headless", *TORCHRUN, ranks, script, stdin=quiet, stdout=quiet, stderr=quiet)
    dpmon.info()
    return script


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_skipped_a_collective_is_named(dpmon: Dpmon, ranks: int) -> None:
    start(dpmon, ranks, SKIPPED)
    waited = dpmon.run("status", "--wait", "stalled", "--timeout", WAIT_S, limit=WAIT_S + LIMIT_S)
    assert waited.status == 0, waited.text
    now = json.loads(dpmon.run("why", "--json").out)["now"]
    others = "ranks 0, 2 wait" if ranks == 3 else "rank 0 waits"
    assert now["text"] == (
        f"rank 1 waits in barrier (job.py:13); {others} in Work.wait (job.py:12): different collectives"
    )
    assert [rank["rank"] for rank in now["ranks"] if not rank["waits"]] == [1]
