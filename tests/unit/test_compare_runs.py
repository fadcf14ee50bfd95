"""Runs compared: what differs, how much each figure changed, for whom that holds, and when a gate fails."""

from __future__ import annotations

import json
import random
import re
from math import comb, exp, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpmon.cli.main import main
from dpmon.model.comparison_stats import _mann_whitney_cdf, estimate_change
from dpmon.model.run_comparison import (
    Judgment,
    RunComparison,
    exit_status_of,
    judge_metric,
    outcome_sentence,
    result_sentence,
)
from dpmon.report.comparison_report import build_document, compare_directories, comparison_as_json, read_compared_run
from dpmon.report.plain_text import text_lines
from dpmon.run.run_directory import load_info
from dpmon.run.run_registry import short_name
from support.format_readers import check_json_is_documented
from support.history_builders import write_run_directory
from support.rank_builders import ddp_rank_rows
from support.record_builders import SECOND, Training, device_event, host_event, pause_event

# ------------------------------------------------------------------------------------------------ statistics


def by_hand(before: int, after: int) -> list[float]:
    """Return the chances of `_mann_whitney_cdf`, counted over all orders."""
    counts = [0] * (before * after + 1)
    for order in range(1 << (before + after)):
        if order.bit_count() == before:
            firsts = pairs = 0
            for place in range(before + after):
                if order >> place & 1:
                    pairs += place - firsts
                    firsts += 1
            counts[pairs] += 1
    return [sum(counts[: upto + 1]) / comb(before + after, before) for upto in range(len(counts))]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (2, 2), (3, 3), (3, 5), (5, 5)])
def test_the_chances_of_all_orders_are_exact(before: int, after: int) -> None:
    assert _mann_whitney_cdf(before, after) == pytest.approx(by_hand(before, after))


def test_two_against_two_have_no_bound_and_three_against_three_only_single_bounds() -> None:
    two = estimate_change([1.0, 1.1], [5.0, 5.1])
    assert (two.low, two.high, two.least, two.most) == (None,) * 4
    assert two.sign == 0
    three = estimate_change([1.0, 1.1, 1.2], [2.0, 2.1, 2.2])
    assert (three.low, three.high) == (None, None)
    assert three.least == pytest.approx(2.0 / 1.2)
    assert three.most == pytest.approx(2.2)
    five = estimate_change([1.0] * 5, [2.0, 2.1, 2.2, 2.3, 2.4])
    assert five.low == pytest.approx(2.0)
    assert (five.ratio, five.sign) == (pytest.approx(2.2), 1)


def autoregressive(chance: random.Random, count: int, rho: float) -> list[float]:
    at, found = chance.gauss(0, 1), []
    for _ in range(count):
        at = rho * at + chance.gauss(0, sqrt(1 - rho * rho))
        found.append(exp(0.05 * at))
    return found


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_stretches_that_depend_on_each_other_seldom_give_a_false_alarm(rho: float) -> None:
    chance = random.Random(3)
    alarms = [
        estimate_change(autoregressive(chance, 20, rho), autoregressive(chance, 20, rho), in_order=True).sign
        for _ in range(300)
    ]
    assert sum(map(abs, alarms)) / 300 <= 0.08


def test_five_runs_a_side_find_ten_percent_and_seldom_more_than_there_is() -> None:
    chance = random.Random(4)

    def runs(center: float) -> list[float]:
        return [center * exp(chance.gauss(0, 0.02)) for _ in range(5)]

    assert sum(abs(estimate_change(runs(1), runs(1)).sign) for _ in range(400)) / 400 <= 0.05
    assert sum(estimate_change(runs(1), runs(1.1)).sign for _ in range(200)) / 200 >= 0.95


# ------------------------------------------------------------------------------------------------ runs


def a_run(seed: int = 1, *, slow: float = 1.0, steps: int = 400, data: int = 5, batch: int = 30, **about: Any) -> Path:
    """Make a run of 20 s in steps of 50 ms: `slow` times as long, or with another share of `data`."""
    training = Training(mode="single", step_ns=int(SECOND / 20 * slow), seed=seed, batch=batch)
    training.shares["single"]["data"] = data
    busy: Any = about.pop("busy", {})
    hosts = [host_event(float(t), **busy) for t in range(20)]
    rows = {0: [*training.begin(), *training.run(steps)], -1: [*hosts, *about.pop("events", [])]}
    return write_run_directory(rows, seconds=training.now / SECOND, **about)


class Judged(NamedTuple):
    """A comparison with its judgments."""

    found: RunComparison
    judgments: list[Judgment]

    @property
    def outcome(self) -> str:
        return outcome_sentence(*self)

    @property
    def status(self) -> int:
        return exit_status_of(self.judgments)


def compared(before: list[Path], after: list[Path], *limits: tuple[str, float]) -> Judged:
    found = compare_directories(before, after)
    return Judged(found, [judge_metric(found, *limit) for limit in limits])


def text_of(found: Judged, width: int = 100) -> str:
    return "\n".join(text_lines(build_document(*found), width))


def test_a_pair_tells_how_much_which_phase_and_for_whom(state: Path) -> None:
    found = compared([a_run(1)], [a_run(2, data=25)])
    step = found.found.compared["step"]
    assert step.change is not None
    assert step.change.low is not None
    assert step.change.high is not None
    assert step.change.low < 1.2 < step.change.high
    assert step.change.high - step.change.low < 0.06
    assert found.found.reason is not None
    assert found.found.reason.figure.name == "data"
    assert re.fullmatch(
        r"B is slower: from 5\d\.\d ms to 6\d\.\d ms per step, \+(19|20|21)% \[\+(1\d|20)% to \+2\d% \(95%\)\];"
        r" most of the change is in data: from 2\.\d\d ms to 1\d\.\d ms",
        found.outcome,
    )
    text = text_of(found)
    assert "the result is about this pair only" in text
    assert "WHAT DIFFERS\n  nothing that dpmon knows" in text
    assert re.search(r"\n    optimizer .* ms +~ ", text)


def test_several_runs_a_side_tell_how_much_equal_runs_differ(state: Path) -> None:
    a = [a_run(seed, started_unix=1.7e9 + 2 * seed) for seed in range(5)]
    b = [a_run(seed + 9, slow=1.1, started_unix=1.7e9 + 2 * seed + 1) for seed in range(5)]
    found = compared(a, b)
    assert found.outcome.startswith("B is slower")
    text = " ".join(" ".join(text_lines(build_document(*found))).split())
    assert re.search(r"Equal runs differ \(slowest vs\. fastest\): A by [01]\.\d%, B by [01]\.", text)
    assert "pair only" not in text
    assert "in turn" not in text
    later = compared(a[:3], [a_run(9, started_unix=1.8e9)])
    assert "alternate them" in " ".join(" ".join(text_lines(build_document(*later))).split())
    assert later.outcome.startswith("inconclusive: too few runs (3 vs. 1)")
    equal = compared(a[::2], b[:0] + a[1::2])
    assert equal.outcome.startswith("inconclusive: too few runs (3 vs. 2); from ")


def test_warm_up_steps_are_left_out_and_the_time_of_a_pause_is_in_no_step(state: Path) -> None:
    training = Training(mode="single", step_ns=SECOND // 20, seed=1)
    rows = [*training.begin(), *training.run(200), pause_event(training.now / SECOND, 200)]
    training.now += 7 * SECOND
    rows += [pause_event(training.now / SECOND, 200, 7.0), *training.run(200)]
    paused = write_run_directory({0: rows}, seconds=training.now / SECOND)
    found = compared([a_run(1)], [paused]).found
    assert [sum(run.steps_by_batch.values()) for side in found.sides for run in side] == [400 - 5, 400 - 5]
    step = found.compared["step"]
    assert step.typical_value(1) == pytest.approx(step.typical_value(0), rel=0.01)
    assert "between" not in found.compared


def test_differences_come_first(state: Path) -> None:
    device = [device_event(float(t), 0, throttle=["power cap"], sm_clock_mhz=1200) for t in range(15)]
    usual = [device_event(float(t), 0, throttle=[]) for t in range(15)]
    one = a_run(1, events=usual)
    other = a_run(2, events=device, command=("python", "linear.py", "--big"), versions={"dpmon": "9"}, status=1)
    found = compared([one], [other])
    assert found.found.differences == [
        ("arguments", "none", "--big"),
        ("dpmon", "0", "9"),
        ("state", "finished", "failed"),
        ("clock of the GPUs", "1980 MHz", "1200 MHz"),
        ("throttled", "0%", "100%"),
    ]
    text = text_of(found)
    assert text.index("WHAT DIFFERS") < text.index("TIME PER STEP")


def test_other_batches_are_compared_by_their_samples(state: Path) -> None:
    found = compared([a_run(1)], [a_run(2, batch=60)], ("step", 0.05))
    assert found.found.per_sample
    assert found.found.differences[0] == ("samples a step", "30", "60")
    step = found.found.compared["step"]
    assert step.typical_value(0) == pytest.approx(SECOND / 20 / 30, rel=0.05), "50 ms for 30 samples"
    assert step.typical_value(1) == pytest.approx(SECOND / 20 / 60, rel=0.05)
    assert found.status == 0
    assert found.outcome.startswith("not slower (step per sample, limit +5.0%): from 1.")
    assert re.search(r" ms to \d{3} µs per sample, -[45]\d% \[", found.outcome)
    assert "\nTIME PER SAMPLE\n" in text_of(found)


def test_runs_of_other_commands_are_judged(state: Path) -> None:
    other = a_run(2, slow=1.39, command=("python", "linear.py", "--workers", "8"), script="other.py")
    found = compared([a_run(1)], [other], ("step", 0.05))
    assert [label for label, *_ in found.found.differences] == ["script", "arguments"]
    assert found.status == 4
    assert re.match(r"slower \(step, limit \+5.0%\): from 5\S+ ms to 7\S+ ms per step, \+(38|39|40)% ", found.outcome)


def test_the_figures_and_the_percentage_agree_where_the_median_step_does_not(state: Path) -> None:
    """One step in four ends an update, and only those take longer in B: the mean step is 20.0 ms, then 27.5 ms."""

    def accumulating(seed: int, update_ms: int) -> Path:
        training = Training(mode="single", seed=seed)
        rows = training.begin()
        for _ in range(125):
            for steps, step_ms in ((3, 10), (1, update_ms)):
                training.step_ns = step_ms * SECOND // 1000
                rows += training.run(steps)
        return write_run_directory({0: rows}, seconds=training.now / SECOND)

    found = compared([accumulating(1, 50)], [accumulating(2, 80)], ("step", 0.05))
    step, middle = (found.found.compared[name] for name in ("step", "median_step"))
    a, b = (step.typical_value(side) or 0.0 for side in (0, 1))
    assert (a, b) == (pytest.approx(0.0200 * SECOND, rel=0.03), pytest.approx(0.0275 * SECOND, rel=0.03))
    assert step.change is not None
    assert step.change.ratio == b / a
    assert found.status == 4
    assert middle.change is not None
    assert middle.change.ratio == pytest.approx(1, abs=0.02)


def test_one_odd_step_is_in_the_interval_and_decides_nothing(state: Path) -> None:
    training = Training(mode="single", step_ns=SECOND // 20, seed=2)
    rows = [*training.begin(), *training.run(200)]
    training.step_ns *= 100
    rows += training.step()
    training.step_ns //= 100
    odd = write_run_directory({0: [*rows, *training.run(200)]}, seconds=training.now / SECOND)
    change = compared([a_run(1)], [odd]).found.compared["step"].change
    assert change is not None
    assert change.low is not None
    assert change.high is not None
    assert change.ratio == pytest.approx(1 + 99 / 396, rel=0.03)
    assert change.low <= 1 < change.ratio <= change.high
    assert change.sign == 0


def test_the_time_between_steps_counts(state: Path) -> None:
    """Before each epoch of 50 steps, workers start for 2.5 s: 50 ms in each step."""
    training = Training(mode="single", step_ns=SECOND // 20, seed=2)
    rows = [*training.begin()]
    for _ in range(8):
        rows += training.run(50)
        training.now += 5 * SECOND // 2
    gaps = write_run_directory({0: rows}, seconds=training.now / SECOND)
    found = compared([a_run(1)], [gaps])
    row = found.found.compared["between"]
    assert row.missing == "none in A"
    assert row.typical_value(1) == pytest.approx(7 * 2.5 * SECOND / 395, rel=0.05)
    assert found.found.compared["step"].typical_value(1) == pytest.approx(
        0.05 * SECOND + 7 * 2.5 * SECOND / 395, rel=0.03
    )
    assert "most of the change is in gaps between steps: from none to 4" in found.outcome


def test_ranks_tell_their_communication_and_whom_they_wait_for(state: Path) -> None:
    runs = [ddp_rank_rows(3, slow=slow, phase="data", steps=600, noise=0.02) for slow in (None, 1)]
    before, after = ([write_run_directory(rows, seconds=end / SECOND)] for rows, end in runs)
    found = compared(before, after)
    assert "most of the change is in data" in found.outcome, "rank 0 waits in sync, but rank 1 loads slowly"
    assert {"exposed", "wait"} <= found.found.compared.keys()
    text = text_of(found, 200)
    assert ": no straggler\n" in text
    assert ": rank 1 delays the others by " in text


def test_runs_that_have_not_the_same_ranks_say_so(state: Path) -> None:
    rows, end = ddp_rank_rows(4, slow=3, phase="data", steps=200)
    names = ("first.of.the.cluster", "gpu-2")
    some = write_run_directory({number: rows[number] for number in (0, 1)}, seconds=end / SECOND, nodes=names[:1])
    whole = write_run_directory(rows, seconds=end / SECOND, nodes=names)
    found = compared([some], [whole], ("step", 0.05))
    assert [*found.found.differences] == [("machine", names[0], ", ".join(names)), ("ranks", "2 of 4", "4")]
    assert "not slower (step, limit +5.0%): " in found.outcome, "a step of the same ranks"
    assert "\n      B: first.of.the.cluster, gpu-2\n" in text_of(found, 40)
    assert compared(
        [whole], [write_run_directory(rows, seconds=end / SECOND, nodes=tuple("abcdef"))]
    ).found.differences == [("machine", ", ".join(names), "a, b, c, d and 2 more")]


def test_a_run_that_only_evaluates_is_compared_and_the_kind_of_steps_differs(state: Path) -> None:
    training = Training(mode="single", step_ns=SECOND // 40)
    rows = [*training.begin(), *(row for _ in range(400) for row in training.step(evaluates=True))]
    evaluation = write_run_directory({0: rows}, seconds=training.now / SECOND)
    found = compared([a_run(1)], [evaluation]).found
    assert found.differences == [("kind of steps", "training", "evaluation")]
    assert found.missing is None
    change = found.compared["step"].change
    assert change is not None
    assert change.sign == -1


def test_a_switched_mode_is_the_first_difference(state: Path) -> None:
    training = Training(mode="single", step_ns=SECOND // 20)
    rows = [*training.begin(), *training.run(60), *training.switch("dp"), *training.run(40)]
    switched = write_run_directory({0: rows}, seconds=10, command=("python", "linear.py", "--big"))
    assert compared([a_run(1)], [switched]).found.differences[:2] == [
        ("mode switched", "no", "yes: only single is compared, 60 of 100 steps"),
        ("arguments", "none", "--big"),
    ]


def test_short_runs_have_no_interval(state: Path) -> None:
    found = compared([a_run(1, steps=45)], [a_run(2, steps=45, slow=1.2)])
    assert re.match(
        r"B is slower: from .* per step, \+[12]\d% \[\+1\d% to \+\d\d% \(90%\)\]",
        found.outcome,
    )
    equal = compared([a_run(1, steps=45)], [a_run(1, steps=45)]).outcome
    assert re.match(
        r"inconclusive: too few parts of 1 s \([34] vs\. [34]\) for a 95% interval; from .* \[-",
        equal,
    )
    assert "too few parts of 1 s (" in compared([a_run(1, steps=30)], [a_run(2, steps=30)]).outcome


def test_runs_without_steps_or_with_few(state: Path) -> None:
    empty, short, run = write_run_directory({}), a_run(1, steps=12), a_run(2)
    assert "has no step to compare" in compared([empty], [run]).outcome
    assert "has only 7 steps to compare, fewer than 20" in compared([short], [run]).outcome
    assert compared([short], [run], ("step", 0.05)).status == 3
    text_lines(build_document(*compared([empty], [run])))


# ------------------------------------------------------------------------------------------------ gate


def sides(state: Path, slow: float) -> tuple[list[Path], list[Path]]:
    return [a_run(seed) for seed in range(3)], [a_run(seed + 9, slow=slow) for seed in range(3)]


@pytest.mark.parametrize(
    ("slow", "limit", "status", "words"),
    [
        (1.1, 0.05, 4, "slower (step, limit +5.0%): from "),
        (1.0, 0.05, 0, "not slower (step, limit +5.0%): "),
        (0.8, 0.05, 0, "not slower"),
        (1.03, 0.032, 3, "inconclusive (step, limit +3.2%): "),
    ],
)
def test_three_runs_a_side_pass_fail_or_neither(
    state: Path, slow: float, limit: float, status: int, words: str
) -> None:
    before, after = sides(state, slow)
    found = compared(before, after, ("step", limit))
    assert found.status == status
    assert found.outcome.startswith(words)
    said: Any = comparison_as_json(*found)
    (gate,) = said["gate"]
    assert gate["outcome"] == found.judgments[0].outcome
    assert found.outcome in " ".join(" ".join(text_lines(build_document(*found), 400)).split())


def test_three_runs_a_side_have_one_verdict_by_their_one_sided_bounds(state: Path) -> None:
    before, after = sides(state, 1.1)
    sure = r"\+\d+(\.\d)?% \[\+\S+% to \+\S+% \(90%\)\]; most of the change"
    plain = compared(before, after)
    assert re.match(rf"B is slower: from 5\d\.\d ms to 5\d\.\d ms per step, {sure}", plain.outcome)
    gated = " ".join(text_of(compared(before, after, ("step", 0.05))).split())
    assert re.search(rf": slower \(step, limit \+5.0%\): from 5\S+ ms to 5\S+ ms per step, {sure}", gated)
    assert "Time: " not in gated
    assert "inconclusive" not in gated
    assert re.search(r" step +\S+ ms +\S+ ms +\+\S+% +\+\S+% to \+\S+% \(90%\)\n", text_of(plain))
    assert "(95%)" not in text_of(plain)
    same = text_of(compared(before, after[:0] + [a_run(seed + 20) for seed in range(3)]))
    assert re.search(r" step +\S+ ms +\S+ ms +~ +-\S+% to \+\S+% \(90%\)\n", same)


def test_a_gate_on_phases(state: Path) -> None:
    a = [a_run(seed) for seed in range(3)]
    waits = [a_run(9 + n, data=6) for n in range(3)]
    found = compared(a, waits, ("data", 0.05), ("step", 0.05), ("sync", 0.05))
    assert [one.outcome for one in found.judgments] == ["slower", "not slower", "inconclusive"]
    assert "it is unknown in these runs" in found.judgments[2].text
    assert found.status == 4


def a_disturbed_run(seed: int, load: float, slow: float = 1.0) -> Path:
    """Make a run in which other work makes three steps in five `load` times as long."""
    training = Training(mode="single", seed=seed)
    rows = training.begin()
    for _ in range(30):
        for steps, times in ((4, 1.0), (6, load)):
            training.step_ns = int(SECOND / 50 * slow * times)
            rows += training.run(steps)
    return write_run_directory({0: rows, -1: [host_event(float(t)) for t in range(5)]}, seconds=training.now / SECOND)


def test_the_fast_step_shows_a_change_where_other_work_disturbs_most_steps(state: Path) -> None:
    loads = (1.3, 2.6, 1.9, 1.5, 2.2), (2.5, 1.4, 1.6, 2.0, 1.8)
    a = [a_disturbed_run(seed, load) for seed, load in enumerate(loads[0], 1)]
    b = [a_disturbed_run(seed, load) for seed, load in enumerate(loads[1], 7)]
    c = [a_disturbed_run(seed, load, 1.1) for seed, load in enumerate(loads[1], 20)]
    limits = ("step", 0.05), ("fast_step", 0.05)
    equal, slower = compared(a, b, *limits), compared(a, c, *limits)
    assert [one.outcome for one in equal.judgments] == ["inconclusive", "not slower"]
    assert "; not slower (fast step, limit +5.0%): from " in equal.judgments[0].text
    assert [one.outcome for one in slower.judgments] == ["inconclusive", "slower"]
    assert slower.judgments[1].text.startswith("slower (fast step, limit +5.0%): from ")
    assert f"; {slower.judgments[1].text}; --phase fast_step makes this the gate" in slower.judgments[0].text
    change = slower.found.compared["fast_step"].change
    assert change is not None
    assert change.ratio == pytest.approx(1.1, abs=0.03)


def test_the_processor_time_of_a_step_is_that_of_all_processes(state: Path) -> None:
    run = read_compared_run(a_run(1))
    assert run.values["cpu_step"] == pytest.approx(1.8 * 0.05 * SECOND, rel=0.05), "20 steps/s on 1.8 processors"
    for node in (0, 1):
        assert "cpu_step" not in read_compared_run(a_run(1, busy={"node": node})).values, "they run on others, too"
    assert "cpu_step" not in read_compared_run(a_run(1, steps=30)).values, "no whole second"
    before, after = ([a_run(seed, busy={"run_cpu_pct": use + seed}) for seed in range(3)] for use in (100, 112))
    assert compared(before, after, ("cpu_step", 0.05)).outcome.startswith("slower (CPU time, limit")


# ------------------------------------------------------------------------------------------------ command


def name(directory: Path) -> str:
    return short_name(load_info(directory))


def test_the_command_line(state: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before, after = ([name(one) for one in side] for side in sides(state, 1.3))
    assert main(["compare", before[0], after[0]]) == 0
    assert "B is slower" in capsys.readouterr().out
    assert main(["compare", *before, "--", *after, "--fail-if-slower", "5%", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["status"] == 4
    assert main(["compare", "--fail-if-slower=5%", *after, "--", *before]) == 0
    capsys.readouterr()
    for seed in (1, 2):
        a_run(seed, name="twice")
    assert main(["compare", "twice", before[0]]) == 2
    assert "'twice' could be any of 2 runs" in capsys.readouterr().err, "a gate does not guess"
    assert main(["compare", before[0], after[0], "-o", str(tmp_path / "both.txt")]) == 0
    assert capsys.readouterr().out == ""
    assert "B is slower" in (tmp_path / "both.txt").read_text()
    for words, why in (
        ([*before], "compare needs two runs, or several on each side of --"),
        ([before[0], before[0]], "is given twice"),
        ([*before[:2], "--phase", "data"], "--phase needs --fail-if-slower"),
        ([*before[:2], "--fail-if-slower", "0.05"], "expected a percentage such as 5%"),
        ([*before[:2], "--fail-if-slower", "5%", "--phase", "lunch"], "expected one of step, data"),
        ([before[0], "--"], "required"),
    ):
        assert main(["compare", *words]) == 2
        assert why in capsys.readouterr().err


def test_every_field_is_described(state: Path) -> None:
    before, after = sides(state, 1.3)
    limits = (("step", 0.05),)
    other = compared([a_run(1)], [a_run(2, command=("python", "linear.py", "-x"))], *limits)
    found = [
        comparison_as_json(*each)
        for each in (compared(before, after, *limits), other, compared([before[0]], [after[0]]))
    ]
    check_json_is_documented("dpmon compare --json", *json.loads(json.dumps(found)))


def test_hostile_names_do_no_harm(state: Path) -> None:
    script = "<b>\x1b[31mx"
    found = compared([a_run(1, script=script)], [a_run(2, script="y")])
    assert "\x1b" not in "\n".join(text_lines(build_document(*found)))
    assert result_sentence(found.found)
