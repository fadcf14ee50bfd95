"""Fixtures for tests over a simulated CUDA runtime, which need torch built for CUDA, but no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_devices import SimulatedCuda, compile_fake_cuda, missing_requirement


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled simulated runtime; skip the test if it cannot be compiled."""
    reason = missing_requirement()
    if reason:
        pytest.skip(reason)
    return compile_fake_cuda(tmp_path_factory.mktemp("cudart"))


@pytest.fixture(scope="module")
def gpus(library: Path, tmp_path_factory: pytest.TempPathFactory) -> SimulatedCuda:
    """Simulated GPUs."""
    return SimulatedCuda(library, tmp_path_factory.mktemp("gpus"))
