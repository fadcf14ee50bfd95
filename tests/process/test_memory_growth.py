"""Trainings whose memory grows, each for another reason, have the finding while they run; ordinary ones have none."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from subprocess import DEVNULL

import pytest

from dpmon.errors import HistoryError
from dpmon.run.run_directory import RunError
from dpmon.store.memory_growth import MemoryTrend, read_memory_trends
from dpmon.store.store_opening import open_store
from support.run_harness import Dpmon, wait_for

ROOT = Path(__file__).parents[2]
CAUSES = {
    "running_sum": "a sum of losses with their graphs",
    "output_list": "a list of outputs",
    "shape_cache": "a cache with an entry for each shape",
    "hook_buffer": "a buffer of a forward hook",
    "logged_loss": "logged values with their graphs",
    "none": "numbers only",
}
"""What each script of tests/support/memory_causes keeps."""
ORDINARY = (
    *("evaluation", "workers", "kept_workers", "checkpoints", "growing_shapes", "convolutions", "recurrent"),
    *("adversarial", "accumulation", "cached_masks", "history", "cycles"),
)
"""The kinds of tests/process/scripts/ordinary.py."""
ORDINARY_S = 60
PAGE = ROOT / "docs" / "what-to-do.md"
_TABLE = re.compile(r"(?<=\| the script keeps \| growth that it finds \|\n\|---\|---\|\n)(?:\|.*\n)+")
_ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.MULTILINE)
MIB = 1 << 20
_ENV = {"OMP_NUM_THREADS": "1"}


def read_trends(dpmon: Dpmon) -> list[MemoryTrend]:
    """Return the trends of the only run now; none before it has a history."""
    for directory in dpmon.runs():
        try:
            with open_store(directory) as store:
                return read_memory_trends(store)
        except (RunError, HistoryError):
            pass
    return []


def watch(dpmon: Dpmon, *words: object, limit: float) -> MemoryTrend | None:
    """Run a script until there is a finding, and return it; None if the script ends without one.

    Not in a fork of a Python with torch (`Dpmon.warm`), whose memory is not that of the run.
    """
    process = dpmon.start("--headless", *words, env=_ENV, stdout=DEVNULL, stderr=DEVNULL)
    findings: list[MemoryTrend] = []

    def has_finding_or_ended() -> bool:
        time.sleep(0.5)  # there is a sample each second
        findings[:] = [trend for trend in read_trends(dpmon) if trend.matters]
        return bool(findings) or process.poll() is not None

    wait_for(has_finding_or_ended, limit)
    return findings[0] if findings else None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_has_the_finding_of_the_documentation(name: str, dpmon: Dpmon) -> None:
    """The documentation has a table of causes. DPMON_GOLDEN=write writes what this test finds into it."""
    steps = 400 if name == "none" else 100_000
    trend = watch(dpmon, ROOT / "tests" / "support" / "memory_causes" / f"{name}.py", steps, limit=500)
    page = PAGE.read_text(encoding="utf-8")
    rows = dict(_ROW.findall(_TABLE.search(page)[0]))  # type: ignore[index]
    if os.environ.get("DPMON_GOLDEN") == "write":
        rows[CAUSES[name]] = "none" if trend is None else f"{trend.growth.step_bytes / MIB:.1f} MiB per step"
        PAGE.write_text(_TABLE.sub("".join(f"| {keeps} | {grown} |\n" for keeps, grown in rows.items()), page))
    expected = rows[CAUSES[name]]
    if expected == "none":
        assert trend is None
        return
    assert trend is not None
    assert trend.growth.step_bytes == pytest.approx(float(expected.split()[0]) * MIB, rel=0.4)
    assert "\n  Memory of the run grows " in dpmon.run("status").text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_training_has_no_finding(kind: str, dpmon: Dpmon) -> None:
    script = ROOT / "tests" / "process" / "scripts" / "ordinary.py"
    assert watch(dpmon, script, kind, ORDINARY_S, limit=500) is None
