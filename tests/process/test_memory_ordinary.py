"""Ordinary trainings, whose memory rises for a while or goes up and down, have no finding of growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.memory_trends import watch
from support.run_harness import Dpmon

SCRIPT = Path(__file__).parent / "scripts" / "ordinary.py"
KINDS = (
    *("evaluation", "workers", "kept_workers", "checkpoints", "growing_shapes", "convolutions", "recurrent"),
    *("adversarial", "accumulation", "cached_masks", "history", "cycles"),
)
"""The kinds of SCRIPT."""
SECONDS = 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_an_ordinary_training_has_no_finding(kind: str, dpmon: Dpmon) -> None:
    assert watch(dpmon, SCRIPT, kind, SECONDS, limit=500) is None
