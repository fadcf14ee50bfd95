"""The FLOPs of steps: counted once a shape, as torch's own counter does, without effects on the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.tracer_harness import TracedRun, results_of_script, run_traced, run_untraced, traced_script_text

TEXT = traced_script_text("counting_flops")
LINEAR = 2 * 30 * (2 * 16 * 32 + 3 * 32 * 4)
"""FLOPs of a step of the linear network: two layers forward, weights' gradients, and the second input's gradient."""
MODELS = (
    *("linear", "conv", "resnet", "mobilenet", "autoencoder", "unet", "gpt", "encoder", "transformer", "graph"),
    *("lstm", "gru", "mixture"),
)


def run_unchanged(place: Path, form: str, **options: Any) -> TracedRun:
    """Run a form traced and untraced, and check that its results are equal."""
    found = run_traced(place, TEXT, form, **options)
    assert not found.complaints
    assert results_of_script(found) == results_of_script(run_untraced(place, TEXT, form))
    assert json.loads(found.out.splitlines()[-1])["modes"] == 0
    return found


def counts(found: TracedRun) -> list[dict[str, Any]]:
    return [dict(event.data) for event in found.events("flops")]


def flops(found: TracedRun) -> list[int | None]:
    return [step.quantity("flops") for step in found.steps()]


@pytest.mark.parametrize("form", MODELS)
def test_flops_equal_those_of_torchs_counter(tmp_path: Path, form: str) -> None:
    found = run_unchanged(tmp_path, form)
    (count,) = counts(found)
    reference = json.loads(run_untraced(tmp_path, TEXT, form, "reference").out.splitlines()[0])
    assert (count["reason"], count["step"], count["recomputed_flops"]) == (None, 3, 0)
    assert count["flops"] == reference["flops"] > 0
    assert sum(count["by_dtype"].values()) == count["flops"]
    assert flops(found)[3:] == [count["flops"]] * 3
    assert [name for name in count["uncounted"] if "rnn" not in name] == []


def test_flops_of_simple_networks_are_the_analytic_ones(tmp_path: Path) -> None:
    (linear,), (conv,), (gpt,) = (counts(run_traced(tmp_path, TEXT, form)) for form in ("linear", "conv", "gpt"))
    assert linear["flops"] == LINEAR
    first, second = 2 * 4 * 16 * 16 * 8 * 3 * 9, 2 * 4 * 7 * 7 * 4 * 8 * 9
    assert conv["flops"] == 2 * first + 3 * second
    layers, width, words, length, rows = 2, 128, 100, 16, 4
    parameters = 12 * layers * width**2 + width * words
    attention = 4 * layers * rows * length**2 * width
    forward = 2 * rows * length * parameters + attention
    assert gpt["flops"] == pytest.approx(3 * forward, rel=0.01)
    assert linear["operators"] > 10


@pytest.mark.parametrize("form", ["gpt, recomputed", "gpt, recomputed by a reentrant checkpoint"])
def test_recomputation_is_counted_apart(tmp_path: Path, form: str) -> None:
    (plain,), found = counts(run_traced(tmp_path, TEXT, "gpt")), run_unchanged(tmp_path, form)
    (count,) = counts(found)
    forward = plain["flops"] / 3
    assert count["flops"] == plain["flops"]
    assert 0.6 * forward < count["recomputed_flops"] <= forward
    last_step = found.steps()[-1]
    assert last_step.quantity("flops") == count["flops"]
    assert last_step.quantity("recomputed_flops") == count["recomputed_flops"]
    reference = json.loads(run_untraced(tmp_path, TEXT, form, "reference").out.splitlines()[0])
    assert reference["flops"] == count["flops"] + count["recomputed_flops"]


@pytest.mark.parametrize("replicas", [None, 2, 3])
def test_replicas_count_as_much_as_the_model_alone(tmp_path: Path, replicas: int | None) -> None:
    found = run_traced(tmp_path, TEXT, "parallel", replicas=replicas, mode="dp" if replicas else None)
    assert not found.complaints
    (count,) = counts(found)
    assert (count["flops"], count["uncounted"], count["reason"]) == (LINEAR, [], None)
    assert flops(found)[3:] == [LINEAR] * 3
    assert found.printed["modes"] == 0


def test_autocast_is_seen(tmp_path: Path) -> None:
    (count,) = counts(run_unchanged(tmp_path, "in_bfloat16"))
    assert count["by_dtype"] == {"bfloat16": LINEAR}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("epochs", [LINEAR, LINEAR // 3] * 3),
        ("accumulating", [3 * LINEAR] * 6),
        ("adversarial", [2 * 20 * (7 * 16 + 3 * 8 * 16)] * 6),
        ("without_an_optimizer", [LINEAR] * 6),
        ("with_a_teacher", [LINEAR + 2 * 30 * (16 * 32 + 32 * 4)] * 6),
    ],
)
def test_loops(tmp_path: Path, form: str, expected: list[int]) -> None:
    found = run_unchanged(tmp_path, form)
    known = flops(found)
    first = 2 * len(expected) // 3
    if form == "epochs":
        expected = [LINEAR, LINEAR, LINEAR // 3] * 3
    assert known[first:] == expected[first:]
    assert set(known) <= {None, *expected}


def test_two_models_with_equal_inputs_are_counted_apart(tmp_path: Path) -> None:
    found = run_unchanged(tmp_path, "two_models")
    first, second = (2 * 30 * (2 * 16 * width + 3 * width * 4) for width in (16, 64))
    assert set(flops(found)[:6]) <= {None, first}
    assert set(flops(found)[6:]) <= {None, second}
    assert flops(found)[-1] == second


def test_at_most_eight_shapes_are_counted(tmp_path: Path) -> None:
    assert len(counts(run_unchanged(tmp_path, "many_shapes"))) == 8


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("within_a_mode", "the script has a dispatch mode or a transform of torch.func of its own"),
        ("mode_left_later", "the script has a dispatch mode or a transform of torch.func of its own"),
        ("raising", "an exception"),
        ("many_operators", "more than 50,000 operators"),
        ("raising_in_an_operator", "an exception"),
        ("with_a_subclass", "the script computes with a subclass of Tensor (TwoTensor)"),
        ("compiled", "torch.compile is in use"),
        ("transformed", "the script has a dispatch mode or a transform of torch.func of its own"),
    ],
)
def test_absent_flops_have_a_reason(tmp_path: Path, form: str, reason: str) -> None:
    found = run_unchanged(tmp_path, form)
    first, *later = counts(found)
    assert reason in first["reason"]
    assert all(first[name] is None for name in ("flops", "recomputed_flops", "by_dtype", "operators", "uncounted"))
    if form == "many_operators":
        assert not later, "no other step is slowed"
    if form.startswith("raising"):
        assert [count["flops"] for count in later if count["reason"] is None] != []


@pytest.mark.parametrize(
    ("form", "uncounted"),
    [
        ("with_a_broken_rule", "aten.addmm"),
        ("with_an_own_operator", "lab.double"),
        ("bilinear", "aten._trilinear"),
    ],
)
def test_operators_without_a_rule_are_listed(tmp_path: Path, form: str, uncounted: str) -> None:
    (count,) = counts(run_unchanged(tmp_path, form))
    assert (count["uncounted"], count["reason"]) == ([uncounted], None)
    assert count["flops"] >= 0


def test_sparse_products_do_not_count_as_dense_ones(tmp_path: Path) -> None:
    (count,) = counts(run_unchanged(tmp_path, "sparse"))
    (dense,) = counts(run_traced(tmp_path, TEXT, "graph"))
    assert count["flops"] <= dense["flops"]
    assert count["uncounted"]


@pytest.mark.parametrize("form", ["warning", "forking"])
def test_the_script_does_not_notice_the_count(tmp_path: Path, form: str) -> None:
    assert counts(run_unchanged(tmp_path, form))[0]["flops"] > 0
