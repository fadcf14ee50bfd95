"""Fixtures for tests over a simulated CUDA runtime, which need torch built for CUDA, but no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from simulated import Simulated, built, why_not

sys.path.append(str(Path(__file__).parents[1] / "process"))  # tracing.py


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled simulated runtime; skip the test if it cannot be compiled."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return built(tmp_path_factory.mktemp("cudart"))


@pytest.fixture(scope="module")
def gpus(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Simulated GPUs."""
    return Simulated(library, tmp_path_factory.mktemp("gpus"))
