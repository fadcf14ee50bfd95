"""Ways of calling a model that no tutorial shows: a subclass of DataParallel, forward() itself, exceptions swallowed."""

import torch
from torch import nn
from torch.nn.parallel import data_parallel


class Through(nn.DataParallel):
    """Gives the wrapped module's own attributes."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Odd(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x, *, mask=None, names=None):
        self.calls += 1
        if names == "fail":
            raise KeyError("asked to fail")
        y = self.layer(x) * self.scale
        return {"y": y if mask is None else y * mask, "loss": y.pow(2).mean(), "names": names}

    def describe(self):
        return f"odd, called {self.calls} times"


torch.manual_seed(2)
model = Through(Odd())
print(model.scale, model.describe())
for names in (None, ["a", "b"], "fail"):
    try:
        out = model(torch.randn(4, 3), mask=torch.ones(4, 3), names=names)
        out["loss"].sum().backward()
        print(sorted(out), out["loss"].sum().item().hex(), out["names"], out["y"].shape)
    except Exception as error:
        print("skipped a batch:", type(error).__name__, error)
print(model.forward(torch.ones(2, 3))["y"].tolist())
try:
    print(data_parallel(model.module, torch.ones(2, 3))["y"].shape, model.describe())
except RuntimeError as error:  # without a GPU torch does not know what to do
    print(error)
handle = model.module.register_forward_hook(lambda module, args, output: output["y"])
print(model(torch.ones(2, 3)).shape, len(model.module._forward_hooks))
handle.remove()
print(len(model.module._forward_hooks), model(torch.ones(2, 3))["y"].grad_fn is not None)
