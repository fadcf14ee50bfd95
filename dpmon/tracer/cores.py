"""The cores that this process may use, and the number of threads that torch uses in parallel regions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_CGROUPS = Path("/sys/fs/cgroup")


def available_cores(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The number of cores this process may run on: its affinity, capped by its cgroups' CPU quota; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(cgroups, membership))]))


def _quotas(cgroups: Path, membership: Path) -> list[float]:
    """Return the CPU quotas of this process's cgroups, in cores, without cgroups that have no quota."""
    found = []
    try:
        lines = membership.read_text().splitlines()
    except (OSError, ValueError):
        return []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        here = path.strip("/")
        if not controllers:  # version 2: the quotas of all ancestors apply too
            groups = [Path(here), *Path(here).parents]
            found += [_quota(cgroups / group / "cpu.max") for group in groups]
        elif "cpu" in controllers.split(","):
            group = cgroups / controllers / here
            found.append(_quota(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"))
    return [quota for quota in found if quota is not None]


def _quota(*files: Path) -> float | None:
    """Return the quota in cores, read from one file or two (quota and period); None if there is no quota."""
    try:
        quota, period = (float(number) for path in files for number in path.read_text().split())
        return quota / period if quota > 0 and period > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


def limit_this_thread(count: int) -> None:
    """Limit parallel regions that begin on this thread to `count` threads; other threads keep their number.

    `torch.set_num_threads` is no alternative: it also sets the initial number of every later thread.
    """
    torch.get_num_threads()  # on a new thread, this sets torch's initial number, which would later replace ours
    for set_number in _setters():
        set_number(count)


@cache
def _setters() -> tuple[Callable[[int], object], ...]:
    """Return the C functions that set the number for the calling thread only; empty if torch uses no OpenMP and no MKL.

    Only loaded libraries are searched. The global scope comes first, as in the linker, because torch would also call
    a preloaded OpenMP. PyDLL keeps the GIL: a call takes half a microsecond, and releasing the GIL would cost more.
    """
    libraries = []
    for name, mode in ((None, 0), (str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), os.RTLD_NOLOAD)):
        try:
            libraries.append(ctypes.PyDLL(name, mode=mode))
        except OSError:
            continue
    found = []
    # MKL's lower-case name is the Fortran function, which takes a pointer.
    for symbol in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        function = next((getattr(library, symbol) for library in libraries if hasattr(library, symbol)), None)
        if function is not None:
            function.argtypes = (ctypes.c_int,)
            function.restype = ctypes.c_int if symbol.startswith("MKL") else None
            found.append(function)
    return tuple(found)
