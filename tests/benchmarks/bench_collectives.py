"""The cost of recording the collectives of a sampled step: two gloo ranks.

    python tests/benchmarks/bench_collectives.py [--steps 400] [--rounds 3] [--forms ddp fsdp] [--layers 8]

Every fourth step is sampled. The kernels are switched on at the beginning of a sampled step, and off at the beginning
of the next one. So a sample costs what these two steps take longer than the third; the fourth against the third is the
A/A control. All are medians of one process, taken a few milliseconds apart. Usually a sample is taken every 10 s or
less often: its cost over 10 s is the average cost, which is to stay below 0.5%.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from dpmon.tracer.collectives.collective_sampler import MIN_INTERVAL_NS, CollectiveSampler

PACKAGE = Path(__file__).resolve().parents[2] / "dpmon"
RANKS = 2
EVERY = 4
SETTLED = 40
"""Steps before the measurement."""
BUDGET = 0.005


def model_of(form: str, layers: int, width: int) -> Any:
    """Return a wrapped network, with about one collective per step and layer."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    if form == "ddp":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=4 * width * width / (1 << 20))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def rank(number: int, where: str, options: argparse.Namespace) -> None:
    """Run one rank; return the times of its steps, and facts of the tracer about its samples."""
    import torch
    from torch import distributed
    from torch.utils.data import DataLoader

    from dpmon.tracer.collectives import collective_sampler as collectives

    torch.set_num_threads(1)
    own_costs: list[int] = []
    end = CollectiveSampler._end

    def end_and_note(sampler: CollectiveSampler) -> bool:
        own_costs.append(sampler._kernels.cost_ns())
        return end(sampler)

    CollectiveSampler._end = end_and_note  # type: ignore[assignment, method-assign]
    collectives.MAX_COST_SHARE, collectives.STEP_MULTIPLE, collectives.MIN_INTERVAL_NS = 1e9, EVERY, 1
    distributed.init_process_group("gloo", init_method=f"file://{where}/store", rank=number, world_size=RANKS)
    model = model_of(options.form, options.layers, options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = [torch.randn(16, options.width) for _ in range(options.steps + SETTLED)]
    taken = []
    before = time.perf_counter_ns()
    for batch in DataLoader(batches, batch_size=None):  # type: ignore[arg-type]  # a list will do
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        now = time.perf_counter_ns()
        taken.append(now - before)
        before = now
    distributed.barrier()
    distributed.destroy_process_group()
    Path(where, f"rank-{number}.json").write_text(json.dumps({"taken": taken[SETTLED:], "own": own_costs}))


def measure(form: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run two ranks; return the results of rank 0."""
    with tempfile.TemporaryDirectory() as run:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DPMON_")}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "DPMON_RUN": run,
            "DPMON_START_NS": "0",
            "PYTHONPATH": os.pathsep.join([str(PACKAGE / "tracer" / "site"), str(PACKAGE.parent)]),
        }
        words = ["--form", form, "--steps", str(options.steps), "--layers", str(options.layers)]
        words += ["--width", str(options.width)]
        started = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(number), "--where", run, *words], env=environment)
            for number in range(RANKS)
        ]
        if sum(child.wait() != 0 for child in started):
            raise SystemExit("a rank failed")
        found: dict[str, Any] = json.loads(Path(run, "rank-0.json").read_text())
        return found


def report(form: str, options: argparse.Namespace) -> bool:
    """Measure one form and print it; return whether it keeps the budget."""
    costs, controls, steps, own = [], [], [], []
    for _ in range(options.rounds):
        found = measure(form, options)
        medians = [statistics.median(found["taken"][at::EVERY]) / 1e3 for at in range(EVERY)]
        steps.append(medians[2])
        costs.append(medians[0] + medians[1] - 2 * medians[2])
        controls.append(medians[3] - medians[2])
        own.append(statistics.median(found["own"]) / 1e3)
    cost, control, step = (statistics.median(found) for found in (costs, controls, steps))
    share = cost * 1e3 / MIN_INTERVAL_NS
    print(f"{form}: a step takes {step:.0f} us without a sample, the A/A control differs by {control:+.0f} us")
    print(f"  a sample costs {cost:+.0f} us (from {min(costs):+.0f} to {max(costs):+.0f})", end="")
    print(f", {statistics.median(own):.0f} us by the tracer's own account")
    print(f"  one every {MIN_INTERVAL_NS / 1e9:.0f} s: {share:.2%} of the time, budget {BUDGET:.1%}")
    return share <= BUDGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", nargs="*", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    for name in ("--form", "--where"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank, options.where, options)
        return 0
    kept = [report(form, options) for form in options.forms]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
