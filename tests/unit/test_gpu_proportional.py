"""Memory that processes share is divided among them, within a time budget."""

from __future__ import annotations

import errno
import os

import pytest

from dpmon.gpu.device_record import MissingValue
from dpmon.gpu.host_sampler import BUDGET_SHARE, MAX_SAMPLE_S, MIN_READING_S, PssEstimator, read_pss

MIB = 1 << 20


class Kernel:
    """A fake kernel: its answers by process id, and a clock that each answer advances."""

    def __init__(self, takes_s: float = 0.001) -> None:
        self.now = 0.0
        self.takes_s = takes_s
        self.answers: dict[int, int | OSError | None] = {}
        self.asked: list[tuple[float, int]] = []
        self.memory = PssEstimator(lambda: self.now, self.read)

    def read(self, pid: int) -> int | None:
        self.asked.append((self.now, pid))
        self.now += self.takes_s
        answer = self.answers[pid]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def total(self, *resident: int) -> int | MissingValue:
        """The memory of processes without a common parent."""
        sizes = {(pid, 1.0): size * MIB for pid, size in enumerate(resident)}
        return self.memory.total(sizes, {key: -1 - key[0] for key in sizes})


def test_shared_pages_count_once_and_growth_between_readings_is_seen() -> None:
    kernel = Kernel()
    kernel.answers = {0: 60 * MIB, 1: 50 * MIB}
    assert kernel.total(100, 90) == 110 * MIB
    kernel.now += 1
    assert kernel.total(107, 90) == 117 * MIB
    assert len(kernel.asked) == 2
    kernel.answers[0] = 62 * MIB
    kernel.now += MIN_READING_S
    assert kernel.total(107, 90) == 112 * MIB
    assert len(kernel.asked) == 4


def test_a_process_that_has_gone_is_forgotten() -> None:
    kernel = Kernel()
    kernel.answers = {0: 60 * MIB, 1: None}
    assert kernel.total(100, 90) == 60 * MIB
    assert kernel.total(100) == 60 * MIB


def test_memory_that_cannot_be_read_is_unknown_with_a_reason() -> None:
    kernel = Kernel()
    kernel.answers = {0: 60 * MIB, 1: PermissionError(errno.EACCES, "Permission denied")}
    assert kernel.total(100, 90) == MissingValue("the memory of process 1 cannot be read: Permission denied")
    kernel.answers[1] = 50 * MIB
    kernel.now += MIN_READING_S
    assert kernel.total(100, 90) == 110 * MIB


def test_many_expensive_processes_are_read_one_after_the_other() -> None:
    kernel = Kernel(takes_s=0.08)
    kernel.answers = dict.fromkeys(range(9), 10 * MIB)
    found = []
    for second in range(9):
        kernel.now = max(kernel.now, float(second))
        before = len(kernel.asked)
        found.append(kernel.total(*[600] * 9))
        assert (len(kernel.asked) - before) * kernel.takes_s < MAX_SAMPLE_S + kernel.takes_s
    assert found[0] == MissingValue("the memory of 7 of 9 processes has not been read yet")
    assert found[-1] == 90 * MIB


def test_reading_keeps_to_its_budget_in_the_long_run() -> None:
    kernel = Kernel(takes_s=0.25)
    kernel.answers = dict.fromkeys(range(1000), 10 * MIB)
    for second in range(1000):
        kernel.now = max(kernel.now, float(second))
        # New workers start every ten seconds.
        workers = {(worker, float(second // 10)): 600 * MIB for worker in range(4)}
        kernel.memory.total(workers, dict.fromkeys(workers, 0))
    assert 0 < len(kernel.asked) * kernel.takes_s < 1000 * BUDGET_SHARE + 2


def test_new_workers_are_estimated_from_their_siblings() -> None:
    """Sixteen workers, restarted every minute: more than the budget can read in that time."""
    kernel = Kernel(takes_s=0.1)
    kernel.answers = dict.fromkeys(range(17), 10 * MIB)
    found = []
    for second in range(600):
        kernel.now = max(kernel.now, float(second))
        workers = {(pid, float(second // 60)): 600 * MIB for pid in range(1, 17)}
        parents = {(0, 0.0): 100, **dict.fromkeys(workers, 0)}
        found.append(kernel.memory.total({(0, 0.0): 600 * MIB, **workers}, parents))
    assert found[0] == MissingValue("the memory of 16 of 17 processes has not been read yet")
    assert found[5:] == [170 * MIB] * 595


def test_a_process_without_a_sibling_that_was_read_is_not_estimated() -> None:
    kernel = Kernel(takes_s=MAX_SAMPLE_S)
    kernel.answers = dict.fromkeys(range(3), 10 * MIB)
    resident = {(pid, 1.0): 600 * MIB for pid in range(3)}
    parents = {(0, 1.0): 100, (1, 1.0): 0, (2, 1.0): 0}
    not_read = MissingValue("the memory of 2 of 3 processes has not been read yet")
    assert kernel.memory.total(resident, parents) == not_read
    assert kernel.memory.total(resident, parents) == 30 * MIB
    kernel.now += 1
    assert isinstance(kernel.memory.total({**resident, (5, 1.0): 50 * MIB}, {**parents, (5, 1.0): 100}), int)


def test_the_kernel_says_what_psutil_says() -> None:
    psutil = pytest.importorskip("psutil")
    assert read_pss(os.getpid()) == pytest.approx(psutil.Process().memory_full_info().pss, rel=0.05)
