"""Writes the chunks of several nodes into one history.

Rows are inserted as the nodes have sent them; a row with the same key is replaced. Process p of node n of N becomes
p * N + n, and key numbers likewise. Rows with ids get new ids from this history's counter. Only the waits between ranks
on different nodes are added (CrossNodeWaits).
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

from dpmon.errors import HistoryError
from dpmon.mirror.chunk_receiver import Chunk, RowLine
from dpmon.record.safe_json import ns_member
from dpmon.record.schema import SECOND
from dpmon.run.run_directory import RunInfo
from dpmon.store.database import BUCKET_TABLES
from dpmon.store.events import EVENTS, LASTING, EventRow, parse_event, read_events
from dpmon.store.history_writer import LIMIT_BYTES, HistoryWriter
from dpmon.store.node_table import NODE_DEVICES, NODES, NodeRow, read_node_rows
from dpmon.store.rings import read_rings
from dpmon.store.row_exchange import SENT, columns_sent
from dpmon.store.steps import STEPS, StepRow
from dpmon.store.store_queries import Store
from dpmon.store.sync_passes import RankGroups, SyncStep, join_sync_steps, sync_device_ns
from dpmon.store.table import NUMBERED, SEQ
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES, KeyNumbers, TallyKey
from dpmon.store.tally_tables import add_steps
from dpmon.store.time_buckets import WIDTHS, existing_widths, merge_buckets, note_deleted

MAX_HISTORY_BYTES = 1 << 30
_MAX_LAG_S = 3600
"""The mirror does not wait for a node whose time buckets are further behind than this."""
_PROCESS = re.compile(r'"process": ?(-?\d{1,19})(?=[,}\]\s])')
_NUMBER_HERE = "{value} * {nodes} + {node}"
_DEVICE_HERE = f"CASE WHEN {{value}} < 0 THEN -1 - {{node}} ELSE {{node}} * {NODE_DEVICES} + {{value}} END"
_EXPRESSIONS: Mapping[str | tuple[str, str], str] = {
    "process": f"CASE WHEN {{value}} < 0 THEN -1 - {{node}} ELSE {_NUMBER_HERE} END",
    "key": _NUMBER_HERE,
    ("device_rollups", "device"): _DEVICE_HERE,
    ("keys", "number"): _NUMBER_HERE,
    ("gaps", "id"): _NUMBER_HERE,
    ("rings", "name"): "{node} || '/' || {value}",
    **{(table.name, "id"): "{id}" for table in SENT.values() if table.sent == NUMBERED},
}
"""SQL for the columns that are not inserted as they are sent: by column, or by table and column."""
_FIRST_ID = "ifnull((SELECT first_id FROM rings AS known WHERE known.name = {name}), {id})"
"""SQL for a lower bound of the ids of a process's steps: the next free id when its ring first arrived."""


class ChunkError(HistoryError):
    """A node's chunk that is refused, because what its rows say cannot be used."""

    def __init__(self, node: NodeRow, text: str) -> None:
        super().__init__(text)
        self.node = node


_INVALID = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
_MirrorEvent = tuple[str, Mapping[str, Any]]
"""Kind and data of an event of the mirror itself."""


class MirrorHistory:
    """The history of a mirror."""

    def __init__(self, directory: Path, run_info: RunInfo) -> None:
        """Open the history of the mirror's run. Raises HistoryError."""
        self._node_count = len(run_info.nodes)
        max_bytes = min(LIMIT_BYTES * self._node_count, MAX_HISTORY_BYTES)
        about = {"run": run_info.id, "origin_s": run_info.origin_s}
        self._history = HistoryWriter.open(directory, about, max_bytes)
        self._db = self._history.connection.db
        rows = read_node_rows(self._history.connection)
        self.nodes = rows or [NodeRow(number, name) for number, name in enumerate(run_info.nodes)]
        """The nodes by number. After a change, `write` must be called soon."""
        self._waits = CrossNodeWaits(self._history.key_numbers)
        self._sync_steps: list[SyncStep] = []
        for ring in read_rings(self._history.connection).values():
            if ring.node is not None:
                self._waits.register_rank(self.nodes[ring.node], ring.rank)
        condition = f"WHERE {LASTING} AND kind IN ('process', 'ddp') ORDER BY id"
        for row in EVENTS.select(self._history.connection, condition):
            if row.process is not None:
                self._waits.handle_event(row.process, row.kind, row.event.data)

    def close(self) -> None:
        """Close the history."""
        self._history.close()

    def local_process_number(self, node: int, process: int) -> int:
        """Return the number here of a process of a node."""
        return process * self._node_count + node

    def node_and_process(self, number: int) -> tuple[int, int]:
        """Return the node of a process and its number on the node, from its number here."""
        process, node = divmod(number, self._node_count)
        return node, process

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the newest record of a stall; None if there is none."""
        return next((event.data for event in read_events(Store(self._history.connection), "stall", limit=1)), None)

    def write(self, chunks: Sequence[tuple[NodeRow, Chunk]], events: Sequence[_MirrorEvent] = ()) -> None:
        """Write chunks, events of the mirror itself and the table of nodes, or nothing. Raises HistoryError.

        After an error, the same chunks can be written again.
        """
        earlier_nodes, next_id = [(node, vars(node).copy()) for node in self.nodes], self._history.next_id
        try:
            self._history.run_transaction(lambda: self._insert_all(chunks, events))
        except HistoryError:
            for node, values in earlier_nodes:
                vars(node).update(values)
            self._history.next_id = next_id
            raise

    def _insert_all(self, chunks: Sequence[tuple[NodeRow, Chunk]], events: Sequence[_MirrorEvent]) -> None:
        self._sync_steps.clear()
        for node, chunk in chunks:
            try:
                self._insert_chunk(node, chunk)
            except (HistoryError, sqlite3.IntegrityError, *_INVALID) as error:
                raise ChunkError(node, f"{type(error).__name__}: {error}") from error
        for kind, data in events:
            text = json.dumps({"kind": kind, **data}, separators=(",", ":"))
            EVENTS.insert(self._db, [EventRow(self._history.next_id, None, kind, ns_member(data, "t_s"), text)])
            self._history.next_id += 1
        add_steps(self._db, {}, join_sync_steps(self._db, self._sync_steps, self._history.key_numbers))
        self._merge_buckets()
        NODES.insert(self._db, self.nodes)

    # ------------------------------------------------------------------------------------------ a chunk

    def _insert_chunk(self, node: NodeRow, chunk: Chunk) -> None:
        beat = chunk.beat
        ids = sorted({row_id for line in chunk.lines if _is_numbered(line) for row_id in line.column("id")})
        new_ids = dict(zip(ids, range(self._history.next_id, self._history.next_id + len(ids)), strict=True))
        for line in sorted(chunk.lines, key=lambda line: line.table == "steps"):  # they need the events and keys
            self._insert_line(node, line, new_ids)
        condition = "WHERE id >= ? AND sync_number IS NOT NULL"
        new_steps = STEPS.select(self._history.connection, condition, (self._history.next_id,))
        self._sync_steps += self._waits.sync_steps(node, new_steps)
        self._history.next_id += len(ids)
        self._remake_buckets(node, chunk.lines)
        deleted = beat.get("deleted")
        for width, second in deleted.items() if isinstance(deleted, dict) else ():
            if width in map(str, WIDTHS[:-1]) and type(second) is int and 0 < second <= beat["tallied_s"]:
                note_deleted(self._db, int(width), second)
        if type(left_out := beat.get("left_out")) is int and 0 < left_out <= beat["offset"]:
            self._db.execute("UPDATE meta SET value = min(value + ?, 1 << 60) WHERE key = 'pruned'", (left_out,))
        node.received, node.seq = beat["offset"], beat["seq"]
        node.tallied_s = max(beat["tallied_s"], node.tallied_s)

    def _insert_line(self, node: NodeRow, line: RowLine, new_ids: Mapping[int, int]) -> None:
        table = line.table
        if table == "events":
            line = self._with_local_processes(node, line)
        constants: Iterable[tuple[int, ...]] = repeat((node.number,))
        if _is_numbered(line):
            constants = [(node.number, new_ids[row_id]) for row_id in line.column("id")]
        elif table == "rings":
            constants = repeat((node.number, self._history.next_id))
        rows = [(*row, *of_row) for row, of_row in zip(line.rows, constants, strict=False)]
        self._db.executemany(_insert_sql(table, self._node_count), rows)
        if table == "keys":
            self._history.key_numbers.reload()
        elif table == "rings":
            for rank in line.column("rank"):
                self._waits.register_rank(node, rank)
        elif table == "losses":
            processes = [self.local_process_number(node.number, process) for process in line.column("process")]
            self._history.loss_thinning.note_losses(zip(processes, line.column("definition"), strict=True))

    def _with_local_processes(self, node: NodeRow, line: RowLine) -> RowLine:
        """Return events of a node with the numbers that processes have here."""

        def local_text(match: re.Match[str]) -> str:
            number = int(match[1])
            return f'"process":{self.local_process_number(node.number, number) if number >= 0 else "null"}'

        rows = []
        for values in line.dicts():
            text = _PROCESS.sub(local_text, values["json"])
            event = parse_event(text)
            if values["process"] < 0:
                text = f'{text.rstrip()[:-1]},"node":{node.number}}}'
            elif event.kind in ("process", "ddp"):
                process = self.local_process_number(node.number, values["process"])
                self._waits.handle_event(process, event.kind, event.data)
            rows.append([*(values | {"json": text}).values()])
        return RowLine("events", rows)

    def _remake_buckets(self, node: NodeRow, lines: Iterable[RowLine]) -> None:
        """Make those wider buckets of a node again that were made before these lines arrived.

        It may be reached after other nodes, and it sends seconds again that have changed. Buckets of some widths are
        not made here, because the node sends all of them (IncrementalRows).
        """
        if not node.shift_s:
            return
        made_s = dict(existing_widths(self._db, 0))
        sent = defaultdict[int, set[int]](set)
        """The starts of the buckets that it has sent, by width."""
        for line in lines:
            if SENT[line.table] in BUCKET_TABLES:
                for width, start_s in zip(line.column("width"), line.column("start_s"), strict=True):
                    sent[width].add(start_s)
        for finer, width in pairwise(WIDTHS):
            if node.shift_s % width:
                starts = {start_s // width * width for start_s in sent[finer]}
                remade = [start_s for start_s in starts if start_s < made_s.get(width, 0)]
                sent[width].update(remade)
                parameters = [{"finer": finer, "width": width, "start": start_s} for start_s in remade]
                for table in BUCKET_TABLES:
                    self._db.executemany(_remake_sql(table.name, node.number, self._node_count), parameters)

    def _merge_buckets(self) -> None:
        """Make the wider buckets up to the time to which all connected nodes have sent theirs.

        They have the waits between nodes, and the seconds of nodes that are gone. What a node sends takes their place.
        """
        tallied_seconds = [node.tallied_s for node in self.nodes if node.state == "connected"]
        tallied_seconds = [second for second in tallied_seconds if second > max(tallied_seconds) - _MAX_LAG_S]
        end_s = min(tallied_seconds, default=0)
        if all(node.state == "ended" for node in self.nodes):
            end_s = max(node.tallied_s for node in self.nodes)
        merge_buckets(self._db, BUCKET_TABLES, end_s)


class CrossNodeWaits:
    """The process groups that span nodes, and their steps. No single node can compute the waits in these."""

    def __init__(self, keys: KeyNumbers) -> None:
        """`keys`: of the history of the mirror."""
        self._keys = keys
        self._groups = RankGroups()
        self._ranks: dict[int, set[int]] = defaultdict(set)
        """The ranks on each node."""
        self._spans_nodes_by_process: dict[int, bool] = {}
        """Whether a process averages its gradients with ranks on other nodes, by process."""

    def register_rank(self, node: NodeRow, rank: int | None) -> None:
        """Register the rank of a process on a node."""
        if rank is not None and rank not in self._ranks[node.number]:
            self._ranks[node.number].add(rank)
            self._spans_nodes_by_process.clear()

    def handle_event(self, process: int, kind: str, data: Mapping[str, Any]) -> None:
        """Note the rank or the process group that an event of a process contains."""
        self._groups.handle_event(process, kind, data)
        self._spans_nodes_by_process.clear()

    def _spans_nodes(self, node: NodeRow, process: int) -> bool:
        """Return whether a process averages its gradients with ranks on other nodes."""
        spans = self._spans_nodes_by_process.get(process)
        if spans is None:
            ranks = self._groups.ranks(process)
            own_ranks = self._ranks[node.number]
            spans = ranks is not None and (len(ranks) > len(own_ranks) or not own_ranks.issuperset(ranks))
            self._spans_nodes_by_process[process] = spans
        return spans

    def sync_steps(self, node: NodeRow, steps: Iterable[StepRow]) -> Iterator[SyncStep]:
        """Yield the steps of a node that wait for steps of ranks on other nodes."""
        shift_ns, first_s = max(node.clock_ns or 0, 0), (node.origin_s or 0) + (node.shift_s or 0)
        for row in steps:
            if row.sync_number is None or not self._spans_nodes(node, row.process):
                continue
            tail_ns = row.measurement("sync") if row.device is None else sync_device_ns(json.loads(row.device)[1:])
            key = TallyKey(row.process, row.mode, row.kind, row.known.get("samples", NO_SAMPLES))
            if self._keys.find(key) is None:
                key = key._replace(batch=OTHER_SIZES)
            if self._keys.find(key) is not None:
                step = self._groups.sync_step(key, row, tail_ns, (row.end_ns - shift_ns) // SECOND + first_s)
                if step is not None:
                    yield step


def _is_numbered(line: RowLine) -> bool:
    return SENT[line.table].sent == NUMBERED


@cache
def _remake_sql(table: str, node: int, nodes: int) -> str:
    """Return the statement that makes a node's rows of the bucket `width`, `start` from those of width `finer`."""
    number, finer_rows = "key", "width = :finer AND start_s >= :start AND start_s < :start + :width"
    if "key" not in columns_sent(table):
        number = f"CASE WHEN process < 0 THEN {nodes} - 1 - process ELSE process END"
    source = f"FROM {table} WHERE {finer_rows} AND ({number}) % {nodes} = {node}"
    return SENT[table].merge_sql(source, insertion="INSERT OR REPLACE", width=":width", start_s=":start")


@cache
def _insert_sql(table: str, nodes: int) -> str:
    """Return the statement that inserts rows of a node.

    Its parameters are the values of a row, then the number of the node, and for some tables an id.
    """
    columns = columns_sent(table)
    constants = {"nodes": str(nodes), "node": f"?{len(columns) + 1}", "id": f"?{len(columns) + 2}"}
    values = {}
    for index, name in enumerate(columns, start=1):
        expression = _EXPRESSIONS.get((table, name)) or _EXPRESSIONS.get(name) or "{value}"
        values[name] = expression.format(value=f"?{index}", **constants)
    if table == "rings":
        values |= {"node": constants["node"], "first_id": _FIRST_ID.format(name=values["name"], **constants)}
    if SENT[table].has_seq:
        values["seq"] = SEQ
    return f"INSERT OR REPLACE INTO {table} ({', '.join(values)}) VALUES ({', '.join(values.values())})"
