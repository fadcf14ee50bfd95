"""Panel 4 as strings: both modes, their comparison, refusals and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpmon.model.comparison_stats import Interval
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.ui.panels import panel_compare
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.time_cursor import TimeCursor
from support.history_builders import snapshot_of_rows
from support.record_builders import SECOND, Training
from support.screen_states import (
    RUN_INFO,
    STYLE,
    exit_info_of,
    rows_text,
    screen_data_of,
    shown_process,
    with_process,
)


def compare_text(facts: ScreenData, width: int, height: int) -> list[str]:
    return rows_text(panel_compare.render_panel(facts, width, height, STYLE))


def test_steps_of_another_batch_are_left_out_and_counted() -> None:
    training = Training(devices=("cuda:0", "cuda:1"), virtual=False, batch=30)
    payloads = [*training.begin(), *training.run(270)]
    training.batch = 12
    payloads += training.run(130)
    training.batch = 30
    payloads += [*training.switch("single"), *training.run(405)]
    facts = ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True, can_toggle=True)
    assert compare_text(facts, 60, 14)[-1] == "excluded: 130 steps of another batch size"


def test_a_comparison_says_what_it_lacks() -> None:
    one = screen_data_of(Training())
    only = compare_text(one, 60, 12)
    assert only[0].split() == ["dp", "×2"], "no column of a mode that was not seen"
    assert only[1].split() == ["median", "step", "2.47", "ms"]
    assert only[-1] == "single was not seen yet: d switches the running job"
    over = replace(one, exit_info=exit_info_of(0, None, 9), can_toggle=False)
    assert compare_text(over, 60, 12)[-1] == "single was not seen"
    played = replace(over, cursor=TimeCursor(5, is_playback=True))
    assert compare_text(played, 62, 12)[-1] == "single was not seen until then"
    training = Training()
    payloads = [*training.begin(), *training.run(60), *training.switch("single"), *training.run(15)]
    few = compare_text(ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True), 60, 12)
    assert any(line.startswith("no verdict yet: it needs 10 more steps in single") for line in few)
    assert not any("×" in line for line in few[1:])


def test_no_ratio_is_shown_without_a_verdict() -> None:
    """Title and sentence agree."""
    training = Training(devices=("cuda:0", "cuda:1"), virtual=False, step_ns=10_000_000)
    payloads = [*training.begin(), *training.run(60)]
    payloads += [*training.switch("single"), *training.run(60)]
    facts = ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True)
    found = panel_compare.shown_stats(facts)
    assert found.speedup is not None
    found = replace(found, speedup=Interval(0.34, 0.2, 1.2), reason="")
    facts = with_process(facts, compared=found)
    rows = rows_text(panel_compare.render_panel(facts, 60, 12, STYLE))
    title, corner = panel_compare.panel_title(facts, folded=False)
    assert plain_text(title) == "4 dp vs. single"
    assert plain_text(corner) == "too uncertain"
    assert plain_text(panel_compare.panel_title(facts, folded=True)[0]) == "4 dp vs. single"
    text = " ".join(rows)
    assert "0.34" not in text
    assert "efficiency" not in text
    assert rows[1].endswith("0.20 to 1.20×")
    assert "is 0.20× to 1.20× as fast as one device: too uncertain for a verdict" in text


def test_virtual_replicas_are_no_measure_of_speed() -> None:
    training = Training(step_ns=20_000_000)
    payloads = [*training.begin(), *training.run(300), *training.switch("single"), *training.run(300)]
    facts = ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True, can_toggle=True)
    text = " ".join(compare_text(facts, 60, 14))
    assert "virtual replicas show behavior, not speed" in text
    zoomed = " ".join(compare_text(replace(facts, view=View(zoom="compare")), 76, 20))
    assert "this shows how dp behaves, not how fast it would be" in zoomed
    assert "without the first 5 steps and the 5 after each switch" in zoomed
    assert "efficiency" not in text


def test_the_reason_of_a_refusal_stays_on_the_panel() -> None:
    """It stays until the next answer, while the message in the status row disappears after some seconds."""
    training = Training(mode="single", devices=("cpu:0",))
    reason = "BatchNorm over a chunk of one row " * 9
    payloads = [*training.begin(), *training.run(60), training.mode_event("user", reason), *training.run(2000)]

    def picture(*more: Row, **changes: Any) -> list[str]:
        facts = ScreenData(
            snapshot_of_rows([*payloads, *more]), training.now, RUN_INFO, is_command_alive=True, can_toggle=True
        )
        return compare_text(replace(facts, **changes), 60, 12)

    lines = picture()
    assert lines[-3].startswith("dp refused: BatchNorm over a chunk")
    assert lines[-1].endswith("…")
    assert "not seen yet" not in " ".join(lines), "the refusal says why"
    assert " ".join(picture(view=View(zoom="compare"))).count("BatchNorm") == 9
    over = picture(exit_info=exit_info_of(0, None, 9), can_toggle=False)
    assert over[-3].startswith("dp refused: ")
    assert "refused" not in " ".join(picture(training.mode_event("user")))
    granted = [*training.switch("dp"), *training.run(60)]
    assert "refused" not in " ".join(picture(*granted))


def test_a_refusal_names_its_root_where_there_are_several() -> None:
    refused = Event("mode", {"process": 0, "mode": "single", "refused": "no parameters", "root": "Loss"})
    facts = screen_data_of(Training(mode="single"), 40, more=[refused])
    assert "dp refused: no parameters" in compare_text(facts, 60, 12)
    (track,) = shown_process(facts).calls.values()
    facts = with_process(facts, calls={**shown_process(facts).calls, ("Other", None): track})
    assert "dp refused for Loss: no parameters" in compare_text(facts, 60, 12)
    last = shown_process(facts).last_step
    assert last is not None
    facts = with_process(facts, last_step=last._replace(mode="dp"))
    assert "refused" not in " ".join(compare_text(facts, 60, 12)), "the others have what was asked for"
    assert "dp refused for Loss" in " ".join(compare_text(replace(facts, view=View(zoom="compare")), 60, 20))


@pytest.mark.parametrize("later_s", [0, 900])
def test_each_mode_has_its_own_peak_of_memory(later_s: int) -> None:
    training = Training(mode="single", step_ns=SECOND, devices=("cuda:0", "cuda:1"), virtual=False)
    events, highest = training.begin()[:1], 0
    for mode, peak, seconds in (("single", 300, 100), ("dp", 700, 100), ("dp", 500, later_s)):
        events += training.switch(mode)
        beside = {"process": 0, "t_s": training.now / SECOND, "step": training.steps, "mode": "single", "root": "Head"}
        events.append(Event("mode", {**beside, "devices": ["cuda:0"], "virtual": False}))
        for second in range(seconds):
            events += training.step()
            highest = max((peak + second % 100) << 20, highest)
            one = {"device": "cuda:0", "peak_bytes": highest}
            events.append(Event("memory", {"process": 0, "rank": None, "t_s": training.now / SECOND, "devices": [one]}))
    facts = ScreenData(snapshot_of_rows(events), training.now, RUN_INFO, is_command_alive=True)
    found = panel_compare.shown_stats(facts).memory
    assert found["dp"]["cuda:0"] == 799 << 20
    assert found["single"]["cuda:0"] == pytest.approx(399 << 20, rel=0.2)
    assert "799 MiB" in " ".join(compare_text(facts, 60, 14))
