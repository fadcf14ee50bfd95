"""Unusual models, tensors and exceptions behave the same with and without the tracer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.tracer_harness import TracedRun, TracedScript, run_traced, traced_script_text

NAMES = re.findall(r"^@check\ndef (\w+)", traced_script_text("odd"), re.M)
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"run": False},
    "default": {},
    "replicas": {"replicas": 2},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedRun]:
    """The same script in four ways, in parallel."""
    place = tmp_path_factory.mktemp("odd")
    scripts = {name: TracedScript(place, traced_script_text("odd"), **options) for name, options in WAYS.items()}
    return {name: script.end() for name, script in scripts.items()}


@pytest.mark.parametrize("way", ["default", "replicas"])
@pytest.mark.parametrize("name", NAMES)
def test_odd_things_have_the_same_result_as_without_dpmon(runs: dict[str, TracedRun], way: str, name: str) -> None:
    if way == "replicas" and name == "a_tensor_that_watches":
        return  # such a tensor notices that it is split
    assert runs[way].status == 0, runs[way].err
    assert runs[way].printed[name] == runs["alone"].printed[name]


@pytest.mark.parametrize("way", ["default", "replicas"])
def test_odd_things_print_nothing_more_and_warn_a_limited_number_of_times(runs: dict[str, TracedRun], way: str) -> None:
    """Nothing is printed; the record has some warnings, but not many."""
    assert runs[way].err == runs["alone"].err
    assert runs[way].unreadable == ()
    assert 0 < len(runs[way].complaints) < 20


def test_a_model_that_is_moved(tmp_path: Path) -> None:
    """A model is first called on one device, then trained on another; each call has its device."""
    run = run_traced(tmp_path, traced_script_text("moving"))
    assert (run.status, run.complaints, run.err) == (0, [], "")
    devices = [call.devices for call in run.calls("Net")]
    assert devices == [("meta",)] * 1 + [("cpu",)] * 103 + [("meta",)] * 5
