"""The row below a history: modes, marks, gaps, the cursor and the time of the newest column."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpmon.model.epoch_progress import Epoch, Progress
from dpmon.model.step_history import Column
from dpmon.model.time_marks import EPOCH, PAUSED, TimeMark
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text, row_width
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import ChartColumns, TimeAxis, axis_row, choose_marks, make_time_axis, shift_by_parts
from dpmon.ui.time_cursor import TimeCursor
from support.history_builders import snapshot_of_rows
from support.record_builders import SECOND, Training, pause_event
from support.screen_states import MONO_ASCII, RUN_INFO, STYLE, screen_data_of, shown_process, with_process

AXIS = TimeAxis(10, 70, 65)


def column(second: int, count: int = 5, mode: str = "single", **more: Any) -> Column:
    return Column(second, mode, count, count * 10, **more)


def drawn(
    columns: list[Column], *marks: TimeMark, width: int = 60, look: TerminalStyle = STYLE, cursor_s: int | None = None
) -> str:
    cursor_ns = None if cursor_s is None else cursor_s * SECOND
    row = axis_row(AXIS, ChartColumns(columns, 60), width, ranks=None, word="now ", marks=marks, cursor_ns=cursor_ns)
    assert row_width(row) == width
    return plain_text(row)


def epoch_at(second: int, number: int) -> TimeMark:
    return TimeMark(second * SECOND, None, EPOCH, f"e{number}")


def test_marks_stand_below_their_time_and_words_beside_them() -> None:
    columns = [column(second) for second in range(10, 66)]
    text = drawn(columns, epoch_at(10, 1), epoch_at(40, 2), TimeMark(50 * SECOND, 58 * SECOND, PAUSED, PAUSED))
    assert text.startswith("e1 single ─")
    assert text.index("e2") == 30
    assert text.rstrip().endswith("01:05")
    assert "now" not in drawn(columns, TimeMark(58 * SECOND, 66 * SECOND, PAUSED, PAUSED)), "the word is more"


def test_a_pause_is_a_gap_with_its_word_and_no_change_of_mode() -> None:
    columns = [column(second) for second in range(10, 66)]
    text = drawn(columns, TimeMark(40 * SECOND, 49 * SECOND, PAUSED, PAUSED))
    assert text[29:40] == "─ paused  ─"
    short = drawn(columns, TimeMark(40 * SECOND, 47 * SECOND, PAUSED, PAUSED))
    assert short[29:38] == "─       ─"
    assert "│" not in text + short
    switched = [column(second, mode="single" if second < 45 else "dp") for second in range(10, 66)]
    assert "paused  │dp ─" in drawn(switched, TimeMark(40 * SECOND, 49 * SECOND, PAUSED, PAUSED))
    assert "─ paused  ─" in drawn(columns, TimeMark(40 * SECOND, 49 * SECOND, PAUSED, PAUSED), cursor_s=20)
    assert "─     ▲00:45 ─" in drawn(columns, TimeMark(40 * SECOND, 52 * SECOND, PAUSED, PAUSED), cursor_s=45)


@pytest.mark.parametrize("width", [8, 20, 47, 60, 188])
def test_the_cursor_points_to_its_column(width: int) -> None:
    columns = [column(second) for second in range(10, 66)]
    for second in (10, 31, 63, 65):
        text = drawn(columns, width=width, cursor_s=second)
        at = AXIS.cell_at(second, width)
        assert text[at] == "▲"
        assert f"{second // 60:02d}:{second % 60:02d}" in text
    assert "▲" not in drawn(columns, width=width)


def with_epochs(facts: ScreenData, seconds: list[int]) -> ScreenData:
    epochs = (
        Epoch(n, at * SECOND, (at + 1) * SECOND, 1, 1, None, None, SECOND) for n, at in enumerate(seconds, start=1)
    )
    return with_process(facts, progress=Progress(epochs=tuple(epochs)))


def test_starts_of_saves_are_marked_beside_those_of_epochs() -> None:
    screen = with_epochs(screen_data_of(Training(step_ns=SECOND // 5)), [2, 30, 60])
    process = shown_process(screen).process
    saves = tuple({"process": process, "t_s": second, "save_s": 2.0} for second in (20, 45, 75))
    other_saves = ({"process": process + 1, "t_s": 50.0, "save_s": 2.0},)
    events = replace(screen.state.events, checkpoints=saves + other_saves)
    screen = replace(screen, state=screen.state.with_facts(events=events))
    axis = make_time_axis(screen)
    marks = choose_marks(screen, axis, 100)
    assert [mark.begin_ns // SECOND for mark in marks if mark.word == "save"] == [20, 45, 75]
    assert [m.word for m in marks if m.word != "save"] == ["e1", "e2", "e3"]
    assert len(choose_marks(screen, axis, 12)) < len(marks), "they have no room"
    columns = [column(second) for second in range(10, 66)]
    text = drawn(columns, *(mark for mark in marks if mark.word == "save"))
    assert text.index("save") == 10


def test_a_pause_is_marked_from_its_record_until_the_training_goes_on() -> None:
    training = Training(step_ns=SECOND // 5)
    payloads = [*training.begin(), *training.run(50)]
    begin = training.now
    payloads.append(pause_event(begin / SECOND, 50))
    paused = ScreenData(snapshot_of_rows(payloads), begin + 9 * SECOND, RUN_INFO, is_command_alive=True)
    assert [(m.word, m.end_ns) for m in choose_marks(paused, make_time_axis(paused), 100)] == [
        ("paused", paused.now_ns)
    ]
    payloads.append(pause_event(begin / SECOND + 3, 50, 3.0))
    training.now += 3 * SECOND
    later = ScreenData(snapshot_of_rows([*payloads, *training.run(5)]), training.now, RUN_INFO, is_command_alive=True)
    (mark,) = choose_marks(later, make_time_axis(later), 100)
    assert mark.end_ns is not None
    assert mark.end_ns - mark.begin_ns == pytest.approx(3 * SECOND, abs=1000)


def test_the_histories_of_an_earlier_time_are_those_of_the_present() -> None:
    now = with_epochs(screen_data_of(Training(step_ns=SECOND // 5)), [2, 9, 40])
    then = with_epochs(screen_data_of(Training(step_ns=SECOND // 5), 30), [2])
    looked = replace(
        then,
        state=then.state.with_histories(now.state),
        now_ns=5 * SECOND,
        history_state=now.state,
        cursor=TimeCursor(5 * SECOND, now.now_ns, present_ns=now.now_ns + 3 * SECOND),
    )
    assert make_time_axis(looked) == make_time_axis(now)
    assert choose_marks(looked, make_time_axis(now), 100) == choose_marks(now, make_time_axis(now), 100)
    assert shown_process(looked).columns == shown_process(now).columns
    assert shown_process(looked).last_step == shown_process(then).last_step
    assert shift_by_parts(looked, 1) == looked.now_ns + SECOND
    assert RUN_INFO is looked.run_info


WORDS = {"single", "evaluation", "eval", "dp", "stalled", "paused", "now", "01:05"}


@pytest.mark.parametrize("look", [STYLE, MONO_ASCII])
@pytest.mark.parametrize("width", [20, 33, 47, 60, 120])
def test_two_words_never_run_together_and_none_is_cut_by_another(width: int, look: TerminalStyle) -> None:
    """Each word below a history is whole, with a blank, a line or a change of mode on both sides."""
    for begin in range(12, 64, 3):
        for length in (4, 11, 12, 25):
            columns = [column(at, other_kind="evaluation" * (begin <= at < begin + length)) for at in range(10, 66)]
            marks = [epoch_at(begin + length, 2), epoch_at(begin + length + 2, 3), epoch_at(63, 14)]
            for cursor_s in (None, begin, begin + length - 5, 58, 64):
                text = drawn(columns, *marks, width=width, look=look, cursor_s=cursor_s)
                pointer, shown = (
                    "▲",
                    "" if cursor_s is None else f"{cursor_s // 60:02}:{cursor_s % 60:02}",
                )
                known = WORDS | {"e2", "e3", "e14", f"{pointer}{shown}", f"{shown}{pointer}"}
                for sign in "─│":
                    text = text.replace(sign, " ")
                assert set(text.split()) <= known | {f"{n}" for n in range(2, 9)} | {"s", "per", "column"}, text
                assert cursor_s is None or pointer in text
