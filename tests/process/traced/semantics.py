"""Checks of what replicas receive and return; prints what each found, as JSON."""

import collections
import contextlib
import copy
import io
import json
import os
import sys
import threading
import warnings

import torch
from torch import nn

OURS = os.environ["OURS"]

torch.manual_seed(3)
warnings.simplefilter("error")
checks = {}


def check(function):
    checks[function.__name__] = function
    return function


class Echo(nn.Module):
    """Returns what `make` makes of it and its arguments."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.make = make

    def forward(self, *args, **kwargs):
        return self.make(self, *args, **kwargs)


def wrap(make, **options):
    return nn.DataParallel(Echo(make), **options)


def shape(value):
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, dict):
        return {key: shape(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(shape, value)]
    return value


x = torch.arange(12.0).view(6, 2)
Pair = collections.namedtuple("Pair", "left right")


class Output(collections.OrderedDict):
    pass


@check
def results():
    return {
        "dict": shape(wrap(lambda m, x: {"a": x * m.weight, "b": x.sum(1)})(x)),
        "tuple": shape(wrap(lambda m, x: (x, x.sum(1)))(x)),
        "list": shape(wrap(lambda m, x: [x, x])(x)),
        "named": shape(wrap(lambda m, x: Pair(x, {"deep": (x,)}))(x)),
        "none": wrap(lambda m, x: None)(x),
        "none inside": shape(wrap(lambda m, x: (x, None))(x)),
        "a class of its own": [type(wrap(lambda m, x: Output(logits=x))(x)).__name__, len(wrap(lambda m, x: x)(x))],
    }


@check
def arguments():
    lock, seen = threading.Lock(), []

    def look(m, *args, **kwargs):
        with lock:
            seen.append([shape(args)[1:], {name: shape(value) for name, value in kwargs.items()}])
        return x[:1]

    def received(*args, **kwargs):
        seen.clear()
        model(*args, **kwargs)
        return sorted(seen, key=str)

    model, thing, same = wrap(look), object(), []
    wrap(lambda m, x, got: same.append(got is thing) or x)(x, thing)
    return {
        "keywords": received(x, mask=x, flag=True, name="n", nothing=None),
        "only keywords": received(mask=x),
        "none": received(None, x, None),
        "plain": received(x, 3, "text", 0.5),
        "nested": received({"a": x, "b": [x, (x, 1)]}),
        "nothing": received(),
        "same object": same,
    }


@check
def scalars():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = wrap(lambda m, x: (x * m.weight).mean())(x)
    return [out.tolist(), [[w.category.__name__, str(w.message)] for w in caught]]


@check
def batchnorm():
    model = nn.DataParallel(nn.BatchNorm1d(2, momentum=1.0))
    model(x)
    bn = model.module
    return [bn.running_mean.tolist(), bn.running_var.tolist(), int(bn.num_batches_tracked)]


@check
def buffers():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("added", torch.zeros(1))
            self.register_buffer("assigned", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(1))
            self.count = 0

        def forward(self, x):
            self.added += x.sum()
            self.assigned = self.assigned + 1
            self.count += 1
            return x * self.weight

    model = nn.DataParallel(Counting())
    model(x)
    inner = model.module
    return [inner.added.item(), inner.assigned.item(), inner.count]


@check
def autocast():
    model, found = nn.DataParallel(nn.Linear(2, 2)), []
    found.append(str(model(x).dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(str(model(x).dtype))
        with torch.autocast("cpu", enabled=False):
            found.append(str(model(x).dtype))
    return found


@check
def gradient_modes():
    seen, found = [], []
    model = wrap(lambda m, x: seen.append([torch.is_grad_enabled(), m.training]) or x * m.weight)

    def call():
        seen.clear()
        gives = model(x).requires_grad
        found.append([gives, *sorted(set(map(tuple, seen)))])

    call()
    with torch.no_grad():
        call()
    model.eval()
    call()
    return found


@check
def hooks_of_the_scripts_own():
    calls = []
    net = nn.Linear(2, 2)
    net.register_forward_pre_hook(lambda m, a: calls.append("before"))
    net.register_forward_pre_hook(lambda m, a, k: calls.append("before, keywords"), with_kwargs=True)
    net.register_forward_hook(lambda m, a, out: calls.append("after"))
    net.register_forward_hook(lambda m, a, out: out * 0 + 5, always_call=True)
    out = nn.DataParallel(net)(x)
    left = [
        len(getattr(net, name))
        for name in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks_with_kwargs",
            "_forward_hooks_always_called",
        )
    ]
    return [collections.Counter(calls), out.unique().tolist(), left]


class Unlucky(Exception):
    def __init__(self, number, text):
        super().__init__(f"no luck: {number} {text}")


@check
def exceptions():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            if x.max() > 10:
                raise Unlucky(7, "times")
            return self.layer(x)

    try:
        nn.DataParallel(Raises())(x)
    except Exception as error:  # noqa: BLE001 - what it is, is what is looked at
        chain = [error.__cause__, error.__context__]
        frames, traceback = [], error.__traceback__
        while traceback is not None:
            frames.append([os.path.basename(traceback.tb_frame.f_code.co_filename), traceback.tb_lineno])
            traceback = traceback.tb_next
        return [type(error).__name__, str(error), repr(chain), frames]


class Norm(nn.BatchNorm1d):
    pass


@check
def one_row_each():
    model = nn.DataParallel(Norm(2))
    return [shape(model(x[:2])), shape(model(x)), shape(model(x[2:]))]


class Shares(nn.Linear):
    pass


@check
def few_rows():
    model = nn.DataParallel(Shares(2, 3))
    return [shape(model(x[:1])), shape(model(x[:0]))]


class Uneven(nn.DataParallel):
    """Splits unevenly: one row for the first replica, the others for the second; gathers without concatenation."""

    def scatter(self, inputs, kwargs, device_ids):
        self.scattered = [list(device_ids), getattr(self, "scattered", 0)]
        return [(inputs[0][:1],), (inputs[0][1:],)], [{}, {}]

    def gather(self, outputs, output_device):
        return [len(out) for out in outputs]


class ByName(nn.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        from torch.nn.parallel.scatter_gather import scatter_kwargs

        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)


class MyDataParallel(nn.DataParallel):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Around(nn.DataParallel):
    def forward(self, *inputs, **kwargs):
        return super().forward(*inputs, **kwargs) * 2


class Instead(nn.DataParallel):
    def forward(self, x):
        return self.module(x) * 3


class Inner(nn.Linear):
    pass


@check
def subclasses():
    uneven = Uneven(nn.Linear(2, 2))
    first = uneven(x)
    mine = MyDataParallel(nn.Linear(2, 3))
    ones = nn.Linear(2, 2)
    return {
        "uneven": first if isinstance(first, list) else "written for one device",
        "sets attributes": getattr(uneven, "scattered", None),
        "by name": shape(ByName(nn.Linear(2, 2))(x)),
        "passes attributes": [shape(mine(x)), mine.in_features, shape(mine.weight), hasattr(mine, "nothing")],
        "around": bool((Around(ones)(x) == ones(x) * 2).all()),
        "instead": bool((Instead(Inner(2, 2))(x) != 0).all()),
    }


@check
def looks():
    def look(model):
        return [sorted(vars(model)), model.device_ids, list(model.state_dict()), repr(model), type(model).__name__]

    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    before = look(model)
    model(x)
    after = look(model)
    clone = copy.deepcopy(model)
    clone(x)
    return [before, after, look(clone), clone.module[0].weight is not model.module[0].weight]


@check
def saved():
    """Saved under the tracer, loaded without dpmon."""
    path = sys.argv[1]
    if not os.path.exists(path):
        model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        model(x)
        torch.save(model, path)
        torch.save(model.state_dict(), path + ".state")
    else:
        model = torch.load(path, weights_only=False)
    state = torch.load(path + ".state")
    same = all(bool((value == state[name]).all()) for name, value in model.state_dict().items())
    return [list(state), same, model.device_ids, model(x).tolist()]


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        inside.set()
        go_on.wait(60)
        return self.layer(x)


inside, go_on = threading.Event(), threading.Event()


@check
def copied_by_a_thread_meanwhile():
    """As for asynchronous checkpoints and averages of weights."""
    model, told = nn.DataParallel(Waits()), []

    def copies():
        inside.wait(60)
        try:
            clone = copy.deepcopy(model)
            file = io.BytesIO()
            torch.save(model, file)
            told.append([len(clone.module._forward_hooks), b"dpmon" in file.getvalue()])
        except Exception as error:  # noqa: BLE001 - what it is, is what is looked at
            told.append(f"{type(error).__name__}: {error}")
        go_on.set()

    thread = threading.Thread(target=copies)
    thread.start()
    model(x)
    thread.join()
    return told


class Recursive(nn.Linear):
    def forward(self, x, depth=2):
        return self(x[1:], depth - 1) if depth else super().forward(x)


@check
def calls_itself():
    return shape(nn.DataParallel(Recursive(2, 2))(x))


class Sometimes(nn.Linear):
    def forward(self, x):
        if len(x) < 3:
            raise ValueError("too few")
        return super().forward(x)


@check
def hooks_left_behind():
    """After calls that went well, failed, and failed for good."""
    model = nn.DataParallel(Sometimes(2, 2))
    for rows in (6, 2, 2, 6, 2, 2, 2, 2, 6):
        with contextlib.suppress(ValueError):
            model(x[:rows])
    inner = model.module
    return [len(hooks) for name, hooks in sorted(vars(inner).items()) if name.startswith("_forward")]


@check
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.DataParallel(torch.jit.script(nn.Linear(2, 3)))
    return [shape(model(x)), shape(model(x))]


class Shared(nn.Linear):
    pass


@check
def several_threads():
    model, told = nn.DataParallel(Shared(2, 3)), []

    def calls():
        for _ in range(30):
            told.append(shape(model(x)))

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [len(told), sorted(set(map(tuple, told)))]


@check
def two_wrappers_of_one_model():
    net = nn.Linear(2, 2)
    first, second = nn.DataParallel(net), nn.DataParallel(net)
    return [shape(first(second(x))), shape(nn.DataParallel(nn.Sequential(first, second))(x))]


said = {}
for name, function in checks.items():
    try:
        said[name] = function()
    except BaseException as error:  # noqa: BLE001 - one check that fails must not hide the others
        said[name] = f"raised {type(error).__name__}: {error}"
print(json.dumps(said))
