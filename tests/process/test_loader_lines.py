"""Which function of a loader takes the time: a known ratio, in all kinds of loaders; and what nobody sees of it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_types import Event
from support.tracer_harness import TracedRun, TracedScript, run_traced, run_untraced

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

def busy(cpu_s):
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass

def decode(index):
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        sum(range(50))
    return torch.full((2,), float(index % 7))

def augment(row):
    end = time.thread_time() + 0.006
    while time.thread_time() < end:
        sum(range(50))
    return row + 1

def small_operations(index):
    row, end = torch.full((2,), float(index % 7)), time.thread_time() + 0.002
    while time.thread_time() < end:
        row.add_(0)  # releases the GIL for a few microseconds
    return row

if sys.argv[1] == "operations":
    decode = small_operations

class Rows(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return augment(decode(index))

class Stream(IterableDataset):
    def __iter__(self):
        index = 0
        while True:
            index += 1
            yield augment(decode(index))

def collate(rows):
    return torch.stack([augment(row) for row in rows])

class Fast(Rows):
    def __getitem__(self, index):
        return decode(index)

def train(loader, steps):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, rows in enumerate(loader):
        busy(0.02)
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
        if step == steps or os.path.exists("stop"):
            break
    print(random.random(), torch.rand(1).item())

def main():
    kind, workers, context, steps = sys.argv[1:]
    dataset = {"map": Rows, "operations": Rows, "stream": Stream, "collate": Fast}[kind]()
    how = dict(batch_size=8, num_workers=int(workers))
    if how["num_workers"]:
        how.update(multiprocessing_context=context, persistent_workers=context == "spawn")
    train(DataLoader(dataset, collate_fn=collate if kind == "collate" else None, **how), int(steps))

if __name__ == "__main__":
    import random
    random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    if "dpmon.tracer.responder_thread" in sys.modules:
        sys.modules["dpmon.tracer.responder_thread"].DATA_POLLS = 4
        sys.modules["dpmon.tracer.steps.loader_stacks"].SAMPLE_S = 60.0
    main()
    print(os.path.exists("stop") and sys.getswitchinterval())
"""


def lines_of(script: TracedScript) -> tuple[dict[str, Any], TracedRun]:
    """Wait for the record of a script's loader, and end the script."""
    lines, until = script.directory / "process-0.jsonl", time.monotonic() + 240
    while not (lines.exists() and b'"kind":"loader_lines"' in lines.read_bytes()):
        assert script.process.poll() is None, script.end().err
        assert time.monotonic() < until
        time.sleep(0.05)
    (script.cwd / "stop").touch()
    run = script.end()
    (event, *_) = run.events("loader_lines")
    assert isinstance(event, Event)
    return dict(event.data), run


@pytest.mark.parametrize(
    ("kind", "workers", "context"),
    [
        ("map", 0, ""),
        ("collate", 0, ""),
        ("stream", 0, ""),
        ("operations", 0, ""),
        ("stream", 2, "fork"),
        ("map", 2, "spawn"),
    ],
)
def test_three_to_one_is_seen(tmp_path: Path, kind: str, workers: int, context: str) -> None:
    """With 2,000 samples per process, 2 and 4 are 5 standard errors or more away. The model takes time, too.

    Samples are taken at random times, not where a line releases the GIL (a return, small operations of torch).
    """
    record, run = lines_of(TracedScript(tmp_path, SCRIPT, kind, workers, context, -1, mode="script", fresh=True))
    counts: Counter[str] = Counter()
    for line, samples in record["lines"].items():
        counts[line.partition(" ")[0]] += samples
    decode = "`small_operations`" if kind == "operations" else "`decode`"
    assert 2 <= counts["`augment`"] / counts[decode] <= 4, record
    assert counts["`augment`"] + counts[decode] >= 0.9 * counts.total()
    assert not any("busy" in line or "train" in line for line in record["lines"]), record
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert run.out.endswith(f"\n{sys.getswitchinterval()}\n"), "the script has its own interval again"
    assert not list(run.directory.glob("loader-*"))


def test_a_loader_that_keeps_up_is_not_sampled(tmp_path: Path) -> None:
    busy = SCRIPT.replace("0.006", "0").replace("0.002", "0").replace("optimizer.step()", "optimizer.step(); busy(0.1)")
    busy = busy.replace("DATA_POLLS = 4", "DATA_POLLS = 80")
    run = run_traced(tmp_path, busy, "map", 0, "fork", 60, mode="script")
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert len(run.steps()) > 50
    assert not run.events("loader_lines")
    assert not list(run.directory.glob("loader-*"))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_output_stays_and_the_end_is_not_delayed(tmp_path: Path, workers: int) -> None:
    """The script ends while samples are taken. Its random numbers are its own."""
    setting = "sys.modules['dpmon.tracer.steps.loader_stacks'].SAMPLE_S = 1000"
    text = SCRIPT.replace("    main()", f"    if 'dpmon.tracer' in sys.modules:\n        {setting}\n    main()")
    run = run_traced(tmp_path, text, "map", workers, "fork", 60, mode="script")
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert list(run.directory.glob("loader-*")), "samples were taken"
    assert run.out == run_untraced(tmp_path, text, "map", workers, "fork", 60).out
