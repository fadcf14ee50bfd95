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
from dpmon.model.run_snapshot import Column
from dpmon.record.record_types import Event
from dpmon.record.typed_json import from_json
from dpmon.report.html_page import render_page
from dpmon.report.plots import build_plots
from dpmon.report.report_data import collect_report_data
from dpmon.report.sections import build_document
from dpmon.report.sentences import stall_sentences
from dpmon.stalls.stall_report import StallReport
from dpmon.stalls.why_text import format_report
from dpmon.ui.chart import scale_top
from dpmon.ui.panels import panel_stall
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.screen_data import ScreenData, View, describe_activity
from dpmon.ui.styled_rows import plain_text, row_width
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import build_chart_columns, make_time_axis, stall_intervals
from support.history_builders import SUPERVISOR, Recording, write_run_directory
from support.record_builders import SECOND, Training
from support.screen_harness import open_screen
from support.screen_states import (
    LASTED_S,
    MONO_ASCII,
    NOTICED_S,
    NOW_S,
    RUN_INFO,
    STYLE,
    exit_info_of,
    paint_screen,
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
        assert "the run ended in a stall of 35 s: rank 1" in head
        assert "stopped by you" in head or "stopped: by you" in head


@pytest.mark.parametrize("make", WHEN)
@pytest.mark.parametrize("size", SIZES[2:])
def test_header_and_panel_give_the_same_step(make: Callable[[int], ScreenData], size: tuple[int, int]) -> None:
    """The ranks that wait are a step ahead, also the one that represents the run."""
    facts = make(2)
    ahead = {
        number: replace(process, last_step=process.last_step._replace(step=161))
        for number, process in facts.state.processes.items()
        if process.last_step is not None
    }
    facts = replace(facts, state=replace(facts.state, processes=ahead))
    assert set(re.findall(r"\bstep (\d+)", screen_text(facts, *size))) == {"160"}


def test_the_word_the_seconds_and_the_rank_are_the_last_to_go() -> None:
    rows = screen_text(screen_in_stall(2), 40, 10).splitlines()
    assert "STALLED 27 s" in rows[0]
    assert rows[1].startswith(" ▸ rank 1 in checkpoint (train.py:12)")
    warned = replace(screen_in_stall(2), view=View(message="a message"))
    assert "a message" in screen_text(warned, 80, 24).splitlines()[2]
    assert SENTENCE in screen_text(warned, 80, 24).splitlines()[1]


@pytest.mark.parametrize("look", [STYLE, MONO_ASCII])
def test_the_guilty_stand_first_and_the_waiting_in_one_row(look: TerminalStyle) -> None:
    rows = rows_text(panel_stall.render_panel(screen_in_stall(8), 76, 4, look))
    mark = look.glyphs.focus
    assert rows == [
        f"{mark} 1 cuda:1    27 s  in checkpoint (train.py:12)",
        " " * 20 + "after step 160, sleeping, 0% CPU",
        "  0, 2-7 wait in backward (train.py:90)  27 s",
        "enter stacks  w stacks now  x stop",
    ]
    assert rows_text(panel_stall.render_panel(screen_in_stall(8), 76, 2, look)) == [rows[0], rows[2]]
    assert rows_text(panel_stall.render_panel(screen_in_stall(8), 116, 3, look)) == [
        f"{rows[0]}  after step 160, sleeping, 0% CPU",
        *rows[2:],
    ]


def test_a_guilty_rank_is_named_with_its_node() -> None:
    facts = screen_in_stall(2)
    processes = {number: replace(one, node=f"gpu-{number}") for number, one in facts.state.processes.items()}
    facts = replace(facts, state=replace(facts.state, processes=processes))
    assert rows_text(panel_stall.render_panel(facts, 76, 4, STYLE))[0].startswith(
        "▸ 1 cuda:1 (gpu-1)    27 s  in checkpoint"
    )


def test_an_answer_without_collectives_has_no_column_for_them() -> None:
    record = stall_record(2, SECOND, 5).data
    quiet = {**record, "ranks": [{**one, "groups": []} for one in record["ranks"]]}
    groups = [{"group": 1, "ranks": 2, "sequence": 7}]
    told = {**record, "ranks": [{**one, "groups": groups} for one in record["ranks"]]}
    reports = [from_json(StallReport, each) for each in (quiet, told)]
    heads = [next(text for text, _ in format_report(each, width=76) if "RANK" in text) for each in reports]
    assert ["COLLECTIVES" in head for head in heads] == [False, True]
    assert heads[0].endswith("PROCESS"), heads[0]
    assert max(len(text) for text, _ in format_report(reports[0], width=76) if "sleeping" in text) <= 76


def test_a_process_without_ranks_has_the_same_row() -> None:
    rows = rows_text(panel_stall.render_panel(screen_in_stall(1), 76, 4, STYLE))
    assert rows[0] == "▸ cpu:0-1    27 s  in checkpoint (train.py:12)"
    assert plain_text(panel_stall.panel_title(screen_in_stall(1), STYLE)[0]) == "2 Replicas"


def test_ranks_that_wait_for_each_other_share_a_row() -> None:
    record = stall_record(2, SECOND, 5).data
    data = {**record, "ranks": [{**one, "waits": True, "words": "in backward (a.py:1)"} for one in record["ranks"]]}
    facts = screen_in_stall(2)
    facts = replace(facts, state=replace(facts.state, stalls=(RecordedStall(SECOND, 11 * SECOND, record=data),)))
    assert rows_text(panel_stall.render_panel(facts, 76, 4, STYLE))[0].startswith("  0-1 wait in backward (a.py:1)  ")
    assert plain_text(panel_stall.panel_title(facts, STYLE)[1]) == "stalled after step 5"


def test_many_guilty_ranks_in_one_place_are_folded_where_rows_are_few() -> None:
    record = stall_record(8, SECOND, 5).data
    data = {**record, "ranks": [{**one, "waits": False, "words": "in wait (a.py:1)"} for one in record["ranks"]]}
    facts = screen_in_stall(8)
    facts = replace(facts, state=replace(facts.state, stalls=(RecordedStall(SECOND, 11 * SECOND, record=data),)))
    assert rows_text(panel_stall.render_panel(facts, 76, 4, STYLE))[0].startswith("▸ 0-7 in wait (a.py:1)  ")
    assert len(rows_text(panel_stall.render_panel(facts, 76, 8, STYLE))) == 8


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
    assert describe_activity(replace(facts, playing=None)).word == word


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


def test_the_step_with_the_stall_does_not_set_the_scale() -> None:
    usual, gap = Column(0, "single", 1, 10), Column(1, "single", stalled=True)
    assert scale_top([usual, gap, Column(2, "single", 1, 35_000), usual]) == 10
    assert scale_top([gap, Column(2, "single", 1, 35_000)]) > 0


def test_a_long_stall_fills_the_time_range_and_costs_no_more_columns() -> None:
    facts = screen_in_stall(2, now_ns=40_000 * SECOND)
    for span_s in (120, 0):
        process = facts.process
        assert process is not None
        columns = build_chart_columns(
            process, make_time_axis(replace(facts, view=View(range_s=span_s))), 100, [(4 * SECOND, facts.now_ns)]
        ).columns
        assert len(columns) <= 100
        assert columns[-1].stalled


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
    story = collect_report_data(directory)
    (plot,) = (plot for plot in build_plots(story.run) if plot.name == "step-time")
    assert plot.time_span is not None
    assert plot.time_span.marks == [(round(at / SECOND, 3), round(at / SECOND + LASTED_S, 3), "stalled")]
    html = render_page(build_document(story))
    assert "<title>stalled</title>" in html
    assert "for 35.0 s: in checkpoint (train.py:12)" in html


# ------------------------------------------------------------------------------------------------ damaged records

HOSTILE = "\x1b]52;c;x\x07\u202e漢字\n" * 50


@pytest.mark.parametrize(
    "changes",
    [
        {"text": None},
        {"text": HOSTILE},
        {"text": 3, "ranks": None},
        {"ranks": "rubbish"},
        {"ranks": [3, None, "x", {}]},
        {"ranks": [{"rank": HOSTILE, "words": HOSTILE, "state": HOSTILE, "step": "x", "for_s": -1, "cpu": "x"}]},
        {"ranks": [{"rank": -(1 << 62), "words": 3, "cpu": 1e299, "for_s": 1e300, "process": 1 << 70, "waits": 3}]},
        {"ranks": [{"rank": n, "words": f"in place {n}", "cpu": 1e299, "for_s": 9.0} for n in range(500)]},
        {"ranks": [{"rank": 2 * n, "words": "in backward", "waits": True} for n in range(500)]},
        {"ranks": [{"words": "w", "stacks": [{"frames": [["f", "g"]]}]}]},
        {"since_s": 1e8},
    ],
)
def test_a_damaged_record_never_breaks_the_screen(changes: dict[str, Any]) -> None:
    training = Training()
    run = Recording().add([*training.begin(), *training.run(20)])
    run.add([Event("stall", {**stall_record(2, training.now, 20).data, **changes})], SUPERVISOR)
    now = training.now + 20 * SECOND
    live = ScreenData(run.state(), now, RUN_INFO, is_command_alive=True)
    over = replace(
        live, state=run.state(over=True), is_command_alive=False, exit_info=exit_info_of(137, "SIGKILL", now)
    )
    for facts in (live, over, replace(live, view=View(zoom="replicas")), replace(live, view=View(zoom="batch"))):
        assert facts.shown_stall is not None
        for look in (STYLE, MONO_ASCII):
            for width, height in SIZES:
                rows = paint_screen(facts, OutputView(), width, height, look)
                assert {row_width(row) for row in rows} == {width}
                text = "\n".join(map(plain_text, rows))
                assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)


# ------------------------------------------------------------------------------------------------ the dialog


async def test_the_dialog_says_why_and_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def answer(directory: Path) -> StallReport:
        asked.append(directory)
        return from_json(StallReport, stall_record(2, SECOND, 160).data)

    monkeypatch.setattr("dpmon.ui.why_dialog.request_and_wait", answer)
    monkeypatch.setattr("dpmon.ui.why_dialog._REQUEST_INTERVAL_S", 0.0)
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


def test_the_recorded_stall_is_noticed_after_ten_seconds() -> None:
    stall = screen_in_stall(2).shown_stall
    assert stall is not None
    assert stall.noticed_ns - stall.since_ns == NOTICED_S * SECOND


def test_the_full_screen_says_when_the_stacks_were_recorded() -> None:
    rows = rows_text(panel_stall.render_full_screen(screen_in_stall(2), 100, 30, STYLE))
    assert rows[rows.index("as detected at 00:00:14") + 1] == "rank 1:"


def test_figures_stay_dimmed_while_the_command_that_ended_in_a_stall_has_no_exit_yet() -> None:
    facts = replace(screen_in_stall(2), is_ending=True)
    text = screen_text(facts, 120, 40)
    assert "ending" in text
    assert "values from before the stall" in text
    assert "stalled after step 160" in text
    assert "try:" not in text
