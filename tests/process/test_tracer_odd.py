"""Unusual models, tensors and exceptions behave the same with and without the tracer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tracing import Script, Traced, text_of, traced

WAYS: dict[str, dict[str, object]] = {
    "alone": {"run": False},
    "default": {},
    "replicas": {"replicas": 2},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traced]:
    """The same script in four ways, in parallel."""
    place = tmp_path_factory.mktemp("odd")
    scripts = {name: Script(place, text_of("odd"), **options) for name, options in WAYS.items()}  # type: ignore[arg-type]
    return {name: script.end() for name, script in scripts.items()}


@pytest.mark.parametrize("way", ["default", "replicas"])
@pytest.mark.parametrize(
    "name",
    [
        "a_hash_that_needs_what_is_set_later",
        "an_exception_without_a_text",
        "a_model_that_hides_its_parameters",
        "a_model_that_hides_its_mode",
        "a_tensor_that_watches",
        "an_argument_not_to_be_touched",
        "a_class_on_which_nothing_is_set",
        "a_call_of_its_own",
        "a_forward_set_on_the_instance",
        "a_generator_as_result",
        "other_tensors",
        "other_ways_to_call",
        "how_torch_looks",
        "a_result_that_cannot_be_looked_at",
    ],
)
def test_odd_things_have_the_same_result_as_without_dpmon(runs: dict[str, Traced], way: str, name: str) -> None:
    if way == "replicas" and name == "a_tensor_that_watches":
        return  # such a tensor notices that it is split
    assert runs[way].status == 0, runs[way].err
    assert runs[way].printed[name] == runs["alone"].printed[name]


@pytest.mark.parametrize("way", ["default", "replicas"])
def test_odd_things_print_nothing_more_and_warn_a_limited_number_of_times(runs: dict[str, Traced], way: str) -> None:
    """Nothing is printed; the record has some warnings, but not many."""
    assert runs[way].err == runs["alone"].err
    assert runs[way].unreadable == ()
    assert 0 < len(runs[way].complaints) < 20


def test_a_model_that_is_moved(tmp_path: Path) -> None:
    """A model is first called on one device, then trained on another; each call has its device."""
    run = traced(tmp_path, text_of("moving"))
    assert (run.status, run.complaints, run.err) == (0, [], "")
    devices = [call.devices for call in run.calls("Net")]
    assert devices == [("meta",)] * 1 + [("cpu",)] * 103 + [("meta",)] * 5
