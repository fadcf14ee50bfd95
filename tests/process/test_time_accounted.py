"""Every second of a run belongs to one part; steps and rates agree everywhere with the script's own count and clock."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from dpmon.record.schema import EVALUATION
from dpmon.store.step_stats import StatsWindow, account_for_elapsed
from dpmon.store.store_opening import open_store
from support.run_harness import (
    CLOCKED_SCRIPT,
    MAX_RATE_ERROR,
    Dpmon,
    answer_twice,
    end_clocked_run,
    needs_visible_waits,
    pause_script,
    read_clocked_run,
    switch_modes,
    wait_for,
)

pytestmark = pytest.mark.slow

ROWS = 16
Told = Mapping[str, Mapping[str, float]]
"""The script's own samples and seconds by mode, and the seconds that it spent apart from its training."""
WORDS = {"between": "between steps", "paused": "paused", "input": "waiting for input", "evaluation": "evaluation"}
"""Parts of the time, as a summary names them."""


def rates(told: Told) -> dict[str, float]:
    """Return samples per second by mode, by the script's own count and clock."""
    return {mode: samples / told["seconds"][mode] for mode, samples in told["samples"].items()}


def stored_parts(dpmon: Dpmon) -> dict[str, float]:
    """Return the parts of the elapsed time in seconds, after a check of their sum."""
    elapsed = float(dpmon.exit()["seconds"])
    with open_store(dpmon.last()) as store:
        window = StatsWindow(store)
        found = account_for_elapsed(window.time_by_activity, int(elapsed * 1e9), window.alive_intervals)
    assert sum(found.values()) / 1e9 == pytest.approx(elapsed, rel=0.01)
    assert min(found.values()) >= 0
    return {name: ns / 1e9 for name, ns in found.items()}


def number(text: str) -> float:
    """Parse a number such as 1.23k."""
    return float(text.rstrip("k")) * (1000 if text.endswith("k") else 1)


def in_summary(errors: str, mode: str) -> tuple[float, float]:
    """Return the rate of a mode in a summary, and its rate within steps (the same if it is not shown)."""
    (found,) = re.findall(
        rf"^dpmon:   {mode}(?: \(virtual\))? +[\d,]+ .* m?s +([\d.]+k?)(?: \(([\d.]+k?) within steps\))?$", errors, re.M
    )
    return number(found[0]), number(found[1] or found[0])


def seconds(text: str) -> float:
    """Parse a duration such as "1 min 04 s" or "575 ms"."""
    if text.endswith(" ms"):
        return float(text.removesuffix(" ms")) / 1000
    *minutes, rest = text.removesuffix(" s").split(" min ")
    return 60 * sum(map(float, minutes)) + float(rest)


def summary_parts(errors: str) -> dict[str, float]:
    """Return the parts of the elapsed time in a summary (s), after a check of their sum."""
    took = r"((?:\d+ min )?[\d.]+ m?s)"
    (elapsed,) = re.findall(rf"^dpmon: .*: (?:finished in|.* after) {took}", errors, re.M)
    (section,) = re.findall(r"^dpmon: TIME\n(.*?)(?=^dpmon: [A-Z])", errors, re.M | re.S)
    _, _, parts = " ".join(section.replace("dpmon:", "").split()).partition(": ")
    line, _, _ = parts.partition(" the longest ")
    found = {name: seconds(text) for name, text in re.findall(rf"([a-z][a-z -]*) {took}(?: \([^)]*\))?(?:, |$)", line)}
    assert sum(found.values()) == pytest.approx(seconds(elapsed), rel=0.01)
    return found


def report(dpmon: Dpmon) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dpmon.run("report", "last", "--json").out)
    return found


def of_mode(said: dict[str, Any], mode: str = "single") -> dict[str, Any]:
    (found,) = [one for one in said["modes"] if one["mode"] == mode]
    return found


def check(
    dpmon: Dpmon, told: Told, errors: str, *, unfinished: int = 0, slack: float = 0.0, within: float = 0.95
) -> dict[str, float]:
    """Compare steps and rates of each mode in the history, the report and the summary with those of the script.

    `within`: least rate within steps, as a multiple of the rate. Return the parts of the run's time.
    """
    # On a busy machine, time may pass between reading the clock and the first step.
    slack += MAX_RATE_ERROR + 0.05 / sum(told["seconds"].values())
    with open_store(dpmon.last()) as store:
        window = StatsWindow(store)
        assert set(window.modes) == told["samples"].keys()
        for mode, samples in told["samples"].items():
            figures = window.step_stats(mode)
            assert figures.steps == samples / ROWS + unfinished
            rate = window.rate(mode)
            assert rate is not None
            assert rate.samples_per_s == pytest.approx(samples / told["seconds"][mode], rel=slack)
            assert figures.tally.stat("samples").total == samples + unfinished * ROWS
    said = report(dpmon)
    for mode, expected in rates(told).items():
        for shown, inside in (
            (of_mode(said, mode)["samples_per_s"], of_mode(said, mode)["samples_per_s_within_steps"]),
            in_summary(errors, mode),
        ):
            assert shown == pytest.approx(expected, rel=slack)
            assert inside > within * expected
    found = stored_parts(dpmon)
    spent = summary_parts(errors)
    for part, name in WORDS.items():
        assert spent.get(name, 0.0) == pytest.approx(found[part], rel=MAX_RATE_ERROR, abs=0.1)
    assert found["training"] + found["between"] == pytest.approx(sum(told["seconds"].values()), rel=slack, abs=0.1)
    return found


def final(text: str) -> dict[str, float]:
    """Return the metrics of a run that is over; nothing before its end, because the supervisor writes them last."""
    found = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line[0] != "#"}
    return {} if found["dpmon_run_running"] else found


@pytest.mark.parametrize(
    ("way", "between_s"), [("plain", 0.0), ("epochs", 4 * 0.3), ("workers", 4 * 0.4), ("bare", 2 * 0.4)]
)
def test_a_loop_and_the_time_between_its_epochs(dpmon: Dpmon, way: str, between_s: float) -> None:
    lines, metrics = dpmon.cwd / "lines", dpmon.cwd / "x.prom"
    result = dpmon.run("--headless", f"--json={lines}", "--metrics", metrics, *dpmon.warm(), CLOCKED_SCRIPT, way)
    assert result.status == 0, result.errors
    told = json.loads(result.text)
    whole = told["seconds"]["single"]
    found = check(dpmon, told, result.errors, within=0.95 * whole / (whole - told["apart"]["between steps"]))
    assert between_s <= found["between"] < told["apart"]["between steps"] + whole / 2
    for none in ("evaluation", "paused", "input", "missed"):
        assert found[none] == 0
    (true,) = rates(told).values()
    counted = wait_for(lambda: final(metrics.read_text()), what="the last metrics")
    rate = counted["dpmon_training_samples_total"] / counted["dpmon_training_seconds_total"]
    assert rate == pytest.approx(true, rel=MAX_RATE_ERROR)
    *_, last, _ = [json.loads(line) for line in lines.read_text().splitlines()]
    assert last["samples_per_s"] == pytest.approx(true, rel=0.3), "of the last ten seconds, without the first step"


IN_TURN = """
import json, os, sys, time
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
time.sleep(1.0)
first = time.monotonic()
for _ in range(100):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    last = time.monotonic()
    time.sleep(0.02)
print(json.dumps([first, last]), flush=True)
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
    found = stored_parts(dpmon)
    (first, last), (again, end) = told
    assert found["training"] + found["between"] == pytest.approx(
        last - first + end - again, rel=MAX_RATE_ERROR, abs=0.05
    )
    assert again - last <= found["startup"] <= again - last + first - began
    assert found["ending"] <= time.monotonic() - end


def test_evaluations_between_epochs(dpmon: Dpmon) -> None:
    result = dpmon.run("--headless", *dpmon.warm(), CLOCKED_SCRIPT, "evaluations")
    assert result.status == 0, result.errors
    told = json.loads(result.text)
    found = check(dpmon, told, result.errors)
    assert found["evaluation"] == pytest.approx(told["apart"]["evaluation"], rel=0.3)
    with open_store(dpmon.last()) as store:
        assert StatsWindow(store).step_stats("single", EVALUATION).steps == 50


def test_toggles_and_a_pause(dpmon: Dpmon) -> None:
    """Each mode has its own time, and the pause is in no rate."""
    process = dpmon.start(
        "--headless", "--devices", "cpu,cpu", "--mode", "single", *dpmon.warm(), CLOCKED_SCRIPT, "asked"
    )
    reader = read_clocked_run(dpmon)
    switch_modes(reader, "dp", "single", seconds=1.0)
    pause_script(reader, 1.5)
    out, err = end_clocked_run(dpmon, reader, process)
    told = json.loads(out)
    assert set(told["samples"]) == {"dp", "single"}
    found = check(dpmon, told, err.decode(), slack=MAX_RATE_ERROR, within=1.03)  # there is time between epochs
    assert found["paused"] == pytest.approx(told["apart"]["paused"], abs=0.2)
    assert report(dpmon)["paused"]["seconds"] == pytest.approx(found["paused"], rel=MAX_RATE_ERROR)


@needs_visible_waits
def test_waits_for_input(dpmon: Dpmon) -> None:
    for tries_left in (2, 1, 0):
        process = dpmon.start("--headless", CLOCKED_SCRIPT, "reads", stdin=-1)
        out, err = answer_twice(dpmon, process)
        told = json.loads(out)
        try:
            # The beginning of each of the two waits is known within 0.1 s, the end within 0.025 s.
            found = check(dpmon, told, err.decode(), slack=2 * 0.125 / told["seconds"]["single"])
            assert found["input"] == pytest.approx(told["apart"]["input"], abs=0.5)
            break
        except AssertionError:  # the supervisor may have got no processor at one of these moments
            if not tries_left:
                raise
    assert len(report(dpmon)["inputs"]) == 2


def test_ranks(dpmon: Dpmon) -> None:
    result = dpmon.run("--headless", CLOCKED_SCRIPT, "ranks")  # gloo may abort at the end, without dpmon too
    told = [json.loads((dpmon.cwd / f"told-{rank}").read_text()) for rank in range(2)]
    took = told[0]["seconds"]["single"]
    # On few processors, a rank may wait between reading its clock and its first step.
    slack = MAX_RATE_ERROR + 0.05 / took
    true = [rates(each)["single"] for each in told]
    with open_store(dpmon.last()) as store:
        window = StatsWindow(store)
        assert len(store.processes) == 2
        for process in store.processes:
            rate = window.rate("single", process=process)
            assert rate is not None
            assert rate.samples_per_s == pytest.approx(true[store.ranks[process] or 0], rel=slack)
            assert window.step_stats("single", process=process).steps == 60
        assert window.step_stats("single").steps == 120
        together = window.rate("single")
        assert together is not None
        assert together.samples_per_s == pytest.approx(sum(true), rel=slack)
    said = report(dpmon)
    for line in said["ranks"]:
        rank = line["rank"]
        assert line["samples_per_s"] == pytest.approx(true[rank], rel=slack)
        whole = told[rank]["seconds"]["single"]
        assert line["samples_per_s_within_steps"] > (
            0.95 * whole / (whole - told[rank]["apart"]["between steps"]) * true[rank]
        )
    assert len(said["ranks"]) == 2
    assert of_mode(said)["samples_per_s"] == pytest.approx(sum(true), rel=slack)
    assert in_summary(result.errors, "ddp")[0] == pytest.approx(sum(true), rel=slack)
    found = stored_parts(dpmon)
    assert found["training"] + found["between"] == pytest.approx(took, rel=3 * slack)


@pytest.mark.parametrize("way", ["raises", "killed"])
def test_a_script_that_ends_in_the_middle_of_a_step(dpmon: Dpmon, way: str) -> None:
    result = dpmon.run("--headless", *dpmon.warm(), CLOCKED_SCRIPT, way)
    assert result.status != 0
    told = json.loads(result.text.splitlines()[0])
    found = check(dpmon, told, result.errors, unfinished=1)  # its optimizer has stepped
    assert found["between"] >= 0.4


EVALUATES = """
import json, time
import torch
from torch.utils.data import DataLoader, TensorDataset

told = {"first call": 0.0, "total": 0.0}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.compiled = False

    def forward(self, x):
        if not self.compiled:
            begin = time.monotonic()
            time.sleep(2)
            told["first call"] = time.monotonic() - begin
        self.compiled = True
        return self.layer(x)


class Slow(DataLoader):
    def _get_iterator(self):
        time.sleep(0.5)  # as many workers take
        return super()._get_iterator()


train, test = DataLoader(TensorDataset(torch.randn(64, 8)), 8), Slow(TensorDataset(torch.randn(64, 8)), 16)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
begin = time.monotonic()
for epoch in range(3):
    net.eval()
    with torch.no_grad():
        for (x,) in test:
            net(x)
    net.train()
    time.sleep(1)  # a checkpoint
    for (x,) in train:
        time.sleep(0.01)
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
told["total"] = time.monotonic() - begin
print(json.dumps(told))
"""


def test_a_slow_first_evaluation_and_the_start_of_workers(dpmon: Dpmon) -> None:
    """The first start of workers comes before the first step, so that it is start-up."""
    result = dpmon.run(*dpmon.warm(), "--headless", dpmon.script(EVALUATES))
    told = json.loads(result.text.splitlines()[-1])
    parts = stored_parts(dpmon)
    assert parts["startup"] > told["first call"]
    assert parts["evaluation"] >= 2 * 0.5
    assert parts["between"] >= 3 * 1.0
    assert parts["evaluation"] + parts["between"] + parts["training"] < told["total"] - told["first call"]


GENERATING_SCRIPT = """
import json, time, torch
policy = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
began = time.perf_counter()
for update in range(40):
    policy.eval()
    with torch.no_grad():
        for call in range(15):
            policy(torch.randn(1, 4))
            time.sleep(0.005)
    policy.train()
    optimizer.zero_grad()
    policy(torch.randn(15, 4)).sum().backward()
    optimizer.step()
print(json.dumps(40 / (time.perf_counter() - began)))
"""
EVALUATING_SCRIPT = """
import json, time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
evaluated = 0.0

def evaluate():
    model.eval()
    time.sleep(0.4)  # builds its dataset
    with torch.no_grad():
        for (rows,) in DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=8):
            model(rows)
            time.sleep(0.01)
    model.train()

for epoch in range(3):
    for batch, (rows,) in enumerate(DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=8)):
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
        time.sleep(0.005)
        if batch in (24, 49):  # within an epoch, and after its last batch
            began = time.perf_counter()
            evaluate()
            evaluated += time.perf_counter() - began
print(json.dumps(evaluated))
"""


def last_number(text: str) -> float:
    """Return the number that a script printed last."""
    return float(text.split()[-1])


def test_rates_are_those_of_a_loop_that_generates_its_data(dpmon: Dpmon) -> None:
    """Its calls without gradients are a part of each turn, everywhere."""
    result = dpmon.run("--headless", dpmon.script(GENERATING_SCRIPT))
    rate = pytest.approx(last_number(result.text), rel=MAX_RATE_ERROR)
    assert of_mode(report(dpmon))["steps_per_s"] == rate
    assert json.loads(dpmon.run("status", "last", "--json").out)["steps_per_s"] == rate
    assert "40 (+600 without gradients)" in dpmon.run("ls").text


def test_the_time_of_an_evaluation_is_that_of_its_script(dpmon: Dpmon) -> None:
    """From the last update before it, with its dataset and the start of its loader."""
    result = dpmon.run("--headless", dpmon.script(EVALUATING_SCRIPT))
    assert stored_parts(dpmon)["evaluation"] == pytest.approx(last_number(result.text), rel=0.05, abs=0.1)
