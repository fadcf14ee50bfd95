"""Breaks every function of the tracer, one at a time, from the start and in mid-run, and trains.

Each training runs in a forked child; results, output and status are printed as JSON, by name. With the argument "by
hand": the functional form and the primitives, stages, memory measurements and requests for a pause. With "on
devices": timing of simulated GPUs.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from functools import partial

from asking import ask

from dpmon.tracer import torch_import_hook

install, torch_import_hook._install = torch_import_hook._install, lambda module: None
import torch  # noqa: E402 - the tracer is put in by hand, in each child
import torch._dynamo  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

MODULES = (
    "tracer.note_files", "tracer.calls.call_wrapper", "tracer.modes.replica_threads", "tracer.core.hidden_frames",
    "tracer.steps.loaders", "tracer.modes.mode_decision", "tracer.steps.optimizers", "tracer.patch",
    "tracer.modes.call_plans", "tracer.steps.span_recorder", "tracer.calls.replicas", "tracer.calls.roots",
    "tracer.core.session", "tracer.calls.traced_modules", "tracer.core.tensor_sizes", "tracer.calls.split_calls",
    "tracer.core.module_tables", "tracer.calls.primitives", "tracer.modes.virtual_devices", "tracer.torch_import_hook",
    "span_ring", "record.shared_names",
)  # fmt: skip
BY_HAND = (
    "tracer.calls.primitives",
    "tracer.memory.measurement",
    "tracer.steps.pause",
    "tracer.calls.stages",
    "tracer.memory.storages",
)
DEVICES = ("tracer.devices.device_timing", "tracer.devices.cuda_events")
LIMIT_S = 60
OURS = os.environ["OURS"]
# Python 3.12 warns of what may go wrong in a child of a process with threads.
warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, shift=None):
        if x.max() > 100:
            raise LookupError("a bad batch")
        y = self.layers(x)
        return y if shift is None else {"y": y + shift, "names": ["a"]}


class Bare(Net):
    pass


def train(halfway):
    """Return losses and exceptions of some loops that use everything that is traced."""
    torch.manual_seed(5)
    wrapped, bare = nn.DataParallel(Net()), Bare()
    optimizer = torch.optim.SGD([*wrapped.parameters(), *bare.parameters()], lr=0.05)
    rows, goals = torch.randn(27, 4), torch.randn(27, 1)
    rows[26, 0] = 1000.0  # in the last batch, which is not used for learning
    data = TensorDataset(rows, goals)
    found = []
    for epoch in range(3):
        for x, y in DataLoader(data, batch_size=10):
            try:
                loss = nn.functional.mse_loss(wrapped(x), y) + bare(x=x, shift=y)["y"].pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            except LookupError as error:
                found.append(str(error))
        ask(1 + (epoch + 1) % 2)
        if not epoch:
            halfway()
    with torch.no_grad():
        found.append(bare(torch.ones(2, 4)).sum().item())
    for _ in range(3):
        optimizer.step(lambda: step(bare, optimizer, rows[:20], goals[:20]))
    found.append([p.sum().item() for p in bare.parameters()])
    return found


def train_plainly(halfway):
    """Train one bare model with a loader, then without: only the fast paths."""
    torch.manual_seed(6)
    model = Bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows, goals = torch.randn(60, 4), torch.randn(60, 1)
    found = []
    for number, (x, y) in enumerate(DataLoader(TensorDataset(rows, goals), batch_size=10)):
        if number == 2:
            halfway()
        found.append(step(model, optimizer, x, y).item())
        optimizer.step()
        model(x)
    for _ in range(3):
        with contextlib.suppress(LookupError):
            model(rows * 1000)
        found.append(step(model, optimizer, rows, goals).item())
        optimizer.step()
    return found


class Spread(nn.Module):
    """A model on two devices that goes on without a failed part."""

    def __init__(self):
        super().__init__()
        self.here, self.there = nn.Linear(4, 4), nn.Linear(4, 4).to("meta")

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            self.here(x[:, :3])
        self.there(x.to("meta"))
        return self.here(x)


def composed(model, x):
    """Call the primitives, which are looked up each time, because the tracer comes after this module's import."""
    parts = nn.parallel.scatter((x,), [0, 1])
    return nn.parallel.gather(nn.parallel.parallel_apply(nn.parallel.replicate(model, [0, 1]), parts), 0)


def functional(model, x):
    return nn.parallel.data_parallel(model, x, [0, 1])


def outcome(split, model, x):
    """Return the result, or the error of torch if this machine cannot do it, also without dpmon."""
    try:
        return split(model, x)
    except Exception as error:
        if repr(error) == ALONE[split.__name__]:
            return model(x) * float("nan")
        raise


ALONE = {}
for split in (composed, functional):
    try:
        split(Bare(), torch.ones(6, 4))
    except Exception as error:  # noqa: BLE001 - whatever it is
        ALONE[split.__name__] = repr(error)


def train_by_hand(halfway):
    """Return results of primitives, the function, and a spread model; no loader."""
    torch.manual_seed(7)
    model, spread = Bare(), Spread()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for number in range(10):
        if number == 4:
            halfway()
        if number == 6:
            ask(0xFFFFFFFC_00000003, at=208)  # a pause
        x = torch.randn(6, 4)
        for split in (composed, functional):
            with torch.no_grad():
                found.append(outcome(split, model, x).sum().item())
        found.append(spread(x).sum().item())
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


# ------------------------------------------------------------------------------------------------ breaking


def functions(modules):
    """Return all plain functions and methods of the tracer by name, except the wrappers that contain faults."""
    for short in modules:
        module = importlib.import_module(f"dpmon.{short}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                yield f"{short}.{name}", value
            elif inspect.isclass(value):
                for method, entry in vars(value).items():
                    entry = getattr(entry, "__func__", getattr(entry, "fget", entry))
                    if inspect.isfunction(entry) and entry.__module__ == module.__name__:
                        yield f"{short}.{value.__name__}.{method}", entry


def breaking(function):
    """Make a function raise, also for those that hold a reference to it."""
    names = ", ".join(f"v{index}" for index in range(len(function.__code__.co_freevars)))
    use = f"({names},)" if names else "0"
    space = {}
    exec(
        f"def outer({names}):\n"
        "    def broken(*args, **kwargs):\n"
        f"        {use}\n"
        "        raise RuntimeError('broken on purpose')\n"
        "    return broken\n",
        space,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.13 warns of a plain function in place of a generator
        function.__code__ = space["outer"](*[None] * len(function.__code__.co_freevars)).__code__


def begin(at_start, training, halfway):
    """Start a training in a child."""
    told, errors = (open(tempfile.mkstemp()[0], "w+b") for _ in range(2))  # noqa: SIM115 - `end` closes them
    pid = os.fork()
    if pid:
        return pid, told, errors
    os.dup2(errors.fileno(), 2)
    signal.alarm(LIMIT_S)
    status = 1
    try:
        torch.set_num_threads(1)  # as in `used`
        at_start()
        install(torch)
        told.write(json.dumps(training(halfway)).encode())
        told.flush()
        status = 0
    except BaseException:  # noqa: BLE001 - it is what is looked for
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def end(pid, told, errors):
    """Return [status, result, stderr, process id]."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = []
    for file in (told, errors):
        file.seek(0)
        texts.append(file.read().decode())
        file.close()
    return [status, json.loads(texts[0]) if texts[0] else None, texts[1], pid]


def nothing():
    pass


def watching(seen):
    """Note which code of dpmon runs, on any thread."""

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)


def used(targets, training):
    """Return the names of functions that run at all, and of those that run in the second half."""
    read, write = os.pipe()
    if not os.fork():
        early, late = set(), set()
        # torch creates its pool of threads again after a fork; the first two replicas may find none.
        torch.set_num_threads(1)
        watching(early)
        install(torch)
        training(lambda: watching(late))
        atexit._run_exitfuncs()
        sys.setprofile(None)
        names = [[n for n, f in targets.items() if f.__code__ in codes] for codes in (early | late, late)]
        with open(write, "w") as pipe:
            json.dump(names, pipe)
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        names = json.load(pipe)
    os.wait()
    return names


def jobs_of(training, modules, tries, where=""):
    """Return jobs by name: a start, a training, what happens in mid-run. `tries`: which functions, from the start."""
    targets = dict(functions(modules))
    ever, late = used(targets, training)
    found = {f"nothing{where}": (nothing, training, nothing)}
    for name in ever:
        breaks = partial(breaking, targets[name])
        if tries(name, late):
            found[f"{name} from the start"] = (breaks, training, nothing)
        if name in late:
            found[f"{name}{where or ' in mid-run'}"] = (nothing, training, breaks)
    return found


torch.set_num_threads(1)
importlib.import_module("dpmon.tracer.patch")
if sys.argv[1:] == ["on", "devices"]:
    # Code that runs only with GPUs, with a simulated torch.cuda.
    with open(os.environ["PLAYS_CUDA"]) as file:
        space = {"__name__": "plays_cuda"}
        exec(file.read(), space)
    importlib.import_module("dpmon.tracer.devices.device_timing")
    space["begin"]()
    jobs = jobs_of(train, DEVICES, lambda name, late: True)
elif sys.argv[1:]:
    # Functions that other trainings have, too, are tried without an argument.
    own = (*BY_HAND, "tracer.calls.call_wrapper.", "tracer.modes.mode_decision.", "tracer.modes.call_plans.")
    jobs = jobs_of(train_by_hand, (*BY_HAND, *MODULES), lambda name, late: name not in late or name.startswith(BY_HAND))
    jobs = {name: job for name, job in jobs.items() if name == "nothing" or name.startswith(own)}
else:
    # If broken from the start, most others would only prevent the start of the tracer.
    jobs = jobs_of(train, MODULES, lambda name, late: name not in late)
    jobs |= jobs_of(train_plainly, MODULES, lambda name, late: False, " in a plain loop")
atexit._clear()  # torch's own take a third of each child's time; the tracer's are registered in the child
gc.freeze()
under_way, told = {}, {}
for name, job in jobs.items():
    under_way[name] = begin(*job)
    if len(under_way) == 3:
        first = next(iter(under_way))
        told[first] = end(*under_way.pop(first))
for name, child in under_way.items():
    told[name] = end(*child)
print(json.dumps(told))
