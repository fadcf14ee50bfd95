"""The processes of a distributed run side by side. Pure."""

from __future__ import annotations

from dpmon.model.process import Process
from dpmon.model.state import State
from dpmon.record.wire import RANK_MODES


def training(state: State) -> list[Process]:
    """The processes that train now (`State.training`), by rank, the newest of each.

    A restarted job (torchrun after a failure) has several processes of one rank.
    """
    found: dict[tuple[bool, int], Process] = {}
    for process in state.training():
        key = (True, process.process) if process.rank is None else (False, process.rank)
        if key not in found or process.seen_ns > found[key].seen_ns:
            found[key] = process
    return [found[key] for key in sorted(found)]


def world(process: Process) -> int | None:
    """The number of ranks, as the process reported it; None outside torch.distributed."""
    value = process.info.world
    return value if value is not None and value > 0 else None


def distributed(process: Process) -> str | None:
    """How the process trains one model together with other ranks (a key of RANK_MODES); None if it does not."""
    return next((via for _, via in process.calls if via in RANK_MODES), None)


def toggle_refusal(state: State) -> str | None:
    """Why the mode cannot be switched now, in either direction; None if it may be possible."""
    process = state.focus()
    if process is None:
        return "no training process is known yet"
    by = distributed(process)
    if by is not None:
        return f"the ranks train by {by}: one rank cannot switch its mode alone"
    if process.rank is not None and (world(process) or 1) > 1:
        return "several ranks train, each on its own device"
    return None
