"""Samples the CPU and memory use of the machine and of the run's processes, with psutil.

A page that several processes share is divided among them. The kernel calls the result the proportional set size (PSS),
in `/proc/PID/smaps_rollup`. To compute it, the kernel walks all pages of the process: 30 to 80 ms for 600 MB, 250 ms
for 2.6 GB (measured on slow machines). Meanwhile the process must wait if it maps memory. So each process is read
rarely. Between two readings, its growth is that of its resident memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dpmon.gpu.device_record import MissingValue, split_missing
from dpmon.gpu.memory_limits import MemoryLimit, iter_cgroup_limits, iter_process_limits

_SCAN_SHARE = 0.01
"""Maximum share of one core for finding new processes, which reads all processes of the machine."""
_TWO_SAMPLES = MissingValue("needs two samples")
_POWERCAP = Path("/sys/class/powercap")

BUDGET_SHARE = 0.01
"""Maximum share of one core for readings in the long run."""
MAX_BUDGET_S = 1.0
"""Maximum saved budget (s): enough for a training and its workers just after their start."""
MAX_SAMPLE_S = 0.1
"""Maximum time for readings per sample (s); further processes wait for the next sample."""
MIN_READING_S = 5.0
"""Minimum time for which a reading is used (s)."""
REST_FACTOR = 200
"""A reading that took time t is used for at least REST_FACTOR * t, so the process waits at most 0.5% of the time."""


class HostSampler:
    """A sampler of the machine and of the processes that descend from the run's command, for use by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a sampler. `clock` returns monotonic seconds."""
        self._clock = clock
        self._proportional = PssEstimator(clock)
        self._processes: set[psutil.Process] = set()
        """The processes of the run."""
        self._has_machine_sample = self._has_run_sample = False
        """Whether there is an earlier sample, from which CPU times count."""
        self._scan_due = 0.0
        self._process_limits: list[MemoryLimit] = []
        """The rlimits of the processes of the run."""

    def pids(self) -> frozenset[int]:
        """Return the process ids of the run, as of the last sample."""
        return frozenset(process.pid for process in self._processes)

    def sample(self, root_pid: int | None) -> dict[str, Any]:
        """Return the fields of the `host` record except `t_s` and `gpu_absent`.

        `root_pid`: the run's command; None before its start.
        """
        memory = psutil.virtual_memory()
        load_1m, _, _ = os.getloadavg()
        has_earlier_sample, self._has_machine_sample = self._has_machine_sample, True
        cpu_pct = psutil.cpu_percent()
        run_cpu_pct, run_mem_bytes = self._run_usage(root_pid)
        limits = [MemoryLimit("host", memory.total, memory.available), *self._process_limits]
        if root_pid is not None:
            limits += iter_cgroup_limits(root_pid, memory.total)
        nearest = min(limits, key=lambda limit: limit.room_bytes)
        return split_missing(
            {
                "cpu_pct": cpu_pct if has_earlier_sample else _TWO_SAMPLES,
                # The memory that is not available to a new program.
                "mem_used_bytes": int(memory.total - memory.available),
                "mem_total_bytes": int(memory.total),
                "run_cpu_pct": run_cpu_pct,
                "run_mem_bytes": run_mem_bytes,
                "mem_limit": nearest.name,
                "mem_limit_bytes": nearest.limit_bytes,
                "mem_room_bytes": nearest.room_bytes,
                **_shared_memory(root_pid),
                "cpus": os.cpu_count(),
                "load_1m": round(load_1m, 2),
                "energy_j": _cpu_energy(),
            }
        )

    def _run_usage(self, root_pid: int | None) -> tuple[float | MissingValue, int | MissingValue]:
        """Return the CPU use of the run's processes (percent of one core), and their memory (bytes)."""
        start_s = self._clock()
        if start_s >= self._scan_due:
            self._update_process_set(root_pid)
            scan_s = self._clock() - start_s
            self._scan_due = start_s + scan_s / _SCAN_SHARE
        cpu_pct = 0.0
        resident: dict[tuple[int, float], int] = {}
        parents: dict[tuple[int, float], int] = {}
        alive: set[psutil.Process] = set()
        self._process_limits = []
        for process in self._processes:
            if not process.is_running():  # its number may belong to another process by now
                continue
            with contextlib.suppress(psutil.Error), process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                key = process.pid, process.create_time()
                memory = process.memory_info()
                resident[key], parents[key] = memory.rss, process.ppid()
                self._process_limits += iter_process_limits(process.pid, memory.vms, memory.data)
                cpu_pct += process.cpu_percent()  # 0 for a new process; from now on its CPU time counts
                alive.add(process)
        self._processes = alive
        has_earlier_sample, self._has_run_sample = self._has_run_sample, bool(alive)
        if not alive:
            reason = "the command has not started" if root_pid is None else "no process of the run is left"
            return MissingValue(reason), MissingValue(reason)
        mem_bytes = self._proportional.total(resident, parents) or MissingValue("its last process is ending")
        return round(cpu_pct, 1) if has_earlier_sample else _TWO_SAMPLES, mem_bytes

    def _update_process_set(self, root_pid: int | None) -> None:
        """Add the descendants of the command and of known processes, whose parents may have ended."""
        if root_pid is not None:
            with contextlib.suppress(psutil.Error):
                self._processes.add(psutil.Process(root_pid))
        covered: set[psutil.Process] = set()
        for process in list(self._processes):
            if process in covered:  # each search for children reads the whole process table
                continue
            try:
                children = process.children(recursive=True)
            except psutil.Error:
                continue
            covered.update(children)
            self._processes.update(children)


def _cpu_energy() -> float | MissingValue:
    """Return the counters of all CPU packages (J), which wrap around. AMD's have Intel's name, too."""
    try:
        zones = [zone for zone in _POWERCAP.glob("intel-rapl:*") if (zone / "name").read_text().startswith("package")]
        counts_uj = [int((zone / "energy_uj").read_text()) for zone in zones]
    except (OSError, ValueError) as error:
        return MissingValue(f"the energy of the CPUs cannot be read: {error}")
    return sum(counts_uj) / 1e6 if counts_uj else MissingValue("the kernel does not report it")


def _shared_memory(root_pid: int | None) -> dict[str, int | MissingValue]:
    """Return what is used of /dev/shm, and its size, as the command sees it."""
    names = "shm_used_bytes", "shm_total_bytes"
    try:
        usage = shutil.disk_usage("/dev/shm" if root_pid is None else f"/proc/{root_pid}/root/dev/shm")
    except OSError as error:
        return dict.fromkeys(names, MissingValue(f"/dev/shm cannot be read: {error.strerror}"))
    return dict(zip(names, (usage.used, usage.total), strict=True))


def read_pss(pid: int) -> int | None:
    """Return the PSS of a process (bytes); None if it has no memory left. Raises OSError if it is not available."""
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                _, kib, _ = line.split()
                return int(kib) * 1024
    return None


_ProcessKey = tuple[int, float]
"""A process id, and when the process started (s)."""


class _Reading(NamedTuple):
    """The last reading of a process: its resident bytes that count for others, and when the next reading is due."""

    shared_bytes: int | MissingValue
    due_s: float


class PssEstimator:
    """An estimator of the memory of a run's processes within a time budget, for use by one thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, read: Callable[[int], int | None] = read_pss
    ) -> None:
        """Create an estimator. `clock` returns monotonic seconds; `read` returns the PSS of a process id in bytes."""
        self._clock = clock
        self._read = read
        self._readings: dict[_ProcessKey, _Reading] = {}
        self._last_shared_bytes: dict[int, int] = {}
        """By parent: the `shared_bytes` of the child that was read last."""
        self._budget_s = MAX_BUDGET_S
        self._at_s = clock()

    def total(self, resident: Mapping[_ProcessKey, int], parents: Mapping[_ProcessKey, int]) -> int | MissingValue:
        """Return the total bytes of all processes.

        `resident`: resident bytes by process. `parents`: ids of the parents. A process without a reading is estimated:
        its shared part is that of the sibling that was read last.
        """
        start_s = self._clock()
        self._budget_s = min(self._budget_s + (start_s - self._at_s) * BUDGET_SHARE, MAX_BUDGET_S)
        self._at_s = start_s
        self._readings = {process: reading for process, reading in self._readings.items() if process in resident}
        # Unread processes come first, then those that have waited longest.
        due = dict.fromkeys(resident, -1.0)
        due |= {process: reading.due_s for process, reading in self._readings.items()}
        for process in sorted(due, key=lambda process: (due[process], process)):
            if due[process] > start_s or self._budget_s <= 0 or self._clock() - start_s >= MAX_SAMPLE_S:
                break
            self._refresh(process, resident[process], parents[process])
        total = unread = 0
        for process, resident_bytes in resident.items():
            reading = self._readings.get(process)
            shared_bytes = self._last_shared_bytes.get(parents[process]) if reading is None else reading.shared_bytes
            if isinstance(shared_bytes, MissingValue):
                return shared_bytes
            unread += shared_bytes is None
            total += max(resident_bytes - (shared_bytes or 0), 0)
        if unread:
            return MissingValue(f"the memory of {unread} of {len(resident)} processes has not been read yet")
        return total

    def _refresh(self, process: _ProcessKey, resident_bytes: int, parent_pid: int) -> None:
        start_s = self._clock()
        pid, _ = process
        shared_bytes: int | MissingValue
        try:
            shared_bytes = self._last_shared_bytes[parent_pid] = max(resident_bytes - (self._read(pid) or 0), 0)
        except OSError as error:  # the user may not, the kernel does not report it, or the process has just ended
            shared_bytes = MissingValue(f"the memory of process {pid} cannot be read: {error.strerror}")
        end_s = self._clock()
        self._budget_s -= end_s - start_s
        due_s = end_s + max(MIN_READING_S, REST_FACTOR * (end_s - start_s))
        self._readings[process] = _Reading(shared_bytes, due_s)
