"""Device times of all phases, from torch's events, compared with the trace of the simulated devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from support.fake_devices import RecordedCudaTrace, SimulatedCuda
from support.tracer_harness import TracedRun, run_traced

pytestmark = pytest.mark.simulated

TEXT = (Path(__file__).parent / "scripts" / "phases.py").read_text()
STEP = ("data", "forward", "backward", "optimizer")
FIRST = 4
"""First steps, which are left out: the tracer finds CUDA in the first, and memory is allocated."""
STEPS = 14
Bounds = list[tuple[int, int]]


def times(truth: RecordedCudaTrace, label: str) -> list[int]:
    return [host for name, host in truth.marks() if name == label]


def stretches(truth: RecordedCudaTrace, first: str, last: str = "") -> Bounds:
    """Return the times from each mark to the next one of the other kind."""
    begun, ended = (times(truth, one) for one in ((first, last) if last else (f"{first} <", f"{first} >")))
    return [(one, next(host for host in ended if host > one)) for one in begun if ended[-1] > one]


def steps_of(run: TracedRun, name: str) -> list[float | None]:
    return [(step.device_ms or {}).get(name) for step in run.steps()]


def calls_of(run: TracedRun, name: str) -> list[float | None]:
    return [call.phases[name].device_ms for call in run.calls()]


def each(
    ours: Sequence[float | None],
    truth: RecordedCudaTrace,
    bounds: Bounds,
    devices: Iterable[int],
    own_ms: float = 0.0,
) -> None:
    """Check that each is within 5%, if the devices had work left at both ends; else the host may have been delayed.

    `own_ms`: the time of the tracer's copies in a look at the optimizer, which the device may spend in one step or two.
    """
    bounds = bounds[: len(ours)]
    assert len(ours) == len(bounds)
    devices = tuple(devices)
    pairs = [
        (mine, truth.spent_ms(*one, devices))
        for mine, one in list(zip(ours, bounds, strict=True))[FIRST:]
        if all(truth.behind(end, devices) for end in one)
    ]
    assert len(pairs) >= 3
    far = [(mine, true) for mine, true in pairs if mine is None or abs(mine - true) > 0.05 * true + 0.01]
    with_copies = [(mine, true) for mine, true in far if mine is not None and 0 < true - mine <= 1.05 * own_ms]
    far = [pair for pair in far if pair not in with_copies[:2]]
    assert not far, (len(far), len(pairs), far[:8])


def run_of(
    tmp_path: Path, gpus: SimulatedCuda, form: str, count: int, kernel_us: float, **more: Any
) -> tuple[TracedRun, RecordedCudaTrace]:
    words = form, STEPS, more.pop("side", 0), more.pop("layers", 6), more.pop("second_us", 0)
    env = gpus.environment(count, kernel_us=kernel_us, copy_us=more.pop("copy_us", 10))
    run = run_traced(tmp_path, TEXT, *words, env=env, **more)
    assert run.status == 0, run.err
    assert run.complaints == []
    assert len(run.steps()) == len(run.calls()) == STEPS
    return run, gpus.truth()


def check_steps(run: TracedRun, truth: RecordedCudaTrace, count: int, own_ms: float = 0.0) -> None:
    for phase in STEP:
        each(steps_of(run, phase), truth, stretches(truth, phase), range(count), own_ms)


def check_calls(run: TracedRun, truth: RecordedCudaTrace, count: int) -> None:
    """Check calls; nothing is queued between two phases."""
    phases = {
        "scatter": ("forward <", "broadcast_coalesced <"),
        "replicate": ("broadcast_coalesced <", "broadcast_coalesced >"),
        "parallel_apply": ("broadcast_coalesced >", "gather <"),
        "gather": ("gather <", "forward >"),
    }
    for name, (first, last) in phases.items():
        each(calls_of(run, name), truth, stretches(truth, first, last), range(count))
    for index in range(count):
        ours = [call.replicas[index].device_ms for call in run.calls()]
        each(ours, truth, stretches(truth, f"replica {index}"), (index,))


# A kernel takes so long (µs) that the devices are much slower than the host, which has no part in their times.
SLOW = {1: 800.0, 2: 1500.0, 4: 3000.0}


@pytest.mark.parametrize("side", [0, 1], ids=["default stream", "side stream"])
def test_one_slow_device(tmp_path: Path, gpus: SimulatedCuda, side: int) -> None:
    run, truth = run_of(tmp_path, gpus, "bare", 1, SLOW[1], side=side, copy_us=500, mode="script")
    check_steps(run, truth, 1, own_ms=9 * 0.5)
    each([call.replicas[0].device_ms for call in run.calls()], truth, stretches(truth, "forward"), (0,))
    each(steps_of(run, "copy"), truth, stretches(truth, "copy"), (0,))
    assert median([one for one in steps_of(run, "copy") if one is not None]) == pytest.approx(0.5, rel=0.01)
    for step in run.steps()[FIRST:]:
        assert step.spans is not None
        assert [span.phase for span in step.spans] == ["data", "copy", "forward", "backward", "optimizer"]
    forwards = [one for one in steps_of(run, "forward") if one is not None]
    assert median(forwards) == pytest.approx(6 * SLOW[1] / 1e3)  # one product per layer, and no time of the host


@pytest.mark.parametrize(("count", "side"), [(2, 0), (2, 1), (4, 0)])
def test_slow_devices_in_parallel(tmp_path: Path, gpus: SimulatedCuda, count: int, side: int) -> None:
    run, truth = run_of(tmp_path, gpus, "dp", count, SLOW[count], side=side, mode="script")
    assert {call.devices for call in run.calls()} == {tuple(f"cuda:{one}" for one in range(count))}
    check_steps(run, truth, count)
    check_calls(run, truth, count)


def test_one_device_of_two_is_three_times_as_slow(tmp_path: Path, gpus: SimulatedCuda) -> None:
    run, truth = run_of(tmp_path, gpus, "dp", 2, SLOW[2], second_us=3 * SLOW[2], mode="script")
    check_steps(run, truth, 2)
    check_calls(run, truth, 2)
    first, second = (replica.device_ms for replica in run.calls()[-1].replicas)
    assert first is not None
    assert second == pytest.approx(3 * first, rel=0.05)


def test_virtual_replicas_on_one_slow_device(tmp_path: Path, gpus: SimulatedCuda) -> None:
    run, truth = run_of(tmp_path, gpus, "dp", 1, SLOW[2], replicas=4)
    assert {call.devices for call in run.calls()} == {tuple(f"cuda:0/{one}" for one in range(4))}
    check_steps(run, truth, 1)
    compared = 0
    begun, ended, scattered = (times(truth, label) for label in ("replica 0 <", "replica 0 >", "scatter >"))
    for number, call in list(enumerate(run.calls()))[FIRST:]:
        whole, applied = call.phases, slice(4 * number, 4 * number + 4)
        forward = stretches(truth, "forward")[number]
        if not all(truth.behind(end, (0,)) for end in forward):
            continue  # the host was delayed
        compared += 1
        over = next(host for host in scattered if host > forward[0])  # the backward of gather is also a scatter
        for name, first, last in (
            ("scatter", forward[0], over),
            ("replicate", over, begun[applied][0]),
            ("parallel_apply", begun[applied][0], max(ended[applied])),
            ("gather", max(ended[applied]), forward[1]),
        ):
            assert whole[name].device_ms == pytest.approx(truth.spent_ms(first, last, (0,)), rel=0.05, abs=0.01), name
    assert compared >= 3


@pytest.mark.parametrize("count", [1, 2])
def test_devices_that_wait_for_the_host(tmp_path: Path, gpus: SimulatedCuda, count: int) -> None:
    """The time between two events includes idle time of the device, here nearly all, so it is the host's time."""
    run, truth = run_of(tmp_path, gpus, "dp" if count > 1 else "bare", count, 1.0, layers=40, mode="script")
    for phase in STEP[1:]:
        ours = [one for one in steps_of(run, phase)[FIRST:] if one is not None]
        assert len(ours) == STEPS - FIRST
        host = [step.phases[phase] / 1e6 for step in run.steps()][FIRST:]
        # Of the same steps, because a busy machine may delay a step, even between a clock reading and an event.
        apart = median(abs(mine - other) for mine, other in zip(ours, host, strict=True))
        assert apart <= 0.05 * median(host) + 0.2, (phase, ours, host)
        marked = [truth.spent_ms(*one, range(count)) for one in stretches(truth, phase)][FIRST:]
        assert all(mine <= true + 0.1 for mine, true in zip(ours, marked, strict=True)), (
            phase
        )  # marks are outside of the times
