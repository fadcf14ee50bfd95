"""Records the state just before torch raises an out-of-memory error on a GPU.

torch calls an observer before it raises the error; torch's memory snapshots use such an observer, too. Until then, the
observer costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from dpmon.tracer.session import Session

MAX_REPORTS = 16
"""Most records per process: a script may try smaller and smaller batches."""

_watched: list[Session] = []
_reports = [0]


def watch(session: Session) -> None:
    """Record out-of-memory errors from now on. Does nothing before CUDA is initialised, or on later calls."""
    if _watched or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return
    _watched.append(session)
    try:
        attach(_observed)
    except Exception as error:  # noqa: BLE001 - an allocator without observers; the rest works
        session.fault("out of memory", error, fatal=False)


def _observed(device: int, asked: int, total: int, free: int) -> None:
    """Called by torch on the allocating thread, without torch's lock, before the error is raised."""
    session = _watched[0]
    try:
        _reports[0] += 1
        if _reports[0] > MAX_REPORTS:
            return
        stats = torch.cuda.memory_stats(device)
        state: dict[str, Any] = {
            "device": f"cuda:{device}", "asked_bytes": asked, "total_bytes": total, "free_bytes": free,
            "allocated_bytes": stats.get("allocated_bytes.all.current"),
            "reserved_bytes": stats.get("reserved_bytes.all.current"),
            "inactive_split_bytes": stats.get("inactive_split_bytes.all.current"),
        }  # fmt: skip
        session.event("oom", **state)
        session.warn(_sentence(state))
    except Exception as error:  # noqa: BLE001 - the script must see torch's own error
        session.fault("out of memory", error, fatal=False)


def _sentence(state: dict[str, Any]) -> str:
    gib = {name: _gib(state[f"{name}_bytes"]) for name in ("asked", "free", "total", "allocated", "reserved")}
    return (
        f"{state['device']} is out of memory: {gib['asked']} GiB were requested, {gib['free']} of {gib['total']} GiB"
        f" are free; torch holds {gib['reserved']} GiB, tensors use {gib['allocated']} GiB of that"
    )


def _gib(count: Any) -> str:
    return f"{count / (1 << 30):.2f}" if isinstance(count, int) else "–"
