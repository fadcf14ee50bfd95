"""Models with parts on two devices; `meta`, which has shapes but no data, is the second."""

import contextlib
import copy
import io
import json
import threading

import torch
from torch import nn


class Toy(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.net1 = nn.Linear(10, 10).to(first)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, x):
        x = self.relu(self.net1(x))
        return self.net2(x.to(self.net2.weight.device))


class Nested(nn.Module):
    """A part that is itself spread is divided; the last part runs twice, on outputs of the others."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6).to("meta"))
        self.back = nn.Linear(4, 3)

    def forward(self, x, *, scale):
        far = self.body[1](self.body[0](x).to("meta"))
        return {"far": far, "near": self.back(self.back.weight.new_ones(2, 4) * scale)}


class Breaks(Toy):
    def forward(self, x):
        return self.net2(self.net1(x).to("meta")[:, :7])  # seven columns where ten are needed


class Back(nn.Module):
    """Goes back and forth more often than stages are listed."""

    def __init__(self):
        super().__init__()
        self.here = nn.Linear(3, 3)
        self.there = nn.Linear(3, 3).to("meta")

    def forward(self, x):
        for _ in range(40):
            self.there(self.here(x).to("meta"))
        return x


class Decoder(nn.Linear):
    """Calls a part on another device that it holds in a list."""

    def __init__(self, encoder):
        super().__init__(4, 2, device="meta")
        self.held = [encoder]

    def forward(self, x):
        return super().forward(self.held[0](x).to("meta"))


class Translates(nn.Module):
    """One of its parts runs inside the other, also on its own."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = Decoder(self.encoder)

    def forward(self, x):
        self.encoder(x)
        with contextlib.suppress(RuntimeError):
            self.decoder(x[:, :3])
        return self.decoder(x)


class Tries(Breaks):
    """Goes on without a part that raised; the script calls it while it handles another exception."""

    def forward(self, x):
        for wrong in (self.net2, self.net1):
            with contextlib.suppress(RuntimeError, LookupError):
                wrong(torch.ones(2, 3, device=wrong.weight.device))
        return Toy.forward(self, x)


class Threads(Toy):
    """Its second part runs on a thread of its own, beside the first."""

    def forward(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.net2(x.to("meta"))))
        thread.start()
        for _ in range(20):
            self.net1(x)
        thread.join()
        return found[0]


def refuses(*_):
    raise LookupError("the script's own hook")


def hooks_of(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
              "_forward_hooks_always_called")  # fmt: skip
    return sum(len(getattr(module, name)) for module in model.modules() for name in tables)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return len(file.getvalue())


def main():
    toy, one, nested, breaks = Toy("cpu", "meta"), Toy("cpu", "cpu"), Nested(), Breaks("cpu", "meta")
    before = saved(toy)
    said = []
    toy.net1.register_forward_hook(lambda *_: said.append("the script's own hook"))
    with torch.no_grad():
        for rows in (6, 6, 3):
            out = toy(torch.ones(rows, 10))
            assert out.device.type == "meta"
        one(torch.ones(6, 10))
        nested(torch.ones(2, 4), scale=2.0)
        try:
            breaks(torch.ones(2, 10))
            failed = "it did not"
        except RuntimeError:
            failed = "RuntimeError"
        Back()(torch.ones(1, 3))
        Translates()(torch.ones(2, 4))
        tries, threads = Tries("cpu", "meta"), Threads("cpu", "meta")
        for refused in (False, True):
            handle = tries.net1.register_forward_pre_hook(refuses) if refused else None
            try:
                raise KeyError("being handled")
            except KeyError:
                with contextlib.suppress(LookupError):
                    tries(torch.ones(2, 10))
            if handle is not None:
                handle.remove()
        tries(torch.ones(2, 10))
        threads(torch.ones(2, 10))
        twin = copy.deepcopy(toy)
        twin(torch.ones(2, 10))
    toy.net1._forward_hooks.clear()
    models = {"toy": toy, "one": one, "nested": nested, "breaks": breaks, "tries": tries, "threads": threads}
    hooks = {name: hooks_of(model) for name, model in models.items()}
    print(json.dumps({"hooks": hooks, "grew": saved(toy) - before, "said": len(said), "failed": failed}))


main()
