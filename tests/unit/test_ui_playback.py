"""The screen of a run that is over: the time line, and the keys of a playback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from situations import LOOK
from test_run_playback import SECOND, Clock, a_run
from textual.pilot import Pilot

from dpmon.ui.footer import position_at, render_timeline
from dpmon.ui.playback import Playback, Player
from dpmon.ui.screen_data import PlaybackPosition
from dpmon.ui.styled_rows import plain_text, row_width


@asynccontextmanager
async def shown(
    directory: Path, clock: Clock, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Playback, Pilot[str]]]:
    app = Playback(directory, LOOK, open_player=lambda: Player(directory, clock), refresh=600)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot
        app.live_run.close()


def shows(app: Playback, text: str) -> bool:
    return any(text in row for row in app.text())


async def test_keys_play_stop_step_and_seek(state: Path) -> None:
    clock = Clock()
    async with shown(a_run(), clock) as (app, pilot):
        assert shows(app, "finished")
        assert "paused" in app.text()[-1]
        assert app.text()[-1].count("00:05:01") == 2
        await pilot.press("g")
        assert "00:00:00 ●" in app.text()[-1]
        assert not shows(app, "finished")
        await pilot.press("space", "right_curly_bracket")
        assert "playing" in app.text()[-1]
        assert "2×" in app.text()[-1]
        clock.pass_s(5)
        app._control_player(lambda player: None)
        assert "00:00:10" in app.text()[-1]
        assert app.live_run.state.newest_ns == 10 * SECOND
        await pilot.press("space")
        clock.pass_s(50)
        await pilot.press("full_stop")
        assert app.live_run.state.newest_ns == 21 * SECOND // 2
        await pilot.press("comma", "comma")
        assert app.live_run.state.newest_ns == 19 * SECOND // 2
        await pilot.press("F", "f", "b", "b")
        assert "00:00:59" in app.text()[-1]
        await pilot.press("greater_than_sign", "less_than_sign", "less_than_sign")
        assert "00:00:58" in app.text()[-1], "a sixtieth of the axis, as on the live screen"
        await pilot.press("G")
        assert shows(app, "finished")


async def test_a_click_on_the_line(state: Path) -> None:
    async with shown(a_run(), Clock()) as (app, pilot):
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
    (row,) = render_timeline(PlaybackPosition(int(length * part), length, True, 0.25), width, LOOK)
    assert row_width(row) == width
    text = plain_text(row)
    assert text.startswith(" playing 0.25× ")
    assert text.index("●") >= 0
    assert "…" not in text
    for piece in ("space stop", ", . step", "< > time", "{ } speed") if width >= 80 else ():
        assert piece in text
    found = position_at(row, text.index("●"))
    assert found == pytest.approx(part, abs=0.12 if width < 80 else 0.06)
    assert position_at(row, 0) is None
    assert position_at(row, width - 1) is None or width == 40


async def test_on_the_smallest_screen_the_line_gives_way(state: Path) -> None:
    async with shown(a_run(), Clock(), size=(40, 10)) as (app, _):
        assert len(app.text()) == 10
