"""Counts and times of synchronized backward passes agree with those of the script itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from support.tracer_harness import TracedRun, run_traced, traced_script_text

TEXT = traced_script_text("synced")
Run = Callable[[str], TracedRun]
ONE_STEP = (
    *("plain", "static", "buckets", "unused", "recomputed", "accumulating", "forgotten"),
    *("evaluating", "raising", "again", "compiled", "chained", "around", "towers", "teacher"),
)
"""Forms with the same steps in script and record."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a form of the script, once for all tests."""

    @cache
    def found(form: str) -> TracedRun:
        run = run_traced(tmp_path_factory.mktemp("synced"), TEXT, form)
        assert not run.complaints
        return run

    return found


@pytest.mark.parametrize("form", ONE_STEP)
def test_recorded_passes_equal_those_counted_by_hooks_of_the_script(run: Run, form: str) -> None:
    found = run(form)
    own: list[dict[str, Any]] = found.printed
    steps = [step for step in found.steps() if "optimizer" in step.phases]
    if form == "static":  # torch records nothing about the first pass
        own[0]["synced"] = 0
    assert [step.quantity("synced") or 0 for step in steps] == [one["synced"] for one in own]
    assert [step.quantity("unsynced") or 0 for step in steps] == [one.get("unsynced", 0) for one in own]
    so_far = [sum(one["synced"] for one in own[: at + 1]) for at in range(len(own))]
    assert [step.sync_number for step in steps] == [number or None for number in so_far]


def test_all_passes_of_rivals_are_counted(run: Run) -> None:
    found = run("rivals")
    total = sum(one["synced"] for one in found.printed)
    assert total == 3 * 20
    assert sum(step.quantity("synced") or 0 for step in found.steps()) == total
    assert max(step.sync_number or 0 for step in found.steps()) == total
    assert {(event.data["wrapper"], event.data["parameters"]) for event in found.events("ddp")} == {(0, 4), (1, 8)}


@pytest.mark.parametrize("form", ["plain", "buckets", "unused", "chained", "around", "towers", "teacher"])
def test_the_tail_is_the_time_after_the_last_gradient(run: Run, form: str) -> None:
    found = run(form)
    own = found.printed
    steps = found.steps()
    assert len(steps) == len(own)
    differences = []
    for step, truth in zip(steps, own, strict=True):
        sync, backward = step.phases["sync"], step.phases["backward"]
        assert 0 < sync < truth["backward_ns"]
        if form != "towers":  # it has two backward passes in a step
            assert backward + sync <= truth["backward_ns"]
        differences.append(abs(sync - truth["tail_ns"]))
    usual = statistics.median(truth["backward_ns"] for truth in own)
    assert statistics.median(differences) < max(300_000, usual / 10)


@pytest.mark.parametrize("form", ["buckets", "late"])
def test_each_bucket_says_when_it_was_ready(run: Run, form: str) -> None:
    """In the form `late`, torch starts to note gradients later than the forward ends."""
    found = run(form)
    facts = found.events("ddp")[-1].data
    assert len(facts["bucket_bytes"]) > 2
    assert sum(facts["bucket_bytes"]) == facts["parameter_bytes"] == 8 * (64 * 64 + 64) * 4
    for step in found.steps()[3:]:
        assert step.spans is not None
        (backward,) = [span for span in step.spans if span.phase == "backward"]
        (sync,) = [span for span in step.spans if span.phase == "sync"]
        assert len(step.buckets) == len(facts["bucket_bytes"])
        assert list(step.buckets) == sorted(step.buckets)
        inexact = (step.buckets[-1] - step.buckets[0]) // 1000  # a bucket's lead is exact to 0.05%
        assert backward.offset_ns <= step.buckets[0] + inexact
        assert step.buckets[0] < step.buckets[-1] == sync.offset_ns
        assert sync.offset_ns + sync.host_ns <= backward.offset_ns + backward.host_ns


def test_the_facts_of_a_wrapper(run: Run) -> None:
    found = run("unused")
    facts = found.events("ddp")[-1].data
    assert (facts["root"], facts["backend"], facts["group"], facts["group_size"]) == ("Branches", "gloo", [0], 1)
    assert (facts["parameters"], facts["find_unused_parameters"], facts["static_graph"]) == (6, True, False)
    assert "_reduces" in facts["comm_hook"]  # those of the script and no others
    unknown = facts["unused_bytes"] is None and "unused_bytes" in facts["absent"]  # in torch 2.4 it is a sum
    assert unknown or facts["unused_bytes"] in (0, (64 * 64 + 64) * 4)
