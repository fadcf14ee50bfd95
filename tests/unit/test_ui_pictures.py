"""Pictures as strings: header, status and notes of named situations, and every row exactly as wide as the screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import PauseChange, WarningRecord
from dpmon.run.run_directory import ExitInfo
from dpmon.run.run_reader import PauseState
from dpmon.ui import screen_painter
from dpmon.ui.keys import available_commands
from dpmon.ui.panels.panel_output import LogTail, OutputView
from dpmon.ui.screen_data import ModeRequest, ScreenData, View, describe_activity, format_devices
from dpmon.ui.screen_painter import panel_slots
from dpmon.ui.styled_rows import plain_text, row_width
from dpmon.ui.terminal_style import TerminalStyle
from support.history_builders import snapshot_of_rows
from support.record_builders import SECOND, Training
from support.screen_states import (
    MONO_ASCII,
    RUN_INFO,
    STYLE,
    exit_info_of,
    paint_screen,
    screen_data_of,
    screen_text,
    situations,
    with_mode_reply,
)

SIZES = [
    (80, 24),
    (120, 40),
    (160, 50),
    (200, 60),
    (40, 10),
    (60, 20),
    (100, 30),
    (110, 25),
    (250, 70),
    (90, 45),
    (20, 5),
]


@pytest.fixture
def output(tmp_path: Path) -> OutputView:
    path = tmp_path / "output.log"
    path.write_bytes(
        b"".join(
            b"\x1b[32mstep %d\x1b[0m loss 0.4 \xe6\xbc\xa2\xe5\xad\x97 \x1b]52;c;x\x07%s\n" % (i, b"w" * i)
            for i in range(300)
        )
    )
    tail = LogTail(path)
    tail.refresh()
    return OutputView([tail])


@pytest.mark.parametrize("look", [STYLE, MONO_ASCII], ids=["color", "mono ascii"])
@pytest.mark.parametrize("name", list(situations()))
def test_every_row_is_exactly_as_wide_as_the_screen(name: str, look: TerminalStyle, output: OutputView) -> None:
    facts = situations()[name]
    for width, height in SIZES:
        rows = paint_screen(facts, output, width, height, look)
        assert len(rows) == height
        assert {row_width(row) for row in rows} == {width}, f"{width}x{height}"
        text = "\n".join(plain_text(row) for row in rows)
        assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)


def test_the_first_seconds_tell_what_happens() -> None:
    before = ScreenData(RunAnalysis(), 2 * SECOND, RUN_INFO)
    assert describe_activity(before) == ("starting", "wait", "2 s")
    assert describe_activity(replace(before, is_command_alive=True)) == ("starting", "wait", "2 s")
    assert describe_activity(replace(before, is_command_alive=True, now_ns=75 * SECOND)) == (
        "starting",
        "wait",
        "no PyTorch seen yet, 75 s",
    )
    importing = replace(before, is_command_alive=True, startup_stage=("importing torch", SECOND))
    assert describe_activity(importing) == ("starting", "wait", "importing torch, 1 s")
    imported = replace(before, is_command_alive=True, startup_stage=("torch imported", SECOND))
    assert describe_activity(imported) == ("starting", "wait", "waiting for the first step, 1 s")
    assert "starting: importing torch, 1 s" in screen_text(importing, 80, 24)
    # A script without a loader also has steps.
    begun = replace(imported, state=snapshot_of_rows(Training().begin()))
    in_forward = replace(begun, activities={0: ("forward", SECOND // 2)})
    assert describe_activity(in_forward) == ("starting", "wait", "first step in forward, 2 s")
    assert describe_activity(replace(begun, activities={0: ("data", SECOND // 2)})) == (
        "waiting for data",
        "wait",
        "first batch, 2 s",
    )
    assert (
        describe_activity(replace(begun, activities={0: ("other", SECOND // 2)})).detail
        == "first step in the script, 2 s"
    )
    assert describe_activity(replace(begun, activities={0: ("other", begun.now_ns - 1)})) == (
        "starting",
        "wait",
        "first step",
    )
    learning = replace(begun, state=begun.state.with_facts(open_calls=11), activities={0: ("other", SECOND // 2)})
    assert describe_activity(learning) == ("training", "wait", "11 calls so far; the end of a step is not known yet")
    assert "11 calls so far" in screen_text(learning, 80, 24)


def test_a_waiting_script_is_shown_with_the_key_to_type_a_line() -> None:
    before = ScreenData(
        RunAnalysis(),
        5 * SECOND,
        RUN_INFO,
        is_command_alive=True,
        startup_stage=("torch imported", SECOND),
        input_wait_since_ns=2 * SECOND,
    )
    assert describe_activity(before) == ("waiting for input", "wait", "3 s")
    assert describe_activity(replace(before, can_type=True)).detail == "3 s: press i"
    worked = screen_data_of(Training())
    training = replace(worked, now_ns=worked.now_ns + 3 * SECOND, input_wait_since_ns=worked.now_ns)
    assert describe_activity(training).word == "waiting for input"
    assert "i input" in screen_text(training, 80, 24).splitlines()[-1]
    assert describe_activity(replace(training, input_wait_since_ns=None)).word == "training"


def test_a_wait_for_input_is_shown_after_a_second_and_until_the_next_step_ends() -> None:
    """A script that reads line by line often waits for a moment, and a watch that has stopped reports an old wait."""
    training = screen_data_of(Training())
    later = replace(training, now_ns=training.now_ns + 3 * SECOND)
    for facts, since in ((training, training.now_ns - SECOND // 2), (later, SECOND), (later, later.now_ns + SECOND)):
        seen = replace(facts, input_wait_since_ns=since)
        assert describe_activity(seen).word == "training"
        assert seen.input_wait_ns is None


def test_waiting_for_data_is_shown_only_after_a_second() -> None:
    facts = screen_data_of(Training())
    assert describe_activity(replace(facts, activities={0: ("data", facts.now_ns - SECOND // 2)})).word == "training"
    waiting = replace(facts, now_ns=facts.now_ns + 4 * SECOND, activities={0: ("data", facts.now_ns)})
    assert describe_activity(waiting) == ("waiting for data", "wait", "4 s")
    stuck = replace(facts, now_ns=facts.now_ns + 9 * SECOND, activities={0: ("backward", facts.now_ns)})
    assert describe_activity(stuck) == ("training", "good", "in backward 9 s")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (exit_info_of(0, None, 9), "● finished"),
        (exit_info_of(3, None, 9), "failed with exit status 3"),
        (exit_info_of(137, "SIGKILL", 9), "killed by SIGKILL"),
        (exit_info_of(139, "SIGSEGV", 9), "killed by SIGSEGV"),
        (exit_info_of(130, "SIGINT", 9), "interrupted by SIGINT"),
        (exit_info_of(130, "SIGINT", 9, stopped=True), "stopped by you"),
        (exit_info_of(1, None, 9, stopped=True), "stopped by you"),
        (exit_info_of(134, "SIGABRT", 9, stopped=True), "stopped by you"),
    ],
)
def test_the_end_stays_with_its_outcome(ended: ExitInfo, said: str) -> None:
    facts = replace(screen_data_of(Training()), exit_info=ended, can_toggle=False)
    text = screen_text(facts, 160, 50)
    assert said in text
    assert "q close" in text
    assert "d → single" not in text
    assert "dpmon report linear-7f3a" in text


def test_a_vanished_run_is_shown_without_an_invented_status() -> None:
    text = screen_text(replace(screen_data_of(Training()), is_command_alive=False), 160, 50)
    assert "lost" in text
    assert "its end was not recorded" in text
    assert "status 0" not in text


def test_a_toggle_is_pending_then_done_or_refused() -> None:
    facts = screen_data_of(Training())
    pending = replace(facts, mode_request=ModeRequest("single", facts.now_ns - 2 * SECOND))
    assert "→ single pending 2 s: takes effect at the next call" in screen_text(pending, 80, 24)
    paused = replace(pending, pause_state=PauseState(is_requested=True, since_ns=facts.now_ns - SECOND))
    assert "→ single pending 2 s: takes effect once training resumes (p)" in screen_text(paused, 80, 24)
    done = with_mode_reply(facts, "single", step=12_340)
    assert "single from step 12,340 on" in screen_text(done, 80, 24)
    refused = with_mode_reply(facts, refused="it is DDP")
    assert "single refused: it is DDP" in screen_text(refused, 80, 24)


def test_the_status_says_mode_devices_and_that_they_are_virtual_with_the_reason() -> None:
    text = screen_text(screen_data_of(Training(devices=[f"cpu:{i}" for i in range(4)])), 120, 40)
    assert "dp ×4  cpu:0-3 virtual" in text
    assert "virtual replicas: no GPU on this machine" in text
    assert "examples" not in text.splitlines()[0]
    assert "linear.py" in text.splitlines()[0]


def test_dropped_records_are_counted_on_the_screen() -> None:
    assert "1,234 records lost" in screen_text(missing(screen_data_of(Training()), 1234), 80, 24)
    assert "dropped" not in screen_text(screen_data_of(Training()), 80, 24)


def test_warnings_are_shown_and_listed_in_the_palette() -> None:
    facts = warned(screen_data_of(Training()), "the hook\x1b[2J took itself out")
    text = screen_text(facts, 120, 40)
    assert "warning: the hook\ufffd[2J took itself out" in text
    assert "warnings" in {command.action for command in available_commands(facts)}


@pytest.mark.parametrize(
    ("devices", "short"),
    [
        (("cuda:0", "cuda:1", "cuda:2"), "cuda:0-2"),
        (("cuda:0", "cuda:2"), "cuda:0,2"),
        (("cpu",), "cpu"),
        (("cpu:0", "cuda:0", "cuda:1"), "cpu:0 cuda:0-1"),
        (("cuda:0", "cuda:0"), "cuda:0,0"),
        ((), ""),
    ],
)
def test_devices_in_short(devices: tuple[str, ...], short: str) -> None:
    assert format_devices(devices) == short


def warned(facts: ScreenData, text: str) -> ScreenData:
    return replace(facts, state=facts.state.with_facts(warnings=(WarningRecord(0, facts.now_ns, text),)))


def missing(facts: ScreenData, count: int) -> ScreenData:
    return replace(facts, state=facts.state.with_facts(missed=count))


LONG = (
    "the module's parts lie on several devices (cuda:0, cuda:1, 中文字 and the processor): dp would copy each of them "
    "whole to every device, which is not what the script says; the toggle is for modules on one device"
)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (160, 50), (81, 30)])
@pytest.mark.parametrize("which", ["toggle", "pause", "message"])
def test_a_refusal_that_has_no_room_in_its_row_stands_in_full_above_the_footer(
    which: str, size: tuple[int, int]
) -> None:
    facts = screen_data_of(Training())
    plain_rows = paint_screen(facts, OutputView(), *size, STYLE)
    if which == "toggle":
        facts = with_mode_reply(facts, refused=LONG)
    elif which == "pause":
        pause = PauseChange(0, facts.now_ns, None, False, None, None, LONG)
        facts = replace(facts, state=facts.state.with_facts(pauses=(pause,)))
    else:
        facts = replace(facts, view=View(message=LONG))
    rows = paint_screen(facts, OutputView(), *size, STYLE)
    assert [row_width(row) for row in rows] == [size[0]] * size[1]
    at = next(index for index, row in enumerate(rows) if "in full" in plain_text(row))
    note = [plain_text(row).split("│")[1].strip() for row in rows[at + 1 : at + 10] if "│" in plain_text(row)]
    assert LONG in " ".join(note)
    assert plain_text(rows[-1]) == plain_text(plain_rows[-1])
    slots = panel_slots(facts, *size)
    below = screen_painter.paint_screen(facts, OutputView(), slots, STYLE, with_popup=False)
    assert "in full" not in "".join(map(plain_text, below)), "a dialog is over it"
    later = replace(facts, now_ns=facts.now_ns + 20 * SECOND, view=View())
    assert "in full" not in "".join(plain_text(row) for row in paint_screen(later, OutputView(), *size, STYLE))
