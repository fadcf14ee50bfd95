"""What the screen knows, taken in a slice at a time: all of it, and the end last."""

from __future__ import annotations

import types
from pathlib import Path

from stage import FakeReader
from synthetic import Training, decoded

from dpmon.ui.feed import Feed


def test_slices_lose_nothing_and_the_end_comes_last(tmp_path: Path) -> None:
    training = Training()
    reader = FakeReader(tmp_path)
    reader.new = decoded([*training.begin(), *training.run(400)])
    reader.ended = types.SimpleNamespace(status=3, signal=None, seconds=9.0, stopped=False, error=None, unknown=None)
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
    assert feed.ended.status == 3


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
