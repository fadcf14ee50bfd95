"""A reader that comes late knows the whole run: what it is not given in full comes from rollups and drawn steps."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from functools import cache
from pathlib import Path
from shutil import copytree

import pytest
from kept import keep
from synthetic import SECOND, Training, decoded, device_event, host_event

from dpmon.model import State, fold
from dpmon.model.compare import compared
from dpmon.model.history import columns_of, figures
from dpmon.model.past import fold_past
from dpmon.past import DevicePast, Drawn, Past
from dpmon.record.codec import Call, Decoder, Step
from dpmon.record.wire import pack_call, pack_definition, pack_event, pack_step
from dpmon.report import collect
from dpmon.ring import Ring
from dpmon.run.drain import Drain
from dpmon.run.history import LIMIT_BYTES, History
from dpmon.run.kept import Kept
from dpmon.run.past import Before, past_of
from dpmon.run.playback import PlaybackReader
from dpmon.run.reader import RECENT_RECORDS, RunReader
from dpmon.run.rows import decoders_of, record_of, step_columns
from dpmon.run.rundir import ExitInfo, RunInfo, create_run, save
from dpmon.run.tables import BEFORE_S
from dpmon.ui.feed import Feed
from dpmon.ui.scene import View

SINGLE, DP = 3000, 9000


@cache
def payloads_of_a_long_run() -> list[bytes]:
    """3,000 steps in single, 9,000 in dp, of two speeds by turns; 22 minutes."""
    training = Training(mode="single", step_ns=60_000_000)
    payloads = [*training.begin()]
    for number in range(SINGLE + DP):
        if number == SINGLE:
            payloads += training.switch("dp")
        training.step_ns = 400_000_000 if number % 50 == 49 else 60_000_000 if number < SINGLE else 100_000_000
        payloads += training.step()
    return payloads


@pytest.fixture(scope="module")
def payloads() -> list[bytes]:
    return payloads_of_a_long_run()


@pytest.fixture(scope="module")
def long_run(payloads: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it is there; nobody writes to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        return keep({0: payloads}, seconds=2000.0)


def every_step(directory: Path) -> dict[str, list[tuple[int, int | None]]]:
    """Duration and samples of all steps, from the history itself."""
    found: dict[str, list[tuple[int, int | None]]] = {}
    kept = Kept(directory)
    for row in kept.rows():
        if row[1] == "steps":
            _, _, mode, _, wall, samples, _ = step_columns(row)
            found.setdefault(mode, []).append((wall, samples))
    kept.close()
    return found


def attached(directory: Path) -> State:
    state, reader = State(), RunReader(directory)
    for past in reader.past():
        if past is not None:
            state = fold_past(state, past)
    while records := reader.poll():
        for record in records:
            state = fold(state, record)
    reader.close()
    return state


def test_a_late_reader_has_both_modes_all_steps_and_the_whole_time(long_run: Path) -> None:
    truth = every_step(long_run)
    assert {mode: len(steps) for mode, steps in truth.items()} == {"single": SINGLE, "dp": DP}
    process = attached(long_run).processes[0]
    assert {mode: track.count for mode, track in process.modes.items()} == {"single": SINGLE, "dp": DP}
    assert process.step_count == SINGLE + DP
    assert process.call_count == SINGLE + DP
    columns = columns_of(process, 0)
    assert columns[0].second == 0
    assert list(dict.fromkeys(column.mode for column in columns)) == ["single", "dp"]
    assert sum(column.count for column in columns) == SINGLE + DP
    found = compared(process)
    assert found.speedup is not None
    assert found.missing is None
    for mode, steps in truth.items():
        walls = sorted(wall for wall, _ in steps)
        speed = 1e9 * sum(samples or 0 for _, samples in steps) / sum(walls)
        assert sum(column.wall_ns for column in columns if column.mode == mode) == sum(walls)
        assert found.sides[mode].seen == len(walls)
        assert found.sides[mode].rate.samples_per_s == pytest.approx(speed)
        assert found.sides[mode].median_ns == pytest.approx(walls[len(walls) // 2], rel=0.05)
        numbers = figures(process, mode, 0)
        assert numbers.steps == len(walls)
        assert numbers.rate.samples_per_s == pytest.approx(speed)
        assert numbers.median_ns == pytest.approx(walls[len(walls) // 2], rel=0.06)


def test_a_late_reader_has_the_phases_of_one_that_was_there_all_the_time(long_run: Path) -> None:
    whole, process = State(), attached(long_run).processes[0]
    kept = Kept(long_run)
    decoders: dict[int, Decoder] = dict(decoders_of(kept, 0))
    for row in kept.rows():
        record = record_of(row, decoders)
        if isinstance(record, (Call, Step)):
            whole = fold(whole, record)
    kept.close()
    for span in (0, 600, 120):
        ours, theirs = figures(process, "dp", span), figures(whole.processes[0], "dp", span)
        assert ours.steps == theirs.steps
        for one, other in zip(ours.phases, theirs.phases, strict=True):
            assert one.ran == pytest.approx(other.ran, abs=2)
            assert one.share == (None if other.share is None else pytest.approx(other.share, rel=0.01))
            if other.median_ns is not None:
                assert one.median_ns == pytest.approx(other.median_ns, rel=0.12)
    ours, theirs = compared(process), compared(whole.processes[0])
    for one, other in zip(ours.sides["single"].phases, theirs.sides["single"].phases, strict=True):
        assert one.median_ns == (None if other.median_ns is None else pytest.approx(other.median_ns, rel=0.1))


def played(player: PlaybackReader, at_ns: int) -> State:
    """What is known when the playback's clock was set to a time."""
    player.seek(0 if at_ns else player.length_ns)
    player.poll()
    player.seek(at_ns)
    records, state = player.poll(), State()
    for past in player.past():
        state = fold_past(state, past)
    for record in records:
        state = fold(state, record)
    return state


@cache
def seen() -> list[Call | Step]:
    """The long run's calls and steps, as a reader knows them that was there all the time."""
    return [record for record in decoded(payloads_of_a_long_run()) if isinstance(record, (Call, Step))]


def until(at_ns: int) -> State:
    """What a reader knows that saw all of the long run from the beginning up to a time."""
    whole = State()
    for record in seen():
        if record.start_ns + record.wall_ns <= at_ns:
            whole = fold(whole, record)
    return whole


@pytest.mark.parametrize("part", [0.05, 0.3, 0.7, 0.97, 1.0])
def test_a_playback_knows_the_whole_run_up_to_its_place_and_nothing_after_it(long_run: Path, part: float) -> None:
    player = PlaybackReader(long_run)
    length = length_ns()
    at = int(length * part) // SECOND * SECOND
    ours, theirs = played(player, at).processes[0], until(at).processes[0]
    assert {mode: track.count for mode, track in ours.modes.items()} == {
        mode: track.count for mode, track in theirs.modes.items()
    }
    assert (ours.step_count, ours.call_count) == (theirs.step_count, theirs.call_count)
    assert max(column.second for column in columns_of(ours, 0)) < at // SECOND
    for mode in theirs.modes:
        ours_all, theirs_all = figures(ours, mode, 0), figures(theirs, mode, 0)
        assert ours_all.steps == theirs_all.steps
        assert ours_all.rate.samples_per_s == pytest.approx(theirs_all.rate.samples_per_s)
        assert ours_all.median_ns == pytest.approx(theirs_all.median_ns, rel=0.08)
        for one, other in zip(ours_all.phases, theirs_all.phases, strict=True):
            assert one.share == (None if other.share is None else pytest.approx(other.share, rel=0.01))
    found, truth = compared(ours), compared(theirs)
    assert (found.speedup is None, found.missing) == (truth.speedup is None, truth.missing)
    if found.speedup is not None and truth.speedup is not None:
        assert found.speedup.value == pytest.approx(truth.speedup.value, rel=0.05)
    again = played(player, at).processes[0]
    assert [(column.second, column.count) for column in columns_of(again, 0)] == [
        (column.second, column.count) for column in columns_of(ours, 0)
    ]
    player.close()


def length_ns() -> int:
    """When the long run's last step ended."""
    return max(record.start_ns + record.wall_ns for record in seen() if isinstance(record, Step))


@pytest.mark.parametrize("part", [0.1, 0.4, 0.75, 0.95])
def test_a_playback_knows_what_was_deleted_by_its_sums(state: Path, payloads: list[bytes], part: float) -> None:
    directory = keep({0: payloads}, seconds=2000.0, limit_bytes=5 << 19)
    kept = Kept(directory)
    assert kept.pruned > 2 * SINGLE
    assert kept.steps_by_mode(0, kept.last_id) != []
    kept.close()
    player = PlaybackReader(directory)
    at = int(length_ns() * part) // (60 * SECOND) * 60 * SECOND
    ours, theirs = played(player, at).processes[0], until(at).processes[0]
    # Where nothing is left in full, the second that has begun is not counted; at a minute's end there is none.
    assert ours.step_count == pytest.approx(theirs.step_count, abs=1)
    assert list(ours.modes) == list(theirs.modes)
    for mode in theirs.modes:
        assert ours.modes[mode].count == pytest.approx(theirs.modes[mode].count, abs=1)
        assert compared(ours).sides[mode].rate.samples_per_s == pytest.approx(
            compared(theirs).sides[mode].rate.samples_per_s, rel=0.01
        )
    player.close()


@pytest.mark.parametrize("at_s", [700, 719, 720, 1100])
def test_a_playback_where_the_sums_of_seconds_were_deleted(long_run: Path, tmp_path: Path, at_s: int) -> None:
    directory = tmp_path / long_run.name
    copytree(long_run, directory)
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM rollups WHERE width = 1 AND start_s < 1000")
    player = PlaybackReader(directory)
    ours, theirs = (found.processes[0] for found in (played(player, at_s * SECOND), until(at_s * SECOND)))
    assert {mode: track.count for mode, track in ours.modes.items()} == {
        mode: track.count for mode, track in theirs.modes.items()
    }
    player.close()


def test_a_history_that_was_bounded_before_there_were_sums_is_played_and_reported(
    state: Path, payloads: list[bytes]
) -> None:
    directory = keep({0: payloads}, seconds=2000.0, limit_bytes=5 << 19)
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("DROP TABLE rollups")
        db.execute("DROP TABLE device_rollups")
        (left,) = db.execute("SELECT count(*) FROM steps").fetchone()
    kept = Kept(directory)
    assert kept.pruned > 0
    assert (list(kept.whole()), kept.summed()) == ([], (0, 0))
    kept.close()
    player = PlaybackReader(directory)
    for part in (0.2, 0.99, 0.6):
        assert played(player, int(player.length_ns * part)) is not None
    player.close()
    assert attached(directory).processes[0].step_count > 0
    story = collect(directory)
    assert story.steps == left > 0
    assert not any("cannot be read" in text for text in story.warnings)


def test_what_is_remembered_is_what_would_be_read_anew(long_run: Path) -> None:
    kept = Kept(long_run)
    often = Before(kept, again=True)
    for first in (kept.last_id // 40, kept.last_id // 2, kept.last_id * 3 // 4, kept.last_id - 4000):
        for _ in range(2):
            remembered, anew = list(often.of(first)), list(Before(kept).of(first))
            drawn, fresh = ([each for each in found if isinstance(each, Drawn)] for found in (remembered, anew))
            assert drawn == fresh
            assert drawn != []
            assert sum(past.steps for past in remembered if isinstance(past, Past)) == sum(
                count for _, _, count in kept.steps_by_mode(0, first)
            )
            assert [past._replace(drawn=()) for past in remembered if isinstance(past, Past)] == [
                past._replace(drawn=()) for past in anew if isinstance(past, Past)
            ]
    kept.close()


def disordered(limit_bytes: int = LIMIT_BYTES) -> tuple[Path, Counter[int]]:
    """Three ranks, taken over after half a minute each time, one after the other; and the true steps of each."""
    info = RunInfo("", "n", ("p",), "s", "/", None, 1.7e9, 0, "", True, command_pid=4_000_000)
    directory, info = create_run(info)
    drain, truth, at = Drain(directory, info, print, limit_bytes), Counter[int](), 2 * SECOND
    ranks = [Training(process=p, rank=p, mode="single", step_ns=60_000_000, seed=p + 1) for p in range(3)]
    rings = [Ring(str(directory / f"process-{p}.ring"), process=p, start_ns=0, capacity=1 << 22) for p in range(3)]
    while at < 150 * SECOND:
        at += 31 * SECOND
        for ring, rank in zip(rings, ranks, strict=True):
            while rank.now < at:
                truth[rank.process] += 1
                for payload in rank.step():
                    ring.write(payload)
        drain.flush()
    drain.flush(over=True)
    drain.close()
    save(directory, ExitInfo(0, None, 1.7e9 + 157, 157 * SECOND, 157.0, "supervisor"))
    return directory, truth


def test_what_several_ranks_did_is_told_once_wherever_the_record_is_cut(state: Path) -> None:
    directory, truth = disordered()
    kept = Kept(directory)
    ends = [(row[0], row[3], row[6] + row[7]) for row in kept.rows() if row[1] == "steps"]
    before = Before(kept, again=True)
    for first in range(300, kept.last_id, kept.last_id // 11):
        for until in (None, kept.time_from(first), 40 * SECOND + 123):
            told = Counter[int]()
            for past in before.of(first, until):
                if isinstance(past, Past):
                    told[past.process] += past.steps
            assert told == Counter(
                process for number, process, end in ends if number <= first and (until is None or end <= until)
            ), (first, until)
    assert Counter(process for _, process, _ in ends) == truth
    kept.close()


def test_a_playback_of_several_ranks_counts_each_step_once(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmon.run.playback.AHEAD_ROWS", 500)
    monkeypatch.setattr("dpmon.run.playback.RECENT_RECORDS", 200)
    directory, _ = disordered()
    kept, player = Kept(directory), PlaybackReader(directory)
    ends = [(row[3], row[6] + row[7]) for row in kept.rows() if row[1] == "steps"]
    for at in (20 * SECOND, 64 * SECOND, 65 * SECOND + 7, 100 * SECOND, 157 * SECOND):
        found = {number: process.step_count for number, process in played(player, at).processes.items()}
        assert found == Counter(process for process, end in ends if end <= at), at
    player.close()
    kept.close()


def test_what_was_deleted_of_several_ranks_is_in_the_report(state: Path) -> None:
    directory, truth = disordered(1 << 20)
    story = collect(directory)
    assert story.pruned > 0
    assert sum(one.facts.steps for one in story.deleted) > 0
    assert (story.steps, story.calls) == (truth.total(), truth.total())
    kept = Kept(directory)
    for first in (kept.last_id - 500, kept.last_id - 1500):
        told = sum(past.steps for past in Before(kept).of(first) if isinstance(past, Past))
        assert told == truth.total() - sum(1 for row in kept.rows(first) if row[1] == "steps")
    kept.close()


def test_the_screen_takes_it_in_by_sips(long_run: Path) -> None:
    feed = Feed(long_run, lambda: RunReader(long_run))
    feed.start()
    feed.tick(0.0)
    assert feed.busy
    while feed.busy:
        assert feed.scene(View()).reading
        feed.sip(0.0)
    assert not feed.scene(View()).reading
    process = feed.state.processes[0]
    assert process.modes["single"].count == SINGLE
    assert process.modes["dp"].count == DP
    feed.close()


def test_a_late_reader_has_samples_as_far_back_as_the_charts_go_and_a_sip_at_a_time(state: Path) -> None:
    samples = [host_event(float(second), cpu=float(second % 100)) for second in range(1, 1501)]
    training = Training(start_ns=1400 * SECOND)
    directory = keep({-1: samples, 0: [*training.begin(), *training.run(2500)]}, seconds=1501.0)
    state_now, sips, reader = State(), [], RunReader(directory)
    while records := reader.poll(50):
        sips.append(len(records))
        for record in records:
            state_now = fold(state_now, record)
    reader.close()
    assert max(sips) <= 60, "about so many; rings give what they have"
    assert list(state_now.host.util)[-630:] == [float(second % 100) for second in range(871, 1501)]
    whole = RunReader(directory)
    assert len(whole.poll()) == sum(sips)
    whole.close()


def test_a_damaged_row_does_not_hide_those_after_it(state: Path) -> None:
    training = Training()
    directory = keep({0: [*training.begin(), *training.run(100)]})
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE steps SET mode = 'neither' WHERE step = 7")
    reader = RunReader(directory)
    assert [each.step for each in reader.poll() if isinstance(each, Step)] == [*range(1, 7), *range(8, 101)]
    reader.close()


@pytest.mark.parametrize(("calls", "known"), [(128, True), (5000, False)])
def test_a_drawn_step_has_all_of_its_calls_or_none(state: Path, calls: int, known: bool) -> None:
    layout = {"root": "M", "via": "DataParallel", "virtual": False, "devices": ["cuda:0", "cuda:1"], "absent": {}}
    out, at = [pack_definition(1, layout)], SECOND
    for step in range(1, 4):
        start = at
        for call in range(calls):
            phases = (0, 100, 100, 400, 500, 400, 900, 100)
            out.append(pack_call(1, 6, 1, step, call, at, 1000, 0, 0, phases, (0, 0, 0, 400) * 2))
            at += 1000
        out.append(pack_step(1, step, start, at - start, 8, (0, at - start, -1, -1)))
    kept = Kept(keep({0: out}))
    (drawn,) = (each for each in Before(kept).of(kept.last_id) if isinstance(each, Drawn))
    kept.close()
    sums = (100 * calls, 400 * calls, 400 * calls, 100 * calls)
    assert [inside for _, inside in drawn.steps] == [sums if known else None] * 3


def test_damaged_steps_make_no_process_and_no_mode(state: Path) -> None:
    training = Training()
    directory = keep({0: [*training.begin(), *training.run(100)]})
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE steps SET process = 'abc' WHERE step % 3 = 0")
        db.execute("UPDATE steps SET mode = x'00ff' WHERE step % 3 = 1")
    kept = Kept(directory)
    counts = [(0, "dp", 33)]
    assert kept.steps_by_mode(0, kept.last_id) == counts
    assert [each[1:] for each in kept.steps_by_block(1 << 16)] == counts
    assert {(each.process, each.mode) for each in Before(kept).of(kept.last_id)} == {(0, "dp")}
    kept.close()


def test_a_short_run_is_given_in_full(state: Path) -> None:
    training = Training()
    directory = keep({0: [*training.begin(), *training.run(100)]})
    reader = RunReader(directory)
    assert list(reader.past()) == []
    records = reader.poll()
    assert sum(isinstance(record, Step) for record in records) == 100 < RECENT_RECORDS
    reader.close()


def test_the_past_comes_in_pieces_that_leave_room_for_others(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def everything() -> list[object]:
        reader = RunReader(long_run)
        found: list[object] = list(reader.past())
        reader.close()
        return found

    whole = everything()
    monkeypatch.setattr("dpmon.run.draws._IDS", 700)
    pieces = everything()
    assert [each for each in pieces if each is not None] == [each for each in whole if each is not None]
    assert pieces.count(None) > whole.count(None) + 3 * (2 * (SINGLE + DP) - RECENT_RECORDS) // 700 - 3
    assert whole.count(None) > 2 * 512 // 50, "the drawn steps are taken in by pieces, too"


def test_the_newest_records_come_in_pieces_too(long_run: Path) -> None:
    one, other = RunReader(long_run), RunReader(long_run)
    found = []
    while records := one.poll(50):
        assert len(records) <= 50
        found += records
    assert found == other.poll()
    one.close()
    other.close()


def test_device_charts_begin_before_the_samples_that_are_given_in_full(state: Path) -> None:
    """Of half an hour of samples the last two minutes are left in full, as of a loop so fast that it fills the history;
    eight before that are known by the mean of each minute.
    """
    training = Training(step_ns=100_000_000)
    samples = [pack_event("host", {"t_s": 0.5, "cpu_pct": 1.0, "mem_used_bytes": 5, "mem_total_bytes": 10})]
    for second in range(1, 1800):
        if not 1500 <= second < 1530:  # nobody sampled
            level = 20.0 if second < 1620 else 80.0
            samples.append(device_event(float(second), 0, util_pct=level, power_w=None))
            host = {"t_s": float(second), "cpu_pct": second // 60, "mem_used_bytes": 5, "mem_total_bytes": 10}
            samples.append(pack_event("host", host))
    directory = keep({0: [*training.begin(), *training.run(6000)], -1: samples}, seconds=1800.0)
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM events WHERE kind IN ('device', 'host') AND t_ns < 1680000000000")
    shown = attached(directory)
    track, whole = shown.devices[0], State()
    for record in decoded(samples, -1):
        whole = fold(whole, record)
    truth = whole.devices[0]
    assert track.data == truth.data
    got, wanted = list(track.util), list(truth.util)[-len(track.util) :]
    assert len(got) > 600
    assert got[-170:] == wanted[-170:], "in full, or of minutes that were even"
    assert {value for value in got if value is not None} == {20.0, 80.0}
    assert got.count(None) == pytest.approx(30, abs=2), "the gap is one still"
    assert set(track.power) == {None}
    assert next(iter(track.mem)) == pytest.approx(list(truth.mem)[-1])
    assert list(shown.host.util)[-600:-320:60] == pytest.approx(list(whole.host.util)[-600:-320:60], abs=1)


def test_sums_without_a_time_are_no_minute_of_a_young_run(state: Path) -> None:
    """Of a run's first minutes all are told; what is left of minutes that were deleted has no place among them."""
    training = Training(step_ns=100_000_000)
    samples = [pack_event("host", {"t_s": float(second), "cpu_pct": 20.0}) for second in range(1, 300)]
    directory = keep({0: [*training.begin(), *training.run(100)], -1: samples}, seconds=300.0)
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("INSERT INTO device_rollups VALUES (?, -1, 'cpu_pct', 600, 60000.0, 100.0, 100.0)", (BEFORE_S,))
        ((first,),) = db.execute("SELECT max(id) FROM events WHERE kind = 'host' AND t_ns < 180000000000")
        db.execute("DELETE FROM events WHERE kind = 'host' AND t_ns < 180000000000")
    kept = Kept(directory)
    found = [past for past in past_of(kept, first) if isinstance(past, DevicePast)]
    kept.close()
    assert {past.start_s for past in found} == {0, 60, 120}
    assert {past.means["cpu_pct"] for past in found} == {20.0}


def test_a_playback_before_the_first_minute_that_is_left_has_the_sums_and_plays_on_from_them(state: Path) -> None:
    training = Training(mode="single", step_ns=20 * SECOND)
    directory = keep({0: [*training.begin(), *training.run(4000)]}, seconds=90_000.0, limit_bytes=1 << 18)
    now = [0]
    player = PlaybackReader(directory, lambda: now[0])
    kept = Kept(directory)
    (whole,), (first_s, full_ns) = list(kept.whole()), kept.summed()
    kept.close()
    assert 1000 < first_s == whole.start_s < full_ns // SECOND
    early = played(player, 1000 * SECOND)
    assert early.processes[0].step_count == whole.steps
    assert early.newest_ns <= 1000 * SECOND, "nothing of it is placed in time"
    assert early.processes[0].paces.of("single").training.step_ns == whole.sums[0]
    player.seek(0)
    player.play()
    player.speed = 100.0
    folded, generation, looks = State(), -1, 0
    while player.playing:
        now[0] += 30 * SECOND
        records = player.poll()
        if player.generation != generation:
            folded, generation, looks = State(), player.generation, looks + 1
            for past in player.past():
                folded = fold_past(folded, past)
        for record in records:
            folded = fold(folded, record)
    player.close()
    assert folded.processes[0].step_count == 4000
    assert looks < 10, "where nothing more is known, nothing is looked for"


def test_the_span_of_a_process_that_ended_early_takes_no_look_at_all_rows(state: Path) -> None:
    """Whose rows lie where is written beside its ring; without that (an earlier version) it is found all the same."""
    many, few = Training(process=0), Training(process=1)
    directory = keep({1: [*few.begin(), *few.run(20)], 0: [*many.begin(), *many.run(6000)]})

    def spans() -> tuple[list[tuple[int, int] | None], int]:
        """Of three processes; and how many looks that of the early one took."""
        kept, looks = Kept(directory), []
        found = [kept.span(process) for process in (0, 1, 2)]
        kept._db.set_progress_handler(lambda: looks.append(1), 100)
        kept.span(1)
        kept.close()
        return found, len(looks)

    kept = Kept(directory)
    ids: dict[int, list[int]] = {0: [], 1: []}
    for row in kept.rows():
        if row[1] in ("calls", "steps"):
            ids[row[3]].append(row[0])
    kept.close()
    found, looks = spans()
    assert found == [(min(ids[0]), max(ids[0])), (min(ids[1]), max(ids[1])), None]
    assert looks <= 10
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE rings SET first_id = 'x'")
    assert spans()[0] == found
    assert spans()[1] > 100
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        for name in ("first_id", "last_id"):
            db.execute(f"ALTER TABLE rings DROP COLUMN {name}")
    assert spans()[0] == found
    History(directory, {}).close()
    assert spans()[0] == found, "an earlier version began it, this one went on"
