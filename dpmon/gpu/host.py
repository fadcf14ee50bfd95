"""Samples the CPU and memory use of the machine and of the run's processes, with psutil."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from dpmon.gpu.proportional import ProportionalMemory
from dpmon.gpu.sample import Missing, with_reasons

_SCAN_SHARE = 0.01
"""Largest share of one core for finding new processes, which reads all processes of the machine."""
_TWO_SAMPLES = Missing("needs two samples")


class HostSampler:
    """Samples the machine and the processes that descend from the run's command; for one thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._proportional = ProportionalMemory(clock)
        self._machine: tuple[float, float] | None = None  # busy and total CPU seconds
        self._cpu: dict[psutil.Process, float] = {}  # the run's processes: CPU seconds used
        self._at: float | None = None
        self._scan_due = 0.0

    def pids(self) -> frozenset[int]:
        """Process ids of the run, as of the last sample."""
        return frozenset(process.pid for process in self._cpu)

    def sample(self, root_pid: int | None) -> dict[str, Any]:
        """Return the fields of the `host` record, but for `t_s` and `gpu_absent`.

        `root_pid`: the run's command; None before its start.
        """
        memory = _reported(psutil.virtual_memory)
        run_cpu, run_mem = self._run(root_pid)
        return with_reasons(
            {
                "cpu_pct": self._machine_cpu(),
                # What is not available to a new program.
                "mem_used_bytes": memory if isinstance(memory, Missing) else int(memory.total - memory.available),
                "mem_total_bytes": memory if isinstance(memory, Missing) else int(memory.total),
                "run_cpu_pct": run_cpu,
                "run_mem_bytes": run_mem,
                "cpus": os.cpu_count(),
                "load_1m": _reported(lambda: round(os.getloadavg()[0], 2)),
            }
        )

    def _machine_cpu(self) -> float | Missing:
        times = _reported(psutil.cpu_times)
        if isinstance(times, Missing):
            self._machine = None
            return times
        # User time already includes the time of guests.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        before, self._machine = self._machine, (busy, total)
        if before is None or total <= before[1]:
            return _TWO_SAMPLES
        share = (busy - before[0]) / (total - before[1])
        return round(float(min(100.0, max(0.0, 100 * share))), 1)

    def _run(self, root_pid: int | None) -> tuple[float | Missing, int | Missing]:
        """Return the processors' use by the run's processes, in percent of one, and their memory."""
        now = self._clock()
        if now >= self._scan_due:
            self._find(root_pid)
            took = self._clock() - now
            self._scan_due = now + took / _SCAN_SHARE
        used = 0.0
        resident: dict[tuple[int, float], int] = {}
        parents: dict[tuple[int, float], int] = {}
        alive: dict[psutil.Process, float] = {}
        for process, before in self._cpu.items():
            try:
                if not process.is_running():  # its number may belong to another process by now
                    continue
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    times = process.cpu_times()
                    key = process.pid, process.create_time()
                    resident[key], parents[key] = process.memory_info().rss, process.ppid()
            except psutil.Error:
                continue
            alive[process] = times.user + times.system
            used += max(0.0, alive[process] - before)
        self._cpu = alive
        before_at, self._at = self._at, now
        if not alive:
            self._at = None
            nothing = Missing("the command has not started" if root_pid is None else "no process of the run is left")
            return nothing, nothing
        memory = self._proportional.total(resident, parents)
        if before_at is None or now <= before_at:
            return _TWO_SAMPLES, memory
        return round(100 * used / (now - before_at), 1), memory

    def _find(self, root_pid: int | None) -> None:
        """Add descendants of the command and of known processes; a known process may have lost its parent."""
        if root_pid is not None:
            with contextlib.suppress(psutil.Error):
                self._follow(psutil.Process(root_pid))
        covered: set[psutil.Process] = set()
        for process in list(self._cpu):
            if process in covered:  # each search for children reads the whole process table
                continue
            try:
                children = process.children(recursive=True)
            except psutil.Error:
                continue
            covered.update(children)
            for child in children:
                self._follow(child)

    def _follow(self, process: psutil.Process) -> None:
        """Count the CPU time of a process from now on; its earlier CPU time belongs to no sample."""
        if process not in self._cpu:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._cpu[process] = times.user + times.system


def _reported(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, psutil.Error, RuntimeError) as error:
        return Missing(f"the system does not report it: {error}")
