"""Detects whether the kernel ran out of memory during a run."""

from __future__ import annotations

from pathlib import Path


class OomWatch:
    """Counts the processes that the kernel has killed for lack of memory since this object was created.

    Looks first at this process's control group, if the kernel provides its count (memory.events of cgroup v2), then at
    the whole machine (/proc/vmstat).
    """

    def __init__(self, root: Path = Path("/")) -> None:
        group = _own_group(root)
        self._places = [(group / "memory.events", "this control group")] if group is not None else []
        self._places.append((root / "proc/vmstat", "this machine"))
        self._before = [_oom_kills(path) for path, _ in self._places]

    def cause(self, signal: str | None) -> str | None:
        """Why a command was probably killed by `signal`; None if no process was killed for lack of memory."""
        if signal != "SIGKILL":
            return None
        for (path, where), before in zip(self._places, self._before, strict=True):
            now = _oom_kills(path)
            if before is not None and now is not None and now > before:
                return f"out of memory: the kernel killed {now - before} of {where}'s processes during the run"
        return None


def _own_group(root: Path) -> Path | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::/"):
            return root / "sys/fs/cgroup" / line[4:]
    return None


def _oom_kills(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return None
