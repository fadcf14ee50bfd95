"""Mean times and communication of ranks, and findings about them."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.model.communication import Communication, Wrapper, build_communication
from dpmon.model.device_usage import HostUsage
from dpmon.model.findings.all_findings import find_all
from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import MIN_STEPS
from dpmon.model.findings.rank_findings import find_rank_problems
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import newest_wrappers
from dpmon.model.stragglers import (
    RankTimes,
    Straggler,
    delay_sentence,
    find_straggler,
    short_sentence,
    straggler_sentence,
)
from dpmon.record.record_types import Step
from dpmon.record.schema import EVALUATION, WARM_UP_STEPS
from dpmon.report.report_json import communication_fields
from dpmon.store.collectives import CollectiveSums
from dpmon.store.gaps import Gap
from dpmon.store.steps import read_steps
from dpmon.store.tally import Tally
from support.analysis_builders import StatsOfPhases
from support.history_builders import Recording, run_analysis_with
from support.rank_builders import (
    MS,
    communication_of,
    ddp_event,
    ddp_rank_rows,
    ddp_wrapper,
    rank_times,
    record_ddp_ranks,
)
from support.record_builders import SECOND


def found_in(ranks: list[RankTimes], *wrappers: Wrapper) -> list[Finding]:
    return list(find_rank_problems(communication_of(ranks, *wrappers)))


EVEN = [rank_times(0, 0.1), rank_times(1, 0.1)]


def with_own(ranks: list[RankTimes], *own: str) -> Communication:
    wrappers = [ddp_wrapper(group=[0, 1])]
    found = build_communication(ranks, wrappers, CollectiveSums(own=own), tally=Tally(), lately=False)
    assert found is not None
    return found


@pytest.mark.parametrize(("other_ms", "kinds"), [((18.0, 17.0), ["own collectives"]), ((18.0, 1.0), [])])
def test_own_collectives_are_a_finding_if_every_rank_may_wait_in_them(
    other_ms: tuple[float, float], kinds: list[str]
) -> None:
    ranks = [rank_times(number, 0.1, phases={"other": ms * MS}) for number, ms in enumerate(other_ms)]
    found = with_own(ranks, "all_reduce", "barrier")
    assert [one.kind for one in find_rank_problems(found)] == kinds
    assert found.other_waits() == (
        "the script's own all_reduce and barrier may make the ranks wait for each other, too: see `other`",
    )


# ------------------------------------------------------------------------------------------------ words


def test_a_straggler_is_described_in_one_sentence() -> None:
    slow = Straggler(5, 5, (5,), (5,), 6.0 * MS, 0.38, 97, 100, "data", 6.3 * MS, 0.4 * MS)
    assert straggler_sentence(slow, lately=True) == (
        "rank 5 delays the others by 6.00 ms per step (38%): its data takes 6.30 ms, others 400 µs; slowest in 97 of"
        " the last 100 steps"
    )
    assert straggler_sentence(slow, lately=False).endswith("slowest in 97 of 100 steps")
    assert short_sentence(slow) == "others wait for rank 5: 6.00 ms (38%), data 6.30 ms, others 400 µs"
    uncaused = slow._replace(phase=None)
    assert delay_sentence(uncaused) == "rank 5 delays the others by 6.00 ms per step (38%), in no single phase"
    assert short_sentence(uncaused) == "others wait for rank 5: 6.00 ms (38%)"
    alone = slow._replace(phase="copy", others_ns=0.0)
    assert delay_sentence(alone).endswith(": its copy takes 6.30 ms, others none")
    assert delay_sentence(slow._replace(phase="other")).endswith(
        "the script's own work (other) takes 6.30 ms, others 400 µs"
    )


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((1, 2), "ranks 1 and 2"),
        ((1, 2, 5), "ranks 1, 2 and 5"),
        ((1, 2, 5, 6, 7), "ranks 1, 2 and 3 more"),
    ],
)
def test_several_slow_ranks_are_named_together(ranks: tuple[int, ...], name: str) -> None:
    slow = Straggler(0, ranks[0], tuple(range(len(ranks))), ranks, 6.0 * MS, 0.38, 97, 100, "data", 6.3 * MS, 0.4 * MS)
    assert straggler_sentence(slow, lately=True) == (
        f"{name} delay the others by 6.00 ms per step (38%): their data takes 6.30 ms, others 400 µs; one of them"
        " slowest in 97 of the last 100 steps"
    )
    assert short_sentence(slow).startswith(f"others wait for {name}: ")


# ------------------------------------------------------------------------------------------------ who is slow


def waiting(*waits_ms: float, slowest: dict[int, int], **more: Any) -> list[RankTimes]:
    """Return ranks with these mean waits (ms); `slowest`: number of steps (of 50) in which a rank was the slowest."""
    return [
        rank_times(number, wait_ms, steps=50, slowest=slowest.get(number, 0), step_ns=130.0 * MS, **more)
        for number, wait_ms in enumerate(waits_ms)
    ]


def slower(one: RankTimes, phase: str, by_ms: float) -> RankTimes:
    return one._replace(phases={**one.phases, phase: one.phases[phase] + by_ms * MS})


def test_ranks_that_are_equally_slow_are_found_together() -> None:
    ranks = waiting(30.0, 0.0, 0.1, 30.0, slowest={1: 27, 2: 23})
    ranks[1:3] = [slower(one, "forward", 30.0) for one in ranks[1:3]]
    found = find_straggler(ranks)
    assert found is not None
    assert (found.rank, found.process, found.ranks, found.processes) == (1, 1, (1, 2), (1, 2))
    assert (found.slowest, found.steps) == (50, 50)
    assert delay_sentence(found) == (
        "ranks 1 and 2 delay the others by 30.0 ms per step (23%): their forward takes 35.0 ms, others 5.00 ms"
    )
    told: Any = communication_fields(communication_of(ranks))
    assert (told["straggler"]["rank"], told["straggler"]["ranks"]) == (1, [1, 2])


@pytest.mark.parametrize(
    ("waits_ms", "slowest", "ranks"),
    [
        ((30.0, 0.0, 6.1, 30.0), {1: 50}, (1,)),  # more than a fifth of the gap
        ((30.0, 0.0, 6.0, 30.0), {1: 50}, (1, 2)),
        ((30.0, 0.0, 0.1, 30.0), {1: 20, 2: 19}, None),  # two of four: 25 of 50 by chance
        ((30.0, 0.0, 0.1, 30.0), {1: 20, 2: 20}, (1, 2)),
        ((30.0, 0.0, 30.0, 30.0), {1: 39}, (1,)),
        ((30.0, 0.0, 0.1, 0.1), {1: 30, 2: 10, 3: 10}, None),  # most are equally slow
        ((0.0, 0.0), {0: 50}, None),
    ],
)
def test_ranks_are_named_that_are_slower_than_by_chance_and_than_most(
    waits_ms: tuple[float, ...], slowest: dict[int, int], ranks: tuple[int, ...] | None
) -> None:
    found = find_straggler(waiting(*waits_ms, slowest=slowest))
    assert (None if found is None else found.ranks) == ranks


# ------------------------------------------------------------------------------------------------ process groups


def in_groups(slow_ms: float = 30.0) -> list[RankTimes]:
    """Return even ranks, with rank 2 slow by this much, and equal odd ranks."""
    waits = [0.1 * number if number % 2 else 0.0 if number == 2 else slow_ms for number in range(8)]
    ranks = waiting(*waits, slowest={2: 50, 1: 13, 3: 13, 5: 12, 7: 12})
    ranks[2] = slower(ranks[2], "backward", slow_ms)
    return ranks


def group_of(number: int) -> list[int]:
    return list(range(number % 2, 8, 2))


def test_only_ranks_of_one_process_group_are_compared() -> None:
    wrappers = [ddp_wrapper(number, group=group_of(number)) for number in range(8)]
    found = communication_of(in_groups(), *wrappers)
    assert [one.group for one in found.ranks[:2]] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    slow = found.straggler
    assert slow is not None
    assert (slow.ranks, slow.phase) == ((2,), "backward")
    assert slow.excess_ns == pytest.approx(30.0 * MS)


def test_wrappers_with_different_groups_are_the_reason_for_missing_waits() -> None:
    apart = [one._replace(joined=0, wait_ns=None, exposed_ns=None) for one in EVEN]
    wrappers = [ddp_wrapper(1, group=[0, 1]), ddp_wrapper(1, wrapper=1, group=[1, 3])]
    found = communication_of(apart, *wrappers)
    assert found.missing == "its DistributedDataParallel wrappers have different process groups"
    assert found.ranks[1].group is None
    assert communication_of(EVEN, *wrappers).missing is None


# ------------------------------------------------------------------------------------------------ times


def test_columns_add_up_if_some_steps_do_not_synchronize() -> None:
    run, _ = record_ddp_ranks(
        2, slow=1, phase="forward", extra_ms=1.0, passes=((0, 1), (0, 1), (0, 1), (1, 0)), noise=0.0
    )
    fast, slow = run.state().ranks
    assert slow.unit == "update"
    assert slow.synced == slow.updates
    assert slow.exposed_ns == pytest.approx(2.1 * MS), "the mean over the steps that averaged"
    assert slow.phases["sync"] == pytest.approx((slow.exposed_ns or 0) + (slow.wait_ns or 0))
    assert fast.wait_share == pytest.approx((fast.wait_ns or 0) / (fast.step_ns or 1))


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_nobody_is_slow_because_it_evaluated(ranks: tuple[int, ...]) -> None:
    """The others wait 2 s after every 100 steps. In the other 396 steps, they wait a few tenths of a millisecond."""
    run, end = record_ddp_ranks(2, evaluations=dict.fromkeys((100, 200, 300), ranks))
    analysis = RunAnalysis(run.store())
    assert analysis.whole_communication is not None
    assert analysis.whole_communication.straggler is None
    assert {rank.joined for rank in analysis.whole_communication.ranks} == {400 - WARM_UP_STEPS - 3}
    assert max(rank.wait_ns or 0 for rank in analysis.whole_communication.ranks) < 0.5 * MS
    compared_ns = [
        step.wall_ns
        for step in read_steps(run.store(), 1000, main_only=True)
        if step.step > WARM_UP_STEPS and step.step not in (101, 201, 301)
    ]
    assert len(compared_ns) == 2 * (400 - WARM_UP_STEPS - 3)
    assert analysis.whole_communication.step_ns == pytest.approx(fmean(compared_ns))
    assert not {"straggler", "in turn", "long steps"} & {finding.kind for finding in find_all(analysis)}
    for seconds in range(3, end // SECOND):
        state = run.state(seconds * SECOND)
        assert state.communication is None or state.communication.straggler is None


def test_a_profile_of_one_rank_counts_in_no_comparison_and_every_step_is_counted() -> None:
    """Rank 1 is profiled in steps 200 to 202; in step 203, rank 0 waits until the trace is written."""
    rows, _ = ddp_rank_rows(2)
    for index, row in enumerate(rows[1]):
        if isinstance(row, Step) and row.step in (200, 201, 202, 203):
            rows[1][index] = row._replace(is_slowed=True)
    recording = Recording()
    for rank, own in rows.items():
        recording.add(own, rank, rank)
    run = RunAnalysis(recording.store())
    assert run.whole_communication is not None
    compared = 400 - WARM_UP_STEPS
    assert {rank.joined for rank in run.whole_communication.ranks} == {compared - 4}
    steps = {(step.process, step.step): step for step in read_steps(recording.store(), 1000)}
    uncompared = {number for _, number in steps if steps[0, number].exposed_ns is None}
    assert uncompared == {200, 201, 202, 203}
    counted = [run.window.tally("single", process=rank).steps for rank in (0, 1)]
    settled = [run.window.tally("single", process=rank, without_warmup=True).steps for rank in (0, 1)]
    assert (counted, settled) == ([400, 400], [compared, compared - 4])


def test_communication_is_per_update_also_during_an_evaluation_that_fills_the_time_range() -> None:
    run, _ = record_ddp_ranks(2, passes=((0, 1), (0, 1), (0, 1), (1, 0)), steps=200, evaluations={160: (0,)})
    store = run.store()
    evaluation = next(step for step in read_steps(store, 1000, process=0) if step.kind == EVALUATION)
    state = run.state(evaluation.start_ns, span_s=1)
    assert state.representative is not None
    assert state.representative.ranged.kind == EVALUATION
    assert state.communication is not None
    assert (state.communication.unit, state.communication.synced) == ("update", None)
    texts = [text for _, text in state.communication.labeled_texts]
    assert any("per update" in text for text in texts)
    assert not any("per step" in text for text in texts)
    later = run.state(span_s=1).communication
    assert later is not None
    assert (later.unit, later.synced) == ("update", 1.0)


# ------------------------------------------------------------------------------------------------ communication


def test_torchs_own_times_are_taken_from_the_slowest_rank() -> None:
    fast, slow = ddp_wrapper(0, comm_ms=35.0, overlap_ms=4.0), ddp_wrapper(1, comm_ms=44.0, overlap_ms=39.0)
    assert communication_of(EVEN, fast, slow).torch_times == slow
    assert communication_of(EVEN, ddp_wrapper(0, comm_ms=0.0)).torch_times is None
    one = communication_of(EVEN, ddp_wrapper(0, bucket_bytes=[1 << 20], comm_ms=7.92, overlap_ms=4.46))
    assert one.hidden_share is None
    told: Any = communication_fields(one)
    assert (told["torch"]["comm_ms"], told["torch"]["overlap_ms"]) == (7.92, None)
    assert "nothing can be hidden" in told["torch"]["absent"]["overlap_ms"]


# ------------------------------------------------------------------------------------------------ findings


@pytest.mark.parametrize(
    ("phase", "advice"),
    [("data", "workers"), ("forward", "batches"), ("backward", "batches"), ("other", "checkpoint"), ("copy", "pinned")],
)
def test_a_straggler_is_found_with_advice_for_its_phase(phase: str, advice: str) -> None:
    slow = rank_times(1, 0.0, slowest=180)
    slow = slow._replace(phases={**slow.phases, phase: slow.phases.get(phase, 0.0) + 5 * MS})
    (found,) = found_in([rank_times(0, 5.0), slow, rank_times(2, 5.0)])
    assert found.kind == "straggler"
    assert found.text.startswith("Rank 1 delays the others by 5.00 ms per step (25%): ")
    assert found.ground == "slowest in 180 of 200 steps; mean step 20.0 ms on 3 ranks"
    assert advice in found.advice
    assert found.weight == pytest.approx(0.25)


def test_a_straggler_without_a_cause_is_found_too() -> None:
    (found,) = found_in([rank_times(0, 5.0), rank_times(1, 0.0, slowest=180)])
    assert found.text.endswith("in no single phase.")
    assert "GPU" in found.advice


def test_exposed_communication_is_found_with_what_the_wrapper_does_not_do_yet() -> None:
    ranks = [rank_times(0, 0.1, exposed_ms=5.0), rank_times(1, 0.1, exposed_ms=5.0)]
    (found,) = found_in(ranks, ddp_wrapper(backend="nccl"))
    assert found.kind == "exposed"
    assert found.text == "Exposed communication takes 25% of step time."
    assert found.ground == "exposed mean 5.00 ms, step mean 20.0 ms over 200 steps of 2 ranks"
    assert "larger batches" in found.advice


def test_a_large_last_bucket_is_found_if_it_is_exposed() -> None:
    ranks = [rank_times(0, 0.1, exposed_ms=3.0), rank_times(1, 0.1, exposed_ms=3.0)]
    (found,) = found_in(ranks, ddp_wrapper(bucket_bytes=[8 << 20, 24 << 20]))
    assert found.kind == "bucket"
    assert found.text == "The last bucket has 75% of the gradients, and no computation is left to hide it."
    assert found.ground == "2 buckets: 8.00 MiB, 24.0 MiB; exposed mean 3.00 ms, 15% of the step"
    (found,) = found_in(ranks, ddp_wrapper(bucket_bytes=[24 << 20]))
    assert found.text == "All gradients are in one bucket, and no computation is left to hide it."
    assert found_in(ranks, ddp_wrapper(bucket_bytes=[24 << 20, 8 << 20])) == []
    assert found_in(EVEN, ddp_wrapper(bucket_bytes=[8 << 20, 24 << 20])) == [], "little is exposed"
    assert found_in(ranks, ddp_wrapper(bucket_bytes=[])) == []
    assert found_in(ranks, ddp_wrapper(bucket_bytes=[2048])) == [], "a smaller one takes as long"


def test_several_averages_for_one_step_of_the_optimizer_are_found() -> None:
    ranks = [rank_times(number, 0.1, synced=200, updates=50) for number in range(2)]
    (found,) = found_in(ranks)
    assert found.kind == "accumulation"
    assert found.text == "Gradients are averaged 4.0 times per update."
    assert found.ground == "200 backward passes that synced gradients, 0 under no_sync, 50 updates of the optimizer"
    assert "no_sync" in found.advice
    waiting = [rank_times(number, 5.0, exposed_ms=2.0, synced=200, updates=50) for number in range(2)]
    (found,) = [one for one in found_in(waiting) if one.kind == "accumulation"]
    assert found.saves_s is None, "without the number of steps, as on the screen"
    run = run_analysis_with()
    run.steps = 205
    (found,) = [one for one in find_rank_problems(communication_of(waiting), run) if one.kind == "accumulation"]
    assert found.saves_s == pytest.approx(205 * (2.0 * 3 / 4 + 5.0) / 1000), "all waits may even out over the passes"
    assert found_in(ranks, ddp_wrapper(), ddp_wrapper(wrapper=1)) == [], "two models average twice"
    assert found_in([rank_times(number, 0.1, synced=50, updates=50) for number in range(2)]) == []


def searched(
    *unused: int | None, rank: int = 0, iterations: tuple[int, ...] = (100, 200, 300), **more: Any
) -> tuple[Wrapper, ...]:
    """Return a wrapper that searches for unused parameters; `unused`: bytes in each iteration."""
    records = [
        ddp_event(rank, 2, find_unused_parameters=True, unused_bytes=size, iteration=iteration, **more)
        for size, iteration in zip(unused, iterations, strict=True)
    ]
    return newest_wrappers(record.data for record in records)


def test_a_search_for_unused_parameters_is_found_where_there_are_none() -> None:
    (found,) = found_in(EVEN, *searched(0, 0, 0), *searched(0, 0, 0, rank=1))
    assert found.kind == "unused"
    assert found.ground == "0 bytes unused in 3 iterations checked by torch, up to iteration 300; 200 steps"


@pytest.mark.parametrize(
    "other",
    [
        *(searched(*sizes) for sizes in [(0, 0, 4), (4, 0, 0), (None, 0, 0), (None, None, None)]),
        searched(0, 0, 4, rank=1),
        searched(0, iterations=(300,)),
        searched(0, 0, 0, iterations=(100, 300, 300)),
        searched(0, 0, 0, absent={"unused_bytes": "this version of torch adds it up over iterations"}),
    ],
)
def test_a_search_for_unused_parameters_that_may_find_some_is_not_found(other: tuple[Wrapper, ...]) -> None:
    """An unused parameter in one iteration of one rank is enough; so are fewer than three different iterations."""
    first = searched(0, 0, 0) if other[0].rank else ()
    assert found_in(EVEN, *first, *other) == []


@pytest.mark.parametrize(
    ("ranks", "own"),
    [
        ([rank_times(0, 5.0), rank_times(1, 0.0, slowest=180)], {}),
        ([rank_times(0, 0.1, exposed_ms=5.0), rank_times(1, 0.1, exposed_ms=5.0)], {"bucket_bytes": (1 << 20,)}),
        ([rank_times(number, 0.1, synced=200, updates=50) for number in range(2)], {}),
        (EVEN, {"find_unused_parameters": True, "all_used": 3}),
    ],
)
def test_nothing_is_found_from_too_few_steps(ranks: list[RankTimes], own: dict[str, Any]) -> None:
    few = MIN_STEPS - 1
    short = [
        one._replace(
            steps=few, joined=few, slowest=min(one.slowest, few), synced=few, updates=min(one.updates, few // 4)
        )
        for one in ranks
    ]
    one = ddp_wrapper()._replace(**own)
    assert found_in(ranks, one)
    assert found_in(short, one) == []


def with_phases(number: int, wait_ms: float, **phases: float) -> RankTimes:
    found = rank_times(number, wait_ms)
    return found._replace(phases={**found.phases, **{name: ms * MS for name, ms in phases.items()}})


def test_a_rank_that_others_wait_for_in_the_forward_is_named() -> None:
    """The first rank is late and sends its buffers in the forward: the other one waits there, not in the backward."""
    ranks = [with_phases(0, 0.0, data=20.0, forward=3.0), with_phases(1, 0.0, data=0.3, forward=23.0)]
    slow = communication_of(ranks, ddp_wrapper(broadcast_buffers=True)).straggler
    assert slow is not None
    assert (slow.rank, slow.phase, slow.slowest) == (0, "data", None)
    assert "slowest in" not in straggler_sentence(slow, lately=True)


def test_a_slow_forward_names_nobody_where_ranks_wait_in_it() -> None:
    slow = with_phases(0, 0.0, forward=23.0)._replace(slowest=200)
    ranks = [slow, with_phases(1, 20.0, forward=3.0)]
    assert communication_of(ranks, ddp_wrapper(sync_batch_norm=True)).straggler is None
    assert communication_of(ranks, ddp_wrapper()).straggler is not None


def test_the_advice_for_waits_in_turn_fits_the_host_and_the_inputs() -> None:
    ranks = communication_of([rank_times(number, 5.0, slowest=100) for number in (0, 1)])

    def advice(**facts: Any) -> str:
        (found,) = find_rank_problems(ranks, run_analysis_with(**facts))
        return found.advice

    varied = SimpleNamespace(usual_input_share=lambda _: 0.5)
    busy = HostUsage(60, 8, 97.0, 1.0, 4.9, 12.0)
    assert advice(layouts=varied, host_usage=busy).startswith("fewer threads (OMP_NUM_THREADS)")
    assert "samples of similar length" in advice(layouts=varied)
    assert "samples of similar length" not in advice()


@pytest.mark.parametrize(("between_s", "kinds"), [(3, {"between"}), (1, {"in turn"})])
def test_one_wait_has_one_saving(between_s: int, kinds: set[str]) -> None:
    """In 400 steps of 20 ms, ranks wait 2 s, of which some or all are for checkpoints of rank 0 between its steps."""
    mode = StatsOfPhases("single", False, 400, 0, 20.0 * MS, 26.0 * MS, 20.0 * MS, None, Tally())
    each = {0: {"training": 20 * SECOND, "between": between_s * SECOND}, 1: {"training": 20 * SECOND}}
    run = run_analysis_with(
        modes=(mode,),
        other_process_modes=(replace(mode, process=1),),
        names={0: "rank 0", 1: "rank 1"},
        _ranks={0: 0, 1: 1},
        whole_communication=communication_of([rank_times(number, 5.0, slowest=100) for number in (0, 1)]),
        time_by_activity=each[0],
        spent_by_process=each,
        until_ns=23 * SECOND,
        gaps=[Gap(0, 100, "single", 0, between_s * SECOND, between_s * SECOND)],
    )
    found = {finding.kind: finding for finding in find_all(run)}
    assert set(found) == kinds
    if "in turn" in found:
        assert found["in turn"].saves_s == pytest.approx(400 * 0.005)
