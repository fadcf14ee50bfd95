"""Trains sharded models on two ranks in all forms; each rank counts what a monitor should see.

    sharded_ranks.py [FORM...]

The ranks are forked children, so that torch is imported once. Each leaves FORM-RANK.json: losses, a digest of the
weights and of the random state to the last bit, its own counts, sizes and bytes; and the checkpoints it wrote. All of
it is the same in each run, but for hashes that torch pickles with a mesh.
"""

import copy
import hashlib
import json
import os
import pathlib
import random
import sys
import uuid
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

measurement = sys.modules.get("dpmon.tracer.memory.measurement")
if measurement is not None:
    measurement.MEASURE_INTERVAL_NS = measurement.WAIT_FACTOR = 0

WORLD = 2
STEPS = 8
ROWS = 6


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, rows):
        return rows + self.down(torch.tanh(self.up(rows)))


class Net(nn.Module):
    def __init__(self, width=12, inner=16):
        super().__init__()
        self.first = Block(width, inner)
        self.second = Block(width, inner)

    def forward(self, rows):
        return self.second(self.first(rows))


def shard_all(model, mesh):
    fully_shard(model.first, mesh=mesh)
    fully_shard(model.second, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split_layers(model, mesh, down):
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": down()})
    return model


class Rank:
    """Results and counts of one rank of one form."""

    def __init__(self, form, rank):
        self.form = form
        self.rank = rank
        self.mesh = init_device_mesh("cpu", (WORLD,))
        self.calls = []
        """By call: step, whether gradients are recorded, shapes of the input (local, global) and of the result."""
        self.losses = []
        self.step = 1

    def called(self, model, rows):
        result = model(rows)
        self.calls.append([self.step, torch.is_grad_enabled(), shapes(rows), shapes(result)])
        return result

    def batch(self, seed):
        torch.manual_seed(seed)
        return torch.randn(ROWS, 12)

    def train(self, model, calls=1, given=lambda rows: rows, optimizer=torch.optim.AdamW, alike=False, keep=False):
        """Train steps of `calls` calls and backward passes, then make two calls without gradients.

        `alike`: all ranks have one batch. `keep`: fully_shard leaves the gathered weights in memory.
        """
        self.optimizer = optimizer(model.parameters(), lr=0.01)
        parameters = list(model.parameters())
        shards, all_of_it = local_bytes(parameters), sum(4 * one.numel() for one in parameters)
        seed = 0 if alike else self.rank
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            gradients = []
            for part in range(calls):
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(part == calls - 1)
                    model.set_reshard_after_backward(not keep)
                loss = self.called(model, given(self.batch(seed))).pow(2).mean()
                loss.backward()
                self.losses.append(whole(loss.detach()).item().hex())
                seed += 10
                held = [one.grad for one in parameters if one.grad is not None]
                gradients.append(local_bytes(held) if held else all_of_it)  # not reduced yet
            self.optimizer.step()
            states = (value for state in self.optimizer.state.values() for value in state.values())
            self.bytes = {
                "model": shards + all_of_it if keep else shards,
                "gradients": gradients,  # after each backward pass
                "optimizer": local_bytes(states),
            }
            self.step += 1
        with torch.no_grad():
            for _ in range(2):
                self.called(model, given(self.batch(seed)))
                self.step += 1
        return model

    def leave(self, model):
        """The results and the checkpoints, in the current directory."""
        name = f"{self.form}-{self.rank}"
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        state = model.state_dict()
        for key, value in state.items():
            digest.update(key.encode() + whole(value.detach()).numpy().tobytes())
        torch.save(state, f"{name}.pt")
        torch.save(self.optimizer.state_dict(), f"{name}-optimizer.pt")
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        torch.save(full, f"{name}-full.pt")
        checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{self.form}-parts")
        before = [local(one).clone() for one in state.values()]
        again = {"model": copy.copy(state)}
        checkpoint.load(again, checkpoint_id=f"{self.form}-parts")
        same = all(torch.equal(local(one), old) for one, old in zip(again["model"].values(), before, strict=True))
        said = {
            "losses": self.losses,
            "digest": digest.hexdigest(),
            "class": type(model).__name__,
            "attributes": sorted(name for name in vars(model) if "api_state_key" not in name),  # its name has a uuid
            "loads_again": same,
            "calls": self.calls,
            "bytes": self.bytes,
        }
        pathlib.Path(f"{name}.json").write_text(json.dumps(said, indent=1))
        if self.rank == 0:
            print(f"{self.form}: {self.losses[-1]}, {digest.hexdigest()}")


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shapes(tensor):
    return [list(local(tensor).shape), list(tensor.shape) if isinstance(tensor, DTensor) else None]


def local_bytes(tensors):
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# ---------------------------------------------------------------------------------------------------------- forms


def fsdp(rank):
    """FSDP2: the blocks and the model; shards of unequal size (an odd width)."""
    return rank.train(shard_all(Net(inner=17), rank.mesh), optimizer=partial(torch.optim.SGD, momentum=0.9))


def accumulating(rank):
    """FSDP2 with three backward passes in a step, and gradients reduced in the last."""
    return rank.train(shard_all(Net(), rank.mesh), calls=3)


def keeping(rank):
    """FSDP2 on the whole model, which keeps the weights between steps."""
    return rank.train(fully_shard(Net(), mesh=rank.mesh), keep=True)


def only_parts(rank):
    """FSDP2 on the blocks, not on the model around them."""
    model = Net()
    fully_shard(model.first, mesh=rank.mesh)
    fully_shard(model.second, mesh=rank.mesh)
    return rank.train(model)


def tensor_parallel(rank):
    """Layers split by columns, then by rows; ordinary tensors go in and come out, the same on both ranks."""
    return rank.train(split_layers(Net(), rank.mesh, RowwiseParallel), alike=True)


def distributed_tensors(rank):
    """The same with DTensors as input and output."""
    return rank.train(
        split_layers(Net(), rank.mesh, lambda: RowwiseParallel(output_layouts=Replicate(), use_local_output=False)),
        given=lambda rows: distribute_tensor(rows, rank.mesh, [Replicate()]),
    )


def sharded_rows(rank):
    """A model of replicated DTensors that is given a batch sharded by rows, and returns one."""
    model = Net()
    for module in list(model.modules()):
        for key, parameter in list(module._parameters.items()):
            setattr(module, key, nn.Parameter(distribute_tensor(parameter.detach(), rank.mesh, [Replicate()])))
    return rank.train(model, given=lambda rows: distribute_tensor(rows, rank.mesh, [Shard(0)]))


FORMS = [fsdp, accumulating, keeping, only_parts, tensor_parallel, distributed_tensors, sharded_rows]


def run(form, rank, store):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = random.Random(rank)
    uuid.uuid4 = lambda: uuid.UUID(int=numbers.getrandbits(128))  # the name that a checkpoint has for itself
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    one = Rank(form.__name__, rank)
    one.leave(form(one))
    dist.barrier()
    dist.destroy_process_group()


def main():
    wanted = sys.argv[1:]
    for form in FORMS:
        if wanted and form.__name__ not in wanted:
            continue
        store = os.path.abspath(f"store-{form.__name__}")
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if not child:
                run(form, rank, store)
                return
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        pathlib.Path(store).unlink(missing_ok=True)
        if any(statuses):
            sys.exit(f"{form.__name__}: {statuses}")


main()
