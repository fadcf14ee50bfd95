"""Waits and communication of ranks on the screen."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from dpmon.model.communication import Wrapper, build_communication, format_operations
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.step_timeline import last_step_timeline
from dpmon.record.record_types import BUCKET, Operation
from dpmon.store.collectives import CollectiveSums
from dpmon.store.tally import Tally
from dpmon.ui.panels import panel_batch, panel_communication, panel_ranks, panel_stall
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.panels.panel_status import render_panel
from dpmon.ui.screen_data import ScreenData, View, describe_activity
from dpmon.ui.step_waterfall import _Scale, bucket_row
from dpmon.ui.styled_rows import plain_text
from support.rank_builders import record_ddp_ranks
from support.record_builders import SECOND, Training
from support.screen_states import RUN_INFO, STYLE, paint_screen
from support.screen_states import rows_text as texts


@lru_cache(maxsize=16)
def _facts(count: int, **how: Any) -> ScreenData:
    run, now = record_ddp_ranks(count, **how)
    return ScreenData(run.state(), now, RUN_INFO, is_command_alive=True)


def facts_of(count: int, slow: int | tuple[int, ...] | None = None, **how: Any) -> ScreenData:
    wrapper = how.pop("wrapper", None)
    if wrapper is None:
        return _facts(count, slow=slow, steps=120, **how)
    run, now = record_ddp_ranks(count, slow=slow, steps=120, wrapper=wrapper, **how)
    return ScreenData(run.state(), now, RUN_INFO, is_command_alive=True)


def full(facts: ScreenData) -> ScreenData:
    """Return the facts with panel 2 in full screen, where it has the whole sentence about a slow rank."""
    return replace(facts, view=View(zoom="replicas"))


def rank_lines(text: list[str]) -> dict[int, list[str]]:
    """Return the words of the rows of ranks."""
    words = [line.replace("▸", " ").split() for line in text]
    return {int(line[0]): line for line in words if line and line[0].isdigit() and line[1].startswith("cuda:")}


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_the_cause_is_named_in_panel_and_status(phase: str) -> None:
    facts = facts_of(3, slow=1, phase=phase, noise=0.0)
    slow = facts.state.straggler
    assert slow is not None
    assert (slow.rank, slow.phase) == (1, phase)
    said = " ".join(texts(panel_ranks.render_panel(full(facts), 76, 12, STYLE)))
    assert f"rank 1 delays the others by 6.00 ms per step (34%): its {phase} takes" in said
    assert "others wait for rank 1: 6.00 ms (34%), " + phase in plain_text(render_panel(facts, 120, 2)[1])


def test_no_rank_is_named_if_all_are_equal() -> None:
    facts = facts_of(4)
    said = texts(panel_ranks.render_panel(facts, 76, 12, STYLE))
    assert "no straggler (last 115 steps)" in said
    assert not any("▸" in line for line in said)
    assert "others wait" not in plain_text(render_panel(facts, 120, 2)[1])


STALL = "rank 1 in checkpoint (train.py:12); ranks 0, 2 wait in backward (train.py:90)"


def stalled(facts: ScreenData, since_ns: int) -> ScreenData:
    """The facts in a stall."""
    seen = RecordedStall(since_ns, since_ns + 10 * SECOND, record={"text": STALL})
    return replace(facts, state=facts.state.with_facts(stalls=(seen,)))


def test_panel_and_status_of_a_hanging_run_say_where_its_ranks_are() -> None:
    """A straggler of the last steps is not the cause of the hang."""
    facts = facts_of(3, slow=1)
    facts = stalled(replace(facts, now_ns=facts.now_ns + 34 * SECOND), facts.now_ns)
    assert " ".join(texts(panel_stall.render_panel(full(facts), 76, 12, STYLE))) == STALL
    assert STALL in plain_text(render_panel(facts, 120, 2)[1])
    assert describe_activity(facts) == ("STALLED", "bad", "34 s")


def test_several_slow_ranks_are_all_marked_and_stay_in_a_small_panel() -> None:
    facts = facts_of(8, slow=(5, 7), noise=0.0)
    text = texts(panel_ranks.render_panel(facts, 76, 20, STYLE))
    assert [line.split()[1] for line in text[1:9] if line[0] == "▸"] == ["5", "7"]
    text = texts(panel_ranks.render_panel(full(facts), 76, 20, STYLE))
    assert any(line.startswith("ranks 5 and 7 delay the others by 6.00 ms per step") for line in text)
    assert "others wait for ranks 5 and 7: 6.00 ms" in plain_text(render_panel(facts, 120, 2)[1])
    for height in (6, 9):
        text = texts(panel_ranks.render_panel(facts, 76, height, STYLE))
        assert {5, 7} <= rank_lines(text[:height]).keys(), height
        assert set(rank_lines(text)) == set(range(8))
    assert rank_lines(texts(panel_ranks.render_panel(facts, 76, 4, STYLE))[:4]).keys() == {0, 5, 7}
    assert rank_lines(texts(panel_ranks.render_panel(facts, 76, 2, STYLE))[:2]).keys() == {5}, "the slowest one"
    many = texts(panel_ranks.render_panel(facts_of(20, slow=(5, 7), noise=0.0), 56, 40, STYLE))
    assert many[0].startswith("   0 ·····▸·▸ ········")
    assert list(rank_lines(many))[:2] == [5, 7]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("count", [2, 4, 8, 64])
def test_the_straggler_is_told_once_and_its_rows_are_visible(size: tuple[int, int], count: int) -> None:
    facts = facts_of(count, slow=count - 1)
    text = texts(paint_screen(facts, OutputView(), *size, STYLE))
    name = f"rank {count - 1}"
    assert sum(f"others wait for {name}" in line or f"{name} delays" in line for line in text) == 1
    assert any(f"▸ {count - 1:>3}" in line or f"▸{count - 1:>4}" in line for line in text), text
    if size != (80, 24):
        assert any(f"{name} " in line and line.rstrip("│ ").endswith("ms") for line in text), "its step in panel 3"
    warned = replace(facts, view=View(message="something else"))
    text = texts(paint_screen(warned, OutputView(), *size, STYLE))
    told = sum(f"others wait for {name}" in line or f"{name} delays" in line for line in text)
    assert told == (0 if (count, size) == (64, (80, 24)) else 1), "panel 2 says it while the header says something else"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"world": 4}, "2 of 4 ranks are recorded"),
        ({"wrapper": {"absent": {"sync": "this torch notes nothing"}}, "passes": ((0, 1),)}, "this torch notes"),
        ({"passes": ((0, 1),)}, "no step is recorded yet in which all ranks averaged"),
    ],
)
def test_unknown_waits_are_shown_with_a_reason(how: dict[str, Any], reason: str) -> None:
    facts = facts_of(2, **how)
    text = texts(panel_ranks.render_panel(facts, 76, 12, STYLE))
    assert text[0].split() == ["rank", "device", "received", "returned", "rows", "forward", "backward", "step"]
    assert any(reason in line for line in text)
    assert sum("of 4 ranks" in line for line in text) == ("world" in how), "only one line counts the ranks"
    assert reason in " ".join(line.strip() for line in texts(panel_communication.render_panel(facts, 120, 12, STYLE)))


def test_waits_in_the_forward_are_shown() -> None:
    facts = facts_of(2, wrapper={"broadcast_buffers": True, "sync_batch_norm": True})
    text = " ".join(texts(panel_ranks.render_panel(facts, 56, 12, STYLE)))
    assert "SyncBatchNorm and broadcast_buffers make the ranks wait for each other in the forward, too" in text


def test_the_communication_panel_shows_times_buckets_and_passes() -> None:
    facts = facts_of(4, slow=2, passes=((0, 1), (1, 0)), wrapper={"comm_hook": "bf16_compress_hook"})
    text = texts(panel_communication.render_panel(facts, 116, 30, STYLE))
    found = {line.split()[0]: line for line in text}
    assert found["exposed"].startswith("exposed  2.10 ms per update, "), "half of the steps average nothing"
    assert found["hidden"] == "hidden   74% of 8.00 ms (torch: iteration 300, rank 0)"
    assert found["buckets"] == "buckets  6: 1.00 MiB, 25.0 MiB ×5"
    assert found["group"] == "group    4 ranks, nccl, communication hook bf16_compress_hook"
    assert found["passes"] == "passes   1.00 synced per update, 1.00 under no_sync"
    title, corner = panel_communication.panel_title(facts, False)
    assert plain_text(title) == "4 Communication"
    assert plain_text(corner).startswith("exposed 2.10 ms")


def test_the_last_step_shows_when_buckets_were_ready_and_what_was_exposed() -> None:
    facts = facts_of(2, slow=1)
    process = facts.process
    assert process is not None
    timeline = last_step_timeline(process)
    assert timeline is not None
    scale = _Scale(10, 100, 20e6, STYLE)
    row = plain_text(bucket_row(scale, timeline))
    assert row.startswith("buckets   2 buckets ready ↓")
    line = row[10:]
    sync = next(piece for piece in timeline.main if piece.phase == "sync")
    assert line.rindex("↓") == int(sync.start_ns / 20e6 * 100)
    assert line.rindex("▤") == round(sync.end_ns / 20e6 * 100) - 1
    assert line.count("▤") - ("exposed ▤" in line) == pytest.approx(10.5, abs=1), "2.1 of 20 ms"
    unknown = plain_text(bucket_row(scale, timeline._replace(step=timeline.step._replace(exposed_ns=None))))
    assert "░" not in unknown
    assert "▤" not in unknown
    runs = [(BUCKET, at, 0) for at in (1_000_000, 1_000_001, 5_000_000)]
    several = plain_text(bucket_row(scale, timeline._replace(step=timeline.step._replace(runs=runs))))
    assert "2" in several[10:20], "two buckets in one cell"
    drawn = texts(panel_batch.render_panel(facts, 116, 16, STYLE))
    assert sum(line.startswith("buckets ") for line in drawn) == 1


def test_the_last_steps_of_all_ranks_leave_the_synchronized_pass_together_the_straggler_first() -> None:
    facts = facts_of(4, slow=3)
    text = texts(panel_batch.render_panel(facts, 116, 20, STYLE))
    first = next(at for at, row in enumerate(text) if row.startswith("last step "))
    scale, *rows = (row for row in text[first:] if not row.startswith("buckets "))
    assert [row[:6] for row in rows] == ["rank 3", "rank 0", "rank 1", "rank 2"]
    assert len({row.index("Opt") for row in rows}) == 1, "the optimizer follows the pass"
    ticks = [float(word.rstrip(" ms─")) for word in scale.split("├")[2:]]
    assert ticks == [3 * number for number in range(1, len(ticks) + 1)]
    *_, last = (at for at, cell in enumerate(scale) if cell == "├")
    begin, room = 10, 116 - 10 - 9
    longest = max(
        process.last_step.wall_ns for process in facts.state.training_processes if process.last_step is not None
    )
    assert last - begin == int(ticks[-1] * 1e6 / longest * room), "the longest step fills the width"


def test_the_ranks_of_a_collective_are_named_where_no_row_says_it() -> None:
    sums = (Operation("all_reduce", 8, 6, 0), Operation("all_gather", 4, 2, 0))
    wrapper = Wrapper(0, 0, 0, "Model", group_size=8)
    found = build_communication((), [wrapper], CollectiveSums(sums, 2), 4, tally=Tally(), lately=True)
    assert found is not None
    assert [line.partition(",")[0].split(" per step")[0] for line in format_operations(found)] == [
        "all_reduce 3.00",
        "all_gather of 4 ranks",
    ]


@pytest.mark.parametrize(("passes", "per"), [(((1, 0),), "per step"), (((0, 1), (0, 1), (0, 1), (1, 0)), "per update")])
def test_a_sample_is_of_an_update_of_several_steps_with_accumulation(passes: Any, per: str) -> None:
    found = facts_of(2, passes=passes).state.communication
    sampled = CollectiveSums((Operation("all_reduce", 2, 5, 0),), 5)
    assert found is not None
    (line,) = format_operations(replace(found, collectives=sampled))
    assert line.startswith(f"all_reduce 1.00 {per}")


def while_rank_0_evaluates(steps: int) -> ScreenData:
    """Return the screen of two ranks that have trained; then rank 0 has called its bare model in `steps` steps."""
    recording, end = record_ddp_ranks(2)
    rank = Training(rank=0, mode="single", via=None, devices=("cuda:0",), step_ns=SECOND // 10, start_ns=end)
    rank.steps, rank.defined = 400, {str(number): number for number in range(100)}
    recording.add([row for _ in range(steps) for row in rank.step(evaluates=True)], 0, 0)
    return ScreenData(recording.state(), rank.now, RUN_INFO, is_command_alive=True)


def test_an_evaluation_of_one_rank_has_its_word_and_the_figures_of_training_do_not() -> None:
    for steps, drawn_ranks, title in ((0, [0, 1], "2 Ranks · Model · DistributedDataParallel"), (20, [0], "2 Ranks")):
        screen = while_rank_0_evaluates(steps)
        assert plain_text(panel_ranks.panel_title(screen)[0]) == title
        _, *table = texts(panel_ranks.render_panel(screen, 116, 8, STYLE))
        assert ["evaluation" in row for row in table[:2]] == [steps > 0, False]
        assert "[30, 5]" in table[1]
        for height in (12, 16):
            rows = texts(panel_batch.render_panel(screen, 116, height, STYLE))
            word = "evaluation" if steps else "last step"
            first = next(at for at, row in enumerate(rows) if row.startswith(word))
            named = [rank for rank in (0, 1) if any(f"rank {rank}" in row for row in rows[first:])]
            assert named == drawn_ranks
