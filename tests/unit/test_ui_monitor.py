"""The behavior of the screen, key by key, over a fake reader."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from textual.events import MouseScrollUp

from dpmon.errors import HistoryError
from dpmon.model.findings.finding import Finding
from dpmon.record.record_types import Event
from dpmon.ui.dialogs import Choice, TextPages
from dpmon.ui.monitor import Monitor
from dpmon.ui.panel_view import PanelView
from dpmon.ui.screen_data import View
from support.record_builders import SECOND, Training
from support.screen_harness import ScreenHarness, is_laid_out, open_screen, wait_until
from support.screen_states import STYLE, all_facts, exit_info_of


def last_step(on: ScreenHarness) -> int | None:
    process = on.app.live_run.state.representative
    return None if process is None or process.last_step is None else process.last_step.step


async def test_it_draws_the_run_at_every_size(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("○ idle")
        for width, height in ((80, 24), (200, 60), (45, 12), (20, 5), (160, 50), (120, 40)):
            await on.pilot.resize_terminal(width, height)
            await on.until(lambda h=height: len(on.app.text()) == h, "the new size")
            await on.until(lambda w=width: {len(row) for row in on.app.text()} == {w}, f"{width} columns")
            await on.until(lambda: is_laid_out(on.app), "each panel in its place")
            if width >= 80:
                for word in ("linear.py", "dp ×2", "2 Replicas", "3 Batch", "5 Output", "[15, 5]", "? help", "q leave"):
                    await on.shows(word)
        await on.shows("4 dp vs. single")


async def test_a_toggle_is_pending_immediately_and_done_when_answered(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        on.app.live_run._clock = lambda: on.reader.info.start_ns + on.training.now
        await on.shows("d → single")
        await on.press("d")
        assert on.reader.asked == ["single"]
        await on.shows("single pending")
        on.reader.new = [*on.training.switch("single"), *on.training.run(20)]
        await on.until(lambda: len(on.app.live_run.state.mode_changes) == 2, "the mode event")
        assert "single pending" in on.text(), "the event alone is no acknowledgement by every process"
        on.reader.unanswered = False
        await on.shows("single from step 201 on")
        await on.shows("d → dp")
        await on.press("d")
        assert on.reader.asked == ["single", "dp"]
        on.reader.new = [on.training.mode_event("user", refused="the module is spread over devices")]
        on.reader.unanswered = False
        await on.shows("dp refused: the module is spread over devices")
        await on.shows("d → dp")


async def test_no_toggle_where_nothing_may_be_changed(tmp_path: Path) -> None:
    async with open_screen(tmp_path, mode_option="script") as on:
        await on.shows("○ idle")
        await on.press("d")
        await on.shows("the mode cannot be switched: --mode script leaves the computation as written")
        assert on.reader.asked == []
        assert "d → single" not in on.text()


async def test_a_toggle_that_ranks_do_not_allow_is_refused_with_a_reason(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("○ idle")
        on.training.via = "DistributedDataParallel"
        on.reader.new = [*on.training.switch("single"), *on.training.run(2)]
        await on.until(lambda: on.app.live_run.toggle_refusal() is not None, "the ranks")
        await on.press("d")
        await on.shows("the mode cannot be switched: the ranks train by DistributedDataParallel")
        on.reader.no_pause = "the ranks wait for each other"
        await on.press("p")
        await on.shows("no pause: the ranks wait for each other")
        assert on.reader.asked == []
        assert not on.reader.pause.is_requested
        assert not any(key in on.app.text()[-1] for key in ("d → dp", "p pause"))
        on.reader.no_pause = None
        await on.shows("p pause")
        await on.press("p")
        await on.shows("pause pending")
        assert "no pause" not in on.text()


@pytest.mark.parametrize("key", ["l", "ctrl+c"])
async def test_leaving_asks_and_leaves_the_training_alone(tmp_path: Path, key: str) -> None:
    async with open_screen(tmp_path) as on:
        await on.press("q", "y")
        assert isinstance(on.app.screen, Choice)
        assert any("y does nothing here" in row for row in on.app.screen.box.text()), "it would stop the training"
        await on.press("escape")
        await on.until(lambda: len(on.app.screen_stack) == 1, "the dialog to close")
        await on.press("ctrl+c")
        assert isinstance(on.app.screen, Choice)
        await on.press(key)
        await on.until(lambda: on.app.return_value == "left", "the end of the screen")


async def test_after_the_end_the_last_picture_has_everything_and_q_just_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpmon.ui.live_run.has_live_supervisor", lambda run_info: True)
    (tmp_path / "output.log").write_text("Traceback (most recent call last):\n  x\nRuntimeError: boom\n")
    async with open_screen(tmp_path) as on:
        on.reader.is_alive = False
        await on.shows("ending")
        on.reader.new = on.training.run(50)
        on.end(1)
        await on.shows("✗ failed")
        await on.shows("step 250      mean ")
        await on.shows("RuntimeError: boom")
        await on.shows("q close")
        assert "d → single" not in on.text()
        await on.press("d")
        assert on.reader.asked == []
        await on.press("q")
        await on.until(lambda: on.app.return_value == "ended", "the end of the screen")


@pytest.mark.parametrize("error", [HistoryError("disk I/O error"), TypeError("'str' is no number")])
async def test_a_history_that_cannot_be_read_while_drawing_leaves_the_last_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def damaged(*_: Any) -> None:
        raise error

    async with open_screen(tmp_path) as on:
        await on.shows("last 2 min")
        monkeypatch.setattr("dpmon.model.run_process.read_columns", damaged)
        await on.shows(str(error))
        assert "last 2 min" in on.text()


async def test_after_the_end_it_shows_what_happened_in_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("data", "The steps wait for data.", "34%", "more workers", 0.3)
    data = types.SimpleNamespace(findings=[found])
    monkeypatch.setattr("dpmon.report.report_data.open_report_data", lambda directory: nullcontext(data))
    async with open_screen(tmp_path) as on:
        await on.shows("last 2 min")
        assert "6 What happened" not in on.text()
        on.end(0)
        await on.shows("6 What happened")
        await on.shows("1 The steps wait for data.")
        await on.shows("whole run")


async def test_stop_stops_the_run_in_the_background_or_says_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Path] = []

    def stop_run(directory: Path, last_known: object) -> Iterator[str]:
        stopped.append(directory)
        if len(stopped) == 1:
            yield "2 processes cannot be stopped: 1, 2"
            return
        yield "SIGINT to 3 processes"
        on.end(130, "SIGINT")
        yield "stopped by SIGINT"

    monkeypatch.setattr("dpmon.run.run_signals.stop_run", stop_run)
    async with open_screen(tmp_path) as on:
        await on.press("q", "x", "y")
        await on.shows("could not stop the training: 2 processes cannot be stopped: 1, 2")
        assert on.app.return_value is None
        await on.press("q", "x", "y")
        await on.until(lambda: on.app.return_value == "stopped", "the end of the screen")
        assert stopped == [tmp_path] * 2


@pytest.mark.parametrize("again", [True, False])
async def test_leaving_waits_until_all_processes_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The command has ended, but a process that ignores SIGTERM lives until SIGKILL, which the screen has to send."""
    killed = threading.Event()

    def stop_run(directory: Path, last_known: object) -> Iterator[str]:
        on.end(130, "SIGINT")
        yield "SIGTERM to 1 process"
        killed.wait(60)
        yield "stopped by SIGKILL"

    monkeypatch.setattr("dpmon.run.run_signals.stop_run", stop_run)
    async with open_screen(tmp_path) as on:
        await on.press("x", "y")
        await on.shows("stopping: SIGTERM to 1 process")
        await on.shows("SIGINT")
        await on.press("q")
        await on.shows("q again closes this screen at once")
        assert on.app.return_value is None
        if again:
            await on.press("q")
            await on.until(lambda: on.app.return_value == "ended", "the end of the screen")
        killed.set()
        await on.until(lambda: on.app.return_value == ("ended" if again else "stopped"), "the end of the screen")


async def test_freeze_holds_the_picture_while_records_are_taken_in(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("step 200 ")
        await on.press("space")
        await on.shows("FROZEN")
        still = on.text()
        on.reader.new = on.training.run(50)
        on.app._tick()
        assert on.text() == still
        await on.press("3", "3")
        assert on.app.view.zoom == "batch", "it can still be looked at"
        await on.press("escape", "space")
        await on.shows("step 250 ")
        assert "FROZEN" not in on.text()


async def test_a_frozen_screen_shows_one_time_whatever_is_opened(tmp_path: Path) -> None:
    """Steps that ended before the freeze are written after it."""
    async with open_screen(tmp_path, steps=1200) as on:
        await on.shows("step 1,200 ")
        newest_ns = on.app.live_run.state.newest_ns
        clock_ns = on.reader.info.start_ns + newest_ns + SECOND
        on.app.live_run._clock = lambda: clock_ns
        on.app.draw()
        await on.press("space")
        await on.shows("FROZEN")
        still = on.app.data_to_draw()
        on.reader.new = on.training.run(4)
        assert on.training.now - on.reader.info.start_ns < still.now_ns
        for key in ("2", "2", "escape", "4", "4", "escape", "left_square_bracket", "right_square_bracket"):
            await on.press(key)
            shown = on.app.data_to_draw()
            assert shown.process is not None
            assert shown.process.last_step is not None
            assert (shown.process.last_step.step, shown.now_ns) == (1200, still.now_ns), key
        for width, height in ((80, 24), (200, 60), (120, 40)):
            await on.pilot.resize_terminal(width, height)
            await on.until(lambda h=height: len(on.app.text()) == h, "the new size")
        for key in ("1", "3"):
            await on.press(key)
        shown = on.app.data_to_draw()
        assert all_facts(shown.process) == all_facts(still.process)
        assert (shown.state.slowest, shown.state.losses) == (still.state.slowest, still.state.losses)
        slow_steps = on.app.live_run.slow_steps(shown, 100)
        assert slow_steps is not None
        assert max(step.step for step in slow_steps.steps) <= 1200


async def test_panels_are_reached_by_number_tab_enter_and_arrows(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("".join(f"line {i} {'x' * 200}\n" for i in range(300)))
    async with open_screen(tmp_path) as on:
        await on.shows("line 299")
        await on.press("3")
        assert (on.app.view.focus, on.app.view.zoom) == ("batch", None)
        await on.shows("▸3 Batch")
        await on.press("enter")
        assert on.app.view.zoom == "batch"
        assert "2 Replicas" not in on.text()
        await on.press("5")
        assert on.app.view.zoom == "output"
        await on.press("escape")
        await on.press("tab")
        assert (on.app.view.focus, on.app.view.zoom) == ("devices", None)
        await on.press("shift+tab")
        assert on.app.view.focus == "output"
        await on.press("2", "left")
        assert on.app.view.focus == "devices"
        await on.press("down", "down", "down")
        assert on.app.view.focus == "output"
        await on.press("up")
        await on.until(lambda: on.app.live_run.output.top is not None, "scrolling")


async def test_a_double_click_zooms_as_enter_does(tmp_path: Path) -> None:
    """With any focus, and back."""
    async with open_screen(tmp_path, (80, 24)) as on:
        await on.shows("○ idle")
        for panel in ("batch", "batch", "output", "devices"):  # devices is folded
            await on.click(panel, 5, times=2)
            assert (on.app.view.focus, on.app.view.zoom) == (panel, panel)
            await on.until(lambda p=panel: set(on.app.slots) == {"status", p, "footer"}, "the panel alone")
            # In the middle, where other panels are afterwards.
            await on.pilot.double_click(offset=(40, 12))
            assert (on.app.view.focus, on.app.view.zoom) == (panel, None)


async def test_the_output_scrolls_back_and_follows_again(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("".join(f"line {i}\n" for i in range(100)))
    async with open_screen(tmp_path) as on:
        await on.shows("following")
        await on.shows("line 99")
        await on.click("batch")
        assert on.app.view.focus == "batch"
        slot, panel = on.app.slots["output"], on.app.query_one(PanelView)
        panel.post_message(MouseScrollUp(panel, 1, 1, 0, 0, 0, False, False, False, slot.x + 1, slot.y + 1))
        await on.until(lambda: on.app.live_run.output.top is not None, "scrolling")
        await on.press("5", "end", "pageup")
        await on.shows("of 100")
        assert "line 99" not in on.text()
        await on.press("home")
        await on.shows("line 1 of 100")
        await on.press("end")
        await on.shows("following")
        with (tmp_path / "output.log").open("a") as file:
            file.write("  0%|   |\r 50%|#  |\r100%|###|")
        await on.shows("100%|###|")
        assert "50%" not in on.text()


async def test_help_and_warnings_have_pages(tmp_path: Path) -> None:
    async with open_screen(tmp_path, (80, 24)) as on:
        await on.press("question_mark")
        assert isinstance(on.app.screen, TextPages)
        page = on.app.screen
        assert any("Panels" in row for row in page.box.text())
        assert "more" in page.box.text()[-1]
        await on.press("pagedown", "pagedown", "end")
        assert any("leave the training running" in row for row in page.box.text())
        await on.press("escape")
        await on.until(lambda: len(on.app.screen_stack) == 1, "help to close")
        on.reader.new = [Event("warning", {"process": 0, "t_s": 3.0, "text": "a hook took itself out\x1b[2J"})]
        await on.until(lambda: bool(on.app.live_run.state.warnings), "the warning")
        await on.app.run_action("warnings")
        assert isinstance(on.app.screen, TextPages)
        box = on.app.screen.box
        await on.until(lambda: any("a hook took itself out\ufffd[2J" in row for row in box.text()), "the warning")


async def test_a_line_reaches_the_scripts_input(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.press("i")
        assert len(on.app.screen_stack) == 1, "no input, no dialog"
        os.mkfifo(tmp_path / "input.fifo")
        await on.shows("i input")
        fd = os.open(tmp_path / "input.fifo", os.O_RDONLY | os.O_NONBLOCK)
        try:
            await on.press("i", "q", "h", "d", "y", "x", "backspace", "space", "1", "tab", "enter")
            assert os.read(fd, 100) == b"qhdy 1\n"
            assert on.reader.asked == [], "keys that are typed do nothing else"
        finally:
            os.close(fd)
        await on.press("i", "a", "enter")
        await on.shows("the line was not sent")


async def test_a_key_chooses_among_several_roots(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        other = Training(root="Critic", via=None, mode="single")
        other.defined = on.training.defined
        on.reader.new = other.run(3)
        await on.press("2")
        await on.shows("newest of 2 · Critic · bare module")
        await on.shows("n next call")
        await on.press("n", "n")
        await on.shows("Model · DataParallel")


async def test_a_fault_in_the_reader_ends_the_screen_with_an_error(tmp_path: Path) -> None:
    def broken() -> Any:
        raise OSError("no such run")

    app = Monitor(tmp_path, STYLE, refresh=0.1, open_reader=broken)
    async with app.run_test(size=(80, 24)):
        await wait_until(lambda: app.open_error, "the error")
    assert isinstance(app.open_error, OSError)
    assert app.return_code == 2


async def test_the_cursor_shows_an_earlier_time_while_the_record_goes_on(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("step 200 ")
        end_ns = on.app.live_run.state.newest_ns
        on.app.live_run._clock = lambda: end_ns + 18 * SECOND // 10
        on.app.draw()
        await on.press("less_than_sign")
        await on.shows(" ago")
        facts = on.app.data_to_draw()
        process = facts.process
        assert process is not None
        assert process.last_step is not None
        assert process.last_step.step < 200
        assert process.seen_ns <= facts.now_ns < end_ns
        assert sum(column.count for column in process.columns) == 200, "the histories stay"
        await on.shows("▲")
        await on.shows("esc now")
        on.reader.new = on.training.run(50)
        on.app._tick()
        assert all_facts(on.app.data_to_draw().process) == all_facts(process), "it stays at its time"
        await on.press("greater_than_sign", "greater_than_sign")
        await on.shows("step 250 ")
        assert " ago" not in on.text()
        await on.press("less_than_sign", "escape")
        await on.shows("step 250 ")
        assert on.app.view == View(focus=on.app.view.focus)


async def test_a_live_run_is_played_from_an_earlier_time_on(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("step 200 ")
        clock_ns = on.app.live_run.state.newest_ns + 18 * SECOND // 10
        on.app.live_run._clock = lambda: clock_ns
        on.app.draw()
        await on.press("less_than_sign")
        await on.shows("space play")
        await on.press("space")
        await on.shows("space stop")
        facts = on.app.data_to_draw()
        assert facts.process is not None
        assert max(column.second for column in facts.process.columns) * SECOND <= facts.now_ns, "nothing from later"
        assert "▲" not in on.text()
        clock_ns += 60 * SECOND
        await on.until(lambda: on.app.live_run.cursor.time_ns is None, "the present")
        await on.shows("step 200 ")
        assert "g G ends" not in on.text()
        await on.press("less_than_sign", "space", "escape")
        assert on.app.live_run.cursor.time_ns is None


async def test_an_ended_run_is_looked_back_to_as_it_was(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("step 200 ")
        end_ns = on.app.live_run.state.newest_ns
        on.app.live_run._clock = lambda: end_ns + 18 * SECOND // 10
        on.app.draw()
        on.reader.ended = exit_info_of(1, None, end_ns + SECOND)
        await on.shows("failed")
        await on.press("less_than_sign")
        await on.shows("g G ends")
        assert " ago" not in on.text()
        assert "failed" not in on.text()
        assert not on.app.data_to_draw().is_over
        await on.press("w")
        await on.shows("no stall was recorded until this time")
        await on.press("G")
        await on.shows("failed")
