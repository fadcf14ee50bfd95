"""One machine sends records without end: the history keeps its limit, whichever table they fill, and the others' rows.

The machine sends sound rows, as fast as they are taken: as lines of text, through the mirror's checks.
"""

from __future__ import annotations

import json
import sqlite3
from binascii import b2a_base64
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from dpmon.mirror.chunk_receiver import Chunk, ChunkReceiver
from dpmon.mirror.mirror_history import MirrorHistory
from dpmon.store.database import HISTORY_FILE, SCHEMA, database_file_stamps
from dpmon.store.events import LASTING
from dpmon.store.history_writer import _MIN_NODE_BYTES
from dpmon.store.quantile_sketch import pack_values
from dpmon.store.row_exchange import SENT, columns_sent
from dpmon.store.store_queries import Store
from dpmon.store.tally_tables import read_tallies
from dpmon.store.time_accounting import ACTIVITIES
from dpmon.store.time_buckets import WIDTHS
from support.history_builders import ORIGIN_S
from support.mirror_builders import MIRROR_NOW_NS, MirroredNode, check_all_readable, mirror_run_info, open_mirror_store

LIMIT = 1 << 20
FLOOD = 4 * LIMIT
"""Bytes of the lines that the machine sends. Rows of most tables need more space than their lines."""
CHUNK = LIMIT // 12
MARGIN = LIMIT // 2
"""What the rows of one chunk need before older ones are deleted."""
JOURNAL = (4 << 20) + LIMIT
"""What SQLite leaves of its journal (journal_size_limit), and the pages that a commit changes."""
PROCESSES = KEYS = 8
NOT_SENT = {"meta", "nodes", "widths"}
"""Tables without rows of a machine."""
KEPT_WHOLE = (
    *(f"{table} WHERE true" for table in ("definitions", "loops", "gaps", "shapes", "losses", "rings")),
    f"events WHERE {LASTING}",
)
"""Rows that the honest machine has sent whole."""


def tables() -> list[str]:
    """Return the tables of the schema."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def makers(table: str, size: int) -> list[Callable[[int], Any]]:
    """Return what makes a sound value of each column for a row with a number. `size`: characters of a text, about."""
    text = "x" * size
    values = [1 + number for number in range(size // 20)]
    known: dict[str, Callable[[int], Any]] = {
        "process": lambda n: n if table == "rings" else n % PROCESSES,
        "name": lambda n: f"process-{n}.ring" if table == "rings" else f"series {n} {text[:100]}",
        "mode": lambda n: "dp",
        "width": lambda n: WIDTHS[n % 3],
        "start_s": lambda n: (ORIGIN_S + n % 900) // WIDTHS[n % 3] * WIDTHS[n % 3],
        "device": lambda n: n % 8 if table == "device_rollups" else None,
        "kind": lambda n: ("device", "process", "warning")[n % 3] if table == "events" else 0,
        "json": lambda n: json.dumps(
            {
                "kind": ("device", "process", "warning")[n % 3],
                "process": n % PROCESSES,
                "device": n % 8,
                "t_s": 1,
                "text": text,
            }
        ),
        "value": lambda n: f'["{text}"]',
        "sizes": lambda n: f"[{n}, {values}]",
        "number": lambda n: n % KEYS if table == "keys" else n,
        "key": lambda n: n % KEYS,
        "activity": lambda n: ACTIVITIES[n % len(ACTIVITIES)],
        "sketch": lambda n: b2a_base64(pack_values([n, *values]), newline=False).decode(),
        "start_ns": lambda n: n * 1000,
        "t_ns": lambda n: n * 1000,
    }

    def maker(name: str, kinds: tuple[type, ...]) -> Callable[[int], Any]:
        if name in known:
            return known[name]
        return (lambda n: None) if type(None) in kinds else (lambda n: "") if str in kinds else (lambda n: n)

    return [maker(name, kinds) for name, kinds in columns_sent(table).items()]


def line(table: str, rows: list[list[Any]]) -> bytes:
    """Return a line with rows of a table."""
    return json.dumps({"table": table, "columns": list(columns_sent(table)), "rows": rows}).encode()


def lines(table: str, size: int) -> Iterator[bytes]:
    """Yield lines with rows of a table, without end, each of about CHUNK bytes."""
    makes, first = makers(table, size), 1
    each = len(line(table, [[make(1000) for make in makes]])) - len(line(table, []))
    while True:
        count = min(CHUNK // each + 1, 2000)
        yield line(table, [[make(number) for make in makes] for number in range(first, first + count)])
        first += count


class Flood:
    """A mirror of some machines: an honest one, one that floods it, and others that send nothing."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        monkeypatch.setattr("dpmon.mirror.mirror_history.LIMIT_BYTES", LIMIT // 2)
        monkeypatch.setattr("dpmon.mirror.mirror_history.MAX_HISTORY_BYTES", LIMIT)
        self.path = directory / HISTORY_FILE
        self.records = MirrorHistory(directory, mirror_run_info(count))
        for node in self.records.nodes:
            node.state = "connected"
        self.honest = MirroredNode(0, 1)
        self.steps = Counter[int]()
        """The number of single steps that the honest machine has sent, by process."""
        self._sent = 0
        for _ in range(20):
            self._work()
        for table, count in (("rings", PROCESSES), ("keys", KEYS)):
            makes = makers(table, 0)
            self.send([line(table, [[make(number) for make in makes] for number in range(count)])])

    @property
    def size(self) -> int:
        """Size of the database with its journal (bytes)."""
        return sum(file.st_size for file in database_file_stamps(self.path))

    def _work(self, *, last: bool = False) -> None:
        """Let the honest machine write something, and send it."""
        more = self.honest.write() or last
        while more:
            chunk, more = self.honest.chunk(last=last)
            for steps in (line for line in chunk.lines if line.table == "steps"):
                self.steps.update(steps.column("process"))
            self.records.write([(self.records.nodes[0], chunk)])

    def send(self, sent: list[bytes]) -> int:
        """Let the other machine send a chunk; return its bytes."""
        receiver, node = ChunkReceiver(ORIGIN_S), self.records.nodes[1]
        for each in sent:
            assert receiver.add_line(each, MIRROR_NOW_NS) is None
        chunk = receiver.add_line(b'{"beat": 1}', MIRROR_NOW_NS)
        assert isinstance(chunk, Chunk)
        self._sent += 1
        beat = {
            "offset": self._sent,
            "seq": 0,
            "tallied_s": self.records.nodes[0].tallied_s,
            "deleted": {},
            "left_out": 0,
        }
        self.records.write([(node, chunk._replace(beat=beat))])
        return sum(map(len, sent))

    def run(self, lines: Iterator[bytes], more: int = 0) -> None:
        """Let the machine send lines, and the honest one some records in between. `more`: bytes beyond the margin."""
        sent, work = 0, FLOOD // 10
        while sent < FLOOD:
            sent += self.send([next(lines)])
            if sent > work:
                work += FLOOD // 10
                self._work()
            assert self.path.stat().st_size < LIMIT + MARGIN + more, f"after {sent} bytes"
            assert self.size < LIMIT + MARGIN + more + JOURNAL, f"after {sent} bytes"

    def check(self) -> None:
        """Check that the honest machine has all its records, and that the history can be read."""
        self._work(last=True)
        own, mirror = self.honest.recording.store(), open_mirror_store(self.records)
        for process in (0, 1):
            number = self.records.local_process_number(0, process)
            for rows in KEPT_WHOLE:
                query = f"SELECT count(*) FROM {rows} AND process = ?"
                assert mirror.query(query, (number,)) == own.query(query, (process,)), rows
            assert steps(mirror, number) == steps(own, process) > 10
            assert mirror.query("SELECT count(*) FROM steps WHERE process = ?", (number,)) == [(self.steps[process],)]
        check_all_readable(self.records)
        self.records.close()
        assert self.size < LIMIT + MARGIN


def steps(store: Store, process: int | None) -> int:
    """Return the number of steps of a process in the whole run, from the tallies."""
    return sum(tally.steps for key, tally in read_tallies(store, 0, 1 << 40).items() if key.process == process)


def test_all_tables_are_flooded() -> None:
    assert set(tables()) == {*SENT} | NOT_SENT, "a table that this file does not know"


TEXTS = ("events", "definitions", "series", "shapes", "device_rollups")
"""Tables with texts that a machine chooses."""
QUICK = {("definitions", 20_000), ("device_rollups", 10), ("events", 20_000)}


@pytest.mark.parametrize(
    ("table", "size"),
    [
        pytest.param(table, size, marks=[] if (table, size) in QUICK else pytest.mark.slow)
        for table in SENT
        for size in ((10, 20_000) if table in TEXTS else (10,))
    ],
)
def test_no_table_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, size: int) -> None:
    flood = Flood(tmp_path, monkeypatch)
    flood.run(lines(table, size))
    flood.check()


@pytest.mark.parametrize("table", ["definitions", "events"])
def test_one_of_many_machines_does_not_crowd_out_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    flood = Flood(tmp_path, monkeypatch, count=12)
    flood.run(lines(table, 20_000))
    flood.check()


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 20_000])
def test_all_tables_together_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    flood = Flood(tmp_path, monkeypatch)
    every = SENT
    rows = chain.from_iterable(zip(*(lines(table, size) for table in every), strict=True))
    flood.run(rows, _MIN_NODE_BYTES * len(every))
    flood.records.close()


def test_the_sums_of_a_machine_stay_in_range(tmp_path: Path) -> None:
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    most = (1 << 53) - 1
    for _ in range(1100):
        records.write([(records.nodes[1], Chunk([], {"offset": most, "seq": 0, "tallied_s": 8, "left_out": most}))])
    assert open_mirror_store(records).pruned > 1 << 59
    records.close()


def test_a_machine_whose_tallies_stand_still_is_not_waited_for(tmp_path: Path) -> None:
    """Else no tallies of the others could be deleted."""
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    for node in records.nodes:
        node.state = "connected"
    for second, there in ((600, 600), (1200, 600), (9000, 600)):
        for node, tallied_s in zip(records.nodes, (second, there), strict=True):
            records.write([(node, Chunk([], {"offset": node.received + 1, "seq": 0, "tallied_s": tallied_s}))])
        ((whole,),) = open_mirror_store(records).query("SELECT made_s FROM widths WHERE width = 600")
        assert whole == (9000 if second == 9000 else 600)
    records.close()


def test_numbers_beyond_reason_do_not_stop_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tallies of a machine are merged into wider time buckets together with those of the others."""
    flood = Flood(tmp_path, monkeypatch)
    most, first_s = (1 << 60) - 1, flood.records.nodes[0].tallied_s
    for table in ("tallies", "series", "times"):
        columns = list(columns_sent(table))
        rows = [[make(0) for make in makers(table, 10)] for _ in range(30)]
        for second, row in enumerate(rows, start=first_s):
            values = dict(zip(columns, row, strict=True)) | {"width": 1, "start_s": second}
            values |= {name: most for name in ("steps", "calls", "count", "total", "ns") if name in values}
            row[:] = values.values()
        flood.send([line(table, rows)])
    flood.records.nodes[0].tallied_s = flood.records.nodes[1].tallied_s = first_s + 60
    flood.records.write([])
    assert open_mirror_store(flood.records).buckets.made_until[10] > first_s + 30
    assert max(tally.steps for tally in read_tallies(open_mirror_store(flood.records)).values()) > most
    check_all_readable(flood.records)
    flood.records.close()
