"""The records of several machines in one history: the same figures as there, whatever is cut off and when."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.errors import HistoryError
from dpmon.export.incremental_rows import INITIAL_BUCKETS_S, IncrementalRows
from dpmon.mirror.chunk_receiver import Chunk
from dpmon.mirror.mirror_history import MirrorHistory
from dpmon.model.stragglers import find_straggler, rank_times_in_window
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.record.schema import EXPOSED, STRAGGLER_DELAY, UNCOMPARED, WAIT
from dpmon.store.activity_times import read_times
from dpmon.store.node_table import NodeRow
from dpmon.store.records import newest_record_ns
from dpmon.store.step_stats import StatsWindow
from dpmon.store.store_queries import Store
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import read_tallies, read_tally_rows
from support.history_builders import ORIGIN_S, Recording
from support.mirror_builders import CLOCK_SHIFTS_NS, MirroredNode, mirror_run_info, open_mirror_store, send_all
from support.record_builders import (
    SECOND,
    Training,
    device_event,
    with_event_data,
    with_other,
)

WAITS = {EXPOSED, WAIT, STRAGGLER_DELAY, UNCOMPARED}


def without_waits(tallies: dict[TallyKey, Tally], process: int, number: int) -> dict[TallyKey, Tally]:
    """Return the tallies of a process under another number, without the series of waits."""
    found = {}
    for key, tally in tallies.items():
        if key.process == process and tally.steps:
            stats = {name: stat for name, stat in tally.stats.items() if name not in WAITS}
            found[key._replace(process=number)] = replace(tally, stats=stats)
    return found


def moved(tallies: dict[TallyKey, Tally], shift_ns: int) -> dict[TallyKey, Tally]:
    """Return tallies with their times on another clock."""
    return {
        key: replace(tally, first_ns=(tally.first_ns or 0) + shift_ns, last_ns=(tally.last_ns or 0) + shift_ns)
        for key, tally in tallies.items()
    }


def same(machine: MirroredNode, records: MirrorHistory, mirror: Store, chance: random.Random) -> None:
    """Compare the figures between random times."""
    own = machine.recording.store()
    newest = newest_record_ns(own) // SECOND
    windows = [(0, 1 << 40), *(sorted(chance.sample(range(newest + 2), 2)) for _ in range(20))]
    for process in (0, 1):
        number = records.local_process_number(machine.number, process)
        for begin, end in windows:
            shifted = begin + machine.shift_s, min(end + machine.shift_s, 1 << 40)
            there = without_waits(read_tallies(own, begin, end), process, number)
            here = without_waits(read_tallies(mirror, *shifted), number, number)
            assert here == moved(there, machine.shift_ns), (begin, end)
            left = [
                {
                    key: tally.steps
                    for key, tally in read_tallies(store, *when, left_out=True).items()
                    if key.process == who
                }
                for store, when, who in ((own, (begin, end), process), (mirror, shifted, number))
            ]
            assert {key._replace(process=number): steps for key, steps in left[0].items()} == left[1]
            spent = [
                sum_of(store, *when, who)
                for store, when, who in ((own, (begin, end), process), (mirror, shifted, number))
            ]
            assert spent[0] == spent[1], (begin, end)
        for table in ("losses", "gaps", "loops", "definitions", "shapes", "collective_sums"):
            counts = [
                store.query(f"SELECT count(*) FROM {table} WHERE process = ?", (who,))[0][0]
                for store, who in ((own, process), (mirror, number))
            ]
            assert counts[0] == counts[1], table
        events = [
            store.query("SELECT count(*) FROM events WHERE process = ?", (who,))[0][0]
            for store, who in ((own, process), (mirror, number))
        ]
        assert events[0] == events[1]


def sum_of(store: Store, begin_s: int, end_s: int, process: int) -> dict[tuple[str, str], int]:
    """Return the time of each activity of a process by mode."""
    found: dict[tuple[str, str], int] = {}
    for row in read_times(store, begin_s, end_s, process=process):
        for name, ns in row.spent.items():
            found[row.mode, name] = found.get((row.mode, name), 0) + ns
    return {key: ns for key, ns in found.items() if ns}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_the_figures_are_those_of_the_machines_whatever_is_cut_off(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    machines = [MirroredNode(number, seed) for number in (0, 1)]
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    for node in records.nodes:
        node.state = "connected"
    going = True
    while going:
        written = [machine.write() for machine in machines]
        going = any(written)
        for machine in machines:
            what, node = chance.random(), records.nodes[machine.number]
            if what < 0.5:
                continue
            chunk, _ = machine.chunk()
            if what < 0.6:  # the connection is cut before the last line
                machine.rows = machine.connected(node)
                continue
            assert chunk.beat["from"] == node.received
            records.write([(node, chunk)])
            if what < 0.65:
                machine.rows = machine.connected(node)
        if chance.random() < 0.05:  # the mirror is killed
            records.close()
            records = MirrorHistory(tmp_path, mirror_run_info(2))
            for machine, node in zip(machines, records.nodes, strict=True):
                node.state = "connected"
                machine.rows = machine.connected(node)
    for machine in machines:
        send_all(machine, records, last=True)
    mirror = open_mirror_store(records)
    for machine in machines:
        same(machine, records, mirror, chance)
        own = machine.recording.store()
        for query in (
            "SELECT count(*) FROM device_rollups",
            "SELECT count(*) FROM events WHERE kind = 'device'",
            "SELECT sum(count) FROM device_rollups",
        ):
            device = f"device IN ({-1 - machine.number}, {1000 * machine.number + 3})"
            who = device if "rollups" in query else f"process = {-1 - machine.number}"
            also = " AND " if "WHERE" in query else " WHERE "
            assert mirror.query(query + also + who) == own.query(query), query
    records.close()


def test_a_mirror_of_many_machines_has_no_buckets_of_a_second_but_the_same_sums(tmp_path: Path) -> None:
    machines = [MirroredNode(number, 3, sparse=True) for number in (0, 1)]
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    for node in records.nodes:
        node.state = "connected"
    going = True
    while going:
        written = [machine.write() for machine in machines]
        going = any(written)
        for machine in machines:
            chunk, _ = machine.chunk()
            records.write([(records.nodes[machine.number], chunk)])
        seconds = open_mirror_store(records).query("SELECT count(*) FROM tallies WHERE width = 1")
        assert seconds == [(0,)]
    for machine in machines:
        send_all(machine, records, last=True)
    for node in records.nodes:
        node.state = "ended"
    records.write([])
    mirror = open_mirror_store(records)
    for machine in machines:
        own = machine.recording.store()
        for process in (0, 1):
            number = records.local_process_number(machine.number, process)
            there = without_waits(read_tallies(own), process, number)
            assert without_waits(read_tallies(mirror), number, number) == moved(there, machine.shift_ns)
            assert sum_of(mirror, 0, 1 << 40, number) == sum_of(own, 0, 1 << 40, process)
    records.close()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_mirror_that_begins_late_has_the_same_sums(tmp_path: Path, sparse: bool) -> None:
    """Of old time it gets wide buckets, and one sum of the samples of devices."""
    machine, records = MirroredNode(0, 0, sparse=sparse), MirrorHistory(tmp_path, mirror_run_info(1))
    machine.recording = machine.new_recording()
    machine.recording.add(Training(step_ns=SECOND).run(5000))
    machine.recording.add([device_event(float(second), 0) for second in range(0, 5000, 10)])
    records.nodes[0].state = "connected"
    chunks = send_all(machine, records, 4990)
    for upto in range(4991, 5030):
        chunk, _ = machine.chunk(upto)
        records.write([(records.nodes[0], chunk)])
    mirror, own = open_mirror_store(records), machine.recording.store()
    assert chunks < 10
    end_s = 4980  # of a mirror of many machines, the newest buckets are not complete yet
    assert without_waits(read_tallies(mirror, 0, end_s), 0, 0) == without_waits(read_tallies(own, 0, end_s), 0, 0)
    samples = "SELECT sum(count) FROM device_rollups"
    assert mirror.query(samples) == own.query(samples)
    records.close()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_machine_that_returns_after_a_late_one_has_all_its_steps(tmp_path: Path, sparse: bool) -> None:
    """One machine is cut for 25 minutes, while another one answers for the first time."""
    machines = [MirroredNode(0, 0, sparse=sparse), MirroredNode(1, 0, sparse=sparse)]
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    trainings = [Training(step_ns=SECOND), Training(step_ns=SECOND)]
    for machine in machines:
        machine.recording = machine.new_recording()

    def work(second: int, *connected: int) -> None:
        for machine, training in zip(machines, trainings, strict=True):
            while training.now < second * SECOND:
                machine.recording.add(training.run(1))
        for number in connected:
            records.nodes[number].state = "connected"
            send_all(machines[number], records, second - 2)

    for second in range(10, 300, 10):
        work(second, 0)
    records.nodes[0].state = "cut"
    for second in range(1790, 1800):
        work(second, 1)
    machines[0].rows = machines[0].connected(records.nodes[0])
    for second in range(1800, 1830):
        work(second, 0, 1)
    mirror = open_mirror_store(records)
    for machine in machines:
        own = machine.recording.store()
        shift_s, number = machine.shift_s, machine.number
        there = sum(tally.steps for tally in read_tallies(own, 0, 1780 - shift_s, process=0).values())
        here = sum(tally.steps for tally in read_tallies(mirror, 0, 1780, process=number).values())
        assert abs(here - there) <= 10 * sparse
    records.close()


@pytest.mark.parametrize("wrong_s", [0, 1, 40])
def test_the_seconds_of_a_machine_with_a_wrong_clock_are_corrected(tmp_path: Path, wrong_s: int) -> None:
    """`wrong_s`: by how much its clock is ahead. Within a second, clocks are not corrected."""
    machine, records = MirroredNode(0, 0), MirrorHistory(tmp_path, mirror_run_info(1))
    machine.recording = Recording(origin_s=ORIGIN_S + wrong_s)
    machine.recording.add(Training(step_ns=SECOND // 4).run(400))
    shift_s = -wrong_s if wrong_s > 1 else 0
    machine.rows = IncrementalRows(rollups=True, shift_s=shift_s)
    node = records.nodes[0]
    node.state, node.shift_s, node.origin_s = "connected", shift_s, ORIGIN_S + wrong_s
    send_all(machine, records, last=True)
    mirror, own = open_mirror_store(records), machine.recording.store()
    ahead_s = wrong_s + shift_s
    for begin, end in ((0, 1 << 40), (20, 40), (37, 83)):
        there = without_waits(read_tallies(own, begin, end), 0, 0)
        here = read_tallies(mirror, begin + ahead_s * (begin > 0), end + ahead_s)
        assert without_waits(here, 0, 0) == there
    records.close()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shift_s", [0, 4, 20, 24, 60])
def test_steps_that_arrive_after_their_buckets_were_made_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift_s: int, sparse: bool
) -> None:
    """A node is reached late and cut twice, while the mirror makes the buckets of another one.

    `shift_s`: how far the mirror's seconds are ahead of those of the nodes.
    """
    monkeypatch.setattr("dpmon.export.incremental_rows.MAX_BUCKETS", 200)  # several chunks after a cut
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    machines = [MirroredNode(0, 0), MirroredNode(1, 0)]
    trainings = [Training(step_ns=SECOND), Training(step_ns=SECOND)]
    changed = Training(step_ns=SECOND)

    def connect(number: int) -> None:
        node = records.nodes[number]
        node.state, node.shift_s, node.origin_s = "connected", shift_s, ORIGIN_S - shift_s
        has: dict[str, Any] = {"offset": node.received, "seq": node.seq, "tallied_s": node.tallied_s}
        machines[number].rows = IncrementalRows(rollups=True, shift_s=shift_s, sparse=sparse, **has)

    def train(seconds: int, *connected: int, last: bool = False) -> None:
        for machine, training in zip(machines, trainings, strict=True):
            machine.recording.add(training.run(seconds))
        for number in connected:
            send_all(machines[number], records, last=last)

    for machine in machines:
        machine.recording = Recording(origin_s=ORIGIN_S - shift_s)
    connect(0)
    train(1300, 0)
    connect(1)
    train(30, 0, 1)
    train(40, 0, 1)
    records.nodes[1].state = "cut"
    train(1200, 0)
    connect(1)
    chunk, has_more = machines[1].chunk()
    assert has_more
    records.write([(records.nodes[1], chunk)])
    records.nodes[1].state = "cut"
    train(700, 0)
    connect(1)
    train(50, 0, 1)
    machines[1].recording.add(changed.run(2600)[-20:])  # steps that were not known when their seconds were sent
    train(5, 0, 1, last=True)
    for node in records.nodes:
        node.state = "ended"
    records.write([])
    mirror = open_mirror_store(records)
    windows = [(0, 1 << 40)]
    if not sparse:
        windows += (1300, 1350), (1320, 2900), (2000, 2600)
    for machine in machines:
        own, number = machine.recording.store(), records.local_process_number(machine.number, 0)
        for begin, end in windows:
            there = without_waits(read_tallies(own, begin, end), 0, number)
            assert without_waits(read_tallies(mirror, begin, end), number, number) == there, (begin, end)
        assert sum_of(mirror, 0, 1 << 40, number) == sum_of(own, 0, 1 << 40, 0)
    records.close()


class Together:
    """Four ranks on two machines that step together; rank 2 is slow."""

    def __init__(self) -> None:
        self.machines = [MirroredNode(number, 0) for number in (0, 1)]
        for machine in self.machines:
            machine.recording = machine.new_recording()
        self.tails: dict[tuple[int, int], int] = {}
        """What is left of a step after the last gradient, by rank and step."""
        self._rows: dict[tuple[int, int], list[Row]] = {}
        for number, process in ((0, 0), (0, 1), (1, 0), (1, 1)):
            rank = 2 * number + process
            chance = random.Random(rank)
            training = Training(process=process, rank=rank, step_ns=95_000_000, seed=7)
            first, *others = training.begin()
            ddp = Event("ddp", {"process": process, "rank": rank, "t_s": 2.0, "group": [0, 1, 2, 3]})
            rows = [with_event_data(first, pid=42 + process, rank=rank, world=4), *others, ddp]
            for step in range(1, 901):
                *calls, row = training.step()
                assert isinstance(row, Step)
                self.tails[rank, step] = tail = (30_000_000 if rank != 2 else 0) + chance.randrange(2_000_000)
                counts = {**row.counts, "synced": 1, "sync_number": step}
                phases = with_other({**row.phases, "sync": tail}, row.wall_ns)
                rows += [*calls, row._replace(phases=phases, counts=counts)]
            self._rows[number, process] = rows

    def write(self, second: int) -> None:
        """Record what has happened until a second."""
        for (number, process), rows in self._rows.items():
            later = (at for at, row in enumerate(rows) if isinstance(row, Step) and row.start_ns > second * SECOND)
            until = next(later, len(rows))
            self.machines[number].recording.add(rows[:until], process, 2 * number + process)
            del rows[:until]


def connected(records: MirrorHistory) -> MirrorHistory:
    """Return the records, with all machines connected and their clocks known."""
    for node, shift_ns in zip(records.nodes, CLOCK_SHIFTS_NS, strict=True):
        node.state, node.clock_ns, node.shift_s = "connected", shift_ns, 0
        node.origin_s = ORIGIN_S + round(shift_ns / SECOND)
    return records


def waits_by_second(mirror: Store, width: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return count and total of the waits by process and begin of each stretch, from the tallies."""
    found = {}
    for start, _, key, tally in read_tally_rows(mirror, widest=width):
        if tally.stat(WAIT).count:
            found[key.process, start] = tally.stat(WAIT).count, tally.stat(WAIT).total
    return found


def waits_of_steps(mirror: Store, shifts: dict[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the same from the steps. `shifts`: by process, the part of a second by which its times are ahead."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    query = "SELECT process, start_ns, wall_ns, wait_ns FROM steps WHERE wait_ns NOT NULL"
    for process, start, wall, wait in mirror.query(query):
        key = process, (start + wall - shifts[process]) // SECOND
        count, total = found.get(key, (0, 0))
        found[key] = count + 1, total + wait
    return found


def after_a_cut(tmp_path: Path) -> tuple[MirrorHistory, Store]:
    """Return the records of four ranks on two machines; the second machine is cut off for a minute."""
    records, together = connected(MirrorHistory(tmp_path, mirror_run_info(2))), Together()
    for second in range(5, 110):
        together.write(second)
        for machine, node in zip(together.machines, records.nodes, strict=True):
            if node.number == 0 or not 20 <= second < 80:
                send_all(machine, records, second, last=second > 108)
            elif second == 20:  # the connection is cut
                machine.rows = machine.connected(node)
    return records, open_mirror_store(records)


def test_a_full_history_loses_its_oldest_seconds_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmon.mirror.mirror_history.LIMIT_BYTES", 1 << 18)
    records, together = connected(MirrorHistory(tmp_path, mirror_run_info(2))), Together()
    kept_from = []
    for second in range(5, 90):
        together.write(second)
        for machine, node in zip(together.machines, records.nodes, strict=True):
            chunk, _ = machine.chunk(second)
            records.write([(node, chunk)])
        kept_from.append(open_mirror_store(records).buckets.deleted_until[1] - ORIGIN_S)
    assert 0 < kept_from[50] < kept_from[-1] <= 80, "up to the stretches of 10 s that are there"
    assert read_tallies(open_mirror_store(records), 0, 10), "the figures of that time come from them"


def test_the_waits_of_a_long_cut_are_in_the_tallies_of_their_seconds(tmp_path: Path) -> None:
    records, mirror = after_a_cut(tmp_path)
    shift_ns = {ring.process: CLOCK_SHIFTS_NS[ring.node or 0] for ring in mirror.rings.values() if ring.process >= 0}
    steps = waits_of_steps(mirror, {process: ns % SECOND for process, ns in shift_ns.items()})
    narrow, wide = (waits_by_second(mirror, width) for width in (1, 60))
    for process in range(4):
        cut = [(process, second + shift_ns[process] // SECOND) for second in range(26, 75)]
        assert sum(place in steps for place in cut) > 40
        assert [narrow.get(place) for place in cut] == [steps.get(place) for place in cut]
        sums = [sum(found[0] for place, found in each.items() if place[0] == process) for each in (steps, narrow, wide)]
        assert sums[0] - 3 <= sums[1] == sums[2] <= sums[0]  # the last ones are in no tally yet
    records.close()


def test_the_waits_of_a_cut_whose_seconds_are_not_sent_are_in_no_other_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the time before, a machine sends only wider tallies."""
    monkeypatch.setattr("dpmon.export.incremental_rows.RECONNECT_FACTOR", 1)
    monkeypatch.setitem(INITIAL_BUCKETS_S, 1, 20)
    records, mirror = after_a_cut(tmp_path)
    narrow = [tally for _, width, _, tally in read_tally_rows(mirror, widest=1) if width == 1]
    assert narrow
    assert all(tally.stat(WAIT).count <= tally.steps for tally in narrow)
    for process in range(4):
        known = mirror.query(f"SELECT count(wait_ns) FROM steps WHERE process = {process}")[0][0]
        sums = [count for (of, _), (count, _) in waits_by_second(mirror, 60).items() if of == process]
        assert known - 3 <= sum(sums) <= known
    records.close()


def all_rows(records: MirrorHistory) -> dict[str, list[tuple[Any, ...]]]:
    tables = [name for (name,) in records._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {table: records._db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables}


def test_what_could_not_be_written_is_written_later_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for some time. Some records are taken back then, to be sent again."""
    found = []
    for fails in (False, True):
        directory = tmp_path / str(fails)
        directory.mkdir()
        records, together = connected(MirrorHistory(directory, mirror_run_info(2))), Together()

        def write(
            chunks: list[tuple[NodeRow, Chunk]],
            transact: Any = records._history.run_transaction,
            records: MirrorHistory = records,
        ) -> None:
            def full(put: Callable[[], None]) -> None:
                def work() -> None:
                    put()
                    raise sqlite3.OperationalError("database or disk is full")

                transact(work)

            with monkeypatch.context() as patched:
                patched.setattr(records._history, "run_transaction", full)
                with pytest.raises(HistoryError, match="full"):
                    records.write(chunks)

        for second in range(5, 110):
            together.write(second)
            chunks = [
                (node, machine.chunk(second, last=second > 108)[0])
                for machine, node in zip(together.machines, records.nodes, strict=True)
            ]
            if fails and second % 3 == 0:
                write(chunks)
                write(chunks[second % 2 :])
            for chunk in chunks:
                records.write([chunk])
        found.append(all_rows(records))
        records.close()
    assert found[0].keys() == found[1].keys()
    for table, rows in found[0].items():
        assert rows == found[1][table], table


def test_the_waits_of_ranks_on_several_machines_are_those_of_all_steps(tmp_path: Path) -> None:
    """Only some steps are sent, but the mean wait is right, in tallies of all widths and after a restart."""
    records = connected(MirrorHistory(tmp_path, mirror_run_info(2)))
    together = Together()
    machines, tails = together.machines, together.tails
    for second in range(5, 110, 3):
        together.write(second)
        for machine, node in zip(machines, records.nodes, strict=True):
            records.write([(node, machine.chunk(second, last=second > 105)[0])])
        if second == 50:
            records.close()
            records = connected(MirrorHistory(tmp_path, mirror_run_info(2)))
            for machine, node in zip(machines, records.nodes, strict=True):
                machine.rows = machine.connected(node)
    mirror = open_mirror_store(records)
    ranks = {ring.rank: ring.process for ring in mirror.rings.values() if ring.rank is not None}
    sampled = {
        rank: mirror.query(f"SELECT count(wait_ns) FROM steps WHERE process = {ranks[rank]}")[0][0] for rank in ranks
    }
    for rank, process in ranks.items():
        waits = [tails[rank, step] - min(tails[other, step] for other in ranks) for step in range(1, 901)]
        whole = Tally()
        for key, tally in read_tallies(mirror, process=process).items():
            assert key.process == process
            whole.merge(tally)
        wait = whole.stat(WAIT)
        assert 50 < wait.count <= sampled[rank] <= 900 / 4
        assert whole.steps == 900
        assert wait.mean == pytest.approx(sum(waits) / len(waits), abs=1_000_000)
        assert whole.stat(EXPOSED).count == wait.count
    found = find_straggler(
        rank_times_in_window(StatsWindow(mirror), {process: rank for rank, process in ranks.items()}, {})
    )
    assert found is not None
    assert found.rank == 2
    assert found.excess_ns == pytest.approx(30e6, rel=0.05)
    wide = mirror.query("SELECT count(*) FROM tallies WHERE width = 60")[0][0]
    assert wide >= 4
    records.close()


def test_the_wide_tallies_of_a_machine_that_is_gone_are_made_here(tmp_path: Path) -> None:
    """One machine dies within a stretch; the others go on, and all figures stay."""
    records = MirrorHistory(tmp_path, mirror_run_info(2))
    machines = [MirroredNode(number, 0) for number in (0, 1)]
    for number, machine in enumerate(machines):
        machine.recording = machine.new_recording()
        training = Training(process=0, rank=number, step_ns=200_000_000)
        first, *others = training.begin()
        seconds = 33 if number else 700
        machine.recording.add(
            [with_event_data(first, pid=42, rank=number), *others, *training.run(5 * seconds)], 0, number
        )
    for machine, node in zip(machines[::-1], records.nodes[::-1], strict=True):
        node.state = "connected"
        newest = newest_record_ns(machine.recording.store()) // SECOND
        for upto in (*range(5, newest, 30), newest):
            records.write([(node, machine.chunk(upto)[0])])
        node.state = "cut" if node.number else "connected"
        before = without_waits(read_tallies(open_mirror_store(records)), 0, 0)
    mirror = open_mirror_store(records)
    gone = records.local_process_number(1, 0)
    assert mirror.buckets.made_until[600] == (ORIGIN_S + newest) // 600 * 600
    assert any(width == 600 for _, width, _, _ in read_tally_rows(mirror, process=gone))
    after = {key: tally for key, tally in read_tallies(mirror).items() if key.process == gone}
    assert sum(tally.steps for tally in after.values()) > 100
    assert {key.mode for key in before} == {"dp"}
    narrow = Tally()
    for _, _, _, tally in read_tally_rows(mirror, process=gone, widest=1):
        narrow.merge(tally)
    whole = Tally()
    for tally in after.values():
        whole.merge(tally)
    assert whole == narrow
    records.close()


@pytest.mark.parametrize("days", [1, 10])
def test_the_newest_records_of_a_long_run_come_after_few_chunks(days: int) -> None:
    recording, rows, reached, more = Recording(), IncrementalRows(rollups=True), list[int](), True
    recording.add(Training().run(20))
    while more:
        _, more = rows.next_chunk(recording.store(), days * 86_400, is_last=False)
        reached.append(rows.tallied_s)
    assert len(reached) < 20 + days
    assert reached == sorted(reached)
    assert reached[-1] == ORIGIN_S + days * 86_400
