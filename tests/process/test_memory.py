"""What the memory of each device holds: the tracer's sums against the script's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import Dpmon
from tracing import text_of, traced


def test_sums_are_those_the_script_makes_itself(dpmon: Dpmon, tmp_path: Path) -> None:
    result = traced(tmp_path, text_of("holding"))
    assert result.status == 0, result.err
    assert not result.events("warning")
    assert result.unreadable == ()
    events = result.events("memory")
    assert events, "the first look is after the first turns"
    newest = events[-1].data
    assert newest["step"] >= 3
    assert newest["took_ms"] > 0
    (cpu,) = newest["devices"]
    said = result.said
    assert cpu["device"] == "cpu"
    assert {name: cpu[f"{name}_bytes"] for name in said} == said
    for name in ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes", "peak_after_step"):
        assert cpu[name] is None
        assert "no statistics" in cpu["absent"][name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_rest_and_the_peak_are_torchs_own(tmp_path: Path) -> None:
    text = text_of("holding").replace("def main():", "def main():\n    torch.set_default_device('cuda')", 1)
    result = traced(tmp_path, text + "\nprint(json.dumps(torch.cuda.max_memory_allocated()))\n")
    (gpu,) = [one for one in result.events("memory")[-1].data["devices"] if one["device"] == "cuda:0"]
    assert gpu["rest_bytes"] == gpu["allocated_bytes"] - sum(
        gpu[f"{name}_bytes"] for name in ("model", "gradients", "optimizer")
    )
    assert gpu["allocated_bytes"] <= gpu["peak_bytes"] <= result.said


def test_the_summary_says_it_and_why_the_rest_is_not_known(dpmon: Dpmon) -> None:
    result = dpmon.run("--headless", "--mode", "script", dpmon.script(text_of("holding")))
    assert result.status == 0, result.errors
    # model 50 * 16 + 16 * 16 + 16 + 16 + 100 floats; Adam: two for each of the 288 of its own, and three counters
    assert (
        "cpu  model 4.64 KiB, gradients 1.55 KiB, optimizer 2.26 KiB, rest –, peak –  (torch keeps no" in result.errors
    )
