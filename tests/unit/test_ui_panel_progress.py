"""Panel 6 and the header's part of it as strings: epochs, time left, losses; what dpmon will do; what happened."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from dpmon.model.epoch_progress import Progress
from dpmon.model.loss_curves import LossCurve
from dpmon.store.loss_table import InvalidLoss
from dpmon.ui.chart import line_chart
from dpmon.ui.panels import panel_progress
from dpmon.ui.panels.panel_status import render_panel
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.styled_rows import plain_text, row_width
from support.record_builders import SECOND, Training
from support.screen_states import (
    MONO_ASCII,
    STYLE,
    TWO_FINDINGS,
    exit_info_of,
    loss_curve,
    progress_in_epochs,
    rows_text,
    screen_data_of,
    screen_text,
    with_process,
)


def facts(progress: Progress | None = None, *curves: LossCurve, **changes: Any) -> ScreenData:
    found = screen_data_of(Training(step_ns=100_000_000), **changes)
    found = with_process(found, progress=Progress() if progress is None else progress)
    return replace(found, state=found.state.with_facts(losses=curves))


def drawn(found: ScreenData, width: int = 56, height: int = 12) -> list[str]:
    return rows_text(panel_progress.render_panel(found, width, height, STYLE))


# ------------------------------------------------------------------------------------------------ epochs


def test_the_bar_has_the_time_left_and_the_epochs_are_listed_newest_first() -> None:
    found = facts(progress_in_epochs())
    assert [plain_text(row) for row in panel_progress.panel_title(found, False)] == [
        "6 Progress · epoch 3",
        "  412/1,563",
    ]
    assert [plain_text(row) for row in panel_progress.panel_title(found, True)] == ["6 Progress", "412/1,563"]
    assert drawn(found) == [
        "━━━━━━━━────────────────────────   26%   2 min 10 s left",
        "epoch        took  evaluation  gap before",
        "    2  2 min 51 s      12.0 s      500 ms",
        "    1  2 min 55 s      12.0 s           –",
    ]
    assert panel_progress.preferred_height(found) == 4


def test_a_large_uncertainty_stands_beside_the_time_left_but_not_in_the_header() -> None:
    found = facts(progress_in_epochs(error_ns=40e9))
    assert drawn(found)[0].endswith("2 min 10 s ± 40 s left")
    assert "±" not in plain_text(render_panel(found, 200, 2)[0])


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"batches": None, "absent": {"batches": "an IterableDataset"}}, "no length: an IterableDataset"),
        ({"batch": None, "absent": {"batch": "it is not known yet"}}, "it is not known yet"),
        ({"epoch": None, "absent": {"epoch": "no batch of a DataLoader"}}, "no batch of a DataLoader"),
    ],
)
def test_what_is_unknown_has_a_row_with_the_reason(changes: dict[str, Any], row: str) -> None:
    assert drawn(facts(progress_in_epochs(left_ns=None, error_ns=None, **changes)))[0] == row


def test_the_panel_applies_when_it_can_have_a_value() -> None:
    assert not panel_progress.is_shown(facts())
    assert panel_progress.is_shown(facts(progress_in_epochs()))
    assert panel_progress.is_shown(facts(None, loss_curve()))
    assert not panel_progress.is_shown(facts(None, LossCurve(0, "train.py:88", why="several values")))


# ------------------------------------------------------------------------------------------------ losses


def test_the_loss_has_its_last_and_smoothed_value_and_a_curve() -> None:
    rows = drawn(facts(progress_in_epochs(epochs=()), loss_curve()), height=7)
    assert rows[1].startswith("loss 0.412   smoothed 0.431 ")
    assert rows[1].endswith("since 00:00:02")
    assert len(rows) == 7
    assert rows[2].startswith("  1.863 "), "the scale ends at the highest value"
    assert rows[-1].startswith("  0.108 ")
    assert all(set(row[8:]) <= set(map(chr, range(0x2800, 0x2900))) | {" "} for row in rows[2:])
    beside = drawn(facts(progress_in_epochs(epochs=()), loss_curve()), height=2)
    assert len(beside) == 2
    assert any("\u2800" < sign < "\u2900" for sign in beside[1]), "in the same row where there is no other"


@pytest.mark.parametrize(("value", "text"), [(nan, "NaN"), (inf, "inf"), (-inf, "-inf")])
def test_a_loss_that_is_no_number_stands_out(value: float, text: str) -> None:
    assert panel_progress.loss_span(value, 5) == (text.ljust(5), "bad")
    found = facts(progress_in_epochs(), loss_curve(last=value, bad=20))
    found = replace(found, state=found.state.with_facts(unfit=InvalidLoss(0, "train.py:88", 212, 20 * SECOND, value)))
    rows = panel_progress.render_panel(found, 56, 12, STYLE)
    assert any(("✗", "bad") in row for row in rows)
    header = [plain_text(row) for row in render_panel(found, 120, 2)]
    assert f"loss {text}" in header[0]
    assert "first seen in step 212 (train.py:88)" in header[1]
    over = replace(found, exit_info=exit_info_of(0, None, 40 * SECOND), is_command_alive=False)
    assert "first seen in step 212" in plain_text(render_panel(over, 120, 2)[1]), "no less after the end"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.41213, "0.412"), (2.3026, "2.303"), (23.026, "23.03"), (230.26, "230.3"), (1e-05, "1.0e-05"), (-1.5, "-1.500")],
)
def test_a_loss_has_few_digits(value: float, text: str) -> None:
    assert panel_progress.loss_span(value, 0)[0] == text


def test_a_curve_goes_through_its_points() -> None:
    points = [(0.0, 0.0), (0.5, 1.0), (0.99, 0.5)]
    assert rows_text(line_chart([(points, "")], (), 4, 2, 0.0, 1.0, STYLE)) == [" ⢠⠟⣆", "⣰⠋ ⠈"]
    assert rows_text(line_chart([(points, "")], [0.25], 5, 3, 0.0, 1.0, MONO_ASCII)) == ["  ***", " ** *", "*✗"]
    assert rows_text(line_chart([([(0.5, 7.0)], "")], (), 5, 1, 7.0, 7.0, MONO_ASCII)) == ["  *"]


# ------------------------------------------------------------------------------------------------ the header


def test_the_header_says_how_far_it_is_and_the_loss() -> None:
    found = facts(progress_in_epochs(), loss_curve())
    wide = plain_text(render_panel(found, 140, 2)[0])
    assert "epoch 3 ·   412/1,563 · 2 min 10 s left" in wide
    assert "samples/s  sampled loss 0.412" in wide
    over = replace(found, exit_info=exit_info_of(0), is_command_alive=False)
    assert "last loss 0.412" in plain_text(render_panel(over, 140, 2)[0])
    assert "step" not in plain_text(render_panel(found, 120, 2)[0])
    assert "step 300" in plain_text(render_panel(found, 120, 2)[1]), "what has no room above"
    narrow = [plain_text(row) for row in render_panel(found, 80, 3)]
    assert narrow[1].startswith(" epoch 3 ·   412/1,563 · 2 min 10 s left ")
    assert "loss 0.412" in narrow[1]
    assert plain_text(render_panel(found, 40, 3)[1]).startswith(" epoch 3 ·   412/1,563  ")


# ------------------------------------------------------------------------------------------------ before and after


@pytest.mark.parametrize("look", [STYLE, MONO_ASCII], ids=["color", "mono ascii"])
def test_no_row_is_too_wide(look: Any) -> None:
    hostile = loss_curve("\x1b[2J中文.py:1" * 9)
    cases = [
        facts(progress_in_epochs(), loss_curve(), hostile),
        facts(progress_in_epochs(batches=None, absent={"batches": "why " * 50})),
        facts(
            progress_in_epochs(),
            loss_curve(bad=3),
            exit_info=exit_info_of(1),
            is_command_alive=False,
            findings=TWO_FINDINGS,
        ),
    ]
    for found in cases:
        for width in (20, 36, 56, 116):
            for height in (1, 2, 3, 5, 9, 30):
                for row in panel_progress.render_panel(found, width, height, look):
                    assert row_width(row) <= max(width, 60), "a longer one is cut"
        for size in ((80, 24), (120, 40)):
            text = screen_text(replace(found, view=View("progress", "progress")), *size, look=look)
            assert {len(line) for line in text.splitlines()} >= {size[0]}
            assert "\x1b" not in text
