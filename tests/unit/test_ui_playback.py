"""The screen of a run that is over: the time line, and the keys of a playback."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.ui.footer import position_at, render_timeline
from dpmon.ui.styled_rows import plain_text, row_width
from support.history_builders import write_playback_run
from support.record_builders import SECOND
from support.screen_harness import ManualClock, open_playback, shows_text
from support.screen_states import played_at


async def test_keys_play_stop_step_and_seek(state: Path) -> None:
    clock = ManualClock()
    async with open_playback(write_playback_run(), clock) as (app, pilot):
        assert shows_text(app, "finished")
        assert "stopped" in app.text()[-1]
        assert app.text()[-1].count("00:05:01") == 2
        await pilot.press("g")
        assert "00:00:00 ●" in app.text()[-1]
        assert not shows_text(app, "finished")
        await pilot.press("space")
        await app.run_action("change_speed(1)")
        assert "playing" in app.text()[-1]
        assert "2×" in app.text()[-1]
        clock.pass_s(5)
        app._tick()
        assert "00:00:10" in app.text()[-1]
        assert app.live_run.state.newest_ns == 10 * SECOND
        await pilot.press("space")
        clock.pass_s(50)
        await pilot.press("full_stop")
        assert app.live_run.state.newest_ns == 21 * SECOND // 2
        await pilot.press("comma", "comma")
        assert app.live_run.state.newest_ns == 19 * SECOND // 2
        await pilot.press(*"fffffff", "b", "b")
        assert "00:00:59" in app.text()[-1]
        await pilot.press("greater_than_sign", "less_than_sign", "less_than_sign")
        assert "00:00:58" in app.text()[-1], "a sixtieth of the axis, as on the live screen"
        await pilot.press("G")
        assert shows_text(app, "finished")


async def test_from_the_end_it_plays_from_the_first_step_on(state: Path) -> None:
    async with open_playback(write_playback_run(), ManualClock()) as (app, pilot):
        await pilot.press("space")
        assert "playing" in app.text()[-1]
        assert app.live_run.state.newest_ns == SECOND // 2


async def test_a_click_on_the_line(state: Path) -> None:
    async with open_playback(write_playback_run(), ManualClock()) as (app, pilot):
        row = app.text()[-1]
        await pilot.click(offset=(row.index("━"), 39))
        await pilot.pause()
        assert "00:00:00 ●" in app.text()[-1]
        await pilot.click(offset=(3, 39))
        await pilot.pause()
        assert "00:00:00 ●" in app.text()[-1]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_the_time_line_has_its_width_and_marks_the_position(width: int, part: float) -> None:
    length = 3600 * SECOND
    (row,) = render_timeline(played_at(int(length * part), 3600, is_playing=True, speed=0.25), width)
    assert row_width(row) == width
    text = plain_text(row)
    assert text.startswith(" playing 0.25× ")
    assert text.index("●") >= 0
    assert "…" not in text
    for piece in ("space stop", ", . step", "< > time") if width >= 80 else ():
        assert piece in text
    found = position_at(row, text.index("●"))
    assert found == pytest.approx(part, abs=0.12 if width < 80 else 0.06)
    assert position_at(row, 0) is None
    assert position_at(row, width - 1) is None or width == 40


async def test_on_the_smallest_screen_the_line_gives_way(state: Path) -> None:
    async with open_playback(write_playback_run(), ManualClock(), size=(40, 10)) as (app, _):
        assert len(app.text()) == 10
