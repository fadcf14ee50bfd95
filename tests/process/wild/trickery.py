"""What a long-lived code base does with torch, one after the other, none of it with DataParallel."""

import copy
import weakref

import torch
from net import Net
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(4)


def show(name, *values):
    print(name, [v.detach().double().sum().item().hex() if isinstance(v, torch.Tensor) else v for v in values])


def train(name, model, inputs, steps=3, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        loss = model(inputs).float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    show(name, loss, *model.parameters(), schedule.get_last_lr()[0].hex())


x = torch.randn(8, 6)
train("plain", Net(), x)
train("compiled", torch.compile(Net(), backend="eager"), x)
train("traced", torch.jit.trace(nn.Linear(6, 2), x), x)
train("scripted", torch.jit.script(nn.Sequential(nn.Linear(6, 2), nn.ReLU(inplace=True))), x)
train("parametrized", nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), x)
train("sparse", nn.Sequential(nn.Linear(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 2))), x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: torch.relu_(block(x)), x, use_reentrant=False)
        return x


train("checkpointed", Checkpointed(), x)

with torch.autocast("cpu", dtype=torch.bfloat16):
    train("autocast", Net(), x)


class WithCall(nn.Module):
    """Overrides __call__ itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)

    def forward(self, x):
        return self.inner(x)


train("own call", WithCall(), x)

model = Net()
seen = []
handles = [
    nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(type(m).__name__)),
    model.register_full_backward_hook(lambda m, gi, go: seen.append("back")),
    model.head.weight.register_hook(lambda grad: grad * 0.5),
]
train("hooked", model, x.clone().requires_grad_(), steps=2)
for handle in handles:
    handle.remove()
show("seen", *seen)

model = nn.Linear(6, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


for _ in range(2):
    show("closure", optimizer.step(closure), *model.parameters())

params = dict(model.named_parameters())
show("functional", torch.func.functional_call(model, {k: v * 2 for k, v in params.items()}, (x,)))
show(
    "vmap",
    torch.func.vmap(model)(x),
    torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum())(params)["weight"],
)
(first,) = torch.autograd.grad(model(x).pow(2).sum(), model.weight, create_graph=True)
(second,) = torch.autograd.grad(first.sum(), model.weight)
show("second order", first, second)

real, fake = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
one, two = torch.optim.SGD(real.parameters(), lr=0.1), torch.optim.SGD(fake.parameters(), lr=0.1)
for _ in range(3):
    two.zero_grad()
    (fake(real(torch.randn(5, 4)).detach()).mean() - fake(torch.randn(5, 6)).mean()).backward()
    two.step()
    one.zero_grad()
    (-fake(real(torch.randn(5, 4)))).mean().backward()
    one.step()
show("two models", *real.parameters(), *fake.parameters())

model = Net()
watch = weakref.ref(model)
clone = copy.deepcopy(model)
out = model(x)
del model, out
print("freed", watch() is None, clone.training)

lstm = nn.LSTM(6, 5, batch_first=True)
train("sequence", nn.Transformer(6, 2, 1, 1, 8).encoder, torch.randn(3, 4, 6))
output, (h, c) = lstm(nn.utils.rnn.pack_sequence([torch.randn(n, 6) for n in (4, 2, 1)]))
show("packed", output.data, h, c)
lazy = nn.LazyLinear(2)
show("lazy", lazy(x), type(lazy).__name__)
show("meta", tuple(nn.Linear(10**5, 10**5, device="meta")(torch.empty(2, 10**5, device="meta")).shape))
show("end", torch.rand(2))
