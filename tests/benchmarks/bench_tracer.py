"""What the tracer costs a step: the same loop with and without it, in random order, a fixed number of steps.

    python tests/benchmarks/bench_tracer.py [--steps 4000] [--rounds 9] [--replicas 0 2 8] [--depth 1] [--calls 1]

Every measurement is a process of its own. "without" is measured twice (A/A): the difference of the two is the noise,
and a cost below it means nothing. Over N replicas both sides run torch's data_parallel over N virtual replicas; the
untraced side calls it directly, so that the difference is the tracing alone. Replicas run in threads, which wait for
each other and for the processor: the wall time of such a step says little on few cores, so for them the main thread's
own processor time is compared too, and that is what the budget is about ("traced step, main thread"). The figure is
the median of the rounds' differences, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "dpmon"
BUDGET_BASE_US, BUDGET_REPLICA_US, BUDGET_P99_US = 15.0, 5.0, 50.0


def loop(steps: int, replicas: int, traced: bool, depth: int, calls: int) -> dict[str, float]:
    """Run the loop in this process and return the quantiles of its steps, in microseconds."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = network(depth)
    forward = model if traced or not replicas else partial(untraced_data_parallel(replicas), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(64, 16) for _ in range(64)]
    taken: list[int] = []
    spent: list[int] = []
    clock, processor = time.perf_counter_ns, time.thread_time_ns
    while len(taken) < steps + 200:
        previous = clock()
        before = processor()
        for batch in DataLoader(batches, batch_size=None):
            optimizer.zero_grad()
            for _ in range(calls):
                loss = forward(batch).pow(2).mean()
                loss.backward()
            optimizer.step()
            now = clock()
            taken.append(now - previous)
            after = processor()
            spent.append(after - before)
            previous, before = clock(), after
    taken = sorted(taken[200 : steps + 200])
    spent = sorted(spent[200 : steps + 200])
    return {
        "median": taken[len(taken) // 2] / 1e3,
        "p99": taken[int(len(taken) * 0.99)] / 1e3,
        "thread": spent[len(spent) // 2] / 1e3,
    }


def network(depth: int) -> Any:
    """Return a small network with `depth` pairs of layers inside."""
    from torch import nn

    layers = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *layers, nn.Linear(32, 1))


def untraced_data_parallel(replicas: int) -> Callable[[Any, Any], Any]:
    """torch's data_parallel of a model and a batch over virtual replicas, with nothing of the tracer's recording around
    it; to be made before the tracer is in.
    """
    import importlib

    import torch

    from dpmon.tracer.modes.virtual import PRIMITIVE_NAMES, Originals, VirtualDevices, with_globals

    module = importlib.import_module("torch.nn.parallel.data_parallel")
    originals = Originals(module, importlib.import_module("torch.nn.parallel.scatter_gather"))
    virtual = VirtualDevices(replicas, torch.device("cpu"), originals)
    function = with_globals(
        virtual.functional(originals.data_parallel), **dict(zip(PRIMITIVE_NAMES, virtual.primitives, strict=False))
    )
    ids = list(range(replicas))
    return lambda model, batch: function(model, (batch,), ids)


def measure(variant: str, options: argparse.Namespace, replicas: int) -> dict[str, float]:
    """Measure in one process, with or without the tracer."""
    with tempfile.TemporaryDirectory() as run:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DPMON_")}
        environment["OMP_NUM_THREADS"] = "1"
        if variant == "with":
            environment |= {
                "DPMON_RUN": run,
                "DPMON_START_NS": "0",
                "DPMON_MODE": "auto",
                "PYTHONPATH": str(PACKAGE / "tracer" / "site"),
            }
            if replicas:
                environment["DPMON_REPLICAS"] = str(replicas)
        command = [sys.executable, __file__, "--child", variant, "--steps", str(options.steps)]
        command += ["--replicas", str(replicas), "--depth", str(options.depth), "--calls", str(options.calls)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        if variant == "with" and not list(Path(run).glob("process-*.ring")):
            raise SystemExit("the tracer recorded nothing: this would measure nothing")
        figures: dict[str, float] = json.loads(result.stdout)
        return figures


def compare(options: argparse.Namespace, replicas: int) -> bool:
    """Measure one case and print it; return whether it is within the budget."""
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        variants = ["without", "without-again", "with"]
        random.shuffle(variants)
        rounds.append({variant: measure(variant, options, replicas) for variant in variants})

    def difference(of: str, quantile: str) -> tuple[float, float]:
        values = sorted(r[of][quantile] - r["without"][quantile] for r in rounds)
        return statistics.median(values), (values[-1 - len(values) // 4] - values[len(values) // 4]) / 2

    base = statistics.median(r["without"]["median"] for r in rounds)
    measure_of_cost = "thread" if replicas else "median"
    cost, spread = difference("with", measure_of_cost)
    tail, tail_spread = difference("with", "p99")
    noise, noise_spread = difference("without-again", measure_of_cost)
    budget = BUDGET_BASE_US + BUDGET_REPLICA_US * max(replicas, 1) * options.calls
    name = f"dp over {replicas}" if replicas else "single"
    verdict = "within" if cost <= budget else "OVER"
    what = "main thread" if replicas else "wall"
    print(
        f"{name:>10}  step {base:8.1f} us   tracer ({what}) {cost:+6.1f} ±{spread:4.1f} us ({cost / base:+.1%}), "
        f"budget {budget:.0f}: {verdict}   A/A {noise:+5.1f} ±{noise_spread:4.1f} us   "
        f"wall p99 {tail:+7.1f} ±{tail_spread:5.1f} us",
        flush=True,
    )
    return cost <= budget


def main() -> int:
    """Run the benchmark; status 1 if a case is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--replicas", type=int, nargs="*", default=[0, 2, 8])
    parser.add_argument("--depth", type=int, default=1, help="pairs of layers inside the network")
    parser.add_argument("--calls", type=int, default=1, help="calls (with a backward pass each) a step")
    parser.add_argument("--child", choices=["with", "without", "without-again"])
    options = parser.parse_args()
    if options.child:
        print(
            json.dumps(loop(options.steps, options.replicas[0], options.child == "with", options.depth, options.calls))
        )
        return 0
    print(f"{options.rounds} rounds of {options.steps} steps, random order, {os.cpu_count()} cores")
    verdicts = [compare(options, replicas) for replicas in options.replicas]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
