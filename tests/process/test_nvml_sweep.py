"""Every NVML function fails with all kinds of codes, through the real pynvml: only its own fields are lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.fake_devices import FakeNvml, compile_fake_library
from support.run_harness import scaled_size

SWEEP = Path(__file__).parents[1] / "nvml" / "sweep.py"


@pytest.mark.slow
def test_a_third_of_all_codes_of_each_function_cost_only_its_own_fields(tmp_path: Path) -> None:
    """All codes in a long run (DPMON_LONG)."""
    fake = FakeNvml(tmp_path, compile_fake_library(tmp_path))
    env = {**os.environ, **fake.environment()}
    env.pop("FAKE_NVML_LOG")  # half a million lines that nobody reads
    done = subprocess.run(
        [sys.executable, str(SWEEP), env["FAKE_NVML_CONTROL"], str(scaled_size(3, 1))],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["tried"] > scaled_size(350, 900)
