"""What counts as training time, and that every place shows the same rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from kept import keep
from synthetic import SECOND, Training, decoded

from dpmon.cli.progress import Progress
from dpmon.cli.summary import summary_lines
from dpmon.model import State, fold
from dpmon.model.compare import compared
from dpmon.model.history import add_step, figures, pictured
from dpmon.model.past import fold_past
from dpmon.model.state import PHASES, Process, StepSample
from dpmon.model.stats import mean_speed, speed
from dpmon.rates import Between, Gap, Pace, Paces, Tally, rate_of
from dpmon.record.codec import Step, is_evaluation
from dpmon.record.wire import pack_event
from dpmon.report.asjson import as_object
from dpmon.report.collect import collect
from dpmon.report.series import Series
from dpmon.run.kept import Kept
from dpmon.run.metrics import Metrics
from dpmon.run.reader import RunReader
from dpmon.text.quantities import rate_words, samples_rate

# ---------------------------------------------------------------------------------------------- the module itself


def of(paces: Paces, mode: str = "single") -> tuple[int, int]:
    """Elapsed training time, and time within training steps."""
    return paces.of(mode).training.elapsed_ns, paces.of(mode).training.step_ns


def three_steps() -> Paces:
    """Steps at 10 to 15, 15 to 20 and, after a gap of 30, 50 to 60."""
    paces = Paces()
    for number, (start, wall) in enumerate(((10, 5), (15, 5), (50, 10)), start=1):
        paces.step(number, "single", start, wall, 4, False)
    return paces


def test_the_time_between_two_steps_counts() -> None:
    paces = three_steps()
    assert of(paces) == (50, 20)
    rate = rate_of([paces.of("single").counted()])
    assert rate is not None
    assert (rate.samples_per_s, rate.samples_within) == (12 / 50e-9, 12 / 20e-9)
    assert rate.apart


def test_steps_that_were_missed_give_neither_time_nor_samples() -> None:
    paces = three_steps()
    paces.step(9, "single", 100, 10, 4, False)
    assert of(paces) == (60, 30)


@pytest.mark.parametrize(("began", "took"), [(30, 20), (None, 20), (30, None)])
def test_a_pause_is_no_training(began: int | None, took: int | None) -> None:
    """Also if only its begin or its end was recorded: then it lasted until the next step."""
    paces = Paces()
    paces.step(1, "single", 10, 10, 4, False)
    if began is not None:
        paces.pause(True, began, None)
    if took is not None:
        paces.pause(False, 50, took)
    paces.step(2, "single", 50, 10, 4, False)
    assert of(paces) == (30, 20)


@pytest.mark.parametrize(
    ("begin", "end", "elapsed", "within"),
    [
        (0, 9, 50, 20),  # before the first step
        (16, 18, 48, 18),  # in a step
        (25, 35, 40, 20),  # between two
        (12, 55, 7, 7),  # over several
        (55, 80, 45, 15),  # beyond the last one
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_a_wait_for_input_is_no_training_wherever_it_lies(
    begin: int, end: int, elapsed: int, within: int, late: bool
) -> None:
    if late:
        paces = three_steps()
        paces.wait(begin, end)
    else:
        paces = Paces()
        paces.wait(begin, end)
        for number, (start, wall) in enumerate(((10, 5), (15, 5), (50, 10)), start=1):
            paces.step(number, "single", start, wall, 4, False)
    assert of(paces) == (elapsed, within)


def test_a_wait_that_is_reported_before_its_step_ends_is_taken_out_of_it() -> None:
    paces = three_steps()
    paces.wait(55, 80)
    paces.step(4, "single", 60, 30, 4, False)
    assert of(paces) == (50 - 5 + 10, 20 - 5 + 10)


@pytest.mark.parametrize("late", [True, False])
def test_a_wait_in_a_long_step_is_taken_out_of_its_sum(late: bool) -> None:
    """A step of 20 s with a wait of 18 s is known by the second in which it ended."""
    paces = Paces()
    if not late:
        paces.wait(81 * SECOND, 99 * SECOND)
    paces.sums("single", Pace(Tally(1, 8, 0, 20 * SECOND, 20 * SECOND)), 100 * SECOND, 101 * SECOND)
    if late:
        paces.wait(81 * SECOND, 99 * SECOND)
    assert of(paces) == (2 * SECOND, 2 * SECOND)


def test_a_wait_between_steps_that_are_sums_is_taken_out_of_the_gap() -> None:
    paces = Paces()
    paces.sums("single", Pace(Tally(10, 80, 0, SECOND, SECOND)), 94 * SECOND, 95 * SECOND)
    paces.sums("single", Pace(Tally(1, 8, 0, SECOND // 2, SECOND // 2)), 95 * SECOND, 96 * SECOND)
    paces.sums("single", Pace(Tally(5, 40, 0, SECOND // 2, 5 * SECOND + SECOND // 2)), 100 * SECOND, 101 * SECOND)
    paces.wait(95 * SECOND + 10**7, 100 * SECOND + 10**7)
    assert of(paces) == (2 * SECOND, 2 * SECOND)


@pytest.mark.parametrize("late", [True, False])
def test_two_modes_of_one_minute_share_a_wait_in_any_order(late: bool) -> None:
    paces = Paces()
    if not late:
        paces.wait(2 * SECOND, 4 * SECOND)
    for mode, spent in (("dp", 6 * SECOND), ("single", 4 * SECOND)):
        paces.sums(mode, Pace(Tally(10, 80, 0, spent, spent)), 0, 10 * SECOND)
    if late:
        paces.wait(2 * SECOND, 4 * SECOND)
    assert (of(paces, "dp"), of(paces)) == ((4 * SECOND,) * 2, (4 * SECOND,) * 2)


@pytest.mark.parametrize(("begin", "end"), [(10, 40), (55, 95)])
def test_a_wait_before_or_after_the_training_is_in_no_sum(begin: int, end: int) -> None:
    paces = Paces()
    paces.sums("single", Pace(Tally(10, 80, 0, 5 * SECOND, 5 * SECOND)), 50 * SECOND, 51 * SECOND)
    paces.wait(begin * SECOND, end * SECOND)
    assert of(paces) == (5 * SECOND, 5 * SECOND)


def test_an_evaluation_has_its_own_time_and_the_time_around_it_is_training() -> None:
    between = Between()
    found = [
        between.step(number, 100 * number, 60, evaluation)
        for number, evaluation in enumerate((False, True, True, False), start=1)
    ]
    assert found == [Gap(0, False), Gap(40, False), Gap(40, True), Gap(40, False)]
    paces = Paces()
    for number, evaluation in enumerate((False, True, True, False), start=1):
        paces.step(number, "single", 100 * number, 60, 4, evaluation)
    pace = paces.of("single")
    assert (pace.training.steps, pace.training.elapsed_ns) == (2, 200)
    assert (pace.evaluation.steps, pace.evaluation.elapsed_ns) == (2, 160)
    assert pace.counted() == pace.training


@pytest.mark.parametrize("absent", [None, -1])
def test_a_step_is_an_evaluation_if_neither_backward_nor_optimizer_ran(absent: int | None) -> None:
    assert is_evaluation(absent, absent)
    assert not is_evaluation(0, absent)
    assert not is_evaluation(absent, 0)


def test_where_nothing_trains_evaluations_are_the_steps() -> None:
    paces = Paces()
    for number in (1, 2):
        paces.step(number, "single", 100 * number, 60, 4, True)
    assert (paces.of("single").counted().steps, paces.of("single").counted().elapsed_ns) == (2, 160)


def test_each_mode_has_the_time_of_its_own_steps_and_before_them() -> None:
    paces = Paces()
    for number, mode in enumerate(("dp", "dp", "single", "dp"), start=1):
        paces.step(number, mode, 100 * number, 60, 4, False)
    assert (of(paces, "dp"), of(paces, "single")) == ((260, 180), (100, 60))
    assert paces.total().training.elapsed_ns == 360, "from the first step's begin to the last one's end"


@pytest.mark.parametrize(("second", "expected"), [(0, 20.0), (10, 10.0), (5, 20 / 1.5)])
def test_samples_of_processes_that_train_at_the_same_time_add_up(second: int, expected: float) -> None:
    """Two processes with 100 samples in ten seconds each: at once, one after the other, or half overlapping."""
    one, other = Tally(), Tally()
    one.step(0, 10 * SECOND, 100)
    other.step(second * SECOND, 10 * SECOND, 100)
    rate = rate_of([one, other])
    assert rate is not None
    assert rate.samples_per_s == pytest.approx(expected)
    assert rate.steps_per_s == pytest.approx(0.1), "the step rate is that of one process"
    assert not rate.apart


@pytest.mark.parametrize("paces", [three_steps(), Paces()])
def test_a_pace_comes_back_from_its_text(paces: Paces) -> None:
    pace = paces.of("single")
    assert Pace.of_text(pace.text()) == pace
    pace.evaluation.step(0, 7, None)
    assert Pace.of_text(pace.text()) == pace


@pytest.mark.parametrize("text", ["", "1 2", "1 2 3 4 x", "1 2 3 4 5 6", "1 2 3 4 " + "9" * 30, "1 " * 10_000])
def test_a_damaged_pace_is_noticed(text: str) -> None:
    with pytest.raises(ValueError, match=r"damaged|invalid literal"):
        Pace.of_text(text)


def test_texts_show_both_rates_only_if_they_differ() -> None:
    tally = Tally(10, 40, 0, SECOND, SECOND * 102 // 100)
    assert rate_words(rate_of([tally])) == "39.2 samples/s"
    tally.elapsed_ns = 4 * SECOND
    assert rate_words(rate_of([tally])) == "10.0 samples/s (40.0 within steps)"
    assert samples_rate(rate_of([tally])) == "10.0 (40.0 within steps)"
    tally.unknown = 1
    assert rate_words(rate_of([tally])) == "2.50 steps/s (10.0 within steps)"
    assert (rate_words(None), samples_rate(None)) == ("", "–")


# ---------------------------------------------------------------------------------------------- all places alike

EPOCHS, STEPS, GAP = 6, 20, 2 * SECOND


def epochs(mode: str = "single") -> tuple[list[bytes], Training]:
    """Six epochs of twenty steps, each of about 10 ms, with two seconds after each epoch."""
    training = Training(mode=mode, step_ns=10_000_000)
    payloads = training.begin()
    for _ in range(EPOCHS):
        payloads += training.run(STEPS)
        training.now += GAP
    return payloads, training


def truth(payloads: list[bytes]) -> tuple[float, float]:
    """Samples per second by the script's own clock, from the first step's begin to the last one's end; within steps."""
    steps = [record for record in decoded(payloads) if type(record).__name__ == "Step"]
    samples = sum(step.samples for step in steps)
    elapsed = steps[-1].start_ns + steps[-1].wall_ns - steps[0].start_ns
    return samples * 1e9 / elapsed, samples * 1e9 / sum(step.wall_ns for step in steps)


def test_epochs_with_gaps_have_one_rate_everywhere(state: Path) -> None:
    payloads, training = epochs()
    true, within = truth(payloads)
    assert within > 8 * true
    directory = keep({0: payloads}, seconds=training.now / 1e9)
    (line,) = [line for line in summary_lines(directory, None) if line.startswith("single: ")]
    assert f"{true:.0f} samples/s ({within / 1000:.2f}k within steps)" in line

    said = as_object(collect(directory))
    assert said["modes"][0]["samples_per_s"] == pytest.approx(true)
    assert said["modes"][0]["samples_per_s_within_steps"] == pytest.approx(within)
    stretches = said["time"]["stretches"]
    assert sum(one["samples"] for one in stretches) == EPOCHS * STEPS * 30

    now = State()
    for record in decoded(payloads):
        now = fold(now, record)
    process = now.processes[0]
    (rate,) = (compared(process).sides["single"].rate,)
    assert rate is not None
    assert rate.samples_per_s == pytest.approx(true)
    for found in (mean_speed(process), figures(process, "single", 0)):
        assert found.rate is not None
        assert (found.rate.samples_per_s, found.rate.samples_within) == pytest.approx((true, within))
    last = speed(process, process.seen_ns)
    assert last.rate is not None
    assert last.samples_per_s == pytest.approx(true, rel=0.2), "of the last ten seconds"
    assert last.rate.samples_within == pytest.approx(within, rel=0.1)

    # A directory in which a late reader finds sums instead of records.
    with_sums, reader = State(), RunReader(directory)
    for past in reader.past():
        if past is not None:
            with_sums = fold_past(with_sums, past)
    for record in reader.poll():
        with_sums = fold(with_sums, record)
    reader.close()
    assert mean_speed(with_sums.processes[0]).samples_per_s == pytest.approx(true)

    metrics = Metrics(directory / "x.prom", directory, lambda text: None)
    metrics.tick(0.0)
    text = (directory / "x.prom").read_text()
    found = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("dpmon_tr")}
    assert found["dpmon_training_samples_total"] / found["dpmon_training_seconds_total"] == pytest.approx(true)

    status = Progress(RunReader(directory)).line()
    assert f"{true:.0f} samples/s ({within / 1000:.2f}k within steps)" in status


class Records:
    """Stands for a RunReader: gives what it was handed since it was last asked."""

    def __init__(self) -> None:
        self.fresh: list[Step] = []

    def poll(self) -> list[Step]:
        found, self.fresh = self.fresh, []
        return found


def test_a_line_after_an_evaluation_has_the_rate_of_the_training() -> None:
    records = Records()
    progress = Progress(cast(RunReader, records))
    at = number = 0
    lines = []
    for count, wall, phases in (
        (50, SECOND // 100, {"forward": 10}),
        (60, SECOND // 10, {"forward": 10, "backward": 5}),
        (20, SECOND // 100, {"forward": 10}),
        (60, SECOND // 5, {"forward": 10, "backward": 5}),
    ):
        for _ in range(count):
            number += 1
            records.fresh.append(Step(0, None, number, "single", at, wall, 16, phases))
            at += wall
        lines.append(progress.line())
    assert [line.split("  ")[1] for line in lines] == ["100 steps/s", "10.0 steps/s", "evaluation", "5.00 steps/s"]


def test_sums_of_seconds_and_minutes_know_the_time_between_steps(state: Path) -> None:
    payloads, training = epochs()
    true, within = truth(payloads)
    kept = Kept(keep({0: payloads}, seconds=training.now / 1e9))
    for width in (1, 60):
        whole = Pace()
        for rollup in kept.rollups(width):
            whole.add(rollup.pace)
        rate = rate_of([whole.training])
        assert rate is not None
        assert (rate.samples_per_s, rate.samples_within) == pytest.approx((true, within))
    kept.close()


def test_stretches_of_a_report_have_the_gap_as_a_gap_or_in_their_time(state: Path) -> None:
    payloads, training = epochs()
    story = collect(keep({0: payloads}, seconds=training.now / 1e9))
    assert story.bin_ns < GAP
    within = sum(one.wall_ns for one in story.bins)
    assert within <= sum(one.elapsed_ns for one in story.bins) < within + EPOCHS * GAP // 4, "between the stretches"


def test_a_stretch_that_has_grown_over_gaps_has_them_in_its_time() -> None:
    """A thousand epochs of one step give at most four hundred stretches."""
    series = Series()
    for number in range(1000):
        start = number * (GAP + SECOND)
        series.step("single", False, start, SECOND, 30, (None, None, SECOND, SECOND, None, 0))
        series.gap("single", start, Gap(GAP if number else 0, False))
    width, bins = series.result()
    assert width > 2 * (GAP + SECOND)
    assert sum(one.elapsed_ns for one in bins) == pytest.approx(1000 * (GAP + SECOND), rel=0.01)
    for one in bins[1:-1]:
        assert (one.samples or 0) * 1e9 / one.elapsed_ns == pytest.approx(10, rel=0.35)


def test_a_pause_and_a_wait_for_input_are_in_no_rate(state: Path) -> None:
    training = Training(mode="single", step_ns=100_000_000)
    payloads = [*training.begin(), *training.run(40)]
    at = training.now / SECOND
    event = {"process": 0, "rank": None, "step": training.steps, "reason": None, "refused": None}
    payloads.append(pack_event("pause", {**event, "t_s": at, "paused": True, "paused_s": None}))
    training.now += 7 * SECOND
    payloads.append(pack_event("pause", {**event, "t_s": at + 7, "paused": False, "paused_s": 7.0}))
    payloads += training.run(20)
    began = training.now
    training.now += 5 * SECOND
    payloads += training.run(20)
    waits = pack_event("input", {"pid": 4242, "t_s": began / SECOND, "waited_s": 5.0})
    true = truth(payloads)[1]
    directory = keep({0: payloads, -1: [waits]}, seconds=training.now / 1e9)
    assert as_object(collect(directory))["modes"][0]["samples_per_s"] == pytest.approx(true, rel=0.001)
    now = State()
    for record in decoded([*payloads, waits]):
        now = fold(now, record)
    process = now.processes[0]
    for found in (mean_speed(process).rate, figures(process, "single", 0).rate):
        assert found is not None
        assert (found.samples_per_s, found.samples_within) == pytest.approx((true, true), rel=0.001)
    assert speed(process, None).samples_per_s == pytest.approx(true, rel=0.1)
    said = json.dumps(as_object(collect(directory))["inputs"])
    assert '"seconds": 5.0' in said


@pytest.mark.parametrize("span", [600, 0])
def test_a_damaged_time_costs_no_more_columns_than_there_are_cells(span: int) -> None:
    process = Process(0)
    process.began_ns = 0
    for number, (mode, second) in enumerate((("dp", 200_000), ("single", 5)), start=1):
        add_step(process, StepSample(number, second * SECOND, 10**7, 8, (1,) * len(PHASES)), mode)
    assert 0 < len(pictured(process, span, 100).columns) <= 100


def test_a_gap_between_epochs_is_a_gap_in_the_chart_and_a_long_step_is_none() -> None:
    training = Training(mode="single", step_ns=250_000_000)
    now = State()
    payloads = [*training.begin(), *training.run(20)]
    first = training.now // SECOND
    training.now += 10 * SECOND
    payloads += training.run(20)
    training.step_ns = 6 * SECOND
    payloads += training.run(2)
    for record in decoded(payloads):
        now = fold(now, record)
    shown = pictured(now.processes[0], 120, 120, over=True)
    assert [column.second for column in shown.columns] == list(range(2, training.now // SECOND + 1))
    empty = [column.second for column in shown.columns if not column.count]
    assert len(empty) in (9, 10)
    assert empty[0] in (first, first + 1)
    assert {column.mode for column in shown.columns} == {"single"}


def test_a_wait_that_only_touches_a_step_is_not_taken_out_of_it() -> None:
    """A wait before the first step whose end was sampled late, and one after the last whose begin was sampled early."""
    paces = Paces()
    for number in range(1, 3):
        paces.step(number, "dp", number * 100, 100, 8, False)
    paces.wait(-5000, 112)
    paces.wait(256, 4000)
    assert paces.of("dp").training.elapsed_ns == 200
