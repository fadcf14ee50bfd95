"""Trainings whose memory grows, each for another reason, have the finding while they run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.memory_trends import watch
from support.run_harness import Dpmon

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
PAGE = ROOT / "docs" / "what-to-do.md"
_TABLE = re.compile(r"(?<=\| the script keeps \| growth that it finds \|\n\|---\|---\|\n)(?:\|.*\n)+")
_ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.MULTILINE)
MIB = 1 << 20


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
    # The first finding follows few steps, of which a busy machine makes fewer in a second.
    assert 0.5 < trend.growth.step_bytes / MIB / float(expected.split()[0]) < 2
    assert "\n  Memory of the run grows " in dpmon.run("status").text
