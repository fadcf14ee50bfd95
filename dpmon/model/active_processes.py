"""Which processes of a run train now.

Trainings may follow each other. One may start another (an evaluation) and continue after it. A restarted job leaves its
old ranks behind. Processes are compared by the start of their first step or call, the end of their newest one, and
their own end if a reader knows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpmon.model.run_process import Process

_LATELY_NS = 30_000_000_000
_SILENCE_NS, _SILENCE_STEPS = 2_000_000_000, 3
"""A process that has been silent for this many ns, and for the time of this many of its own steps, gives way to another
that began after its newest step."""


def ended_processes(activities: Mapping[int, tuple[str, int]]) -> frozenset[int]:
    """Return the processes that have ended, by their activities as a reader reports them."""
    return frozenset(process for process, (activity, _) in activities.items() if activity == "ended")


def find_training_processes(processes: Mapping[int, Process], ended: Set[int]) -> tuple[int, ...]:
    """Return the processes that train now, by rank, the newest of each: a restarted job has several of one rank.

    They have a step or call in the last half minute, unless another took over. A rank stays one however long it waits
    or after it has `ended`, until the job starts again or a process without a rank trains after it. Another process
    that has ended counts only if no other one does: until another resumes.
    """
    newest_by_rank: dict[tuple[bool, int], Process] = {}
    newest_ns = max((process.seen_ns for process in processes.values()), default=-1)
    for process in _choose_training(_recently_active(processes.values(), newest_ns), newest_ns, ended):
        key = (True, process.process) if process.rank is None else (False, process.rank)
        if key not in newest_by_rank or process.seen_ns > newest_by_rank[key].seen_ns:
            newest_by_rank[key] = process
    return tuple(newest_by_rank[key].process for key in sorted(newest_by_rank))


def _choose_training(recent: Sequence[Process], newest_ns: int, ended: Set[int]) -> Sequence[Process]:
    """Return the processes that no other one has replaced."""
    if len(recent) < 2:
        return recent
    newest_start_ns = max(process.began_ns for process in recent)
    rankless_start_ns = max((process.began_ns for process in recent if process.rank is None), default=-1)
    restart_ns, replaced_end_ns = _started_again(recent)

    def is_replaced(process: Process, start_ns: int) -> bool:
        """Return whether it is silent or has ended, and another one began after its newest step or call."""
        step_ns = process.last_step.wall_ns if process.last_step is not None else 0
        silence_ns = max(_SILENCE_NS, _SILENCE_STEPS * step_ns)
        is_silent = process.process in ended or newest_ns - process.seen_ns >= silence_ns
        return start_ns > process.seen_ns and is_silent

    def gave_way(process: Process) -> bool:
        if process.rank is None:
            return is_replaced(process, newest_start_ns)
        replaced = process.began_ns <= replaced_end_ns and is_replaced(process, restart_ns)
        return replaced or is_replaced(process, rankless_start_ns)

    has_no_successor = restart_ns < 0 and all(process.rank is not None for process in recent)
    remaining = recent if has_no_successor else [process for process in recent if not gave_way(process)]
    live = [process for process in remaining if process.rank is not None or process.process not in ended]
    return live or remaining or recent


def _recently_active(processes: Iterable[Process], newest_ns: int) -> list[Process]:
    """Return the ranks with a step or call, and the other processes with a recent one.

    If there are ranks, a process without a rank counts only if it trains: others, for example, only evaluate.
    """
    since_ns = max(newest_ns - _LATELY_NS, 0)
    active = [process for process in processes if process.seen_ns >= (since_ns if process.rank is None else 0)]
    has_ranks = any(process.rank is not None for process in active)
    return [process for process in active if process.rank is not None or process.has_trained or not has_ranks]


def _started_again(recent: Sequence[Process]) -> tuple[int, int]:
    """Return the newest start of a process that replaced one of the same rank, and the end of the newest replaced one.

    All earlier processes give way, even ranks without a successor: a restarted job may have fewer ranks.
    """
    by_rank: dict[int, list[Process]] = {}
    if len({process.rank for process in recent}) == len(recent):
        return -1, -1
    for process in recent:
        if process.rank is not None:
            by_rank.setdefault(process.rank, []).append(process)
    restart_ns = replaced_end_ns = -1
    for processes in by_rank.values():
        successor = max(processes, key=lambda process: process.began_ns)
        replaced = [process.seen_ns for process in processes if process.seen_ns < successor.began_ns]
        if replaced:
            restart_ns, replaced_end_ns = max(restart_ns, successor.began_ns), max(replaced_end_ns, *replaced)
    return restart_ns, replaced_end_ns
