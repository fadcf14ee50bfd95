"""Writes the chunks of several nodes into one history.

Processes, keys and ids get new numbers here. Tallies are inserted as the nodes have sent them. Only the waits between
ranks on different nodes are added, because no single node can compute them (dpmon.mirror.cross_node_waits).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from dpmon.errors import HistoryError
from dpmon.mirror.chunk_receiver import Chunk
from dpmon.mirror.cross_node_waits import CrossNodeWaits
from dpmon.run.run_directory import RunInfo
from dpmon.store.database import BUCKET_TABLES
from dpmon.store.events import EVENTS, LASTING, parse_event, read_events
from dpmon.store.history_writer import LIMIT_BYTES, HistoryWriter
from dpmon.store.node_table import NODE_DEVICES, NodeRow, read_node_rows
from dpmon.store.rings import RingRow, read_rings
from dpmon.store.row_exchange import NUMBERED, columns_sent
from dpmon.store.steps import STEPS
from dpmon.store.store_queries import Store
from dpmon.store.sync_passes import SyncStep, join_sync_steps
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import add_steps
from dpmon.store.time_buckets import WIDTHS, merge_buckets, note_deleted

MAX_HISTORY_BYTES = 1 << 30
_MAX_KEYS, _MAX_PROCESSES = 4096, 1 << 16
"""Limits of the keys and processes of one node."""
_MAX_LAG_S = 3600
"""The mirror does not wait for a node whose tallies are further behind than this."""
_RING = re.compile(r"process-(\d{1,6})\.ring")
_SUPERVISOR_RING = "supervisor"
"""Name of the row of a node's supervisor among the node's rings."""
_PROCESS = re.compile(r'"process": ?(-?\d{1,19})(?=[,}\]\s])')
_COPIED_TABLES = ("definitions", "loops", "shapes", "collective_sums")
"""Tables in which only the number of the process is replaced."""


class ChunkError(HistoryError):
    """A node's chunk that is refused, because what its rows say cannot be used."""

    def __init__(self, node: NodeRow, text: str) -> None:
        super().__init__(text)
        self.node = node


_MirrorEvent = tuple[str, Mapping[str, Any]]
"""Kind and data of an event of the mirror itself."""


class MirrorHistory:
    """The history of a mirror."""

    def __init__(self, directory: Path, run_info: RunInfo) -> None:
        """Open the history of the mirror's run. Raises HistoryError."""
        max_bytes = min(LIMIT_BYTES * len(run_info.nodes), MAX_HISTORY_BYTES)
        self._history = HistoryWriter.open(directory, {"run": run_info.id, "start_ns": run_info.start_ns}, max_bytes)
        self._db = self._history.connection.db
        self.nodes = read_node_rows(self._history.connection) or [
            NodeRow(number, name) for number, name in enumerate(run_info.nodes)
        ]
        """The nodes by number. After a change, `write` must be called soon."""
        self._written: dict[int, tuple[Any, ...]] = {}
        self._rings = read_rings(self._history.connection)
        self._local_numbers: dict[int, dict[int, int]] = {node.number: {} for node in self.nodes}
        """The number here of each process, by node and its number on the node."""
        for ring in self._rings.values():
            if ring.node is not None and (match := _RING.fullmatch(ring.name.partition("/")[2])) is not None:
                self._local_numbers[ring.node][int(match[1])] = ring.process
        self._last_process = max([-1, *(ring.process for ring in self._rings.values())])
        self._keys = self._history.key_numbers
        self._local_keys: dict[int, dict[int, int]] = {node.number: {} for node in self.nodes}
        """The number here of each key, by node and its number on the node."""
        self._waits = CrossNodeWaits(self._keys)
        self._sync_steps: list[SyncStep] = []
        self._seq = 0
        """The number of the transaction."""
        self._staged: dict[str, list[Sequence[Any]]] = defaultdict(list)
        """Rows that are inserted together, by table."""
        self._rings_without_ids = {ring.process: ring for ring in self._rings.values() if ring.first_id is None}
        """The rings without a row in steps, by process."""
        for ring in self._rings.values():
            self._register_rank(ring)
        condition = f"WHERE {LASTING} AND kind IN ('process', 'ddp') ORDER BY id"
        for row in EVENTS.select(self._history.connection, condition):
            if row.process is not None:
                self._waits.handle_event(row.process, row.kind, row.event.data)

    def close(self) -> None:
        """Close the history."""
        self._history.close()

    def local_process_number(self, node: int, process: int) -> int | None:
        """Return the number here of a process of a node; None if it is unknown."""
        return self._local_numbers[node].get(process)

    def remote_processes(self) -> Mapping[int, tuple[int, int]]:
        """Return the node of each process and its number on the node, by its number here."""
        return {
            number: (node, process)
            for node, numbers in self._local_numbers.items()
            for process, number in numbers.items()
        }

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the newest record of a stall; None if there is none."""
        return next((event.data for event in read_events(Store(self._history.connection), "stall", limit=1)), None)

    def write(self, chunks: Sequence[tuple[NodeRow, Chunk]], events: Sequence[_MirrorEvent] = ()) -> None:
        """Write chunks, events of the mirror itself and the table of nodes, or nothing. Raises HistoryError.

        After an error, the same chunks can be written again.
        """
        earlier_nodes = [(node, _row_values(node)) for node in self.nodes]
        state = (
            self._history.next_id,
            dict(self._rings),
            {node: dict(local_numbers) for node, local_numbers in self._local_numbers.items()},
            {node: dict(local_keys) for node, local_keys in self._local_keys.items()},
            dict(self._rings_without_ids),
        )
        try:
            self._history.run_transaction(lambda seq: self._insert_all(chunks, events, seq))
        except HistoryError:
            for node, values in earlier_nodes:
                node.__dict__.update(zip(node.__dict__, values, strict=True))
            self._history.next_id, self._rings, self._local_numbers, self._local_keys, self._rings_without_ids = state
            self._written.clear()
            raise

    def _insert_all(self, chunks: Sequence[tuple[NodeRow, Chunk]], events: Sequence[_MirrorEvent], seq: int) -> None:
        self._staged.clear()
        self._sync_steps.clear()
        self._seq = seq
        for node, chunk in chunks:
            try:
                self._put_chunk(node, chunk)
            except (HistoryError, TypeError, ValueError, LookupError, ArithmeticError) as error:
                raise ChunkError(node, f"{type(error).__name__}: {error}") from error
        for kind, data in events:
            text = json.dumps({"kind": kind, **data}, separators=(",", ":"))
            time_s = data.get("t_s")
            t_ns = int(time_s * 1e9) if isinstance(time_s, (int, float)) else None
            self._stage_rows("events", [(self._next_id(), None, kind, t_ns, text)])
        self._flush()
        add_steps(self._db, seq, {}, join_sync_steps(self._db, self._sync_steps, self._keys))
        self._merge_buckets()
        node_rows = {node.number: _row_values(node) for node in self.nodes}
        self._stage_rows("nodes", [row for number, row in node_rows.items() if self._written.get(number) != row])
        self._written = node_rows
        self._flush()

    def _next_id(self) -> int:
        self._history.next_id += 1
        return self._history.next_id - 1

    def _stage_rows(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        self._staged[table] += rows

    def _flush(self, *tables: str) -> None:
        """Insert the staged rows of these tables, or of all tables."""
        for table in tables or list(self._staged):
            rows = self._staged.pop(table, None)
            if rows:
                self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    # ------------------------------------------------------------------------------------------ a chunk

    def _put_chunk(self, node: NodeRow, chunk: Chunk) -> None:
        rows, beat = chunk.rows, chunk.beat
        self._put_rings(node, rows.get("rings", ()))
        self._put_keys(node, rows.get("keys", ()))
        ids = sorted({row[0] for table in NUMBERED for row in rows.get(table, ())})
        first_id = self._history.next_id
        new_ids = dict(zip(ids, range(first_id, first_id + len(ids)), strict=True))
        self._history.next_id += len(ids)
        self._put_events(node, rows.get("events", ()), new_ids)
        for table in filter(rows.__contains__, ("steps", "collectives", "losses")):
            moved = [(new_ids[row[0]], number, *row[2:]) for row, number in self._renumber_rows(node, rows[table], 1)]
            if table == "steps":
                self._sync_steps += self._waits.sync_steps(node, list(map(STEPS.from_values, moved)))
                self._note_first_ids(moved)
            self._stage_rows(table, moved)
            if table == "losses":
                self._history.loss_thinning.note_losses((row[1], row[2]) for row in moved)
        for table in filter(rows.__contains__, _COPIED_TABLES):
            column = list(columns_sent(table)).index("process")
            known_rows = self._renumber_rows(node, rows[table], column)
            self._stage_rows(table, [(*row[:column], number, *row[column + 1 :]) for row, number in known_rows])
        self._stage_rows(
            "gaps", [(None, number, *row[2:]) for row, number in self._renumber_rows(node, rows.get("gaps", ()), 1)]
        )
        devices = rows.get("device_rollups", ())
        self._stage_rows(
            "device_rollups",
            [
                (row[0], _local_device_number(node, row[1]), *row[2:])
                for row in devices
                if row[1] < NODE_DEVICES and isfinite(row[4] + row[5])
            ],
        )
        self._put_tallies(node, rows)
        deleted = beat.get("deleted")
        for width, second in deleted.items() if isinstance(deleted, dict) else ():
            if width in map(str, WIDTHS[:-1]) and type(second) is int and 0 < second <= beat["tallied_s"]:
                note_deleted(self._db, int(width), second)
        if type(left_out := beat.get("left_out")) is int and 0 < left_out <= beat["offset"]:
            self._db.execute("UPDATE meta SET value = min(value + ?, 1 << 60) WHERE key = 'pruned'", (left_out,))
        node.received, node.tallied_s = beat["offset"], max(beat["tallied_s"], node.tallied_s)

    def _renumber_rows(
        self, node: NodeRow, rows: Iterable[tuple[Any, ...]], column: int
    ) -> list[tuple[tuple[Any, ...], int]]:
        """Return the rows with known processes, each with the number here of its process."""
        get = self._local_numbers[node.number].get
        return [(row, number) for row in rows if (number := get(row[column])) is not None]

    def _put_rings(self, node: NodeRow, rows: Iterable[tuple[Any, ...]]) -> None:
        changed_rings, numbers, lost_spans = [], self._local_numbers[node.number], 0
        for row in rows:
            ring = RingRow(*row)
            lost_spans += ring.missed if ring.name == _SUPERVISOR_RING else 0
            if ring.name != f"process-{ring.process}.ring" or not 0 <= ring.process < 1 << 20:
                continue
            if ring.process not in numbers:
                if len(numbers) >= _MAX_PROCESSES:
                    continue
                self._last_process += 1
                numbers[ring.process] = self._last_process
            ring.node, ring.name, ring.process = node.number, f"{node.number}/{ring.name}", numbers[ring.process]
            known_ring = self._rings.get(ring.name)
            ring.first_id, ring.last_id = None if known_ring is None else known_ring.first_id, None
            self._rings[ring.name] = ring
            if ring.first_id is None:
                self._rings_without_ids[ring.process] = ring
            self._register_rank(ring)
            changed_rings.append(ring)
        if lost_spans:
            name = f"{node.number}/{_SUPERVISOR_RING}"
            own_ring = self._rings.get(name, RingRow(name, -1 - node.number, None, 0, node=node.number))
            self._rings[name] = own_ring = replace(own_ring, missed=max(lost_spans, own_ring.missed))
            changed_rings.append(own_ring)
        self._stage_rows("rings", [_row_values(ring) for ring in changed_rings])

    def _register_rank(self, ring: RingRow) -> None:
        if ring.node is not None:
            self._waits.register_rank(self.nodes[ring.node], ring.rank)

    def _note_first_ids(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Note the first id of each process."""
        for row in rows if self._rings_without_ids else ():
            if (ring := self._rings_without_ids.pop(row[1], None)) is not None:
                self._rings[ring.name] = ring = replace(ring, first_id=row[0])
                self._stage_rows("rings", [_row_values(ring)])

    def _put_events(self, node: NodeRow, rows: Iterable[tuple[Any, ...]], new_ids: Mapping[int, int]) -> None:
        numbers = self._local_numbers[node.number]

        def renamed(match: re.Match[str]) -> str:
            number = numbers.get(int(match[1]))
            return f'"process":{"null" if number is None else number}'

        moved = []
        for number, process, kind, t_ns, text in rows:
            local_process = -1 - node.number if process is None else numbers.get(process)
            if local_process is None:
                continue
            text = _PROCESS.sub(renamed, text)
            if local_process < 0:
                text = f'{text.rstrip()[:-1]},"node":{node.number}}}'
            elif kind in ("process", "ddp"):
                self._waits.handle_event(local_process, kind, parse_event(text).data)
            moved.append((new_ids[number], local_process, kind, t_ns, text))
        self._stage_rows("events", moved)

    # ------------------------------------------------------------------------------------------ tallies

    def _put_keys(self, node: NodeRow, rows: Iterable[tuple[Any, ...]]) -> None:
        local_keys = self._local_keys[node.number]
        for (number, _, *values), process in self._renumber_rows(node, rows, 1):
            if number not in local_keys and len(local_keys) < _MAX_KEYS:
                local_keys[number] = self._keys.number(TallyKey(process, *values))

    def _put_tallies(self, node: NodeRow, rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
        get = self._local_keys[node.number].get
        for table, end in (("tallies", (self._seq,)), ("series", ())):
            self._stage_rows(
                table,
                [
                    (width, start, number, *values, *end)
                    for width, start, key, *values in rows.get(table, ())
                    if (number := get(key)) is not None
                ],
            )
        times = self._renumber_rows(node, rows.get("times", ()), 2)
        self._stage_rows("times", [(*row[:2], process, *row[3:], self._seq) for row, process in times])

    def _merge_buckets(self) -> None:
        """Make the wider tallies up to the time to which all connected nodes have sent them, so that they are read.

        They have the waits between nodes, and what a node could not send because it was disconnected in that time.
        """
        tallied_seconds = [node.tallied_s for node in self.nodes if node.state == "connected"]
        tallied_seconds = [second for second in tallied_seconds if second > max(tallied_seconds) - _MAX_LAG_S]
        merge_buckets(self._db, BUCKET_TABLES, min(tallied_seconds, default=0))


def _row_values(row: NodeRow | RingRow) -> tuple[Any, ...]:
    return tuple(vars(row).values())


def _local_device_number(node: NodeRow, device: int) -> int:
    """Return the number here of a node's device. -1 is the host."""
    return node.number * NODE_DEVICES + device if device >= 0 else -1 - node.number
