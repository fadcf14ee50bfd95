"""The estimate of growth, over series of each kind that memory makes, and what a history says of it."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpmon.gpu.memory_limits import MemoryLimit, iter_cgroup_limits, iter_process_limits
from dpmon.model.findings.memory_findings import find_memory_growth
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.store.memory_growth import Growth, MemoryTrend, estimate_growth, read_memory_trends
from support.analysis_builders import GIB, GROWING_MEMORY, HEALTHY_RUN, MIB
from support.history_builders import Recording, with_changes
from support.record_builders import SECOND, Training, device_event, host_event

Series = Callable[[random.Random, int], list[float]]
"""Memory (MiB) of so many samples."""
RUNS, STEPS_PER_SAMPLE = 60, 20


def add_noise(chance: random.Random, values: list[float], deviation: float = 0.3) -> list[float]:
    return [value + chance.gauss(0, deviation) for value in values]


def steps_in_level(count: int) -> Series:
    def series(chance: random.Random, length: int) -> list[float]:
        times = [chance.uniform(0, length) for _ in range(count)]
        return add_noise(chance, [100 + 40.0 * sum(at < t for at in times) for t in range(length)])

    return series


def sawtooth(periods: float) -> Series:
    def series(chance: random.Random, length: int) -> list[float]:
        period, start = length / periods, chance.uniform(0, length)
        return add_noise(chance, [100 + (t + start) % period for t in range(length)])

    return series


def evaluations(every: int, lasting: int) -> Series:
    def series(chance: random.Random, length: int) -> list[float]:
        start = chance.randrange(every)
        return add_noise(chance, [100 + 50.0 * ((t + start) % every < lasting) for t in range(length)])

    return series


def random_walk(chance: random.Random, length: int) -> list[float]:
    values = [100.0]
    for _ in range(length - 1):
        values.append(values[-1] + chance.gauss(0, 1))
    return values


def filling_cache(chance: random.Random, length: int) -> list[float]:
    """A cache keyed by shape: each sample draws from a number of shapes that are all seen before the end."""
    seen: set[int] = set()
    values = []
    for _ in range(length):
        seen |= {chance.randrange(100) for _ in range(900 // length + 1)}
        values.append(100.0 + len(seen))
    return values


def levels_off(share: float) -> Series:
    return lambda chance, length: add_noise(chance, [100 + min(t, share * length) for t in range(length)])


def saturates(chance: random.Random, length: int) -> list[float]:
    return add_noise(chance, [100 + 100 * (1 - math.exp(-5 * t / length)) for t in range(length)])


HARMLESS: dict[str, Series] = {
    "noise": lambda chance, length: add_noise(chance, [100.0] * length, 5.0),
    "one step in level": steps_in_level(1),
    "two steps in level": steps_in_level(2),
    "a list that doubles": lambda _, length: [100.0 + 2 ** int(math.log2(t + 1)) for t in range(length)],
    "evaluations": evaluations(10, 3),
    "rare, long evaluations": evaluations(25, 8),
    "garbage collection, often": sawtooth(12),
    "garbage collection, seldom": sawtooth(2.5),
    "a cache by shape": filling_cache,
    "a warm-up that levels off": saturates,
    "batches that grow up to the middle": levels_off(0.5),
    "it shrinks": lambda chance, length: add_noise(chance, [500.0 - t for t in range(length)]),
}
LEAKS: dict[str, Series] = {
    "a straight line": lambda chance, length: add_noise(chance, [100.0 + t for t in range(length)]),
    "segments of an allocator": lambda _, length: [100.0 + t // 4 * 4 for t in range(length)],
    "with evaluations": lambda chance, length: [
        t + value for t, value in enumerate(evaluations(10, 3)(chance, length))
    ],
    "with garbage collection": lambda chance, length: [
        t + value for t, value in enumerate(sawtooth(20)(chance, length))
    ],
    "with a step in level": lambda chance, length: [
        t + value for t, value in enumerate(steps_in_level(1)(chance, length))
    ],
}


def growths_of(series: Series, length: int) -> Iterator[Growth]:
    """Yield the growth of the settled part, the last three quarters of the series, of many random ones."""
    for seed in range(RUNS):
        values = series(random.Random(seed), length)
        points = [(float(STEPS_PER_SAMPLE * t), value * MIB) for t, value in enumerate(values)][length // 4 :]
        growth = estimate_growth(points)
        assert growth is not None
        yield growth


def is_growing(growth: Growth) -> bool:
    return growth.lasts and growth.low_bytes > 0


@pytest.mark.parametrize("length", [16, 60, 600])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_leak_does_not_grow(name: str, length: int) -> None:
    assert not [growth for growth in growths_of(HARMLESS[name], length) if is_growing(growth)]


@pytest.mark.parametrize("length", [16, 60, 600])
def test_memory_that_moves_at_random_rarely_grows(length: int) -> None:
    assert sum(map(is_growing, growths_of(random_walk, length))) <= 0.05 * RUNS


@pytest.mark.parametrize("length", [60, 600])
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_grows_at_its_rate(name: str, length: int) -> None:
    growths = list(growths_of(LEAKS[name], length))
    rate = MIB / STEPS_PER_SAMPLE
    found = [growth for growth in growths if is_growing(growth)]
    assert len(found) >= (0.2 if length == 60 and "step" in name else 0.8) * RUNS
    assert all(growth.step_bytes == pytest.approx(rate, rel=0.25) for growth in found)
    assert sum(growth.low_bytes <= rate <= growth.high_bytes for growth in found) >= 0.8 * len(found)


def test_too_few_samples_or_steps_have_no_growth() -> None:
    line = [(10.0 * t, float(t)) for t in range(20)]
    assert estimate_growth([]) is None
    assert estimate_growth(line[:8]) is None
    assert estimate_growth([(step / 10, used) for step, used in line]) is None
    assert estimate_growth(line) is not None


# ------------------------------------------------------------------------------------------------ in a history


def train(
    seconds: int, step_ms: int = 100, rows: Callable[[int], int] = lambda second: 30
) -> tuple[Training, list[Row]]:
    """Return a training of some seconds. `rows`: the size of the batches in a second."""
    training = Training(step_ns=step_ms * 1_000_000)
    out = training.begin()
    while (second := training.now // SECOND - 2) < seconds:
        out += training.step(rows(second))
    return training, out


def host_samples(seconds: int, used: Callable[[int], float], **more: Any) -> list[Event]:
    limits = {"mem_limit": "cgroup", "mem_limit_bytes": 4 * GIB, "mem_room_bytes": 3 * GIB}
    return [host_event(2.0 + t, run_mem_bytes=int(used(t)), **{**limits, **more}) for t in range(seconds)]


def trends_of(training_rows: list[Row], samples: list[Event]) -> list[MemoryTrend]:
    return read_memory_trends(Recording().add(training_rows).add(samples).store())


def test_host_memory_that_grows_reaches_its_limit() -> None:
    training, rows = train(100)
    (trend,) = trends_of(rows, host_samples(100, lambda t: 200 * MIB + t * 20 * MIB))
    per_step = 20 * MIB * 100 / training.steps
    assert trend.device == "host"
    assert trend.growth.step_bytes == pytest.approx(per_step, rel=0.1)
    assert trend.matters
    assert (trend.limit, trend.limit_bytes, trend.used_bytes) == ("cgroup", 4 * GIB, 200 * MIB + 99 * 20 * MIB)
    assert trend.steps_left == pytest.approx(3 * GIB / per_step, rel=0.1)
    assert trend.seconds_left == pytest.approx(3 * GIB / (20 * MIB), rel=0.1)


def test_memory_that_the_end_of_the_run_frees_has_grown_before() -> None:
    _, rows = train(60)
    (trend,) = trends_of(rows, host_samples(90, lambda t: 200 * MIB + t * 20 * MIB if t < 65 else 0))
    assert trend.matters
    assert trend.used_bytes == pytest.approx(1400 * MIB, rel=0.03)


@pytest.mark.parametrize(
    ("per_second", "more"),
    [(0.1 * MIB, {}), (1 * MIB, {"mem_room_bytes": 1000 * GIB}), (20 * MIB, {"mem_room_bytes": None})],
)
def test_growth_that_is_small_or_far_from_its_limit_does_not_matter(per_second: float, more: dict[str, Any]) -> None:
    _, rows = train(100)
    (trend,) = trends_of(rows, host_samples(100, lambda t: 200 * MIB + t * per_second, **more))
    assert trend.is_growing
    assert not trend.matters


def test_memory_that_rises_with_the_batches_does_not_grow() -> None:
    _, rows = train(100, rows=lambda second: 30 + 10 * second)
    recording = Recording().add(host_samples(100, lambda t: 200 * MIB + t * 20 * MIB))
    for start in range(0, len(rows), 25):  # a transaction a second, as the supervisor makes them
        recording.add(rows[start : start + 25])
    assert read_memory_trends(recording.store()) == []


def test_a_long_run_is_judged_by_its_newest_hour() -> None:
    _, rows = train(3 * 3600, 20_000)
    (late,) = trends_of(rows, host_samples(3 * 3600, lambda t: GIB + max(t - 7400, 0) * MIB)[::10])
    assert late.matters
    assert late.growth.steps < 180


def test_the_tensors_of_a_gpu_grow_within_its_total_memory() -> None:
    _, rows = train(200)
    gpu: dict[str, Any] = {"device": "cuda:1", "reserved_bytes": 60 * GIB, "allocated_bytes": 0}
    for t in range(0, 200, 5):
        gpu = {**gpu, "allocated_bytes": 40 * GIB + t * 20 * MIB}
        rows.append(Event("memory", {"process": 0, "t_s": 2.0 + t, "devices": [gpu], "absent": {}}))
    used = {"mem_used_bytes": 65 * GIB, "mem_total_bytes": 80 * GIB, "mem_reserved_bytes": GIB}
    sample = device_event(199.0, 3, ordinals=[{"process": 0, "device": "cuda:1"}], **used)
    (trend,) = trends_of(rows, [sample])
    assert (trend.device, trend.process, trend.limit, trend.limit_bytes) == ("cuda:1", 0, "GPU", 80 * GIB)
    assert trend.room_bytes == 14 * GIB + 20 * GIB - 195 * 20 * MIB  # free on the GPU, and in the allocator's cache
    assert trend.is_growing
    (without_nvml,) = trends_of(rows, [])
    assert without_nvml.is_growing
    assert (without_nvml.limit, without_nvml.steps_left, without_nvml.matters) == (None, None, False)


def test_without_samples_or_steps_there_is_no_trend() -> None:
    _, rows = train(30)
    assert trends_of(rows, []) == []
    assert trends_of(rows, [host_event(2.0 + t, run_mem_bytes=None) for t in range(30)]) == []
    assert trends_of([], host_samples(30, lambda t: t * MIB)) == []


def test_the_finding_is_one_sentence() -> None:
    (finding,) = find_memory_growth(with_changes(HEALTHY_RUN, memory_trends=[GROWING_MEMORY], end_ns=None))
    assert finding.text == (
        "Memory of the run grows 2.20 MiB per step; the limit (23.5 GiB; cgroup) is reached in about 9,800 steps,"
        " 41 min."
    )
    gpu = GROWING_MEMORY._replace(device="cuda:1", process=3, room_bytes=GIB)
    run = with_changes(HEALTHY_RUN, memory_trends=[GROWING_MEMORY, gpu], names={3: "rank 3"})
    (finding,) = find_memory_growth(run)
    assert finding.text.startswith("Memory on cuda:1 of rank 3 grows")
    assert "would be reached in about 460 steps" in finding.text


# ------------------------------------------------------------------------------------------------ limits


def write_group(directory: Path, **contents: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (directory / name.replace("__", ".")).write_text(text)


def cgroup_limits(mount: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> list[MemoryLimit]:
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: line if str(path) == "/proc/7/cgroup" else read_text(path, "utf-8")
    )
    return list(iter_cgroup_limits(7, 16 * GIB, mount))


def test_limits_of_cgroups_and_of_those_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_group(tmp_path / "job", memory__max=f"{8 * GIB}\n", memory__current=f"{6 * GIB}\n")
    write_group(tmp_path / "job", memory__stat=f"anon 5\ninactive_file {GIB}\n")
    write_group(tmp_path / "job" / "step", memory__max="max\n", memory__current="1\n", memory__stat="")
    assert cgroup_limits(tmp_path, "0::/job/step\n", monkeypatch) == [MemoryLimit("cgroup", 8 * GIB, 3 * GIB)]


def test_limits_of_cgroups_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_limit = "9223372036854771712\n"
    write_group(tmp_path / "memory", memory__limit_in_bytes=no_limit, memory__usage_in_bytes="5", memory__stat="")
    write_group(tmp_path / "memory" / "a", memory__limit_in_bytes=f"{GIB}", memory__usage_in_bytes=f"{2 * GIB}")
    write_group(tmp_path / "memory" / "a", memory__stat="cache 1\ntotal_inactive_file 4096\n")
    lines = "8:pids:/x\n4:cpu,memory:/a/missing/here\n0::/\n"
    assert cgroup_limits(tmp_path, lines, monkeypatch) == [MemoryLimit("cgroup", GIB, 0)]


def test_no_cgroup_no_process_and_damaged_files_are_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_group(tmp_path, memory__max="many\n", memory__current="1\n")
    assert cgroup_limits(tmp_path, "0::/../../x\nnonsense\n", monkeypatch) == []
    assert list(iter_cgroup_limits(-1, GIB, tmp_path)) == []
    assert list(iter_process_limits(1 << 22, 1, 1)) == []


def test_rlimits_of_a_process() -> None:
    code = "import resource as r, time; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40)); print(flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        limits = list(iter_process_limits(process.pid, 1 << 30, 0))
        process.kill()
    assert limits == [MemoryLimit("RLIMIT_AS", 1 << 40, (1 << 40) - (1 << 30))]
