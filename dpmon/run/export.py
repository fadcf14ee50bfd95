"""Everything a run has recorded so far, in the order it came: the history, then what only the rings hold yet.

Works while the run goes on, after the supervisor was killed, and without any history at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dpmon.record.codec import Call, Decoder, Event, Record, RecordError, Step
from dpmon.record.jsonl import as_json
from dpmon.ring import RingError, RingReader
from dpmon.run.kept import Kept
from dpmon.run.proc import alive
from dpmon.run.rows import decoders_of, record_of
from dpmon.run.rundir import RunInfo, load_exit, load_info, ring_paths
from dpmon.store.tables import HistoryError, RingRow

__all__ = ["Snapshot", "history", "kind", "write_jsonl"]


@dataclass
class _Rest:
    """What one ring holds beyond the history."""

    process: int
    rank: int | None
    payloads: list[bytes]


@dataclass
class Snapshot:
    """All that a run has recorded at one instant: the history's rows, what the rings hold beyond, what was lost."""

    info: RunInfo
    kept: Kept | None
    rest: list[_Rest] = field(default_factory=list)
    dropped: int = 0
    damaged: str | None = None
    """Why the history could not be read, where there is one."""

    @classmethod
    def take(cls, directory: Path) -> Snapshot:
        """Raises RunError if the directory is no run. The rings are read at once, before their writers go on."""
        info = load_info(directory)
        kept, damaged = None, None
        try:
            kept = Kept(directory)
        except FileNotFoundError:
            pass
        except (HistoryError, OSError) as error:
            damaged = f"the history cannot be read: {error}"
        found = cls(info, kept, damaged=damaged)
        rows = dict(kept.rings) if kept is not None else {}
        for process, path in ring_paths(directory):
            found._read_ring(process, path, rows.pop(path.name, None))
        for row in rows.values():  # a ring that is gone: what the history says of it still counts
            found.dropped += row.missed + row.lost
        return found

    def _read_ring(self, process: int, path: Path, row: RingRow | None) -> None:
        position, sequence, missed, lost = 0, 0, 0, 0
        if row is not None:
            position, sequence, missed, lost = row.position, row.sequence, row.missed, row.lost
        payloads: list[bytes] = []
        rank = row.rank if row is not None else None
        try:
            ring = RingReader(str(path), position=position, sequence=sequence)
        except (RingError, OSError):
            self.dropped += missed + lost
            return
        try:
            rank = ring.rank
            while ring.position < position + ring.capacity:  # a fast writer is not chased for ever
                before = ring.position
                payloads += ring.read()
                if ring.position == before:
                    break
            if process >= 0 and not alive(ring.pid, None):
                payloads += ring.last_words()
                lost = ring.lost() + ring.held()
            else:
                lost = ring.lost()
        except (RingError, OSError):
            pass  # truncated under us: what was read before is good
        finally:
            missed += ring.missed
            ring.close()
        self.dropped += missed + lost
        self.rest.append(_Rest(process, rank, payloads))

    def records(self) -> Iterator[Record]:
        """Every record but exits; what cannot be decoded is added to `dropped` on the way."""
        decoders: dict[int, Decoder] = {}
        if self.kept is not None:
            try:
                decoders = decoders_of(self.kept, self.info.start_ns)
                for row in self.kept.rows():
                    try:
                        record = record_of(row, decoders)
                    except RecordError:
                        self.dropped += 1
                        continue
                    if not isinstance(record, Event) or record.kind != "exit":
                        yield record
            except (HistoryError, ValueError) as error:
                self.damaged = f"the history cannot be read to its end: {error}"
        for rest in self.rest:
            decoder = decoders.get(rest.process) or Decoder(rest.process, rest.rank, self.info.start_ns)
            for payload in rest.payloads:
                try:
                    found = decoder.decode(payload)
                except RecordError:
                    self.dropped += 1
                    continue
                if found is not None and not (isinstance(found, Event) and found.kind == "exit"):
                    yield found

    def close(self) -> None:
        """Let go of the history."""
        if self.kept is not None:
            self.kept.close()


def history(directory: Path) -> Iterator[Record]:
    """All records of the run in `directory`, then {"kind": "dropped", "count": n}, then the exit if it has ended.

    Raises RunError if the directory is no run of this user.
    """
    snapshot = Snapshot.take(directory)
    try:
        yield from snapshot.records()
        if snapshot.damaged is not None:
            yield Event("warning", {"process": None, "t_s": None, "text": snapshot.damaged})
        yield Event("dropped", _dropped(snapshot))
        how = load_exit(directory)
        if how is not None:
            data: dict[str, Any] = {"status": how.status, "signal": how.signal, "t_s": how.seconds, "by": how.by}
            if how.unknown is not None:
                data["absent"] = {"status": how.unknown}
            if how.cause is not None:
                data["cause"] = how.cause
            yield Event("exit", data)
    finally:
        snapshot.close()


def _dropped(snapshot: Snapshot) -> dict[str, Any]:
    """`count`: records that nobody could keep; `pruned`: older ones deleted to keep the history within its bound."""
    pruned = snapshot.kept.pruned if snapshot.kept is not None else 0
    return {"count": snapshot.dropped, "pruned": pruned}


def write_jsonl(directory: Path, file: IO[str], only: str | None = None) -> None:
    """Write all records of a run (or those of one kind) to `file`, one JSON object a line, in ASCII."""
    for record in history(directory):
        if only is None or kind(record) == only:
            file.write(json.dumps(as_json(record), separators=(",", ":"), ensure_ascii=True) + "\n")


def kind(record: Record) -> str:
    """The record's kind as it stands in its JSON."""
    return "call" if isinstance(record, Call) else "step" if isinstance(record, Step) else record.kind
