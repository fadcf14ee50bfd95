"""The processes of a run as of a time, and which of them a snapshot has in full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from dpmon.model.nodes import read_nodes
from dpmon.model.run_events import RunEvents
from dpmon.model.run_snapshot import (
    MAX_LISTED_RANKS,
    Process,
    ProcessInfo,
    RunSnapshot,
    SnapshotRequest,
)
from dpmon.model.stragglers import RankTimes, wait_of
from dpmon.store.events import read_newest_memory
from dpmon.store.steps import (
    find_step_number,
    read_first_activity_ns,
    read_newest_activity,
    read_newest_steps,
)

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store


def read_process_table(store: Store, events: RunEvents, ended: frozenset[int], node: int | None = None) -> RunSnapshot:
    """Return a snapshot with only the processes, without their metrics; parameters as in `SnapshotBuilder.build`.

    `node`: only the processes of a node, as on its own screen.
    """
    nodes = read_nodes(store)
    selected = [status for status in nodes if node is None or status.number == node]
    node_names = {number: status.name for status in selected for number in status.processes}
    numbers = sorted(node_names if node is not None else {**dict.fromkeys(events.info), **store.ranks})
    nodes_of = {number: node_names.get(number) for number in numbers}
    processes = _processes(store, events, nodes_of)
    newest_ns = max((process.seen_ns for process in processes.values()), default=-1)
    snapshot = RunSnapshot(
        processes,
        nodes if node is None else (),
        newest_ns=newest_ns,
        main_kind=store.main_kind,
        kind_words=store.kind_words,
        ended=ended,
    )
    return replace(snapshot, order=tuple(process.process for process in snapshot.training_processes))


def with_processes(snapshot: RunSnapshot, store: Store, events: RunEvents, numbers: Iterable[int]) -> RunSnapshot:
    """Return the snapshot with the newest values of some processes."""
    processes = _processes(store, events, {number: snapshot.processes[number].node for number in numbers})
    newest_ns = max(snapshot.newest_ns, *(process.seen_ns for process in processes.values()))
    return replace(snapshot, processes={**snapshot.processes, **processes}, newest_ns=newest_ns)


def _processes(store: Store, events: RunEvents, nodes: Mapping[int, str | None]) -> dict[int, Process]:
    """Return some processes without their metrics, by process index. `nodes`: the name of the node of each."""
    numbers = sorted(nodes)
    steps, newest = read_newest_steps(store, numbers), read_newest_activity(store, numbers)
    memory = read_newest_memory(store, numbers)
    starts = read_first_activity_ns(store, sorted(newest))
    processes = {}
    for number in numbers:
        step, (mode, seen_ns) = steps.get(number), newest.get(number, ("", -1))
        event = memory.get(number)
        rank, info = store.ranks.get(number), events.info.get(number) or ProcessInfo(number)
        processes[number] = Process(
            number,
            rank if rank is not None else info.rank,
            info,
            has_trained=number in store.trained_processes,
            began_ns=starts.get(number, -1),
            seen_ns=seen_ns,
            last_step=step,
            step_number=0 if step is None else find_step_number(store, step),
            refusals=events.refusals_by_root(number),
            paused_since_ns=events.paused_since(number, None if step is None else step.start_ns),
            memory={} if event is None else event.data,
            node=nodes[number],
            **events.active_mode(number, step, mode)._asdict(),
        )
    return processes


def other_ranks(snapshot: RunSnapshot, focus: Process) -> list[Process]:
    """Return the ranks that train together with `focus`."""
    ranks = [process for process in snapshot.training_processes if process.rank is not None]
    return [rank for rank in ranks if rank.process != focus.process]


def ranks_on_other_nodes(store: Store, snapshot: RunSnapshot, request: SnapshotRequest) -> list[Process]:
    """Return the ranks of other nodes, without metrics, if only one node is requested: one may be the straggler."""
    if request.node is None:
        return []
    nodes = {process: node for node in read_nodes(store) for process in node.processes if node.number != request.node}
    newest = {rank: process for process, rank in sorted(store.ranks.items()) if process in nodes}
    return [Process(process, rank, node=nodes[process].name) for rank, process in newest.items()]


def choose_slowest(times: Sequence[RankTimes], request: SnapshotRequest) -> set[int]:
    """Return the processes of the ranks that wait least, if only these are requested; else none."""
    known = [rank for rank in times if rank.wait_ns is not None]
    if request.worst == 0 or len(known) <= MAX_LISTED_RANKS:
        return set()
    return {rank.process for rank in nsmallest(request.worst, known, key=wait_of)}


def choose_other_processes(snapshot: RunSnapshot, focus: Process, request: SnapshotRequest) -> list[Process]:
    """Return the other training processes that the request includes, by rank."""
    ranks = snapshot.training_processes
    visible = [*ranks[: request.ranks], *ranks[request.first_rank : request.first_rank + request.ranks]]
    return list({process.process: process for process in visible if process.process != focus.process}.values())
