"""Panel 4, the report, and a playback up to its time compare the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept import keep
from stage import LOOK
from synthetic import SECOND, Training

from dpmon.model.compare import Comparison, sentence
from dpmon.report import collect
from dpmon.run.reader import RunReader
from dpmon.ui.feed import Feed
from dpmon.ui.panels import panel_compare
from dpmon.ui.playback import Player, _PlaybackFeed
from dpmon.ui.rows import plain
from dpmon.ui.scene import View

STRETCHES = ((500, "single"), (5000, "dp"), (3000, "single"), (4500, ""))
"""Number of steps before each change of mode, and the new mode."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        training = Training(step_ns=SECOND // 200)
        payloads = training.begin()
        for steps, then in STRETCHES:
            training.step_ns = SECOND // (200 if training.mode == "dp" else 330)
            payloads += training.run(steps)
            payloads += training.switch(then) if then else []
        return keep({0: payloads}, seconds=training.now / SECOND + 1)


def judged(feed: Feed) -> tuple[Comparison, str]:
    scene = feed.scene(View(zoom="compare"))
    found = panel_compare.figures(scene)
    return found, " ".join(plain(row) for row in panel_compare.compare(scene, 100, 30, LOOK))


def test_a_run_that_has_ended_and_its_playback_are_judged_as_in_the_report(long: Path) -> None:
    said = collect(long).facts.compared
    assert said is not None
    assert said.speedup is not None
    assert {mode: side.steps for mode, side in said.sides.items()} == {
        "single": 5000 + 4500 - 10,
        "dp": 500 + 3000 - 10,
    }
    for feed in (Feed(long, lambda: RunReader(long)), _PlaybackFeed(long, lambda: Player(long))):
        feed.start()
        feed.tick()
        assert feed.ended is not None
        found, text = judged(feed)
        assert (found.devices, found.virtual) == (("cpu:0", "cpu:1"), True), "though the last calls are all single"
        assert sentence(found) == sentence(said)
        assert sentence(found) in text
        assert found.speedup is not None
        assert found.speedup == said.speedup
        feed.close()


def test_a_playback_compares_what_was_until_then(long: Path) -> None:
    feed = _PlaybackFeed(long, lambda: Player(long))
    feed.start()
    feed.tick()
    player = feed.player
    assert player is not None
    player.seek(player.length_ns * 6 // 10)
    feed.tick()
    found, _ = judged(feed)
    there = found.seen
    assert there["dp"] < 3500, "what came later has no part in it"
    warm = {"single": 5, "dp": 10}
    for mode, side in found.sides.items():
        assert side.steps == there[mode] - warm[mode]
    feed.close()
