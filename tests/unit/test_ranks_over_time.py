"""Which rank the others waited for, and when."""

from __future__ import annotations

import pytest

from dpmon.model.bucket_answers import BucketAnswers
from dpmon.model.rank_waits import RankWaits, read_rank_waits
from dpmon.record.record_types import Step
from dpmon.ui.panels.panel_ranks import render_full_screen
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.terminal_style import TerminalStyle
from support.history_builders import Recording
from support.rank_builders import ddp_rank_rows
from support.record_builders import SECOND
from support.screen_states import MONO_ASCII, RUN_INFO, STYLE, rows_text


def changing(count: int = 4, steps: int = 600) -> tuple[Recording, int]:
    """Return ranks of which rank 1 is the slowest in the first half, and the last one in the second half."""
    run = Recording()
    rows, end = ddp_rank_rows(count, slow=1, steps=steps, then=(steps // 2, count - 1))
    for rank, own in rows.items():
        run.add(own, rank, rank)
    return run, end


def waits(run: Recording, count: int, end: int, answers: BucketAnswers | None = None, begin_s: int = 0) -> RankWaits:
    store, answers = run.store(), answers or BucketAnswers()
    answers.start_read(store)
    return read_rank_waits(store, answers, {rank: rank for rank in range(count)}, begin_s, end // SECOND + 1)


def test_the_slowest_rank_changes_half_way() -> None:
    run, end = changing()
    found = waits(run, 4, end)
    assert found.width_s == 1
    seconds = sorted(found.shares[1])
    early, late = seconds[: len(seconds) // 2 - 1], seconds[len(seconds) // 2 + 1 :]
    assert len(early) >= 3
    for second in early:
        assert found.shares[1][second] == pytest.approx(6 / 17.6, abs=0.02), "6 ms of a step of 17.6 ms"
        assert found.shares[3][second] < 0.01
    for second in late:
        assert found.shares[3][second] == pytest.approx(6 / 17.6, abs=0.02)
        assert found.shares[1][second] < 0.01
    assert max(found.shares[0].values()) < 0.01


@pytest.mark.parametrize("look", [STYLE, MONO_ASCII])
@pytest.mark.parametrize("width", [60, 116])
def test_the_zoomed_panel_has_a_row_for_each_rank_on_the_time_axis(look: TerminalStyle, width: int) -> None:
    run, end = changing(steps=1300)
    facts = ScreenData(run.state(), end, RUN_INFO, View("replicas", "replicas"), is_command_alive=True)
    text = rows_text(render_full_screen(facts, width, 40, look))
    first = next(at for at, row in enumerate(text) if row.startswith("over time"))
    rows = {row[1:9].strip(): row for row in text[first + 1 : first + 5]}
    assert list(rows) == ["0", "1", "2", "3"]
    cells = {rank: row[9 : width - 7] for rank, row in rows.items()}
    dot = "." if look.is_ascii else "·"
    assert set(cells["0"].strip()) == {dot}
    half = len(cells["1"].rstrip()) // 2
    assert set(cells["1"][: half - 20]) == {"3"}
    assert set(cells["1"][half + 20 :].strip()) == {dot}
    assert set(cells["3"][: half - 20]) == {dot}
    assert set(cells["3"][half + 20 :].strip()) == {"3"}
    assert "17%" in rows["1"]
    assert "now" in text[first + 5]
    assert (
        rows_text(render_full_screen(ScreenData(run.state(), end, RUN_INFO, is_command_alive=True), width, 40, look))
        != text
    )


def test_the_waits_of_a_rank_that_is_late_by_many_seconds_are_read_again() -> None:
    rows, end = ddp_rank_rows(4, slow=1, steps=1600)
    late = [row for row in rows[2] if isinstance(row, Step) and row.start_ns > end - 14 * SECOND]
    run, answers = Recording(), BucketAnswers()
    for rank, own in rows.items():
        run.add([row for row in own if rank != 2 or row not in late], rank, rank)
    missing = waits(run, 4, end, answers)
    assert max(missing.shares[1]) < end // SECOND - 10
    run.add(late, 2, 2)
    found = waits(run, 4, end, answers)
    assert found == waits(run, 4, end)
    assert max(found.shares[1]) == end // SECOND
