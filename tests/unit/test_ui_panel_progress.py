"""Panel 6 and the header's part of it as strings: epochs, time left, losses; what dpmon will do; what happened."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from situations import INFO, LOOK, MONO_ASCII, exit_of, facts_of, rows_text, text_of, with_process
from stuck_ranks import stalled
from synthetic import SECOND, Training

from dpmon.model.epoch_progress import Epoch, Progress
from dpmon.model.finding_text import Finding
from dpmon.model.loss_curves import LossCurve
from dpmon.model.run_snapshot import RunSnapshot
from dpmon.store.query_results import InvalidLoss, LossBin
from dpmon.ui.chart import line_chart
from dpmon.ui.panels import panel_progress
from dpmon.ui.panels.panel_status import render_panel
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.styled_rows import plain_text, row_width
from dpmon.ui.terminal_style import ASCII, UNICODE

EPOCHS = (
    Epoch(1, 0, 175 * SECOND, 1563, 1563, 12 * SECOND, None),
    Epoch(2, 187 * SECOND, 358 * SECOND, 1563, 1563, 12 * SECOND, SECOND // 2),
    Epoch(3, 371 * SECOND, 420 * SECOND, 412, 1563, 0, SECOND // 2),
)


def epochs(**changes: Any) -> Progress:
    found = Progress(0, 3, 412, 1563, 130e9, 4e9, 420 * SECOND, EPOCHS)
    return replace(found, **changes)


def losses(place: str = "train.py:88", last: float = 0.4121, bad: int | None = None) -> LossCurve:
    bins = [
        LossBin(at, 1, value, value, value, 0) if at != bad else LossBin(at, 0, None, None, None, 1)
        for at in range(30)
        for value in [2.3 * 0.9**at]
    ]
    return LossCurve(0, place, tuple(bins), 1, last, 0.4309, 300, 30 * SECOND)


def facts(progress: Progress | None = None, *curves: LossCurve, **changes: Any) -> ScreenData:
    found = facts_of(Training(step_ns=100_000_000), **changes)
    found = with_process(found, progress=Progress() if progress is None else progress)
    return replace(found, state=replace(found.state, losses=curves))


def drawn(found: ScreenData, width: int = 56, height: int = 12) -> list[str]:
    return rows_text(panel_progress.render_panel(found, width, height, LOOK))


# ------------------------------------------------------------------------------------------------ epochs


def test_the_bar_has_the_time_left_and_the_epochs_are_listed_newest_first() -> None:
    found = facts(epochs())
    assert [plain_text(row) for row in panel_progress.panel_title(found, LOOK, False)] == [
        "6 Progress · epoch 3",
        "  412/1,563",
    ]
    assert [plain_text(row) for row in panel_progress.panel_title(found, LOOK, True)] == ["6 Progress", "412/1,563"]
    assert drawn(found) == [
        "━━━━━━━━────────────────────────  26%   2 min 10 s left",
        "epoch        time  evaluation     between",
        "    2  2 min 51 s      12.0 s      500 ms",
        "    1  2 min 55 s      12.0 s",
    ]
    assert panel_progress.preferred_height(found) == 4


def test_a_large_uncertainty_stands_beside_the_time_left_but_not_in_the_header() -> None:
    found = facts(epochs(error_ns=40e9))
    assert drawn(found)[0].endswith("2 min 10 s ± 40 s left")
    assert "±" not in plain_text(render_panel(found, 200, 2, LOOK)[0])


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"batches": None, "absent": {"batches": "an IterableDataset"}}, "no length: an IterableDataset"),
        ({"batch": None, "absent": {"batch": "it is not known yet"}}, "it is not known yet"),
        ({"epoch": None, "absent": {"epoch": "no batch of a DataLoader"}}, "no batch of a DataLoader"),
    ],
)
def test_what_is_unknown_has_a_row_with_the_reason(changes: dict[str, Any], row: str) -> None:
    assert drawn(facts(epochs(left_ns=None, error_ns=None, **changes)))[0] == row


def test_a_column_that_no_epoch_has_is_left_out() -> None:
    alone = tuple(one._replace(evaluation_ns=0, pause_ns=None) for one in EPOCHS)
    assert drawn(facts(epochs(epochs=alone)))[1:] == ["epoch        time", "    2  2 min 51 s", "    1  2 min 55 s"]
    assert len(drawn(facts(epochs(epochs=EPOCHS[2:])))) == 1


def test_the_panel_applies_when_it_can_have_a_value() -> None:
    assert not panel_progress.is_shown(facts())
    assert panel_progress.is_shown(facts(epochs()))
    assert panel_progress.is_shown(facts(None, losses()))
    assert not panel_progress.is_shown(facts(None, LossCurve(0, "train.py:88", why="several values")))


# ------------------------------------------------------------------------------------------------ losses


def test_the_loss_has_its_last_and_smoothed_value_and_a_curve() -> None:
    rows = drawn(facts(epochs(epochs=()), losses()), height=7)
    assert rows[1].startswith("loss 0.412   smoothed 0.431 ")
    assert rows[1].endswith("since 00:00:02")
    assert len(rows) == 7
    assert rows[2].startswith("  1.863 "), "the scale ends at the highest value"
    assert rows[-1].startswith("  0.108 ")
    assert all(set(row[8:]) <= set(map(chr, range(0x2800, 0x2900))) | {" "} for row in rows[2:])
    beside = drawn(facts(epochs(epochs=()), losses()), height=2)
    assert len(beside) == 2
    assert any("\u2800" < sign < "\u2900" for sign in beside[1]), "in the same row where there is no other"


@pytest.mark.parametrize(("value", "text"), [(nan, "NaN"), (inf, "inf"), (-inf, "-inf")])
def test_a_loss_that_is_no_number_stands_out(value: float, text: str) -> None:
    assert panel_progress.loss_span(value, 5) == (text.ljust(5), "bad")
    found = facts(epochs(), losses(last=value, bad=20))
    found = replace(found, state=replace(found.state, unfit=InvalidLoss(0, "train.py:88", 212, 20 * SECOND, value)))
    rows = panel_progress.render_panel(found, 56, 12, LOOK)
    assert any(("✗", "bad") in row for row in rows)
    header = [plain_text(row) for row in render_panel(found, 120, 2, LOOK)]
    assert f"loss {text}" in header[0]
    assert "first seen in step 212 (train.py:88)" in header[1]
    over = replace(found, ended=exit_of(0, None, 40 * SECOND), alive=False)
    assert "first seen in step 212" in plain_text(render_panel(over, 120, 2, LOOK)[1]), "no less after the end"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.41213, "0.412"), (2.3026, "2.303"), (23.026, "23.03"), (230.26, "230.3"), (1e-05, "1.0e-05"), (-1.5, "-1.500")],
)
def test_a_loss_has_few_digits(value: float, text: str) -> None:
    assert panel_progress.loss_span(value, 0)[0] == text


def test_a_gan_has_a_curve_for_each_line() -> None:
    found = facts(None, losses(), losses("train.py:99", 1.5))
    rows = drawn(found, 70, 12)
    assert [row.partition("smoothed")[0].strip() for row in rows if "smoothed" in row] == ["loss 0.412", "loss 1.500"]
    assert [row.split()[-3] for row in rows if "smoothed" in row] == ["train.py:88", "train.py:99"]
    assert "loss 0.412  1.500" in plain_text(render_panel(found, 120, 2, LOOK)[0])


def test_a_curve_goes_through_its_points() -> None:
    points = [(0.0, 0.0), (0.5, 1.0), (0.99, 0.5)]
    assert rows_text(line_chart([(points, "")], (), 4, 2, 0.0, 1.0, UNICODE)) == [" ⢠⠟⣆", "⣰⠋ ⠈"]
    assert rows_text(line_chart([(points, "")], [0.25], 5, 3, 0.0, 1.0, ASCII)) == ["  ***", " ** *", "*x"]
    assert rows_text(line_chart([([(0.5, 7.0)], "")], (), 5, 1, 7.0, 7.0, ASCII)) == ["  *"]


# ------------------------------------------------------------------------------------------------ the header


def test_the_header_says_how_far_it_is_and_the_loss() -> None:
    found = facts(epochs(), losses())
    wide = plain_text(render_panel(found, 140, 2, LOOK)[0])
    assert "epoch 3 ·   412/1,563 · 2 min 10 s left" in wide
    assert "samples/s  loss 0.412" in wide
    assert "step" not in plain_text(render_panel(found, 120, 2, LOOK)[0])
    assert "step 300" in plain_text(render_panel(found, 120, 2, LOOK)[1]), "what has no room above"
    narrow = [plain_text(row) for row in render_panel(found, 80, 3, LOOK)]
    assert narrow[1].startswith(" epoch 3 ·   412/1,563 · 2 min 10 s left ")
    assert "loss 0.412" in narrow[1]
    assert plain_text(render_panel(found, 40, 3, LOOK)[1]).startswith(" epoch 3 ·   412/1,563  ")


def test_the_header_of_a_stall_has_no_time_left() -> None:
    found = with_process(stalled(2), progress=epochs())
    assert "epoch 3 ·   412/1,563  ddp ×2" in plain_text(render_panel(found, 140, 2, LOOK)[0])


def test_the_figures_of_the_header_stand_still() -> None:
    places = set()
    for batch, left in ((9, 175e9), (412, 130e9), (1563, None)):
        at_ns = EPOCHS[2].begin_ns + 175 * SECOND - int(left or 0)
        found = facts(epochs(batch=batch, left_ns=left, at_ns=at_ns), losses())
        row = plain_text(render_panel(found, 140, 2, LOOK)[0])
        places.add((row.index("epoch"), row.index("/1,563"), row.index("samples/s"), row.index("loss")))
    assert len(places) == 1


def test_an_epoch_that_has_used_all_batches_tells_how_long_it_took() -> None:
    done = epochs(batch=1563, left_ns=None, epochs=EPOCHS[:2])
    assert "1,563/1,563 · took 2 min 51 s" in plain_text(render_panel(facts(done), 140, 2, LOOK)[0])


# ------------------------------------------------------------------------------------------------ before and after


def test_before_the_first_step_it_tells_what_dpmon_will_do() -> None:
    info = replace(INFO, options={"mode": "dp", "replicas": 4})
    found = ScreenData(RunSnapshot(), SECOND, info, alive=True)
    assert panel_progress.is_shown(found)
    assert drawn(found) == [
        "mode     dp: replicas on several devices",
        "replicas 4",
    ]
    assert panel_progress.preferred_height(found) == 2
    assert not panel_progress.is_shown(replace(found, alive=False, ended=exit_of(1)))
    assert drawn(ScreenData(RunSnapshot(), 0)) == []


FINDINGS = (
    Finding("data", "The steps wait for data for 34% of their time.", "34%", "more workers", 0.34, 0.3),
    Finding("spread", "Step times vary.", "p95", "batches of one size", 0.1),
)


def test_after_the_end_the_findings_come_first_each_with_its_advice() -> None:
    found = facts(epochs(left_ns=None), losses(), ended=exit_of(1), alive=False, findings=FINDINGS)
    assert [plain_text(row) for row in panel_progress.panel_title(found, LOOK, False)] == [
        "6 What happened",
        "2 findings",
    ]
    rows = drawn(found, 70, 16)
    assert rows[0] == "1 The steps wait for data for 34% of their time."
    assert rows[1].startswith("  try (steps at most ")
    assert "2 Step times vary." in rows
    assert any(row.startswith("loss 0.412") for row in rows)
    assert panel_progress.is_shown(replace(found, state=replace(found.state, losses=())))
    nothing = replace(found, findings=())
    assert drawn(nothing)[0] == "no findings"
    assert plain_text(panel_progress.panel_title(replace(found, findings=None), LOOK, False)[0]).startswith(
        "6 Progress"
    )


@pytest.mark.parametrize("look", [LOOK, MONO_ASCII], ids=["color", "mono ascii"])
def test_no_row_is_too_wide(look: Any) -> None:
    hostile = losses("\x1b[2J中文.py:1" * 9)
    cases = [
        facts(epochs(), losses(), hostile),
        facts(epochs(batches=None, absent={"batches": "why " * 50})),
        facts(epochs(), losses(bad=3), ended=exit_of(1), alive=False, findings=FINDINGS),
    ]
    for found in cases:
        for width in (20, 36, 56, 116):
            for height in (1, 2, 3, 5, 9, 30):
                for row in panel_progress.render_panel(found, width, height, look):
                    assert row_width(row) <= max(width, 60), "a longer one is cut"
        for size in ((80, 24), (120, 40)):
            text = text_of(replace(found, view=View("progress", "progress")), *size, look=look)
            assert {len(line) for line in text.splitlines()} >= {size[0]}
            assert "\x1b" not in text
