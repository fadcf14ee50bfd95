"""Training loops that count their own steps, each in a forked child, which the tracer records as a separate process.

Prints process ids and counts of the children as JSON. The counts do not depend on dpmon: a hook on the model counts
calls, and the loop counts everything else.
"""

import atexit
import contextlib
import copy
import gc
import json
import os
import sys
import threading
import warnings

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes a second
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

loops = {}
# Python 3.12 warns of what may go wrong in a child of a process with threads; torch.jit is deprecated.
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", message=".*CUDA.*not available.*")
warnings.filterwarnings("ignore", message=".*torch.cpu.amp.autocast.*")  # of checkpoint in torch 2.4
warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated.*")
warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0.*")


def loop(function):
    loops[function.__name__] = function
    return function


class Count:
    """Counts of a loop. A step ends where the loop calls `end`, or at the next batch of a loader."""

    def __init__(self):
        self.steps = []
        self.calls = []
        self.learns = 0
        self.sums = False  # whether each call of a step takes rows of its own
        self.busy = False  # a backward pass may recompute calls that have been counted
        self.new()

    def new(self):
        self.now = {"calls": 0, "rows": [], "phases": [], "loaded": False}

    def did(self, phase):
        if phase not in self.now["phases"]:
            self.now["phases"].append(phase)

    def hook(self, module, args, kwargs):
        if self.busy:
            return
        training = getattr(module, "_orig_mod", module).training  # torch 2.4 leaves the flag of a compiled model
        learns = training or torch.is_grad_enabled()
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        self.calls.append([type(module).__name__, training, torch.is_grad_enabled()])
        self.now["calls"] += 1
        self.now["rows"].append([len(first), learns])
        self.did("forward")

    def watch(self, *modules):
        for module in modules:
            module.register_forward_pre_hook(self.hook, with_kwargs=True)
        return modules[0] if len(modules) == 1 else modules

    def back(self, loss):
        self.busy = True
        loss.backward()
        self.busy = False
        self.did("backward")

    def gradients(self, *args, **options):
        found = torch.autograd.grad(*args, **options)
        self.did("backward")
        return found

    def step(self, optimizer, closure=None, *, ends=True):
        optimizer.step(closure) if closure else optimizer.step()
        self.did("optimizer")
        if ends:
            self.end()

    def end(self):
        """End the step, if it has a call."""
        if not self.now["calls"]:
            return
        rows = [count for count, learns in self.now["rows"] if learns] or [count for count, _ in self.now["rows"]]
        self.steps.append([sum(rows) if self.sums else max(rows), sorted(self.now["phases"]), self.now["calls"]])
        self.new()

    def batches(self, loader, end=True):
        """Yield the batches of a loader; each begins a step. `end`: the end of the loader ends the last step."""
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                if end:
                    self.end()
                return
            self.end()
            self.did("data")
            yield batch


class Net(nn.Module):
    def __init__(self, inputs=4, outputs=1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, x):
        return self.layers(x)


class Other(Net):
    pass


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x, state):
        return self.cell(x, state)


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.001)


def loader(rows=50, batch=20, **options):
    return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), batch_size=batch, **options)


def data(rows=12):
    return torch.randn(rows, 4), torch.randn(rows, 1)


def learn(count, model, optimizer, x, y, *, ends=True):
    """Run a training step; without a loader it ends with the optimizer."""
    optimizer.zero_grad()
    count.back((model(x) - y).pow(2).mean())
    count.step(optimizer, ends=ends)


def look(count, model, x, *, ends=True):
    """Make a call of an evaluation; without a loader it is a separate step."""
    was = model.training
    model.eval()
    with torch.no_grad():
        model(x)
    model.train(was)
    if ends:
        count.end()


# ------------------------------------------------------------------------------------------ many calls a step


def unrolled(count, model, length):
    state = torch.zeros(6, 4)
    for _ in range(length):
        state = model(torch.randn(6, 4), state)
    return state.pow(2).mean()


@loop
def recurrent(count):
    model = count.watch(Cell())
    optimizer = sgd(model)
    for length in (300, 200, 300, 90, 150):
        count.back(unrolled(count, model, length))
        count.step(optimizer)


@loop
def recurrent_from_a_loader(count):
    model = count.watch(Cell())
    optimizer = sgd(model)
    for _ in count.batches(loader()):
        count.back(unrolled(count, model, 150))
        count.step(optimizer, ends=False)


@loop
def episodes(count):
    """Reinforcement learning: the policy is called a row at a time, and learns when the episode is over."""
    policy = count.watch(Net())
    optimizer = sgd(policy)
    for length in (5, 130, 70, 3, 1, 260, 64, 65, 66, 12):
        count.back(sum(policy(torch.randn(1, 4)).sum() for _ in range(length)))
        count.step(optimizer)


@loop
def episodes_before_any_optimizer(count):
    """The optimizer is made when the first episode has been played."""
    policy = count.watch(Net())
    optimizer = None
    for length in (40, 20, 50):
        loss = sum(policy(torch.randn(1, 4)).sum() for _ in range(length))
        optimizer = optimizer or sgd(policy)
        count.back(loss)
        count.step(optimizer)


@loop
def rollouts_in_training_mode(count):
    """As in PPO: calls that collect data without gradients, but in training mode, belong to the step."""
    policy = count.watch(Net())
    optimizer = sgd(policy)
    for _ in range(6):
        with torch.no_grad():
            for _ in range(100):
                policy(torch.randn(2, 4))
        for _ in range(3):
            learn(count, policy, optimizer, *data(32))


@loop
def rollouts_in_eval_mode(count):
    """With eval(), each such call is an evaluation."""
    policy = count.watch(Net())
    optimizer = sgd(policy)
    for _ in range(4):
        for _ in range(100):
            look(count, policy, torch.randn(2, 4))
        for _ in range(3):
            learn(count, policy, optimizer, *data(32))


@loop
def a_target_network(count):
    """As in DQN: acts a few times, then learns from the output of another network."""
    model, target = count.watch(Net(), Other())
    target.eval()
    optimizer = sgd(model)
    for number in range(40):
        for _ in range(4):
            with torch.no_grad():
                model(torch.randn(1, 4))
        if number < 20:  # only collects
            continue
        x, _ = data(32)
        with torch.no_grad():
            y = target(x)
        learn(count, model, optimizer, x, y)
        if number % 10 == 0:
            target.load_state_dict(model.state_dict())


@loop
def another_policy_plays(count):
    """As in PPO: the calls of the old policy are a part of the first step that learns from them."""
    policy, old = count.watch(Net(), Other())
    old.eval()
    optimizer = sgd(policy)
    for _ in range(4):
        with torch.no_grad():
            for _ in range(120):
                old(torch.randn(1, 4))
        for _ in range(5):
            learn(count, policy, optimizer, *data(64))
        old.load_state_dict(policy.state_dict())


# ------------------------------------------------------------------------------------------ no optimizer


@loop
def inference(count):
    model = count.watch(Net())
    for rows in range(1, 201):
        look(count, model, torch.randn(rows, 4))


@loop
def inference_with_an_optimizer_made(count):
    model = count.watch(Net())
    sgd(model)
    for rows in range(1, 101):
        look(count, model, torch.randn(rows, 4))


@loop
def inference_from_a_loader(count):
    model = count.watch(Net()).eval()
    for x, _ in count.batches(loader(rows=400, batch=3)):
        look(count, model, x, ends=False)


@loop
def by_hand(count):
    """Gradient descent without an optimizer."""
    model = count.watch(Net())
    for _ in range(200):
        x, y = data()
        model.zero_grad()
        count.back((model(x) - y).pow(2).mean())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        count.end()


@loop
def recurrent_by_hand(count):
    """Hundreds of calls for each backward pass."""
    model = count.watch(Cell())
    for length in (100, 30, 300, 64, 65):
        count.back(unrolled(count, model, length))
        count.end()


@loop
def by_hand_after_an_optimizer(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(10):
        learn(count, model, optimizer, *data())
    del optimizer
    gc.collect()
    for _ in range(100):
        count.back(model(data()[0]).mean())
        count.end()


@loop
def calls_with_gradients_and_no_more(count):
    """An evaluation that forgets no_grad() and eval()."""
    model = count.watch(Net())
    for _ in range(100):
        model(torch.randn(3, 4))
        count.end()


@loop
def two_models_that_only_infer(count):
    first, second = count.watch(Net(), Other())
    for _ in range(100):
        look(count, first, torch.randn(3, 4), ends=False)
        look(count, second, torch.randn(3, 4))


@loop
def by_hand_with_two_calls(count):
    """Computes gradients of two calls at a time."""
    model = count.watch(Net())
    for _ in range(100):
        (x, y), (z, _) = data(), data(5)
        loss = (model(x) - y).pow(2).mean() + model(z).mean()
        gradients = count.gradients(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.01 * gradient
        count.end()


@loop
def by_hand_with_an_evaluation_between(count):
    model = count.watch(Net())
    for number in range(30):
        count.back(model(data()[0]).mean())
        count.end()
        if number % 10 == 9:
            for _ in range(3):
                look(count, model, torch.randn(7, 4))


# ------------------------------------------------------------------------------------------ evaluation


@loop
def looks_before_anything_is_known(count):
    model = count.watch(Net())
    for _ in range(70):
        look(count, model, torch.randn(5, 4))
    optimizer = sgd(model)
    for _ in range(10):
        learn(count, model, optimizer, *data())


@loop
def a_look_before_each_step(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(10):
        look(count, model, torch.randn(5, 4))
        learn(count, model, optimizer, *data())


@loop
def a_look_after_each_step_of_a_loader(count):
    """It uses the same batch, so it is part of the step."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for x, y in count.batches(loader()):
        learn(count, model, optimizer, x, y, ends=False)
        look(count, model, x[:3], ends=False)


@loop
def a_sanity_check_first(count):
    """As Lightning does it: two batches of the evaluation before anything else."""
    model = count.watch(Net())
    held_out = loader(rows=30, batch=10)
    for number, (x, _) in enumerate(count.batches(held_out)):
        look(count, model, x, ends=False)
        if number == 1:
            break
    count.end()
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in count.batches(loader()):
            learn(count, model, optimizer, x, y, ends=False)
        for x, _ in count.batches(held_out):
            look(count, model, x, ends=False)


@loop
def evaluation_in_the_middle_of_an_epoch(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(2):
        for number, (x, y) in enumerate(count.batches(loader(rows=60, batch=10))):
            learn(count, model, optimizer, x, y, ends=False)
            if number % 3 == 2:
                for z, _ in count.batches(loader(rows=14, batch=7)):
                    look(count, model, z, ends=False)


@loop
def generation_after_each_epoch(count):
    """Token by token, as an evaluation without a loader."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in count.batches(loader()):
            learn(count, model, optimizer, x, y, ends=False)
        for _ in range(100):
            look(count, model, torch.randn(1, 4))


@loop
def with_and_without_a_loader(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in count.batches(loader()):
            learn(count, model, optimizer, x, y, ends=False)
        for _ in range(10):
            learn(count, model, optimizer, *data())
        for _ in range(3):
            look(count, model, torch.randn(5, 4))


@loop
def evaluation_of_the_bare_model(count):
    """Beside its DataParallel, without a loader."""
    model = count.watch(Net())
    wrapper = nn.DataParallel(model)
    optimizer = sgd(wrapper)
    for _ in range(3):
        for _ in range(4):
            look(count, model, torch.randn(5, 4))
        for _ in range(6):
            learn(count, wrapper, optimizer, *data())


@loop
def evaluation_of_the_bare_model_from_a_loader(count):
    model = count.watch(Net())
    wrapper = nn.DataParallel(model)
    optimizer = sgd(wrapper)
    for _ in range(2):
        for x, y in count.batches(loader()):
            learn(count, wrapper, optimizer, x, y, ends=False)
        for x, _ in count.batches(loader(rows=20, batch=10)):
            look(count, wrapper.module, x, ends=False)


@loop
def evaluation_of_the_average(count):
    """A copy of the model that follows it, and is evaluated now and then."""
    model, average = count.watch(Net(), Other())
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in count.batches(loader()):
            learn(count, model, optimizer, x, y, ends=False)
            with torch.no_grad():
                for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
        for x, _ in count.batches(loader(rows=20, batch=10)):
            look(count, average, x, ends=False)


@loop
def another_model_is_evaluated_last(count):
    """A saved model is loaded and tested without a loader or an optimizer."""
    model = count.watch(Net())
    for _ in range(20):
        count.back(model(data()[0]).mean())
        count.end()
    best = count.watch(Other())
    for _ in range(9):
        look(count, best, torch.randn(7, 4))


@loop
def another_model_is_evaluated_after_an_optimizer(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(20):
        learn(count, model, optimizer, *data())
    best, worst = count.watch(Other(), Cell())
    worst.eval()
    for _ in range(9):
        look(count, best, torch.randn(7, 4), ends=False)
        with torch.no_grad():
            worst(torch.randn(5, 4), torch.randn(5, 4))
        count.end()


@loop
def another_model_is_evaluated_between_epochs(count):
    model, average = count.watch(Net(), Other())
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in count.batches(loader()):
            learn(count, model, optimizer, x, y, ends=False)
        for _ in range(5):
            look(count, average, torch.randn(7, 4))


@loop
def a_teacher(count):
    teacher, student = count.watch(Other(), Net())
    teacher.eval()
    optimizer = sgd(student)
    for _ in range(10):
        x, _ = data()
        look(count, teacher, x, ends=False)
        learn(count, student, optimizer, x, data()[1])


@loop
def a_teacher_from_a_loader(count):
    teacher, student = count.watch(Other(), Net())
    optimizer = sgd(student)
    for x, y in count.batches(loader()):
        look(count, teacher, x, ends=False)
        learn(count, student, optimizer, x, y, ends=False)


# ------------------------------------------------------------------------------------------ several optimizers


@loop
def a_second_model_later(count):
    first, second = count.watch(Net(), Other())
    optimizer = sgd(first)
    for _ in range(50):
        learn(count, first, optimizer, *data())
    optimizer = sgd(second)
    for _ in range(101):
        learn(count, second, optimizer, *data())


@loop
def a_second_optimizer_beside_the_first(count):
    """Both are alive from the beginning; one is used after the other."""
    first, second = count.watch(Net(), Other())
    one, two = sgd(first), sgd(second)
    for model, optimizer in ((first, one), (second, two)):
        for _ in range(3):
            learn(count, model, optimizer, *data())


@loop
def three_models_one_after_another(count):
    """Each learns and is evaluated; the last optimizer is deleted; the first model goes on learning."""
    first, second, third = count.watch(Net(), Other(), Cell())
    one, two = sgd(first), sgd(second)
    for model, optimizer in ((first, one), (second, two)):
        for _ in range(5):
            learn(count, model, optimizer, *data())
        for _ in range(5):
            look(count, model, torch.randn(5, 4))
    three = sgd(third)
    for _ in range(5):
        count.back(unrolled(count, third, 80))
        count.step(three)
    del three
    for _ in range(70):
        look(count, first, torch.randn(5, 4))
    for _ in range(5):
        learn(count, first, one, *data())


@loop
def an_optimizer_an_epoch(count):
    model = count.watch(Net())
    for _ in range(5):
        optimizer = sgd(model)
        for _ in range(7):
            learn(count, model, optimizer, *data())


def judge(count, maker, critic, one, rows):
    with torch.no_grad():
        fake = maker(torch.randn(rows, 4))
    one.zero_grad()
    count.back(critic(fake).mean() - critic(torch.randn(rows, 4)).mean())
    count.step(one, ends=False)


def make(count, maker, critic, two, rows):
    two.zero_grad()
    count.back(-critic(maker(torch.randn(rows, 4))).mean())
    count.step(two, ends=False)


@loop
def adversaries(count):
    maker, critic = count.watch(Net(4, 4), Other())
    one, two = sgd(critic), sgd(maker)
    for _ in range(8):
        judge(count, maker, critic, one, 6)
        make(count, maker, critic, two, 6)
        count.end()


@loop
def adversaries_from_a_loader(count):
    """The generator learns only in every third batch."""
    maker, critic = count.watch(Net(4, 4), Other())
    one, two = sgd(critic), sgd(maker)
    for number, (x, _) in enumerate(count.batches(loader(rows=90, batch=10))):
        judge(count, maker, critic, one, len(x))
        if number % 3 == 2:
            make(count, maker, critic, two, len(x))


@loop
def a_critic_that_learns_more_often(count):
    """Each step of the critic's optimizer ends a step; that of the generator is part of the next one."""
    maker, critic = count.watch(Net(4, 4), Other())
    one, two = sgd(critic), sgd(maker)
    for _ in range(5):
        for _ in range(3):
            judge(count, maker, critic, one, 6)
            count.end()
        make(count, maker, critic, two, 6)
    count.end()


@loop
def an_ensemble(count):
    """All members are called, and then all their optimizers step."""
    members = count.watch(Net(), Other(), Net())
    optimizers = [sgd(member) for member in members]
    for _ in range(6):
        x, y = data()
        count.back(sum((member(x) - y).pow(2).mean() for member in members))
        for optimizer in optimizers:
            count.step(optimizer, ends=False)
        count.end()


# ------------------------------------------------------------------------------------------ what an optimizer is given


@loop
def accumulation(count):
    count.sums = True
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(6):
        for _ in range(5):
            count.back(model(data()[0]).mean())
        count.step(optimizer)
        optimizer.zero_grad()


@loop
def accumulation_from_a_loader(count):
    """Each batch is a step; every third one has a step of the optimizer."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for number, (x, _) in enumerate(count.batches(loader(rows=90, batch=10)), 1):
        count.back(model(x).mean())
        if number % 3 == 0:
            count.step(optimizer, ends=False)


def closed(count, model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        count.back(loss)
        return loss

    return closure


@loop
def a_search_along_a_line(count):
    model = count.watch(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    for _ in range(5):
        count.step(optimizer, closed(count, model, optimizer, *data()))


@loop
def a_search_along_a_line_at_last(count):
    """As for physics-informed networks: after another optimizer."""
    model = count.watch(Net())
    optimizer = torch.optim.Adam(model.parameters())
    x, y = data()
    for _ in range(30):
        learn(count, model, optimizer, x, y)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    for _ in range(7):
        count.step(optimizer, closed(count, model, optimizer, x, y))


@loop
def a_search_along_a_line_from_a_loader(count):
    model = count.watch(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for x, y in count.batches(loader()):
        count.step(optimizer, closed(count, model, optimizer, x, y), ends=False)


@loop
def a_closure(count):
    """As Lightning does it: forward and backward within the optimizer's step."""
    model = count.watch(Net())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(10):
        count.step(optimizer, closed(count, model, optimizer, *data()))


@loop
def sharpness(count):
    """As in SAM: the gradient is taken twice, and the second counts. It looks like accumulation (docs/tracing.md)."""
    count.sums = True
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(8):
        x, y = data()
        count.back((model(x) - y).pow(2).mean())
        with torch.no_grad():
            moves = [0.01 * p.grad for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p += move
        optimizer.zero_grad()
        count.back((model(x) - y).pow(2).mean())
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p -= move
        count.step(optimizer)


def scaled(count, optimizer, scaler, loss):
    optimizer.zero_grad()
    count.back(scaler.scale(loss))
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:  # else the scaler skipped the optimizer
        count.did("optimizer")
        return True
    return False


@loop
def mixed_precision(count):
    """In the third step, an overflow skips the optimizer, so its call belongs to the next step."""
    count.sums = True
    model = count.watch(Net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = 0
    for number in range(8):
        x, y = data()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) - y).pow(2).mean()
        if scaled(count, optimizer, scaler, loss * (float("inf") if number == 2 else 1.0)):
            count.end()
        else:
            skipped += 1
    assert skipped == 1


@loop
def mixed_precision_from_a_loader(count):
    model = count.watch(Net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, (x, y) in enumerate(count.batches(loader(rows=60, batch=10))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) - y).pow(2).mean()
        scaled(count, optimizer, scaler, loss * (float("inf") if number == 2 else 1.0))


@loop
def steps_in_the_backward_pass(count):
    """Each parameter has its own optimizer, which steps as soon as the gradient is ready."""
    model = count.watch(Net())
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()
        count.did("optimizer")

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(10):
        count.back(model(data()[0]).mean())
        count.end()


# ------------------------------------------------------------------------------------------ where batches come from


@loop
def loaders_side_by_side(count):
    """Three are read together; the step begins with the first."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for (x, y), (z, _), _ in count.batches(
        zip(loader(rows=60, batch=10), loader(rows=60, batch=10), loader(rows=60, batch=10), strict=True)
    ):
        optimizer.zero_grad()
        count.back((model(x) - y).pow(2).mean() + model(z).mean())
        count.step(optimizer, ends=False)


@loop
def a_loader_within_another_ones_step(count):
    """Unlabelled batches beside labelled ones; their loader starts again at its end."""
    model = count.watch(Net())
    optimizer = sgd(model)
    more = iter(loader(rows=60, batch=20))
    for x, y in count.batches(loader(rows=100, batch=10)):
        try:
            z, _ = next(more)
        except StopIteration:
            more = iter(loader(rows=60, batch=20))
            z, _ = next(more)
        optimizer.zero_grad()
        count.back((model(x) - y).pow(2).mean() + model(z).mean())
        count.step(optimizer, ends=False)


@loop
def one_batch_again_and_again(count):
    """The loader delivers one batch."""
    model = count.watch(Net())
    optimizer = sgd(model)
    x, y = next(iter(loader()))
    count.did("data")
    for _ in range(200):
        learn(count, model, optimizer, x, y)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(37, 4))


@loop
def a_stream(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(3):
        for x in count.batches(DataLoader(Stream(), batch_size=5)):
            learn(count, model, optimizer, x, torch.zeros(len(x), 1), ends=False)


@loop
def a_stream_that_never_ends(count):
    """Calls next() on a loader that starts again at its end."""
    model = count.watch(Net())
    optimizer = sgd(model)
    batches = iter(())
    for _ in range(30):
        try:
            batch = next(batches)
        except StopIteration:
            count.end()
            batches = iter(loader())
            batch = next(batches)
        count.end()
        count.did("data")
        learn(count, model, optimizer, *batch, ends=False)
    count.end()


@loop
def a_list_of_batches(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    batches = [data(rows) for rows in (9, 9, 9, 4)]
    for _ in range(4):
        for x, y in batches:
            learn(count, model, optimizer, x, y)


@loop
def left_early(count):
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(4):
        for number, (x, y) in enumerate(count.batches(loader())):
            learn(count, model, optimizer, x, y, ends=False)
            if number == 1:
                break
    count.end()


@loop
def a_loader_read_to_its_end_first(count):
    """The data are loaded once. The epochs go over the loaded batches, so the loader no longer counts."""
    model = count.watch(Net())
    optimizer = sgd(model)
    kept = list(loader())
    for _ in range(20):
        for x, y in kept:
            learn(count, model, optimizer, x, y)


@loop
def batches_that_are_skipped(count):
    """The loop catches an exception and goes on; a call without a backward pass is in the step of its batch."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for number, (x, y) in enumerate(count.batches(loader(rows=70, batch=10))):
        with contextlib.suppress(KeyError):
            if number == 2:
                raise KeyError("before the call")
            loss = (model(x) - y).pow(2).mean()
            if number == 4:
                raise KeyError("after the call")
            optimizer.zero_grad()
            count.back(loss)
            count.step(optimizer, ends=False)


@loop
def exceptions_without_a_loader(count):
    """A failed call belongs to the next step that ends."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for number in range(9):
        with contextlib.suppress(KeyError):
            loss = model(data()[0]).mean()
            if number in (0, 4):
                raise KeyError("after the call")
            count.back(loss)
            count.sums = number in (6, 7)  # only then, two calls of a step have a backward pass each
            if number == 6:
                raise KeyError("after the backward pass")
            count.step(optimizer)


# ------------------------------------------------------------------------------------------ how it is called


@loop
def in_a_thread(count):
    def train():
        model = count.watch(Net())
        optimizer = sgd(model)
        for _ in range(2):
            for x, y in count.batches(loader()):
                learn(count, model, optimizer, x, y, ends=False)
            for _ in range(3):
                look(count, model, torch.randn(5, 4))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


class Checkpointed(Net):
    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


@loop
def computed_again(count):
    model = count.watch(Checkpointed())
    optimizer = sgd(model)
    for _ in range(6):
        learn(count, model, optimizer, *data())


def called(count, module, x):
    """Call a module that takes no hook."""
    count.hook(module, (x,), {})
    return module(x)


@loop
def compiled(count):
    model = torch.compile(Net(), backend="eager")
    optimizer = sgd(model)
    for number in range(8):
        x, y = data()
        if number % 3 == 2:
            model.eval()
            with torch.no_grad():
                called(count, model, x)
            count.end()
            model.train()
        optimizer.zero_grad()
        count.back((called(count, model, x) - y).pow(2).mean())
        count.step(optimizer)


@loop
def scripted(count):
    module = torch.jit.script(Net())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(6):
        count.back(called(count, module, data()[0]).mean())
        count.step(optimizer)


@loop
def recorded(count):
    """Return the result of torch.jit.trace, which also calls the model; this is recorded if it checks the result."""
    module = torch.jit.trace(Net(), torch.randn(3, 4), check_trace=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(6):
        count.back(called(count, module, data()[0]).mean())
        count.step(optimizer)


@loop
def with_other_weights(count):
    model = count.watch(Net())
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(list(weights.values()), lr=0.01)
    for _ in range(6):
        x, y = data()
        optimizer.zero_grad()
        count.back((functional_call(model, weights, (x,)) - y).pow(2).mean())
        count.step(optimizer)


@loop
def gradients_of_a_function(count):
    """torch.func.grad: no backward() anywhere, and the weights are replaced."""
    model = count.watch(Net())
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x, y):
        return (functional_call(model, weights, (x,)) - y).pow(2).mean()

    for _ in range(80):
        gradients = torch.func.grad(loss)(weights, *data())
        count.did("backward")
        weights = {name: weight - 0.01 * gradients[name] for name, weight in weights.items()}
        count.end()


@loop
def learning_to_learn(count):
    """MAML: two inner steps by autograd.grad for each of three tasks, then one step of the optimizer."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(5):
        outer = 0
        for _ in range(3):
            weights = dict(model.named_parameters())
            for _ in range(2):
                x, y = data(5)
                loss = (functional_call(model, weights, (x,)) - y).pow(2).mean()
                gradients = count.gradients(loss, list(weights.values()), create_graph=True)
                pairs = zip(weights.items(), gradients, strict=True)
                weights = {name: weight - 0.1 * gradient for (name, weight), gradient in pairs}
            x, y = data(15)
            outer = outer + (functional_call(model, weights, (x,)) - y).pow(2).mean()
        optimizer.zero_grad()
        count.back(outer)
        count.step(optimizer)


@loop
def learning_to_learn_from_copies(count):
    """First-order MAML: a copy of the model with its own optimizer for each task."""
    model = Net()
    for _ in range(6):
        fast = count.watch(copy.deepcopy(model))
        optimizer = sgd(fast)
        for _ in range(4):
            learn(count, fast, optimizer, *data())
        with torch.no_grad():
            for mine, its in zip(model.parameters(), fast.parameters(), strict=True):
                mine.lerp_(its, 0.1)


@loop
def a_penalty_on_gradients(count):
    """As in WGAN-GP: gradients with respect to the inputs are part of the loss."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for _ in range(6):
        x = torch.randn(12, 4, requires_grad=True)
        out = model(x)
        (slope,) = count.gradients(out.sum(), x, create_graph=True)
        optimizer.zero_grad()
        count.back(out.mean() + (slope.norm(dim=1) - 1).pow(2).mean())
        count.step(optimizer)


@loop
def compared_with_itself(count):
    """As in SimSiam: the model is called on both views."""
    model = count.watch(Net())
    optimizer = sgd(model)
    for x, _ in count.batches(loader(rows=60, batch=10)):
        optimizer.zero_grad()
        count.back((model(x) - model(x + 0.1)).pow(2).mean())
        count.step(optimizer, ends=False)


def end():
    """End as Python does, but without cleaning up torch, which takes a second."""
    atexit._run_exitfuncs()
    os._exit(0)


def main():
    said = {}
    gc.freeze()
    for name, function in loops.items():
        read, write = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            torch.manual_seed(0)
            os.close(read)
            count = Count()
            function(count)
            count.end()
            os.write(write, json.dumps([count.steps, count.calls]).encode())
            end()
        os.close(write)
        with open(read, "rb") as pipe:
            counted = pipe.read()
        os.waitpid(pid, 0)
        said[name] = [pid, *json.loads(counted)] if counted else None
    print(json.dumps(said))


main()
