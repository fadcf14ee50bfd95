"""Ranks side by side: which processes count, their rows, and the status of all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from dpmon.model.rank_stats import MAX_LEAST_WAITING
from dpmon.model.run_analysis import RunAnalysis, toggle_refusal
from dpmon.model.throughput import throughput_of
from dpmon.store.step_stats import StatsWindow
from dpmon.ui.panels import panel_ranks
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.panels.panel_status import render_panel
from dpmon.ui.screen_data import ScreenData, View, format_mode_and_devices
from dpmon.ui.styled_rows import plain_text
from support.history_builders import Recording
from support.rank_builders import record_ddp_ranks, with_world_size
from support.record_builders import SECOND, Training, step_row
from support.screen_states import RUN_INFO, STYLE, paint_screen


def facts_of(
    ranks: int, *, world: int | None = None, steps: int = 200, via: str = "DistributedDataParallel"
) -> ScreenData:
    """Return a run of ranks; the last one has smaller batches and slower steps."""
    return recorded(ranks, world=world, steps=steps, via=via)[1]


def recorded(
    ranks: int, *, world: int | None = None, steps: int = 200, via: str = "DistributedDataParallel"
) -> tuple[Recording, ScreenData]:
    """Return the same, with its recording."""
    run = Recording()
    now = 0
    for rank in range(ranks):
        last = rank == ranks - 1
        one = Training(
            process=rank + 1, rank=rank, devices=(f"cuda:{rank}",), virtual=False, via=via, mode="single",
            batch=20 if last else 30, step_ns=4_000_000 if last else 2_000_000, seed=rank,
        )  # fmt: skip
        begin = [with_world_size(row, ranks if world is None else world) for row in one.begin()]
        run.add([*begin, *one.run(steps)], rank + 1, rank)
        now = max(now, one.now)
    return run, ScreenData(run.state(), now + SECOND // 10, RUN_INFO, is_command_alive=True, can_toggle=True)


def test_ranks_are_not_switched_and_their_mode_is_their_own() -> None:
    """Also if another model (a teacher) was called last."""
    state = facts_of(2).state
    assert "DistributedDataParallel" in (toggle_refusal(state) or "")
    process = state.representative
    assert process is not None
    assert process.mode == "single"
    assert format_mode_and_devices(process)[0] == "ddp ×2"
    assert process.last_called_root is not None
    taught = process.with_facts(calls={("Teacher", None): process.last_called_root, **process.calls})
    assert format_mode_and_devices(taught)[0] == "ddp ×2"
    assert toggle_refusal(state.with_facts(processes={**state.processes, taught.process: taught})) is not None
    assert toggle_refusal(facts_of(1, via="DataParallel").state) is None
    assert toggle_refusal(RunAnalysis()) is not None


def test_each_rank_has_a_row_with_its_own_sizes_and_times() -> None:
    facts = facts_of(3)
    assert panel_ranks.is_shown(facts)
    ranks = facts.state.training_processes
    assert [(each.rank, each.info.world) for each in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert {each.last_step.step for each in ranks if each.last_step is not None} == {200}
    fast, _, slow = (each.figures.median_ns or 0 for each in ranks)
    assert 1.5 < slow / fast < 2.5
    text = [plain_text(row) for row in panel_ranks.render_panel(facts, 100, 10, STYLE)]
    assert [line.split()[:2] for line in text[1:4]] == [["0", "cuda:0"], ["1", "cuda:1"], ["2", "cuda:2"]]
    assert "[30, 5]" in text[1]
    assert "[20, 5]" in text[3]
    assert "[20, 2]" in text[3]
    assert "so it is unknown which rank waits for which" in text[4]


def test_the_median_of_a_rank_is_that_of_the_chosen_range() -> None:
    run = Recording()
    for rank in range(2):
        training = Training(process=rank, rank=rank, mode="single", step_ns=SECOND // 100)
        rows = [*training.begin(), *training.run(1000)]
        training.step_ns = SECOND // 25
        run.add([*rows, *training.run(125)], rank, rank)
    for range_s, median_ms in ((4, 40), (120, 10), (0, 10)):
        for process in run.state(span_s=range_s).training_processes:
            assert process.figures.median_ns == pytest.approx(median_ms * 1e6, rel=0.15), range_s


@lru_cache
def seventy(slow: int | None) -> tuple[Recording, ScreenData]:
    """Return a run of many ranks, of which all are alike, or one holds the others up."""
    if slow is None:
        return recorded(70, steps=12)
    run, now = record_ddp_ranks(70, slow=slow, steps=40)
    return run, ScreenData(run.state(), now, RUN_INFO, is_command_alive=True)


@pytest.mark.parametrize("zoom", [None, "replicas", "batch"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (130, 28), (220, 100)])
@pytest.mark.parametrize("slow", [None, 66])
def test_ranks_without_room_are_not_read(size: tuple[int, int], zoom: str | None, slow: int | None) -> None:
    run, facts = seventy(slow)
    facts = replace(facts, state=run.state(), view=View(zoom=zoom))
    paint_screen(facts, OutputView(), *size, STYLE)
    read = [process for process in facts.state.processes.values() if "_newest_calls" in vars(process)]
    assert len(read) <= size[1] + MAX_LEAST_WAITING


def test_the_status_says_ddp_and_adds_the_samples_of_all_ranks() -> None:
    facts = facts_of(2)
    text = "\n".join(plain_text(row) for row in render_panel(facts, 160, 2))
    assert "ddp ×2" in text
    assert "rank 0 of 2" in text
    shown = float(text.split(" samples/s")[0].split()[-1].removesuffix("k")) * 1000
    assert shown == pytest.approx((30 + 20) / 0.004, rel=0.05), "a step of the slowest rank takes 4 ms"


def test_the_samples_of_the_ranks_add_up_to_those_of_the_run_at_the_rate_of_the_slowest() -> None:
    """Rank 0 evaluates for 2 s, in which the others wait. They have 2 s more of training time for the same steps."""
    run, _ = record_ddp_ranks(3, steps=200, evaluations={100: (0,)})
    window, ranks = StatsWindow(run.store()), RunAnalysis(run.store()).rank_summaries
    whole, own = window.rate(), [window.rate(process=process) for process in range(3)]
    assert None not in own
    assert whole is not None
    assert whole.steps_per_s == pytest.approx(min(rate.steps_per_s for rate in own if rate is not None))
    assert [rank.rate and rank.rate.steps_per_s for rank in ranks] == [pytest.approx(whole.steps_per_s)] * 3
    samples = [rank.rate and rank.rate.samples_per_s for rank in ranks]
    assert samples == [pytest.approx(30 * whole.steps_per_s)] * 3
    assert whole.samples_per_s == pytest.approx(90 * whole.steps_per_s, rel=0.001)


@pytest.mark.parametrize("step_ns", [100_000_000, 8 * SECOND])
def test_an_evaluation_by_one_rank_is_in_no_training_rate(step_ns: int) -> None:
    """While rank 0 evaluates with larger batches, the others wait between their steps."""
    run = Recording()
    ranks = [
        Training(process=rank, rank=rank, devices=("cuda:0",), virtual=False, mode="single", step_ns=step_ns)
        for rank in range(4)
    ]
    for rank, one in enumerate(ranks):
        run.add([*one.begin(), *one.run(30)], rank, rank)
    ranks[0].now = max(one.now for one in ranks)
    for _ in range(10):
        ranks[0].steps += 1
        took = (step_ns // 100, step_ns * 9 // 10, -1, -1)
        run.add([step_row("single", ranks[0].steps, ranks[0].now, step_ns // 2, 256, took)], 0, 0)
        ranks[0].now += step_ns // 2
    for rank, one in enumerate(ranks):
        one.now = ranks[0].now
        run.add(one.run(3), rank, rank)
    live, over = run.state(), run.state(span_s=0, over=True)
    first, ended = live.training_processes[0], over.training_processes[0]
    assert throughput_of(ended, over, over.newest_ns).rate == StatsWindow(run.store()).step_stats("single").rate
    shown = throughput_of(first, live, live.newest_ns).rate
    true = 4 * 30 * SECOND / step_ns
    assert shown is not None
    assert true / 2 < (shown.samples_per_s or 0) < true * 1.1, "256 samples a step would be twice as many"


def test_ranks_on_other_machines_are_missed_with_a_word() -> None:
    text = [plain_text(row) for row in panel_ranks.render_panel(facts_of(2, world=4), 100, 10, STYLE)]
    assert any("2 of 4 ranks" in line for line in text)


def test_one_process_or_replicas_of_its_own_keep_the_replicas_panel() -> None:
    assert not panel_ranks.is_shown(facts_of(1))
    run = Recording()
    for process in (0, 1):
        one = Training(process=process)
        run.add([*one.begin(), *one.run(5)], process)
    assert not panel_ranks.is_shown(ScreenData(run.state(), 3 * SECOND, RUN_INFO))


def test_a_rank_that_was_started_again_counts_once() -> None:
    run, _ = recorded(2)
    again = Training(process=7, rank=1, mode="single", via="DistributedDataParallel", start_ns=4 * SECOND)
    run.add([*again.begin(), *again.run(5)], 7, 1)
    assert [process.process for process in run.state().training_processes] == [1, 7]
