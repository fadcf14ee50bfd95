"""Collectives of two gloo ranks: the records of sampled steps equal the counts of the script itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.fsdp

from dpmon.record.record_types import Collective, Sampled
from support.baseline_comparison import run_unless_aborted
from support.record_builders import kind_of
from support.tracer_harness import TracedRun, TracedScript, run_traced, run_untraced, traced_script_text

pytestmark = pytest.mark.slow

FORMS = ["ddp", "no_sync", "unused", "two", "fsdp", "by hand", "functional", "raises"]
if not hasattr(torch.distributed.fsdp, "fully_shard"):  # its place in torch 2.6 and later
    FORMS.remove("fsdp")


class Runs(NamedTuple):
    """The same script with the tracer and without."""

    traced: TracedRun
    alone: TracedRun
    start_ns: int

    def samples(self, told: dict[str, Any]) -> list[tuple[Sampled, list[Collective]]]:
        """Return the samples in the equal steps of a form, each with its collectives."""
        process = self.traced.process_of(told["pid"])
        mine = [one for one in self.traced.records if isinstance(one, (Sampled, Collective)) and one.process == process]
        found = []
        for one in mine:
            begin, end = one.start_ns, one.start_ns + (one.wall_ns if isinstance(one, Sampled) else 0)
            if (
                isinstance(one, Sampled)
                and told["alike"] <= begin + self.start_ns
                and end + self.start_ns <= told["end"]
            ):
                inside = [each for each in mine if isinstance(each, Collective) and begin <= each.start_ns < end]
                found.append((one, inside))
        assert len(found) >= 2
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("communicating")
    text = traced_script_text("communicating")

    def both(_: int) -> Runs:
        script = TracedScript(place, text, fresh=True)
        return Runs(script.end(), run_untraced(place, text, fresh=True), script.start_ns)

    return run_unless_aborted(both, lambda runs: runs.traced.err + runs.alone.err)


def rank_output(run: TracedRun, form: str) -> list[dict[str, Any]]:
    """Return the output of each rank for a form."""
    return [{**one, "pid": rank["pid"]} for rank in run.printed for one in rank["forms"] if one["form"] == form]


@pytest.mark.parametrize("form", FORMS)
def test_operations_and_bytes_are_those_of_the_script(runs: Runs, form: str) -> None:
    run = runs.traced
    for rank in rank_output(run, form):
        expected = Counter((operation, size) for operation, size in rank["each"])
        for sample, collectives in runs.samples(rank):
            assert Counter((one.operation, one.bytes) for one in collectives) == expected
            assert sample.collectives == len(collectives)
            assert sample.step is not None
            for one in collectives:
                assert (one.group_size, one.ranks, one.backend, one.device, one.group) == (2, None, "gloo", "cpu", "0")
                assert 0 < one.host_ns < rank["end"] - rank["alike"]
        if form in ("ddp", "no_sync", "two"):  # torch counts a reduce_scatter of gloo more than once
            assert rank["counted"] == len(rank["each"])


@pytest.mark.skipif("fsdp" not in FORMS, reason="torch 2.6 and later have fully_shard")
def test_the_step_and_phase_in_which_they_were_launched(runs: Runs) -> None:
    run = runs.traced
    (rank, _) = rank_output(run, "fsdp")
    steps = {step.step: step for step in run.steps(run.process_of(rank["pid"]))}
    for sample, collectives in runs.samples(rank):
        assert Counter((one.operation, one.phase) for one in collectives) == Counter(
            {("all_gather", "forward"): 2, ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 2}
        )
        for one in collectives:
            assert one.step == sample.step
            assert one.step is not None
            step = steps[one.step]
            assert step.start_ns <= one.start_ns < step.start_ns + step.wall_ns


def test_a_sample_is_of_all_the_batches_of_an_optimizer_step(runs: Runs) -> None:
    """Under no_sync only the last of three batches has collectives."""
    run = runs.traced
    for rank in rank_output(run, "no_sync"):
        process = run.process_of(rank["pid"])
        for sample, _ in runs.samples(rank):
            end = sample.start_ns + sample.wall_ns
            assert sum(sample.start_ns <= step.start_ns < end for step in run.steps(process)) == 3


def test_ranks_sample_the_same_steps(runs: Runs) -> None:
    """Ranks wait for each other, so samples in different steps would slow down all of them."""
    run = runs.traced
    for form in {"ddp", "unused", "fsdp", "by hand", "functional"} & {*FORMS}:
        first, second = ([sample.step for sample, _ in runs.samples(rank)] for rank in rank_output(run, form))
        assert first == second


@pytest.mark.parametrize("form", FORMS)
def test_losses_weights_and_errors_are_the_same_as_without_dpmon(runs: Runs, form: str) -> None:
    with_, without = ([(one["losses"], one["weights"]) for one in rank_output(run, form)] for run in runs[:2])
    assert with_ == without


def test_sampling_writes_no_warning_and_loses_no_record(runs: Runs) -> None:
    run = runs.traced
    assert run.complaints == []
    assert run.missed == 0


# ------------------------------------------------------------------------------------------------ odd scripts


@pytest.fixture(scope="module")
def oddly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TracedRun]:
    place = tmp_path_factory.mktemp("oddly")
    text = traced_script_text("communicating_oddly")
    return cache(lambda how: run_unless_aborted(lambda _: run_traced(place, text, how), lambda run: run.err))


def of_kind(run: TracedRun, kind: type) -> list[Any]:
    return [one for one in run.records if isinstance(one, kind)]


def test_operator_kernels_of_the_script_are_called_as_without_dpmon(oddly: Callable[[str], TracedRun]) -> None:
    """The script registers kernels at another autograd key, and at the same key as the tracer."""
    run = oddly("own kernels")
    assert (run.printed["AutogradCPU"], run.printed["BackendSelect"]) == (40, 40)
    assert {one.operation for one in of_kind(run, Collective)} == {"all_reduce"}
    assert run.complaints == []


def test_interrupts_reach_the_script_and_sampling_goes_on(oddly: Callable[[str], TracedRun]) -> None:
    run = oddly("interrupts")
    assert run.printed["raised"] == run.printed["caught"] == 600
    assert run.complaints == []
    # The interrupts end 42 steps before the last one; every fourth step is sampled.
    assert max(sample.step or 0 for sample in of_kind(run, Sampled)) > len(run.steps()) - 40


def test_a_script_that_forks_in_a_sample(oddly: Callable[[str], TracedRun]) -> None:
    run = oddly("forks")
    assert set(run.printed["statuses"]) == {0}
    assert len(of_kind(run, Sampled)) >= 3
    assert run.complaints == []


def test_no_step_is_sampled_while_another_thread_communicates(oddly: Callable[[str], TracedRun]) -> None:
    run = oddly("threads")
    assert run.printed["count"] > 100
    samples = of_kind(run, Sampled)
    assert [sample.why for sample in samples if sample.collectives is None] == [
        "another thread of the process was in torch.distributed at every attempt to record a step"
    ]
    assert run.complaints == []


def test_collectives_are_sampled_beside_an_idle_thread(oddly: Callable[[str], TracedRun]) -> None:
    run = oddly("threads that rest")
    assert run.printed["left"] == ["MainThread"]
    groups = Counter(one.bytes for one in of_kind(run, Collective))
    assert set(groups) == {20, 40}
    assert sum(groups.values()) == sum(sample.collectives or 0 for sample in of_kind(run, Sampled))
    assert run.complaints == []


def test_a_torch_that_lacks_what_is_needed(oddly: Callable[[str], TracedRun]) -> None:
    run = oddly("lacks")
    assert of_kind(run, Sampled) == []
    (warning,) = run.complaints
    assert "_dispatch_keyset_full_after" in warning


def test_a_process_without_a_group_registers_nothing(oddly: Callable[[str], TracedRun]) -> None:
    run = oddly("no group")
    assert run.printed["registered"] is False
    assert of_kind(run, Sampled) == []


@pytest.mark.parametrize(("how", "each"), [("no optimizer", 1), ("accumulates", 3), ("looks ahead", 1)])
def test_a_sample_is_of_one_step_of_the_training(oddly: Callable[[str], TracedRun], how: str, each: int) -> None:
    """With all batches whose gradients are accumulated, also between two fetches."""
    run = oddly(how)
    samples = of_kind(run, Sampled)
    assert len(samples) >= 6
    assert [sample.collectives for sample in samples[:6]] == [each] * 6
    assert run.complaints == []


def test_samples_are_some_time_apart(oddly: Callable[[str], TracedRun]) -> None:
    starts = [sample.start_ns for sample in of_kind(oddly("apart"), Sampled)]
    assert 3 <= len(starts) <= (starts[-1] - starts[0]) / 300_000_000 + 2


def test_a_reader_asks_for_a_sample(tmp_path: Path) -> None:
    script = TracedScript(tmp_path, traced_script_text("communicating_oddly"), "asked")
    assert script.line() == "ready"
    ring = script.ring()
    ring.request_sample()
    until = time.monotonic() + 100
    while time.monotonic() < until and not any(kind_of(row) == "collective" for row in ring.read()):
        time.sleep(0.05)
    (script.cwd / "enough").touch()
    run = script.end()
    ring.close()
    (sample,) = of_kind(run, Sampled)
    (one,) = of_kind(run, Collective)
    assert (sample.collectives, one.operation, one.bytes) == (1, "all_reduce", 40)
