"""Unusual models, tensors and exceptions; prints their results as JSON."""

import inspect
import json

import torch
import torch.fx
from torch import nn

torch.manual_seed(4)
x = torch.randn(6, 2)
checks = {}


def check(function):
    checks[function.__name__] = function
    return function


def shape(value):
    return list(value.shape)


def both(kind, *args):
    """Return the shapes of the results of a model, bare and wrapped."""
    return [shape(kind(2, 2)(x, *args)), shape(nn.DataParallel(kind(2, 2))(x, *args))]


class HashNeedsName(nn.DataParallel):
    def __init__(self, module):
        super().__init__(module)
        self.name = "late"

    def __hash__(self):
        return hash(self.name)


@check
def a_hash_that_needs_what_is_set_later():
    return shape(HashNeedsName(nn.Linear(2, 2))(x))


class NoText(Exception):
    def __str__(self):
        raise OSError("no text")


class RaisesNoText(nn.Linear):
    def forward(self, x):
        raise NoText


def caught(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what it is, is what is looked at
        return type(error).__name__
    return None


@check
def an_exception_without_a_text():
    return [caught(lambda: RaisesNoText(2, 2)(x)), caught(lambda: nn.DataParallel(RaisesNoText(2, 2))(x))]


class NoParameters(nn.Linear):
    def parameters(self, recurse=True):
        raise KeyError("not for you")


@check
def a_model_that_hides_its_parameters():
    return both(NoParameters)


class NoTraining(nn.Linear):
    def __getattribute__(self, name):
        if name == "training":
            raise OSError("who asks?")
        return super().__getattribute__(name)


@check
def a_model_that_hides_its_mode():
    return shape(NoTraining(2, 2)(x))


class Watched(torch.Tensor):
    seen = []  # noqa: RUF012 - one list for all of them

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


@check
def a_tensor_that_watches():
    model, tensor = nn.Linear(2, 2), x.as_subclass(Watched)
    Watched.seen.clear()
    model(tensor), model(tensor)
    return Watched.seen


class Prickly:
    def __getattr__(self, name):
        raise OSError("do not touch")


class Takes(nn.Linear):
    def forward(self, x, anything):
        return super().forward(x)


@check
def an_argument_not_to_be_touched():
    return both(Takes, Prickly())


class Frozen(type):
    def __setattr__(cls, name, value):
        raise TypeError("nothing is set on this class")


class OfFrozenClass(nn.Linear, metaclass=Frozen):
    pass


@check
def a_class_on_which_nothing_is_set():
    return both(OfFrozenClass)


class OwnCall(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 0


@check
def a_call_of_its_own():
    return [OwnCall(2, 2)(x).sum().item(), nn.DataParallel(OwnCall(2, 2))(x).sum().item()]


@check
def a_forward_set_on_the_instance():
    model = nn.Linear(2, 2)
    model.forward = lambda x: x * 0
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    wrapped.forward = lambda x: x * 0
    return [model(x).sum().item(), nn.DataParallel(model)(x).sum().item(), wrapped(x).sum().item()]


class Generates(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return (y for _ in range(2))


@check
def a_generator_as_result():
    return [len(list(Generates(2, 2)(x))), len(list(nn.DataParallel(Generates(2, 2))(x)))]


class Multiplies(nn.Linear):
    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


@check
def other_tensors():
    sparse = torch.eye(4).to_sparse()
    nested = nn.Linear(2, 3)(torch.nested.nested_tensor([torch.randn(2, 2), torch.randn(3, 2)]))
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(1, 2)])
    return [
        shape(Multiplies(4, 4)(sparse)),
        shape(nn.DataParallel(Multiplies(4, 4))(sparse)),
        [nested.is_nested, nested.size(0)],
        type(nn.LSTM(2, 3)(packed)[0]).__name__,
        shape(nn.Linear(2, 2, dtype=torch.complex64)(x.to(torch.complex64))),
    ]


@check
def other_ways_to_call():
    weights = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    return [
        shape(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))(x)),
        torch.func.functional_call(nn.Linear(2, 2), weights, (x,)).tolist(),
        shape(torch.func.vmap(nn.Linear(2, 2))(x)),
        shape(nn.Module.__call__(nn.Linear(2, 2), x)),
        shape(nn.Linear.__call__(nn.Linear(2, 2), x)),
    ]


@check
def how_torch_looks():
    names = [nn.Module.__call__.__name__, nn.Module.__call__.__qualname__, nn.DataParallel.forward.__qualname__]
    signatures = [str(inspect.signature(f)) for f in (nn.Module.__call__, nn.DataParallel.forward, nn.DataParallel)]
    return [names, signatures, sorted(vars(nn.DataParallel))]


class NoItems(dict):
    def items(self):
        raise OSError("no items")


class GivesNoItems(nn.Linear):
    def forward(self, x):
        found = NoItems()
        found["y"] = super().forward(x)
        return found


@check
def a_result_that_cannot_be_looked_at():
    models = [GivesNoItems(2, 2), nn.DataParallel(GivesNoItems(2, 2))]
    return [type(model(x)).__name__ for model in models for _ in range(4)]


@check
def hooks_of_every_kind():
    """On a module that gets its weights with the first call, and on one with a parametrized weight."""
    model = nn.Sequential(nn.LazyLinear(2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    seen = []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__)),
        model.register_full_backward_hook(lambda module, given, returned: seen.append("backward")),
    ]
    model(x.clone().requires_grad_()).sum().backward()
    for handle in handles:
        handle.remove()
    return [seen, [p.grad.tolist() for p in model.parameters()]]


said = {}
for name, function in checks.items():
    try:
        said[name] = function()
    except BaseException as error:  # noqa: BLE001 - one check that fails must not hide the others
        said[name] = f"raised {type(error).__name__}: {error}"
print(json.dumps(said))
