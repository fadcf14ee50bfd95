"""Dialogs that are open while the run or the terminal changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpmon.ui.dialogs import Choice, CommandPalette, Dialog, LineInput, TextPages
from support.screen_harness import ScreenHarness, open_screen

OPENERS = {
    "q": Choice,
    "x": Choice,
    "i": LineInput,
    "slash": LineInput,
    "colon": CommandPalette,
    "question_mark": TextPages,
}


def footer(on: ScreenHarness) -> str:
    return on.app.text()[-1]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "input.fifo")
    return tmp_path


async def test_the_footer_names_the_keys_of_the_dialog(directory: Path) -> None:
    async with open_screen(directory, size=(80, 24)) as on:
        for opener, kind in OPENERS.items():
            await on.press(opener)
            assert isinstance(on.app.screen, kind)
            await on.until(lambda: " esc " in footer(on), "the dialog's keys")
            for word in ("q leave", "? help", "freeze"):
                assert f" {word} " not in footer(on)
            for key, word in on.app.screen.footer_keys():
                assert f"{key} {word}" in footer(on)
            await on.press("escape")
            await on.until(lambda: "? help" in footer(on), "the keys of the panels")


async def test_a_click_on_the_footer_presses_the_key_of_the_dialog(directory: Path) -> None:
    async with open_screen(directory) as on:
        await on.press("q")
        await on.until(lambda: "leave it running" in footer(on), "the dialog's keys")
        await on.pilot.click(offset=(footer(on).index("s screenshot"), 39))
        await on.shows("screenshot: dpmon-")
        assert len(on.app.screen_stack) == 2
        await on.pilot.click(offset=(footer(on).index("stay here"), 39))
        await on.until(lambda: len(on.app.screen_stack) == 1, "the dialog to close")
        assert on.app.return_value is None
        await on.press("q")
        await on.until(lambda: "leave it running" in footer(on), "the dialog's keys")
        await on.pilot.click(offset=(footer(on).index("leave it"), 39))
        await on.until(lambda: on.app.return_value == "left", "the end")


@pytest.mark.parametrize(
    ("openers", "answer", "closes"),
    [
        ("q", "l", True),
        ("q", "x", True),
        ("q", "ctrl+c", True),
        ("q", "escape", False),
        ("x", "y", False),
        ("x", "escape", False),
        ("qx", "y", True),
    ],
)
async def test_a_question_stays_until_it_is_answered_also_when_the_run_ends(
    directory: Path, openers: str, answer: str, closes: bool
) -> None:
    """No key opens a list or a second question because the first one went."""
    async with open_screen(directory) as on:
        await on.press(*openers)
        await on.until(lambda: isinstance(on.app.screen, Choice), "the question")
        dialog = on.app.screen
        if openers == "x":  # the command has ended, and no process records its exit
            on.reader.is_alive = False
        else:
            on.end(3)
        await on.until(lambda: on.app.live_run.is_over, "the end")
        assert on.app.screen is dialog
        assert on.app.return_value is None
        await on.press(answer)
        await on.until(lambda: len(on.app.screen_stack) <= 1, "the dialog to close")
        if not closes:
            await on.shows("its end was not recorded" if openers == "x" else "failed with exit status 3")
            assert on.app.return_value is None
            await on.press("q")
        await on.until(lambda: on.app.return_value == "ended", "the screen to close")


async def test_a_line_that_is_being_typed_stays_and_is_not_sent(directory: Path) -> None:
    fd = os.open(directory / "input.fifo", os.O_RDWR | os.O_NONBLOCK)
    async with open_screen(directory) as on:
        await on.press("i", "y", "e")
        on.end(0)
        dialog = on.app.screen
        assert isinstance(dialog, LineInput)
        await on.until(lambda: on.app.live_run.is_over, "the end")
        await on.press("s", "e")
        assert any("yese" in row for row in dialog.box.text())
        await on.press("enter")
        await on.shows("the line was not sent: the run has ended")
        with pytest.raises(BlockingIOError):
            os.read(fd, 1)
    os.close(fd)


async def test_the_list_of_commands_changes_at_the_end(directory: Path) -> None:
    async with open_screen(directory) as on:
        await on.press("colon")
        dialog = on.app.screen
        assert isinstance(dialog, CommandPalette)
        assert "stop" in {command.action for command in dialog.matching_commands()}
        on.end(0)
        await on.until(lambda: on.app.live_run.is_over, "the end")
        await on.press("up", "down")
        assert "stop" not in {command.action for command in dialog.shown_commands}
        assert {command.action for command in dialog.matching_commands()}.isdisjoint(
            {"toggle_mode", "pause", "type_line"}
        )


async def test_a_dialog_in_a_terminal_that_becomes_tiny(directory: Path) -> None:
    async with open_screen(directory) as on:
        for opener in OPENERS:
            await on.press(opener)
            await on.until(lambda: isinstance(on.app.screen, Dialog), "the dialog")
            for size in ((1, 1), (2, 3), (7, 2), (20, 5), (500, 200), (3, 200), (500, 1), (120, 40)):
                await on.pilot.resize_terminal(*size)
                dialog = on.app.screen
                assert isinstance(dialog, Dialog)
                await on.until(lambda w=size[0], d=dialog: {len(row) for row in d.box.text()} == {w}, f"{size}")
            await on.press("escape")
            await on.until(lambda: len(on.app.screen_stack) == 1, "the dialog to close")
