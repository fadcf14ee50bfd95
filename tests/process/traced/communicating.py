"""Two ranks with collectives in every step, which they count themselves, in many forms.

Prints for each rank and form: beginning and end of its equal steps, the operations and bytes of a step, the number of
collectives that torch counted in its last step, losses and weights.
"""

import hashlib
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.fsdp
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

RANKS = 2
STEPS = 16
WIDTH = 64
FORMS = ["ddp", "no_sync", "unused", "two", "fsdp", "by hand", "functional", "raises"]
if not hasattr(torch.distributed.fsdp, "fully_shard"):  # its place in torch 2.6 and later
    FORMS.remove("fsdp")
SCATTERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
"""Whether gloo is known to have reduce_scatter: in torch 2.4 it has none."""


class Net(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def by_hand(rank: int) -> list[tuple[str, int]]:
    """Run one of each; return the counts."""
    x, parts = torch.ones(100), [torch.empty(100) for _ in range(RANKS)]
    whole = torch.empty(100 * RANKS)
    dist.all_reduce(x)
    work = dist.all_reduce(torch.ones(10, dtype=torch.float64), async_op=True)
    work.wait()
    dist.broadcast(x, 0)
    dist.reduce(x.clone(), 0)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x)
    scattered = []
    if SCATTERS:
        dist.reduce_scatter(torch.empty(100), parts)
        dist.reduce_scatter_tensor(torch.empty(100), whole)
        scattered = [("reduce_scatter", 800), ("reduce_scatter", 800)]
    dist.gather(x, parts if rank == 0 else None, 0)
    dist.scatter(x, parts if rank == 0 else None, 0)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.barrier()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(50))
    with torch.no_grad():
        dist.all_reduce(torch.ones(25))
    return [
        *(("all_reduce", 400), ("all_reduce", 80), ("broadcast", 400), ("reduce", 400), ("all_gather", 800)),
        *(("all_gather", 800), *scattered, ("gather", 800), ("scatter", 800)),
        *(("all_to_all", 800), ("barrier", 0), ("all_reduce", 200), ("all_reduce", 100)),
    ]


def with_functions(group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """Functional collectives, as DTensor and compiled functions use them."""
    x = torch.ones(100)
    y = functional.all_reduce(x, "sum", group) + 1
    z = functional.all_gather_tensor(y, 0, group) + 1
    if not SCATTERS:
        return [("all_reduce", 400), ("all_gather", 800)]
    functional.reduce_scatter_tensor(z, "sum", 0, group) + 1
    return [("all_reduce", 400), ("all_gather", 800), ("reduce_scatter", 800)]


def sequence() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()


def train(form: str, rank: int) -> dict[str, object]:
    torch.manual_seed(1)
    nets = [Net(unused=form == "unused")] + [Net()] * (form == "two")
    size = bytes_of(nets[0])
    each: list[tuple[str, int]] = [("all_reduce", size)]
    models: list[nn.Module] = list(nets)
    if form in ("ddp", "no_sync", "two"):
        models = [DistributedDataParallel(net) for net in nets]
        each *= len(models)
    elif form == "unused":
        models = [DistributedDataParallel(net, find_unused_parameters=True) for net in nets]
        each += [("all_reduce", 4 * len(list(nets[0].parameters())))]  # which parameters were used
    elif form == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (RANKS,))
        for layer in (nets[0].layers[0], nets[0].layers[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(nets[0], mesh=mesh)
        each = [("all_gather", size // 2)] * 4 + [("reduce_scatter", size // 2)] * 2
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    data = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(i + rank)) for i in range(STEPS * 8 * 3)]
    losses: list[float] = []
    alike = 0
    counted = []
    micro = 3 if form == "no_sync" else 1
    for at, batch in enumerate(DataLoader(data, batch_size=8)):
        if at == micro * STEPS:
            break
        if at == 5 * micro:
            alike = time.monotonic_ns()
        before = sequence()
        last = at % micro == micro - 1
        for model in models:
            with nullcontext() if last or form != "no_sync" else model.no_sync():
                loss = model(batch).square().mean()
                loss.backward()
            losses.append(loss.item())
        if form == "by hand":
            each = by_hand(rank)
        elif form == "functional":
            each = with_functions(dist.group.WORLD)
        elif form == "raises":
            each = raising(losses)
        if last:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        counted.append(sequence() - before)
    weights = hashlib.sha256()
    for model in models:
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            weights.update(local.detach().numpy().tobytes())
    return {
        "form": form,
        "alike": alike,
        "end": time.monotonic_ns(),
        "each": each,
        "counted": sum(counted[-micro:]),
        "losses": losses,
        "weights": weights.hexdigest(),
    }


def raising(losses: list[float]) -> list[tuple[str, int]]:
    """Collectives that torch refuses: their texts are part of the result."""
    for wrong in (lambda: dist.broadcast(torch.ones(3), 7), lambda: dist.all_gather([torch.ones(2)], torch.ones(2))):
        try:
            wrong()
        except Exception as error:  # noqa: BLE001 - whatever torch raises
            losses.append(float(sum(map(ord, f"{type(error).__name__}{str(error).splitlines()[0]}"))))
        else:
            losses.append(0.0)
    x = torch.ones(100)
    dist.all_reduce(x)
    return [("all_reduce", 400)]


def run(rank: int, where: str) -> None:
    torch.set_num_threads(1)
    ours = sys.modules.get("dpmon.tracer.collectives.collective_sampler")
    if ours is not None:
        ours.MAX_COST_SHARE, ours.STEP_MULTIPLE, ours.MIN_INTERVAL_NS = 1e9, 4, 1  # as often as it may be
    dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=rank, world_size=RANKS)
    found = [train(form, rank) for form in FORMS]
    dist.barrier()
    dist.destroy_process_group()
    with open(f"{where}/rank-{rank}.json", "w") as file:
        json.dump({"pid": os.getpid(), "forms": found}, file)


if __name__ == "__main__":
    multiprocessing.spawn(run, (os.getcwd(),), RANKS)
    print(json.dumps([json.loads(Path(f"rank-{rank}.json").read_text()) for rank in range(RANKS)]))
