"""The screen of a stall: live, in playback and after the end; also with damaged records."""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.why import why
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.run_events import RunEvents
from dpmon.record.record_types import Event
from dpmon.record.typed_json import from_json
from dpmon.report.html_page import render_page
from dpmon.report.plots import build_plots
from dpmon.report.sections import build_document
from dpmon.report.sentences import stall_sentences
from dpmon.stalls.stall_report import StallReport
from dpmon.ui.panels import panel_stall
from dpmon.ui.screen_data import ScreenData, View, describe_activity
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import build_chart_columns, make_time_axis, stall_intervals
from dpmon.ui.time_cursor import TimeCursor
from support.history_builders import read_report, write_run_directory
from support.record_builders import SECOND, Training
from support.screen_harness import open_screen
from support.screen_states import (
    LASTED_S,
    MONO_ASCII,
    NOW_S,
    RUN_INFO,
    STYLE,
    exit_info_of,
    rows_text,
    screen_after_stall,
    screen_ended_in_stall,
    screen_in_stall,
    screen_in_stall_playback,
    screen_text,
    stall_record,
    stalled_run,
)

SIZES = [(40, 10), (60, 20), (80, 24), (110, 25), (120, 40), (200, 60)]
WHEN = [screen_in_stall, screen_in_stall_playback, screen_ended_in_stall]
SENTENCE = "rank 1 in checkpoint (train.py:12)"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", WHEN)
@pytest.mark.parametrize("count", [2, 8])
def test_rank_and_line_stand_on_every_screen_and_no_advice(
    count: int, make: Callable[[int], ScreenData], size: tuple[int, int]
) -> None:
    facts = make(count)
    text = screen_text(facts, *size)
    head = " ".join(line.strip() for line in text.splitlines()[:3])
    assert ("■ STALLED 27 s" in head) == (make is not screen_ended_in_stall)
    assert SENTENCE in head or SENTENCE.removeprefix("rank 1 ") in text
    for word in ("try:", "holds the others up", "others wait for", "uneven", "● training", "last step", "running"):
        assert word not in text
    if size[1] >= 24:
        assert "stalled after step 160" in text
        assert "values from before the stall" in text
        assert "╱╱╱" in text
    if make is screen_ended_in_stall and size[0] >= 60:
        assert "ended in a stall of 35.0 s: rank 1" in head
        assert "stopped by you" in head


@pytest.mark.parametrize("make", WHEN)
@pytest.mark.parametrize("size", SIZES[2:])
def test_header_and_panel_give_the_same_step(make: Callable[[int], ScreenData], size: tuple[int, int]) -> None:
    """The ranks that wait are a step ahead, also the one that represents the run."""
    facts = make(2)
    ahead = {
        number: process.with_facts(last_step=process.last_step._replace(step=161))
        for number, process in facts.state.processes.items()
        if process.last_step is not None
    }
    facts = replace(facts, state=facts.state.with_facts(processes=ahead))
    assert set(re.findall(r"\bstep (\d+)", screen_text(facts, *size))) == {"160"}


@pytest.mark.parametrize("look", [STYLE, MONO_ASCII])
def test_the_guilty_stand_first_and_the_waiting_in_one_row(look: TerminalStyle) -> None:
    rows = rows_text(panel_stall.render_panel(screen_in_stall(8), 76, 4, look))
    assert rows == [
        "▸ 1 cuda:1    27 s  in checkpoint (train.py:12)",
        " " * 20 + "after step 160, sleeping, 0% CPU",
        "  0, 2-7 wait in backward (train.py:90)  27 s",
        "enter stacks  w stacks now  x stop",
    ]
    assert rows_text(panel_stall.render_panel(screen_in_stall(8), 76, 2, look)) == [rows[0], rows[2]]
    assert rows_text(panel_stall.render_panel(screen_in_stall(8), 116, 3, look)) == [
        f"{rows[0]}  after step 160, sleeping, 0% CPU",
        *rows[2:],
    ]


def test_the_stacks_stand_on_the_full_screen() -> None:
    for make in WHEN:
        text = screen_text(replace(make(2), view=View(zoom="replicas")), 80, 24)
        assert "checkpoint (/job/train.py:12)" in text
        assert "Tensor.backward (torch/_tensor.py:623)" in text


# ------------------------------------------------------------------------------------------------ over time


@pytest.mark.parametrize(("at_s", "word"), [(9, "idle"), (11, "STALLED"), (34, "STALLED"), (36, "idle")])
def test_a_playback_shows_a_stall_as_it_was_seen(at_s: int, word: str) -> None:
    run, end = stalled_run(2, over=True)
    now = end + at_s * SECOND
    facts = replace(screen_in_stall_playback(2), now_ns=now, state=run.state(now))
    assert describe_activity(replace(facts, cursor=TimeCursor())).word == word


def test_a_run_that_was_interrupted_ended_in_its_stall_also_if_the_stall_ended_first() -> None:
    run, end = stalled_run(2, over=True)
    at = end + 36 * SECOND
    facts = ScreenData(run.state(over=True), at, RUN_INFO, is_command_alive=False)
    assert replace(facts, exit_info=exit_info_of(137, "SIGKILL", at)).shown_stall is not None
    assert replace(facts, exit_info=exit_info_of(0, None, at)).shown_stall is None, "it went on and finished"
    later = screen_after_stall()
    assert replace(later, exit_info=exit_info_of(1, None, later.now_ns)).shown_stall is None, "steps followed"


def test_the_gap_stays_in_the_history() -> None:
    facts = screen_after_stall()
    assert "│stalled ──" in screen_text(facts, 120, 40)
    assert "//////" in screen_text(facts, 120, 40, look=MONO_ASCII)
    process = facts.process
    assert process is not None
    for span_s in (120, 600, 0):
        columns = build_chart_columns(
            process, make_time_axis(replace(facts, view=View(range_s=span_s))), 110, stall_intervals(facts)
        ).columns
        hatched = [column for column in columns if column.stalled]
        assert LASTED_S - 2 <= len(hatched) * (2 if span_s == 600 and len(columns) < 50 else 1) <= LASTED_S + 1
        assert not any(column.count for column in hatched)


def test_report_and_summary_say_that_the_run_ended_in_its_stall() -> None:
    begun = RecordedStall(100 * SECOND, 110 * SECOND, record={"text": SENTENCE})
    over = begun._replace(end_ns=135 * SECOND)
    for stall, how, last_s, expected in (
        (begun, None, 100, "for 40.0 s until now"),
        (over, None, 100, "for 35.0 s"),
        (begun, exit_info_of(1), 100, "for 40.0 s, until its end"),
        (over, exit_info_of(1), 100, "for 35.0 s, until its end"),
        (over, exit_info_of(1), 136, "for 35.0 s"),
        (over, exit_info_of(0), 100, "for 35.0 s"),
    ):
        facts: Any = types.SimpleNamespace(
            announced=RunEvents(stalls=(stall,)), last_step_ns=last_s * SECOND, until_ns=140 * SECOND
        )
        assert stall_sentences(facts, how, has_ended=how is not None) == [f"stalled at 00:01:40 {expected}: {SENTENCE}"]


def test_dpmon_why_shows_the_stacks_of_a_run_that_ended_in_a_stall(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run_directory({0: [*Training().begin(), stall_record(2, 4 * SECOND, 60)]})
    why(argparse.Namespace(run=directory.name, json=False, all=False))
    said = capsys.readouterr().out
    assert "stalled at 00:00:04 for 56.0 s, until its end: rank 1 in checkpoint (train.py:12); rank 0 waits" in said
    assert "\nwhat each rank was doing when dpmon detected it, at 00:00:14:\n   RANK  STEP  FOR" in said
    assert "rank 1:\n  checkpoint (/job/train.py:12)\n" in said


def test_the_plots_of_the_report_mark_a_stall(state: Path) -> None:
    training = Training(step_ns=SECOND)
    rows = [*training.begin(), *training.run(60)]
    at = training.now
    training.now += LASTED_S * SECOND
    over = Event("stall", {"t_s": at / SECOND + LASTED_S, "since_s": at / SECOND, "lasted_s": LASTED_S})
    directory = write_run_directory({0: [*rows, *training.run(60), stall_record(1, at, 60), over]})
    story = read_report(directory)
    (plot,) = (plot for plot in build_plots(story.run) if plot.name == "step-time")
    assert plot.time_span is not None
    assert plot.time_span.marks == [(round(at / SECOND, 3), round(at / SECOND + LASTED_S, 3), "stalled")]
    html = render_page(build_document(story))
    assert "<title>stalled</title>" in html
    assert "for 35.0 s: in checkpoint (train.py:12)" in html


# ------------------------------------------------------------------------------------------------ the dialog


async def test_the_dialog_says_why_and_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def answer(directory: Path) -> StallReport:
        asked.append(directory)
        return from_json(StallReport, stall_record(2, SECOND, 160).data)

    monkeypatch.setattr("dpmon.ui.why_dialog.request_and_wait", answer)
    monkeypatch.setattr("dpmon.ui.monitor.REQUEST_INTERVAL_S", 0.01)
    async with open_screen(tmp_path, (80, 24)) as on:
        await on.press("w")
        await on.until(lambda: asked and "RANK" in dialog(on.app), "the answer")
        rows = dialog(on.app)
        assert "stalled for 10 s: rank 1 in checkpoint (train.py:12)" in rows
        assert re.search(r"> +1 +160 +10 s +in checkpoint \(train\.py:12\) +160 ", rows)
        assert "PROCESS" not in rows, "no room"
        await on.until(lambda: len(asked) > 1, "another question")
        assert "as of " in dialog(on.app)


async def test_the_dialog_counts_on_while_the_answer_grows_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = screen_in_stall(2)
    assert facts.shown_stall is not None
    monkeypatch.setattr(
        "dpmon.ui.why_dialog.request_and_wait",
        lambda _: from_json(StallReport, stall_record(2, facts.shown_stall.since_ns, 160).data),
    )
    async with open_screen(tmp_path, (80, 24)) as on:
        monkeypatch.setattr(on.app, "data_to_draw", lambda: facts)
        await on.press("w")
        await on.until(lambda: "RANK" in dialog(on.app), "the answer")
        assert f"stalled for {NOW_S} s: rank 1 in checkpoint (train.py:12)" in dialog(on.app)


async def test_the_dialog_says_that_the_run_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpmon.ui.why_dialog.request_and_wait",
        lambda _: from_json(StallReport, {**stall_record(2, SECOND, 160).data, "text": None}),
    )
    async with open_screen(tmp_path, (80, 24)) as on:
        on.reader.pause = types.SimpleNamespace(is_requested=True, is_pending=False, since_ns=SECOND)
        await on.press("w")
        await on.until(lambda: "paused: " in dialog(on.app), "the state")


def dialog(app: Any) -> str:
    return "\n".join(app.screen.box.text()) if hasattr(app.screen, "box") else ""
