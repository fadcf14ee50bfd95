"""The processes of a distributed run side by side: who trains, over what, and where each one's step goes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dpmon.model.process import CallTrack, Process
from dpmon.model.state import State
from dpmon.record.wire import DDP

__all__ = [
    "RankRow",
    "distributed",
    "rank_rows",
    "toggle_refusal",
    "training",
    "world",
]


class RankRow(NamedTuple):
    """One process of several; times are medians over its last minutes in ns, None where there is none."""

    process: int
    rank: int | None
    world: int | None
    track: CallTrack | None
    """Its calls of the root that is shown; None if it has not called that one."""
    step: int | None
    step_ns: float | None
    forward_ns: float | None
    backward_ns: float | None


def training(state: State) -> list[Process]:
    """The processes that train now (`State.training`), by rank, the newest of each.

    A job that was started again (torchrun after a failure) has several processes of one rank.
    """
    found: dict[tuple[bool, int], Process] = {}
    for process in state.training():
        key = (True, process.process) if process.rank is None else (False, process.rank)
        if key not in found or process.seen_ns > found[key].seen_ns:
            found[key] = process
    return [found[key] for key in sorted(found)]


def world(process: Process) -> int | None:
    """How many ranks there are, as the process itself was told; None outside torch.distributed."""
    value = process.info.get("world")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def distributed(process: Process) -> bool:
    """Whether it trains by DistributedDataParallel, whatever else it calls."""
    return any(via == DDP for _, via in process.calls)


def toggle_refusal(state: State) -> str | None:
    """Why the mode cannot be switched now, whatever is asked for; None if it may be possible."""
    process = state.focus()
    if process is None:
        return "no training process is known yet"
    if distributed(process):
        return "the ranks train by DistributedDataParallel: a process that split its model by itself would leave them"
    return None


def rank_rows(processes: Iterable[Process], key: tuple[str, str | None] | None) -> list[RankRow]:
    """A row for each process; `key`: the root (name, via) whose sizes are shown, each one's newest where it is None."""
    return [_row(process, key) for process in processes]


def _row(process: Process, key: tuple[str, str | None] | None) -> RankRow:
    track = process.calls.get(key) if key is not None else None
    if track is None and process.newest is not None:
        track = process.calls.get(process.newest)
    figures, last = process.figures, process.last_step
    return RankRow(
        process.process,
        process.rank,
        world(process),
        track,
        last.step if last is not None else None,
        figures.step_ns,
        figures.forward_ns,
        figures.backward_ns,
    )
