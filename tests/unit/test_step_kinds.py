"""The three kinds of steps: which kind a turn of a loop has, how steps are numbered, and what describes a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dpmon.model.findings.all_findings import find_all
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.throughput import throughput_of
from dpmon.record.record_types import Call
from dpmon.record.schema import EVALUATION, FORWARD_ONLY, TRAINING
from dpmon.report.sentences import mode_title
from dpmon.stalls.run_state import RUNNING, decide_state
from dpmon.stalls.run_state import TRAINING as IS_TRAINING
from dpmon.store.shapes import read_shapes
from dpmon.store.step_stats import StatsWindow
from dpmon.store.store_queries import Store
from dpmon.store.tally_tables import count_steps
from support.history_builders import Recording
from support.script_simulator import DecodedRows, Script, assemble_in_portions, assemble_script

T, E, F = TRAINING, EVALUATION, FORWARD_ONLY
LOOPS: dict[str, tuple[str, list[tuple[int, int]], Sequence[tuple[int, int | None, int]]]] = {
    "a test pass without eval()": (
        "m " + ("d l " * 2 + "D " + "d f " * 2 + "D ") * 2,
        [(T, 1), (T, 2), (F, 1), (F, 2), (T, 3), (T, 4), (F, 3), (F, 4)],
        [(T, n, 1) for n in (1, 2, 3, 4)] + [(F, n, 1) for n in (1, 2, 3, 4)],
    ),
    "a test call without gradients after each update": (
        "m " + "l n " * 3,
        [(T, 1), (T, 2), (T, 3)],
        [(T, 1, 1), (T, 2, 2), (T, 3, 2), (E, None, 1)],
    ),
    "sampling after the training": (
        "m " + "l " * 3 + "f " * 20,
        [(T, n) for n in (1, 2, 3)] + [(F, n) for n in range(1, 21)],
        [(T, n, 1) for n in (1, 2, 3)] + [(F, n, 1) for n in range(1, 21)],
    ),
    "sampling without gradients after the training": (
        "m " + "l " * 3 + "n " * 4,
        [(T, n) for n in (1, 2, 3)] + [(E, n) for n in (1, 2, 3, 4)],
        [(T, n, 1) for n in (1, 2, 3)] + [(E, n, 1) for n in (1, 2, 3, 4)],
    ),
    "evaluation of the bare model": (
        "m " + "lW " * 2 + "eV " * 3,
        [(T, 1), (T, 2), (E, 1), (E, 2), (E, 3)],
        [(T, 1, 1), (T, 2, 1), (E, 1, 1), (E, 2, 1), (E, 3, 1)],
    ),
    "one call of the bare model after each update": (
        "m " + "lW eV " * 2,
        [(T, 1), (T, 2)],
        [(T, 1, 1), (T, 2, 1), (E, None, 2)],
    ),
    "a call before the loop": (
        "m f w300 " + "d l " * 2,
        [(T, 1), (T, 2)],
        [(F, None, 1), (T, 1, 1), (T, 2, 1)],
    ),
    "a batch that is skipped": (
        "m d l d f d l d l",
        [(T, 1), (F, 1), (T, 2), (T, 3)],
        [(T, 1, 1), (F, 1, 1), (T, 2, 1), (T, 3, 1)],
    ),
    "training in eval mode": (
        "m " + "d e b o " * 2,
        [(T, 1), (T, 2)],
        [(T, 1, 1), (T, 2, 1)],
    ),
    "accumulation with a loader": (
        "m " + "d f b d f b o " * 2,
        [(T, 1), (T, 2), (T, 3), (T, 4)],
        [(T, n, 1) for n in (1, 2, 3, 4)],
    ),
}


def assembled(loop: str) -> DecodedRows:
    """Return the rows of a loop (`Script.play`)."""
    script = Script().play(loop)
    script.line(end=True, uncaught=False)
    return assemble_script(script)


def calls_by_step(calls: list[Call]) -> set[tuple[int, int | None, int]]:
    """Return (kind, step, number of calls) of each step with calls."""
    keys = [(call.kind, call.step) for call in calls]
    return {(kind, step, keys.count((kind, step))) for kind, step in keys}


@pytest.mark.parametrize("name", LOOPS)
def test_kinds_and_numbers(name: str) -> None:
    loop, steps, calls = LOOPS[name]
    found = assembled(loop)
    assert [(step.kind, step.step) for step in found.steps if step.step] == steps
    assert calls_by_step(found.calls) == set(calls)


def recorded(loop: str) -> Recording:
    """Return the history of a process with this loop, which ended by itself."""
    script = Script().play(loop)
    script.line(end=True, uncaught=False)
    run = Recording()
    run.add(assemble_in_portions(script, []))
    return run


def steps_by_mode(store: Store) -> dict[tuple[str, str], int]:
    """Return the number of steps by mode and the word for their kind."""
    window = StatsWindow(store)
    pairs = [*((mode, window.main_kind) for mode in window.modes), *window.other_modes]
    return {(mode, store.kind_words[kind]): window.tally(mode, kind).steps for mode, kind in pairs}


def test_training_describes_a_run_whatever_else_it_does() -> None:
    store = recorded("m " + "lW " * 3 + "eV " * 30).store()
    assert store.main_kind == TRAINING
    assert steps_by_mode(store) == {("single", "training"): 3, ("single", "evaluation"): 30}


def test_the_steps_that_samples_of_collectives_describe_are_of_the_main_kind() -> None:
    trained = recorded("m " + "lW " * 3 + "eV " * 30).store()
    assert count_steps(trained, 0, 1 << 40, [0]) == 3
    assert count_steps(recorded("e " * 20).store(), 0, 1 << 40, [0]) == 20


def test_a_run_that_never_trains_is_described_by_its_most_frequent_kind() -> None:
    run = recorded("f " * 20 + "e e e")
    store = run.store()
    assert store.main_kind == FORWARD_ONLY
    assert steps_by_mode(store) == {("single", "forward only"): 20, ("single", "evaluation"): 3}


@pytest.mark.parametrize(("loop", "word"), [("f " * 20, RUNNING), ("m " + "l " * 20, IS_TRAINING)])
def test_the_state_of_a_run_that_only_calls_its_model_is_running(loop: str, word: str) -> None:
    snapshot = recorded(loop).state()
    inputs = snapshot.state_inputs(snapshot.newest_ns, {}, None, None)
    assert decide_state(inputs).word == word


def test_evaluations_before_nearly_every_update_generate_data() -> None:
    rollouts = recorded("m " + ("e e e l ") * 20).store()
    assert steps_by_mode(rollouts) == {("single", "training"): 20, ("single", "without gradients"): 60}
    validated = recorded("m " + ("l " * 10 + "e e e ") * 20).store()
    assert steps_by_mode(validated) == {("single", "training"): 200, ("single", "evaluation"): 60}


def test_calls_without_gradients_within_training_steps_are_no_evaluations() -> None:
    store = recorded("m " + "d n n l " * 20).store()
    run = RunAnalysis(store)
    assert steps_by_mode(store) == {("single", "training"): 20}
    assert run.layouts.calls("single", EVALUATION) == 40
    assert mode_title(run.mode("single", EVALUATION)) == "single, without gradients"
    evaluated = recorded("m " + "d n n l " * 20 + "D " + "e " * 5).store()
    assert steps_by_mode(evaluated) == {("single", "training"): 20, ("single", "evaluation"): 5}


@pytest.mark.parametrize("rollout_ms", [50, 4000])
def test_rates_include_the_calls_before_nearly_every_update(rollout_ms: int) -> None:
    """Each turn has 2 such calls, and 3.4 ms of other time. Between epochs, an evaluation stays out of the rates."""
    run = recorded("m " + f"e={rollout_ms} e={rollout_ms} l " * 12)
    snapshot, turn_s = run.state(), (2 * rollout_ms + 3.5) / 1000
    assert snapshot.representative is not None
    throughput = throughput_of(snapshot.representative, snapshot, snapshot.newest_ns)
    assert throughput.rate is not None
    assert throughput.rate.steps_per_s == pytest.approx(1 / turn_s, rel=0.01)
    assert throughput.rate.samples_per_s == pytest.approx(8 / turn_s, rel=0.01)
    window = StatsWindow(run.store())
    (mean,) = {window.rate(), window.rate("single")}
    assert mean is not None
    assert mean.steps_per_s == pytest.approx(1 / turn_s, rel=0.01)
    assert mean.steps_per_s_within == pytest.approx(1000 / 3.2, rel=0.1)
    validated = StatsWindow(recorded("m " + ("l " * 10 + "e=50 e=50 ") * 4).store()).rate()
    assert validated is not None
    assert validated.steps_per_s == pytest.approx(1000 / 3.3, rel=0.05)


@pytest.mark.parametrize(
    ("loop", "saved_s"),
    [("l w20 " * 60 + "e=100 " * 20, []), (("l w20 " * 20 + "e=100 " * 20) * 4, [pytest.approx(8.0, abs=0.2)])],
)
def test_a_single_evaluation_at_the_end_cannot_be_made_less_often(loop: str, saved_s: list[object]) -> None:
    found = find_all(RunAnalysis(recorded("m " + loop).store()))
    assert [finding.saves_s for finding in found if finding.kind == "evaluation"] == saved_s


def test_the_state_during_calls_before_an_update_is_training() -> None:
    snapshot = recorded("m " + "e e l " * 12 + "e e").state()
    inputs = snapshot.state_inputs(snapshot.newest_ns, {}, None, None)
    assert (inputs.step_word, decide_state(inputs).word) == ("without gradients", IS_TRAINING)


def test_a_call_outside_the_loop_takes_time_and_is_no_step() -> None:
    """The last call evaluates 40 rows once, after the training."""
    store = recorded("m " + "l " * 10 + "e40=500").store()
    assert steps_by_mode(store) == {("single", "training"): 10}
    assert StatsWindow(store).time_by_activity["evaluation"] == pytest.approx(500e6, rel=0.01)
    calls = {(shape.kind & ~2, shape.calls) for shape in read_shapes(store)}
    assert (EVALUATION, 1) in calls


def test_calls_without_gradients_in_a_training_step_do_not_train() -> None:
    """They have no part in the sizes and samples of the training."""
    store = recorded("m " + "d n99 f8 b o " * 20).store()
    window = StatsWindow(store)
    assert window.tally("single").stat("samples").total == 20 * 8
    counts = {TRAINING: 0, EVALUATION: 0}
    for shape in read_shapes(store):
        counts[shape.kind & EVALUATION] += shape.calls
    assert counts == {TRAINING: 20, EVALUATION: 20}
