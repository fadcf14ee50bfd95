"""Reads what limits the memory of a run: the host, the cgroups of its command, and the rlimits of its processes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V2 = "memory.max", "memory.current", "inactive_file"


class MemoryLimit(NamedTuple):
    """A limit, and the bytes that are left until it."""

    name: str
    """host, cgroup, RLIMIT_AS or RLIMIT_DATA."""
    limit_bytes: int
    room_bytes: int


def iter_process_limits(pid: int, address_bytes: int, data_bytes: int) -> Iterator[MemoryLimit]:
    """Yield the rlimits of a process, given the size of its address space and of its data."""
    for name, used_bytes in (("RLIMIT_AS", address_bytes), ("RLIMIT_DATA", data_bytes)):
        with suppress(OSError):  # it has ended, or belongs to another user
            limit_bytes, _ = resource.prlimit(pid, getattr(resource, name))
            if limit_bytes != resource.RLIM_INFINITY:
                yield MemoryLimit(name, limit_bytes, max(limit_bytes - used_bytes, 0))


def iter_cgroup_limits(pid: int, host_bytes: int, mount: Path = CGROUPS) -> Iterator[MemoryLimit]:
    """Yield the memory limits below `host_bytes` of the cgroups of a process (version 1 or 2), and of those above them.

    Files that the kernel can free at once do not count as used. In a container, directories above it may be missing.
    """
    with suppress(OSError, ValueError):  # it has ended, or the kernel has no cgroups
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and "memory" not in controllers.split(","):
                continue
            top, (limit_file, usage_file, freeable) = mount, _V2
            if number != "0":
                top, (limit_file, usage_file, freeable) = mount / "memory", _V1
            group = top / path.lstrip("/")
            for directory in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                with suppress(OSError, ValueError):  # it is not here, or has no limit ("max")
                    limit_bytes, used_bytes = (int((directory / name).read_text()) for name in (limit_file, usage_file))
                    if limit_bytes < host_bytes:
                        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                        used_bytes -= int(statistics.get(freeable, 0))
                        yield MemoryLimit("cgroup", limit_bytes, max(limit_bytes - used_bytes, 0))
