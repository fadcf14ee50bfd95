"""Each finding occurs in a run with its problem, and not in other runs or after too few steps."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.model.comparison_stats import Interval
from dpmon.model.device_memory import DeviceMemory
from dpmon.model.device_usage import HostUsage
from dpmon.model.findings.all_findings import find_all
from dpmon.model.findings.device_findings import busy_cpus_note
from dpmon.model.findings.finding_evidence import MIN_STEPS
from dpmon.model.findings.time_findings import find_costly_checkpoints, find_data_waits
from dpmon.model.layouts import IdleDeviceCounts, ReplicaStats
from dpmon.model.mode_comparison import Comparison
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import LoaderStart, RunEvents
from dpmon.record.schema import EVALUATION
from dpmon.store.gaps import Gap
from dpmon.store.step_stats import StepStats
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import TallyKey
from support.analysis_builders import (
    GIB,
    GOOD_MODE,
    HEALTHY_RUN,
    MS,
    RUNS_BY_FINDING,
    STARTING_MODE,
    WAITING_MODE,
    _series_stats,
    _tally_of_third,
    device_usage,
    long_step,
    mode_stats,
    replica_stats,
    slowing_mode,
)
from support.history_builders import run_analysis_with, with_changes
from support.record_builders import SECOND


def kinds(evidence: RunAnalysis) -> list[str]:
    return [finding.kind for finding in find_all(evidence)]


def host(**more: Any) -> HostUsage:
    return HostUsage(60, 8, 97.0, 3.0, 4.9, 12.0)._replace(**more)


@pytest.mark.parametrize(
    ("facts", "kinds", "is_noted"),
    [
        (host(), [], True),
        (host(load=30.0), [], True),
        (host(others=1.0, load=30.0), ["crowded"], False),
        (host(others=1.0, load=9.0), [], False),
        (host(others=1.0, load=None), [], False),
        (host(cpu_pct=60.0), [], False),
        (host(samples=5), [], False),
        (None, [], False),
    ],
)
def test_a_busy_machine(facts: HostUsage | None, kinds: list[str], is_noted: bool) -> None:
    """Other work on the machine is a note: no change to the script ends it."""
    run = with_changes(HEALTHY_RUN, host_usage=facts)
    assert [finding.kind for finding in find_all(run)] == kinds
    text = (
        "other processes are using the host's CPUs: a median of 3.0 of 8 cores; times on a quieter machine will differ"
    )
    assert busy_cpus_note(run) == ([text] if is_noted else [])


def test_findings_are_ordered_by_the_seconds_they_could_save() -> None:
    """1,000 steps of 20 ms, of which 6 s wait for data; 40 s between steps; one step of 3 s; p95 without a bound."""
    run = with_changes(
        HEALTHY_RUN,
        modes=(mode_stats(data=0.3, forward=0.4, backward=0.3),),
        time_by_activity={"training": 20 * SECOND, "between": 40 * SECOND},
        gaps=[Gap(0, 100, "dp", 0, 40 * SECOND, 40 * SECOND)],
        longest_steps=(long_step(3000), long_step(25)),
    )
    found = find_all(run)
    assert [(finding.kind, finding.saves_s) for finding in found] == [
        ("between", 40.0),
        ("data", pytest.approx(6.0)),
        ("long steps", pytest.approx(2.98)),
    ]
    stalls = (RecordedStall(60 * SECOND, 70 * SECOND, 61 * SECOND, {"text": STALL}),)
    spent = {**run.time_by_activity, "stalled": SECOND}
    window = SimpleNamespace(left_out={}, times=())
    stalled = with_changes(run, announced=RunEvents(stalls=stalls), time_by_activity=spent, window=window)
    assert kinds(stalled) == ["stall", "between", "data", "long steps"], "a stall comes first"
    failed = with_changes(stalled, raised="ValueError: no data (train.py:12)")
    assert kinds(failed)[:2] == ["failed", "stall"]
    assert find_all(stalled)[0].saves_s == 1.0


def test_the_exception_that_ended_a_run_comes_first() -> None:
    run = with_changes(HEALTHY_RUN, raised="rank 1: ValueError: no data (train.py:12)", end_ns=200 * SECOND)
    (first, *others) = find_all(run)
    assert (first.kind, first.weight) == ("failed", 1)
    assert first.text == "An exception ended the run: rank 1: ValueError: no data (train.py:12)."
    assert "failed" not in [one.kind for one in others]
    (first, *_) = find_all(with_changes(run, death="rank 1 was ended by SIGABRT"))
    assert "without an exception" in first.text, "the exception is a consequence"


@pytest.mark.parametrize(
    ("phase", "said"), [("data", "look at the loader"), ("sync", "the other ranks"), ("other", "lists or graphs")]
)
def test_the_advice_on_drift_follows_the_phase_that_grew_most(phase: str, said: str) -> None:
    first, last = _tally_of_third(20, 22, **{phase: 1}), _tally_of_third(32, 30, **{phase: 13})
    (found,) = find_all(with_changes(HEALTHY_RUN, modes=(replace(GOOD_MODE, steps=1000, early=first, late=last),)))
    assert found.kind == "drift"
    assert f"; {phase} grew most: " in found.ground
    assert said in found.advice


FAST = mode_stats(median_ms=0.3, data=0.43, forward=0.3, backward=0.27)


@pytest.mark.parametrize(
    ("facts", "machine", "said", "not_said"),
    [
        (
            WAITING_MODE,
            host(cpu_pct=40.0),
            "more workers (DataLoader num_workers); less",
            "if CPU cores are idle",
        ),
        (WAITING_MODE, None, "more workers (DataLoader num_workers), if CPU cores are idle", "not more workers"),
        (
            WAITING_MODE,
            host(others=1.0),
            "the CPU is 97% in use, so more workers help only if the fetches wait for a disk or network",
            "num_workers",
        ),
        (WAITING_MODE, host(own=0.1), "this run uses only 0.1 of 8", "less work"),
        (WAITING_MODE, host(own=0.3), "less work per sample", "num_workers"),
        (FAST, host(cpu_pct=40.0), "passing a batch between processes costs more than a fetch of 129 µs", "num_"),
        (STARTING_MODE, host(cpu_pct=40.0), "a few fetches take most of the time (mean 36.0 ms", "more workers"),
    ],
)
def test_workers_are_advised_only_where_they_help(
    facts: StepStats, machine: HostUsage | None, said: str, not_said: str
) -> None:
    found = [
        finding
        for finding in find_all(with_changes(HEALTHY_RUN, modes=(facts,), host_usage=machine))
        if finding.kind == "data"
    ]
    (advice,) = [finding.advice for finding in found]
    assert said in advice
    assert not_said not in advice


def spread_advice(**more: Any) -> str:
    found = find_all(with_changes(RUNS_BY_FINDING["spread"], **more))
    (advice,) = [finding.advice for finding in found if finding.kind == "spread"]
    return advice


def test_fewer_threads_are_advised_only_where_the_run_needs_too_many() -> None:
    assert spread_advice(host_usage=host(others=1.0)).startswith(
        "fewer threads (OMP_NUM_THREADS), so that they fit on 8 CPU"
    )
    loader = LoaderStart(0, 0, 0, 2, persistent=False)
    assert "or loader workers, so that" in spread_advice(host_usage=host(others=1.0), loaders=[loader])
    assert spread_advice(host_usage=host(own=1.0, others=6.5)).startswith(
        "end other work: this run uses only 1.0 of 8 CPU"
    )
    for machine in (host(cpu_pct=40.0), None):
        assert "OMP_NUM_THREADS" not in spread_advice(host_usage=machine)


def test_the_advice_for_a_gpu_that_waits_for_data_is_about_the_loader() -> None:
    run = RUNS_BY_FINDING["low use"]
    (advice,) = [found.advice for found in find_all(run) if found.kind == "low use"]
    assert "torch.compile" in advice
    waiting = with_changes(run, modes=(WAITING_MODE,))
    (advice,) = [found.advice for found in find_all(waiting) if found.kind == "low use"]
    assert advice == "the loader first: the steps wait for data 43% of step time"


def test_nothing_stands_out_in_a_healthy_run() -> None:
    assert find_all(HEALTHY_RUN) == []
    assert find_all(run_analysis_with()) == []


@pytest.mark.parametrize("kind", RUNS_BY_FINDING)
def test_a_run_with_a_problem_has_its_finding(kind: str) -> None:
    (found,) = find_all(RUNS_BY_FINDING[kind])
    assert found.kind == kind
    assert found.text.endswith(".")
    assert any(char.isdigit() for char in found.ground), "a ground is figures"
    assert found.advice
    assert 0 < found.weight <= 1


@pytest.mark.parametrize(
    ("kind", "saves_s", "words"),
    [
        ("data", 8.6, "saves at most 8.60 s of 1 min 50 s"),
        ("replicate", 9.6, "saves at most 9.60 s of 1 min 50 s"),
        ("transfer", 6.0, "saves at most 6.00 s of 1 min 50 s"),
        ("long steps", 8.98, "saves at most 8.98 s of 1 min 50 s"),
        ("slower", None, ""),
        ("drift", None, ""),
        ("uneven", None, ""),
    ],
)
def test_a_gain_is_the_time_in_the_evidence(kind: str, saves_s: float | None, words: str) -> None:
    """1,000 steps of 20 ms in a run of 110 s."""
    (found,) = find_all(RUNS_BY_FINDING[kind])
    assert found.saves_s == (saves_s if saves_s is None else pytest.approx(saves_s))
    assert found.gain_text == words
    assert found.advice_text.startswith(f"try ({words}): " if words else "try: ")


def test_evaluations_that_take_much_of_the_time_are_found() -> None:
    spent = {"training": 60 * SECOND, "evaluation": 30 * SECOND, "between": 10 * SECOND}
    evaluated = with_changes(
        HEALTHY_RUN, time_by_activity=spent, other_modes=[replace(GOOD_MODE, kind=EVALUATION)], gaps=[]
    )
    (found,) = find_all(evaluated)
    assert (found.kind, found.text) == ("evaluation", "Evaluations take 27% of the elapsed time.")
    assert found.ground == "evaluation 30.0 s of 1 min 50 s"
    assert found.gain_text == "saves at most 30.0 s of 1 min 50 s"
    assert not find_all(with_changes(evaluated, time_by_activity={**spent, "evaluation": 10 * SECOND}))
    assert find_all(with_changes(evaluated, final_evaluation_ns=lambda _: 5 * SECOND)) == [found], "of all evaluations"
    assert not find_all(with_changes(evaluated, final_evaluation_ns=lambda _: 30 * SECOND)), "once, at the end"


def test_an_evaluation_is_that_of_the_process_that_evaluates() -> None:
    """Rank 0 evaluates for 30 s, for which rank 1 waits within a step."""
    each = {0: {"training": 70 * SECOND, "evaluation": 30 * SECOND}, 1: {"training": 100 * SECOND}}
    spent = {"training": 85 * SECOND, "evaluation": 15 * SECOND}
    names = {0: "rank 0", 1: "rank 1"}
    (found,) = find_all(with_changes(HEALTHY_RUN, time_by_activity=spent, spent_by_process=each, names=names))
    assert (found.text, found.saves_s) == ("Evaluations of rank 0 take 27% of the elapsed time.", 30.0)


def test_time_between_steps_is_that_of_the_process_that_has_most() -> None:
    """While rank 0 saves a checkpoint, rank 1 waits for it within a step."""
    each = {
        0: {"training": 50 * SECOND, "between": 50 * SECOND},
        1: {"training": 98 * SECOND, "between": 2 * SECOND},
    }
    gap = Gap(0, 100, "dp", 0, 50 * SECOND, 50 * SECOND)
    spent = {"training": 74 * SECOND, "between": 26 * SECOND}
    facts = {"time_by_activity": spent, "spent_by_process": each, "names": {0: "rank 0", 1: "rank 1"}}
    (found,) = find_all(with_changes(HEALTHY_RUN, gaps=[gap], **facts))
    assert (found.kind, found.saves_s) == ("between", 50.0)
    assert found.text.startswith(
        "The time between steps of rank 0 takes 45% of the elapsed time: one gap of 50.0 s after step 100."
    )
    # A process that trains nothing, such as one that evaluates now and then, delays nobody.
    idle = {**each, 2: {"evaluation": SECOND, "between": 90 * SECOND}}
    (found,) = find_all(with_changes(HEALTHY_RUN, gaps=[gap], **{**facts, "spent_by_process": idle}))
    assert found.saves_s == 50.0


def test_workers_that_start_again_also_cost_the_first_fetch_of_an_epoch() -> None:
    """1,000 steps of 20 ms, with fetches of 1 ms in the median and 3 ms in the mean."""
    fetch = mode_stats(data=0.15)
    phases = [one._replace(mean_ns=3.0 * MS, median_ns=1.0 * MS) if one.name == "data" else one for one in fetch.phases]
    starts = [LoaderStart(0, at * SECOND, SECOND, 2, False, start=number) for number, at in ((1, 0), (2, 40))]
    run = with_changes(
        HEALTHY_RUN,
        modes=(replace(fetch, phases=tuple(phases)),),
        time_by_activity={"training": 80 * SECOND, "between": 20 * SECOND},
        gaps=[Gap(0, 100, "dp", 38 * SECOND, 58 * SECOND, 20 * SECOND)],
        loaders=starts,
    )
    (found,) = find_all(run)
    assert (found.kind, found.saves_s) == ("between", pytest.approx(22.0))
    assert found.ground.startswith("between steps 20.0 s and slow fetches 2.00 s of 1 min 50 s;")


def test_a_stall_is_counted_once_and_its_steps_are_left_out() -> None:
    seen = RecordedStall(60 * SECOND, 70 * SECOND, 100 * SECOND, {"text": STALL})
    key = TallyKey(0, "dp", 4, 8)
    window = SimpleNamespace(left_out={key: Tally(steps=1), key._replace(process=1): Tally(steps=1)}, times=())
    spent = {"stalled": 40 * SECOND, "training": 60 * SECOND}
    stalled = with_changes(HEALTHY_RUN, announced=RunEvents(stalls=(seen,)), time_by_activity=spent, window=window)
    (found,) = find_all(stalled)
    assert found.text == "A step with a stall is left out of the metrics: 40.0 s."
    assert found.ground == f"stall at 00:01:00: {STALL}"
    assert (found.advice, found.weight) == ("dpmon why shows the stacks of that time", 0.4)
    (between,) = find_all(with_changes(stalled, window=SimpleNamespace(left_out={}, times=())))
    assert between.text == "A stall is left out of the metrics: 40.0 s."
    goes_on = with_changes(stalled, announced=RunEvents(stalls=(seen._replace(end_ns=None),)))
    assert find_all(goes_on) == []
    # Ranks on a machine that did not know of the stall count its time as training.
    (elsewhere,) = find_all(
        with_changes(stalled, spent_by_process={0: {"training": 80 * SECOND}, 1: {"stalled": 80 * SECOND}})
    )
    assert elsewhere.text == "A step with a stall is left out of the metrics: 80.0 s."
    assert elsewhere.saves_s == 80.0


STALL = "rank 1 in checkpoint (train.py:12); rank 0 waits in backward (train.py:90)"
STALLED = (RecordedStall(100 * SECOND, 110 * SECOND, record={"text": STALL}),)


def live(newest_s: int, stalls: tuple[RecordedStall, ...] = STALLED, inputs: Any = (), **more: Any) -> RunAnalysis:
    """Return a live run; its last step ended at 100 s."""
    announced = RunEvents(stalls=stalls, inputs=inputs)
    return with_changes(HEALTHY_RUN, end_ns=None, until_ns=newest_s * SECOND, announced=announced, **more)


def test_a_live_run_that_hangs_says_so_first() -> None:
    (found,) = find_all(live(134))
    assert (found.kind, found.weight) == ("quiet", 1.0)
    assert found.text == "No step has finished for 34.0 s."
    assert found.ground == f"the last one at 00:01:40; {STALL}"


@pytest.mark.parametrize(
    "evidence",
    [
        live(129),
        live(134, stalls=()),
        live(134, modes=(replace(GOOD_MODE, median_ns=12.0 * SECOND),)),
        live(134, inputs=((None, 101 * SECOND, 133 * SECOND),)),
        live(134, paused=[(101 * SECOND, 131 * SECOND)]),
    ],
    ids=["not for long", "something moves", "its steps are long", "it waits for input", "it was paused"],
)
def test_a_live_run_is_not_called_quiet(evidence: RunAnalysis) -> None:
    assert find_all(evidence) == []


@pytest.mark.parametrize("kind", ["data", "replicate", "transfer", "drift", "long steps", "spread", "quiet"])
def test_no_finding_from_too_few_steps(kind: str) -> None:
    few = with_changes(
        RUNS_BY_FINDING[kind], modes=tuple(replace(m, steps=MIN_STEPS - 1) for m in RUNS_BY_FINDING[kind].modes)
    )
    assert find_all(few) == []


@pytest.mark.parametrize(
    "evidence",
    [
        with_changes(HEALTHY_RUN, batches=(IdleDeviceCounts("Model", 8, 29, 29, 3, 5),)),
        with_changes(HEALTHY_RUN, batches=(IdleDeviceCounts("Model", 8, 1000, 400, 9, 3),)),
        with_changes(
            HEALTHY_RUN, replicas=tuple(replace(r, calls=29, rows=1 + r.replica * 9) for r in HEALTHY_RUN.replicas)
        ),
        with_changes(HEALTHY_RUN, replicas=(replica_stats(0, rows=16), replica_stats(1, rows=15))),
        with_changes(HEALTHY_RUN, replicas=(replica_stats(0, rows=None), replica_stats(1, rows=1))),
        with_changes(HEALTHY_RUN, replicas=(replica_stats(0, virtual=True), replica_stats(1, ms=50, virtual=True))),
        with_changes(
            HEALTHY_RUN, replicas=tuple(replace(r, mode="single", rows=1 + 9 * r.replica) for r in HEALTHY_RUN.replicas)
        ),
        with_changes(
            HEALTHY_RUN, device_usage=(device_usage(0, mem_run_max=0.9 * GIB), device_usage(1, mem_run_max=0.5 * GIB))
        ),
        with_changes(HEALTHY_RUN, device_usage=(device_usage(0), device_usage(1, mem_run_max=30.0 * GIB))),
        with_changes(
            HEALTHY_RUN, device_usage=(device_usage(0, mem_run_max=30.0 * GIB), device_usage(1, of_run=False))
        ),
        with_changes(HEALTHY_RUN, device_usage=(device_usage(0, throttled=Counter({"power limit": 4})),)),
        with_changes(
            HEALTHY_RUN, device_usage=(device_usage(0, throttled=Counter({"power limit": 5}), throttle_samples=5),)
        ),
        with_changes(HEALTHY_RUN, device_usage=(device_usage(0, of_run=False, util=array("d", [0.0] * 100)),)),
        with_changes(HEALTHY_RUN, device_usage=(device_usage(0, util=array("d")),)),
        with_changes(HEALTHY_RUN, modes=(slowing_mode(20, 32, 33, 10),)),
        with_changes(HEALTHY_RUN, modes=(slowing_mode(20, 23, 21, 22),)),
        with_changes(HEALTHY_RUN, modes=(slowing_mode(32, 20, 33, 19),)),
        with_changes(HEALTHY_RUN, modes=(slowing_mode(20, 32, 22, 30, steps=149),)),
        with_changes(HEALTHY_RUN, longest_steps=(long_step(450),)),
        with_changes(HEALTHY_RUN, longest_steps=(long_step(510),), modes=(replace(GOOD_MODE, steps=100_000),)),
        with_changes(HEALTHY_RUN, longest_steps=(long_step(9000)._replace(mode="other"),)),
        with_changes(HEALTHY_RUN, end_ns=None),
        with_changes(HEALTHY_RUN, end_ns=1000 * SECOND, last_step_ns=960 * SECOND),
        with_changes(HEALTHY_RUN, last_step_ns=None),
        with_changes(HEALTHY_RUN, mode_comparison=Comparison(speedup=Interval(0.9, 0.7, 1.2))),
        with_changes(HEALTHY_RUN, mode_comparison=Comparison(speedup=Interval(1.7, 1.6, 1.8))),
    ],
)
def test_a_run_below_the_thresholds_has_no_finding(evidence: RunAnalysis) -> None:
    assert find_all(evidence) == []


def test_the_heaviest_comes_first_and_the_mode_is_named() -> None:
    evidence = with_changes(
        HEALTHY_RUN,
        modes=(mode_stats("dp", data=0.25, replicate=0.5), mode_stats("single", data=0.6)),
        device_usage=(device_usage(0, mem_run_max=30.0 * GIB), device_usage(1)),
    )
    found = find_all(evidence)
    assert [finding.kind for finding in found] == ["data", "replicate", "data", "fuller"]
    assert "in mode single" in found[0].text
    assert "60%" in found[0].text


def test_memory_reserved_by_torch_stands_in_for_unknown_driver_figures() -> None:
    held = (
        DeviceMemory("cuda:0", 8 * GIB, GIB, 8 * GIB, GIB, None, {}),
        DeviceMemory("cuda:1", 8 * GIB, GIB, 0, GIB, None, {}),
        DeviceMemory("cpu", GIB, 0, 0, None, None, {}),
    )
    evidence = with_changes(HEALTHY_RUN, device_usage=(), device_memory=held)
    (found,) = find_all(evidence)
    assert (found.kind, "18.0 GiB" in found.text, "10.0 GiB" in found.text) == ("fuller", True, True)
    unknown = with_changes(evidence, device_memory=tuple(one._replace(rest=None) for one in held))
    assert find_all(unknown) == []


def test_a_slower_replica_is_named_with_both_times() -> None:
    (found,) = find_all(with_changes(HEALTHY_RUN, replicas=(replica_stats(0), replica_stats(1, ms=12))))
    assert found.kind == "uneven"
    assert "Replica 1 of Model (cuda:1) takes 2.4× as long as replica 0" in found.text
    assert "12.0 ms and 5.00 ms" in found.ground


def on_device(number: int, ms: float, device_ms: float | None, calls: int = 1000) -> ReplicaStats:
    return replica_stats(number, ms=ms, on_device=_series_stats(device_ms, calls))


def test_a_slower_gpu_is_found_by_its_own_time() -> None:
    """The host queues the work of both GPUs in the same time."""
    (found,) = find_all(with_changes(HEALTHY_RUN, replicas=(on_device(0, 5, 20), on_device(1, 5, 50))))
    assert (found.kind, found.weight) == ("uneven", pytest.approx(0.6, rel=0.01))
    assert "Replica 1 of Model (cuda:1) takes 2.5× as long as replica 0" in found.text
    assert found.ground == "forward on the device, median 49.9 ms and 20.0 ms, equal rows"  # at most 0.4% off


@pytest.mark.parametrize(
    ("replicas", "kinds_found"),
    [
        ((on_device(0, 5, 20), on_device(1, 15, 20)), []),  # one is queued later, and both compute for the same time
        ((on_device(0, 5, 20), on_device(1, 5, None, 0)), []),
        ((on_device(0, 5, 20), on_device(1, 15, None, 0)), ["uneven"]),  # according to host times
        ((on_device(0, 5, 20), on_device(1, 5, 50, MIN_STEPS - 1)), []),
        ((on_device(0, 5, 20), on_device(1, 5, 50, MIN_STEPS)), ["uneven"]),
        ((on_device(0, 5, 20), replace(on_device(1, 5, 50), virtual=True)), []),
        ((on_device(0, 5, 20), on_device(1, 5, 29)), []),
        ((on_device(0, 5, 5.1), on_device(1, 19, 20)), []),  # the device waits for the thread that queues its work
        ((on_device(0, 5, 5.1), on_device(1, 16, 20)), ["uneven"]),
    ],
)
def test_devices_are_compared_where_all_are_known(replicas: tuple[ReplicaStats, ...], kinds_found: list[str]) -> None:
    assert kinds(with_changes(HEALTHY_RUN, replicas=replicas)) == kinds_found


def waiting(host: float, device: float | None, count: int = 1000) -> RunAnalysis:
    """Return a training that waits for its loader for these shares of a step of 20 ms."""
    found = mode_stats(data=host, forward=0.9 - host)
    phases = [
        phase._replace(device_share=device, device_count=count, device_ns=None if device is None else device * 20 * MS)
        if phase.name == "data"
        else phase
        for phase in found.phases
    ]
    return with_changes(HEALTHY_RUN, modes=(replace(found, phases=tuple(phases)),))


def test_the_finding_about_data_uses_device_waits_where_they_are_known() -> None:
    assert find_all(waiting(0.4, 0.01)) == [], "it has work while the host waits"
    (found,) = find_all(waiting(0.4, 0.35))
    assert found.text == "The GPU waits for data: 35% of step time."
    assert "on the device median 7.00 ms; step median 20.0 ms" in found.ground
    assert found.weight == 0.35
    for unknown in (waiting(0.4, None, 0), waiting(0.4, 0.01, MIN_STEPS - 1)):
        (found,) = find_all(unknown)
        assert found.text == "The training waits for data: 40% of step time."
        assert "device" not in found.ground


def loader_lines(**lines: int) -> dict[str, Any]:
    """Return a record in which these lines of data.py have samples: `augment_41`."""
    counts = {f"`{name}` (data.py:{line})": count for key, count in lines.items() for name, line in [key.split("_")]}
    return {"process": 0, "took_s": 10.0, "lines": counts}


def test_the_finding_about_data_names_the_function_that_takes_the_time() -> None:
    """1,000 steps of 20 ms wait 8 s; the function has two lines, and the record before does not count."""
    events = [loader_lines(old_1=9), loader_lines(augment_41=100, augment_42=56, decode_7=44)]
    run = with_changes(waiting(0.4, None, 0), memory_events={"loader_lines": events})
    (found,) = find_data_waits(run)
    cause = "78% (72% to 83%) of the loader's time is in `augment` (data.py:41)"
    assert found.text == f"The training waits for data: 40% of step time; {cause}."
    assert found.saves_s == pytest.approx(8.0)
    assert found.advice.startswith("a faster `augment` (data.py:41); ")


@pytest.mark.parametrize(
    ("events", "step_ms"),
    [
        ([], 20),
        ([{**loader_lines(augment_41=200), "process": 1}], 20),
        ([loader_lines(**{f"part{number}_1": 20 for number in range(10)})], 20),  # none stands out
        ([loader_lines(augment_41=40, decode_7=60, read_8=100)], 5000),  # two batches say little
    ],
)
def test_no_function_is_named_without_proof(events: list[dict[str, Any]], step_ms: float) -> None:
    evidence = waiting(0.4, None, 0)
    modes = tuple(replace(stats, mean_ns=step_ms * MS) for stats in evidence.modes)
    (found,) = find_data_waits(with_changes(evidence, modes=modes, memory_events={"loader_lines": events}))
    assert found.text == "The training waits for data: 40% of step time."


def save_of(place: str, size: int | None, **absent: str) -> dict[str, Any]:
    """Return the record of a save that took 2 s."""
    facts = {"process": 0, "function": "torch.save", "filesystem": "nfs4", "t_s": 1.0, "save_s": 2.0}
    return {**facts, "place": place, "bytes": size, "absent": absent}


def run_with_saves(saves: tuple[dict[str, Any], ...]) -> RunAnalysis:
    """Return a run of 40 s with these records of saves."""
    return with_changes(
        HEALTHY_RUN,
        announced=RunEvents(checkpoints=saves),
        time_by_activity={"training": 39 * SECOND},
        until_ns=40 * SECOND,
    )


def test_the_line_that_saves_longest_is_named_with_size_bandwidth_and_file_system() -> None:
    saves = (save_of("a.py:1", 1 << 30), save_of("b.py:2", 1 << 30), save_of("b.py:2", 3 << 30))
    (found,) = find_costly_checkpoints(run_with_saves(saves))
    assert found.text.endswith(": 2.00 GiB each at 1.00 GiB/s to nfs4 (b.py:2).")
    assert found.ground == "2 times torch.save, 4.00 s together"
    assert found.saves_s == 4.0


@pytest.mark.parametrize(
    ("saves", "text"),
    [
        ((save_of("a.py:1", 0),) * 2, "of unknown size"),
        ((save_of("a.py:1", None, bytes="not in a file"),) * 2, "not in a file"),
    ],
)
def test_checkpoints_of_unknown_size_have_a_reason(saves: tuple[dict[str, Any], ...], text: str) -> None:
    (found,) = find_costly_checkpoints(run_with_saves(saves))
    assert f": {text} (a.py:1)." in found.text


def test_checkpoints_of_a_small_share_are_no_finding() -> None:
    run = with_changes(
        HEALTHY_RUN,
        announced=RunEvents(checkpoints=(save_of("a.py:1", 1),)),
        time_by_activity={"training": 41 * SECOND},
    )
    assert not list(find_costly_checkpoints(run))
    assert not list(find_costly_checkpoints(with_changes(run, announced=RunEvents())))
    assert not list(find_costly_checkpoints(with_changes(run, time_by_activity={}))), "a run without steps"


def test_copies_are_judged_by_the_devices_own_time() -> None:
    """In a copy, the host may wait for other work of the device."""
    for device, count, expected in ((0.3, 1000, ["copy"]), (0.1, 1000, []), (None, 0, []), (0.3, MIN_STEPS - 1, [])):
        found = mode_stats(copy=0.4, forward=0.5)
        ms = None if device is None else device * 20 * MS
        phases = [
            phase._replace(device_share=device, device_count=count, device_ns=ms) if phase.name == "copy" else phase
            for phase in found.phases
        ]
        said = find_all(with_changes(HEALTHY_RUN, modes=(replace(found, phases=tuple(phases)),)))
        assert [one.kind for one in said] == expected, (device, count)
        if said:
            assert "takes 30% of step time" in said[0].text
            assert "copy median 8.00 ms, p95 10.4 ms, on the device median 6.00 ms; step" in said[0].ground


def test_many_stalls_are_counted_and_the_longest_is_placed() -> None:
    evidence = with_changes(HEALTHY_RUN, longest_steps=(long_step(9000, "other", 77), long_step(2000), long_step(25)))
    (found,) = find_all(evidence)
    assert found.text == "2 steps took more than 10× the median: 11.0 s together."
    assert "step 77 at 00:01:00, 9.00 s, 8.10 s in other; median 20.0 ms" in found.ground
    assert "checkpoint" in found.advice
    every = with_changes(evidence, longest_steps=tuple(long_step(9000, step=n) for n in range(64)))
    (found,) = find_all(every)
    assert found.text.startswith("At least 64 steps")
    assert found.saves_s is None, "nobody knows how many more there are"


def test_the_long_steps_of_ranks_that_step_together_count_once() -> None:
    steps = (long_step(9000), long_step(8990)._replace(process=1), long_step(25), long_step(25)._replace(process=1))
    (found,) = find_all(
        with_changes(
            HEALTHY_RUN,
            other_process_modes=(replace(GOOD_MODE, process=1, process_name="rank 1"),),
            longest_steps=steps,
            names={0: "rank 0", 1: "rank 1"},
        )
    )
    assert found.text == "One step took 9.00 s, 450× the median."
    assert found.saves_s == pytest.approx(8.98)


def test_the_long_step_of_the_rank_that_the_others_waited_for_is_named() -> None:
    waiting = long_step(9000, "sync")._replace(wait_ns=int(8990 * MS))
    (found,) = find_all(
        with_changes(
            HEALTHY_RUN,
            other_process_modes=(replace(GOOD_MODE, process=1, process_name="rank 1"),),
            longest_steps=(waiting, long_step(8990)._replace(process=1)),
            names={0: "rank 0", 1: "rank 1"},
        )
    )
    assert found.ground.startswith("the longest: step 500 of rank 1 at")
    assert "in data" in found.ground


def test_the_process_that_waits_most_for_data_is_named() -> None:
    each = [
        replace(mode_stats(data=share), mean_ns=20.0 * MS, process=number, process_name=f"rank {number}")
        for number, share in enumerate((0.05, 0.7, 0.3))
    ]
    (found,) = find_all(
        run_analysis_with(
            modes=(each[0],),
            other_process_modes=tuple(each[1:]),
            names={number: f"rank {number}" for number in range(3)},
        )
    )
    assert found.saves_s == pytest.approx(0.7 * 20.0), "1,000 steps of 20 ms; not the sum over the ranks"
    assert found.text == "Rank 1 waits for data: 70% of step time."
    assert found.ground.endswith("step median 20.0 ms over 1,000 steps of rank 1; 20% or more in 2 of 3 processes")


def test_a_stall_is_judged_by_the_median_of_its_own_process() -> None:
    fast = replace(GOOD_MODE, process_name="process 0")
    slow = replace(mode_stats(median_ms=300.0, data=0.05), process=1, process_name="process 1")
    steps = (long_step(1500.0)._replace(process=1),) * 20
    assert not find_all(
        run_analysis_with(
            modes=(fast,), other_process_modes=(slow,), longest_steps=steps, names={0: "rank 0", 1: "rank 1"}
        )
    )
