"""On a real GPU: sizes, phases against torch.profiler, NVML against nvidia-smi, memory, replicas, the cost.

Run by `python tests/gpu/check.py`, or `pytest -m gpu`. Everything here works without a network.
"""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmon.gpu.device_record import bare_uuid
from dpmon.tracer.core.session import Session, TracerConfig
from dpmon.tracer.devices.cuda_events import TorchEvents
from dpmon.tracer.devices.device_timing import DeviceTimer, PhaseTimer
from support.fake_devices import RunSamples, SimulatedProcess
from support.run_harness import Dpmon
from support.tracer_harness import TracedRun, TracedScript, run_traced

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPTS = Path(__file__).parent / "scripts"
PROCESS = Path(__file__).parents[1] / "process"
TRAINING, LARGE, FORMS = ((SCRIPTS / f"{name}.py").read_text() for name in ("training", "large", "forms"))
WARM_UP, STEPS = 20, 100
LARGE_WARM_UP, LARGE_STEPS = 10, 30
MIB = 1 << 20


def smi(*fields: str) -> list[dict[str, str]]:
    """Return the figures of nvidia-smi for each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        pytest.skip("there is no nvidia-smi to compare with")
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [dict(zip(fields, (word.strip() for word in line), strict=True)) for line in csv.reader(text.splitlines())]


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return None


# ---------------------------------------------------------------------------------------- NVML


def test_figures_of_nvml_equal_those_of_nvidia_smi(dpmon: Dpmon, gpu: str, row: Any) -> None:
    fields = (
        *("index", "uuid", "name", "memory.total", "memory.reserved", "memory.used", "power.limit", "power.draw"),
        *("temperature.gpu", "clocks.mem", "persistence_mode", "ecc.errors.uncorrected.volatile.total"),
    )
    script = dpmon.script("import time, torch\nx = torch.ones(1, device='cuda')\ntime.sleep(25)\n")
    process = dpmon.start("--headless", script)
    ring = RunSamples.of(dpmon.last)
    ring.until(lambda: ring.of_kind("host"), "the first sample")
    assert ring.of_kind("host")[-1]["gpu_absent"] is None

    def settled() -> bool:
        passing = ("not asked yet", "needs two readings")
        return all(
            ring.device(one).get("absent") is not None
            and not set(passing) & set(ring.device(one)["absent"].values())
            for one in range(len(theirs))
        )  # fmt: skip

    theirs = smi(*fields)
    ring.until(settled, "all fields")
    theirs = smi(*fields)  # again, at the same time as the newest samples
    for one in theirs:
        ours = ring.device(int(one["index"]))
        assert (ours["uuid"], ours["name"]) == (one["uuid"], one["name"])
        who = f"GPU {one['index']}"
        for name, key, unit, scale, within, share in (
            ("mem_total_bytes", "memory.total", "MiB", MIB, 0.001, True),
            ("mem_reserved_bytes", "memory.reserved", "MiB", MIB, 2.0, False),
            ("mem_used_bytes", "memory.used", "MiB", MIB, 64.0, False),
            ("power_limit_w", "power.limit", "W", 1, 0.001, True),
            ("power_w", "power.draw", "W", 1, 30.0, False),
            ("temperature_c", "temperature.gpu", "°C", 1, 3.0, False),
            ("mem_clock_mhz", "clocks.mem", "MHz", 1, 0.01, True),
            ("ecc_uncorrected", "ecc.errors.uncorrected.volatile.total", "errors", 1, 0.0, False),
        ):
            said = number(one[key])
            if said is None or ours[name] is None:
                assert said is None or ours["absent"].get(name), name
                continue
            row(f"{who} {name}", ours[name] / scale, said, unit, within, share)
        assert ours["persistence"] == (one["persistence_mode"] == "Enabled")
    process.wait(100)


def test_queries_of_nvml_are_cheap(dpmon: Dpmon, gpu: str, row: Any) -> None:
    """The supervisor's share of a core with these GPUs, over half a minute."""
    import psutil

    script = dpmon.script("import time\ntime.sleep(60)\n")
    dpmon.start("--headless", script)
    supervisor = psutil.Process(dpmon.info()["supervisor_pid"])
    ring = RunSamples.of(dpmon.last)
    ring.until(lambda: len(ring.of_kind("host")) >= 5, "the start")
    before, at = supervisor.cpu_times(), ring.of_kind("host")[-1]["t_s"]
    ring.until(lambda: ring.of_kind("host")[-1]["t_s"] >= at + 30, "half a minute")
    after, seconds = supervisor.cpu_times(), ring.of_kind("host")[-1]["t_s"] - at
    spent = after.user + after.system - before.user - before.system
    row("supervisor", 100 * spent / seconds, 0.0, "% of a core", 3.0, False)
    row("supervisor", supervisor.memory_info().rss / MIB, 0.0, "MiB", 60.0, False)


# ---------------------------------------------------------------------------------------- which GPU, and its memory


def test_the_gpu_of_the_run_is_known_by_uuid(dpmon: Dpmon, gpu: str) -> None:
    script = dpmon.script(TRAINING)
    process = dpmon.start("--headless", script, gpu, 20_000, "bare", "losses")
    ring = RunSamples.of(dpmon.last)
    uuid = bare_uuid(str(torch.cuda.get_device_properties(0).uuid))

    def ours() -> dict[str, Any]:
        return next((d for d in reversed(ring.of_kind("device")) if d["of_run"] and d["ordinals"]), {})

    found = ring.until(ours, "the GPU of the run")
    assert bare_uuid(found["uuid"]) == uuid
    assert found["ordinals"] == [{"process": 0, "device": "cuda:0"}]
    assert found["mem_torch_bytes"] > 0
    process.wait(300)


def test_memory_equals_torchs_own_figures(tmp_path: Path, gpu: str, row: Any) -> None:
    text = TRAINING + "\nprint(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]))\n"
    run = run_traced(tmp_path, text, gpu, 20_000, "bare", "losses")
    (one,) = [one for one in run.events("memory")[-1].data["devices"] if one["device"] == "cuda:0"]
    peak, reserved = run.printed
    row("peak of torch's allocator", one["peak_bytes"] / MIB, peak / MIB, "MiB", 0.01)
    row("reserved by torch's allocator", one["reserved_bytes"] / MIB, reserved / MIB, "MiB", 0.01)
    assert one["rest_bytes"] is not None
    assert (one["alloc_retries"], one["ooms"]) == (0, 0)
    assert bare_uuid(one["uuid"]) == bare_uuid(str(torch.cuda.get_device_properties(0).uuid))


# ---------------------------------------------------------------------------------------- phases


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, device: str) -> TracedRun:
    """The loop under torch.profiler and dpmon together."""
    run = run_traced(tmp_path_factory.mktemp("profiled"), TRAINING, device, STEPS, "bare", "profile")
    assert run.status == 0, run.err
    assert run.complaints == []
    return run


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_phases_equal_those_of_the_profiler(profiled: TracedRun, row: Any, phase: str) -> None:
    """Host time of each phase, the median of the same steps, within 5% of torch.profiler's.

    The profiler's times include record_function itself, which takes more than 5% of a short phase that only queues
    work. So dpmon's time must be between the profiler's and that of the operations alone.
    """
    steps = profiled.steps()[WARM_UP : WARM_UP + STEPS]
    whole, inside = (profiled.printed[name][phase] for name in ("spent_us", "inside_us"))
    assert len(steps) == len(whole) == len(inside) == STEPS
    ours = statistics.median(step.phases[phase] for step in steps) / 1e6
    least, most = statistics.median(inside) / 1e3, statistics.median(whole) / 1e3
    assert least > 0.5 * most, "the operations are nearly all of it"
    within = 0.05 if ours > most else 1 - 0.95 * least / most
    row(f"{phase}, host time, median of {STEPS} steps", ours, most, "ms", round(within, 3))


class RealDevice(SimulatedProcess):
    """A process with the events of the real device."""

    def __init__(self) -> None:
        super().__init__()
        events = TorchEvents(Session(TracerConfig("", 0, "auto", None, ())))
        self.timing = self.recorder.device_timer = DeviceTimer(self.recorder, events)

    def begin(self, *, shares: bool = False) -> PhaseTimer:
        mark = self.timing.begin(self.me, (0,), is_call_phase=shares)
        assert mark is not None
        return mark

    def end(self, mark: PhaseTimer) -> None:
        mark.end()
        mark.set_span_number(0)


def test_events_measure_the_devices_own_time(gpu: str, row: Any) -> None:
    """Times of dpmon.tracer.devices.device_timing, compared with two events around all of them."""
    process = RealDevice()
    x = torch.randn(4096, 4096, device=gpu)
    torch.mm(x, x)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(60):
        mark = process.begin(shares=True)
        for _ in range(4):
            torch.mm(x, x)
        process.end(mark)
    last.record()
    assert process.spans == []
    torch.cuda.synchronize()
    process.timing.write_known_times()
    assert process.faults == []
    assert len(process.spans) == 60
    row("60 phases by events", sum(ns for _, _, ns, _ in process.spans) / 1e6, first.elapsed_time(last), "ms", 0.05)


def test_an_event_costs_little(gpu: str, row: Any) -> None:
    """Host time of a phase's two events and of reading them."""
    process = RealDevice()
    spent = []
    for _ in range(2000):
        began = time.perf_counter_ns()
        process.end(process.begin())
        process.timing.write_known_times()
        spent.append((time.perf_counter_ns() - began) / 1e3)
    row("a phase on a device, host time", statistics.median(spent), 0.0, "µs", 12.0, False)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, device: str) -> TracedRun:
    """A loop limited by its device, under torch.profiler and dpmon together."""
    run = run_traced(tmp_path_factory.mktemp("large"), LARGE, device, LARGE_STEPS, "profile", mode="script")
    assert run.status == 0, run.err
    assert run.complaints == []
    return run


@pytest.mark.parametrize("phase", ["copy", "forward", "backward", "optimizer"])
def test_device_times_equal_those_of_the_profiler(gpu: str, large: TracedRun, row: Any, phase: str) -> None:
    """Device time of each phase, the median of the same steps, within 5% of torch.profiler's."""
    steps = large.steps()[LARGE_WARM_UP : LARGE_WARM_UP + LARGE_STEPS]
    theirs = large.printed["device_ms"][phase]
    ours = [(step.device_ms or {}).get(phase) for step in steps]
    assert len(theirs) == len(ours) == LARGE_STEPS
    assert None not in ours, {step.untimed for step in steps}
    known = [one for one in ours if one is not None]
    row(f"{phase}, device time, median of {LARGE_STEPS} steps", statistics.median(known), statistics.median(theirs),
        "ms", 0.05)  # fmt: skip


def test_copies_have_their_bytes(gpu: str, large: TracedRun) -> None:
    assert {step.quantity("copied_bytes") for step in large.steps()[LARGE_WARM_UP:]} == {4 * (4096 * 4096 + 4096)}


def test_calls_and_steps_agree_on_their_device(gpu: str, large: TracedRun) -> None:
    calls = {call.step: call.replicas[0].device_ms for call in large.calls()}
    for step in large.steps()[WARM_UP:]:
        assert step.device_ms is not None
        assert calls[step.step] == step.device_ms["forward"] is not None
        assert step.untimed is None


def test_a_slow_device_is_not_waited_for_more_often(tmp_path: Path, large: TracedRun, device: str) -> None:
    without = TracedScript(tmp_path, LARGE, device, LARGE_STEPS, "profile", run=False).end().printed["waits"]
    assert large.printed["waits"] == without


@pytest.mark.parametrize("which", ["captured", "side", "workers", "host", "raising", "full"])
def test_forms_of_training(tmp_path: Path, device: str, which: str) -> None:
    """Each has bit for bit the same losses as without dpmon, and device times or the reason why not."""
    if not device.startswith("cuda") and which in ("captured", "side", "full"):
        pytest.skip("needs a GPU, not a rehearsal")
    words = (device, 40, which)
    alone = TracedScript(tmp_path, FORMS, *words, run=False).end()
    run = run_traced(tmp_path, FORMS, *words, mode="script")
    assert run.printed == alone.printed
    assert [line for line in run.complaints if "out of memory" not in line] == []
    assert run.unreadable == ()
    assert [call.call for call in run.calls()] == list(range(1, len(run.calls()) + 1))
    assert [step.step for step in run.steps()] == list(range(1, len(run.steps()) + 1))
    if not device.startswith("cuda"):
        return
    timed = [step for step in run.steps() if step.device_ms is not None]
    reasons = {step.untimed for step in timed} - {None}
    assert sum(step.untimed is None for step in timed) >= (3 if which == "captured" else 20)
    if which == "captured":
        assert any("captured" in reason for reason in reasons if reason)
    if which in ("raising", "full"):
        assert sum(call.failed for call in run.calls()) >= 10
    for oom in run.events("oom"):
        assert (oom.data["device"], oom.data["asked_bytes"]) == ("cuda:0", 1 << 45)
        assert 0 < oom.data["allocated_bytes"] <= oom.data["reserved_bytes"] < oom.data["total_bytes"]
    assert bool(run.events("oom")) == (which == "full")
    for step in timed:
        assert all(ms is None or 0 <= ms < 10_000 for ms in (step.device_ms or {}).values())


def test_virtual_replicas_on_a_stream_of_the_scripts(tmp_path: Path, gpu: str) -> None:
    """The threads of replicas use the stream on which the batch was prepared."""
    run = run_traced(tmp_path, FORMS, gpu, 40, "side", mode="dp", devices=f"{gpu},{gpu}")
    alone = TracedScript(tmp_path, FORMS, gpu, 40, "side", run=False).end()
    assert {call.mode for call in run.calls()[:-1]} == {"dp"}
    assert run.printed[0] == pytest.approx(alone.printed[0], rel=0.2)
    assert all(loss < 10 for loss in run.printed)


def test_the_command_line_without_a_screen(dpmon: Dpmon, gpu: str) -> None:
    """Command line, supervisor, record, export and report together."""
    result = dpmon.run("--headless", dpmon.script(LARGE), gpu, 20, "losses", limit=250)
    assert result.status == 0, result.errors
    records = dpmon.records()
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == 30
    for step in steps[5:-1]:
        assert set(step["device_ms"]) == {"data", "copy", "forward", "backward", "optimizer"}
        assert step["device_ms"]["backward"] > step["device_ms"]["forward"] > 1
    calls = [record for record in records if record["kind"] == "call"]
    assert all(call["replicas"][0]["device_ms"] > 1 for call in calls[5:-1])
    assert b"cuda:0" in dpmon.run("report").out


# ---------------------------------------------------------------------------------------- replicas


def shares(run: TracedRun) -> set[tuple[str, tuple[int, ...]]]:
    """Return mode and rows of each replica in calls after the first steps."""
    return {(c.mode, tuple(r.inputs[0].shape[0] for r in c.replicas if r.inputs)) for c in run.calls()[WARM_UP:]}


@pytest.mark.parametrize("replicas", [2, 4])
def test_virtual_replicas_on_one_device(tmp_path: Path, device: str, replicas: int) -> None:
    devices = ",".join([device] * replicas)
    run = run_traced(tmp_path, TRAINING, device, 50, "bare", "losses", mode="dp", devices=devices)
    assert run.status == 0, run.err
    assert shares(run) == {("dp", (256 // replicas,) * replicas)}
    call = run.calls()[-1]
    assert call.virtual
    assert set(call.phases) == {"scatter", "replicate", "parallel_apply", "gather"}
    if device.startswith("cuda"):
        assert call.absent == {}
        assert all(phase.device_ms is not None for phase in call.phases.values())
        assert all(replica.device_ms is not None for replica in call.replicas)
    alone = TracedScript(tmp_path, TRAINING, device, 50, "bare", "losses", run=False).end().printed
    assert run.printed == pytest.approx(alone, rel=1e-2)


def test_cpu_and_gpu_stages(tmp_path: Path, gpu: str) -> None:
    text = (PROCESS / "traced" / "spread.py").read_text().replace('"meta"', '"cuda:0"')
    run = run_traced(tmp_path, text, mode="script")
    first = run.calls("Toy")[0]
    assert [(stage.device, stage.parts) for stage in first.stages] == [("cpu", ("net1", "relu")), ("cuda:0", ("net2",))]
    assert first.stages[1].crossed_bytes == 6 * 10 * 4
    timed = [call for call in run.calls("Toy") if call.stages[1].device_ms is not None]
    assert timed
    assert timed[0].stages[0].device_ms is None
    assert timed[0].absent["device_ms"].startswith("the device is the CPU")


def test_dataparallel_over_all_gpus(tmp_path: Path, gpu: str) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    run = run_traced(tmp_path, TRAINING, gpu, 50, "dataparallel", "losses")
    assert run.status == 0, run.err
    call = run.calls()[-1]
    assert not call.virtual
    assert call.absent == {}
    assert call.devices == tuple(f"cuda:{i}" for i in range(count))
    assert sum(replica.inputs[0].shape[0] for replica in call.replicas if replica.inputs) == 256
    assert json.loads(json.dumps(run.printed))[-1] < run.printed[0]
