"""Training loops of many shapes, each in a forked child, which the tracer records as a separate process.

Prints process ids and results of the children as JSON.
"""

import atexit
import contextlib
import gc
import itertools
import json
import os
import sys
import time
import traceback
import warnings

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes a second
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

OURS = os.environ["OURS"]

loops = {}
# Python 3.12 warns of what may go wrong in a child of a process with threads.
warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)


def loop(function):
    loops[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self, inputs=4, outputs=1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, x):
        return self.layers(x)


class Critic(Net):
    pass


class Loss(nn.Module):
    """A module without parameters, as every loss of torch is."""

    def forward(self, out, target):
        return (out - target).pow(2).mean()


def loader(rows=100, batch=30, **options):
    return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), batch_size=batch, **options)


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


def learn(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = Loss()(model(x), y)
    loss.backward()
    optimizer.step()


@loop
def wrapped():
    """The usual loop, with DataParallel."""
    model = nn.DataParallel(Net())
    optimizer = sgd(model)
    for x, y in loader():
        learn(model, optimizer, x, y)


@loop
def bare():
    model = Net()
    optimizer = sgd(model)
    for x, y in loader():
        learn(model, optimizer, x, y)


@loop
def forward_only():
    model = Net()
    for x, _ in loader():
        model(x)


@loop
def gan():
    """Two models and two optimizers per batch: three calls of the critic, one of the generator used twice."""
    maker, critic = Net(4, 4), Critic()
    one, two = sgd(critic), sgd(maker)
    for x, _ in loader():
        fake = maker(torch.randn(len(x), 4))
        one.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean()).backward()
        one.step()
        two.zero_grad()
        (-critic(fake).mean()).backward()
        two.step()


@loop
def gan_without_a_loader():
    maker, critic = Net(4, 4), Critic()
    one, two = sgd(critic), sgd(maker)
    count = 0
    for _ in range(5):
        fake = maker(torch.randn(6, 4))
        one.zero_grad()
        critic(fake.detach()).mean().backward()
        one.step()
        two.zero_grad()
        critic(fake).mean().backward()
        two.step()
        count += 1
    return count


@loop
def three_optimizers_without_a_loader():
    models = [Net() for _ in range(3)]
    optimizers = [sgd(model) for model in models]
    count = 0
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            learn(model, optimizer, torch.randn(12, 4), torch.randn(12, 1))
        count += 1
    return count


@loop
def critic_steps_more_often():
    maker, critic = Net(), Critic(inputs=4)
    make, judge = sgd(maker), sgd(critic)
    for _ in range(3):
        for _ in range(3):
            learn(critic, judge, torch.randn(12, 4), torch.randn(12, 1))
        learn(maker, make, torch.randn(12, 4), torch.randn(12, 1))


@loop
def accumulation():
    """The optimizer steps in every second batch."""
    model = Net()
    optimizer = sgd(model)
    for number, (x, y) in enumerate(loader(rows=60, batch=10)):
        Loss()(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def one_ahead(batches):
    """As accelerate's loaders do, to know which batch is the last one when they return it."""
    batches = iter(batches)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


@loop
def fetched_one_ahead():
    """An evaluation, a sleep, a training: the last batch of each comes after the loader's end."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            for x, _ in one_ahead(loader(rows=30, batch=10)):
                model(x)
        model.train()
        time.sleep(1)
        for x, y in one_ahead(loader(rows=40, batch=10)):
            learn(model, optimizer, x, y)
        time.sleep(1)


@loop
def micro_batches_fetched_together():
    """As in transformers' Trainer: first all batches of an optimizer step, then a call and a backward pass for each."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(2):
        batches = one_ahead(loader(rows=40, batch=5))
        for number in range(3):
            for x, y in list(itertools.islice(batches, 3)):
                Loss()(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                model.eval()
                with torch.no_grad():
                    for x, _ in one_ahead(loader(rows=10, batch=5)):
                        model(x)
                model.train()


@loop
def gan_fetched_one_ahead():
    """A critic with two backward passes per batch has no second batch."""
    maker, critic = Net(4, 4), Critic()
    one, two = sgd(critic), sgd(maker)
    for x, _ in one_ahead(loader(rows=40, batch=10)):
        one.zero_grad()
        critic(x).mean().backward()
        fake = maker(torch.randn(len(x), 4))
        critic(fake.detach()).mean().backward()
        one.step()
        two.zero_grad()
        critic(fake).mean().backward()
        two.step()


@loop
def a_call_before_the_loader():
    """As if a summary or a graph of the model is made first."""
    model = Net()
    optimizer = sgd(model)
    with torch.no_grad():
        model(torch.randn(3, 4))
    time.sleep(1)
    for x, y in loader():
        learn(model, optimizer, x, y)


class Trains(nn.Module):
    """Its forward is a whole training step, as in meta-learning."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.optimizer = sgd(self.net)

    def forward(self, x):
        for _ in range(2):
            self.optimizer.zero_grad()
            self.net(x).sum().backward()
            self.optimizer.step()
        return x.sum()


@loop
def steps_within_a_call():
    model = Trains()
    for _ in range(4):
        model(torch.randn(12, 4))


@loop
def training_after_an_evaluation_without_a_loader():
    """As on ranks that receive their batches: first the bare model is evaluated, then a wrapper trains."""
    model = Net()
    wrapper = nn.Sequential(model)
    optimizer = sgd(model)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(x)
        wrapper.train()
        time.sleep(1)
        for _ in range(4):
            learn(wrapper, optimizer, x, y)


@loop
def taught_without_a_loader():
    """A teacher that only infers runs before the student that learns: one step, not two."""
    teacher, student = Critic().eval(), Net()
    optimizer = sgd(student)
    x = torch.randn(12, 4)
    for _ in range(5):
        with torch.no_grad():
            y = teacher(x)
        learn(student, optimizer, x, y)


@loop
def optimizer_only():
    model = Net()
    optimizer = sgd(model)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    for _ in range(6):
        learn(model, optimizer, x, y)


@loop
def accumulation_without_a_loader():
    model = Net()
    optimizer = sgd(model)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    for _ in range(4):
        for _ in range(3):
            Loss()(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


class Thrice(Net):
    """Calls three data-parallel networks."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.DataParallel(nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return super().forward(x)


@loop
def long_accumulation_without_a_loader():
    """Forty calls a step, each with three within it."""
    model = Thrice()
    optimizer = sgd(model)
    for _ in range(3):
        for _ in range(40):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Small(Net):
    pass


class Big(Net):
    pass


@loop
def one_model_after_another():
    """Each with a loop and an evaluation of its own; that of the second comes before its training."""
    small = Small()
    optimizer = sgd(small)
    for _ in range(10):
        for x, y in loader():
            learn(small, optimizer, x, y)
    big = Big()
    with torch.no_grad():
        for _ in range(3):
            big(torch.randn(5, 4))
    optimizer = sgd(big)
    for x, y in loader():
        learn(big, optimizer, x, y)


@loop
def calls_only():
    model = Net()
    for rows in (3, 5, 7, 9):
        with torch.no_grad():
            model(torch.randn(rows, 4))


@loop
def closure():
    """LBFGS calls the model in its step, any number of times."""
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    times = 0

    def again():
        nonlocal times
        times += 1
        optimizer.zero_grad()
        loss = Loss()(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(again)
    return times


@loop
def optimizers_that_raise():
    """No loader; the first optimizer raises in its second step, another one in its first and only step."""

    class Stops(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise ArithmeticError("the gradient is not finite")
            return super().step(closure)

    model, other = Net(), Critic()
    optimizer = Stops(model.parameters(), lr=0.01)
    spare = Stops(other.parameters(), lr=0.01)
    spare.fails = True
    for number in range(9):
        optimizer.fails = number == 1
        if number == 4:
            with contextlib.suppress(ArithmeticError):
                spare.step()
        with contextlib.suppress(ArithmeticError):
            learn(model, optimizer, torch.randn(12, 4), torch.randn(12, 1))


@loop
def optimizers_within_each_other():
    """No loader; one optimizer steps another one, which raises once."""

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            with contextlib.suppress(ArithmeticError):
                inner.step()
            return super().step(closure)

    class Inner(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if self.steps == 3:
                raise ArithmeticError("once")
            return super().step(closure)

    model = Net()
    inner, outer = Inner(model.parameters(), lr=0.01), Outer(model.parameters(), lr=0.01)
    for _ in range(6):
        learn(model, outer, torch.randn(12, 4), torch.randn(12, 1))


@loop
def evaluation_between():
    model = Net()
    optimizer = sgd(model)
    train, held_out = loader(), loader(rows=20, batch=10)
    for _ in range(2):
        model.train()
        for x, y in train:
            learn(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            for x, _ in held_out:
                model(x)


@loop
def left_early():
    """break, next() by hand until StopIteration, an exception that the loop survives, a loader that is thrown away."""
    model = Net()
    optimizer = sgd(model)
    for number, (x, y) in enumerate(loader()):
        learn(model, optimizer, x, y)
        if number == 1:
            break
    batches = iter(loader(rows=20, batch=10))
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            break
        learn(model, optimizer, x, y)
    iter(loader())
    next(iter(loader()))
    for x, _ in loader(rows=20, batch=10):
        try:
            if len(x) == 10:
                raise KeyError("a bad batch")
        except KeyError:
            continue
    for x, y in loader(rows=20, batch=10):
        learn(model, optimizer, x, y)


@loop
def checkpoints():
    """Recomputation in the backward pass is not a call."""
    x = torch.randn(6, 4)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Net(4, 4) for _ in range(3))

        def forward(self, x, reentrant):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Deep()
    optimizer = sgd(model)
    for reentrant in (False, True):
        for _ in range(2):
            optimizer.zero_grad()
            model(x.requires_grad_(), reentrant).sum().backward()
            optimizer.step()


@loop
def checkpointed_as_a_whole():
    model = Net()
    optimizer = sgd(model)
    x = torch.randn(6, 4, requires_grad=True)
    for reentrant in (False, True):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        optimizer.step()


@loop
def a_second_optimizer():
    """As for fine-tuning: another optimizer from here on, and no loader."""
    model = Net()
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    for count in (5, 80):
        optimizer = sgd(model)
        for _ in range(count):
            learn(model, optimizer, x, y)


class Later(nn.Module):
    """A class unrelated to Net."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


@loop
def another_model_later():
    """It trains after many steps of the first one, which is no longer called."""
    for model in (Net(), Later()):
        for x, y in loader(rows=400, batch=10):
            learn(model, sgd(model), x, y)


@loop
def another_model_later_without_a_loader():
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    for model in (Net(), Later()):
        optimizer = sgd(model)
        for _ in range(100):
            learn(model, optimizer, x, y)


@loop
def another_model_later_that_is_only_called():
    with torch.no_grad():
        for model in (Net(), Later()):
            for _ in range(100):
                model(torch.randn(12, 4))


class Counted:
    """Calls modules, and counts the calls by class and wrapper."""

    def __init__(self):
        self.calls = {}

    def __call__(self, module, *args):
        wrapped = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        via = type(module).__name__ if wrapped else None
        name = f"{type(module.module if wrapped else module).__name__} {via}"
        self.calls[name] = self.calls.get(name, 0) + 1
        return module(*args)


def train(counted, model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        Loss()(counted(model, x), y).backward()
        optimizer.step()


def left_early_batches():
    """Sixty batches of a loader that never ends. Its end would be a sign that another loop may follow."""
    return itertools.islice(loader(rows=400, batch=5), 60)


@loop
def the_model_beside_its_wrapper():
    counted, model = Counted(), Net()
    wrapper = nn.DataParallel(model)
    train(counted, wrapper, sgd(wrapper), left_early_batches())
    with torch.no_grad():
        for _ in range(5):
            counted(model, torch.randn(6, 4))
    return counted.calls


@loop
def the_model_beside_its_wrapper_from_a_loader():
    counted, model = Counted(), Net()
    wrapper = nn.DataParallel(model)
    optimizer, examples = sgd(wrapper), loader(rows=30, batch=10)
    for _ in range(3):
        train(counted, wrapper, optimizer, left_early_batches())
        with torch.no_grad():
            for x, _ in examples:
                counted(wrapper.module, x)
    return counted.calls


@loop
def the_model_beside_its_ranks_wrapper():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    counted, model = Counted(), Net()
    wrapper = nn.parallel.DistributedDataParallel(model)
    train(counted, wrapper, sgd(wrapper), left_early_batches())
    with torch.no_grad():
        for _ in range(5):
            counted(wrapper.module, torch.randn(6, 4))
    distributed.destroy_process_group()
    return counted.calls


@loop
def the_model_beside_its_average():
    counted, model = Counted(), Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    train(counted, model, sgd(model), left_early_batches())
    with torch.no_grad():
        for _ in range(5):
            average.update_parameters(model)
            counted(average, torch.randn(6, 4))
    for _ in range(5):
        counted(average.module, torch.randn(6, 4))
    return counted.calls


@loop
def a_part_by_itself():
    """An autoencoder; only one half of it is used after the training."""
    counted = Counted()
    model = nn.Sequential(Net(4, 2), Critic(2, 1))
    train(counted, model, sgd(model), left_early_batches())
    with torch.no_grad():
        for _ in range(5):
            counted(model[0], torch.randn(6, 4))
    return counted.calls


@loop
def made_and_called_after_the_training():
    counted, model = Counted(), Net()
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    train(counted, model, sgd(model), [(x, y)] * 60)
    later = Later()
    for _ in range(5):
        counted(later, x)
    return counted.calls


@loop
def made_in_the_middle_and_called_later():
    counted, model = Counted(), Net()
    optimizer = sgd(model)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    train(counted, model, optimizer, [(x, y)] * 60)
    later = Later()
    train(counted, model, optimizer, [(x, y)] * 60)
    for _ in range(5):
        counted(later, x)
    return counted.calls


@loop
def a_layer_by_itself():
    """Called between two trainings, so that the tracer finds it at some time."""
    counted, model = Counted(), nn.Sequential(Net(), nn.Linear(1, 1))
    optimizer = sgd(model)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    train(counted, model, optimizer, [(x, y)] * 100)
    for _ in range(600):
        counted(model[1], torch.randn(3, 1))
        train(counted, model, optimizer, [(x, y)])
    return {name.split()[0]: count for name, count in counted.calls.items()}


@loop
def given_its_weights():
    """MAML: two inner steps per step; the weights are arguments and become plain tensors."""
    from functorch import make_functional

    warnings.filterwarnings("ignore", category=FutureWarning)
    model, weights = make_functional(Net())
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for _ in range(4):
        inner = weights
        for _ in range(2):
            loss = model(inner, torch.randn(10, 4)).pow(2).mean()
            gradients = torch.autograd.grad(loss, inner, create_graph=True)
            inner = [weight - 0.1 * gradient for weight, gradient in zip(inner, gradients, strict=True)]
        optimizer.zero_grad()
        model(inner, torch.randn(10, 4)).pow(2).mean().backward()
        optimizer.step()


@loop
def backward_across_rpc():
    import tempfile

    from torch.distributed import autograd, rpc

    warnings.filterwarnings("ignore", message=".*ProcessGroupGloo.*")  # torch's own use of it
    with tempfile.NamedTemporaryFile() as store:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store.name}")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        model = Net()
        with autograd.context() as context:
            autograd.backward(context, [model(torch.randn(8, 4)).sum()])
            found = len(autograd.get_gradients(context))
        rpc.shutdown()
    return found


@loop
def forwards_called_directly():
    """Each layer trains separately in its own method, which calls forward() without Module.__call__."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x = torch.randn(12, 4)
    for layer in layers:
        optimizer = sgd(layer)
        for _ in range(2):
            optimizer.zero_grad()
            layer.forward(x).pow(2).mean().backward()
            optimizer.step()


@loop
def two_loaders():
    model = Net()
    optimizer = sgd(model)
    for (x, y), _ in zip(loader(), loader(rows=200, batch=60), strict=True):
        learn(model, optimizer, x, y)


@loop
def fetched_by_a_thread():
    """A thread reads ahead, as prefetching loaders do."""
    import queue
    import threading

    batches = queue.Queue(2)

    def fetch():
        for batch in loader():
            batches.put(batch)
        batches.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    model = Net()
    optimizer = sgd(model)
    while (batch := batches.get()) is not None:
        learn(model, optimizer, *batch)
    thread.join()


@loop
def trains_in_a_thread():
    import threading

    thread = threading.Thread(target=bare)
    thread.start()
    thread.join()


@loop
def a_thread_beside_it():
    """A thread evaluates another model repeatedly during the training."""
    import threading

    over, started = threading.Event(), threading.Event()
    model = Net()
    optimizer = sgd(model)

    def evaluate():
        other = Critic()
        for x, _ in loader(rows=1000, batch=5):
            with torch.no_grad():
                other(x)
            started.set()
            if over.is_set():
                return

    thread = threading.Thread(target=evaluate)
    for number, (x, y) in enumerate(loader()):
        learn(model, optimizer, x, y)
        if number == 0:
            thread.start()
            started.wait()
    over.set()
    thread.join()


@loop
def failing_parts():
    """A dataset, a backward pass and an optimizer that raise; the loop goes on."""

    class Bad(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 2:
                raise OSError("cannot be read")
            return torch.randn(4), torch.randn(1)

    class Stubborn(torch.optim.SGD):
        times = 0

        def step(self, closure=None):
            Stubborn.times += 1
            if Stubborn.times == 2:
                raise RuntimeError("not now")
            return super().step(closure)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fail):
            ctx.fail = fail
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.fail:
                raise ZeroDivisionError("in backward")
            return grad, None

    model = Net()
    optimizer = Stubborn(model.parameters(), lr=0.01)
    batches = iter(DataLoader(Bad(), batch_size=1))
    told = []
    for number in range(6):
        try:
            x, _ = next(batches)
            optimizer.zero_grad()
            Backward.apply(model(x), number == 4).sum().backward()
            optimizer.step()
        except (OSError, RuntimeError, ZeroDivisionError) as error:
            frames, part = [], error.__traceback__
            while part is not None:
                frames.append(part.tb_frame.f_code.co_filename)
                part = part.tb_next
            told.append([type(error).__name__, sum(frame.startswith(OURS) for frame in frames)])
    return told


class Rows(torch.utils.data.Dataset):
    """Runs its own model for every row, like a dataset that computes embeddings."""

    def __init__(self):
        self.embed = nn.Linear(4, 4)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        with torch.no_grad():
            return self.embed(torch.full((4,), float(index)))


@loop
def workers():
    model = Critic()
    optimizer = sgd(model)
    for x in DataLoader(Rows(), batch_size=10, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


@loop
def model_in_the_dataset():
    """Without workers: the dataset's model is called by the training process itself, while it fetches."""
    model = Critic()
    optimizer = sgd(model)
    for x in DataLoader(Rows(), batch_size=10):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


@loop
def forks_a_child():
    """Trains, then forks a child that trains too, then goes on itself."""
    model = Net()
    optimizer = sgd(model)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    for _ in range(2):
        learn(model, optimizer, x, y)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        for _ in range(3):
            learn(model, optimizer, x, y)
        end()
    os.waitpid(pid, 0)
    for _ in range(2):
        learn(model, optimizer, x, y)
    return pid


@loop
def forks_a_child_with_a_wrapper():
    """Made before the fork, called after it."""
    model = nn.DataParallel(Net())
    model(torch.randn(6, 4))
    pid = os.fork()
    if not pid:
        model(torch.randn(6, 4))
        end()
    os.waitpid(pid, 0)
    return pid


@loop
def multiprocessing_child():
    """Ends by os._exit, after multiprocessing's own finalizers; the parent calls no model."""
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=optimizer_only)
    child.start()
    child.join()
    return child.pid


@loop
def forward_fails():
    class Fails(Net):
        def forward(self, x):
            if len(x) in (5, 10):
                raise ValueError("too few rows")
            return super().forward(x)

    told = []
    for model in (Fails(), nn.DataParallel(Fails())):
        optimizer = sgd(model)
        for x, y in loader():
            try:
                learn(model, optimizer, x, y)
            except ValueError:
                told.append(traceback.format_exc().count(OURS))
    return told


@loop
def by_hand():
    """Neither loader nor optimizer, but gradients."""
    model = Net()
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    for _ in range(10):
        model.zero_grad()
        Loss()(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad


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
            told = function()
            os.write(write, json.dumps(told).encode())
            end()
        os.close(write)
        with open(read, "rb") as pipe:
            told = pipe.read()
        _, status = os.waitpid(pid, 0)
        said[name] = [pid, status, json.loads(told) if told else "nothing"]
    print(json.dumps(said))


main()
