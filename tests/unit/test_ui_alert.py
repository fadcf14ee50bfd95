"""The alert of the screen's terminal: when, and that no name in it steers the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpmon.config import ALERTS
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.ui.alert import _SEQUENCES, Alert
from dpmon.ui.screen_data import ScreenData
from support.history_builders import snapshot_of_rows
from support.record_builders import SECOND, Training
from support.screen_states import RUN_INFO, exit_info_of


def scenes() -> dict[str, ScreenData]:
    """One picture of a run in each state."""
    training = Training()
    rows: list[Row] = [*training.begin(), *training.run(50)]
    at_s = training.now / SECOND
    name = "\x1b]0;evil\x07;x"
    stall = Event("stall", {"t_s": at_s, "since_s": at_s, "text": f"in {name}", "ranks": []})
    info = replace(RUN_INFO, script=f"{name}.py", options={})
    doing = {0: ("forward", training.now)}
    goes_on = ScreenData(snapshot_of_rows(rows), training.now, info, is_command_alive=True, activities=doing)
    return {
        "training": goes_on,
        "reading": replace(goes_on, is_reading=True),
        "stalled": replace(goes_on, state=snapshot_of_rows({0: rows, -1: list[Row]([stall])})),
        "ended": replace(goes_on, exit_info=exit_info_of(0)),
    }


@pytest.mark.parametrize(
    ("words", "rings"),
    [
        (["training", "training", "training"], 0),
        (["stalled"], 0),
        (["ended"], 0),
        (["training", "stalled", "stalled"], 1),
        (["training", "stalled", "training", "stalled"], 3),
        (["training", "ended", "ended"], 1),
        (["stalled", "ended"], 1),
        (["reading", "stalled"], 0),
    ],
)
def test_the_terminal_rings_when_a_stall_or_the_end_comes(words: list[str], rings: int) -> None:
    pictures, alert = scenes(), Alert("bell")
    sent = "".join(alert.bytes_to_send(pictures[word]) for word in words)
    assert sent == "\a" * rings


@pytest.mark.parametrize(("form", "head"), [("osc9", "\x1b]9;"), ("osc777", "\x1b]777;notify;dpmon;")])
def test_a_notification_says_what_happened_and_nothing_in_it_ends_it(form: str, head: str) -> None:
    pictures, alert = scenes(), Alert(form)
    alert.bytes_to_send(pictures["training"])
    sent = alert.bytes_to_send(pictures["stalled"])
    assert sent.startswith(head)
    assert sent.endswith("\a")
    inside = sent.removeprefix(head)[:-1]
    assert " stalled: in " in inside
    assert inside.isprintable()
    assert ";" not in inside


def test_each_value_of_the_setting_has_a_form() -> None:
    assert set(_SEQUENCES) == set(ALERTS)
