"""Under dpmon each of the script's objects is freed when it is freed without dpmon, with the same finalizers and files.

During a run the garbage collector is off, to separate objects that wait for a collection from those freed at once. The
end is tested in a fresh interpreter, because a fork of a warm one does not free everything at its end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tracer_harness import (
    results_of_script,
    run_traced,
    run_untraced,
    traced_script_text,
)

pytestmark = pytest.mark.slow


FORMS = (
    *("bare", "dp", "subclass", "ddp", "functional", "hand", "ungathered", "inside", "stages", "forward", "compiled"),
    *("finalized", "dp-finalized", "subclass-finalized", "functional-finalized"),
)
SPLIT = [form for form in FORMS if form.partition("-")[0] in ("dp", "subclass", "functional", "hand", "inside")]
"""Forms that run otherwise with --mode script: over one device, or as torch refuses them."""


@pytest.mark.parametrize("form", FORMS)
def test_no_object_lives_longer_than_without_dpmon(tmp_path: Path, form: str) -> None:
    """Batches, results, activations, losses, models, optimizers, failed calls; and no additional finalizer runs."""
    text, words = traced_script_text("lifetimes"), (form, "list", "return")
    expected = results_of_script(run_untraced(tmp_path, text, *words))
    assert "deleted: []" in expected["order"]
    for mode in (None, "script") if form in SPLIT else (None,):
        run = run_traced(tmp_path, text, *words, mode=mode)
        assert results_of_script(run) == expected
        assert len(run.calls()) > 8
        assert run.complaints == (
            [] if form != "forward" else [text for text in run.complaints if "forward() is called directly" in text]
        )


def test_no_object_lives_longer_after_a_toggle(tmp_path: Path) -> None:
    text, words = traced_script_text("lifetimes"), ("bare", "list", "return")
    expected = results_of_script(run_untraced(tmp_path, text, *words))
    for mode in ("dp", "single"):
        run = run_traced(tmp_path, text, *words, mode=mode, replicas=3)
        assert results_of_script(run) == expected
        assert {call.mode for call in run.calls()} >= {mode}


@pytest.mark.parametrize(
    ("form", "batches", "end"),
    [
        ("bare", "list", "return"),
        ("bare", "2", "interrupt"),
        ("dp", "0", "raise"),
        ("subclass", "list", "exit"),
        ("ddp", "list", "inside"),
        ("hand", "list", "thread"),
        ("functional", "list", "_exit"),
    ],
)
def test_a_script_ends_as_without_dpmon(tmp_path: Path, form: str, batches: str, end: str) -> None:
    """The tails of its files, its finalizers and their order, its threads, its status."""
    text, words = traced_script_text("lifetimes"), (form, batches, end)
    expected = results_of_script(run_untraced(tmp_path, text, *words, fresh=True))
    assert results_of_script(run_traced(tmp_path, text, *words, fresh=True)) == expected
    if end != "_exit":
        assert expected["inner"] == b"tail"
        assert len(expected["log"].splitlines()) == 2000
        assert expected["order"][-1] == "global of a thread gone"
