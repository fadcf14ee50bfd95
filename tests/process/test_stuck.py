"""Twelve causes of a stall, each staged: the rank, the place and what the others wait in are named."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import Dpmon, wait_for

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "stuck.py"
LINES = {
    match[1]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if (match := re.search(r"# stuck: (\w+)", line))
}
BACKWARD = LINES["backward"]
NOTICED_S = 10.0 + 10.0
"""The threshold, and how long dpmon may take to name the cause after it."""

CAUSES = {
    "worker": r"rank 1 in DataLoader\.__next__ \(stuck\.py:{loop}\); its worker \(pid \d+\) is in Samples\.__getitem__"
    r" \(stuck\.py:{here}\); rank 0 waits in backward \(stuck\.py:{backward}\)",
    "checkpoint": r"rank 0 in checkpoint \(stuck\.py:{here}\); rank 1 waits in backward \(stuck\.py:{backward}\)",
    "evaluation": r"rank 0 in evaluate \(stuck\.py:{here}\); rank 1 waits in backward \(stuck\.py:{backward}\)",
    "raised": r"rank 1 in get_stuck \(stuck\.py:{here}\); rank 0 waits in backward \(stuck\.py:{backward}\)",
    "uneven": r"rank 1 waits in barrier \(stuck\.py:{here}\); rank 0 waits in backward \(stuck\.py:{backward}\):"
    " different collectives",
    "different": r"rank 1 waits in broadcast \(stuck\.py:{here}\); rank 0 waits in backward \(stuck\.py:{backward}\):"
    " different collectives",
    "stopped": r"rank 1 is stopped \(SIGSTOP\), in get_stuck \(stuck\.py:{here}\); rank 0 waits in backward"
    r" \(stuck\.py:{backward}\)",
    "disk": r"rank 1 in (Path\.read_text|get_stuck) \(stuck\.py:{here}\); rank 0 waits in backward"
    r" \(stuck\.py:{backward}\)",
    "gil": r"rank 1 in hold_gil \(stuck\.py:{here}\); rank 0 waits in backward \(stuck\.py:{backward}\)",
    "gone": r"rank 1 is gone; rank 0 waits in backward \(stuck\.py:{backward}\)",
    "locks": r"in two_locks \(stuck\.py:{here}\)",
    "iterator": r".*in .*\(stuck\.py:{here}\)",
}


def stalls(dpmon: Dpmon) -> list[dict[str, Any]]:
    return [record for record in dpmon.records() if record["kind"] == "stall"]


@pytest.mark.parametrize("causes", [list(CAUSES)[:4], list(CAUSES)[4:8], list(CAUSES)[8:]], ids=lambda some: some[0])
def test_the_cause_is_named(causes: list[str], tmp_path: Path) -> None:
    runs = {}
    for cause in causes:
        (tmp_path / cause / "work").mkdir(parents=True)
        runs[cause] = Dpmon(tmp_path / cause / "state", tmp_path / cause / "work")
        runs[cause].start("--headless", SCRIPT, cause, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for cause, dpmon in runs.items():
            dpmon.info()
            found = wait_for(lambda dpmon=dpmon: stalls(dpmon), what=f"the stall of {cause}")  # type: ignore[misc]
            expected = CAUSES[cause].format(here=LINES.get(cause), backward=BACKWARD, loop=LINES["loop"])
            assert re.fullmatch(expected, found[0]["text"]), found[0]["text"]
            assert found[0]["t_s"] - found[0]["since_s"] < NOTICED_S
            now = json.loads(dpmon.run("why", "--json").out)["now"]
            assert re.fullmatch(expected, now["text"]), now["text"]
            assert dpmon.run("status").status == 5
    finally:
        for dpmon in runs.values():
            dpmon.clean_up()


def test_a_wait_for_input_is_no_stall(dpmon: Dpmon) -> None:
    dpmon.start("--headless", SCRIPT, "input", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    dpmon.info()
    found = dpmon.run("status", "--wait", "waiting for input", "--timeout", "90", "--json")
    assert found.status == 0, found.text
    assert dpmon.run("status").status == 3
    assert stalls(dpmon) == []
