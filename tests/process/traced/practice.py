"""Typical training loops, each in a forked child, which the tracer records as a separate process.

With the argument "toggle", every loop requests dp before its second step and single before its fourth, as a user of the
screen could. Prints process ids, statuses and results of the children as JSON.
"""

import atexit
import copy
import gc
import io
import json
import os
import pickle  # noqa: TID251 - what scripts do with their classes is what is looked at
import sys
import tempfile
import threading
import warnings

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes a second
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
toggling = sys.argv[1:] == ["toggle"]
loops = {}


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


class Raw(nn.Module):
    """A module with parameters but no submodules: if its forward is called directly, no module is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 1), 0.5))

    def forward(self, x):
        return x @ self.weight


def loader(rows=120, batch=30):
    return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), batch_size=batch)


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


def mse(out, target):
    return (out - target).pow(2).mean()


def learn(model, optimizer, x, y, call=None):
    optimizer.zero_grad()
    loss = mse((call or model)(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def before_step(number):
    """Called before each step of a loop."""
    if toggling and number in (1, 3):
        ask(1 if number == 1 else 2)


def ask(mode):
    """Request a mode of this process, as a screen does, by writing to its ring."""
    for name in os.listdir(os.environ["DPMON_RUN"]):
        if not name.endswith(".ring"):
            continue
        with open(os.path.join(os.environ["DPMON_RUN"], name), "r+b") as file:
            head = file.read(256)
            if int.from_bytes(head[24:28], sys.byteorder) == os.getpid():
                serial = int.from_bytes(head[192:200], sys.byteorder) + 1
                file.seek(192)
                file.write(serial.to_bytes(8, sys.byteorder) + mode.to_bytes(8, sys.byteorder))


# ------------------------------------------------------------------------------------------------ steps


@loop
def mixed_precision():
    """AMP with a GradScaler, which skips the optimizer's step where a gradient is infinite."""
    model = Net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model(x).float(), y)
        scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return found


@loop
def closures():
    """LBFGS, one closure per batch."""
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    times = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        times.append(0)

        def closure(x=x, y=y):
            times[-1] += 1
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return times


@loop
def two_optimizers():
    maker, critic = Net(4, 4), Critic()
    one, two = sgd(critic), sgd(maker)
    found = []
    for number, (x, _) in enumerate(loader()):
        before_step(number)
        fake = maker(x)
        one.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean()).backward()
        one.step()
        two.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        two.step()
        found.append(loss.item())
    return found


@loop
def accumulation():
    """A batch in three micro-batches, one step of the optimizer."""
    model = Net()
    optimizer = sgd(model)
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        optimizer.zero_grad()
        for part, goal in zip(x.split(10), y.split(10), strict=True):
            loss = mse(model(part), goal) / 3
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@loop
def no_loader_no_end():
    """while True over a tensor, left by a break."""
    model, x, y = Net(), torch.randn(12, 4), torch.randn(12, 1)
    optimizer = sgd(model)
    found = []
    while True:
        before_step(len(found))
        found.append(learn(model, optimizer, x, y))
        if len(found) == 5:
            return found


@loop
def two_loaders():
    """The second one starts again at its end."""
    model = Net()
    optimizer = sgd(model)
    second = iter(loader(rows=40, batch=20))
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        try:
            more, _ = next(second)
        except StopIteration:
            second = iter(loader(rows=40, batch=20))
            more, _ = next(second)
        optimizer.zero_grad()
        loss = mse(model(x), y) + model(more).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@loop
def no_optimizer():
    """Gradients and a loader; the script changes the weights itself."""
    model = Net()
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        model.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        found.append(loss.item())
    return found


class Deep(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Net(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpoints(wrap, reentrant):
    model = wrap(Deep(reentrant))
    optimizer = sgd(model)
    found = []
    for number, (x, _) in enumerate(loader()):
        before_step(number)
        optimizer.zero_grad()
        loss = model(x.requires_grad_()).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


for wrap in (lambda model: model, nn.DataParallel):
    for reentrant in (False, True):
        name = f"checkpoints{'_wrapped' * (wrap is nn.DataParallel)}{'_reentrant' * reentrant}"
        loops[name] = lambda wrap=wrap, reentrant=reentrant: checkpoints(wrap, reentrant)


# ------------------------------------------------------------------------------------------------ evaluation


def look(model, x):
    model.eval()
    with torch.no_grad():
        found = model(x).sum().item()
    model.train()
    return found


@loop
def evaluation_within_a_step():
    """After every second batch, it evaluates 100 held-out rows without a loader."""
    model, held_out = Net(), torch.randn(100, 4)
    optimizer = sgd(model)
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        found.append(learn(model, optimizer, x, y))
        if number % 2:
            found.append(look(model, held_out))
    return found


@loop
def evaluation_without_a_loader():
    """Three steps, five calls of an evaluation, and this twice."""
    model, x, y = Net(), torch.randn(12, 4), torch.randn(12, 1)
    optimizer = sgd(model)
    found = []
    for epoch in range(2):
        for number in range(3):
            before_step(3 * epoch + number)
            found.append(learn(model, optimizer, x, y))
        found += [look(model, torch.randn(50, 4)) for _ in range(5)]
    return found


@loop
def evaluation_in_a_loop_within_the_loop():
    model = Net()
    optimizer = sgd(model)
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        found.append(learn(model, optimizer, x, y))
        if number == 1:
            found += [look(model, more) for more, _ in loader(rows=40, batch=20)]
    return found


@loop
def teacher():
    """Sees more rows than the student, and learns nothing."""
    master, student = Critic(), Net()
    optimizer = sgd(student)
    master.eval()
    found = []
    for number, (x, _) in enumerate(loader()):
        before_step(number)
        with torch.no_grad():
            goal = master(torch.cat([x, x]))[: len(x)]
        found.append(learn(student, optimizer, x, goal))
    return found


# ------------------------------------------------------------------------------------------------ past __call__


@loop
def forward_called():
    model = Net()
    optimizer = sgd(model)
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        found.append(learn(model, optimizer, x, y, model.forward))
    return found


@loop
def forward_called_of_a_module_without_parts():
    model = Raw()
    optimizer = sgd(model)
    found = []
    for number, (x, y) in enumerate(loader(rows=1000, batch=20)):
        before_step(number)
        found.append(learn(model, optimizer, x, y, model.forward))
    return found


@loop
def forward_called_without_a_loader():
    model, x, y = Raw(), torch.randn(12, 4), torch.randn(12, 1)
    optimizer = sgd(model)
    found = []
    for number in range(50):
        before_step(number)
        found.append(learn(model, optimizer, x, y, model.forward))
    return found


@loop
def forward_called_of_a_wrapper():
    model = nn.DataParallel(Net())
    optimizer = sgd(model)
    found = []
    for number, (x, y) in enumerate(loader()):
        before_step(number)
        found.append(learn(model, optimizer, x, y, model.forward))
    return found


# ------------------------------------------------------------------------------------------------ surroundings


@loop
def another_directory():
    model, x, y = Net(), torch.randn(12, 4), torch.randn(12, 1)
    optimizer = sgd(model)
    found = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(5):
            before_step(number)
            if number == 0:
                os.chdir(place)
            found.append(learn(model, optimizer, x, y))
            torch.save(model.state_dict(), f"{number}.pt")
        names = sorted(os.listdir(place))
        os.chdir("/")
    return [found, names]


@loop
def another_stdout():
    class Keeps:
        """Has nothing but write()."""

        def __init__(self):
            self.texts = []

        def write(self, text):
            self.texts.append(text)

    sys.stdout = sys.stderr = Keeps()
    model, x, y = Net(), torch.randn(12, 4), torch.randn(12, 1)
    optimizer = sgd(model)
    for number in range(5):
        before_step(number)
        print(learn(model, optimizer, x, y), end="")
    return [float(text) for text in sys.stdout.texts if text]


@loop
def everything_swallowed():
    """The loop goes on after any error in a batch; there are three."""

    class Fails(Net):
        def forward(self, x):
            if x[0, 0] > 90:
                raise {97: KeyboardInterrupt, 98: SystemExit, 99: ValueError}[int(x[0, 0])]("in a batch")
            return super().forward(x)

    model = Fails()
    optimizer = sgd(model)
    rows = torch.randn(160, 4)
    for number, value in ((3, 97.0), (4, 98.0), (5, 99.0)):
        rows[20 * number, 0] = value
    found = []
    for number, x in enumerate(rows.split(20)):
        before_step(number)
        try:
            found.append(learn(model, optimizer, x, x.sum(1, keepdim=True)))
        except:  # noqa: E722 - as people write it
            found.append(type(sys.exc_info()[1]).__name__)
    return found


@loop
def two_threads():
    """Each trains a model of its own, one batch at a time, alternating, so that the numbers are the same each time."""
    batches = [list(loader()) for _ in range(2)]
    models = [Net(), Critic()]
    gates = [threading.Semaphore(1), threading.Semaphore(0)]
    found = [[], []]

    def train(me):
        optimizer = sgd(models[me])
        for number, (x, y) in enumerate(batches[me]):
            gates[me].acquire()
            if not me:
                before_step(number)
            found[me].append(learn(models[me], optimizer, x, y))
            gates[1 - me].release()

    threads = [threading.Thread(target=train, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@loop
def saved_and_copied():
    """The model, wrapped or not, is saved and copied during its training and after it."""
    found = []
    for model in (nn.DataParallel(Net()), Critic()):
        optimizer = sgd(model)
        for number, (x, y) in enumerate(loader()):
            if isinstance(model, Critic):
                before_step(number)
            found.append(learn(model, optimizer, x, y))
            saved, twin = whole(model), copy.deepcopy(model)
            again = torch.load(io.BytesIO(saved), weights_only=False)
            found.append([b"dpmon" in saved, sorted(vars(model)) == sorted(vars(again)) == sorted(vars(twin))])
            found.append([again(x).sum().item(), learn(twin, sgd(twin), x, y)])
    # A class of `__main__` is pickled by value in places (cloudpickle), member by member.
    plain = {name: value for name, value in vars(Critic).items() if name == "__call__" or type(value) is str}
    found.append(b"dpmon" in pickle.dumps(plain))
    found.append(pickle.loads(pickle.dumps(plain)).get("__call__", nn.Module.__call__) is nn.Module.__call__)
    return found


@loop
def devices_hidden_late():
    """CUDA_VISIBLE_DEVICES works if it is set before the first query of devices, and dpmon makes none before."""
    asked = []
    count = torch._C._cuda_getDeviceCount if hasattr(torch._C, "_cuda_getDeviceCount") else None
    if count is not None:
        torch._C._cuda_getDeviceCount = lambda: asked.append(1) or count()
    model = nn.DataParallel(Net()) if torch.cuda.is_initialized() else Net()
    early = len(asked), torch.cuda.is_initialized()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = [learn(model, sgd(model), x, y) for x, y in loader()]
    return [early, torch.cuda.is_available(), torch.cuda.device_count(), found]


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


torch.set_num_threads(1)
main()
