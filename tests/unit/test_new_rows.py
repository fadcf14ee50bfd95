"""What a reader gets of a long time at once: within limits, and nothing is left out for good."""

from __future__ import annotations

import json

import pytest

from dpmon.export import incremental_rows
from dpmon.export.incremental_rows import MAX_BUCKETS, IncrementalRows
from dpmon.record.schema import SECOND, TRAINING
from dpmon.store.tally_keys import read_keys
from dpmon.store.time_buckets import BEFORE_S
from support.history_builders import ORIGIN_S, Recording
from support.rank_builders import record_ddp_ranks
from support.record_builders import Training, device_event


class Sums:
    """The sums of devices that a reader has: their counts by second, device and name."""

    def __init__(self) -> None:
        self.have: dict[tuple[int, int, str], int] = {}
        self.got = 0

    def take(self, rows: IncrementalRows, recording: Recording, upto_s: int, *, last: bool = False) -> bool:
        lines, more = rows.next_chunk(recording.store(), upto_s, is_last=last)
        for line in map(json.loads, lines):
            if line["table"] == "device_rollups":
                for row in line["rows"]:
                    found = dict(zip(line["columns"], row, strict=True))
                    self.have[found.get("start_s", 0), found.get("device", 0), found["name"]] = found.get("count", 0)
                    self.got += 1
        return more

    def same(self, recording: Recording) -> bool:
        return [(sum(self.have.values()),)] == recording.store().query("SELECT sum(count) FROM device_rollups")


def recorded(recording: Recording, begin_s: int, end_s: int) -> None:
    recording.add([device_event(float(second), 1) for second in range(begin_s, end_s, 4)])


def begun(ranks: int = 1) -> Recording:
    recording = Recording()
    for rank in range(ranks):
        recording.add(Training(process=rank, rank=rank).run(20), rank, rank)
    return recording


def test_a_first_reader_gets_one_sum_of_the_time_long_before() -> None:
    recording, sums, rows = begun(), Sums(), IncrementalRows(rollups=True)
    recorded(recording, 0, 20_000)
    sums.take(rows, recording, 20_000)
    assert sums.same(recording)
    names = len({name for _, _, name in sums.have})
    assert sums.got <= names * (1 + 600 // 60 + 3)
    assert min(sums.have)[0] == BEFORE_S


def test_a_long_cut_loses_no_sums() -> None:
    recording, sums, rows = begun(), Sums(), IncrementalRows(rollups=True)
    recorded(recording, 0, 900)
    sums.take(rows, recording, 900)
    recorded(recording, 900, 962)
    sums.take(rows, recording, 962)  # not yet the sums of minutes
    recorded(recording, 962, 90_000)
    again = IncrementalRows(rollups=True, offset=rows.offset, seq=rows.seq, tallied_s=rows.tallied_s)
    assert again.tallied_s < ORIGIN_S + 90_000
    while sums.take(again, recording, 90_000, last=True):
        pass
    assert sums.same(recording)


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_buckets_of_many_ranks_come_in_chunks_of_fewer_seconds(ranks: int) -> None:
    rows, store = IncrementalRows(rollups=True, offset=1, tallied_s=ORIGIN_S + 2000), begun(ranks).store()
    rows.next_chunk(store, 5000, is_last=False)
    ((keys,),) = store.query("SELECT count(*) FROM keys")
    assert rows.tallied_s == ORIGIN_S + 2000 + MAX_BUCKETS // keys + 1


def test_the_last_step_of_a_run_is_sent_also_if_it_was_left_out_before() -> None:
    recording, rows, sent = begun(2), IncrementalRows(rollups=True), list[tuple[int, int]]()
    (newest,) = {step for (step,) in recording.store().query("SELECT max(step) FROM steps GROUP BY process")}
    for last in (False, True, True):
        lines, _ = rows.next_chunk(recording.store(), 1000, is_last=last)
        for line in (one for one in map(json.loads, lines) if one["table"] == "steps"):
            of = dict(zip(line["columns"], zip(*line["rows"], strict=True), strict=True))
            sent += zip(of["process"], of["step"], strict=True)
        assert ((0, newest) in sent) == ((1, newest) in sent) == last
    assert len(sent) == len(set(sent))


def test_the_chunks_after_the_end_have_the_same_steps_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Training(process=rank, rank=rank) for rank in range(3)]
    recording = Recording()
    for _ in range(60):
        for rank, training in enumerate(ranks):
            recording.add(training.run(1), rank, rank)
    monkeypatch.setattr(incremental_rows, "MAX_IDS", 50)
    rows, chunks, more = IncrementalRows(rollups=True, offset=1), 0, True
    sent: dict[int, set[int]] = {}
    while more:
        lines, more = rows.next_chunk(recording.store(), 1000, is_last=True)
        chunks += 1
        for one in (one for one in map(json.loads, lines) if one["table"] == "steps"):
            for row in one["rows"]:
                found = dict(zip(one["columns"], row, strict=True))
                sent.setdefault(found["process"], set()).add(found["step"])
    assert chunks > 3
    assert sent[0] == sent[1] == sent[2]
    assert len(sent[0]) < 60


@pytest.mark.parametrize("accumulated", [1, 4, 25])
def test_steps_that_average_gradients_are_sent_as_often_with_accumulation(accumulated: int) -> None:
    """About one each second, which is enough to name the slow rank, and the same ones of all ranks."""
    passes = [(0, 1)] * (accumulated - 1) + [(1, 0)]
    recording, end = record_ddp_ranks(2, steps=2000, passes=passes)
    recording._db.execute(f"UPDATE steps SET sync_number = sync_number / {accumulated}")
    lines, _ = IncrementalRows(rollups=True).next_chunk(recording.store(), end // SECOND, is_last=False)
    sent: dict[int, set[int]] = {0: set(), 1: set()}
    for one in (one for one in map(json.loads, lines) if one["table"] == "steps"):
        for row in one["rows"]:
            found = dict(zip(one["columns"], row, strict=True))
            if found["sync_number"] is not None:
                sent[found["process"]].add(found["sync_number"])
    assert sent[0] == sent[1]
    ((begin,),) = recording.store().query("SELECT min(start_ns) FROM steps")
    seconds = (end - begin) / SECOND
    assert 0.9 * seconds <= len(sent[0]) <= 2.1 * seconds


def test_a_stop_of_the_supervisor_loses_no_tally() -> None:
    """Seconds without records seem to be complete; after the stop, they are written in several parts."""
    recording, rows, have = Recording(), IncrementalRows(rollups=True), dict[int, int]()
    training = Training(step_ns=SECOND // 4)
    for now_s, records_until_s in ((20, 20), (60, 20), (70, 70)):
        while training.now < records_until_s * SECOND:
            recording.add(training.run(40))
        lines, _ = rows.next_chunk(recording.store(), now_s, is_last=False)
        (trained,) = (number for number, key in read_keys(recording.store().connection).items() if key.kind == TRAINING)
        for line in (one for one in map(json.loads, lines) if one["table"] == "tallies"):
            for row in (dict(zip(line["columns"], values, strict=True)) for values in line["rows"]):
                have |= {row["start_s"]: row["steps"]} if (row["width"], row["key"]) == (1, trained) else {}
    written = dict(
        recording.store().query("SELECT start_s, steps FROM tallies WHERE width = 1 AND key = ?", (trained,))
    )
    assert have == {second: steps for second, steps in written.items() if second < ORIGIN_S + 70}
