"""The processes of a run as of a time, and which of them a picture shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from dpmon.model.nodes import read_nodes
from dpmon.model.run_events import RunEvents
from dpmon.model.run_snapshot import (
    MAX_FULLY_READ,
    MAX_LISTED_RANKS,
    Process,
    ProcessInfo,
    RunSnapshot,
    SnapshotRequest,
)
from dpmon.model.stragglers import RankTimes, wait_of

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store


def read_process_table(rows: Store, events: RunEvents, ended: frozenset[int], node: int | None = None) -> RunSnapshot:
    """A state with only the processes, without their figures; parameters as in `SnapshotBuilder.build`.

    `node`: only the processes of a node, as on its own screen.
    """
    nodes = read_nodes(rows)
    names = {number: one.name for one in nodes for number in one.processes if node is None or one.number == node}
    numbers = sorted(names if node is not None else {**dict.fromkeys(events.info), **rows.ranks})
    nodes_of = {number: names.get(number) for number in numbers}
    known = _processes(rows, events, nodes_of, plain=len(numbers) > MAX_FULLY_READ)
    newest_ns = max((process.seen_ns for process in known.values()), default=-1)
    state = RunSnapshot(processes=known, nodes=() if node is not None else nodes, newest_ns=newest_ns, ended=ended)
    return replace(state, order=tuple(process.process for process in state.training_processes))


def with_processes(state: RunSnapshot, rows: Store, events: RunEvents, numbers: Iterable[int]) -> RunSnapshot:
    """The state with the newest facts of some processes."""
    known = _processes(rows, events, {number: state.processes[number].node for number in numbers})
    newest_ns = max(state.newest_ns, *(process.seen_ns for process in known.values()))
    return replace(state, processes={**state.processes, **known}, newest_ns=newest_ns)


def _processes(
    rows: Store, events: RunEvents, nodes: Mapping[int, str | None], *, plain: bool = False
) -> dict[int, Process]:
    """Some processes without their figures, by number; `nodes`: the name of the node of each.

    `plain`: their last steps are without phases.
    """
    numbers = sorted(nodes)
    steps, calls = rows.newest_steps(numbers, plain=plain), rows.newest_calls(numbers)
    memory = rows.newest_memory(numbers)
    began = rows.first_activity_ns(sorted({*steps, *calls}))
    known = {}
    for number in numbers:
        step, (mode, called_ns) = steps.get(number), calls.get(number, ("", -1))
        held = memory.get(number)
        rank, info = rows.ranks.get(number), events.info.get(number) or ProcessInfo(number)
        known[number] = Process(
            number,
            rank if rank is not None else info.rank,
            info,
            began_ns=began.get(number, -1),
            seen_ns=max(-1 if step is None else step.start_ns + step.wall_ns, called_ns),
            last_step=step,
            refusals=events.refusals_by_root(number),
            paused_since_ns=events.paused_since(number, None if step is None else step.start_ns),
            memory=held.data if held is not None and isinstance(held.data.get("devices"), list) else {},
            node=nodes[number],
            **events.active_mode(number, step, mode)._asdict(),
        )
    return known


def other_ranks(state: RunSnapshot, focus: Process) -> list[Process]:
    """The ranks that train beside `focus`."""
    return [one for one in state.training_processes if one.rank is not None and one.process != focus.process]


def ranks_on_other_nodes(rows: Store, state: RunSnapshot, wanted: SnapshotRequest) -> list[Process]:
    """The ranks of the nodes outside a picture of one node, without figures: the straggler may be one of them."""
    if wanted.node is None:
        return []
    nodes = {process: node for node in read_nodes(rows) for process in node.processes if node.number != wanted.node}
    newest = {rank: process for process, rank in sorted(rows.ranks.items()) if process in nodes}
    return [Process(process, rank, node=nodes[process].name) for rank, process in newest.items()]


def choose_slowest(times: Sequence[RankTimes], wanted: SnapshotRequest) -> set[int]:
    """The processes of the ranks that wait least, if a picture shows only these; else none."""
    known = [one for one in times if one.wait_ns is not None]
    if wanted.worst == 0 or len(known) <= MAX_LISTED_RANKS:
        return set()
    return {one.process for one in nsmallest(wanted.worst, known, key=wait_of)}


def choose_other_processes(state: RunSnapshot, focus: Process, wanted: SnapshotRequest) -> list[Process]:
    """The other training processes that fit in a picture, by rank."""
    ranks = state.training_processes
    shown = [*ranks[: wanted.ranks], *ranks[wanted.first_rank : wanted.first_rank + wanted.ranks]]
    return list({process.process: process for process in shown if process.process != focus.process}.values())
