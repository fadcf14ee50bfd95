"""The finding about a line that waits for a GPU in every step, and the waits about which there is none."""

from __future__ import annotations

from array import array

import pytest

from dpmon.model.findings.all_findings import find_all
from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.record_types import Event
from support.analysis_builders import HEALTHY_RUN, device_usage
from support.history_builders import open_store_with, with_changes
from support.record_builders import SECOND, Training

MS = 1_000_000
LINE = {"train.py:57 `item`": 3 * MS}


def sampled(*samples: dict[str, int], util: float | None = 60.0) -> RunAnalysis:
    """Return a healthy run that trains for 100 s, with sampled steps of 30 ms."""
    events = [{"process": 0, "wall_ms": 30.0, "lines": lines} for lines in samples]
    usage = () if util is None else (device_usage(of_run=True, util=array("d", [util] * 30)),)
    return with_changes(
        HEALTHY_RUN,
        memory_events={**HEALTHY_RUN.memory_events, "host_syncs": events},
        time_by_activity={"training": 100 * SECOND},
        device_usage=usage,
    )


def test_a_line_that_waits_in_every_step() -> None:
    (found,) = find_all(sampled(LINE, LINE, LINE))
    assert found.text == "train.py:57 `item` waits 3.00 ms for the GPU in every step: 10% of step time."
    assert found.ground == "in 3 of 3 sampled steps; the GPU is idle 40%"
    assert found.gain_text == "saves at most 10.0 s of 1 min 50 s"


@pytest.mark.parametrize(
    "run",
    [
        sampled(LINE, LINE),
        sampled(LINE, *[{}] * 9),
        sampled(*[{"train.py:57 `item`": MS // 2}] * 5),
        sampled(*[LINE] * 5, util=100.0),
        sampled(*[LINE] * 5, util=None),
    ],
    ids=["too few samples", "every tenth step", "short", "the GPU is busy all the time", "its idle time is unknown"],
)
def test_other_waits_are_not_reported(run: RunAnalysis) -> None:
    assert find_all(run) == []


def test_a_line_that_waits_longer_but_rarely_does_not_hide_another() -> None:
    rare = {"train.py:90 `__repr__`": 28 * MS}
    (found,) = find_all(sampled(LINE | rare, LINE, LINE, LINE))
    assert found.text.startswith("train.py:57")


def test_the_samples_of_every_rank_are_read() -> None:
    """The newest 64 records would be two of each of 32 ranks, but a finding needs three of one rank."""
    sample = Event("host_syncs", {"wall_ms": 30.0, "lines": LINE})
    store = open_store_with({rank: [*Training(process=rank).begin(), *[sample] * 3] for rank in range(32)})
    assert len(RunAnalysis(store).memory_events["host_syncs"]) == 96
