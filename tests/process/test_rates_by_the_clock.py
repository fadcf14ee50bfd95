"""Every place that shows a rate agrees with the script's own clock and count."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from clocked import CLOSE, SCRIPT, answer_twice, end, only_where_waits_show, pause, reader_of, switch
from running import Dpmon, wait_for

pytestmark = pytest.mark.slow


def rates(told: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return samples per second by mode, by the script's own count and clock."""
    return {mode: told["samples"][mode] / told["seconds"][mode] for mode in told["samples"]}


def number(text: str) -> float:
    """Parse a number such as 1.23k."""
    return float(text.rstrip("k")) * (1000 if text.endswith("k") else 1)


def in_summary(errors: str, mode: str) -> tuple[float, float]:
    """Return the rate of a mode in a summary, and its rate within steps (the same if it is not shown)."""
    (found,) = re.findall(
        rf"^dpmon: {mode}[^:,]*: .*?, ([\d.]+k?) samples/s(?: \(([\d.]+k?) within steps\))?", errors, re.M
    )
    return number(found[0]), number(found[1] or found[0])


def seconds(text: str) -> float:
    """Parse a duration such as "1 min 04 s" or "575 ms"."""
    if text.endswith(" ms"):
        return float(text.removesuffix(" ms")) / 1000
    *minutes, rest = text.removesuffix(" s").split(" min ")
    return 60 * sum(map(float, minutes)) + float(rest)


def parts(errors: str) -> dict[str, float]:
    """Return the parts of the elapsed time in a summary (s), after a check of their sum."""
    took = r"((?:\d+ min )?[\d.]+ m?s)"
    (elapsed,) = re.findall(rf"^dpmon: .*: finished in {took}", errors, re.M)
    (line,) = re.findall(r"^dpmon: time: (.*)", errors, re.M)
    found = {name: seconds(text) for name, text in re.findall(rf"([a-z][a-z -]*) {took}(?: \([^)]*\))?(?:, |$)", line)}
    assert sum(found.values()) == pytest.approx(seconds(elapsed), rel=0.01)
    return found


def report(dpmon: Dpmon) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dpmon.run("report", "last", "--json").out)
    return found


def of_mode(said: dict[str, Any], mode: str = "single") -> dict[str, Any]:
    (found,) = [one for one in said["modes"] if one["mode"] == mode]
    return found


def apart(told: dict[str, Any]) -> float:
    """Return the script's time with the rests between its steps, as a multiple of the time without them."""
    whole: float = told["seconds"]["single"]
    return whole / (whole - told["apart"]["between steps"])


def final(text: str) -> dict[str, float]:
    """Return the metrics of a run that is over; nothing before its end, because the supervisor writes them last."""
    found = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line[0] != "#"}
    return {} if found["dpmon_run_running"] else found


@pytest.mark.parametrize("way", ["plain", "epochs", "evaluations"])
def test_the_rate_is_that_of_the_scripts_own_clock(dpmon: Dpmon, way: str) -> None:
    lines = dpmon.cwd / "lines"
    metrics = dpmon.cwd / "x.prom"
    result = dpmon.run("--headless", f"--json={lines}", "--metrics", metrics, *dpmon.warm(), SCRIPT, way)
    assert result.status == 0, result.errors
    told = json.loads(result.text)
    true = rates(told)["single"]
    shown, within = in_summary(result.errors, "single")
    assert shown == pytest.approx(true, rel=CLOSE)
    spent = parts(result.errors)
    for name, took in told["apart"].items():
        assert spent.get(name, 0.0) == pytest.approx(took, rel=CLOSE, abs=0.1)
    assert spent["training"] + spent.get("between steps", 0.0) == pytest.approx(told["seconds"]["single"], rel=CLOSE)
    assert within > 0.95 * apart(told) * shown
    facts = of_mode(report(dpmon))
    assert facts["samples_per_s"] == pytest.approx(true, rel=CLOSE)
    assert facts["samples_per_s_within_steps"] > 0.95 * apart(told) * true
    found = wait_for(lambda: final(metrics.read_text()), what="the last metrics")
    rate = found["dpmon_training_samples_total"] / found["dpmon_training_seconds_total"]
    assert rate == pytest.approx(true, rel=CLOSE)
    *_, last, _ = [json.loads(line) for line in lines.read_text().splitlines()]
    if way != "evaluations":  # its last steps are an evaluation
        assert last["samples_per_s"] == pytest.approx(true, rel=0.3), "of the last ten seconds, without the first step"


def test_a_pause_is_in_no_rate(dpmon: Dpmon) -> None:
    process = dpmon.start("--headless", *dpmon.warm(), SCRIPT, "asked")
    reader = reader_of(dpmon)
    pause(reader, 1.5)
    out, err = end(dpmon, reader, process)
    true = rates(json.loads(out))["single"]
    assert in_summary(err.decode(), "single")[0] == pytest.approx(true, rel=CLOSE)
    said = report(dpmon)
    assert parts(err.decode())["paused"] == pytest.approx(said["paused"]["seconds"], rel=CLOSE)
    assert said["paused"]["seconds"] > 1
    assert of_mode(said)["samples_per_s"] == pytest.approx(true, rel=CLOSE)


def test_each_mode_has_its_own_time(dpmon: Dpmon) -> None:
    process = dpmon.start("--headless", "--devices", "cpu,cpu", "--mode", "single", *dpmon.warm(), SCRIPT, "asked")
    reader = reader_of(dpmon)
    switch(reader, "dp", "single", "dp", seconds=0.8)
    out, err = end(dpmon, reader, process)
    told = json.loads(out)
    true = rates(told)
    assert set(true) == {"dp", "single"}
    spent = parts(err.decode())
    assert spent["training"] + spent["between steps"] == pytest.approx(sum(told["seconds"].values()), rel=CLOSE)
    said = report(dpmon)
    for mode, rate in true.items():
        assert of_mode(said, mode)["samples_per_s"] == pytest.approx(rate, rel=CLOSE)
        assert in_summary(err.decode(), mode)[0] == pytest.approx(rate, rel=CLOSE)
        assert of_mode(said, mode)["samples_per_s_within_steps"] > 1.03 * rate, "there is time between epochs"


@pytest.mark.slow
@only_where_waits_show
def test_a_wait_for_input_is_in_no_rate(dpmon: Dpmon) -> None:
    process = dpmon.start("--headless", SCRIPT, "reads", stdin=-1)
    out, err = answer_twice(dpmon, process)
    told = json.loads(out)
    true = rates(told)["single"]
    # The beginning of each of the two waits is known within 0.1 s, the end within 0.025 s.
    slack = CLOSE + 2 * 0.125 / told["seconds"]["single"]
    assert in_summary(err.decode(), "single")[0] == pytest.approx(true, rel=slack)
    said = report(dpmon)
    assert len(said["inputs"]) == 2
    assert of_mode(said)["samples_per_s"] == pytest.approx(true, rel=slack)


@pytest.mark.slow
def test_ranks_have_their_own_time_and_their_samples_add_up(dpmon: Dpmon) -> None:
    result = dpmon.run("--headless", SCRIPT, "ranks")
    told = [json.loads((dpmon.cwd / f"told-{rank}").read_text()) for rank in (0, 1)]
    true = [rates(each)["single"] for each in told]
    # On few processors, a rank may wait between reading its clock and its first step.
    slack = CLOSE + 0.05 / told[0]["seconds"]["single"]
    said = report(dpmon)
    for line in said["ranks"]:
        rank = line["rank"]
        assert line["samples_per_s"] == pytest.approx(true[rank], rel=slack)
        assert line["samples_per_s_within_steps"] > 0.95 * apart(told[rank]) * true[rank]
    assert len(said["ranks"]) == 2
    assert of_mode(said)["samples_per_s"] == pytest.approx(sum(true), rel=slack)
    assert in_summary(result.errors, "ddp")[0] == pytest.approx(sum(true), rel=slack)
