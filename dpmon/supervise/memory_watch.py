"""Asks the training processes what keeps memory alive once it grows, and adds the record of a lack of memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dpmon.run.run_directory import ring_paths
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError
from dpmon.store.memory_growth import HOST_NAME, MemoryTrend
from dpmon.store.ring_drain import RingDrain
from dpmon.text.formatting import format_bytes
from dpmon.text.growth_text import describe_growth

CHECK_S, WALK_S = 5.0, 180.0
"""Time between two checks whether memory grows, and between two requests to the training processes."""
MAX_PROCESSES = 16
"""Most processes that are asked."""
MIN_FREE_SHARE = 0.1
"""The processes are also asked if a smaller share of the memory of a GPU is free."""
_NO_MEMORY = re.compile(
    "out of ?memory|MemoryError|Cannot allocate memory|can't allocate memory|Unable to allocate", re.I
)
_NO_SHM = re.compile("shared memory|Bus error|SIGBUS|No space left on device", re.I)
_SHM_SAMPLES = 30


class MemoryWatch:
    """The watch over the memory of one run."""

    def __init__(self, directory: Path, drain: RingDrain) -> None:
        self._directory = directory
        self._drain = drain
        self._next_s = 0.0

    def poll(self, now_s: float) -> None:
        """Ask the processes if it is time and memory grows. Never raises."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + CHECK_S
        try:
            self._ask(now_s)
        except Exception as error:  # noqa: BLE001 - the run must be recorded further
            self._next_s = math.inf
            self._drain.warn(f"growth of memory is no longer watched: {type(error).__name__}: {error}")

    def _ask(self, now_s: float) -> None:
        if any(trend.is_growing or _is_nearly_full(trend) for trend in self._drain.memory_trends()):
            self._next_s = now_s + WALK_S
            for path in ring_paths(self._directory)[:MAX_PROCESSES]:
                with suppress(RingError, OSError), closing(SpanReader(str(path))) as ring:
                    ring.request_walk()


def _is_nearly_full(gpu: MemoryTrend) -> bool:
    limit_bytes, room_bytes = gpu.limit_bytes, gpu.room_bytes
    return gpu.limit == "GPU" and room_bytes is not None and room_bytes < MIN_FREE_SHARE * (limit_bytes or 0)


def add_memory_note(cause: str | None, drain: RingDrain, output: str = "") -> str | None:
    """Return the cause of the run's end, with what the record says about a lack of memory if it is one.

    `output`: the end of the script's output. Of the exception of a loader worker, `cause` has only the class.
    """
    if cause is None:
        return None
    samples = drain.recorded_events("host", limit=_SHM_SAMPLES)
    parts, device = [cause], HOST_NAME
    # After the end of its processes, the run uses nothing.
    newest: Mapping[str, Any] = next((sample for sample in reversed(samples) if sample.get("run_mem_bytes")), {})
    shm_bytes = max((sample.get("shm_total_bytes") or 0 for sample in samples), default=0)
    if _NO_SHM.search(cause + output) and shm_bytes:
        used_bytes = max(sample.get("shm_used_bytes") or 0 for sample in samples)
        parts.append(f"{format_bytes(used_bytes)} of {format_bytes(shm_bytes)} in /dev/shm were used")
    if _NO_MEMORY.search(cause):
        oom = next(iter(drain.recorded_events("oom", limit=1)), None)
        if oom is not None and "CUDA" in cause:
            device = oom["device"]
            asked, free, total = (format_bytes(oom[f"{name}_bytes"]) for name in ("asked", "free", "total"))
            parts.append(f"{device}: {asked} were requested, {free} of {total} were free")
        elif newest.get("mem_room_bytes") is not None:
            room, limit = format_bytes(newest["mem_room_bytes"]), format_bytes(newest["mem_limit_bytes"])
            parts.append(f"the run used {format_bytes(newest['run_mem_bytes'])}; {room} of {limit} were free")
        trends = [trend for trend in drain.memory_trends() if trend.device == device and trend.is_growing]
        parts += [f"it grew {format_bytes(trend.growth.step_bytes)} per step" for trend in trends[:1]]
        parts += [describe_growth(data)[0] for data in drain.recorded_events("growth", limit=1) if data["names"]]
    return "; ".join(parts)
