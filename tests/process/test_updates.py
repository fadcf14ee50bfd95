"""Recorded optimizer updates agree with those that the script counts itself, and averages are per update."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from dpmon.record.schema import WARM_UP_STEPS
from support.baseline_comparison import records_of_kind, run_unless_aborted
from support.run_harness import Dpmon
from support.tracer_harness import run_traced, traced_script_text

TEXT = traced_script_text("updating")
SCRIPTS = Path(__file__).resolve().parent / "scripts"
RANKS, EVALUATES = SCRIPTS / "accumulates.py", SCRIPTS / "evaluates_alone.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("form", ["accumulating", "scaled", "repeating", "searching"])
def test_the_updates_of_each_step_equal_those_counted_by_the_script(tmp_path: Path, form: str) -> None:
    found = run_traced(tmp_path, TEXT, form)
    assert not found.complaints
    assert [step.quantity("updates") or 0 for step in found.steps()] == found.printed


@pytest.mark.slow
def test_averages_of_ranks_that_accumulate_are_per_update(dpmon: Dpmon) -> None:
    result = run_unless_aborted(lambda _: dpmon.run("--headless", *TORCHRUN, RANKS), lambda ended: ended.errors)
    assert result.status == 0, result.errors
    first, second = [json.loads(line) for line in result.text.splitlines() if line.startswith("{")]
    assert first == second == {"steps": 80, "updates": 20, "all_reduce": 20}
    assert "2 training processes, 80 steps, 20 updates, " in result.errors
    steps = records_of_kind(dpmon.records(), "step")
    assert sum(step.get("updates", 0) for step in steps) == 2 * first["updates"]

    status, report = (json.loads(dpmon.run(*words, "--json").text) for words in (("status",), ("report",)))
    assert (status["steps"], status["updates"]) == (80, 20)
    assert "step 80 · 20 updates" in dpmon.run("status").text
    assert (report["steps"], report["updates"]) == (80, 20)
    communication = report["communication"]
    assert (communication["synced"], communication["unsynced"]) == (first["all_reduce"] / first["updates"], 3.0)
    for operation in communication["sampled"]["operations"]:
        assert operation["collectives"] == communication["sampled"]["samples"]
    averaged = [step for step in steps if step.get("synced") and step["step"] > WARM_UP_STEPS]
    assert communication["exposed_ms"] == pytest.approx(fmean(step["exposed_ms"] for step in averaged))
    text = " ".join(dpmon.run("report").text.split())
    assert "passes 1.00 synced per update, 3.00 under no_sync" in text
    assert "backward passes under no_sync: 3.00 passes per update, 60 passes total" in text
    assert "of it; 19 updates" in text


@pytest.mark.slow
def test_what_one_rank_evaluates_is_in_no_figure_of_training(dpmon: Dpmon) -> None:
    """The ranks accumulate two steps, and rank 0 alone makes twice as many evaluation steps as training steps."""
    result = run_unless_aborted(lambda _: dpmon.run("--headless", *TORCHRUN, EVALUATES), lambda ended: ended.errors)
    assert result.status == 0, result.errors
    printed = sorted((json.loads(line) for line in result.text.splitlines() if line.startswith("{")), key=str)
    (first, second), steps = printed, 120
    assert first == {"rank": 0, "steps": steps, "updates": 60, "evaluations": 240}
    assert second == {"rank": 1, "steps": steps, "updates": 60, "evaluations": 0}

    report = json.loads(dpmon.run("report", "--json").text)
    calls = {(row["mode"], row["step_kind"]): row["calls"] for row in report["sizes"]}
    assert calls == {("ddp", "training"): 2 * steps, ("single", "evaluation"): 240}
    assert {(row["inputs"], row["steps"], row["calls"]) for row in report["ranks"]} == {("[8, 16]", steps, steps)}
    after_evaluations, in_warm_up = 2, WARM_UP_STEPS // 2
    assert report["communication"]["joined_steps"] == first["updates"] - in_warm_up - after_evaluations
    status = json.loads(dpmon.run("status", "--json").text)
    for communication in (report["communication"], status["communication"]):
        if samples := communication["sampled"]["samples"]:
            assert communication["sampled"]["one_in"] == round(2 * first["updates"] / samples)
    text = dpmon.run("report").text
    assert "EPOCHS of rank 0" in text
    assert "120 steps, 60 updates of rank 0\n" in text
