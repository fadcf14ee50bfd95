"""What the screen knows, taken in a slice at a time: all of it, and the end last."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
from stage import LOOK, FakeReader
from synthetic import SECOND, Training, decoded

from dpmon.ui.feed import Feed
from dpmon.ui.paint import whole
from dpmon.ui.panel_output import Output
from dpmon.ui.rows import plain
from dpmon.ui.scene import View, life


def test_slices_lose_nothing_and_the_end_comes_last(tmp_path: Path) -> None:
    training = Training()
    reader = FakeReader(tmp_path)
    reader.new = decoded([*training.begin(), *training.run(400)])
    cause = "rank 1: RuntimeError: broke (train.py:12)"
    reader.ended = types.SimpleNamespace(
        status=3, signal=None, seconds=9.0, stopped=False, error=None, unknown=None, cause=cause
    )
    feed = Feed(tmp_path, lambda: reader)
    feed.start()
    feed.tick(0.0)
    process = feed.state.focus()
    assert process is not None
    slices = 1
    while feed.sip(0.0):
        slices += 1
        assert feed.ended is None
    assert slices > 10
    assert (process.step_count, process.call_count) == (400, 400)
    assert feed.ended is not None
    assert (feed.ended.status, feed.ended.last_line) == (3, cause)


def test_everything_at_once_without_a_budget(tmp_path: Path) -> None:
    training = Training()
    reader = FakeReader(tmp_path)
    reader.new = decoded([*training.begin(), *training.run(400)])
    feed = Feed(tmp_path, lambda: reader)
    feed.start()
    feed.tick()
    process = feed.state.focus()
    assert process is not None
    assert process.step_count == 400
    assert not feed.sip(0.0)


# ------------------------------------------------------------------------------------------------ a late attach

SILENT = re.compile(r"quiet|no step has ended|first batch|first call|no call yet|waiting")


def attached(directory: Path, age_s: float, steps: int = 400) -> tuple[Feed, FakeReader, Training]:
    """A screen that comes to a training whose last step ended `age_s` before; nothing is read in yet."""
    training = Training(start_ns=5 * SECOND)
    reader = FakeReader(directory)
    reader.new = decoded([*training.begin(), *training.run(steps)])
    now = reader.info.start_ns + training.now + int(age_s * SECOND)
    feed = Feed(directory, lambda: reader, lambda: now)
    feed.start()
    return feed, reader, training


def drawn(feed: Feed, width: int, height: int) -> str:
    return "\n".join(plain(row) for row in whole(feed.scene(View()), Output(), width, height, LOOK))


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_no_silence_is_claimed_of_what_is_still_read_in(tmp_path: Path, size: tuple[int, int]) -> None:
    feed, reader, _ = attached(tmp_path, 67.0)
    reader.stage = lambda: ("torch imported", reader.info.start_ns)  # type: ignore[method-assign]
    reader.waits_for_input = lambda: reader.info.start_ns + 6 * SECOND  # type: ignore[method-assign]
    slices = 0
    assert "reading the record" in drawn(feed, *size)
    feed.tick(0.0)
    while feed.busy:
        slices += 1
        text = drawn(feed, *size)
        assert life(feed.scene(View())).word == "reading the record"
        assert "reading the record" in text
        assert not SILENT.search(text), text
        feed.sip(0.0)
    assert slices > 10
    reader.waits_for_input = lambda: None  # type: ignore[method-assign]
    assert life(feed.scene(View())) == ("running", "good", "quiet 67 s"), "all is read: now it is true"
    assert "quiet 67 s" in drawn(feed, *size)


def test_how_far_the_reading_is(tmp_path: Path) -> None:
    feed, _, _ = attached(tmp_path, 67.0)
    feed.tick(0.0)
    said = life(feed.scene(View())).detail
    assert re.fullmatch(r"00:00:05 of 00:01:\d\d", said), said


def test_a_flood_is_caught_up_at_its_head_and_stays_so(tmp_path: Path) -> None:
    feed, reader, _ = attached(tmp_path, 0.1)
    last = len(reader.new)
    feed.tick(0.0)
    while life(feed.scene(View())).word == "reading the record":
        reader.new += reader.new[-1:]  # each poll leaves something
        assert feed.sip(0.0)
        assert reader.polls < last
    assert feed.busy, "no poll came back empty"
    assert life(feed.scene(View())) == ("running", "good", "")


def test_once_caught_up_a_flood_does_not_turn_it_back(tmp_path: Path) -> None:
    feed, reader, _ = attached(tmp_path, 67.0)
    reader.new, later = reader.new[:300], reader.new[300:]
    feed.tick()
    assert not feed.scene(View()).reading
    reader.new = later
    feed.tick(0.0)
    assert feed.busy
    assert not feed.scene(View()).reading


def test_nothing_recorded_is_caught_up_at_once(tmp_path: Path) -> None:
    reader = FakeReader(tmp_path)
    feed = Feed(tmp_path, lambda: reader, lambda: 9 * SECOND)
    feed.start()
    feed.tick(0.0)
    assert life(feed.scene(View())).word == "starting python"


def test_a_command_that_is_gone_has_its_exit_read_before_it_is_called_unknown(tmp_path: Path) -> None:
    feed, reader, training = attached(tmp_path, 0.1)
    reader.is_alive = False
    feed.tick(0.0)
    feed._clock = lambda: training.now + 60 * SECOND  # the grace is over
    reader.new, waiting = reader.new[:200], reader.new[200:]
    feed.tick(0.0)
    assert feed.busy
    assert life(feed.scene(View())).word == "ending"
    reader.new += waiting
    feed.tick()
    feed.tick()
    assert life(feed.scene(View())).detail == "status unknown"


def test_a_slow_training_after_another_one_is_not_waited_for_once_it_steps(tmp_path: Path) -> None:
    """The first one's steps take twenty seconds each: a silence of a minute would say nothing of it, its end does."""
    first = Training(start_ns=5 * SECOND, step_ns=20 * SECOND)
    second = Training(process=1, step_ns=20 * SECOND, seed=2)
    reader = FakeReader(tmp_path)
    reader.new = decoded([*first.begin(), *first.run(4)])
    second.now = first.now + 9 * SECOND
    now = reader.info.start_ns + second.now
    feed = Feed(tmp_path, lambda: reader, lambda: now)
    feed.start()
    reader.doing = {0: ("ended", 0)}
    reader.stage = lambda: ("torch imported", reader.info.start_ns + first.now + 8 * SECOND)  # type: ignore[method-assign]
    feed.tick()
    assert life(feed.scene(View())).word == "waiting for the first step"
    reader.new = decoded([*second.begin(), *second.run(1)], 1)
    reader.doing = {0: ("ended", 0), 1: ("backward", 0)}
    now = reader.info.start_ns + second.now
    feed.tick()
    assert life(feed.scene(View())).word == "running"
    assert [each.process for each in feed.state.training()] == [1]


def test_an_evaluation_that_ends_is_not_the_end_of_the_training_that_waits_for_it(tmp_path: Path) -> None:
    first = Training(start_ns=5 * SECOND)
    evaluation = Training(process=1, start_ns=first.now + 9 * SECOND, seed=2)
    reader = FakeReader(tmp_path)
    feed = Feed(tmp_path, lambda: reader, lambda: reader.info.start_ns + evaluation.now)
    feed.start()
    for one in (first, evaluation):
        reader.new = decoded([*one.begin(), *one.run(20)], one.process)
        feed.tick()
    while evaluation.now < first.now + 12 * SECOND:
        reader.new = decoded(Training(process=1, start_ns=evaluation.now, seed=3).run(500), 1)
        evaluation.now = reader.new[-1].start_ns + SECOND  # type: ignore[union-attr]
        feed.tick()
    reader.doing = {0: ("other", 0), 1: ("ended", 0)}
    feed.tick()
    assert [each.process for each in feed.state.training()] == [1], "the training has not gone on yet"
    assert life(feed.scene(View())).word == "running"
    reader.doing = {0: ("ended", 0), 1: ("ended", 0)}
    feed.tick()
    assert life(feed.scene(View())).word == "ending"
