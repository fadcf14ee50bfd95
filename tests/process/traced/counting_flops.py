"""Trains small models of many kinds for six steps, and prints the losses.

Arguments: what to train; then "reference": the third step runs under torch's FlopCounterMode, and its FLOPs are
printed first.
"""

import json
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6
losses = []
IS_REFERENCE = sys.argv[2:] == ["reference"]
torch.manual_seed(0)
warnings.filterwarnings("ignore", message=".*Nested tensors are in prototype stage.*")
warnings.filterwarnings("ignore", message=".*enable_nested_tensor.*")


def reference_counter():
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    aten = torch.ops.aten  # torch has no rules for the attention of CPUs
    flop_registry[aten._scaled_dot_product_flash_attention_for_cpu] = flop_registry[
        aten._scaled_dot_product_flash_attention
    ]
    flop_registry[aten._scaled_dot_product_flash_attention_for_cpu_backward] = flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ]
    return FlopCounterMode(display=False)


class GPT(nn.Module):
    def __init__(self, layers=2, width=128, words=100, length=16, recompute=None):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head, self.recompute = nn.Linear(width, words, bias=False), recompute

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.norms, self.heads = nn.ModuleList(nn.LayerNorm(width) for _ in range(2)), heads
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        parts = self.attend(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


class GraphNetwork(nn.Module):
    """Sums over neighbors by index_add, as libraries for graphs do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(16, 32), nn.Linear(32, 4)))

    def forward(self, nodes, edges):
        for layer in self.layers:
            nodes = layer(torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])).relu()
        return nodes


class SparseNetwork(GraphNetwork):
    """Sums over neighbors by a sparse product, for which torch's rule would count a dense one."""

    def forward(self, nodes, edges):
        ones = torch.ones(edges.shape[1])
        adjacency = torch.sparse_coo_tensor(edges, ones, (len(nodes), len(nodes)), check_invariants=False)
        for layer in self.layers:
            nodes = layer(torch.sparse.mm(adjacency, nodes)).relu()
        return nodes


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Mixture(nn.Module):
    """Each row goes through one of two experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(expert(x) * weights[:, [index]] for index, expert in enumerate(self.experts))


def images(*layers, size=16, channels=3):
    return nn.Sequential(*layers), (torch.randn(4, channels, size, size),)


def words():
    return (torch.randint(0, 100, (4, 16)),)


def edges():
    return torch.randn(20, 16), torch.randint(0, 20, (2, 60))


def linear_network():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


MODELS = {
    "linear": lambda: (linear_network(), (torch.randn(30, 16),)),
    "conv": lambda: images(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)),
    "resnet": lambda: images(nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(2), Residual(8), Residual(8), nn.Flatten()),
    "mobilenet": lambda: images(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Hardswish(), nn.Conv2d(16, 8, 1), nn.Flatten()
    ),
    "autoencoder": lambda: images(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)),
    "unet": lambda: images(
        nn.Conv2d(3, 8, 3, 1, 1), nn.Upsample(scale_factor=2), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1)
    ),
    "gpt": lambda: (GPT(), words()),
    "gpt, recomputed": lambda: (GPT(recompute=False), words()),
    "gpt, recomputed by a reentrant checkpoint": lambda: (GPT(recompute=True), words()),
    "encoder": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0), 2), (torch.randn(5, 3, 16),)),
    "transformer": lambda: (
        nn.Transformer(16, 4, 1, 1, 32, 0.0),
        (torch.randn(5, 3, 16), torch.randn(6, 3, 16)),
    ),
    "graph": lambda: (GraphNetwork(), edges()),
    "sparse": lambda: (SparseNetwork(), edges()),
    "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(3, 7, 8),)),
    "gru": lambda: (Recurrent(nn.GRU), (torch.randn(3, 7, 8),)),
    "mixture": lambda: (Mixture(), (torch.randn(30, 16),)),
    "bilinear": lambda: (nn.Bilinear(8, 8, 4), (torch.randn(5, 8), torch.randn(5, 8))),
}


def learn(model, optimizer, *inputs):
    loss = model(*inputs).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())


def train_model(name, wrap=lambda model: model, around=None):
    model, inputs = MODELS[name]()
    optimizer, model = torch.optim.Adam(model.parameters()), wrap(model)
    for step in range(1, STEPS + 1):
        if IS_REFERENCE and step == 3:
            with reference_counter() as counter:
                learn(model, optimizer, *inputs)
            print(json.dumps({"flops": counter.get_total_flops()}))
        elif around is not None:
            around(step, lambda: learn(model, optimizer, *inputs))
        else:
            learn(model, optimizer, *inputs)


# ------------------------------------------------------------------------------------------------ loops


def parallel():
    train_model("linear", nn.DataParallel)


def in_bfloat16():
    def around(step, learn_once):
        with torch.autocast("cpu", torch.bfloat16):
            learn_once()

    train_model("linear", around=around)


def epochs():
    """Each epoch ends with a smaller batch."""
    net = linear_network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        for (x,) in DataLoader(TensorDataset(torch.randn(70, 16)), 30):
            learn(net, optimizer, x)


def accumulating():
    net = linear_network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        for _ in range(2):
            net(torch.randn(30, 16)).square().mean().backward()
        learn(net, optimizer, torch.randn(30, 16))


def adversarial():
    maker, critic = nn.Linear(8, 16), nn.Linear(16, 1)
    optimizers = torch.optim.SGD(maker.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    for (real,) in DataLoader(TensorDataset(torch.randn(120, 16)), 20):
        with torch.no_grad():
            made = maker(torch.randn(20, 8))
        (critic(made).mean() - critic(real).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-critic(maker(torch.randn(20, 8))).mean()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()


def without_an_optimizer():
    net = linear_network()
    for _ in range(STEPS):
        net(torch.randn(30, 16)).square().mean().backward()


def with_a_teacher():
    """The first call of each step records no gradients."""
    teacher, net = linear_network(), linear_network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        x = torch.randn(30, 16)
        with torch.no_grad():
            teacher(x)
        learn(net, optimizer, x)


def two_models():
    """One after the other is trained with batches of the same sizes."""
    for width in (16, 64):
        net = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for (x,) in DataLoader(TensorDataset(torch.randn(180, 16)), 30):
            learn(net, optimizer, x)


def many_shapes():
    net = linear_network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for rows in range(1, 21):
        learn(net, optimizer, torch.randn(rows, 16))


# ------------------------------------------------------------------------------------------------ bad input


def scripts_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    return Mode()


def within_a_mode():
    with scripts_mode():
        train_model("linear")


def mode_left_later():
    """A mode is entered in the counted step, and left two steps later."""
    mode = scripts_mode()

    class Net(nn.Linear):
        def forward(self, x):
            if len(losses) == 2:
                mode.__enter__()
            return super().forward(x)

    net = Net(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(1, STEPS + 1):
        learn(net, optimizer, torch.randn(30, 16))
        if step == 5:
            mode.__exit__(None, None, None)


def raising():
    """The script catches exceptions of an operator and of a model in the third step."""

    def around(step, learn_once):
        if step == 3:
            model = linear_network()
            for bad in (torch.randn(3, 3), None):
                try:
                    model(bad)
                except (RuntimeError, TypeError) as error:
                    import traceback

                    print(traceback.format_exc(), error.__traceback__.tb_lineno, file=sys.stderr)
        learn_once()

    train_model("linear", around=around)


def many_operators():
    """The third call of a step notes whether the count has ended."""

    class Net(nn.Linear):
        def forward(self, x):
            if not torch.is_grad_enabled():
                for _ in range(30_000):
                    x.add_(0.0)
            return super().forward(x)

    net = Net(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        x = torch.randn(30, 16)
        with torch.no_grad():
            net(x)
            net(x)
            net(x[:1])
            losses.append(torch._C._len_torch_dispatch_stack())
        learn(net, optimizer, x)


def raising_in_an_operator():
    class Net(nn.Linear):
        def forward(self, x):
            if len(losses) == 2:
                try:
                    torch.mm(x, x)
                except RuntimeError:
                    import traceback

                    traceback.print_exc()
            return super().forward(x)

    net = Net(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        learn(net, optimizer, torch.randn(30, 16))


def with_a_broken_rule():
    from torch.utils.flop_counter import flop_registry

    def fail(*args, **kwargs):
        raise RuntimeError("a rule of the script")

    flop_registry[torch.ops.aten.addmm] = fail
    train_model("linear")


def with_an_own_operator():
    @torch.library.custom_op("lab::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_autograd(lambda ctx, grad: grad * 2)

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(double(x))

    net = Net(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        learn(net, optimizer, torch.randn(30, 16))


def with_a_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    train_model("linear", lambda model: lambda x: model(TwoTensor(x, x.clone())))


def warning():
    """Each step warns at the same line; the warning is shown once."""
    torch.use_deterministic_algorithms(True, warn_only=True)

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(torch.zeros(30, 16).put_(torch.arange(480), x.flatten(), accumulate=False))

    net = Net(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        learn(net, optimizer, torch.randn(30, 16))


def compiled():
    train_model("linear", lambda model: torch.compile(model, backend="eager"))


def transformed():
    net = linear_network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        learn(lambda x: torch.func.vmap(net)(x), optimizer, torch.randn(30, 16))


def forking():
    """A child that is forked in the counted step has no mode of ours."""
    import os

    class Net(nn.Linear):
        def forward(self, x):
            if len(losses) == 2 and (child := os.fork()) == 0:
                os._exit(torch._C._len_torch_dispatch_stack())
            if len(losses) == 2:
                print(os.waitpid(child, 0)[1])
            return super().forward(x)

    net = Net(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        learn(net, optimizer, torch.randn(30, 16))


if sys.argv[1] in MODELS:
    train_model(sys.argv[1])
else:
    globals()[sys.argv[1]]()
print(json.dumps({"losses": losses, "modes": torch._C._len_torch_dispatch_stack()}))
