"""Samples the CPU and memory use of the machine and of the run's processes, with psutil.

A page that several processes share is divided among them. The kernel calls this the proportional set size (PSS), in
`/proc/PID/smaps_rollup`. To compute it, the kernel walks all pages of the process: 30 to 80 ms for 600 MB, 250 ms for
2.6 GB (measured on slow machines). Meanwhile the process must wait if it maps memory. So each process is read rarely.
Between two readings, growth is taken from its resident memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from dpmon.gpu.device_record import MissingValue, split_missing

_SCAN_SHARE = 0.01
"""Largest share of one core for finding new processes, which reads all processes of the machine."""
_TWO_SAMPLES = MissingValue("needs two samples")

BUDGET_SHARE = 0.01
"""Largest share of one core for readings in the long run."""
BUDGET_MOST_S = 1.0
"""Largest saved budget (s): enough for a training and its workers just after their start."""
AT_ONCE_S = 0.1
"""Most time for readings in one sample (s); further processes wait for the next sample."""
EVERY_S = 5.0
"""Shortest time for which a reading is used (s)."""
REST_FACTOR = 200
"""A reading that took time t is used for at least REST_FACTOR * t, so the process waits at most 0.5% of the time."""


class HostSampler:
    """Samples the machine and the processes that descend from the run's command; for one thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._proportional = PssEstimator(clock)
        self._processes: set[psutil.Process] = set()
        """The processes of the run."""
        self._machine_known = self._run_known = False
        """Whether an earlier sample counts the processor times."""
        self._scan_due = 0.0

    def pids(self) -> frozenset[int]:
        """Process ids of the run, as of the last sample."""
        return frozenset(process.pid for process in self._processes)

    def sample(self, root_pid: int | None) -> dict[str, Any]:
        """Return the fields of the `host` record, but for `t_s` and `gpu_absent`.

        `root_pid`: the run's command; None before its start.
        """
        memory = psutil.virtual_memory()
        known, self._machine_known = self._machine_known, True
        cpu = psutil.cpu_percent()
        run_cpu, run_mem = self._run_usage(root_pid)
        return split_missing(
            {
                "cpu_pct": cpu if known else _TWO_SAMPLES,
                # What is not available to a new program.
                "mem_used_bytes": int(memory.total - memory.available),
                "mem_total_bytes": int(memory.total),
                "run_cpu_pct": run_cpu,
                "run_mem_bytes": run_mem,
                "cpus": os.cpu_count(),
                "load_1m": round(os.getloadavg()[0], 2),
            }
        )

    def _run_usage(self, root_pid: int | None) -> tuple[float | MissingValue, int | MissingValue]:
        """Return the processors' use by the run's processes, in percent of one, and their memory."""
        now = self._clock()
        if now >= self._scan_due:
            self._update_process_set(root_pid)
            took = self._clock() - now
            self._scan_due = now + took / _SCAN_SHARE
        used = 0.0
        resident: dict[tuple[int, float], int] = {}
        parents: dict[tuple[int, float], int] = {}
        alive: set[psutil.Process] = set()
        for process in self._processes:
            if not process.is_running():  # its number may belong to another process by now
                continue
            with contextlib.suppress(psutil.Error), process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                key = process.pid, process.create_time()
                resident[key], parents[key] = process.memory_info().rss, process.ppid()
                used += process.cpu_percent()  # 0 for a new process; from now on its CPU time counts
                alive.add(process)
        self._processes = alive
        known, self._run_known = self._run_known, bool(alive)
        if not alive:
            nothing = MissingValue(
                "the command has not started" if root_pid is None else "no process of the run is left"
            )
            return nothing, nothing
        memory = self._proportional.total(resident, parents)
        return round(used, 1) if known else _TWO_SAMPLES, memory

    def _update_process_set(self, root_pid: int | None) -> None:
        """Add descendants of the command and of known processes; a known process may have lost its parent."""
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


def read_pss(pid: int) -> int | None:
    """Return the PSS of a process (bytes); None if it has no memory left. Raises OSError if it is not available."""
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return None


_Process = tuple[int, float]
"""A process id, and when the process started (s)."""


class PssEstimator:
    """Sums the processes of a run within a time budget; for use by one thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, read: Callable[[int], int | None] = read_pss
    ) -> None:
        """`clock` returns monotonic seconds; `read` returns the PSS of a process id in bytes."""
        self._clock = clock
        self._read = read
        self._readings: dict[_Process, tuple[int | MissingValue, float]] = {}
        """Resident bytes that count for other processes, and when the next reading is due (s)."""
        self._typical: dict[int, int] = {}
        """Per parent: the shared part of the child read last."""
        self._budget_s = BUDGET_MOST_S
        self._at_s = clock()

    def total(self, resident: Mapping[_Process, int], parents: Mapping[_Process, int]) -> int | MissingValue:
        """Return the bytes of all processes together.

        `resident`: bytes by process. `parents`: ids of the parents. A process without a reading is estimated: its
        shared part is that of the sibling read last.
        """
        began = self._clock()
        self._budget_s = min(self._budget_s + (began - self._at_s) * BUDGET_SHARE, BUDGET_MOST_S)
        self._at_s = began
        self._readings = {key: reading for key, reading in self._readings.items() if key in resident}
        # Unread processes come first, then those that have waited longest.
        due = {key: self._readings[key][1] if key in self._readings else -1.0 for key in resident}
        for key in sorted(due, key=lambda key: (due[key], key)):
            if due[key] > began or self._budget_s <= 0 or self._clock() - began >= AT_ONCE_S:
                break
            self._refresh(key, resident[key], parents[key])
        total = unread = 0
        for key, size in resident.items():
            shared = self._readings[key][0] if key in self._readings else self._typical.get(parents[key])
            if isinstance(shared, MissingValue):
                return shared
            unread += shared is None
            total += max(size - (shared or 0), 0)
        if unread:
            return MissingValue(f"the memory of {unread} of {len(resident)} processes has not been read yet")
        return total

    def _refresh(self, process: _Process, resident: int, parent: int) -> None:
        began = self._clock()
        shared: int | MissingValue
        try:
            shared = self._typical[parent] = max(resident - (self._read(process[0]) or 0), 0)
        except OSError as error:  # the user may not, the kernel does not report it, or the process has just ended
            shared = MissingValue(f"the memory of process {process[0]} cannot be read: {error.strerror}")
        ended = self._clock()
        self._budget_s -= ended - began
        self._readings[process] = shared, ended + max(EVERY_S, REST_FACTOR * (ended - began))
