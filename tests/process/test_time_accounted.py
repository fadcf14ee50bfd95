"""Every second of a run belongs to one part, and steps and rates agree with the script's own count and clock."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping

import pytest
from clocked import CLOSE, SCRIPT, answer_twice, end, only_where_waits_show, pause, reader_of, switch
from running import Dpmon

from dpmon.store.opened import open_store
from dpmon.store.window import Window, accounted

pytestmark = pytest.mark.slow

ROWS = 16
Told = Mapping[str, Mapping[str, float]]


def parts(dpmon: Dpmon) -> dict[str, float]:
    """Return the parts of the elapsed time in seconds, after a check of their sum."""
    elapsed = float(dpmon.exit()["seconds"])
    with open_store(dpmon.last()) as store:
        window = Window(store)
        found = accounted(window.spent, int(elapsed * 1e9), window.lives)
    assert sum(found.values()) / 1e9 == pytest.approx(elapsed, rel=0.01)
    assert min(found.values()) >= 0
    return {name: ns / 1e9 for name, ns in found.items()}


def check(dpmon: Dpmon, told: Told, *, unfinished: int = 0, slack: float = CLOSE) -> dict[str, float]:
    """Compare steps and rates of each mode with those of the script; return the parts of its time."""
    with open_store(dpmon.last()) as store:
        window = Window(store)
        assert {mode for mode, evaluation in window.modes if not evaluation} == told["samples"].keys()
        for mode, samples in told["samples"].items():
            figures = window.figures(mode)
            assert figures.steps == samples / ROWS + unfinished
            rate = window.rate(mode)
            assert rate is not None
            assert rate.samples_per_s == pytest.approx(samples / told["seconds"][mode], rel=slack)
            assert figures.tally.sum("samples").total == samples + unfinished * ROWS
    return parts(dpmon)


@pytest.mark.parametrize(
    ("way", "between_s"), [("plain", 0.0), ("epochs", 4 * 0.3), ("workers", 4 * 0.4), ("bare", 2 * 0.4)]
)
def test_a_loop_and_the_time_between_its_epochs(dpmon: Dpmon, way: str, between_s: float) -> None:
    result = dpmon.run("--headless", *dpmon.warm(), SCRIPT, way)
    assert result.status == 0, result.errors
    told = json.loads(result.text)
    found = check(dpmon, told)
    assert found["training"] + found["between"] == pytest.approx(told["seconds"]["single"], rel=CLOSE)
    assert between_s <= found["between"] < between_s + told["seconds"]["single"] / 2
    for none in ("evaluation", "paused", "input", "missed"):
        assert found[none] == 0


IN_TURN = """
import json, os, sys, time
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
time.sleep(1.0)
first = time.monotonic()
for _ in range(50):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
print(json.dumps([first, time.monotonic()]), flush=True)
if sys.argv[1:] == ["again"]:
    os.execv(sys.executable, [sys.executable, sys.argv[0]])
"""


@pytest.mark.parametrize("way", ["two commands", "os.execv"])
def test_processes_one_after_the_other_start_up_each(dpmon: Dpmon, way: str) -> None:
    script = dpmon.script(IN_TURN)
    one = [sys.executable, script]
    twice = ["sh", "-c", '"$@" && "$@"', "sh", *one] if way == "two commands" else [*one, "again"]
    began = time.monotonic()
    told = [json.loads(line) for line in dpmon.run("--headless", *twice).text.splitlines()]
    found = parts(dpmon)
    (first, last), (again, end) = told
    assert found["training"] + found["between"] == pytest.approx(last - first + end - again, rel=CLOSE, abs=0.05)
    assert again - last <= found["startup"] <= again - last + first - began
    assert found["ending"] <= time.monotonic() - end


def test_evaluations_between_epochs(dpmon: Dpmon) -> None:
    result = dpmon.run("--headless", *dpmon.warm(), SCRIPT, "evaluations")
    assert result.status == 0, result.errors
    told = json.loads(result.text)
    found = check(dpmon, told)
    assert found["evaluation"] == pytest.approx(told["apart"]["evaluation"], rel=0.3)
    with open_store(dpmon.last()) as store:
        assert Window(store).figures("single", True).steps == 50


def test_two_toggles_and_a_pause(dpmon: Dpmon) -> None:
    process = dpmon.start("--headless", "--devices", "cpu,cpu", "--mode", "single", *dpmon.warm(), SCRIPT, "asked")
    reader = reader_of(dpmon)
    switch(reader, "dp", "single", seconds=1.0)
    pause(reader, 1.5)
    out, _ = end(dpmon, reader, process)
    told = json.loads(out)
    assert set(told["samples"]) == {"dp", "single"}
    found = check(dpmon, told, slack=2 * CLOSE)
    assert found["paused"] == pytest.approx(told["apart"]["paused"], abs=0.2)


@pytest.mark.slow
@only_where_waits_show
def test_waits_for_input(dpmon: Dpmon) -> None:
    process = dpmon.start("--headless", SCRIPT, "reads", stdin=-1)
    out, _ = answer_twice(dpmon, process)
    told = json.loads(out)
    # The beginning of each of the two waits is known within 0.1 s, the end within 0.025 s.
    found = check(dpmon, told, slack=CLOSE + 2 * 0.125 / told["seconds"]["single"])
    assert found["input"] == pytest.approx(told["apart"]["input"], abs=0.5)


@pytest.mark.slow
def test_three_ranks(dpmon: Dpmon) -> None:
    dpmon.run("--headless", SCRIPT, "ranks", 3)  # gloo may abort at the end, without dpmon too
    told = [json.loads((dpmon.cwd / f"told-{rank}").read_text()) for rank in range(3)]
    with open_store(dpmon.last()) as store:
        window = Window(store)
        assert len(store.processes) == 3
        # On few processors, a rank may wait between reading its clock and its first step.
        slack = CLOSE + 0.05 / told[0]["seconds"]["single"]
        rates = [each["samples"]["single"] / each["seconds"]["single"] for each in told]
        for process in store.processes:
            rate, true = window.rate("single", process=process), rates[store.rank(process) or 0]
            assert rate is not None
            assert rate.samples_per_s == pytest.approx(true, rel=slack)
            assert window.figures("single", process=process).steps == 60
        assert window.figures("single").steps == 180
        together = window.rate("single")
        assert together is not None
        assert together.samples_per_s == pytest.approx(sum(rates), rel=slack)
    found = parts(dpmon)
    seconds = told[0]["seconds"]["single"]
    assert found["training"] + found["between"] == pytest.approx(seconds, rel=3 * slack)


@pytest.mark.parametrize("way", ["raises", "killed"])
def test_a_script_that_ends_in_the_middle_of_a_step(dpmon: Dpmon, way: str) -> None:
    result = dpmon.run("--headless", *dpmon.warm(), SCRIPT, way)
    assert result.status != 0
    told = json.loads(result.text.splitlines()[0])
    found = check(dpmon, told, unfinished=1)  # its optimizer has stepped
    assert found["between"] >= 0.4
