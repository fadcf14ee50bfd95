"""All failures of NVML, in the real supervisor with the real pynvml, over a fake library.

One fake machine has a GPU for each failure. It is watched in three stages (working, failing, recovered), and each test
checks its own GPU. Each case in which NVML does not start is a separate run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpmon.gpu.device_record import OPTIONAL_FIELDS
from dpmon.gpu.device_sampler import pids_are_shared
from dpmon.gpu.gpu_state import FIRST_ROUND_S
from support.fake_devices import FOREVER, FakeNvml, RunSamples, compile_fake_library
from support.run_harness import Dpmon, wait_for, wait_until_unsupervised

pytestmark = pytest.mark.slow

MIB, GIB = 1 << 20, 1 << 30
WAITING = "import os, time\nwhile not os.path.exists('stop'):\n    time.sleep(0.05)\n"

WELL, NO_POWER, LOST, HUNG, HUNG_LIST, UNIFIED, WSL, MIG, SLOW, SICK, FORBIDDEN, AMPERE = range(12)
GPUS = 12
CHEAP = ("util_pct", "mem_used_bytes", "mem_total_bytes", "power_w", "sm_clock_mhz")

NOT_ON_WSL = (
    "nvmlDeviceGetComputeRunningProcesses_v*",
    "nvmlDeviceGetGraphicsRunningProcesses_v*",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetTotalE*",  # energy, ECC
    "nvmlDeviceGetRetiredPages",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetFanSpeed*",
    "nvmlDeviceGetPersistenceMode",
)


def at_work(pid: int) -> list[str]:
    """Return the instructions for GPUs in the first stage, in which only lasting failures occur."""
    return [
        f"gpus {GPUS}",
        f"set {WELL} compute {pid}:{3 * GIB},1:{5 * GIB}",
        f"set {WELL} graphics {pid}:{2 * GIB}",
        f"set {WELL} throttle {0x4 | 0x40 | 0x1}",
        *(
            f"set {WELL} gpm{n} {value}"
            for n, value in ((2, 71.25), (5, 33.5), (10, 55), (20, 1), (21, 2), (60, 3), (61, 4))
        ),
        f"set {WELL} mig 0",
        f"set {WELL} nvlinks 4",
        f"rule nvmlDeviceGetPowerUsage {NO_POWER} 3",
        f"rule nvmlDeviceGetComputeRunningProcesses_v3 {HUNG_LIST} 0 {FOREVER}",
        f"rule nvmlDeviceGetMemoryInfo* {UNIFIED} 3",
        *(f"rule {name} {WSL} 3" for name in NOT_ON_WSL),
        f"set {MIG} mig 2",
        f"rule nvmlDeviceGetUtilizationRates {MIG} 3",
        f"rule nvmlDevice* {SLOW} 0 0.4",
        f"rule nvmlDeviceGetHandleByIndex_v2 {SLOW} 0 0",
        *(f"rule {name} {SICK} 999" for name in ("nvmlDevice*", "nvmlGpm*", "nvmlEvent*")),
        f"rule nvmlDeviceGetHandleByIndex_v2 {SICK} 0",
        f"rule nvmlDeviceGetComputeRunningProcesses_v3 {FORBIDDEN} 4",
        f"rule nvmlDeviceGetTotalEccErrors {FORBIDDEN} 4",
        f"set {AMPERE} gpm 0",
        f"set {AMPERE} nvlink_kib_s 1000",
        f"rule nvmlDeviceGetTemperatureThreshold {AMPERE} 3",
    ]


@dataclass
class Stage:
    """The samples at the end of a stage, by GPU, and the times of samples in it."""

    devices: dict[int, dict[str, Any]]
    times: dict[int, list[float]]
    hosts: list[float]
    began: float
    ended: float


@dataclass
class Story:
    """The results of one run of the machine."""

    fake: FakeNvml
    pid: int
    first: dict[str, Any] = field(default_factory=dict)
    """The first sample of the GPU that is well."""
    stages: dict[str, Stage] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    status: int | None = None
    log: str = ""


def known(ring: RunSamples, index: int, *names: str) -> bool:
    """Return whether the newest sample of a GPU has values or reasons for all these fields."""
    device = ring.device(index)
    absent = device.get("absent", {})
    passing = ("not asked yet", "needs two readings")
    return bool(device) and not any(absent.get(name) in passing for name in names or OPTIONAL_FIELDS)


def silent(device: dict[str, Any], *names: str) -> bool:
    """Return whether these fields are unknown because NVML does not answer."""
    return all(device[name] is None and SILENT.fullmatch(device["absent"][name]) for name in names)


def stage(ring: RunSamples, began: float) -> Stage:
    samples = [one for one in ring.of_kind("device") if one["t_s"] >= began]
    times = {index: [one["t_s"] for one in samples if one["index"] == index] for index in range(GPUS)}
    hosts = [one["t_s"] for one in ring.of_kind("host") if one["t_s"] >= began]
    return Stage({i: ring.device(i) for i in range(GPUS)}, times, hosts, began, max(hosts, default=began))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The run of the machine through all stages."""
    base = tmp_path_factory.mktemp("machine")
    dpmon = Dpmon(base / "state", base)
    fake = FakeNvml(base, compile_fake_library(base))
    fake.tell(f"gpus {GPUS}", *at_work(0))
    dpmon.script(WAITING)
    process = dpmon.start("--headless", "script.py", env=fake.environment())
    try:
        told = Story(fake, dpmon.info()["command_pid"])
        fake.tell(*at_work(told.pid))
        ring = RunSamples.of(dpmon.last)
        ring.until(lambda: all(known(ring, i) for i in (WELL, UNIFIED, AMPERE)), "all fields of the GPUs that are well")
        ring.until(
            lambda: ring.device(AMPERE)["pcie_tx_bytes_s"] and ring.device(AMPERE)["nvlink_tx_bytes_s"], "traffic"
        )
        ring.until(lambda: known(ring, SLOW, "temperature_c", "util_pct"), "the slow one")
        ring.until(lambda: ring.device(WELL).get("mem_run_bytes") or not pids_are_shared(), "this run's memory")
        ring.until(lambda: len(ring.device(MIG).get("mig_devices") or ()) == 2, "the instances")
        ring.until(lambda: ring.device(MIG)["mig_devices"][1]["mem_used_bytes"], "their memory")
        ring.until(lambda: ring.device(WELL)["visible"] is None, "a sample that knows of the instances")
        told.first = next(one for one in ring.of_kind("device") if one["index"] == WELL)
        told.stages["at work"] = stage(ring, 0.0)
        began = told.stages["at work"].ended

        fake.tell(
            *at_work(told.pid),
            f"rule * {LOST} 15",
            f"rule nvmlDevice* {HUNG} 0 {FOREVER}",
        )
        ring.until(lambda: ring.device(LOST)["absent"].get("util_pct") == "the GPU is lost", "the loss")
        ring.until(lambda: silent(ring.device(HUNG), *CHEAP), "the silence")
        ring.until(lambda: silent(ring.device(HUNG_LIST), *CHEAP), "the silence of one query")
        told.stages["in trouble"] = stage(ring, began)
        began = told.stages["in trouble"].ended

        fake.tell(
            *(line for line in at_work(told.pid) if not line.startswith("rule")),
            f"rule nvmlDeviceGetComputeRunningProcesses_v3 {HUNG_LIST} 0 {FOREVER}",
        )
        for index in (LOST, HUNG, SICK):
            ring.until(lambda index=index: ring.device(index).get("util_pct") == 40 + index, f"GPU {index} well again")
        told.stages["well again"] = stage(ring, began)
        ring.until(lambda: f"NVML answers again for GPU {HUNG}" in ring.warnings(), "the warning of its return")

        (base / "stop").touch()
        told.status = process.wait(60)
        told.warnings = ring.warnings()
        wait_until_unsupervised(dpmon.info())
        log = dpmon.last() / "supervisor.log"
        told.log = log.read_text() if log.exists() else ""
        yield told
    finally:
        (base / "stop").touch()
        dpmon.clean_up()


SILENT = re.compile(r"NVML has not answered for \d+ s")


def test_a_healthy_gpu_has_all_fields(story: Story) -> None:
    device = story.stages["at work"].devices[WELL]
    expected = {
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "name": "NVIDIA H100 Fake",
        "util_pct": 40,
        "mem_used_bytes": 10 * GIB,
        "mem_total_bytes": 80 * GIB,
        "mem_reserved_bytes": 512 * MIB,
        "temperature_c": 60,
        "temperature_limit_c": 87,
        "power_w": 250.5,
        "power_limit_w": 700.0,
        "energy_j": 123456.789,
        "sm_clock_mhz": 1980,
        "mem_clock_mhz": 2619,
        "throttle": ["power limit", "temperature (hardware)"],
        "fan_pct": 30,
        "pcie_tx_bytes_s": MIB,
        "pcie_rx_bytes_s": 2 * MIB,
        "nvlink_rx_bytes_s": 3 * MIB,
        "nvlink_tx_bytes_s": 4 * MIB,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_slow_readings": 0,
        "nvlinks_down": 0,
        "nvlink_errors": 0,
        "ecc_corrected": 3,
        "ecc_uncorrected": 0,
        "retired_pages": 1,
        "remapped_rows": 3,
        "mig": False,
        "mig_devices": [],
        "persistence": True,
        "sm_active_pct": 71.2,
        "tensor_active_pct": 33.5,
        "dram_active_pct": 55.0,
    }
    assert {name: device[name] for name in expected} == expected
    assert device["visible"] is None  # one of the machine's GPUs is divided: an index may mean one of its instances
    never = {"xid": "no XID error since the run's start"}
    absent = {k: v for k, v in device["absent"].items() if k not in ("ordinals", "mem_torch_bytes", "visible")}
    if pids_are_shared():
        assert absent == never
        assert device["of_run"] is True
        # In both lists: it holds the larger amount, once.
        assert (device["mem_run_bytes"], device["mem_others_bytes"]) == (3 * GIB, 5 * GIB)
        assert device["processes"] == [
            {"pid": story.pid, "mem_bytes": 3 * GIB, "of_run": True},
            {"pid": 1, "mem_bytes": 5 * GIB, "of_run": False},
        ]
    else:
        assert device["of_run"] is None
        assert "container" in absent["mem_run_bytes"]
    assert device["process_count"] == 2


FIRST = (
    "uuid", "name", "util_pct", "mem_used_bytes", "mem_total_bytes", "mem_reserved_bytes", "power_w", "power_limit_w",
    "sm_clock_mhz", "mem_clock_mhz", "throttle", "temperature_c", "temperature_limit_c", "energy_j", "fan_pct",
    "process_count", "ecc_corrected", "retired_pages", "persistence",
)  # fmt: skip
"""Fields that are cheap to ask."""


def test_the_first_sample_has_every_cheap_figure(story: Story) -> None:
    began = story.fake.asked(device=WELL)[0].began_s
    last = story.fake.asked("nvmlDeviceGetPersistenceMode", WELL)[0].began_s
    if last - began < FIRST_ROUND_S:  # else the machine was too slow
        assert {name for name in FIRST if story.first[name] is None} == set()


def test_an_unsupported_field_is_asked_once_and_other_fields_stay(story: Story) -> None:
    device = story.stages["at work"].devices[NO_POWER]
    assert device["power_w"] is None
    assert device["absent"]["power_w"] == "not supported"
    assert (device["util_pct"], device["power_limit_w"], device["sm_clock_mhz"]) == (41, 700.0, 1980)
    assert len(story.fake.asked("nvmlDeviceGetPowerUsage", NO_POWER)) == 1
    assert len(story.fake.asked("nvmlDeviceGetPowerUsage", WELL)) > 5


def test_at_most_eight_calls_a_gpu_a_second(story: Story) -> None:
    began = {call.device: call.began_s for call in reversed(story.fake.asked()) if call.device >= 0}
    for index in (WELL, UNIFIED, AMPERE):
        times = [call.began_s - began[index] for call in story.fake.asked(device=index)]
        # A round may begin a little early, so that two seconds hold the calls of three.
        for second in range(1, int(max(times)) - 2):  # in the first second, everything cheap is asked
            assert sum(second <= at < second + 2 for at in times) <= 3 * 8, (index, second)
        assert len(times) <= 8 * (max(times) + 2)


def test_a_lost_gpu_has_the_reason_in_every_field_and_recovers(story: Story) -> None:
    lost = story.stages["in trouble"].devices[LOST]
    assert (lost["uuid"], lost["name"]) == ("GPU-00000000-0000-0000-0000-000000000002", "NVIDIA H100 Fake")
    values = [
        name for name in OPTIONAL_FIELDS if name not in ("uuid", "name", "visible", "ordinals", "mem_torch_bytes")
    ]
    assert {name: lost[name] for name in values} == dict.fromkeys(values)
    assert {lost["absent"][name] for name in values} == {"the GPU is lost"}
    assert story.stages["well again"].devices[LOST]["util_pct"] == 42
    assert f"GPU {LOST}: the GPU is lost" in story.warnings
    assert f"GPU {LOST} is back" in story.warnings


def test_a_hanging_gpu_shows_for_how_long_and_delays_no_other(story: Story) -> None:
    trouble = story.stages["in trouble"]
    hung = trouble.devices[HUNG]
    assert silent(hung, *CHEAP)
    assert (hung["uuid"], hung["name"]) == ("GPU-00000000-0000-0000-0000-000000000003", "NVIDIA H100 Fake")
    assert f"NVML does not answer for GPU {HUNG}" in story.warnings
    assert f"NVML answers again for GPU {HUNG}" in story.warnings
    # Samples of all other GPUs and the host continued.
    seconds = trouble.ended - trouble.began
    for index in (WELL, NO_POWER, HUNG_LIST, UNIFIED, MIG, AMPERE):
        assert len(trouble.times[index]) >= seconds / 3, index
    assert len(trouble.hosts) >= seconds / 3
    assert story.stages["well again"].devices[HUNG]["util_pct"] == 43


def test_a_query_that_hangs_to_the_end_makes_the_values_of_its_gpu_absent(story: Story) -> None:
    for name in ("in trouble", "well again"):
        device = story.stages[name].devices[HUNG_LIST]
        assert silent(device, *CHEAP, "mem_run_bytes"), name
        assert device["name"] == "NVIDIA H100 Fake"


ABSENT = {
    UNIFIED: ("not supported", ("mem_used_bytes", "mem_total_bytes", "mem_reserved_bytes")),
    WSL: ("not supported", ("of_run", "mem_run_bytes", "processes", "power_limit_w", "ecc_corrected", "fan_pct")),
    SICK: ("NVML: unknown error", ("uuid", "name", "util_pct", "of_run")),
    FORBIDDEN: ("no permission", ("of_run", "mem_run_bytes", "processes", "ecc_corrected", "ecc_uncorrected")),
}
"""Unified memory, WSL, a GPU that only fails, and one whose processes and errors are forbidden."""


@pytest.mark.parametrize("index", ABSENT)
def test_what_fails_is_absent_with_the_reason_and_the_rest_is_there(story: Story, index: int) -> None:
    device = story.stages["at work"].devices[index]
    reason, names = ABSENT[index]
    assert {name: device[name] for name in names} == dict.fromkeys(names)
    assert {reason} <= {device["absent"][name] for name in names} <= {reason, "not asked yet"}
    assert (device["util_pct"], device["sm_clock_mhz"]) == ((None, None) if index == SICK else (40 + index, 1980))


def test_mig_shows_the_instances(story: Story) -> None:
    device = story.stages["at work"].devices[MIG]
    assert device["mig"] is True
    assert device["util_pct"] is None
    assert device["absent"]["util_pct"] == "not supported"
    assert [one["uuid"] for one in device["mig_devices"]] == [
        "MIG-00000000-0000-0000-0000-000000000007",
        "MIG-00000000-0000-0000-0001-000000000007",
    ]
    assert device["mig_devices"][1]["mem_used_bytes"] == GIB
    assert device["mig_devices"][1]["mem_total_bytes"] == 10 * GIB


def test_a_slow_gpu_is_shown_and_slows_nobody(story: Story) -> None:
    stage = story.stages["at work"]
    assert stage.devices[SLOW]["util_pct"] == 48
    assert len(stage.times[WELL]) >= (stage.ended - min(stage.times[WELL])) / 3


def test_before_hopper_traffic_comes_from_the_counters(story: Story) -> None:
    device = story.stages["at work"].devices[AMPERE]
    assert device["absent"]["sm_active_pct"] == "not supported"
    assert (device["pcie_rx_bytes_s"], device["pcie_tx_bytes_s"]) == (2_000_000, 1_000_000)
    # 1000 and 2000 KiB a second, as the counters grew between two readings.
    assert device["nvlink_tx_bytes_s"] == pytest.approx(1000 * 1024, rel=0.2)
    assert device["nvlink_rx_bytes_s"] == pytest.approx(2000 * 1024, rel=0.2)
    assert device["temperature_limit_c"] == 60 + AMPERE + 25  # by the distance to it
    assert len(story.fake.asked("nvmlDeviceGetPcieThroughput", WELL)) == 0  # it takes 20 ms, and GPM also has it


def test_one_warning_a_cause_a_minute(story: Story) -> None:
    assert len(story.warnings) == len(set(story.warnings)), story.warnings
    assert len(story.warnings) < 12, story.warnings


def test_no_call_is_made_that_could_crash_a_driver(story: Story) -> None:
    """No null handle, no shutdown and no exit() during the call that hangs to the end."""
    assert story.status == 0
    assert story.fake.fatal() == []
    assert story.fake.asked("nvmlShutdown") == []
    assert "Traceback" not in story.log, story.log


# ---------------------------------------------------------------------------------------- NVML does not start


NOT_STARTED = {
    "rule nvmlInitWithFlags - 9": "the NVIDIA driver is installed but not loaded",
    "rule nvmlInitWithFlags - 18": "differ in version: a reboot is due after an update",
    "rule nvmlInitWithFlags - 4": "no permission to talk to the NVIDIA driver",
    "gpus 0": "the NVIDIA driver is loaded but sees no GPU",
    "no library": "libnvidia-ml.so.1 was not found",
    f"rule nvmlInitWithFlags - 0 {FOREVER}": "NVML has not answered yet",
}


def host_says(ring: RunSamples, awaited: str) -> None:
    ring.until(lambda: any(re.search(awaited, str(one["gpu_absent"])) for one in ring.of_kind("host")), awaited)
    assert ring.of_kind("device") == []


def test_why_nvml_does_not_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run for each case, all in parallel, because they mostly wait."""
    libraries = compile_fake_library(tmp_path_factory.mktemp("made"))
    runs: list[tuple[Dpmon, FakeNvml, subprocess.Popen[bytes], str]] = []
    try:
        for rule, awaited in NOT_STARTED.items():
            place = tmp_path_factory.mktemp("absent")
            dpmon, fake = Dpmon(place / "state", place), FakeNvml(place, libraries)
            if rule == "no library":  # found before any real one, and it does not load
                (place / "libnvidia-ml.so.1").write_text("no library")
                fake.libraries = place
            fake.tell(rule)
            dpmon.script(WAITING)
            runs.append((dpmon, fake, dpmon.start("--headless", "script.py", env=fake.environment()), awaited))
        for dpmon, fake, process, awaited in runs:
            dpmon.info()
            host_says(RunSamples.of(dpmon.last), awaited)
            (dpmon.cwd / "stop").touch()
            assert process.wait(60) == 0
            assert fake.fatal() == []
    finally:
        for dpmon, *_ in runs:
            dpmon.clean_up()


def test_a_driver_that_hangs_the_command_line_does_not_change_the_scripts_status(dpmon: Dpmon, tmp_path: Path) -> None:
    """--devices counts the GPUs before the run; the call still hangs when the process of the screen ends."""
    fake = FakeNvml(tmp_path, compile_fake_library(tmp_path))
    fake.tell(f"rule nvmlInitWithFlags - 0 {FOREVER}")
    script = dpmon.script("print('done')\nraise SystemExit(3)\n")
    result = dpmon.run("--headless", "--devices", "cuda:0,cuda:0", script, env=fake.environment())
    assert (result.status, result.out) == (3, b"done\n")
    assert fake.fatal() == []


OLD = (
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlGpmQueryDeviceSupport",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetMarginTemperature",
)


def test_an_old_driver_without_symbols(dpmon: Dpmon, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, compile_fake_library(tmp_path, OLD))
    fake.tell("gpus 1", "set 0 throttle 32")
    dpmon.script(WAITING)
    process = dpmon.start("--headless", "script.py", env=fake.environment())
    dpmon.info()
    ring = RunSamples.of(dpmon.last)
    ring.until(
        lambda: known(ring, 0, "processes", "mem_used_bytes", "throttle", "mig", "pcie_rx_bytes_s"), "the fields"
    )
    ring.until(lambda: ring.device(0)["pcie_tx_bytes_s"] and ring.device(0)["pcie_rx_bytes_s"], "traffic")
    device = ring.device(0)
    (dpmon.cwd / "stop").touch()
    assert process.wait(60) == 0
    assert device["mem_used_bytes"] == 10 * GIB + 512 * MIB
    assert device["absent"]["mem_reserved_bytes"] == "this driver counts it as used"
    assert device["throttle"] == ["temperature"]
    assert (device["pcie_rx_bytes_s"], device["pcie_tx_bytes_s"]) == (2_000_000, 1_000_000)
    old = "this driver does not offer it"
    assert {device["absent"][name] for name in ("sm_active_pct", "mig", "mig_devices")} == {old}
    if pids_are_shared():
        assert (device["of_run"], device["mem_run_bytes"], device["process_count"]) == (False, 0, 0)
    wait_for(lambda: len(fake.asked("nvmlShutdown")) == 1, what="the supervisor's end")
    assert fake.fatal() == []
