"""Which processes of a run train now. Pure.

Trainings may follow each other. One may start another (an evaluation) and go on after it. A restarted job leaves its
old ranks behind. Processes are compared by the start of their first step or call, the end of their newest one, and
their own end if a reader knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpmon.model.run_snapshot import Process, RunSnapshot

_LATELY_NS = 30_000_000_000
_SILENCE_NS, _SILENCE_STEPS = 2_000_000_000, 3
"""A process that has been silent for this many ns, and for the time of this many of its own steps, gives way to another
that began after its newest step."""


def ended_processes(activities: Mapping[int, tuple[str, int]]) -> frozenset[int]:
    """The processes that have ended, by their activities as a reader reports them."""
    return frozenset(number for number, (what, _) in activities.items() if what == "ended")


def find_training_processes(state: RunSnapshot) -> list[Process]:
    """The processes that train now: with a step or call in the last half minute, unless another took over.

    A process that has ended counts only if no other one does: it is shown until another resumes.
    """
    lately = _recently_active(state)
    if len(lately) < 2:
        return lately
    newest = max(process.began_ns for process in lately)
    apart = max((process.began_ns for process in lately if process.rank is None), default=-1)
    again, before = _started_again(lately)

    def gave_way(process: Process) -> bool:
        if process.rank is None:
            return _is_replaced(process, newest, state.newest_ns)
        replaced = process.began_ns <= before and _is_replaced(process, again, state.newest_ns)
        return replaced or _is_replaced(process, apart, state.newest_ns)

    alone = again < 0 and all(process.rank is not None for process in lately)
    found = lately if alone else [process for process in lately if not gave_way(process)]
    return [process for process in found if process.process not in state.ended] or found or lately


def _recently_active(state: RunSnapshot) -> list[Process]:
    return [p for p in state.processes.values() if p.seen_ns >= max(state.newest_ns - _LATELY_NS, 0)]


def _is_replaced(process: Process, began_ns: int, now_ns: int) -> bool:
    """Whether `process` is silent, and another one began after its newest step or call."""
    usual = process.last_step.wall_ns if process.last_step is not None else 0
    silence = max(_SILENCE_NS, _SILENCE_STEPS * usual)
    return began_ns > process.seen_ns and now_ns - process.seen_ns >= silence


def _started_again(lately: Sequence[Process]) -> tuple[int, int]:
    """The newest start of a process that replaced one of the same rank, and the end of the newest replaced one.

    All earlier processes give way, even ranks without a successor: a restarted job may have fewer ranks.
    """
    by_rank: dict[int, list[Process]] = {}
    if len({process.rank for process in lately}) == len(lately):
        return -1, -1
    for process in lately:
        if process.rank is not None:
            by_rank.setdefault(process.rank, []).append(process)
    began = before = -1
    for processes in by_rank.values():
        successor = max(processes, key=lambda process: process.began_ns)
        replaced = [one.seen_ns for one in processes if one.seen_ns < successor.began_ns]
        if replaced:
            began, before = max(began, successor.began_ns), max(before, *replaced)
    return began, before
