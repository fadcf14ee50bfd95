"""Messages of the screen about keys that do nothing and parts without room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.messages import print_closing_summary
from dpmon.cli.summary import summary_lines
from dpmon.model.run_events import ProcessInfo
from dpmon.model.throughput import throughput_of
from dpmon.record.record_types import Step
from dpmon.run.run_directory import load_exit
from dpmon.ui.dialogs import CommandPalette, TextPages
from dpmon.ui.keys import PLAYBACK_COMMANDS, available_commands
from dpmon.ui.panels.panel_output import OutputView, shorten_traceback_path
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text
from support.history_builders import snapshot_of_rows, write_playback_run
from support.record_builders import SECOND, Training
from support.screen_harness import ManualClock, open_playback, open_screen, shows_text
from support.screen_states import RUN_INFO, STYLE, exit_info_of, paint_screen, shown_process, with_process


def trained(steps: int = 200, *, over: bool = False, **options: Any) -> ScreenData:
    training = Training(**options)
    state = snapshot_of_rows([*training.begin(), *training.run(steps)], over=over, span_s=0 if over else 120)
    return ScreenData(state, training.now, RUN_INFO, is_command_alive=True, can_toggle=True)


def screen(facts: ScreenData, width: int = 80, height: int = 24) -> list[str]:
    return screen_of(facts, OutputView(), width, height)


def screen_of(facts: ScreenData, output: OutputView, width: int, height: int = 24) -> list[str]:
    return [plain_text(row) for row in paint_screen(facts, output, width, height, STYLE)]


# ------------------------------------------------------------------------------------------------ 80x24


def test_a_part_without_room_in_the_header_is_left_out_entirely() -> None:
    facts = trained(virtual=True)
    facts = with_process(facts, info=ProcessInfo(0, python="3.11.7", torch="2.13.0+cpu"))
    for width in range(40, 130):
        row = screen(facts, width, 24)[2 if width < 110 else 1].rstrip()
        assert not row.endswith("…") or " · " not in row, row
        assert "torch" not in row or row.endswith("torch 2.13.0+cpu")
    closing_down = replace(facts, activities={0: ("ended", 0)})
    for width in (80, 120):
        rows = screen(closing_down, width)[:3]
        assert any("the training process is exiting" in row for row in rows)
        assert not any("…" in row for row in rows)
        asking = replace(
            closing_down, can_type=True, now_ns=facts.now_ns + 9 * SECOND, input_wait_since_ns=facts.now_ns
        )
        rows = screen(asking, width)
        assert any("press i" in row for row in rows[:3])
        assert "i input" in rows[-1], "the command that started the training reads a line"
        assert "i input" not in screen(replace(asking, is_ending=True), width)[-1]


# ------------------------------------------------------------------------------------------------ keys


async def test_a_key_that_does_nothing_says_so_and_not_for_ever(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("○ idle")
        for key, words in (
            ("z", "z does nothing here: ? shows the keys"),
            ("f5", "f5 does nothing here"),
            ("n", "there is no other call or root"),
            ("N", "N continues a search"),
            ("i", "dpmon cannot reach the script's input"),
        ):
            await on.press(key)
            await on.shows(words)
        on.app.message_s = 0.01
        await on.press("z")
        await on.until(lambda: "z does nothing" not in on.text(), "silence")


async def test_in_a_playback_each_key_of_a_live_run_says_why_not(state: Path) -> None:
    async with open_playback(write_playback_run(), ManualClock()) as (app, pilot):
        await pilot.press("g")
        for key, words in (
            ("p", "no pause: no training process is running"),
            ("x", "there is nothing to stop: the run has ended"),
            ("i", "the run has ended: it reads no more input"),
            ("d", "the mode cannot be switched: no training process is running"),
            ("Z", "Z does nothing here"),
        ):
            await pilot.press(key)
            assert shows_text(app, words), app.text()[1]
        await pilot.press("f")
        assert not shows_text(app, "does nothing here"), "what was said is of another time"
        offered = [command.key for command in available_commands(app.data_to_draw())]
        assert {command.key for command in PLAYBACK_COMMANDS} <= set(offered)
        assert "d" not in offered
        assert "close this screen" in [command.description for command in available_commands(app.data_to_draw())]


# ------------------------------------------------------------------------------------------------ dialogs


async def test_beside_a_dialog_the_screen_is_blank_and_a_long_list_says_that_more_follows(tmp_path: Path) -> None:
    async with open_screen(tmp_path, (80, 16)) as on:
        await on.shows("○ idle")
        await on.press("colon")
        assert isinstance(on.app.screen, CommandPalette)
        assert on.app.screen.box.region.width == 80
        rows = on.app.screen.box.text()
        assert {len(row) for row in rows} == {80}
        assert all(not row[: row.index("│")].strip() for row in rows[1:-1])
        assert "more ↓" in rows[-1]
        await on.press(*["down"] * 40)
        rows = on.app.screen.box.text()
        assert "above" in rows[-1]
        assert "more ↓" not in rows[-1]
        assert rows[1].strip("│ ").startswith(">")
        await on.press("q", "q")
        assert any("no command matches" in row for row in on.app.screen.box.text())
        await on.press("escape", "question_mark")
        assert isinstance(on.app.screen, TextPages)
        await on.press("end")
        rows = on.app.screen.box.text()
        assert "above" in rows[-1]
        assert any("to the end" in row for row in rows), "the keys of a playback are the last ones"


# ------------------------------------------------------------------------------------------------ panel 4


def step(mode: str, number: int, wall: int, *, samples: int = 30, backward: bool = True) -> Step:
    phases = {"forward": wall - 5, **({"backward": 5, "other": 0} if backward else {"other": 5})}
    return Step(0, None, number, mode, number * 10_000_000, wall, samples, phases)


# ------------------------------------------------------------------------------------------------ the end


def test_a_run_that_is_over_shows_its_mean_speed() -> None:
    facts, over = (trained(400, step_ns=1_000_000_000, over=over) for over in (False, True))
    process = shown_process(over)
    mean = throughput_of(process, over.state, over.now_ns).rate
    assert mean is not None
    assert process.ranged.mean_ns is not None
    walls = 400 * process.ranged.mean_ns / 1e9
    assert mean.steps_per_s == pytest.approx(400 / walls)
    assert mean.samples_per_s == pytest.approx(400 * 30 / walls)
    over = replace(over, exit_info=exit_info_of(0, None, facts.now_ns), can_toggle=False)
    for width, height in ((80, 24), (120, 40)):
        assert "mean" in " ".join(screen(over, width, height)[:2])
        assert "mean" not in " ".join(screen(facts, width, height)[:2])


def test_a_brief_summary_has_only_the_first_line(state: Path) -> None:
    directory = write_playback_run()
    spoken: list[str] = []
    assert print_closing_summary(directory, load_exit(directory), spoken.append, brief=True) == 0
    assert len(spoken) == 1
    assert "finished in" in spoken[0]
    assert "dpmon report" in spoken[0]
    assert len(summary_lines(directory, load_exit(directory))) > 3


@pytest.mark.parametrize("styled", [False, True])
def test_a_traceback_keeps_its_file_and_line(styled: bool) -> None:
    text = '  File "/home/somebody/projects/vision/train/loop.py", line 123, in step'
    row = [("  File ", ""), (text[7:40], "bold"), (text[40:], "")] if styled else [(text, "")]
    for width in range(44, len(text) + 2):
        shown_row = shorten_traceback_path(row, width)
        shown_text = plain_text(shown_row)
        assert shown_text.endswith('loop.py", line 123, in step')
        assert ("…" in shown_text) == (width < len(text))
        assert len(shown_text) <= width
    other = [("x" * 100, "")]
    assert shorten_traceback_path(other, 50) == other
