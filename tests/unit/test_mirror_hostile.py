"""One machine sends whatever it likes: it is cut off, and the other machines go on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

import dpmon
from dpmon.errors import DpmonError
from dpmon.export.incremental_rows import IncrementalRows
from dpmon.mirror.chunk_receiver import MAX_ROWS, ChunkReceiver, ProtocolError
from dpmon.mirror.mirror import Mirror
from dpmon.mirror.mirror_history import MirrorHistory
from dpmon.mirror.node_links import LineReceived, LinkOpened
from dpmon.store.row_exchange import CHUNK_BYTES, SENT, columns_sent
from support.history_builders import ORIGIN_S, Recording
from support.mirror_builders import MirroredNode, check_all_readable, mirror_run_info, row_line
from support.record_builders import SECOND, Training, device_event, host_event, with_event_data

NOW_NS = 1000 * SECOND
MANY: list[Any] = [[]] * (MAX_ROWS + 1)
ODD: list[Any] = [
    None, True, -1, 0, 1 << 31, 1 << 47, (1 << 63) - 1, -(1 << 63), 1 << 64, 10**40, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "dp", "x", "\0", "\ud800", "\x1b[2J", "[", "[1,", "[[[]]]", "{}", "null", '{"kind": 3}',
    '{"kind":"device","index":-7,"t_s":1e999}', '{"kind":"process","process":0,"rank":-1}', "[" * 40 + "]" * 40, "AAAA",
    "////////////////////////////////", "x" * 300_000, [], [1], {}, {"a": 1}, [[1]],
]  # fmt: skip
"""Values that a machine might send in any place."""


def honest() -> list[dict[str, Any]]:
    """Return the lines of a history of two processes."""
    recording, rows = Recording(), IncrementalRows(rollups=True)
    for process in (0, 1):
        training = Training(process=process, rank=process, step_ns=20_000_000, seed=process)
        first, *others = training.begin()
        recording.add([with_event_data(first, pid=7 + process, world=4), *others, *training.run(150)], process, process)
    recording.add([*(host_event(float(s)) for s in range(8)), *(device_event(float(s), 1) for s in range(8))])
    found: list[dict[str, Any]] = []
    rows.whole = (0, 1)
    for upto in range(3, 9):
        lines, _ = rows.next_chunk(recording.store(), upto, is_last=upto == 8)
        found += map(json.loads, lines)
    return found


def damaged(chance: random.Random, lines: list[dict[str, Any]]) -> list[bytes]:
    """Return lines of which some have odd values, columns or forms."""
    found = []
    for line in json.loads(json.dumps(lines)):
        for _ in range(chance.choice([*[0] * 100, 1, 3])):
            rows, columns = line["rows"], line["columns"]
            what = chance.random()
            if what < 0.85:
                chance.choice(rows)[chance.randrange(len(columns))] = chance.choice(ODD)
            elif what < 0.88:
                rows.append(chance.choice(rows))
            elif what < 0.91:
                columns[chance.randrange(len(columns))] = chance.choice([*columns, "sketches", "nothing"])
                break
            elif what < 0.94:
                chance.choice(rows).append(chance.choice(ODD))
                break
            elif what < 0.97:
                line[chance.choice(["table", "columns", "rows"])] = chance.choice([*ODD, "tallies", "meta", "nodes"])
                break
            else:
                rows[chance.randrange(len(rows))] = chance.choice(ODD)
                break
        found.append(json.dumps(line).encode("utf-8", "surrogatepass"))
    return found


def send(mirror: Mirror, node: int, lines: Iterable[bytes], chance: random.Random) -> None:
    """Let a node connect and send these lines in one chunk."""
    mirror._handle_report(
        LinkOpened(node, {"run": "r", "host": "h", "version": dpmon.__version__, "origin_s": ORIGIN_S})
    )
    received = mirror.peers[node].node.received
    beat = {"beat": 1, "from": received, "offset": received + 10**6, "seq": 1, "tallied_s": 8}
    beat |= {"deleted": chance.choice(ODD), "left_out": chance.choice(ODD)}
    for line in (*lines, json.dumps(beat).encode("utf-8", "surrogatepass")):
        mirror._handle_report(LineReceived(node, line))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_odd_values_from_one_machine_leave_the_rows_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    lines = honest()
    mirror = Mirror(tmp_path, mirror_run_info(2), [["gpu-0", "r", "false"], ["gpu-1", "r", "false"]])
    monkeypatch.setattr(mirror, "now_ns", lambda: NOW_NS)
    send(mirror, 0, [json.dumps(line).encode() for line in lines], random.Random(1))
    assert mirror._commit()
    tables = [table for table in SENT if "process" in columns_sent(table)]

    def rows() -> dict[str, list[Any]]:
        numbers = ", ".join(str(mirror.history.local_process_number(0, process)) for process in (0, 1))
        return {
            table: mirror.history._db.execute(f"SELECT * FROM {table} WHERE process IN ({numbers})").fetchall()
            for table in tables
        }

    before = rows()
    assert len(before["steps"]) > 100
    for _ in range(20):
        send(mirror, 1, damaged(chance, lines), chance)
        assert mirror._commit()
        assert mirror.peers[1].node.state in ("connected", "cut")
    assert rows() == before
    assert mirror.peers[0].node.state == "connected"
    mirror.links.close_all()
    mirror.history.close()


WRONG: dict[type, list[Any]] = {
    int: ["1", 0.5, True, [1], 1 << 64, -(1 << 64)],
    str: [1, 0.5, False, ["x"], {}, "\ud800", "x" * (CHUNK_BYTES + 1)],
    float: ["1", True, [1.0], 1 << 64],
    bytes: [1, "\u00e9", "A", None],
}
"""For the type of a column, values that it must not have."""
SPECIAL: dict[str, list[Any]] = {
    "activity": ["sleeping"], "sketch": ["AAAA"],
    "mode": ["train"], "width": [7], "name": ["x" * 201], "start_s": [2000], "start_ns": [2000 * SECOND],
    "json": ["[", "[]", '{"t_s": 1}', '{"kind": 3}', '{"kind":"x","a":' + "[" * 20_000 + "]" * 20_000 + "}"],
}  # fmt: skip


@pytest.mark.parametrize("table", [*SENT])
def test_a_value_that_does_not_fit_into_its_column_is_refused(table: str) -> None:
    columns = columns_sent(table)
    known: dict[str, Any] = {"mode": "dp", "width": 1, "activity": "training", "json": '{"kind": "host"}'}
    known |= {"process": 0, "kind": "host"} if table == "events" else {}
    known |= {"name": "process-0.ring"} if table == "rings" else {}
    values = [known.get(name, "" if kinds[0] in (str, bytes) else 0) for name, kinds in columns.items()]

    def line(name: str, value: Any) -> bytes:
        row = [value if column == name else usual for column, usual in zip(columns, values, strict=True)]
        return json.dumps({"table": table, "columns": list(columns), "rows": [values, row]}).encode()

    assert ChunkReceiver().add_line(line("", None), NOW_NS) is None
    for name, kinds in columns.items():
        missing = [] if type(None) in kinds else [None]
        for value in [*WRONG[kinds[0]], *missing, *SPECIAL.get(name, [])]:
            with pytest.raises((DpmonError, ValueError)):
                ChunkReceiver().add_line(line(name, value), NOW_NS)


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish", b"[]", b"3", b'{"table": "steps"}', b'{"table": "steps", "columns": {}, "rows": []}',
        b"[" * 100_000, b'{"table": "steps", "columns": [1], "rows": []}',
        b'{"table": "gaps", "columns": ["process", "ns"], "rows": [[1, 2]]}',
        json.dumps({**row_line("gaps", {}), "rows": [[1, 2]]}).encode(),
        b'{"table": "nodes", "columns": ["number"], "rows": [[1]]}',
        json.dumps({**row_line("keys"), "rows": MANY}).encode(),
    ],
)  # fmt: skip
def test_what_is_no_record_ends_the_connection(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChunkReceiver().add_line(line, NOW_NS)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_a_loss_may_be_infinite_but_no_sum(number: str) -> None:
    for table, column, is_refused in (("losses", "loss", False), ("device_rollups", "total", True)):
        line = json.dumps(row_line(table, {column: 12345.5})).replace("12345.5", number).encode()
        with pytest.raises(ProtocolError) if is_refused else nullcontext():
            ChunkReceiver().add_line(line, NOW_NS)


def test_a_chunk_has_a_limit() -> None:
    receiver = ChunkReceiver()
    line = json.dumps({**row_line("events"), "more": "x" * (CHUNK_BYTES // 8)}).encode()
    for _ in range(7):
        assert receiver.add_line(line, NOW_NS) is None
    with pytest.raises(ProtocolError, match="more than 16 MiB"):
        receiver.add_line(line, NOW_NS)


def test_the_rows_of_a_chunk_have_a_limit() -> None:
    receiver = ChunkReceiver()
    line = json.dumps(row_line("keys", *[{"process": 1}] * MAX_ROWS)).encode()
    lines = repeat(line, CHUNK_BYTES // len(line) + 1)
    with pytest.raises(ProtocolError, match="more than 16 MiB"):
        assert not any(receiver.add_line(line, NOW_NS) for line in lines)


def test_a_machine_of_the_test_is_honest(tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    machine = MirroredNode(0, 1)
    while machine.write():
        pass
    chunk, _ = machine.chunk(last=True)
    records.write([(records.nodes[0], chunk)])
    check_all_readable(records)
    records.close()
