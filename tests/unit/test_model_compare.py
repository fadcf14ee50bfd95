"""dp compared with single: correct intervals, only steps of one kind, no verdict without enough steps."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence

import pytest

from dpmon.model.comparison_stats import Interval, median_interval, ratio_of_estimates
from dpmon.model.mode_comparison import MIN_STEPS, Comparison, compare_modes, verdict_sentence
from dpmon.model.run_process import Process
from dpmon.record.history_rows import Definition, Row
from dpmon.record.record_types import Event, Step
from dpmon.record.schema import STEP, WARM_UP_STEPS
from dpmon.store.step_stats import StatsWindow
from dpmon.store.tally import Tally
from support.history_builders import open_store_with, series_stats, snapshot_of_rows
from support.record_builders import STEP_ROW_PHASES, TRAINING_FLAGS, Training, call_row, step_row

MS = 1_000_000
TWO = ("cuda:0", "cuda:1")


LAYOUT = Definition(1, {"root": "Model", "via": "DataParallel", "devices": list(TWO), "absent": {}})
CALL_PHASES = ("scatter", "replicate", "apply", "gather")


def step(number: int, samples: int | None = 32, **phases: float | None) -> Step:
    """Return a step with these phases in ms, and their sum as duration; `forward`: without the phases of its call."""
    times = {"forward": 4.0, "backward": 5.0, "optimizer": 1.0, **phases}
    took = {name: int(ms * MS) for name, ms in times.items() if ms is not None}
    wall, start, at = sum(took.values()), number * 1000 * MS, 0
    parts: list[int] = []
    for name in CALL_PHASES:
        ns = took.pop(name, None)
        parts += [-1, 0] if ns is None else [at, ns]
        at += ns or 0
    took["forward"] += at
    row = step_row("dp", number, start, wall, samples, [took.get(name, -1) for name in STEP_ROW_PHASES])
    call = call_row("dp", TRAINING_FLAGS, 1, number, start + took.get("data", 0), took["forward"], 0, 0, parts)
    return row._replace(calls=[call])


def compare(by_mode: Mapping[str, Sequence[Step]], *, devices: Sequence[str] = (), virtual: bool = False) -> Comparison:
    """Compare the steps of each mode, before which it warms up."""
    rows: list[Row] = [LAYOUT]
    for mode, own in by_mode.items():
        for made in [step(0) for _ in range(WARM_UP_STEPS)] + [*own]:
            number = len(rows)
            start = number * 1000 * MS
            calls = [call._replace(call=number, start=start + call.start - made.start_ns) for call in made.calls]
            rows.append(made._replace(mode=mode, step=number, start_ns=start, calls=calls))
    return compare_modes(StatsWindow(open_store_with(rows)), 0, devices=devices, virtual=virtual)


def steps(count: int, wobble: float = 0.03, seed: int = 1, **phases: float) -> list[Step]:
    chance = random.Random(seed)
    given = {"forward": 4.0, "backward": 5.0, "optimizer": 1.0, **phases}
    return [
        step(number, 32, **{name: took * chance.uniform(1 - wobble, 1 + wobble) for name, took in given.items()})
        for number in range(count)
    ]


def autoregressive(chance: random.Random, count: int, rho: float) -> list[float]:
    at, found = chance.gauss(0, 1), []
    for _ in range(count):
        at = rho * at + chance.gauss(0, (1 - rho * rho) ** 0.5)
        found.append(2.718281828 ** (0.1 * at))
    return found


def tally_of(values: list[float]) -> Tally:
    """Return the tally of steps with these durations, ms."""
    walls = [int(value * MS) for value in values]
    stats = {STEP: series_stats(walls)}
    return Tally(len(walls), low_ns=min(walls, default=None), high_ns=max(walls, default=None), stats=stats)


def interval_of(values: list[float], size: int = 7) -> Interval | None:
    """Return the interval of the median of values that were tallied in parts of this size."""
    return median_interval(tally_of(values), [tally_of(values[at : at + size]) for at in range(0, len(values), size)])


@pytest.mark.parametrize(
    ("draw", "count"),
    [
        (lambda c, n: autoregressive(c, n, 0.0), 20),
        (lambda c, n: autoregressive(c, n, 0.0), 500),
        (lambda c, n: autoregressive(c, n, 0.7), 500),
        (lambda c, n: [1 + c.expovariate(3) for _ in range(n)], 100),
        (lambda c, n: [1.0 + (c.random() < 0.2) * 20 + c.random() * 0.1 for _ in range(n)], 200),
    ],
    ids=["few", "many", "dependent", "skewed", "with slow ones"],
)
def test_the_interval_of_the_ratio_holds_the_truth_about_95_times_in_100(
    draw: Callable[[random.Random, int], list[float]], count: int
) -> None:
    chance = random.Random(11)
    truth = interval_of(draw(random.Random(5), 20_000))
    assert truth is not None
    held = 0
    for _ in range(200):
        one, other = interval_of([1.3 * v for v in draw(chance, count)]), interval_of(draw(chance, count))
        assert one is not None
        assert other is not None
        found = ratio_of_estimates(one, other)
        assert found is not None
        assert found.low <= found.value <= found.high
        held += found.low <= 1.3 <= found.high
    assert held / 200 >= 0.91


def test_intervals_of_little_and_of_nothing() -> None:
    assert interval_of([]) is None
    assert interval_of([3.0]) == (3.0 * MS, 3.0 * MS, 3.0 * MS)
    assert interval_of([2.0] * 50) == (2.0 * MS, 2.0 * MS, 2.0 * MS)
    assert interval_of([1.0, 2.0, 3.0]) == (pytest.approx(2.0 * MS, rel=0.004), 1.0 * MS, 3.0 * MS)
    assert ratio_of_estimates(Interval(1, 1, 1), Interval(0, 0, 1)) is None
    assert ratio_of_estimates(Interval(4, 4, 4), Interval(2, 2, 2)) == pytest.approx((2, 2, 2))


def test_a_slow_down_names_its_phase() -> None:
    dp = steps(100, scatter=0.5, replicate=7.9, apply=2.0, gather=0.3, forward=0.1, backward=4.9, optimizer=0.8)
    found = compare({"single": steps(100, seed=2), "dp": dp}, devices=TWO)
    assert found.outcome == "slower"
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(10 / 16.5, rel=0.02)
    assert found.speedup.low < found.speedup.value < found.speedup.high < 1
    assert found.efficiency == pytest.approx(found.speedup.value / 2)
    assert re.fullmatch(
        r"DataParallel over 2 is 0\.6[01]× as fast as one device: replicate takes 7\.\d\d ms of a 16\.\d ms step\.",
        verdict_sentence(found) or "",
    )


def test_the_phases_that_explain_most_of_a_slow_down_are_named_together() -> None:
    """Of 13.5 ms more, 5 are in scatter, 4 in the forward, 4 in replicate, and 0.5 in the optimizer."""
    dp = steps(100, scatter=5.0, replicate=4.0, apply=7.0, forward=0.9, optimizer=1.5)
    single = steps(100, seed=2)
    odd = [step(number, forward=4.0, scatter=30.0, apply=90.0) for number in range(100, 104)]
    found = compare({"single": single + odd, "dp": dp}, devices=TWO)
    assert re.search(
        r": scatter takes [45]\.\d+ ms of a 23\.\d ms step,"
        r" (replicate takes [34]\.\d+ ms of a 23\.\d ms step|parallel_apply .* forward on one device [34]\.\d+ ms)\.",
        verdict_sentence(found) or "",
    ), verdict_sentence(found)


def test_a_speed_up_names_what_it_saves_and_what_still_costs() -> None:
    dp = steps(100, replicate=0.8, apply=2.0, forward=0.1, backward=2.6)
    found = compare({"single": steps(100, seed=2), "dp": dp}, devices=TWO)
    assert found.outcome == "faster"
    text = verdict_sentence(found)
    assert text is not None
    assert text.startswith("DataParallel over 2 is 1.5")
    assert "backward takes 2.60 ms, on one device 5.00 ms, replicate 801 µs of a 6.50 ms step." in text


def test_a_wide_interval_is_no_verdict() -> None:
    found = compare({"single": steps(25, seed=2, wobble=0.95), "dp": steps(25, wobble=0.95)}, devices=TWO)
    assert found.outcome == "even"
    assert re.fullmatch(
        r"DataParallel over 2 is 0\.\d\d× to [1-9]\.\d\d× as fast as one device: too uncertain for a verdict\.",
        verdict_sentence(found) or "",
    )


def test_medians_and_means_that_disagree_are_no_verdict() -> None:
    """On a shared machine, many steps of one mode may have been disturbed: its median is short, its mean is long."""
    disturbed = [*steps(160), *steps(40, forward=90.0, seed=2)]
    found = compare({"single": steps(100, forward=8.0), "dp": disturbed}, devices=TWO)
    assert found.speedup is None
    assert found.outcome is None
    assert found.missing == "no verdict: steps are so uneven that medians and means name different modes"


def test_the_forward_is_named_as_panel_3_names_its_parts() -> None:
    """parallel_apply includes starting the threads, so it is not the forward of a replica in panel 2."""
    dp = steps(100, replicate=0.1, apply=7.0, forward=1.0)
    found = compare({"single": steps(100, seed=2), "dp": dp}, devices=TWO)
    text = verdict_sentence(found) or ""
    assert re.search(r": parallel_apply and other forward take 8\.\d+ ms, forward on one device \d\.\d+ ms", text)


def test_a_small_difference_is_not_distinguished_from_noise() -> None:
    found = compare({"single": steps(60, 0.2), "dp": steps(60, 0.2, seed=2)}, devices=TWO)
    assert found.outcome == "even"
    text = verdict_sentence(found)
    assert text is not None
    assert "makes no difference that shows" in text


def test_virtual_replicas_have_no_efficiency_and_are_named() -> None:
    found = compare({"single": steps(40), "dp": steps(40, replicate=9.0)}, devices=("cpu:0", "cpu:1"), virtual=True)
    assert found.efficiency is None
    assert (verdict_sentence(found) or "").startswith("DataParallel over 2 virtual replicas is 0.5")


def test_too_few_steps_give_no_verdict_and_say_how_many_are_missing() -> None:
    found = compare({"single": steps(MIN_STEPS), "dp": steps(3, replicate=5.0)}, devices=TWO)
    assert (found.speedup, found.outcome, verdict_sentence(found)) == (None, None, None)
    assert found.missing == "no verdict yet: it needs 17 more steps in dp"
    assert found.sides["dp"].median_ns is not None, "figures are shown all the same"
    one_short = compare({"single": steps(MIN_STEPS - 1), "dp": steps(MIN_STEPS)})
    assert one_short.missing == "no verdict yet: it needs 1 more step in single"
    assert compare({"single": steps(MIN_STEPS), "dp": steps(MIN_STEPS)}).speedup is not None


def test_a_mode_that_was_not_seen_is_no_zero() -> None:
    found = compare({"dp": steps(100)}, devices=TWO)
    assert list(found.sides) == ["dp"]
    assert found.missing == "single not seen yet"
    assert compare({}).missing == "single and dp not seen yet"
    warm = compare({"single": [], "dp": steps(100)})
    assert warm.missing == "no verdict yet: it needs 20 more steps in single"
    assert warm.sides["single"].median_ns is None
    assert warm.seen["single"] == WARM_UP_STEPS


def test_only_steps_of_the_same_batch_are_compared() -> None:
    half = [step(100 + i, 16, forward=2.0, backward=2.5) for i in range(50)]
    single = steps(30, seed=2)
    found = compare({"single": single, "dp": half + steps(40, replicate=5.0)}, devices=TWO)
    assert found.samples == 32
    assert found.left_out == 50
    assert found.sides["dp"].steps == 40
    assert found.outcome == "slower"
    unlike = compare({"single": single, "dp": half}, devices=TWO)
    assert unlike.speedup is None
    assert (
        unlike.missing
        == "no verdict: the batches are not of the same size (32 samples per step in single, 16 samples per step in dp)"
    )
    unknown = compare({"single": [one._replace(samples=None) for one in single], "dp": half})
    assert "an unknown number of samples per step in single" in (unknown.missing or "")


def test_training_is_not_compared_with_evaluation() -> None:
    evaluation = [step(i, backward=None, optimizer=None) for i in range(50)]
    found = compare({"single": steps(50), "dp": evaluation}, devices=TWO)
    assert found.missing == "no verdict yet: it needs 20 more steps in dp"
    mixed = compare({"single": steps(50) + evaluation, "dp": evaluation + steps(30)})
    assert mixed.sides["dp"].steps == 30, "training rather than evaluation, if there is enough of it"
    assert mixed.left_out == 0
    assert mixed.speedup is not None


# ------------------------------------------------------------------------------------------------ from records


def seen(records: list[Row], span_s: int = 120) -> Process:
    """Return the process that the screen shows after these records."""
    process = snapshot_of_rows(records, span_s=span_s).representative
    assert process is not None
    return process


def compared(records: list[Row]) -> Comparison:
    found = seen(records).compared
    assert found is not None
    return found


def test_the_steps_after_a_change_of_mode_are_left_out() -> None:
    training = Training(step_ns=10 * MS)
    records = [*training.begin(), *training.run(400)]
    training.step_ns = 900 * MS  # as when caches are filled
    records += [*training.switch("single"), *training.run(WARM_UP_STEPS)]
    training.step_ns = 50 * MS
    records += training.run(60)
    found = compared(records)
    assert found.sides["single"].steps == 60
    assert (found.sides["single"].p95_ns or 0) < 100 * MS
    assert found.sides["dp"].steps == 400 - WARM_UP_STEPS
    assert found.outcome == "faster"
    assert found.virtual
    assert found.devices == ("cpu:0", "cpu:1")
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(5, rel=0.1)
    assert found.seen["single"] == 60 + WARM_UP_STEPS


def test_a_mode_of_long_ago_keeps_its_steps() -> None:
    training = Training(step_ns=100 * MS)
    records = [*training.begin(), *training.run(300)]
    records += [*training.switch("single"), *training.run(9000)]
    process = seen(records)
    assert all(column.mode == "single" for column in process.columns)
    assert process.compared is not None
    assert process.compared.speedup is not None
    assert {mode: side.steps for mode, side in process.compared.sides.items()} == {
        "dp": 300 - WARM_UP_STEPS, "single": 9000 - WARM_UP_STEPS,
    }  # fmt: skip


def memory(step: int, **peaks: int) -> Event:
    devices = [{"device": name.replace("_", ":"), "peak_bytes": peak} for name, peak in peaks.items()]
    at = 2 + step / 10
    return Event("memory", {"process": 0, "rank": None, "t_s": at, "step": step, "devices": devices})


def test_a_peak_belongs_to_the_mode_in_which_it_rose() -> None:
    training = Training(step_ns=100 * MS, devices=TWO, virtual=False, mode="single")
    records = [*[*training.begin(), *training.run(50)], memory(50, cuda_0=400)]
    records += [*training.switch("dp"), *training.run(50)]
    records += [memory(80, cuda_0=400, cuda_1=120), memory(100, cuda_0=400, cuda_1=130)]
    assert compared(records).memory == {"single": {"cuda:0": 400}, "dp": {"cuda:1": 130}}
