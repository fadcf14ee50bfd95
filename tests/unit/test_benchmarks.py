"""The benchmarks start, and the hardware check has its table. Nothing else would find a broken import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).resolve().parents[1] / "benchmarks").glob("bench_*.py"))


def test_there_are_some() -> None:
    assert len(BENCHMARKS) >= 6


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_starts(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
