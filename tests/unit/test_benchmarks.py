"""The benchmarks start, and the hardware check has its table. Nothing else would find a broken import."""

from __future__ import annotations

import importlib.util
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


FILE = Path(__file__).parents[1] / "gpu" / "check.py"


def test_the_table_says_how_far_apart_figures_are_and_how_far_they_may_be(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("hardware_check", FILE)
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    rows = tmp_path / "table"
    assert check.read(rows) == []
    rows.write_text(
        '{"what": "forward", "dpmon": 10.2, "reference": 10, "unit": "ms", "good": true, "limit": 0.05, "share": 1}\n'
        '{"what": "heat", "dpmon": 64, "reference": 60, "unit": "°C", "good": false, "limit": 3.0, "share": false}\n'
        '{"what": "waits", "dpmon": 0, "reference": 0, "unit": "calls", "good": true, "limit": null, "share": true}\n'
    )
    lines = [line.split("  ") for line in check.table(check.read(rows))]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells == [
        ["what", "dpmon", "reference", "apart", "may be"],
        ["forward", "10.2 ms", "10 ms", "+2.0%", "5%", "ok"],
        ["heat", "64 °C", "60 °C", "+4 °C", "3 °C", "FAILED"],
        ["waits", "0 calls", "0 calls", "+0 calls", "ok"],
    ]
    assert "GPUs: " in check.machine()[0]
