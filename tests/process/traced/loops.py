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
    looks,
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


@loop
def episodes_before_any_optimizer(count):
    """The optimizer is made when the first episode has been played."""
    policy = count.watch(Net())
    optimizer = None
    for length in (40, 20, 50):
        loss = sum(policy(torch.randn(1, 4)).sum() for _ in range(length))
        optimizer = optimizer or sgd(policy)
        descend(count, optimizer, loss)


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


@loop
def backward_across_rpc(count):
    """An RPC agent runs the backward pass; its result is a context, so the parameters have no gradients."""
    import tempfile

    from torch.distributed import autograd, rpc

    warnings.filterwarnings("ignore", message=".*ProcessGroupGloo.*")  # torch's own use of it
    with tempfile.NamedTemporaryFile() as store:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store.name}")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        model = count.watch(Net())
        with autograd.context() as context:
            autograd.backward(context, [model(torch.randn(8, 4)).sum()])
            assert len(autograd.get_gradients(context)) == 4
        count.did("backward")
        rpc.shutdown()


# ------------------------------------------------------------------------------------------ evaluation


@loop
def looks_after_steps_of_a_loader(count):
    """Within a step of a loader, a look is a part of it; its rows are more, but do not count."""
    model, held_out = count.watch(Net()), torch.randn(100, 4)
    optimizer = sgd(model)
    for number, (x, y) in enumerate(count.batches(loader(rows=120, batch=30))):
        learn(count, model, optimizer, x, y, ends=False)
        if number % 2:
            look(count, model, held_out, ends=False)


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
def with_and_without_a_loader(count):
    model, optimizer = made(count)
    for _ in range(2):
        epoch(count, model, optimizer)
        learns(count, model, optimizer, 10)
        looks(count, model, 3, rows=5)


@loop
def evaluation_of_the_bare_model_from_a_loader(count):
    model = Net()
    wrapper = nn.DataParallel(model)
    count.watch(model, wrapper)
    optimizer = sgd(wrapper)
    for _ in range(2):
        epoch(count, wrapper, optimizer)
        looks_at(count, wrapper.module, loader(rows=20, batch=10))


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
        looks_at(count, average, loader(rows=20, batch=10))


@loop
def another_model_is_evaluated_last(count):
    """A saved model is loaded and tested without a loader or an optimizer."""
    model = count.watch(Net())
    for _ in range(20):
        count.back(model(data()[0]).mean())
        count.end()
    best = count.watch(Other())
    looks(count, best, 9, rows=7)


@loop
def a_teacher_from_a_loader(count):
    """It sees more rows than the student, which do not count."""
    teacher, student = count.watch(Other(), Net())
    optimizer = sgd(student)
    for x, y in count.batches(loader(rows=120, batch=30)):
        look(count, teacher, torch.cat([x, x]), ends=False)
        learn(count, student, optimizer, x, y, ends=False)


# ------------------------------------------------------------------------------------------ several optimizers


@loop
def another_model_later(count):
    """It trains after many steps of the first one, which is no longer called; nor are all modules watched then."""
    for model in count.watch(Net(), Later()):
        for x, y in count.batches(loader(rows=400, batch=10)):
            learn(count, model, sgd(model), x, y, ends=False)


@loop
def another_model_later_that_is_only_called(count):
    with torch.no_grad():
        for model in count.watch(Net(), Later()):
            for _ in range(100):
                model(torch.randn(12, 4))
                count.end()


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
def three_models_one_after_another(count):
    """Each learns and is evaluated; the last optimizer is deleted; the first model goes on learning."""
    first, second, third = count.watch(Net(), Other(), Cell())
    one, two = sgd(first), sgd(second)
    for model, optimizer in ((first, one), (second, two)):
        learns(count, model, optimizer, 5)
        looks(count, model, 5, rows=5)
    three = sgd(third)
    for _ in range(5):
        descend(count, three, unrolled(count, third, 80))
    del three
    looks(count, first, 70, rows=5)
    learns(count, first, one, 5)


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


@loop
def accumulation(count):
    count.sums = True
    model, optimizer = made(count)
    for _ in range(6):
        for _ in range(5):
            count.back(model(data()[0]).mean())
        count.step(optimizer)
        optimizer.zero_grad()


@loop
def parts_of_a_batch(count):
    """A batch in three micro-batches, one step of the optimizer."""
    model, optimizer = made(count)
    for x, y in count.batches(loader(rows=120, batch=30)):
        optimizer.zero_grad()
        for part, goal in zip(x.split(10), y.split(10), strict=True):
            count.back(mse(model(part), goal) / 3)
        count.step(optimizer, ends=False)


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


@loop
def a_closure(count):
    """As Lightning does it: forward and backward within the optimizer's step."""
    model = count.watch(Net())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(10):
        count.step(optimizer, closed(count, model, optimizer, *data()))


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
def a_loader_within_another_ones_step(count):
    """Unlabelled batches beside labelled ones; their loader starts again at its end."""
    model, optimizer = made(count)
    more = iter(loader(rows=60, batch=20))
    for x, y in count.batches(loader(rows=100, batch=10)):
        try:
            z, _ = next(more)
        except StopIteration:
            more = iter(loader(rows=60, batch=20))
            z, _ = next(more)
        descend(count, optimizer, (model(x) - y).pow(2).mean() + model(z).mean(), ends=False)


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


def one_ahead(count, loader, sizes=1):
    """Yield batches as accelerate's loaders do, which fetch one more, to know which one is the last.

    `sizes`: how many batches a step has.
    """
    batches = iter(loader)
    batch = next(batches)
    for number, following in enumerate(batches):
        if number % sizes == 0:
            count.end()
        count.did("data")
        yield batch
        batch = following
    if (number + 1) % sizes == 0:
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


@loop
def micro_batches_fetched_together(count):
    """As in transformers' Trainer: first all batches of an optimizer step, then a call and a backward pass for each."""
    model, optimizer = made(count)
    for _ in range(2):
        batches = one_ahead(count, loader(rows=40, batch=5), sizes=3)
        for number in range(3):
            together = list(itertools.islice(batches, 3))
            if number == 2:  # the last batch was fetched in the last step of the evaluation
                count.new()
            for x, y in together:
                count.back(mse(model(x), y))
            count.sums = True
            count.step(optimizer)
            count.sums = False
            optimizer.zero_grad()
            if number == 1:
                for x, _ in one_ahead(count, loader(rows=10, batch=5)):
                    look(count, model, x, ends=False)


@loop
def adversaries_fetched_one_ahead(count):
    """A critic with two backward passes per batch has no second batch."""
    maker, critic = count.watch(Net(4, 4), Other())
    one, two = sgd(critic), sgd(maker)
    for x, _ in one_ahead(count, loader(rows=40, batch=10)):
        one.zero_grad()
        count.back(critic(x).mean())
        fake = maker(torch.randn(len(x), 4))
        count.back(critic(fake.detach()).mean())
        count.step(one, ends=False)
        descend(count, two, critic(fake).mean(), ends=False)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(37, 4))


@loop
def a_stream(count):
    model, optimizer = made(count)
    for _ in range(3):
        for x in count.batches(DataLoader(Stream(), batch_size=5)):
            learn(count, model, optimizer, x, torch.zeros(len(x), 1), ends=False)


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


@loop
def left_early(count):
    """By break, by next() until the end, by an exception that the loop survives; a loader is thrown away."""
    model, optimizer = made(count)
    for _ in range(3):
        for number, (x, y) in enumerate(count.batches(loader())):
            learn(count, model, optimizer, x, y, ends=False)
            if number == 1:
                break
    batches = count.batches(loader(rows=20, batch=10))
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            break
        learn(count, model, optimizer, x, y, ends=False)
    iter(loader())
    next(iter(loader()))
    for _ in count.batches(loader(rows=20, batch=10)):
        with contextlib.suppress(KeyError):
            raise KeyError("a bad batch")
    epoch(count, model, optimizer, rows=20, batch=10)


@loop
def a_loader_read_to_its_end_first(count):
    """The data are loaded once. The epochs go over the loaded batches, so the loader no longer counts."""
    model, optimizer = made(count)
    kept = list(loader())
    for _ in range(20):
        for x, y in kept:
            learn(count, model, optimizer, x, y)


@loop
def exceptions_without_a_loader(count):
    """A failed call belongs to the next step that ends."""
    model, optimizer = made(count)
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
        model, optimizer = made(count)
        for _ in range(2):
            epoch(count, model, optimizer)
            looks(count, model, 3, rows=5)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


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
def checkpoints_within_each_other(count):
    """From a depth of 60, autograd runs the inner backward passes on threads of its own."""
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True.*")  # in the first pass
    inner = Net(4, 4)

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def nested(self, x, depth):
            x = self.inner(x).tanh()
            return checkpoint(self.nested, x, depth - 1, use_reentrant=True) if depth else x

        def forward(self, x):
            return self.nested(x, 70)

    model = count.watch(Nested())
    optimizer = sgd(model)
    for x, y in count.batches(loader(rows=32, batch=8)):
        learn(count, model, optimizer, x.requires_grad_(), y, ends=False)


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
def in_another_mode_than_its_two_wrappers(count):
    net = Net()
    set_apart(count, nn.DataParallel(nn.DataParallel(net)), net)


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
def with_other_weights(count):
    model = count.watch(Net())
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(list(weights.values()), lr=0.01)
    for _ in range(6):
        x, y = data()
        descend(count, optimizer, (functional_call(model, weights, (x,)) - y).pow(2).mean())


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
    model, optimizer = made(count)
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
        # The largest call before each pass: two inner ones, then the outer one with the first of the next task.
        count.now["rows"] = [[5 + 5 + 15 + 5 + 15 + 5 + 15, True]]
        count.step(optimizer)


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


@loop
def a_penalty_on_gradients(count):
    """As in WGAN-GP: gradients with respect to the inputs are part of the loss."""
    model, optimizer = made(count)
    for _ in range(6):
        x = torch.randn(12, 4, requires_grad=True)
        out = model(x)
        (slope,) = count.gradients(out.sum(), x, create_graph=True)
        descend(count, optimizer, out.mean() + (slope.norm(dim=1) - 1).pow(2).mean())
