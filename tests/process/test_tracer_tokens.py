"""The tokens of each step are those that the script counts itself, and other models have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.schema import EVALUATION, TRAINING
from support.baseline_comparison import run_unless_aborted
from support.run_harness import Dpmon
from support.tracer_harness import TracedRun, TracedScript, traced_script_text

TOKEN_RANKS = Path(__file__).resolve().parent / "scripts" / "token_ranks.py"
WITHOUT_TOKENS = ("images", "graph", "recommender", "features_of_lookups")
Counts = list[int | None]


def run(place: Path, *words: str, **how: Any) -> TracedRun:
    return TracedScript(place, traced_script_text("tokens"), *words, **how).end()


def count_tokens(place: Path, *words: str, **how: Any) -> tuple[dict[str, list[int]], Counts, Counts]:
    """Return what the script counted, and the recorded tokens of its training steps and its evaluations."""
    traced = run(place, *words, **how)
    assert not traced.complaints
    trained, evaluated = (
        [step.quantity("tokens") for step in traced.steps() if step.kind == kind] for kind in (TRAINING, EVALUATION)
    )
    return traced.printed, trained, evaluated


@pytest.mark.parametrize("way", ["gpt", "hugging_face", "encoder_decoder", "unpadded", *WITHOUT_TOKENS])
def test_the_tokens_are_those_of_the_script(tmp_path: Path, way: str) -> None:
    own, trained, evaluated = count_tokens(tmp_path, way)
    assert trained == own["trained"]
    assert evaluated == own["evaluated"]


def test_tokens_of_micro_batches_add_up(tmp_path: Path) -> None:
    own, trained, _ = count_tokens(tmp_path, "gpt", "accumulated")
    assert trained == own["trained"]


def test_a_call_of_several_replicas_has_the_tokens_of_the_whole_batch(tmp_path: Path) -> None:
    own, trained, _ = count_tokens(tmp_path, "in_dp", mode="dp", replicas=2)
    assert trained == own["trained"]


@pytest.mark.parametrize("way", ["masked", "masked_in_a_batch"])
def test_padding_is_no_token(tmp_path: Path, way: str) -> None:
    """The masks of the first 64 steps and of one per second are counted."""
    own, trained, _ = count_tokens(tmp_path, way)
    assert len(trained) == 250
    assert sum(count or 0 for count in trained) == pytest.approx(sum(own["trained"]), rel=0.02)


def test_counting_masks_changes_nothing(tmp_path: Path) -> None:
    """Neither weights nor random numbers, nor what a mode of the script sees."""
    assert run(tmp_path, "masked").printed == run(tmp_path, "masked", run=False).printed


def test_tokens_of_ranks_add_up(dpmon: Dpmon, tmp_path: Path) -> None:
    """Ranks with 4 x 8 and 4 x 16 tokens per step."""
    result = run_unless_aborted(
        lambda number: dpmon.run("--headless", TOKEN_RANKS, tmp_path / f"store-{number}"), lambda ended: ended.errors
    )
    assert result.status == 0, result.errors
    report = json.loads(dpmon.run("report", "--json").out)
    (mode,) = report["modes"]
    assert mode["tokens_per_s"] == pytest.approx(96 * mode["steps_per_s"])
    assert [rank["tokens_per_s"] / rank["steps_per_s"] for rank in report["ranks"]] == pytest.approx([32, 64])
    assert "tokens/s" in result.errors
