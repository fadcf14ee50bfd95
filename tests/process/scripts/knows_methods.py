"""Uses of torch.Tensor.to and cuda by identity; "replaced": after dpmon has patched them."""

import copy
import pickle  # noqa: TID251
import sys
import traceback
from types import SimpleNamespace

import torch
import torch._dynamo.utils
from torch import nn

if sys.argv[1] == "replaced":
    from dpmon.tracer.steps.copies import CopyTracer

    torch.version.cuda = "13.0"
    original = torch.Tensor.to
    recorder = SimpleNamespace(device_timer=None, threads={}, training_thread=None)
    CopyTracer(SimpleNamespace(is_off=False), recorder).install()
    assert torch.Tensor.to is not original
    assert torch.Tensor.to == original

print(nn.LazyLinear(3).to(torch.float64).weight.dtype)
print(
    torch.Tensor.to,
    torch.Tensor.to.__name__,
    len(torch.Tensor.to.__doc__),
    torch.overrides.resolve_name(torch.Tensor.to),
)
print(
    torch.Tensor.to in torch.overrides.get_testing_overrides(),
    torch.overrides.is_tensor_method_or_property(torch.Tensor.to),
)
for method in (torch.Tensor.to, torch.Tensor.cuda):
    assert copy.deepcopy(method) is copy.copy(method) is pickle.loads(pickle.dumps(method)) is method


class Knows(torch.Tensor):
    known = {torch.Tensor.to: torch.float16}  # noqa: RUF012 - as scripts have it

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            args = args[0], cls.known[func]
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x.to(torch.float32)).to(torch.float64)


def by_name(x):
    return x.to(torch.float64) + 1


def by_class(x):
    return torch.Tensor.to(x, torch.float64) + 1


plain = torch.ones(2)
for tensor in (plain, nn.Parameter(plain), plain.as_subclass(Plain), plain.as_subclass(Knows)):
    print(by_name(tensor).dtype, by_class(tensor).dtype, type(by_name(tensor)).__name__)
    for function in (by_name, by_class):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        try:
            result = [compiled(tensor) for _ in range(3)][-1]
            print(function.__name__, type(tensor).__name__, type(result).__name__, result.dtype)
        except Exception as error:  # noqa: BLE001 - it is what is compared
            print(function.__name__, type(tensor).__name__, type(error), str(error)[:80])
        stats = torch._dynamo.utils.counters["stats"]
        print(stats["calls_captured"], stats["unique_graphs"])
net = torch.compile(Net(), fullgraph=True, backend="eager")
print(net(plain.double()).dtype, torch.export.export(Net(), (plain,)).graph_signature.user_outputs)
print(torch.fx.experimental.proxy_tensor.make_fx(by_name)(plain).code)
print(torch.jit.trace(by_name, plain).code, torch.jit.script(by_name).code)
print(torch.vmap(by_name)(torch.ones(2, 2)).dtype)
for wrong in (lambda: plain.to("nosuch"), lambda: torch.Tensor.to(plain, 1, 2, 3, 4, 5), lambda: torch.Tensor.to(3)):
    try:
        wrong()
    except Exception as error:  # noqa: BLE001
        print(type(error), str(error).splitlines()[0], len(traceback.extract_tb(error.__traceback__)))
print("all of it")
