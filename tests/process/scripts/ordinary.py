"""Ordinary trainings whose memory does not grow for long: `ordinary.py KIND SECONDS`."""

import random
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Training:
    """A model with its optimizer, and the time it has."""

    def __init__(self, model, seconds):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.start, self.end = time.monotonic(), time.monotonic() + seconds

    def goes_on(self):
        """Return whether there is time left."""
        time.sleep(0.02)
        return time.monotonic() < self.end

    def share(self):
        """Return the share of the time that has passed."""
        return (time.monotonic() - self.start) / (self.end - self.start)

    def step(self, loss):
        """Update the model."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def perceptron():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def evaluation(seconds):
    training = Training(perceptron(), seconds)
    while training.goes_on():
        for _ in range(30):
            training.step(training.model(torch.randn(512, 64)).pow(2).mean())
        training.model.eval()
        with torch.no_grad():
            outputs = torch.cat([training.model(torch.randn(8192, 64)) for _ in range(10)])
        print("evaluation", outputs.pow(2).mean().item())
        training.model.train()


def workers(seconds, **options):
    training = Training(perceptron(), seconds)
    data = TensorDataset(torch.randn(4000, 64))
    while training.goes_on():
        for (x,) in DataLoader(data, batch_size=32, shuffle=True, num_workers=2, **options):
            training.step((training.model(x) - x).pow(2).mean())
            time.sleep(0.01)


def checkpoints(seconds):
    training = Training(nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)), seconds)
    number = 0
    while training.goes_on():
        training.step(training.model(torch.randn(16, 512)).pow(2).mean())
        number += 1
        if number % 40 == 0:
            torch.save({"model": training.model.state_dict(), "step": number}, "checkpoint.pt")


def growing_shapes(seconds):
    """Longer and longer batches up to the middle of the time."""
    training = Training(perceptron(), seconds)
    while training.goes_on():
        rows = int(256 + 20000 * min(training.share(), 0.5))
        training.step(training.model(torch.randn(rows, 64)).pow(2).mean())


def convolutions(seconds):
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3)
    training = Training(nn.Sequential(*layers, nn.BatchNorm2d(16), nn.Flatten(), nn.LazyLinear(10)), seconds)
    training.model(torch.randn(2, 3, 32, 32))
    while training.goes_on():
        outputs = training.model(torch.randn(32, 3, 32, 32))
        training.step(nn.functional.cross_entropy(outputs, torch.randint(10, (32,))))


class Recurrent(nn.Module):
    """A language model of random words."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(1000, 64), nn.LSTM(64, 128), nn.Linear(128, 1000)

    def forward(self, x, state):
        outputs, state = self.lstm(self.words(x), state)
        return self.out(outputs), state


def recurrent(seconds):
    """Sequences of random lengths; the state goes from batch to batch without its graph."""
    training, state = Training(Recurrent(), seconds), None
    while training.goes_on():
        x = torch.randint(1000, (random.randint(5, 80), 16))
        outputs, state = training.model(x, state)
        state = tuple(part.detach() for part in state)
        training.step(nn.functional.cross_entropy(outputs.flatten(0, 1), x.flatten()))


def adversarial(seconds):
    generator, judge = Training(perceptron(), seconds), Training(nn.Linear(64, 1), seconds)
    losses = []
    while generator.goes_on():
        fake = generator.model(torch.randn(256, 64))
        judge.step(judge.model(fake.detach()).mean() - judge.model(torch.randn(256, 64)).mean())
        generator.step(-judge.model(fake).mean())
        losses.append(float(fake.detach().mean()))


def accumulation(seconds):
    training, number = Training(perceptron(), seconds), 0
    while training.goes_on():
        (training.model(torch.randn(512, 64)).pow(2).mean() / 4).backward()
        number += 1
        if number % 4 == 0:
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()


class Attention(nn.Module):
    """A block of a transformer with a cache of masks by length."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.masks = {}

    def forward(self, x):
        length = x.shape[1]
        if length not in self.masks:
            self.masks[length] = nn.Transformer.generate_square_subsequent_mask(length)
        return self.block(x, self.masks[length])


def cached_masks(seconds):
    """A cache keyed by shape that fills up, and a smoothed copy of the weights."""
    training = Training(Attention(), seconds)
    smooth = torch.optim.swa_utils.AveragedModel(training.model)
    while training.goes_on():
        x = torch.randn(8, random.randint(8, 128), 64)
        training.step((training.model(x) - x).pow(2).mean())
        smooth.update_parameters(training.model)


def history(seconds):
    """Numbers of each step, and the last hundred outputs."""
    training, losses, outputs = Training(perceptron(), seconds), [], []
    while training.goes_on():
        outputs = [*outputs[-99:], training.model(torch.randn(256, 64)).detach()]
        loss = training.model(torch.randn(256, 64)).pow(2).mean()
        training.step(loss)
        losses.append({"loss": loss.item(), "step": len(losses)})


def cycles(seconds):
    """Tensors in cycles of references, which Python collects from time to time."""
    training = Training(perceptron(), seconds)
    while training.goes_on():
        box = {"outputs": training.model(torch.randn(1024, 64))}
        box["self"] = box
        training.step(box["outputs"].pow(2).mean())


def kept_workers(seconds):
    workers(seconds, persistent_workers=True, prefetch_factor=4)


torch.set_num_threads(1)
random.seed(0)
globals()[sys.argv[1]](float(sys.argv[2]))
