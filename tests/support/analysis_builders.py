"""Analyses of runs without a store: a healthy run, and one run for each finding."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpmon.model.comparison_stats import Interval
from dpmon.model.device_usage import DeviceUsage
from dpmon.model.layouts import IdleDeviceCounts, ReplicaStats
from dpmon.model.mode_comparison import Comparison
from dpmon.store.memory_growth import Growth, MemoryTrend
from dpmon.store.step_stats import PhaseStats, Rate, StepStats
from dpmon.store.steps import MEASURED, StepRow
from dpmon.store.tally import SeriesStats, Tally
from support.history_builders import run_analysis_with, series_stats, with_changes
from support.record_builders import SECOND

MS = 1_000_000
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class StatsOfPhases(StepStats):
    """Statistics of steps with phases that no tally has."""

    phases: tuple[PhaseStats, ...] = ()


def mode_stats(name: str = "dp", steps: int = 1000, median_ms: float = 20.0, **shares: float) -> StatsOfPhases:
    """Return a mode with these shares of phases."""
    phases = tuple(
        PhaseStats(phase, steps, share * median_ms * MS, share * median_ms * 1.3 * MS, None, share)
        for phase, share in shares.items()
    )
    rate = Rate(1000.0, None, 1000.0, None)
    times = median_ms * MS, median_ms * 1.3 * MS, median_ms * MS
    return StatsOfPhases(name, False, steps, 0, *times, rate, Tally(), phases=phases)


GOOD_MODE = mode_stats(data=0.05, forward=0.4, backward=0.4, optimizer=0.1, replicate=0.1, scatter=0.02, gather=0.02)


def _tally_of_third(median: float, quarter: float, **phases: float) -> Tally:
    """Return steps with this median and a quarter of `quarter` (ms), and the medians of their phases (ms)."""
    steps = series_stats([int(ms * MS) for ms in (median, median, median, quarter, quarter)])
    return Tally(stats={"step": steps, **{name: series_stats([int(ms * MS)]) for name, ms in phases.items()}})


def slowing_mode(early: float, late: float, p75: float, p25: float, steps: int = 1000) -> StepStats:
    first, last = (
        _tally_of_third(early, p75, data=1, other=1),
        _tally_of_third(late, p25, data=1.1, other=max(late - early, 0)),
    )
    return replace(GOOD_MODE, steps=steps, early=first, late=last)


def device_usage(index: int = 0, **more: Any) -> DeviceUsage:
    good: Mapping[str, Any] = {
        "name": "NVIDIA H200", "uuid": f"GPU-{index}", "called": f"cuda:{index}", "of_run": True, "samples": 100,
        "util": array("d", [95.0] * 100), "mem_used_max": 20.0 * GIB, "mem_run_max": 18.0 * GIB,
        "mem_total": 141.0 * GIB, "temperature_max": 70.0, "power_max": 600.0, "throttle_samples": 100,
    }  # fmt: skip
    return DeviceUsage(index=index, **{**good, **more})


def _series_stats(ms: float | None, calls: int = 1000) -> SeriesStats:
    return series_stats([] if ms is None else [int(ms * MS)] * calls)


def replica_stats(number: int, rows: int | None = 16, ms: float = 5.0, **more: Any) -> ReplicaStats:
    found = ReplicaStats("dp", "Model", number, f"cuda:{number}", calls=1000, rows=rows, time=_series_stats(ms))
    return replace(found, **more)


def long_step(ms: float, phase: str = "data", step: int = 500) -> StepRow:
    measured = tuple(int(ms * 0.9 * MS) if name == phase else None for name in MEASURED)
    return StepRow(1, 0, step, "dp", 60 * SECOND, int(ms * MS), 0, 0, measured)


HEALTHY_RUN = run_analysis_with(
    modes=(GOOD_MODE,),
    batches=(IdleDeviceCounts("Model", 2, 1000, 10, 7, 1),),
    replicas=(replica_stats(0), replica_stats(1, ms=5.5)),
    device_usage=(device_usage(0), device_usage(1, mem_run_max=17.0 * GIB)),
    longest_steps=(long_step(26), long_step(25)),
    process_numbers=[0],
    last_step_ns=100 * SECOND,
    end_ns=110 * SECOND,
)


WAITING_MODE = mode_stats(data=0.43, forward=0.3, backward=0.27)


STARTING_MODE = replace(
    mode_stats(data=0.1, forward=0.3),
    mean_ns=60.0 * MS,
    phases=(PhaseStats("data", 1000, 2.0 * MS, 3.0 * MS, None, 0.6),),
)


GROWING_MEMORY = MemoryTrend(
    *("host", None, Growth(2.2 * MIB, 2.1 * MIB, 2.3 * MIB, True, 640.0 * MIB, 290.0), 4.0, 2.0 * GIB),
    limit="cgroup",
    limit_bytes=23.5 * GIB,
    room_bytes=21.0 * GIB,
)


RUNS_BY_FINDING = {
    "memory": with_changes(HEALTHY_RUN, memory_trends=[GROWING_MEMORY]),
    "slower": with_changes(HEALTHY_RUN, mode_comparison=Comparison(speedup=Interval(0.61, 0.58, 0.65))),
    "data": with_changes(HEALTHY_RUN, modes=(mode_stats(data=0.43, forward=0.3, backward=0.27),)),
    "replicate": with_changes(HEALTHY_RUN, modes=(mode_stats(data=0.02, forward=0.7, replicate=0.48, backward=0.28),)),
    "transfer": with_changes(HEALTHY_RUN, modes=(mode_stats(forward=0.7, scatter=0.15, gather=0.15, backward=0.3),)),
    "small batch": with_changes(HEALTHY_RUN, batches=(IdleDeviceCounts("Model", 8, 1000, 1000, 3, 5),)),
    "idle": with_changes(HEALTHY_RUN, batches=(IdleDeviceCounts("Model", 8, 1000, 990, 9, 3),)),
    "uneven": with_changes(HEALTHY_RUN, replicas=(replica_stats(0), replica_stats(1), replica_stats(2, rows=4))),
    "fuller": with_changes(HEALTHY_RUN, device_usage=(device_usage(0, mem_run_max=30.0 * GIB), device_usage(1))),
    "throttled": with_changes(
        HEALTHY_RUN, device_usage=(device_usage(0, throttled=Counter({"power limit": 40})), device_usage(1))
    ),
    "low use": with_changes(
        HEALTHY_RUN, device_usage=(device_usage(0, util=array("d", [12.0] * 100)), device_usage(1))
    ),
    "drift": with_changes(HEALTHY_RUN, modes=(slowing_mode(20, 32, 22, 30),)),
    "long steps": with_changes(HEALTHY_RUN, longest_steps=(long_step(9000), long_step(25))),
    "spread": with_changes(HEALTHY_RUN, modes=(replace(GOOD_MODE, p95_ns=300.0 * MS),)),
    "quiet": with_changes(HEALTHY_RUN, end_ns=200 * SECOND),
}
