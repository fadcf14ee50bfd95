"""What counting the FLOPs of a step costs: the counted step against usual steps, and a usual step against itself.

    python tests/benchmarks/bench_flops.py [--width 512] [--layers 8] [--steps 400]

The counted step of a transformer runs under the dispatch mode, and is compared with the median of usual steps; the aim
is at most three usual steps or 50 ms. The check that each call makes afterwards is timed alone, in a loop. A/A compares
two halves of the usual steps of one process, to show how much they vary anyway.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from dpmon.tracer.steps.flop_counting import FlopCounter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    layer = nn.TransformerEncoderLayer(options.width, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(4, 64, options.width)

    def time_step() -> float:
        start = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return (time.perf_counter() - start) * 1e3

    session = SimpleNamespace(has_captured_graph=False, record_event=lambda *_, **figures: print(figures))
    thread = SimpleNamespace(thread_bits=0)
    recorder = SimpleNamespace(
        session=session,
        training_thread=thread,
        has_optimizer=True,
        optimizer_steps=2,
        counting_mode=None,
        is_between_steps=True,
        poll_due=0,
        put=lambda *_: 0,
    )
    counter = FlopCounter(cast(Any, recorder))
    usual = [time_step() for _ in range(options.steps)][5:]
    counted = []
    for shape in range(6):
        start = time.perf_counter()
        counter.handle_call(cast(Any, thread), model, shape)
        beginning = (time.perf_counter() - start) * 1e3
        counted.append(beginning + time_step())
        start = time.perf_counter()
        counter.poll(0)
        counted[-1] += (time.perf_counter() - start) * 1e3
    median = statistics.median(usual)
    print(f"usual step {median:.1f} ms; A/A {statistics.median(usual[::2]) / statistics.median(usual[1::2]) - 1:+.1%}")
    print(f"first counted step {counted[0]:.1f} ms, with the import of torch's rules; others", end=" ")
    print(f"{statistics.median(counted[1:]):.1f} ms, {statistics.median(counted[1:]) / median:.2f} usual steps")
    known, key, count = counter.known, 3, 1_000_000
    start = time.perf_counter()
    for _ in range(count):
        if key not in known:
            raise AssertionError
        recorder.is_between_steps = False
    print(f"the check of a call: {(time.perf_counter() - start) / count * 1e9:.0f} ns, with the loop around it")


if __name__ == "__main__":
    main()
