"""Twelve causes of a stall, each staged: the rank, the place and what the others wait in are named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.schema import WARM_UP_STEPS
from dpmon.stalls.stacks import find_py_spy
from support.run_harness import LIMIT_S, CommandResult, Dpmon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parent / "scripts" / "stuck.py"
PAUSES = SCRIPT.with_name("pauses.py")
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
    "gone": r"rank 1 has exited; rank 0 waits in backward \(stuck\.py:{backward}\)",
    "locks": r"in two_locks \(stuck\.py:{here}\)",
    "iterator": r".*in .*\(stuck\.py:{here}\)",
}

WITHOUT_PY_SPY = {
    "worker": r"rank 1 in DataLoader\.__next__ \(stuck\.py:{loop}\); rank 0 waits in backward \(stuck\.py:{backward}\)",
    "stopped": r"rank 1 is stopped \(SIGSTOP\), in the script; rank 0 waits in backward \(stuck\.py:{backward}\)",
    "gil": r"rank 1 in the script; rank 0 waits in backward \(stuck\.py:{backward}\)",
}
"""What only py-spy sees is missing: the stacks of other processes, of stopped ones, and of C code with the GIL."""
PAUSE_S = 13.0
"""Longer than the threshold."""
PAUSING = {
    "pauses": ("first", "gap", "evaluation", "checkpoint", "compilation", "loader"),
    # Alone, because its line is learned only if its stack is taken in one of its first pauses, a few seconds each.
    "learned": ("learned",),
}
ENDED = "disk", "stopped"
"""The causes that a test ends. Under "stopped", the supervisor is killed in the middle of the stall."""


WAIT_S = 300
"""Longest wait for a state: all runs start at once, which takes minutes on a busy machine."""


def until(dpmon: Dpmon, state: str, *words: str) -> CommandResult:
    """Wait until the run is in a state."""
    return dpmon.run("status", "--wait", state, "--timeout", WAIT_S, *words, limit=WAIT_S + LIMIT_S)


def stalls(dpmon: Dpmon) -> list[dict[str, Any]]:
    return [record for record in dpmon.records() if record["kind"] == "stall"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dpmon]]:
    """The runs by cause. They wait most of the time, so they run at the same time."""
    yield from started(tmp_path_factory.mktemp("stuck"), {cause: (SCRIPT, cause) for cause in ("input", *CAUSES)})


@pytest.fixture(scope="module")
def pausing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dpmon]]:
    """The runs that pause. They start after the others, which keep the machine busy while they start."""
    pauses = {name: (PAUSES, PAUSE_S, *kinds) for name, kinds in PAUSING.items()}
    yield from started(tmp_path_factory.mktemp("pauses"), pauses)


def started(place: Path, commands: Mapping[str, tuple[object, ...]]) -> Iterator[dict[str, Dpmon]]:
    found = {}
    for name, words in commands.items():
        (place / name / "work").mkdir(parents=True)
        dpmon = found[name] = Dpmon(place / name / "state", place / name / "work")
        stdin = subprocess.PIPE if name == "input" else subprocess.DEVNULL
        dpmon.start("--headless", *words, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield found
    for dpmon in found.values():
        dpmon.clean_up()


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named(runs: dict[str, Dpmon], cause: str) -> None:
    dpmon = runs[cause]
    dpmon.info()
    waited = until(dpmon, "stalled")
    assert waited.status == 0, waited.text
    found = stalls(dpmon)
    causes = CAUSES if find_py_spy() is not None else {**CAUSES, **WITHOUT_PY_SPY}
    expected = causes[cause].format(here=LINES.get(cause), backward=BACKWARD, loop=LINES["loop"])
    assert re.fullmatch(expected, found[0]["text"]), found[0]["text"]
    # Counted in samples of the host, one a second, because the supervisor may have got no processor.
    seconds = [one["t_s"] for one in dpmon.records() if one["kind"] == "host"]
    assert sum(found[0]["since_s"] < t_s < found[0]["t_s"] for t_s in seconds) < NOTICED_S
    if cause == "worker" and find_py_spy() is not None:
        _, _, stack = dpmon.run("why").out.decode().partition("  worker of rank 1 (pid ")
        assert re.search(rf"^  Samples\.__getitem__ \(.*/stuck\.py:{LINES[cause]}\)$", stack, re.M)
        assert "\n  _worker_loop (torch/utils/data/_utils/worker.py:" in stack
    if cause in ENDED:
        check_the_end(dpmon, found[0], cause)


def check_the_end(dpmon: Dpmon, first: dict[str, Any], cause: str) -> None:
    """Check the records and the figures after the end of a stall."""
    if cause == "stopped":
        check_the_takeover(dpmon, first)
    else:
        (dpmon.cwd / "slow").write_text("")
    assert until(dpmon, "training").status == 0
    _, end = stalls(dpmon)
    assert (end["text"], end["since_s"]) == (first["text"], pytest.approx(first["since_s"]))
    assert end["lasted_s"] > first["t_s"] - first["since_s"]
    check_the_figures(dpmon, is_step_lost=cause == "stopped")


def check_the_takeover(dpmon: Dpmon, first: dict[str, Any]) -> None:
    """Check the commands and a new supervisor in the middle of the stall, and end it."""
    assert dpmon.run("status").status == 5
    now = json.loads(dpmon.run("why", "--json").out)["now"]
    assert now["text"] == first["text"]
    assert now["ranks"][1]["stacks"]
    dpmon.kill_supervisor()
    later = json.loads(dpmon.run("why", "--json").out)["now"]  # starts another one
    assert (later["text"], later["since_s"]) == (first["text"], pytest.approx(first["since_s"]))
    assert [rank["waits"] for rank in later["ranks"]] == [False, True]
    if find_py_spy() is not None:  # the new supervisor is no ancestor of the ranks, one of which is stopped
        assert all(rank["why_no_stack"] is None and rank["stacks"] for rank in later["ranks"])
    os.kill(now["ranks"][0]["pid"], signal.SIGCONT)


def check_the_figures(dpmon: Dpmon, *, is_step_lost: bool) -> None:
    """No figure includes the step in which the run stalled; the script itself noted when each turn began.

    `is_step_lost`: the step was open when the supervisor was killed.
    """
    assert until(dpmon, "finished").status == 0
    begins = [float(line) for line in (dpmon.cwd / "turns-0").read_text().split()]
    turns = [after - before for before, after in pairwise(begins)]
    stood = max(turns)
    story = json.loads(dpmon.run("report", "--json").out)
    (mode,) = story["modes"]
    assert story["steps"] == len(begins) - is_step_lost
    assert mode["steps"] == len(begins) - 1
    usual = (sum(turns) - stood) / (len(turns) - 1)
    assert mode["steps_per_s"] == pytest.approx(1 / usual, rel=0.05)
    assert story["elapsed"]["stalled_s"] == pytest.approx(stood, rel=0.01)
    # On a busy machine, there may also be steps that took much longer than usual.
    (text,) = (one["text"] for one in story["findings"] if one["kind"] == "stall" and "left out" in one["text"])
    subject = "A stall" if is_step_lost else "A step with a stall"
    assert re.fullmatch(rf"{subject} is left out of the metrics: [\d.]+ s\.", text)
    ranks = story["communication"]
    assert ranks["joined_steps"] == len(begins) - WARM_UP_STEPS - 1
    assert (ranks["exposed_ms"] + ranks["wait_ms"]) * ranks["joined_steps"] < 500 * stood, "not with the wait of rank 0"


def test_a_wait_for_input_is_no_stall(runs: dict[str, Dpmon]) -> None:
    dpmon = runs["input"]
    dpmon.info()
    found = until(dpmon, "waiting for input", "--json")
    assert found.status == 0, found.text
    assert dpmon.run("status").status == 3
    assert [stall for stall in stalls(dpmon) if "(SIGSTOP)" not in stall["text"]] == []


@pytest.mark.parametrize("name", PAUSING)
def test_long_pauses_are_no_stalls(pausing: dict[str, Dpmon], name: str) -> None:
    """A checkpoint, a compilation, an evaluation and others, each in a process of its own."""
    dpmon = pausing[name]
    dpmon.info()
    (process,) = dpmon.started
    assert process.wait(3 * LIMIT_S) == 0  # a minute on an idle machine
    assert stalls(dpmon) == []
