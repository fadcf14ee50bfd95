"""A reader that comes late knows the whole run: what it is not given in full comes from rollups and drawn steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept import keep
from synthetic import Training

from dpmon.model import State, fold
from dpmon.model.compare import compared
from dpmon.model.history import columns_of, figures
from dpmon.model.past import fold_past
from dpmon.records import Call, Decoder, Step
from dpmon.run.kept import Kept
from dpmon.run.reader import RECENT_RECORDS, RunReader
from dpmon.run.rows import decoders_of, record_of, step_columns
from dpmon.ui.feed import Feed

SINGLE, DP = 3000, 9000


@pytest.fixture
def long_run(state: Path) -> Path:
    """3,000 steps in single, 9,000 in dp, of two speeds by turns; 22 minutes."""
    training = Training(mode="single", step_ns=60_000_000)
    payloads = [*training.begin()]
    for number in range(SINGLE + DP):
        if number == SINGLE:
            payloads += training.switch("dp")
        training.step_ns = 400_000_000 if number % 50 == 49 else 60_000_000 if number < SINGLE else 100_000_000
        payloads += training.step()
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
        assert found.sides[mode].samples_per_s == pytest.approx(speed)
        assert found.sides[mode].median_ns == pytest.approx(walls[len(walls) // 2], rel=0.05)
        numbers = figures(process, mode, 0)
        assert numbers.steps == len(walls)
        assert numbers.samples_per_s == pytest.approx(speed)
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


def test_the_screen_takes_it_in_by_sips(long_run: Path) -> None:
    feed = Feed(long_run, lambda: RunReader(long_run))
    feed.start()
    feed.tick(0.0)
    assert feed.busy
    while feed.sip(0.0):
        assert feed.busy
    process = feed.state.processes[0]
    assert process.modes["single"].count == SINGLE
    assert process.modes["dp"].count == DP
    feed.close()


def test_a_short_run_is_given_in_full(state: Path) -> None:
    training = Training()
    directory = keep({0: [*training.begin(), *training.run(100)]})
    reader = RunReader(directory)
    assert list(reader.past()) == []
    records = reader.poll()
    assert sum(isinstance(record, Step) for record in records) == 100 < RECENT_RECORDS
    reader.close()
