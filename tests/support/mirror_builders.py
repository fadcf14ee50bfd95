"""Nodes of a run whose histories grow, the chunks that they send to a mirror, and the mirror's store."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from dpmon.export.incremental_rows import IncrementalRows
from dpmon.mirror.chunk_receiver import Chunk, ChunkReceiver
from dpmon.mirror.mirror_history import MirrorHistory
from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.run.run_directory import RunInfo
from dpmon.store.activity_times import read_times
from dpmon.store.collectives import read_collective_sums
from dpmon.store.database import HistoryConnection
from dpmon.store.device_rollups import read_device_minutes
from dpmon.store.events import iter_samples, read_events
from dpmon.store.gaps import read_gaps
from dpmon.store.loops import read_epochs
from dpmon.store.loss_table import find_invalid_losses
from dpmon.store.node_table import NodeRow, read_node_rows
from dpmon.store.records import newest_record_ns, read_records
from dpmon.store.row_exchange import columns_sent
from dpmon.store.shapes import read_shapes
from dpmon.store.steps import read_longest_steps, read_steps
from dpmon.store.store_queries import Store
from dpmon.store.tally_tables import read_tallies
from support.history_builders import ORIGIN_S, Recording
from support.record_builders import (
    SECOND,
    device_event,
    eventful_training,
    host_event,
    with_event_data,
)

CLOCK_SHIFTS_NS = (0, 7 * SECOND + 400_000_000)


MIRROR_NOW_NS = 10_000 * SECOND


def mirror_run_info(nodes: int) -> RunInfo:
    about: dict[str, Any] = {"id": "mirror", "name": "m", "command": (), "script": "m", "cwd": "/", "python": None}
    about |= {"started_unix": float(ORIGIN_S), "start_ns": 0, "boot_id": "", "headless": False}
    return RunInfo(**about, nodes=tuple(f"gpu-{number}" for number in range(nodes)))


class MirroredNode:
    """One machine: a history that grows, and what was sent of it."""

    def __init__(self, number: int, seed: int, *, sparse: bool = False) -> None:
        """`sparse`: the mirror has many nodes."""
        self.number, self._sparse = number, sparse
        self.shift_ns = CLOCK_SHIFTS_NS[number]
        self.shift_s = round(self.shift_ns / SECOND)
        self.recording = self.new_recording()
        chance = random.Random(seed + number)
        self._writers = {process: eventful_training(chance, process) for process in (0, 1)}
        self.now_s = 0
        self.rows = self.connected()

    def new_recording(self) -> Recording:
        """Return a recording that starts `shift_ns` after the mirror."""
        return Recording(origin_s=ORIGIN_S + self.shift_s)

    def connected(self, node: NodeRow | None = None) -> IncrementalRows:
        """Return what is sent after a new connection. `node`: what the mirror has; None: nothing."""
        has: dict[str, Any] = {"shift_ns": self.shift_ns, "sparse": self._sparse}
        if node is not None:
            has |= {"offset": node.received, "seq": node.seq, "tallied_s": node.tallied_s}
        return IncrementalRows(rollups=True, **has)

    def write(self) -> bool:
        """Write some more records of each process; return whether there were any."""
        for process, writer in list(self._writers.items()):
            rows = next(writer, None)
            if rows is None:
                del self._writers[process]
                continue
            rank = 2 * self.number + process
            rows = [self._moved(row, rank) for row in rows]
            self.recording.add(rows, process, rank)
            self.now_s = max([self.now_s, *(int(row.data["t_s"]) for row in rows if isinstance(row, Event))])
        self.recording.add([host_event(self.now_s), device_event(self.now_s, 3)])
        return bool(self._writers)

    @staticmethod
    def _moved(row: Row, rank: int) -> Row:
        if isinstance(row, Event) and row.kind == "process":
            return with_event_data(row, rank=rank, world=4)
        return (
            with_event_data(row, rank=rank, group=[0, 1, 2, 3]) if isinstance(row, Event) and row.kind == "ddp" else row
        )

    def chunk(self, until_s: int | None = None, *, last: bool = False) -> tuple[Chunk, bool]:
        """Return the next chunk as it arrives, and whether there is more. `until_s`: which seconds are complete."""
        if last:
            self.recording.end()
        before, store = self.rows.offset, self.recording.store()
        if until_s is None:
            until_s = max(newest_record_ns(store) // SECOND + (2 if last else -2), 0)
        lines, more = self.rows.next_chunk(store, until_s, is_last=last)
        receiver = ChunkReceiver(ORIGIN_S)
        for line in lines:
            assert line.isascii()
            assert receiver.add_line(line.encode(), MIRROR_NOW_NS) is None
        beat: dict[str, Any] = {"from": before, "offset": self.rows.offset, "tallied_s": self.rows.tallied_s}
        beat |= {"seq": self.rows.seq, "deleted": self.rows.deleted, "left_out": self.rows.left_out}
        chunk = receiver.add_line(b'{"beat": 1}', MIRROR_NOW_NS)
        assert isinstance(chunk, Chunk)
        return chunk._replace(beat=json.loads(json.dumps(beat))), more


def send_all(machine: MirroredNode, records: MirrorHistory, until_s: int | None = None, *, last: bool = False) -> int:
    """Write all chunks that a machine has; return how many. Other parameters as in `MirroredNode.chunk`."""
    count, more = 0, True
    while more:
        chunk, more = machine.chunk(until_s, last=last)
        records.write([(records.nodes[machine.number], chunk)])
        count += 1
    return count


def row_line(table: str, *rows: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a node with rows of a table. Columns without a value are NULL, empty or 0."""
    columns = columns_sent(table)
    usual = {name: None if type(None) in kinds else kinds[0]() for name, kinds in columns.items()}
    return {"table": table, "columns": list(columns), "rows": [[*(usual | row).values()] for row in rows]}


def open_mirror_store(records: MirrorHistory) -> Store:
    return Store(HistoryConnection(records._db))


_READS = (read_shapes, read_device_minutes, find_invalid_losses, read_collective_sums, read_times, read_tallies)


def check_all_readable(records: MirrorHistory) -> None:
    """Read all that readers read; fail if something is damaged."""
    store = open_mirror_store(records)
    everything: list[Callable[[], object]] = [
        lambda: list(read_records(store)),
        *(partial(read, store) for read in _READS),
        lambda: list(iter_samples(store)), lambda: read_gaps(store, 100),
        lambda: read_node_rows(store.connection),
        lambda: read_tallies(store, left_out=True),
        lambda: read_events(store, "device", "host", "process", "memory"),
        lambda: read_longest_steps(store, 10, "dp"),
        *(lambda process=process: read_steps(store, 50, process=process) for process in store.ranks),
        *(lambda process=process: read_epochs(store, process, 50) for process in store.ranks),
    ]  # fmt: skip
    for read in everything:
        read()
    for t_ns in (None, 5 * SECOND):
        state = RunAnalysis(store.as_of(t_ns))
        assert state.processes
