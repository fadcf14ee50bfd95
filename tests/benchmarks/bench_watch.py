"""What it costs a healthy run to be watched for stalls: the thread in the training process, and the supervisor's look.

    python tests/benchmarks/bench_watch.py [--blocks 30] [--steps 2000]

Blocks of steps with and without the thread run in random order in one process, and the processor time of the training
thread is compared; A/A is the same comparison between two halves of the blocks without it. A block takes longer than
the time between two looks of the thread. The look is measured over 64 ranks that train, and over 64 that stand still.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
RANKS, LOOKS, IDLE_S = 64, 30, 10.0


def steps(blocks: int, count: int, directory: str) -> None:
    """Print what the thread costs a step, and what it uses of a processor."""
    os.environ.update(DPMON_RUN=directory, DPMON_START_NS=str(time.monotonic_ns()), DPMON_MODE="script")
    import torch

    from dpmon.span_ring import HeaderWord, SpanRing
    from dpmon.tracer import patch, responder_thread

    torch.set_num_threads(1)
    made: list[responder_thread.ResponderThread] = []
    rings: list[SpanRing] = []
    start = responder_thread.ResponderThread.start

    def noted(self: responder_thread.ResponderThread, ring: SpanRing) -> None:
        made.append(self)
        rings.append(ring)
        start(self, ring)

    responder_thread.ResponderThread.start = noted  # type: ignore[method-assign]
    patch.install()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(32, 64)

    def block() -> float:
        begun = time.thread_time()
        for _ in range(count):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        return (time.thread_time() - begun) / count * 1e6

    for _ in range(20):
        block()
    (thread,), (ring,) = made, rings
    times: dict[str, list[float]] = {"with": [], "without": [], "again": []}
    for kind in random.sample([*times] * blocks, 3 * blocks):
        thread.at_exit()
        if kind == "with":
            start(thread, ring)
        times[kind].append(block())
    bare, beside, again = (statistics.median(times[kind]) for kind in ("without", "with", "again"))
    print(f"a step: {bare:.1f} us; the thread adds {beside - bare:+.2f} us; A/A {again - bare:+.2f} us")
    start(thread, ring)
    for name in ("training", "standing still"):
        ring.words[HeaderWord.SPAN_START] = time.monotonic_ns() + 10**12 if name == "training" else 1
        begun = time.process_time()
        time.sleep(IDLE_S)
        print(f"the thread, {name}: {(time.process_time() - begun) / IDLE_S * 1e6:.0f} us of a processor a second")


def look(directory: str) -> None:
    """Print what the supervisor's look costs."""
    from dpmon.run.run_directory import RunInfo
    from dpmon.span_ring import HeaderWord, SpanRing
    from dpmon.supervise.stall_watch import StallWatch

    rings = [
        SpanRing(f"{directory}/process-{rank}.ring", process=rank, rank=rank, world=RANKS, slots=16)
        for rank in range(RANKS)
    ]
    info = RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True)
    for name in ("train", "stand still"):
        drain: Any = SimpleNamespace(
            emit=lambda kind, data: None, last_steps=lambda: dict.fromkeys(range(RANKS), 5), gpus=list
        )
        watch = StallWatch(Path(directory), info, drain)
        watch._start_taking_stacks = lambda request_number: None  # type: ignore[method-assign]
        begun = time.process_time()
        for _ in range(LOOKS):
            for ring in rings:
                ring.words[HeaderWord.SPAN_START] = time.monotonic_ns() if name == "train" else 1
            watch._check_at_ns = 0
            watch.poll()
        took = (time.process_time() - begun) / LOOKS
        print(f"a look once a second at {RANKS} ranks that {name}: {took * 1e3:.2f} ms of a processor")
        watch.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        look(first)
        steps(options.blocks, options.steps, second)


if __name__ == "__main__":
    main()
