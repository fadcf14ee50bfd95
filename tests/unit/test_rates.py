"""What counts as training time, and that every place shows the same rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept import keep
from stored import state_in
from synthetic import SECOND, Training, decoded

from dpmon.model.history import BINS
from dpmon.model.pace import speed
from dpmon.record.kinds import Event
from dpmon.report.asjson import as_object
from dpmon.report.collect import collect
from dpmon.store.figures import Rate
from dpmon.text.quantities import rate_words, samples_rate


def test_texts_show_both_rates_only_if_they_differ() -> None:
    nearly, apart = Rate(10 / 1.02, 40 / 1.02, 10, 40), Rate(2.5, 10, 10, 40)
    assert rate_words(nearly) == "39.2 samples/s"
    assert rate_words(apart) == "10.0 samples/s (40.0 within steps)"
    assert samples_rate(apart) == "10.0 (40.0 within steps)"
    assert rate_words(Rate(2.5, None, 10, None)) == "2.50 steps/s (10.0 within steps)"
    assert (rate_words(None), samples_rate(None)) == ("", "–")


EPOCHS, STEPS, GAP = 6, 20, 2 * SECOND


def epochs(mode: str = "single") -> tuple[list[bytes], Training]:
    """Record six epochs of 20 steps of about 10 ms, with two seconds after each epoch."""
    training = Training(mode=mode, step_ns=10_000_000)
    payloads = training.begin()
    for _ in range(EPOCHS):
        payloads += training.run(STEPS)
        training.now += GAP
    return payloads, training


def truth(payloads: list[bytes]) -> tuple[float, float]:
    """Return samples per second by the script's clock, from the first to the last step, and within steps."""
    steps = [record for record in decoded(payloads) if type(record).__name__ == "Step"]
    samples = sum(step.samples for step in steps)
    elapsed = steps[-1].start_ns + steps[-1].wall_ns - steps[0].start_ns
    return samples * 1e9 / elapsed, samples * 1e9 / sum(step.wall_ns for step in steps)


def test_stretches_of_a_report_have_the_gap_as_a_gap_or_in_their_time(state: Path) -> None:
    payloads, training = epochs()
    width_ns, bins = collect(keep({0: payloads}, seconds=training.now / 1e9)).facts.stretches
    assert width_ns < GAP
    within = sum(one.wall_ns for one in bins)
    assert within <= sum(one.elapsed_ns for one in bins) < within + EPOCHS * GAP * 0.6, "between the stretches"


def test_a_stretch_that_has_grown_over_gaps_has_them_in_its_time(state: Path) -> None:
    """A thousand epochs of one step give at most four hundred stretches."""
    training = Training(mode="single", step_ns=SECOND)
    payloads = training.begin()
    for _ in range(1000):
        payloads += training.run(1)
        training.now += GAP
    width_ns, bins = collect(keep({0: payloads}, seconds=training.now / 1e9)).facts.stretches
    assert width_ns > 2 * (GAP + SECOND)
    assert len(bins) <= BINS
    assert sum(one.elapsed_ns for one in bins) == pytest.approx(training.now - 2 * SECOND, rel=0.01)
    for one in bins[1:-1]:
        assert (one.samples or 0) * 1e9 / one.elapsed_ns == pytest.approx(10, rel=0.35)


def test_a_pause_and_a_wait_for_input_are_in_no_rate(state: Path) -> None:
    training = Training(mode="single", step_ns=100_000_000)
    payloads = [*training.begin(), *training.run(40)]
    at = training.now / SECOND
    event = {"process": 0, "rank": None, "step": training.steps, "reason": None, "refused": None}
    payloads.append(Event("pause", {**event, "t_s": at, "paused": True, "paused_s": None}))
    training.now += 7 * SECOND
    payloads.append(Event("pause", {**event, "t_s": at + 7, "paused": False, "paused_s": 7.0}))
    payloads += training.run(20)
    began = training.now
    training.now += 5 * SECOND
    payloads += training.run(20)
    waits = Event("input", {"pid": 4242, "t_s": began / SECOND, "waited_s": 5.0})
    true = truth(payloads)[1]
    directory = keep({0: payloads, -1: [waits]}, seconds=training.now / 1e9)
    assert as_object(collect(directory))["modes"][0]["samples_per_s"] == pytest.approx(true, rel=0.001)
    live, over = (state_in(directory, span_s=0, over=over) for over in (False, True))
    process = live.processes[0]
    for rate in (over.processes[0].mean, process.ranged.rate):
        assert rate is not None
        assert (rate.samples_per_s, rate.samples_within) == pytest.approx((true, true), rel=0.001)
    assert speed(process, live, process.seen_ns).samples_per_s == pytest.approx(true, rel=0.1)
    said = json.dumps(as_object(collect(directory))["inputs"])
    assert '"seconds": 5.0' in said
