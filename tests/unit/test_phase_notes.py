"""Notes below the phases: where the host waits for the GPU, and how many steps have device times."""

from __future__ import annotations

import pytest

from dpmon.model.findings.phase_notes import host_waits, timed_steps_note
from dpmon.report.sentences import phase_notes
from dpmon.store.step_stats import PhaseStats
from dpmon.store.tally import Tally
from support.analysis_builders import StatsOfPhases

MS = 1e6


def phase(name: str, ms: float | None, share: float | None, device_ms: float | None = None) -> PhaseStats:
    middle, on_device = (None if took is None else took * MS for took in (ms, device_ms))
    return PhaseStats(name, 100, middle, None, None, share, on_device)


def test_a_copy_that_waits_for_the_gpu_is_noted_with_its_own_time() -> None:
    found = host_waits([phase("data", 1, 0.3, 0.0), phase("copy", 13.4, 0.7, 0.342)])
    assert found == ["in copy the host waits for the GPU's earlier work: the phase itself takes the GPU 342 µs"]


@pytest.mark.parametrize(
    ("name", "ms", "share", "device_ms"),
    [
        ("copy", 13.4, 0.7, 7.0),  # the copy itself is half of it
        ("copy", 13.4, 0.19, 0.3),
        ("copy", 13.4, 0.7, None),
        ("copy", None, None, 0.3),
        ("data", 13.4, 0.7, 0.3),
        ("other", 13.4, 0.7, 0.3),
        ("forward", 5.0, 0.7, 20.0),
    ],
)
def test_a_copy_that_does_not_wait_has_no_note(name: str, ms: float, share: float, device_ms: float | None) -> None:
    assert host_waits([phase(name, ms, share, device_ms)]) == []


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (100, []),
        (90, []),
        (89, ["device times are known for 89 of the 100 steps (1 in 1.12)"]),
        (13, ["device times are known for 13 of the 100 steps (1 in 7.69)"]),
        (0, []),
    ],
)
def test_a_note_says_how_many_steps_have_device_times_if_they_are_few(known: int, said: list[str]) -> None:
    phases = tuple(
        phase(name, 1, 0.1)._replace(device_ns=MS, device_count=count)
        for name, count in (("forward", 100), ("backward", known))
    )
    assert timed_steps_note(phases) == said
    mode = StatsOfPhases("dp", False, 100, 0, MS, MS, None, None, Tally(), phases=phases)
    assert phase_notes(mode, 1.0) == said


@pytest.mark.parametrize(("calls_per_step", "is_noted"), [(1.0, False), (4.0, True)])
def test_a_note_says_which_rows_are_samples_if_a_step_has_several_calls(calls_per_step: float, is_noted: bool) -> None:
    """A GAN has four calls a step. The calls of a rollout are of another kind, so they do not count."""
    phases = phase("data", 1, 0.1), phase("backward", 1, 0.5)
    mode = StatsOfPhases("dp", False, 100, 6400, MS, MS, None, None, Tally(), phases=phases)
    assert any("largest call" in note for note in phase_notes(mode, calls_per_step)) == is_noted
