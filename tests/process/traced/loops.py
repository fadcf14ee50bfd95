"""Training loops of many shapes that count their own steps; what ends a step is written in docs/tracing.md."""

import contextlib
import itertools
import queue
import threading
import time
import warnings

import torch
from counted import (
    Cell,
    Later,
    Net,
    Other,
    data,
    descend,
    epoch,
    learn,
    learns,
    loader,
    look,
    looks_at,
    loop,
    made,
    mse,
    sgd,
)
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

# ------------------------------------------------------------------------------------------ many calls a step


def unrolled(count, model, length):
    state = torch.zeros(6, 4)
    for _ in range(length):
        state = model(torch.randn(6, 4), state)
    return state.pow(2).mean()


@loop
def recurrent_from_a_loader(count):
    model = count.watch(Cell())
    optimizer = sgd(model)
    for _ in count.batches(loader()):
        count.back(unrolled(count, model, 150))
        count.step(optimizer, ends=False)


# ------------------------------------------------------------------------------------------ no optimizer


@loop
def inference(count):
    model = count.watch(Net())
    for rows in range(1, 201):
        look(count, model, torch.randn(rows, 4))


@loop
def by_hand_from_a_loader(count):
    model = count.watch(Net())
    for x, y in count.batches(loader(rows=120, batch=30)):
        model.zero_grad()
        count.back(mse(model(x), y))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad


# ------------------------------------------------------------------------------------------ evaluation


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
        epoch(count, model, optimizer)
        looks_at(count, model, held_out)


@loop
def evaluation_in_the_middle_of_an_epoch(count):
    model, optimizer = made(count)
    for _ in range(2):
        for number, (x, y) in enumerate(count.batches(loader(rows=60, batch=10))):
            learn(count, model, optimizer, x, y, ends=False)
            if number % 3 == 2:
                for z, _ in count.batches(loader(rows=14, batch=7)):
                    look(count, model, z, ends=False)


@loop
def a_teacher_from_a_loader(count):
    """It sees more rows than the student, which do not count."""
    teacher, student = count.watch(Other(), Net())
    optimizer = sgd(student)
    for x, y in count.batches(loader(rows=120, batch=30)):
        look(count, teacher, torch.cat([x, x]), ends=False)
        learn(count, student, optimizer, x, y, ends=False)


# ------------------------------------------------------------------------------------------ several models


@loop
def another_model_later(count):
    """It trains after many steps of the first one, which is no longer called; nor are all modules watched then."""
    for model in count.watch(Net(), Later()):
        for x, y in count.batches(loader(rows=400, batch=10)):
            learn(count, model, sgd(model), x, y, ends=False)


def train(count, model, batches, *, ends=False):
    optimizer = sgd(model)
    for x, y in batches:
        learn(count, lambda x: count.call(model, x), optimizer, x, y, ends=ends)


def batches_of_a_loader_that_goes_on(count):
    """Sixty batches; the end of the loader would be a sign that another loop may follow."""
    return itertools.islice(count.batches(loader(rows=400, batch=5)), 60)


def call_five_times(count, model, *, ends=False):
    """Call a model after the training; the calls belong to the last step of a loader that may go on."""
    with torch.no_grad():
        for _ in range(5):
            count.call(model, torch.randn(6, 4))
            if ends:
                count.end()


@loop
def the_model_beside_its_wrapper(count):
    model = Net()
    train(count, nn.DataParallel(model), batches_of_a_loader_that_goes_on(count))
    call_five_times(count, model)


@contextlib.contextmanager
def alone_in_a_group():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@loop
def the_model_beside_its_ranks_wrapper(count):
    model = Net()
    with alone_in_a_group():
        wrapper = nn.parallel.DistributedDataParallel(model)
        optimizer = sgd(wrapper)
        for x, y in batches_of_a_loader_that_goes_on(count):
            learn(count, lambda x: count.call(wrapper, x), optimizer, x, y, ends=False)
            count.did("sync")
        call_five_times(count, model)


@loop
def the_model_beside_its_average(count):
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    train(count, model, batches_of_a_loader_that_goes_on(count))
    average.update_parameters(model)
    call_five_times(count, average)
    call_five_times(count, average.module)


@loop
def a_part_by_itself(count):
    """An autoencoder; only one half of it is used after the training."""
    model = nn.Sequential(Net(4, 2), Other(2, 1))
    train(count, model, batches_of_a_loader_that_goes_on(count))
    call_five_times(count, model[0])


@loop
def made_in_the_middle_and_called_later(count):
    model = Net()
    train(count, model, [data()] * 60, ends=True)
    later = Later()
    train(count, model, [data()] * 60, ends=True)
    call_five_times(count, later, ends=True)


@loop
def an_optimizer_an_epoch(count):
    model = count.watch(Net())
    for _ in range(5):
        optimizer = sgd(model)
        learns(count, model, optimizer, 7)


@loop
def adversaries_that_share_a_fake(count):
    """Three calls of the critic; the output of the generator's call is used twice."""
    maker, critic = count.watch(Net(4, 4), Other())
    one, two = sgd(critic), sgd(maker)
    for x, _ in count.batches(loader(rows=100, batch=30)):
        fake = maker(torch.randn(len(x), 4))
        descend(count, one, critic(fake.detach()).mean() - critic(x).mean(), ends=False)
        descend(count, two, -critic(fake).mean(), ends=False)


# ------------------------------------------------------------------------------------------ what an optimizer is given


def closed(count, model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        count.back(loss)
        return loss

    return closure


@loop
def a_search_along_a_line_from_a_loader(count):
    model = count.watch(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for x, y in count.batches(loader()):
        count.step(optimizer, closed(count, model, optimizer, x, y), ends=False)


def scaled(count, optimizer, scaler, loss, clips=None):
    optimizer.zero_grad()
    count.back(scaler.scale(loss))
    if clips is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(clips, 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:  # else the scaler skipped the optimizer
        count.did("optimizer")
        return True
    return False


@loop
def mixed_precision_from_a_loader(count):
    model = count.watch(Net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, (x, y) in enumerate(count.batches(loader(rows=60, batch=10))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model(x).float(), y)
        scaled(count, optimizer, scaler, loss * (float("inf") if number == 2 else 1.0), clips=model.parameters())


# ------------------------------------------------------------------------------------------ where batches come from


@loop
def fetched_by_a_thread(count):
    """A thread reads ahead, as prefetching loaders do."""
    batches = queue.Queue(2)

    def fetch():
        for batch in loader():
            batches.put(batch)
        batches.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    model, optimizer = made(count)
    while (batch := batches.get()) is not None:
        learn(count, model, optimizer, *batch)
    thread.join()


def one_ahead(count, loader):
    """Yield batches as accelerate's loaders do, which fetch one more, to know which one is the last."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        count.end()
        count.did("data")
        yield batch
        batch = following
    count.end()
    yield batch
    count.end()


@loop
def fetched_one_ahead(count):
    """An evaluation, a sleep, a training: the last batch of each comes after the loader's end."""
    model, optimizer = made(count)
    for turn in range(2):
        for x, _ in one_ahead(count, loader(rows=30, batch=10)):
            look(count, model, x, ends=False)
        if not turn:
            time.sleep(1)
        for x, y in one_ahead(count, loader(rows=40, batch=10)):
            learn(count, model, optimizer, x, y, ends=False)
        if not turn:
            time.sleep(1)


class Epochs(IterableDataset):
    def __iter__(self):
        for _ in range(20):
            yield from DataLoader(torch.randn(7, 4), batch_size=None)


@loop
def a_loader_within_a_loader(count):
    """The end of the inner one ends no step; the loader after it is left before its end."""
    model, optimizer = made(count)
    for batches in (DataLoader(Epochs(), batch_size=None), DataLoader(torch.randn(500, 4), batch_size=None)):
        for x in itertools.islice(count.batches(batches), 403):
            learn(count, model, optimizer, x, torch.zeros(1), ends=False)


# ------------------------------------------------------------------------------------------ how it is called


class Deep(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Net(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def computed_again(count, wrap, reentrant):
    deep = Deep(reentrant)
    model = wrap(deep)
    count.watch(*{deep, model})
    optimizer = sgd(model)
    for x, _ in count.batches(loader(rows=120, batch=30)):
        descend(count, optimizer, model(x.requires_grad_()).pow(2).mean(), ends=False)


@loop
def checkpoints(count):
    """What is computed again in the backward pass is no call."""
    computed_again(count, lambda model: model, False)


@loop
def checkpoints_reentrant(count):
    computed_again(count, lambda model: model, True)


@loop
def checkpoints_wrapped(count):
    computed_again(count, nn.DataParallel, False)


@loop
def checkpoints_wrapped_reentrant(count):
    computed_again(count, nn.DataParallel, True)


@loop
def checkpointed_as_a_whole(count):
    model, optimizer = made(count)
    x = torch.randn(6, 4, requires_grad=True)
    for reentrant in (False, True):
        descend(count, optimizer, checkpoint(model, x, use_reentrant=reentrant).sum())


def set_apart(count, model, net):
    """Call a wrapper that is in another mode than its module: `training` of a call is the flag of the module."""
    count.watch(net, model)
    optimizer = sgd(net)
    for number in range(12):
        model.train(number % 2 == 1)
        net.train(number % 2 == 0)
        if number < 8 and not isinstance(model, nn.parallel.DistributedDataParallel):
            learn(count, model, optimizer, *data())
        else:
            with torch.no_grad():
                model(data()[0])
            count.end()


@loop
def in_another_mode_than_its_wrapper(count):
    net = Net()
    set_apart(count, nn.DataParallel(net), net)


@loop
def in_another_mode_than_its_ranks_wrapper(count):
    with alone_in_a_group():
        net = Net()
        set_apart(count, nn.parallel.DistributedDataParallel(net), net)


@loop
def compiled(count):
    model = torch.compile(Net(), backend="eager")
    optimizer = sgd(model)
    for number in range(8):
        x, y = data()
        if number % 3 == 2:
            model.eval()
            with torch.no_grad():
                count.call(model, x)
            count.end()
            model.train()
        descend(count, optimizer, (count.call(model, x) - y).pow(2).mean())


def made_by_jit(count, module):
    optimizer = sgd(module)
    for _ in range(6):
        descend(count, optimizer, count.call(module, data()[0]).mean())


@loop
def scripted(count):
    made_by_jit(count, torch.jit.script(Net()))


@loop
def recorded(count):
    """torch.jit.trace calls the model, too; this is recorded if it checks the result."""
    made_by_jit(count, torch.jit.trace(Net(), torch.randn(3, 4), check_trace=False))


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
def given_its_weights(count):
    """MAML: two inner steps per step; the weights are arguments and become plain tensors, which are no samples."""
    from functorch import make_functional

    warnings.filterwarnings("ignore", category=FutureWarning)
    count.sums = True
    model, weights = make_functional(Net())
    count.watch(model.stateless_model)
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for _ in range(4):
        inner = weights
        for _ in range(2):
            loss = model(inner, torch.randn(10, 4)).pow(2).mean()
            gradients = count.gradients(loss, inner, create_graph=True)
            inner = [weight - 0.1 * gradient for weight, gradient in zip(inner, gradients, strict=True)]
        descend(count, optimizer, model(inner, torch.randn(10, 4)).pow(2).mean())


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
def steps_within_a_call(count):
    model = count.watch(Trains())
    for _ in range(4):
        model(torch.randn(12, 4))
        count.did("backward", "optimizer")
        count.end()
