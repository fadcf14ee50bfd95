"""One machine sends whatever it likes: the history stays readable, and the figures of the others are right."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dpmon.export.incremental_rows import IncrementalRows
from dpmon.mirror.chunk_receiver import (
    MAX_DAMAGED,
    MAX_ROWS,
    ChunkReceiver,
    ProtocolError,
    UncheckedChunk,
    validate_chunks,
)
from dpmon.mirror.mirror_history import ChunkError, MirrorHistory
from dpmon.store.query_results import event_from_row
from dpmon.store.row_exchange import CHUNK_BYTES
from support.history_builders import Recording
from support.mirror_builders import MirroredNode, check_all_readable, mirror_run_info, open_mirror_store
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


def honest() -> tuple[Recording, list[dict[str, Any]]]:
    """Return a history of two processes, and its lines."""
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
    return recording, found


def damaged(chance: random.Random, lines: list[dict[str, Any]]) -> list[bytes]:
    """Return lines of which some have odd values, columns or forms."""
    found = []
    for line in json.loads(json.dumps(lines)):
        for _ in range(chance.choice([0, 1, 3, 20])):
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_odd_values_from_one_machine_leave_the_history_readable(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    recording, lines = honest()
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    for node in records.nodes:
        node.state = "connected"
    good, bad = records.nodes
    for node, sent in [
        (good, [json.dumps(line).encode() for line in lines]),
        *((bad, damaged(chance, lines)) for _ in range(5)),
    ]:
        receiver = ChunkReceiver()
        for line in sent:
            try:
                receiver.add_line(line)
            except ProtocolError:
                receiver = ChunkReceiver()  # the connection is cut, and what came before is dropped
        whole = receiver.add_line(b'{"beat": 1}')
        assert isinstance(whole, UncheckedChunk)
        (chunk,) = validate_chunks([(node.number, whole)], NOW_NS)
        beat = {
            "offset": node.received + 10**6,
            "tallied_s": 8,
            "deleted": chance.choice(ODD),
            "left_out": chance.choice(ODD),
        }
        records.write([(node, chunk._replace(beat=beat))])
    assert bad.received == 5 * 10**6
    check_all_readable(records)
    own, mirror = recording.store(), open_mirror_store(records)
    for process in (0, 1):
        number = records.local_process_number(0, process)
        steps = [
            sum(tally.steps for key, tally in store.tallies(0, 8).items() if key.process == who)
            for store, who in ((own, process), (mirror, number))
        ]
        assert steps[0] == steps[1] > 100
    records.close()


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish", b"[]", b"3", b'{"table": "steps"}', b'{"table": "steps", "columns": {}, "rows": []}',
        b"[" * 100_000, b'{"table": "steps", "columns": [1], "rows": []}',
        json.dumps({"table": "keys", "columns": [], "rows": MANY}).encode(),
    ],
)  # fmt: skip
def test_what_is_no_record_ends_the_connection(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChunkReceiver().add_line(line)


def test_a_chunk_has_a_limit() -> None:
    receiver = ChunkReceiver()
    line = json.dumps({"table": "events", "columns": ["id"], "rows": [], "more": "x" * (CHUNK_BYTES // 8)}).encode()
    for _ in range(7):
        assert receiver.add_line(line) is None
    with pytest.raises(ProtocolError, match="more than 16 MiB"):
        receiver.add_line(line)


def test_the_rows_of_a_chunk_have_a_limit() -> None:
    receiver = ChunkReceiver()
    line = json.dumps({"table": "gaps", "columns": ["process"], "rows": [[1]] * MAX_ROWS}).encode()
    for _ in range(CHUNK_BYTES // (40 * MAX_ROWS)):
        assert receiver.add_line(line) is None
    with pytest.raises(ProtocolError, match="more than 16 MiB"):
        receiver.add_line(line)


def test_rows_of_another_version_are_read_as_far_as_both_know() -> None:
    lines = [("definitions", ("process", "number", "value", "color"), [[0, 3, "[]", "red"]])]
    (chunk,) = validate_chunks([(0, UncheckedChunk([*lines, ("gaps", ("process", "ns"), [[1, 5]])], {}))], NOW_NS)
    assert chunk.rows["definitions"] == [(0, 3, "[]")]
    (row,) = chunk.rows["gaps"]
    assert (row[1], row[-1]) == (1, 5)
    assert ChunkReceiver().add_line(b'{"table": "colors", "columns": ["a"], "rows": [[1]]}') is None


def test_damaged_rows_of_one_machine_leave_the_rows_of_the_others(tmp_path: Path) -> None:
    columns = ("process", "number", "value")
    good: list[Any] = [[0, 3, "[]"], [0, 4, "{}"]]
    bad: list[Any] = [[0, 1, "[]"], [0, "2", "[]"], [0, 2, "]"], {}]
    sent = [
        UncheckedChunk([("definitions", columns, rows)], {"from": number})
        for number, rows in enumerate([good, bad, good])
    ]
    for order in ([0, 1, 2], [1, 0, 2]):
        chunks = validate_chunks([(number, sent[number]) for number in order], NOW_NS)
        found = {chunk.beat["from"]: (chunk.rows["definitions"], chunk.damaged) for chunk in chunks}
        whole = [(0, 3, "[]"), (0, 4, "{}")], 0
        assert found == {0: whole, 1: ([(0, 1, "[]")], 3), 2: whole}


def test_the_damaged_rows_of_a_machine_are_counted_together() -> None:
    damage = ("gaps", ("process", "ns"), [[0, "much"]] * (MAX_DAMAGED // 2 + 1))
    sent = [
        (1, UncheckedChunk([damage], {})),
        (0, UncheckedChunk([("gaps", ("process", "ns"), [[0, 5]])], {})),
        (1, UncheckedChunk([damage], {})),
    ]
    first, other, last = validate_chunks(sent, NOW_NS)
    assert (first.damaged, other.damaged, last.damaged) == (MAX_DAMAGED + 2, 0, 0)


def test_a_nested_value_is_damage_and_is_not_kept() -> None:
    receiver = ChunkReceiver()
    rows = [[1, 5], [2, [[]] * 1000], {"process": [[]]}, [3, {}], 7, [4, 6]]
    receiver.add_line(json.dumps({"table": "gaps", "columns": ["process", "ns"], "rows": rows}).encode())
    sent = receiver.add_line(b'{"beat": 1}')
    assert isinstance(sent, UncheckedChunk)
    assert sent.lines == [("gaps", ("process", "ns"), [[1, 5], None, None, None, None, [4, 6]])]
    (chunk,) = validate_chunks([(0, sent)], NOW_NS)
    assert ([(row[1], row[-1]) for row in chunk.rows["gaps"]], chunk.damaged) == ([(1, 5), (4, 6)], 4)


@pytest.mark.parametrize(("depth", "sound"), [(10, True), (11, True), (12, False), (16, False)])
def test_an_event_is_sound_if_readers_can_read_it(depth: int, sound: bool) -> None:
    text = f'{{"kind":"process","x":{"[" * depth}1e400{"]" * depth}}}'
    columns = ("id", "process", "t_ns", "json")
    (chunk,) = validate_chunks([(0, UncheckedChunk([("events", columns, [[1, 0, 0, text]])], {}))], NOW_NS)
    assert [row[-1] for row in chunk.rows["events"]] == ([text] if sound else [])
    with pytest.raises(ValueError, match="deeply") if not sound else nullcontext():
        event_from_row([text])


def test_an_event_that_cannot_be_read_names_its_machine(tmp_path: Path) -> None:
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    machine = MirroredNode(0, 1)
    machine.write()
    chunk, _ = machine.chunk(last=True)
    unread = [(1, 0, "process", 0, "[1"), *chunk.rows["events"]]
    with pytest.raises(ChunkError) as error:
        records.write([(records.nodes[1], chunk._replace(rows={**chunk.rows, "events": unread}))])
    assert error.value.node.number == 1
    records.close()


def test_a_machine_of_the_test_is_honest(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    machine = MirroredNode(0, 1)
    while machine.write():
        pass
    chunk, _ = machine.chunk(last=True)
    assert chunk.damaged == 0
    records.write([(records.nodes[0], chunk)])
    check_all_readable(records)
    records.close()
