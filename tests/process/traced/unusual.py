"""Loops with parts that fail, threads, processes, calls past Module.__call__, and unusual surroundings."""

import contextlib
import copy
import io
import multiprocessing
import os
import pickle  # noqa: TID251 - what scripts do with their classes is what is looked at
import sys
import threading

import torch
from counted import Count, Net, Other, data, end, epoch, learn, learns, loader, look, loop, made, sgd
from torch import nn
from torch.utils.data import DataLoader, Dataset

# ------------------------------------------------------------------------------------------ parts that fail


class Stops(torch.optim.SGD):
    """Raises in the steps whose numbers it is given."""

    def __init__(self, model, *fails):
        super().__init__(model.parameters(), lr=0.01)
        self.fails = fails
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps in self.fails:
            raise ArithmeticError("the gradient is not finite")
        return super().step(closure)


@loop
def optimizers_that_raise(count):
    """The first one raises in its second step, so this step has two batches; another one in its first and only step."""
    model = count.watch(Net())
    optimizer, spare = Stops(model, 2), Stops(Other(), 1)
    for number in range(9):
        count.sums = number == 2
        if number == 4:
            with contextlib.suppress(ArithmeticError):
                spare.step()
        with contextlib.suppress(ArithmeticError):
            learn(count, model, optimizer, *data())


@loop
def everything_swallowed(count):
    """The loop goes on after any error in a batch; there are three, and their calls belong to the next step."""

    class Fails(Net):
        def forward(self, x):
            if x[0, 0] > 90:
                raise {97: KeyboardInterrupt, 98: SystemExit, 99: ValueError}[int(x[0, 0])]("in a batch")
            return super().forward(x)

    model = count.watch(Fails())
    optimizer = sgd(model)
    rows = torch.randn(160, 4)
    for number, value in ((3, 97.0), (4, 98.0), (5, 99.0)):
        rows[20 * number, 0] = value
    told = []
    for x in rows.split(20):
        try:
            learn(count, model, optimizer, x, x.sum(1, keepdim=True))
        except:  # noqa: E722 - as people write it
            told.append(type(sys.exc_info()[1]).__name__)
    return told


# ------------------------------------------------------------------------------------------ threads


@loop
def a_thread_beside_it(count):
    """A thread evaluates another model repeatedly during the training, and counts nothing."""
    over, started = threading.Event(), threading.Event()
    model, optimizer = made(count)

    def evaluate():
        other = Other()
        for x, _ in loader(rows=1000, batch=5):
            with torch.no_grad():
                other(x)
            started.set()
            if over.is_set():
                return

    thread = threading.Thread(target=evaluate)
    for number, (x, y) in enumerate(count.batches(loader())):
        learn(count, model, optimizer, x, y, ends=False)
        if number == 0:
            thread.start()
            started.wait()
    over.set()
    thread.join()


@loop
def two_threads(count):
    """Each trains a model of its own, one batch at a time, alternating, so that the numbers are the same each time.

    Calls of the other thread belong to the steps of the first one; its last call belongs to the last step.
    """
    batches = [list(loader(rows=120, batch=30)) for _ in range(2)]
    models = count.watch(Net(), Other())
    gates = [threading.Semaphore(1), threading.Semaphore(0)]

    def train(me):
        optimizer = sgd(models[me])
        for number, (x, y) in enumerate(batches[me]):
            gates[me].acquire()
            learn(count, models[me], optimizer, x, y, ends=not me and number < 3)
            gates[1 - me].release()

    threads = [threading.Thread(target=train, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------------------ processes


class Rows(Dataset):
    """Runs its own model for every row, like a dataset that computes embeddings."""

    def __init__(self, count=None):
        self.embed = nn.Linear(4, 4)
        if count is not None:
            count.watch(self.embed)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        with torch.no_grad():
            return self.embed(torch.full((4,), float(index)))


@loop
def workers(count):
    model = count.watch(Other())
    optimizer = sgd(model)
    for x in count.batches(DataLoader(Rows(), batch_size=10, num_workers=2, multiprocessing_context="fork")):
        learn(count, model, optimizer, x, torch.zeros(10, 1), ends=False)


@loop
def model_in_the_dataset(count):
    """Without workers: the dataset's model is called by the training process itself, while it fetches."""
    model = count.watch(Other())
    optimizer = sgd(model)
    batches = iter(DataLoader(Rows(count), batch_size=10))
    for _ in range(4):
        learn(count, model, optimizer, next(batches), torch.zeros(10, 1), ends=False)
        count.did("data")
        count.end()


@loop
def forks_a_child(count):
    """Trains, then forks a child that trains too, then goes on itself."""
    model, optimizer = made(count)
    learns(count, model, optimizer, 2)
    pid = os.fork()
    if not pid:
        learns(count, model, optimizer, 3)
        end()
    os.waitpid(pid, 0)
    learns(count, model, optimizer, 2)
    return pid


@loop
def forks_a_child_with_a_wrapper(count):
    """Made before the fork, called after it."""
    model = nn.DataParallel(Net())
    count.call(model, torch.randn(6, 4))
    pid = os.fork()
    if not pid:
        model(torch.randn(6, 4))
        end()
    os.waitpid(pid, 0)
    return pid


def train_alone():
    model = Net()
    learns(Count(), model, sgd(model), 6)


@loop
def multiprocessing_child(count):
    """Ends by os._exit, after multiprocessing's own finalizers; the parent calls no model."""
    child = multiprocessing.get_context("fork").Process(target=train_alone)
    child.start()
    child.join()
    return child.pid


# ------------------------------------------------------------------------------------------ past Module.__call__


@loop
def forward_called(count):
    """Only the calls of its parts are seen."""
    model = Net()
    count.watch(model.layers)
    optimizer = sgd(model)
    for x, y in count.batches(loader(rows=120, batch=30)):
        learn(count, model.forward, optimizer, x, y, ends=False)


@loop
def forward_called_of_a_wrapper(count):
    model = nn.DataParallel(Net())
    count.watch(model.module)
    optimizer = sgd(model)
    for x, y in count.batches(loader(rows=120, batch=30)):
        count.via = "DataParallel"
        learn(count, model.forward, optimizer, x, y, ends=False)


class Raw(nn.Module):
    """A module with parameters but no submodules: if its forward is called directly, no module is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 1), 0.5))

    def forward(self, x):
        return x @ self.weight


@loop
def forward_called_of_a_module_without_parts(count):
    model = Raw()
    optimizer = sgd(model)
    for x, y in count.batches(loader(rows=1000, batch=20)):
        learn(count, model.forward, optimizer, x, y, ends=False)


@loop
def a_layer_by_itself(count):
    """Called between two trainings, so that the tracer finds it at some time; tells how often."""
    model = nn.Sequential(count.watch(Net()), nn.Linear(1, 1))
    optimizer = sgd(model)
    learns(count, model, optimizer, 100)
    for _ in range(600):
        model[1](torch.randn(3, 1))
        learns(count, model, optimizer, 1)
    return 600


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
def long_accumulation_of_nested_calls(count):
    """Forty calls a step, each with three within it, which are those that are recorded."""
    model = Thrice()
    count.watch(*model.parts, *(part.module for part in model.parts))
    optimizer = sgd(model)
    for _ in range(3):
        for _ in range(40):
            model(torch.randn(2, 4)).sum().backward()
        count.did("backward")
        count.now["rows"] = [[40 * 2, True]]  # the same three models before each backward pass
        count.step(optimizer)
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------ surroundings


def whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@loop
def saved_and_copied(count):
    """The model, wrapped or not, is saved and copied during its training and after it.

    Tells whether dpmon is in what was saved, and whether model, saved model and copy have the same attributes.
    """
    told = []
    for model in (Other(), nn.DataParallel(Net())):
        optimizer = sgd(model)
        for x, y in count.batches(loader(rows=120, batch=30)):
            learn(count, lambda x, model=model: count.call(model, x), optimizer, x, y, ends=False)
            saved, twin = whole(model), copy.deepcopy(model)
            again = torch.load(io.BytesIO(saved), weights_only=False)
            told.append([b"dpmon" in saved, sorted(vars(model)) == sorted(vars(again)) == sorted(vars(twin))])
            count.losses.append(count.call(again, x).sum().item())
            learn(count, lambda x, twin=twin: count.call(twin, x), sgd(twin), x, y, ends=False)
    # A class of `__main__` is pickled by value in places (cloudpickle), member by member.
    plain = {name: value for name, value in vars(Other).items() if name == "__call__" or type(value) is str}
    told.append(b"dpmon" in pickle.dumps(plain))
    told.append(pickle.loads(pickle.dumps(plain)).get("__call__", nn.Module.__call__) is nn.Module.__call__)
    return told


@loop
def devices_hidden_late(count):
    """CUDA_VISIBLE_DEVICES works if it is set before the first query of devices, and dpmon makes none before."""
    asked = []
    ask = torch._C._cuda_getDeviceCount if hasattr(torch._C, "_cuda_getDeviceCount") else None
    if ask is not None:
        torch._C._cuda_getDeviceCount = lambda: asked.append(1) or ask()
    model = count.watch(Net())
    look(count, model, data()[0])
    early = len(asked), torch.cuda.is_initialized()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    epoch(count, model, sgd(model))
    return [early, torch.cuda.is_available(), torch.cuda.device_count()]
