"""Reads torch's allocator of each GPU: its statistics, and its state just before an out-of-memory error.

Statistics are read between two steps, and only after CUDA is initialized: by then CUDA_VISIBLE_DEVICES has taken
effect, even if the script sets it late. No function here waits for a stream. torch calls an observer before it raises
an out-of-memory error; until then, the observer costs nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache, partial
from itertools import count
from typing import Any

import torch

from dpmon.record.shared_names import find_program_frame, shorten_name
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import is_cuda_initialized

MAX_REPORTS = 16
"""How many out-of-memory errors are recorded per process: a script may try smaller and smaller batches."""
_STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_bytes": "allocated_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
_report_numbers = count(1)
MAX_BLOCKS = 20_000
"""With more blocks in use, their lines are not read: each block takes some microseconds."""


def statistics() -> dict[str, dict[str, object]]:
    """Return the UUID and the statistics of each GPU that torch uses in this process, by name (`cuda:1`).

    `inactive_split_bytes`: free remainders of blocks in use (fragmentation). `alloc_retries`: allocations that failed
    until the cache was emptied. `ooms`: allocations that failed even then.
    """
    statistics_by_device = {}
    for index in range(torch.cuda.device_count() if is_cuda_initialized() else 0):
        torch_stats = torch.cuda.memory_stats(index)
        stats = {name: torch_stats.get(key) for name, key in _STATISTICS.items()}
        if stats["reserved_bytes"] or stats["peak_bytes"]:
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # older versions of torch lack it
            statistics_by_device[f"cuda:{index}"] = {**stats, "uuid": None if uuid is None else str(uuid)}
    return statistics_by_device


# ------------------------------------------------------------------------------------------------ history


def start_allocation_history() -> str | None:
    """Let torch note the line of each allocation on GPUs. Return why it does not; None if it does."""
    if not is_cuda_initialized():
        return "no GPU is used"
    torch_c: Any = torch._C
    if torch_c._cuda_isHistoryEnabled():
        return "the script itself lets torch record allocations"
    torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")
    return None


def end_allocation_history() -> tuple[list[dict[str, object]], str | None]:
    """End the history. Return the lines that allocated most of what was not freed since its start, and why none."""
    count = sum(
        torch.cuda.memory_stats(index).get("active.all.current", 0) for index in range(torch.cuda.device_count())
    )
    lines: Counter[str] = Counter()
    snapshot = torch.cuda.memory._snapshot() if count <= MAX_BLOCKS else {"segments": (), "device_traces": ()}
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        frames = block.get("frames", ()) if block["state"] == "active_allocated" else ()
        index = find_program_frame([frame["filename"] for frame in frames])
        if index is not None:
            lines[f"{os.path.basename(frames[index]['filename'])}:{frames[index]['line']}"] += block["size"]
    if not any(len(trace) > 1 for trace in snapshot["device_traces"]):  # else the script has started one of its own
        torch.cuda.memory._record_memory_history(None)
    top = [{"place": shorten_name(place), "bytes": size} for place, size in lines.most_common(5)]
    return top, f"there are more than {MAX_BLOCKS:,} blocks" if count > MAX_BLOCKS else None


# ------------------------------------------------------------------------------------------------ out of memory


def watch_out_of_memory(session: Session) -> None:
    """Record out-of-memory errors from now on, if CUDA is initialized."""
    if is_cuda_initialized():
        _attach_observer(session)


@cache
def _attach_observer(session: Session) -> None:
    """Make torch call us before it raises an out-of-memory error; once, because it has no way to undo this."""
    with session.guard("out-of-memory error", fatal=False):  # an allocator may have no observers
        torch_c: Any = torch._C  # its type hints lack the function
        torch_c._cuda_attach_out_of_memory_observer(partial(_on_out_of_memory, session))


def _on_out_of_memory(session: Session, device: int, requested: int, total: int, free: int) -> None:
    """Record an out-of-memory error. torch calls this on the allocating thread, without its lock, before it raises."""
    with session.guard("out-of-memory error", fatal=False):
        if next(_report_numbers) > MAX_REPORTS:
            return
        stats = torch.cuda.memory_stats(device)
        names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        details: dict[str, Any] = {"device": f"cuda:{device}"}
        details |= {"asked_bytes": requested, "total_bytes": total, "free_bytes": free}
        details |= {name: stats.get(_STATISTICS[name]) for name in names}
        session.record_event("oom", **details)
        gib = {name: _gib(details[f"{name}_bytes"]) for name in ("asked", "free", "total", "allocated", "reserved")}
        session.warn(
            f"{details['device']} is out of memory: {gib['asked']} GiB were requested, {gib['free']} of {gib['total']}"
            f" GiB are free; torch holds {gib['reserved']} GiB, tensors use {gib['allocated']} GiB of that"
        )


def _gib(byte_count: object) -> str:
    """Format a number of bytes in GiB; "–" if it is unknown."""
    return f"{byte_count / (1 << 30):.2f}" if isinstance(byte_count, int) else "–"
