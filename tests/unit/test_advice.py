"""Each advice is given where it can help, and not where it is impossible, already followed or worthless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dpmon.model.communication import Communication
from dpmon.model.findings.all_findings import find_all
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import LoaderStart, RunEvents
from dpmon.store.gaps import Gap
from dpmon.store.step_stats import PhaseStats
from support.analysis_builders import (
    GIB,
    HEALTHY_RUN,
    MS,
    RUNS_BY_FINDING,
    STARTING_MODE,
    WAITING_MODE,
    device_usage,
    long_step,
)
from support.history_builders import run_analysis_with, with_changes
from support.rank_builders import communication_of, ddp_wrapper, rank_times
from support.record_builders import SECOND

KEEPS = "persistent_workers"


def loaders(*starts: float, workers: int = 2, persistent: bool = False, **more: Any) -> tuple[LoaderStart, ...]:
    """Return starts of one loader, each at a second of the run; with `start`: of loaders that are started once."""
    return tuple(
        LoaderStart(0, int(at * SECOND), SECOND, workers, persistent, **{"start": number, **more})
        for number, at in enumerate(starts, 1)
    )


def having(evidence: RunAnalysis) -> Callable[..., RunAnalysis]:
    return lambda *starts, **more: with_changes(evidence, loaders=loaders(*starts, **more))


WAITS, FEW, STALLED = (
    having(with_changes(HEALTHY_RUN, modes=(WAITING_MODE,))),
    having(with_changes(HEALTHY_RUN, modes=(STARTING_MODE,))),
    having(with_changes(HEALTHY_RUN, longest_steps=(long_step(9000), long_step(25)))),
)
GAPS = having(
    with_changes(
        HEALTHY_RUN,
        gaps=(Gap(0, 100, "dp", 10 * SECOND, 12 * SECOND, 2 * SECOND),),
        time_by_activity={"training": 5 * SECOND, "between": 2 * SECOND},
    )
)
COPIES = having(
    with_changes(
        HEALTHY_RUN,
        modes=(
            replace(
                WAITING_MODE,
                phases=(
                    PhaseStats("copy", 1000, MS, MS, MS, 0.4, device_ns=9.0 * MS, device_share=0.4, device_count=500),
                ),
            ),
        ),
    )
)
UNEVEN = with_changes(HEALTHY_RUN, device_usage=(device_usage(0, mem_run_max=30.0 * GIB), device_usage(1)))
SINGLE = tuple(replace(mode, mode="single") for mode in HEALTHY_RUN.modes)


def ranks(**about: Any) -> RunAnalysis:
    """Return the evidence of two ranks with much exposed communication and this wrapper."""
    times, unsynced = [rank_times(number, 0.1, exposed_ms=5.0) for number in (0, 1)], about.pop("unsynced", 0)
    wrapper = ddp_wrapper(**{"backend": "nccl", **about})
    return run_analysis_with(whole_communication=communication_of(times, wrapper, unsynced=unsynced))


def accumulating(unsynced: int = 0, **times: int) -> Communication:
    return communication_of([rank_times(number, 0.1, **times) for number in (0, 1)], unsynced=unsynced)


SPEED = RUNS_BY_FINDING["slower"], RUNS_BY_FINDING["replicate"], RUNS_BY_FINDING["transfer"]

TABLE: dict[str, tuple[str, list[RunAnalysis], dict[str, RunAnalysis]]] = {
    # advice: its words, where it is given, and where it is not given
    "keep the workers, data": (
        KEEPS,
        [WAITS(1, 50), WAITS(1, 50, workers=0), FEW(1, 50), WAITS(50, start=4)],
        {
            "one epoch": WAITS(1),
            "made anew in each epoch": WAITS(1, 50, start=1),
            "two loaders, each read once": FEW(1, 50, start=1),
            "one epoch with few long fetches": FEW(1),
            "no workers": FEW(1, 50, workers=0),
            "already kept": WAITS(1, 50, persistent=True),
            "already kept, few long fetches": FEW(1, 50, persistent=True),
            "no loader of torch": WAITS(),
        },
    ),
    "keep the workers, stall": (
        KEEPS,
        [STALLED(1, 50)],
        {
            "one epoch": STALLED(1),
            "made anew": STALLED(1, 50, start=1),
            "no workers": STALLED(1, 50, workers=0),
            "kept": STALLED(1, 50, persistent=True),
        },
    ),
    "keep the workers, between": (
        KEEPS,
        [GAPS(1, 10)],
        {
            "first start": GAPS(10),
            "made anew": GAPS(1, 10, start=1),
            "no workers": GAPS(1, 10, workers=0),
            "kept": GAPS(1, 10, persistent=True),
        },
    ),
    "pinned memory": ("pin_memory", [COPIES(), COPIES(1)], {"pinned": COPIES(1, pinned=True)}),
    "set_device": (
        "LOCAL_RANK",
        [with_changes(UNEVEN, modes=SINGLE, names={0: "rank 0", 1: "rank 1"})],
        {"DataParallel": UNEVEN, "spread by the script": with_changes(UNEVEN, modes=SINGLE)},
    ),
    "DataParallel gathers": (
        "gathers",
        [UNEVEN],
        {
            "ranks": with_changes(UNEVEN, modes=SINGLE, names={0: "rank 0", 1: "rank 1"}),
            "spread by the script": with_changes(UNEVEN, modes=SINGLE),
        },
    ),
    "a copy less": (
        "gradient_as_bucket_view",
        [ranks(gradient_as_bucket_view=False)],
        {"660 bytes": ranks(parameter_bytes=660), "followed": ranks(gradient_as_bucket_view=True)},
    ),
    "half precision": (
        "bf16_compress_hook",
        [ranks()],
        {"gloo": ranks(backend="gloo"), "a hook": ranks(comm_hook="bf16"), "660 bytes": ranks(parameter_bytes=660)},
    ),
    "no_sync": ("no_sync", [ranks()], {"followed": ranks(unsynced=600)}),
    "another cap": (
        " bucket_cap_mb",
        [ranks(bucket_bytes=[1 << 20, 9])],
        {"one bucket": ranks(bucket_bytes=[1 << 20])},
    ),
    "a smaller cap": (
        "a smaller bucket_cap_mb",
        [ranks(bucket_bytes=[1 << 20, 24 << 20], bucket_cap_bytes=25 << 20)],
        {
            "one parameter": ranks(bucket_bytes=[1 << 20, 60 << 20], bucket_cap_bytes=25 << 20),
            "small": ranks(bucket_bytes=[1 << 10, 1 << 20]),
        },
    ),
    "accumulate": (
        "all backward passes but the last",
        [run_analysis_with(whole_communication=accumulating(synced=800))],
        {
            "followed": run_analysis_with(whole_communication=accumulating(unsynced=600)),
            "one pass a step": run_analysis_with(whole_communication=accumulating()),
        },
    ),
    "on GPUs first": (
        "measure on GPUs first",
        [with_changes(run, modes=tuple(replace(mode, virtual=True) for mode in run.modes)) for run in SPEED],
        {f"GPUs {number}": run for number, run in enumerate(SPEED)},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_an_advice_is_given_only_where_it_can_help(name: str) -> None:
    words, given, not_given = TABLE[name]
    for evidence in given:
        assert words in " | ".join(finding.advice for finding in find_all(evidence))
    for why, evidence in not_given.items():
        said = [finding.advice for finding in find_all(evidence)]
        assert not any(words in advice for advice in said), (why, said)


def test_time_between_steps_has_no_checkpoints() -> None:
    """The finding about checkpoints names their time; what else is between steps has the other finding."""
    gap = Gap(0, 100, "dp", 10 * SECOND, 14 * SECOND, 4 * SECOND)
    run = with_changes(HEALTHY_RUN, gaps=(gap,), time_by_activity={"training": 5 * SECOND, "between": 4 * SECOND})

    def seconds(*saves: tuple[float, float]) -> dict[str, float | None]:
        facts = {"process": 0, "place": "train.py:9", "function": "torch.save", "filesystem": "nfs4"}
        checkpoints = tuple({**facts, "t_s": start, "save_s": save_s, "bytes": 1 << 30} for start, save_s in saves)
        found = find_all(with_changes(run, announced=RunEvents(checkpoints=checkpoints)))
        return {finding.kind: finding.saves_s for finding in found if finding.kind in ("between", "checkpoints")}

    assert seconds() == {"between": 4}
    assert seconds((10, 3.5)) == {"checkpoints": 3.5}
    assert seconds((10, 0.5), (11, 1.0)) == {"checkpoints": 1.5, "between": pytest.approx(2.5)}
    assert seconds((2, 2.0)) == {"checkpoints": 2, "between": 4}, "it was in a step"
