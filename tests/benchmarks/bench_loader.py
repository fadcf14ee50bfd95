"""What the samples of a loader cost a worker: short blocks of batches with and without them, in random order.

    python tests/benchmarks/bench_loader.py [--blocks 100] [--batches 20]

A process makes batches as a worker does, with torch's fetch. Its CPU time, with that of dpmon's thread, is compared
between blocks without samples (in two halves: A/A) and with them. Also printed: the CPU time of dpmon's thread itself,
as a share of the time, while it sleeps and while it takes samples.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from dpmon.tracer.core.session import Session
from dpmon.tracer.steps import loader_stacks

ROWS, UNITS = 16, 40


class Rows(Dataset[torch.Tensor]):
    """Rows whose transforms take some hundreds of microseconds: Python and small operations of torch."""

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((64,), float(index))
        for _ in range(UNITS):
            row = augment(row)
        return row


def augment(row: torch.Tensor) -> torch.Tensor:
    """Return a changed row."""
    return (row + sum(range(20))).clamp(max=1.0)


def run_block(batches: int, is_sampled: bool) -> float:
    """Return the CPU time (s) of a block of batches."""
    fetcher: Any = _MapDatasetFetcher(Rows(), True, default_collate, False)
    start_s = time.process_time()
    thread = threading.Thread(target=loader_stacks._append_samples, args=("/nonexistent",))
    if is_sampled:
        thread.start()
    for _ in range(batches):
        fetcher.fetch(range(ROWS))
    if is_sampled:
        thread.join()
    return time.process_time() - start_s


def thread_share(target: Callable[[], object], duration_s: float) -> float:
    """Return the CPU time of a thread as a share of the time, while the main thread makes batches."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    assert thread.ident is not None
    clock, end_s = time.pthread_getcpuclockid(thread.ident), time.monotonic() + duration_s
    start_s = time.clock_gettime(clock)
    while time.monotonic() < end_s:
        run_block(1, is_sampled=False)
    return (time.clock_gettime(clock) - start_s) / duration_s


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each kind")
    parser.add_argument("--batches", type=int, default=20, help="batches in a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        session: Any = Session(SimpleNamespace(directory=directory))  # type: ignore[arg-type]
        training_process: Any = SimpleNamespace(pid=0)
        loader_stacks.parent_process = lambda: training_process  # type: ignore[attr-defined]
        asleep = thread_share(lambda: loader_stacks.reply_in_worker(session), 4.0)
        taking = thread_share(lambda: loader_stacks._append_samples(os.path.join(directory, "none")), 8.0)
        print(f"CPU time of the thread: {asleep:.4%} asleep, {taking:.3%} while it takes samples")
        loader_stacks.SAMPLE_S = 0.8 * statistics.median(run_block(options.batches, is_sampled=False) for _ in range(9))
        kinds = ("without", "A/A", "samples")
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(options.blocks):
            for name in random.sample(kinds, len(kinds)):
                times[name].append(run_block(options.batches, is_sampled=name == "samples"))
    bare = statistics.median(times["without"])
    for name in kinds[1:]:
        added = sorted(100 * (one - other) / bare for one, other in zip(times[name], times["without"], strict=True))
        middle = added[len(added) // 4 : -(len(added) // 4) or None]
        error = 1.25 * statistics.stdev(added[len(added) // 10 : -(len(added) // 10) or None]) / len(added) ** 0.5
        print(f"{name:8} {statistics.fmean(middle):+.2f} ± {error:.2f}% of {1000 * bare:.1f} ms")


if __name__ == "__main__":
    main()
