"""The first rows as text: what a run waits for, and nothing that no longer holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.model.findings.finding import Finding
from dpmon.ui.footer import current_key_hints
from dpmon.ui.panels.panel_status import render_panel, reports_straggler
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.time_cursor import TimeCursor
from dpmon.ui.why_dialog import WhyDialog
from support.history_builders import snapshot_of_rows
from support.rank_builders import record_ddp_ranks
from support.record_builders import SECOND, Training
from support.screen_harness import open_screen
from support.screen_states import (
    RUN_INFO,
    STYLE,
    exit_info_of,
    progress_in_epochs,
    screen_data_of,
    screen_in_stall,
    screen_in_stall_playback,
    screen_text,
    shown_process,
    with_process,
)


def head(facts: ScreenData, width: int = 120, height: int = 2) -> list[str]:
    return [plain_text(row).strip() for row in render_panel(facts, width, height)]


def ranks(**changes: Any) -> ScreenData:
    recording, now = record_ddp_ranks(4, slow=1, phase="data", steps=160)
    return replace(ScreenData(recording.state(), now, RUN_INFO, is_command_alive=True), **changes)


def slow_loader(share: int, steps: int = 400) -> ScreenData:
    """Return a run whose data phase takes `share` per cent of its steps."""
    training = Training(mode="single", devices=("cpu:0",), via=None, step_ns=20_000_000)
    training.shares["single"] = {"data": share, "rest": 50 - share // 2, "backward": 50 - share // 2, "optimizer": 0}
    return screen_data_of(training, steps)


def test_a_slow_loader_is_named_while_the_training_goes_on() -> None:
    facts = slow_loader(86)
    assert shown_process(facts).settled.steps > 100
    assert head(facts)[1].startswith("▸ waits for data: 85% of its step time")
    assert any(row.startswith("▸ waits for data: 85%") for row in head(facts, 80, 3))
    for other in (slow_loader(10), slow_loader(86, 20)):
        assert "waits for data" not in "".join(head(other)), "less than a fifth, or too few steps"
    over = replace(facts, exit_info=exit_info_of(0, None, facts.now_ns), is_command_alive=False)
    assert "waits for data" not in "".join(head(over))


@pytest.mark.parametrize(("kind", "is_first"), [("wrong", True), ("sync", False)])
def test_what_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch, kind: str, is_first: bool) -> None:
    """A wrong training comes before the rank that the others wait for, and a slow line after it."""
    problem = Finding(kind, "the learning rate\x1b[2J of SGD is 0.", "three looks", "another rate", 1.0)
    facts, alone = ranks(), slow_loader(86)
    assert "others wait for rank 1" in head(facts)[1]
    monkeypatch.setattr("dpmon.ui.screen_data.find_causes", lambda _: [problem])
    facts, alone = ranks(), slow_loader(86)
    assert ("learning rate" in head(facts)[1]) == is_first
    assert reports_straggler(facts) != is_first
    assert "learning rate" in head(alone)[1]
    assert "\x1b" not in head(alone)[1]
    over = replace(alone, exit_info=exit_info_of(0, None, alone.now_ns), is_command_alive=False)
    assert "learning rate" not in "".join(head(over))
    dialog = WhyDialog(lambda: alone, Path("/nonexistent"), None, STYLE)
    rows = [plain_text(row) for row in dialog._rows(30)]
    assert " ".join(rows).startswith("the learning rate")
    assert " ".join(rows).endswith(
        "of SGD is 0. Evidence: three looks; try: another rate  asking the training processes ..."
    )
    assert not [row for row in rows if "\x1b" in row or len(row) > 40]


@pytest.mark.parametrize(
    ("passes", "text"), [(((1, 0),), "step 160  "), (((0, 1), (0, 1), (0, 1), (1, 0)), "step 160 · 40 updates  ")]
)
def test_updates_follow_the_step_where_they_differ(passes: Any, text: str) -> None:
    recording, now = record_ddp_ranks(2, steps=160, passes=passes)
    facts = ScreenData(recording.state(span_s=2), now, RUN_INFO, is_command_alive=True)
    assert text in head(facts, 160)[0], "of the whole run, whatever time range is shown"


@pytest.mark.parametrize("changes", [{"is_ending": True}, {"activities": dict.fromkeys(range(4), ("ended", 0))}])
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_at_the_end_no_time_is_left_and_no_rank_is_waited_for(changes: dict[str, Any], size: tuple[int, int]) -> None:
    running = with_process(ranks(), progress=progress_in_epochs())
    text = screen_text(running, *size)
    assert "2 min 10 s left" in text
    assert "others wait for rank 1" in text
    text = screen_text(replace(running, **changes), *size)
    assert "ending" in text
    for word in (" left", "others wait for rank", "holds the others up"):
        assert word not in text


@pytest.mark.parametrize("facts", [screen_in_stall(2), screen_in_stall_playback(2)], ids=["live", "in playback"])
def test_a_stall_keeps_epoch_and_batch_without_a_time_left(facts: ScreenData) -> None:
    facts = with_process(facts, progress=progress_in_epochs())
    assert head(facts, 80, 3)[2].startswith("epoch 3 · ")
    for size in ((80, 24), (120, 40)):
        text = screen_text(facts, *size)
        assert "epoch 3" in text
        assert "412/1,563" in text
        assert " left" not in text


def test_an_evaluation_shows_its_own_batches_and_no_rate_of_the_training() -> None:
    training = Training(mode="single", devices=("cpu:0",), via=None)
    rows = [*training.begin(), *training.run(300)]
    assert (
        "samples/s"
        in head(
            with_process(ScreenData(snapshot_of_rows(rows), training.now, RUN_INFO), progress=progress_in_epochs())
        )[0]
    )
    rows += [*training.step(evaluates=True), *training.step(evaluates=True)]
    facts = ScreenData(snapshot_of_rows(rows), training.now, RUN_INFO, is_command_alive=True)
    facts = with_process(facts, progress=progress_in_epochs(evaluated=12, evaluated_of=40))
    assert "evaluating 12/40" in head(facts)[0]
    for gone in ("samples/s", "412/1,563", "took", "left"):
        assert gone not in head(facts)[0]
    unknown = with_process(facts, progress=progress_in_epochs())
    assert "samples/s" not in head(unknown)[0]


def test_a_look_back_at_a_run_that_is_over_offers_no_stop_and_counts_no_time() -> None:
    facts = slow_loader(10)
    cursor = TimeCursor(facts.now_ns, facts.now_ns + 9 * SECOND, present_ns=facts.now_ns + 9 * SECOND, has_ended=True)
    facts = replace(facts, cursor=cursor)
    assert "ago" not in head(facts)[0]
    assert "at 00:00:" in head(facts)[0]
    words = {hint.key: hint.word for hint in current_key_hints(facts)}
    assert "x" not in words
    assert words["q"] == "close"
    live = replace(facts, cursor=replace(cursor, has_ended=False))
    assert ", 9 s ago" in head(live)[0]
    assert {hint.key: hint.word for hint in current_key_hints(live)}["x"] == "stop"


async def test_after_the_end_the_keys_look_back_and_say_what_was_not_there(tmp_path: Path) -> None:
    async with open_screen(tmp_path, steps=2000) as on:
        on.end()
        await on.shows("● finished")
        await on.press("w")
        await on.shows("no stall was recorded in this run")
        await on.press("less_than_sign")
        await on.shows("g G ends")
        assert " ago" not in on.text()
        assert "x stop" not in on.text()
        await on.press("w")
        await on.shows("no stall was recorded until this time")
