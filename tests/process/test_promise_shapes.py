"""P15: processes of all kinds are counted correctly, and workers of a DataLoader leave no record."""

from __future__ import annotations

import pytest

from dpmon.run import proc
from support.run_harness import Dpmon, report_measured, scaled_size, wait_for

pytestmark = pytest.mark.slow

SCRIPT = """
import multiprocessing, os, pathlib, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)

def train(times):
    model = torch.nn.Linear(4, 1)
    for _ in range(times):
        model(torch.ones(2, 4))

if __name__ == "__main__":
    if len(sys.argv) > 2:  # after os.execv: the same process, a new program
        train(6)
        print("own handlers", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        sys.exit(4)
    signal.signal(signal.SIGTERM, lambda *_: None)
    fds = set(os.listdir("/proc/self/fd"))
    train(2)
    print("more descriptors", len(set(os.listdir("/proc/self/fd")) - fds))
    for rows in DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4, num_workers=int(sys.argv[1])):
        pass
    for number, method in enumerate(("fork", "spawn", "forkserver"), start=3):
        process = multiprocessing.get_context(method).Process(target=train, args=(number,))
        process.start()
        process.join()
        assert process.exitcode == 0
    os.closerange(3, 4096)
    train(1)
    print("closed", flush=True)
    os.execv(sys.executable, [sys.executable, __file__, "0", "again"])
"""


def test_promise_15_processes_of_every_shape(dpmon: Dpmon) -> None:
    workers = scaled_size(4, 16)
    dpmon.script(SCRIPT)
    result = dpmon.run("script.py", workers)
    assert result.status == 4, result.errors
    said = result.text.splitlines()
    assert said[1:] == ["closed", "own handlers True"]
    assert int(said[0].split()[-1]) <= 2
    records = dpmon.records()
    calls: dict[int, list[int]] = {}
    for record in records:
        if record["kind"] == "call":
            calls.setdefault(record["process"], []).append(record["call"])
    assert sorted(map(len, calls.values())) == [3, 3, 4, 5, 6]
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in calls.values())
    assert len([r for r in records if r["kind"] == "process"]) == len(calls) == 5
    assert [r["text"] for r in records if r["kind"] == "warning"] == []
    pids = [r["pid"] for r in records if r["kind"] == "process"]
    # The forkserver may end before it collects its child, which then stays a zombie until init does.
    wait_for(lambda: not any(proc.is_alive(pid, None) for pid in pids), what="the end of all processes")
    report_measured("P15", f"fork, spawn, forkserver, execv, {workers} workers, all descriptors closed: 5 records of 5")
