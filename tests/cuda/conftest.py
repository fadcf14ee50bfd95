"""For tests over a simulated CUDA runtime: torch's own CUDA build is needed, a GPU is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from simulated import Simulated, built, why_not

sys.path.append(str(Path(__file__).parents[1] / "process"))  # tracing.py


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated runtime, compiled; skips the test where that cannot be done."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return built(tmp_path_factory.mktemp("cudart"))


@pytest.fixture(scope="module")
def gpus(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Simulated GPUs."""
    return Simulated(library, tmp_path_factory.mktemp("gpus"))
