"""CPU and memory of real processes: the command, its children, and children whose parent has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from dpmon.gpu.host_sampler import HostSampler

LIMIT_S = 100.0
MIB = 1 << 20

BUSY_CHILD = "import sys; held = bytearray(96 << 20); print('ready', flush=True)\nwhile True: pass"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {BUSY_CHILD!r}], stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "ready\\n"
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def run_with_child() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command, and the process id of its busy child with 96 MiB."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = None
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent, child
    finally:
        for pid in (child, parent.pid):
            if pid is not None and psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        parent.communicate()


def sample_until(host: HostSampler, root: int, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while True:
        sample = host.sample(root)
        if holds(sample):
            return sample
        assert time.monotonic() < deadline, sample
        time.sleep(0.1)


def test_a_child_counts_with_its_cpu_and_memory() -> None:
    with run_with_child() as (parent, child):
        host = HostSampler()
        # If this process has to wait between its clock and the processor times, a sample is too high.
        most = 100 * (psutil.cpu_count() or 1) * 1.5
        sample = sample_until(host, parent.pid, lambda s: 5 < (s["run_cpu_pct"] or 0) < most)
        assert host.pids() == {parent.pid, child}
        assert sample["run_mem_bytes"] is not None
        assert 96 * MIB < sample["run_mem_bytes"] < 1024 * MIB
        assert sample["cpu_pct"] is not None
        assert 0 < sample["cpu_pct"] <= 100
        assert sample["absent"].keys() <= {"energy_j"}, "not every machine reports its energy"


def test_a_child_is_followed_when_its_parent_has_gone() -> None:
    with run_with_child() as (parent, child):
        host = HostSampler()
        sample_until(host, parent.pid, lambda s: child in host.pids())
        parent.kill()
        parent.wait()
        sample = sample_until(host, parent.pid, lambda s: host.pids() == {child} and s["run_cpu_pct"] is not None)
        assert sample["run_mem_bytes"] is not None
        assert sample["run_mem_bytes"] > 96 * MIB


def test_a_new_process_counts_from_its_first_sample_on() -> None:
    """A moment is too short to measure: the processor times grow in steps of 10 ms."""

    class Waits(HostSampler):
        def _update_process_set(self, root_pid: int | None) -> None:
            if self._processes:
                super()._update_process_set(root_pid)
                time.sleep(0.3)  # meanwhile the child is busy
            else:
                self._processes.add(psutil.Process(root_pid))

    with run_with_child() as (parent, child):
        host = Waits()
        sample = sample_until(host, parent.pid, lambda s: child in host.pids())
        assert sample["run_cpu_pct"] < 10  # the parent's
        sample_until(host, parent.pid, lambda s: s["run_cpu_pct"] > 10)


def test_nothing_is_known_of_a_run_that_has_ended() -> None:
    with run_with_child() as (parent, child):
        host = HostSampler()
        sample_until(host, parent.pid, lambda s: child in host.pids())
        os.kill(child, signal.SIGKILL)
        parent.kill()  # not reaped: a zombie no longer counts
        sample = sample_until(host, parent.pid, lambda s: not host.pids())
        assert (sample["run_cpu_pct"], sample["run_mem_bytes"]) == (None, None)
        assert sample["absent"]["run_mem_bytes"] == "no process of the run is left"


def test_the_search_for_new_processes_is_rationed() -> None:
    """Reading the table of processes takes at most 1% of the time, however slow it is."""
    now = [0.0]
    scans = []

    def clock() -> float:
        return now[0]

    class Slow(HostSampler):
        def _update_process_set(self, root_pid: int | None) -> None:
            scans.append(now[0])
            now[0] += 0.05

    host = Slow(clock)
    for second in range(60):
        now[0] = max(now[0], float(second))
        host.sample(None)
    assert 10 <= len(scans) <= 13
