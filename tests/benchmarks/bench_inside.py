"""What the tracer costs a step, within one process: blocks of steps with its patches in and out, in random order.

    python tests/benchmarks/bench_inside.py [--cases usual calls deep dp2 dp8] [--blocks 400] [--steps 32]

Processes differ by more than the cost of the tracer, for example by the layout of memory. Here the same loop over the
same tensors runs with and without the patches, block by block, so that a cost of some microseconds shows within a
minute, even on a busy machine. The processor time of the training thread is compared (replicas run in threads, which
wait for each other and for the processor). A/A is the same comparison between two halves of the blocks without. Costs
that remain without the patches are not measured: the import, and memory. Blocks with the patches that read no losses
show which part of the cost is that of the losses.

The budget is a figure for one machine. As a yardstick, the bare step of the first case, which took YARDSTICK_US there,
is measured beside every case. The cost is printed as measured, and scaled by the yardstick.

The cases `gpu` and `gpu2` copy each batch to a GPU, and train there; the second over two GPUs, under DataParallel. Each
step has device times. `sampled` is `gpu` with device times of one step in 32, as the supervisor requests when a step is
that short, and shows the other 31. With --simulated, the GPUs are those of tests/cuda, which keep up with the host and
compute nothing; this needs torch built for CUDA, but no GPU. It says nothing about the cost of CUDA's own calls. The
case `ddp` is the case `deep` under DistributedDataParallel, in a group of one: the difference between the two is the
cost of synchronized passes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
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
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
YARDSTICK_US = 178.0
"""The bare step of the case "usual" on the machine that the budget is for."""
WARM_STEPS, SETTLE_STEPS = 600, 16


class Case(NamedTuple):
    """What is trained."""

    replicas: int
    """Virtual ones; 0: the bare module."""
    depth: int
    """Pairs of layers inside the network."""
    calls: int
    """A step."""
    budget_us: int
    """What tracing a step may cost on the machine that the budget is for."""
    gpus: int = 0
    ddp: bool = False
    one_in: int = 0
    """Device times of one step in this many; 0: of every step."""


CASES = {
    "usual": Case(0, 1, 1, 22),
    "calls": Case(0, 1, 3, 50),
    "deep": Case(0, 25, 1, 40),
    "dp2": Case(2, 1, 1, 80),
    "dp8": Case(8, 1, 1, 100),
    "ddp": Case(0, 25, 1, 46, ddp=True),
    "gpu": Case(0, 1, 1, 60, 1),
    "gpu2": Case(0, 1, 1, 120, 2),
    "sampled": Case(0, 1, 1, 60, 1, one_in=32),
}


def network(depth: int) -> Any:
    """Return a small network with `depth` pairs of layers inside."""
    from torch import nn

    layers = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *layers, nn.Linear(32, 1))


def untraced_data_parallel(replicas: int) -> Callable[[Any, Any], Any]:
    """Return torch's data_parallel over virtual replicas, not recorded; to be made before the tracer is in."""
    import torch

    from dpmon.tracer.modes.virtual_devices import PRIMITIVE_NAMES, TorchOriginals, VirtualDevices, with_globals

    module = importlib.import_module("torch.nn.parallel.data_parallel")
    originals = TorchOriginals(module, importlib.import_module("torch.nn.parallel.scatter_gather"))
    virtual = VirtualDevices(replicas, torch.device("cpu"), originals)
    function = with_globals(virtual.functional, **dict(zip(PRIMITIVE_NAMES, virtual.primitives, strict=False)))
    ids = list(range(replicas))
    return lambda model, batch: function(model, (batch,), ids)


class Patches:
    """All patches of the tracer in torch, which can be removed and put back."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        import torch

        names = ("torch.autograd", "torch.autograd.graph", "torch.optim.optimizer")
        places = ("", ".data_parallel", ".replicate", ".parallel_apply", ".scatter_gather")
        modules = [importlib.import_module(name) for name in (*names, *(f"torch.nn.parallel{p}" for p in places))]
        loader: Any = importlib.import_module("torch.utils.data.dataloader")
        optimizer: Any = importlib.import_module("torch.optim.optimizer")
        functions: Any = importlib.import_module("torch.nn.parallel._functions")
        self._owners = [*modules, *kinds, torch.nn.Module, torch.nn.DataParallel, torch.Tensor]
        self._owners += [
            loader._BaseDataLoaderIter,
            optimizer.Optimizer,
            functions.Scatter,
            functions.Broadcast,
            functions.Gather,
        ]
        self._hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        self._without = [dict(vars(owner)) for owner in self._owners]
        self._with: list[tuple[Any, str, Any]] = []
        self._with_hooks: list[dict[Any, Any]] = []

    def taken_out(self) -> int:
        """Remove the patches; return their number."""
        self._with_hooks = [dict(hooks) for hooks in self._hooks]
        for hooks in self._hooks:
            hooks.clear()
        self._with = []
        for owner, without in zip(self._owners, self._without, strict=True):
            for name, value in list(vars(owner).items()):
                if name.startswith("__") and name not in ("__call__", "__init__", "__next__"):
                    continue
                if name not in without or without[name] is not value:
                    self._with.append((owner, name, value))
                    if name in without:
                        setattr(owner, name, without[name])
                    else:
                        delattr(owner, name)
        return len(self._with)

    def put_back(self) -> None:
        """Put the patches back."""
        for owner, name, value in self._with:
            setattr(owner, name, value)
        for hooks, kept in zip(self._hooks, self._with_hooks, strict=True):
            hooks.update(kept)


class Loop:
    """A training loop over one small network."""

    def __init__(self, depth: int, calls: int, gpus: int = 0, *, ddp: bool = False) -> None:
        """`depth`: pairs of layers inside the network. `calls`: of it, with a backward pass each, in a step.

        `ddp`: under DistributedDataParallel.
        """
        import torch

        torch.manual_seed(0)
        self.gpu = gpus > 0
        self.model = network(depth)
        if gpus:
            self.model.cuda()
        if gpus > 1:
            self.model = torch.nn.DataParallel(self.model, list(range(gpus)))
        if ddp:
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batches = [torch.randn(64, 16) for _ in range(50)]
        self.calls = calls

    def run(self, forward: Any, steps: int) -> float:
        """Return the median step, in microseconds of this thread's processor time."""
        from torch.utils.data import DataLoader

        processor = time.thread_time_ns
        spent: list[int] = []
        while True:
            before = processor()
            for batch in DataLoader(self.batches, batch_size=None):  # type: ignore[arg-type]  # a list will do
                if self.gpu:
                    batch = batch.to("cuda", non_blocking=True)
                self.optimizer.zero_grad()
                for _ in range(self.calls):
                    loss = forward(batch).pow(2).mean()
                    loss.backward()
                self.optimizer.step()
                spent.append(processor() - before)
                if len(spent) == steps:
                    return statistics.median(spent) / 1e3
                before = processor()


def child(case: str, blocks: int, steps: int) -> dict[str, list[float]]:
    """Run one case in this process; return the medians of its blocks, and of those of the yardstick."""
    import torch
    from torch import nn

    patches = Patches((nn.Sequential, nn.parallel.DistributedDataParallel))
    from dpmon.span_reader import SpanReader
    from dpmon.tracer import patch
    from dpmon.tracer.steps.losses import LossTracer

    replicas, depth, calls, _, gpus, ddp, one_in = CASES[case]
    apart = untraced_data_parallel(replicas) if replicas else None
    patch.install()
    torch.set_num_threads(1)
    loop = Loop(depth, calls, gpus, ddp=ddp)
    loop.run(loop.model, WARM_STEPS)
    (ring,) = Path(os.environ["DPMON_RUN"]).glob("process-*.ring")
    SpanReader(str(ring)).request_device_timing(one_in)
    (losses,) = (one for one in gc.get_objects() if type(one) is LossTracer)
    recorder = losses._recorder
    alone = partial(apart, loop.model) if apart is not None else loop.model
    bare = Loop(1, 1)
    if patches.taken_out() < 10:
        raise SystemExit("the tracer has not put itself in: this would measure nothing")
    loop.run(alone, WARM_STEPS)
    gc.collect()
    found: dict[str, list[float]] = {"without": [], "with": [], "no losses": [], "yardstick": []}

    def with_patches(name: str = "with") -> None:
        patches.put_back()
        loop.run(loop.model, SETTLE_STEPS)  # the first steps after a change of patches do not count
        found[name].append(loop.run(loop.model, steps))
        patches.taken_out()

    def without_losses() -> None:
        readers = recorder.on_loss, recorder.on_update
        recorder.on_loss, recorder.on_update = lambda *_: None, lambda: None
        with_patches("no losses")
        recorder.on_loss, recorder.on_update = readers

    def without() -> None:
        loop.run(alone, SETTLE_STEPS)
        found["without"].append(loop.run(alone, steps))

    def yardstick() -> None:
        bare.run(bare.model, SETTLE_STEPS)
        found["yardstick"].append(bare.run(bare.model, steps))

    for _ in range(blocks):
        for one in random.sample((with_patches, without, without_losses, yardstick), 4):
            one()
    patches.put_back()
    return found


def middle(values: list[float]) -> tuple[float, float]:
    """Return the median and its standard error, from the quartiles."""
    values = sorted(values)
    count = len(values)
    return statistics.median(values), 1.25 * (values[3 * count // 4] - values[count // 4]) / 1.35 / count**0.5


def measure(case: str, blocks: int, steps: int, library: Path | None) -> None:
    """Measure one case in a separate process; print its line. `library`: the simulated CUDA runtime, if it is used."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DPMON_")}
    environment |= {"OMP_NUM_THREADS": "1", "DPMON_START_NS": "0", "DPMON_MODE": "auto"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    if CASES[case].replicas:
        environment["DPMON_REPLICAS"] = str(CASES[case].replicas)
    if library is not None:
        environment |= {"LD_PRELOAD": str(library), "FAKE_CUDART_KERNEL_US": "1", "FAKE_CUDART_COPY_US": "1"}
    command = [sys.executable, __file__, "--child", case, "--blocks", str(blocks), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as run:
        environment["DPMON_RUN"] = run
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        if not list(Path(run).glob("process-*.ring")):
            raise SystemExit("the tracer recorded nothing: this would measure nothing")
    found = json.loads(done.stdout)
    without = found["without"]
    base = statistics.median(without)
    # The speed of the machine varies, so ratios of adjacent blocks are compared.
    cost, error = (base * x for x in middle([a / b - 1 for a, b in zip(found["with"], without, strict=True)]))
    noise, noise_error = (
        base * x for x in middle([a / b - 1 for a, b in zip(without[::2], without[1::2], strict=False)])
    )
    losses, losses_error = (
        base * x
        for x in middle([(a - b) / c for a, b, c in zip(found["with"], found["no losses"], without, strict=True)])
    )
    slower = statistics.median(found["yardstick"]) / YARDSTICK_US
    print(
        f"{case:>6}  step {base:7.0f} us   tracer {cost:+6.1f} ±{error:4.1f} us ({cost / base:+.1%})   "
        f"of it losses {losses:+5.1f} ±{losses_error:4.1f} us   "
        f"A/A {noise:+5.1f} ±{noise_error:4.1f} us   this machine: {slower:.1f} times the yardstick, "
        f"so {cost / slower:+5.1f} ±{error / slower:4.1f} us of {CASES[case].budget_us}",
        flush=True,
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = [name for name, case in CASES.items() if not case.gpus]
    parser.add_argument("--cases", nargs="*", choices=CASES, default=usual, help="gpu, sampled and gpu2 need GPUs")
    parser.add_argument("--simulated", action="store_true", help="over the simulated GPUs of tests/cuda")
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--child", choices=CASES)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.blocks, options.steps)))
        return 0
    print(f"{options.blocks} blocks of {options.steps} steps each way, processor time of the training thread")
    with tempfile.TemporaryDirectory() as directory:
        library = None
        if options.simulated:
            sys.path.append(str(REPOSITORY / "tests"))
            simulated: Any = importlib.import_module("support.fake_devices")
            if reason := simulated.missing_requirement():
                raise SystemExit(reason)
            library = simulated.compile_fake_cuda(Path(directory))
        for case in options.cases:
            measure(case, options.blocks, options.steps, library)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
