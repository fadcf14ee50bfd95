"""Every key does what footer and help say."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from textual import events

from dpmon.record.record_types import Event
from dpmon.ui.dialogs import MAX_LINE_BYTES, Choice, CommandPalette
from dpmon.ui.help_text import help_rows
from dpmon.ui.keys import ACTIONS, COMMANDS, PALETTE_COMMANDS, PLAYBACK_ACTIONS, focus_neighbor
from dpmon.ui.panel_layout import place_panels
from dpmon.ui.panel_view import PanelView
from dpmon.ui.panels.panel_output import LogTail
from dpmon.ui.scenes import ARRANGEMENTS, DP
from dpmon.ui.screen_data import PANELS, View
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.terminal_style import TerminalStyle
from support.record_builders import SECOND
from support.screen_harness import ScreenHarness, open_screen


def test_every_action_exists() -> None:
    from dpmon.ui.monitor import Monitor

    actions = {*ACTIONS.values(), *PLAYBACK_ACTIONS.values(), *(command.action for command in PALETTE_COMMANDS)}
    names = {action.partition("(")[0] for action in actions}
    assert {name for name in names if not hasattr(Monitor, f"action_{name}")} == set()
    assert len({command.key for command in COMMANDS}) == len(COMMANDS) - 1, "only n has two meanings, one at a time"


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_arrows_reach_every_panel_that_is_on_the_screen(size: tuple[int, int]) -> None:
    slots = place_panels(*size, ARRANGEMENTS[DP], {})
    seen = {"replicas"}
    while True:
        more = {
            focus_neighbor(View(panel), slots, way).focus for panel in seen for way in ("up", "down", "left", "right")
        }
        if more <= seen:
            break
        seen |= more
    assert seen == set(PANELS) & set(slots)


async def test_the_time_range_and_the_refresh_change_and_say_so(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.press("right_square_bracket")
        await on.shows("time range: 10 min")
        assert on.app.view.range_s == 600
        await on.press("right_square_bracket")
        await on.shows("time range: whole run")
        await on.press(*["left_square_bracket"] * 5)
        await on.shows("time range: 30 s")
        await on.app.run_action("refresh(1)")
        await on.shows("the screen is drawn every 0.2 s")
        looks = on.reader.looks
        await on.until(lambda: on.reader.looks > looks + 3, "pictures at the new rate")
        for _ in range(3):
            await on.app.run_action("refresh(-1)")
        await on.shows("the screen is drawn every 0.1 s")
        for _ in range(10):
            await on.app.run_action("refresh(1)")
        await on.shows("the screen is drawn every 60 s")


async def test_a_key_goes_through_all_themes(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        colors = []
        for theme in ("light", "color-blind", "mono", "ascii", "dark"):
            await on.press("t")
            await on.shows(f"theme {theme}")
            strip = on.app.query_one(PanelView).render_line(0)
            colors.append({segment.style.bgcolor for segment in strip if segment.style})
            assert on.app.native_ansi_color == (theme == "mono")
            text = on.text()
            assert ("╭" in text) == (theme != "ascii")
        assert colors[2] == {None}, "mono leaves the background to the terminal"
        assert colors[0] != colors[1] == colors[4]


async def test_a_picture_is_saved_and_never_overwrites(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("○ idle")
        await on.press("s")
        await on.shows("screenshot: dpmon-")
        await on.press("s")
        await on.until(lambda: len(list(Path.cwd().glob("*.svg"))) == 2, "two files")
        for path in Path.cwd().glob("*.svg"):
            words = " ".join(ElementTree.fromstring(path.read_text()).itertext()).replace("\xa0", " ")
            for part in ("linear.py", "2 Replicas", "[15, 5]", "○ idle", "4 dp vs. single"):
                assert part in words
            assert not re.search(r"(href|src|url\((?!#))", path.read_text()), "it asks for nothing from anywhere"


async def test_a_picture_of_a_dialog_has_the_dialog(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("○ idle")
        openers = {"question_mark": ("s", "Help"), "x": ("s", "Stop the training?"), "colon": ("ctrl+s", "Commands")}
        for number, (opener, (key, word)) in enumerate(openers.items(), 1):
            before = set(Path.cwd().glob("*.svg"))
            await on.press(opener, key)
            await on.until(lambda n=number: len(list(Path.cwd().glob("*.svg"))) == n, "the file")
            (path,) = set(Path.cwd().glob("*.svg")) - before
            words = " ".join(ElementTree.fromstring(path.read_text()).itertext()).replace("\xa0", " ")
            assert word in words
            assert len(on.app.screen_stack) == 2, "the dialog is still open"
            assert (key, "screenshot") in on.app.screen.footer_keys()  # type: ignore[attr-defined]
            await on.shows(f"screenshot: {path.name}")
            await on.press("escape")
            await on.until(lambda: len(on.app.screen_stack) == 1, "the dialog to close")


async def test_a_picture_goes_into_the_run_where_the_directory_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")
    async with open_screen(tmp_path) as on:
        await on.press("s")
        await on.until(lambda: len(list(tmp_path.glob("dpmon-*.svg"))) == 1, "the file in the run")
        await on.shows(f"screenshot: {tmp_path}/dpmon-")


@contextmanager
def the_script_reads(directory: Path) -> Iterator[Callable[[], bytes]]:
    """Yield a function that returns the typed text."""
    os.mkfifo(directory / "input.fifo")
    fd = os.open(directory / "input.fifo", os.O_RDWR | os.O_NONBLOCK)
    found = bytearray()

    def read() -> bytes:
        with suppress(BlockingIOError):
            found.extend(os.read(fd, 4096))
        return bytes(found)

    yield read
    os.close(fd)


async def test_keys_typed_before_a_dialog_is_open_go_to_the_dialog(tmp_path: Path) -> None:
    with the_script_reads(tmp_path) as typed:
        async with open_screen(tmp_path) as on:
            await typed_ahead(on, typed)


async def typed_ahead(on: ScreenHarness, typed: Callable[[], bytes]) -> None:
    keys = ("2", "2", "i", *"hello", "enter", "t", "i", *"you", "enter", "3")
    for key in keys:
        on.app.post_message(events.Key(key, key if len(key) == 1 else "\r"))
    await on.until(lambda: typed() == b"hello\nyou\n", "both lines, sent")
    await on.until(lambda: on.app.view.focus == "batch", "what was typed after them")
    assert on.app.style.theme == "light"
    assert on.app.view.zoom is None, "it was zoomed, and back"
    for key in (":", *"freeze"):
        on.app.post_message(events.Key("colon" if key == ":" else key, key))
    await on.until(lambda: getattr(on.app.screen, "typed_text", "") == "freeze", "the search")


async def test_a_line_is_as_long_as_a_terminal_takes_and_has_no_controls(tmp_path: Path) -> None:
    with the_script_reads(tmp_path) as typed:
        async with open_screen(tmp_path) as on:
            await on.press("i")
            for text in ("a\x1b[2J\x03\x04\x15b\tc\u202e\n", "漢字" * 30_000, "more"):
                on.app.screen.post_message(events.Paste(text))
            await on.press("enter")
            await on.until(lambda: typed().endswith(b"\n"), "the line")
            line = typed().decode()
            assert line.startswith("a\ufffd[2J\ufffd\ufffd\ufffdb c漢字漢字")
            assert 3990 < len(line.encode()) <= MAX_LINE_BYTES + 1
            assert "more" not in line


@pytest.mark.parametrize("hidden", [False, True])
async def test_a_message_confirms_a_line_sent_to_a_headless_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    """Its output is only that of the script, without the typed line."""
    for name in ("stdout.log", "stderr.log"):
        (tmp_path / name).write_text("")
    with the_script_reads(tmp_path) as typed:
        async with open_screen(tmp_path) as on:
            on.app.live_run.output.tails = [LogTail(tmp_path / name) for name in ("stdout.log", "stderr.log")]
            monkeypatch.setattr(on.app.live_run, "hides_input", lambda: hidden)
            await on.press("i", "y", "e", "s", "enter")
            await on.until(lambda: typed() == b"yes\n", "the line")
            if hidden:
                await on.press("t")
                await on.shows("theme")
            else:
                await on.shows("sent to the script: yes")
            assert ("yes" in on.text()) != hidden


async def test_stop_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Path] = []

    def stop_run(directory: Path, last_known: object) -> Iterator[str]:
        stopped.append(directory)
        on.end(130, "SIGINT", stopped=True)
        yield "stopped by SIGINT"

    monkeypatch.setattr("dpmon.run.run_signals.stop_run", stop_run)
    async with open_screen(tmp_path) as on:
        await on.press("x")
        assert isinstance(on.app.screen, Choice)
        shown = on.app.screen.box.text()
        assert any(row.split()[1:3] == ["y", "stop"] for row in shown), shown
        for other, name in (("x", "x"), ("a", "a"), ("enter", "enter"), ("Y", "Y")):  # a held x confirms nothing
            await on.press(other)
            said = on.app.screen.box.text()
            assert any(f" {name} does nothing here " in row for row in said), said
            assert len(said) == len(shown), "nothing jumps"
        await on.press("escape")
        await on.until(lambda: len(on.app.screen_stack) == 1, "the dialog to close")
        assert stopped == []
        await on.press("x", "y")
        await on.shows("stopped by you")
        assert stopped == [tmp_path]
        await on.shows("this screen stays")
        assert on.app.return_value is None
        await on.press("q")
        await on.until(lambda: on.app.return_value == "ended", "the end of the screen")


async def test_the_palette_lists_what_is_possible_and_does_it(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.press("ctrl+p")
        palette = on.app.screen
        assert isinstance(palette, CommandPalette)
        offered = [command.key for command in palette.matching_commands()]
        actions = [command.action for command in palette.matching_commands()]
        assert "d" in offered
        assert "refresh(1)" in actions, "it has no key"
        assert actions.index("refresh(1)") > actions.index("toggle_mode"), "those with a key come first"
        assert "warnings" not in actions, "there are none"
        assert "i" not in offered, "nobody reads input"
        await on.press(*"batch")
        assert [command.key for command in palette.matching_commands()] == ["d", "3"]
        await on.press("down", "enter")
        await on.until(lambda: on.app.view.focus == "batch", "the panel")
        await on.press("colon", *"no such thing")
        assert any("no command matches" in row for row in on.app.screen.box.text())  # type: ignore[attr-defined]
        await on.press("enter")
        await on.until(lambda: len(on.app.screen_stack) == 1, "the dialog to close")


async def test_a_click_in_the_footer_presses_the_key(tmp_path: Path) -> None:
    async with open_screen(tmp_path, (160, 50)) as on:
        await on.shows("space freeze")
        row = on.app.text()[-1]
        await on.click("footer", row.index("freeze"))
        await on.shows("FROZEN")
        row = on.app.text()[-1]
        await on.click("footer", row.index("? help") + 3)
        await on.until(lambda: len(on.app.screen_stack) == 2, "help")


async def test_the_training_is_paused_and_resumed(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("p pause")
        await on.press("p")
        assert on.reader.pause.is_requested
        await on.shows("pause pending: the training pauses after the step it is in")
        await on.shows("p resume")
        on.reader.pause.is_pending, on.reader.pause.since_ns = False, on.app.live_run.now_ns() + SECOND - 65 * SECOND
        await on.until(lambda: re.search(r"○ paused (6\d s|[1-9]\d* min)", on.text()) is not None, "paused, since when")
        assert "pending" not in on.text()
        await on.press("p")
        assert not on.reader.pause.is_requested
        await on.shows("resume pending")
        on.reader.pause.is_pending, on.reader.pause.since_ns = False, None
        await on.until(lambda: "paused" not in on.text(), "running again")
        assert "p pause" in on.text()
        now = on.app.live_run.now_ns() / SECOND
        event = {"process": 0, "step": 3, "paused": False, "t_s": now, "reason": "the supervisor has exited"}
        on.reader.new = [Event("pause", event)]
        await on.shows("the pause has ended: the supervisor has exited")
        on.reader.new = [Event("pause", {**event, "refused": "not\x1b[2J here"})]
        await on.shows("pause refused: not\ufffd[2J here")


async def test_a_sample_is_requested_of_a_training_process(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("p pause")
        await on.app.run_action("sample")
        await on.shows("the collectives of one of the next steps will be recorded")
        on.end(0)
        await on.shows("● finished")
        await on.until(
            lambda: "will be recorded" not in on.text(), "the reply to go: nothing will be recorded any more"
        )
        await on.app.run_action("sample")
        await on.shows("no training process is running")


async def test_between_two_trainings_no_mode_is_requested_and_a_pause_can_be_canceled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The command has ended, but its supervisor never records its status.
    monkeypatch.setattr("dpmon.ui.live_run.has_live_supervisor", lambda run_info: True)
    async with open_screen(tmp_path) as on:
        await on.shows("p pause")
        on.reader.doing = {0: ("ended", SECOND)}
        await on.until(lambda: "p pause" not in on.text(), "the footer without it")
        await on.press("d")
        await on.shows("the mode cannot be switched: no training process is running")
        await on.press("p")
        await on.shows("no pause: no training process is running")
        assert (on.reader.asked, on.reader.pause.is_requested) == ([], False)
        on.reader.pause.is_requested = True
        await on.shows("p resume")
        await on.press("p")
        assert not on.reader.pause.is_requested
        on.reader.is_alive, on.reader.pause.is_pending = False, False
        await on.shows("ending: the command has ended")
        await on.press("d")
        await on.shows("the mode cannot be switched: the command has ended")
        await on.press("i")
        await on.shows("the command has ended: it reads no more input")


async def test_searching_the_output(tmp_path: Path) -> None:
    lines = [f"step {i} " + ("Needle here" if i in (7, 40, 290) else "loss") for i in range(300)]
    (tmp_path / "output.log").write_text("\n".join(lines) + "\n")
    async with open_screen(tmp_path) as on:
        await on.shows("step 299")
        await on.press("slash", *"needle", "enter")
        await on.shows("line 291 of 300")
        assert on.app.view.focus == "output"
        await on.shows("step 290 Needle")
        await on.press("n")
        await on.shows("line 41 of 300")
        await on.shows("step 40 Needle")
        await on.press("n", "n")
        await on.shows("no older line with 'needle'")
        await on.shows("step 7 Needle")
        await on.press("N")
        await on.shows("step 40 Needle")
        await on.press("slash", "ctrl+u", *"NEEDLE", "enter")
        await on.shows("no older line with 'NEEDLE'")
        await on.press("escape")
        assert on.app.view.search == ""
        await on.press("n")
        assert "Needle" in on.text(), "n has no meaning any more"


@pytest.mark.parametrize(("theme", "sign"), [("dark", "the lowest block"), ("ascii", "a small letter (or a dot)")])
def test_help_explains_the_signs_of_the_columns(theme: str, sign: str) -> None:
    text = [plain_text(row) for row in help_rows(100, TerminalStyle(theme))]
    assert any(f"A column of {sign} only: its steps are too" in line for line in text)
    assert any("▲ on top: longer than the scale" in line for line in text)
    assert any(line.startswith("S scatter ") for line in text) == (theme == "ascii")
