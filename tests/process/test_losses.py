"""The recorded losses are those that the script prints, and reading them changes nothing."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tracer_harness import TracedRun, TracedScript, traced_script_text

READ = (
    *(
        "plain",
        "accumulated",
        "of_closures",
        "in_a_library",
        "without_an_optimizer",
        "of_a_gan",
        "scaled",
        "scaled_and_freed",
        "scaled_by_a_subclass",
    ),
    *("float64", "float16", "bfloat16", "of_one_element", "a_subclass"),
)
STEPS = 6
needs_edges = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="a pass begins at an edge from torch 2.7 on"
)


def run(place: Path, way: str, **how: Any) -> TracedRun:
    return TracedScript(place, traced_script_text("losing"), way, **how).end()


@pytest.mark.parametrize("way", READ)
def test_the_losses_are_those_of_the_script(tmp_path: Path, way: str) -> None:
    found = run(tmp_path, way)
    assert not found.complaints
    records = [event.data for event in found.events("loss")]
    lines = [(int(each["place"].removeprefix("script.py:")), each["loss"]) for each in records]
    assert [list(each) for each in lines] == found.printed["losses"]
    passes = len(lines) // STEPS
    assert [each["step"] for each in records] == [step for step in range(1, STEPS + 1) for _ in range(passes)]


@pytest.mark.parametrize("way", [*READ, "not_finite", "a_vector", "several", "gradients_only", "under_modes"])
def test_reading_the_losses_changes_nothing(tmp_path: Path, way: str) -> None:
    """Neither the saved state nor random numbers, nor what a mode of the script sees."""
    alone, off = run(tmp_path, way, run=False), run(tmp_path, way, env={"DPMON_LOSS": "False"})
    assert run(tmp_path, way).printed == off.printed
    assert off.printed["state"] == alone.printed["state"]
    assert not off.events("loss")


def test_a_loss_that_is_not_finite_is_recorded_as_such(tmp_path: Path) -> None:
    found = run(tmp_path, "not_finite")
    records = [event.data for event in found.events("loss")]
    assert next(each["step"] for each in records if each["loss"] is None) == 4
    assert all(each["absent"] == {"loss": "nan"} for each in records if each["loss"] is None)
    assert [isnan(loss) for _, loss in found.printed["losses"]] == [each["loss"] is None for each in records]


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("a_vector", "the pass begins at a tensor of 8 values, not at one value"),
        ("several", "the pass begins at several tensors"),
        pytest.param("at_an_edge", "the pass begins at a GradientEdge, which is not a plain tensor", marks=needs_edges),
        ("without_memory", "the pass begins at a tensor of an unusual type"),
        ("negated", "the pass begins at a tensor of an unusual type"),
    ],
)
def test_a_pass_without_a_loss_says_why_once(tmp_path: Path, way: str, why: str) -> None:
    found = run(tmp_path, way)
    assert not found.complaints
    (record,) = found.events("loss")
    assert (record.data["loss"], record.data["absent"]) == (None, {"loss": why})


def test_gradients_without_a_backward_pass_have_no_loss(tmp_path: Path) -> None:
    found = run(tmp_path, "gradients_only")
    assert len(found.steps()) == STEPS
    assert not found.events("loss")


def test_modes_do_not_hide_the_losses(tmp_path: Path) -> None:
    assert len(run(tmp_path, "under_modes").events("loss")) == STEPS


@pytest.mark.parametrize("way", ["accumulated", "of_a_gan", "scaled"])
def test_a_line_is_read_at_most_once_a_second_and_at_the_end(tmp_path: Path, way: str) -> None:
    text = (
        traced_script_text("losing").replace("tracer.LOSS_INTERVAL_NS = 0", "pass").replace("STEPS = 6", "STEPS = 60")
    )
    found = TracedScript(tmp_path, text, way).end()
    times, values, printed = defaultdict(list), defaultdict(list), defaultdict(list)
    for event in found.events("loss"):
        times[event.data["place"]].append(event.data["t_s"])
        values[event.data["place"]].append((event.data["step"], event.data["loss"]))
    for line, loss in found.printed["losses"]:
        printed[f"script.py:{line}"].append(loss)
    assert times.keys() == printed.keys()
    for place, losses in printed.items():
        assert values[place][0] == (1, losses[0])
        assert values[place][-1] == (60, losses[-1])
        assert all(after - before >= 1.0 for before, after in pairwise(times[place][:-1]))


def test_a_step_that_a_scaler_skips_is_an_update(tmp_path: Path) -> None:
    found = run(tmp_path, "of_skipped_steps")
    losses = [event.data["loss"] for event in found.events("loss")]
    assert losses == [None, None, *[loss for _, loss in found.printed["losses"][2:]]]
