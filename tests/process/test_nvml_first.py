"""The first sample of a GPU has all cheap fields; later calls keep to the budget."""

from __future__ import annotations

from pathlib import Path

from fake_nvml import FakeNvml, RunSamples, library
from running import Dpmon

from dpmon.gpu.card import FIRST_S
from dpmon.gpu.questions import QUESTIONS

WAITING = "import os, time\nwhile not os.path.exists('stop'):\n    time.sleep(0.05)\n"

FIELDS = (
    "uuid", "name", "util_pct", "mem_used_bytes", "mem_total_bytes", "mem_reserved_bytes", "power_w", "power_limit_w",
    "sm_clock_mhz", "mem_clock_mhz", "throttle", "temperature_c", "temperature_limit_c", "energy_j", "fan_pct",
    "process_count", "ecc_corrected", "retired_pages", "persistence",
)  # fmt: skip


def test_the_first_sample_has_every_cheap_figure(dpmon: Dpmon, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, library(tmp_path))
    fake.tell("gpus 2")
    dpmon.script(WAITING)
    process = dpmon.start("--headless", "script.py", env=fake.environment())
    try:
        ring = RunSamples.of(dpmon.last)
        ring.until(lambda: len(ring.of_kind("device")) >= 10, "samples")
    finally:
        (dpmon.cwd / "stop").touch()
        process.wait(60)
    for index in (0, 1):
        first = next(one for one in ring.of_kind("device") if one["index"] == index)
        began = [call.began_s for call in fake.asked(device=index)]
        if began[len(QUESTIONS) - 1] - began[0] < FIRST_S:  # else the machine was too slow
            assert {name for name in FIELDS if first[name] is None} == set()
        later = [at - began[0] for at in began if at - began[0] >= 1.0]
        assert later
        # A round may begin a little early, so two seconds may contain the calls of three.
        assert max(sum(at <= other < at + 2 for other in later) for at in later) <= 3 * 8
