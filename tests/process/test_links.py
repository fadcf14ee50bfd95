"""PCIe links and NVLinks of GPUs, as a fake NVML library reports them, and the findings about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_types import Event
from support.fake_devices import FakeNvml, compile_fake_library
from support.history_builders import read_report, write_run_directory
from support.record_builders import Training, device_event

FULL, IDLE, SLOW, ZERO, ABOVE, NONE, ALONE, DOWN, FAULTY = range(9)
LINKS = {
    FULL: ["util 97"],
    IDLE: ["util 19", "pcie_gen 1"],
    SLOW: ["util 97", "pcie_gen 1", "pcie_gen_max 4", "pcie_width 4"],
    ZERO: ["util 97", "pcie_gen 0"],
    ABOVE: ["util 97", "pcie_gen 1", "pcie_width 32"],
    NONE: ["util 97"],
    ALONE: ["util 97", "nvlinks 4", "nvlinks_up 0"],  # without a bridge, all links are down
    DOWN: ["util 97", "nvlinks 4", "nvlinks_up 3"],
    FAULTY: ["util 97", "nvlinks 4", "nvlink_replays 1000"],
}
ROUNDS = """
import json, os, sys
from dpmon.gpu.device_record import RunContext
from dpmon.gpu.gpu_state import GpuState
from dpmon.gpu.nvml import Nvml
nvml, now, samples = Nvml(), [1000.0], []
assert nvml.open() is None
gpus = [GpuState(index, nvml, lambda: now[0]) for index in range(9)]
for second in range(260):
    now[0] += 1
    if second == 130:
        with open(os.environ["FAKE_NVML_CONTROL"], "a") as control:
            control.write("set 8 nvlink_replays 1010\\n")
    for gpu in gpus:
        gpu.poll()
        samples.append({"t_s": float(second), **gpu.sample(RunContext())})
json.dump(samples, sys.stdout)
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All samples of 260 s of simulated time."""
    directory = tmp_path_factory.mktemp("links")
    fake = FakeNvml(directory, compile_fake_library(directory))
    settings = [f"set {index} {setting}" for index, those in LINKS.items() for setting in those]
    fake.tell("gpus 9", *settings, f"rule nvmlDeviceGetMaxPcieLinkWidth {NONE} 3")
    env = {**os.environ, **fake.environment()}
    env.pop("FAKE_NVML_LOG")
    done = subprocess.run([sys.executable, "-c", ROUNDS], env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def last(samples: list[dict[str, Any]], index: int) -> dict[str, Any]:
    return [sample for sample in samples if sample["index"] == index][-1]


def test_a_link_has_its_generation_and_width_and_their_maximums(samples: list[dict[str, Any]]) -> None:
    names = "pcie_gen", "pcie_width", "pcie_gen_max", "pcie_width_max"
    links = {index: tuple(last(samples, index)[name] for name in names) for index in (FULL, IDLE, SLOW)}
    assert links == {FULL: (5, 16, 5, 16), IDLE: (1, 16, 5, 16), SLOW: (1, 4, 4, 16)}
    assert [last(samples, index)["pcie_slow_readings"] for index in (FULL, IDLE)] == [0, 0]
    assert last(samples, SLOW)["pcie_slow_readings"] in (4, 5), "once a minute"


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (ZERO, "NVML returned an implausible value"),
        (ABOVE, "NVML returned an implausible value"),
        (NONE, "not supported"),
    ],
)
def test_nonsense_and_what_is_not_supported_are_absent(samples: list[dict[str, Any]], index: int, reason: str) -> None:
    sample = last(samples, index)
    assert (sample["pcie_gen"], sample["pcie_slow_readings"]) == (None, None)
    assert sample["absent"]["pcie_gen"] == sample["absent"]["pcie_width_max"] == reason


def test_nvlinks_that_are_down_or_faulty_are_counted(samples: list[dict[str, Any]]) -> None:
    health = {index: (last(samples, index)["nvlinks_down"], last(samples, index)["nvlink_errors"]) for index in LINKS}
    assert {health[index] for index in (FULL, NONE)} == {(None, None)}
    assert last(samples, FULL)["absent"]["nvlinks_down"] == "not supported"
    assert (health[ALONE], health[DOWN], health[FAULTY]) == ((0, 0), (1, 0), (0, 40))


def test_only_links_with_a_problem_are_found(samples: list[dict[str, Any]], state: Path) -> None:
    own = [Event("device", {**sample, "of_run": True}) for sample in samples]
    directory = write_run_directory({0: Training().run(40), -1: own})
    texts = {finding.text: finding.advice for finding in read_report(directory).findings if finding.kind == "slow link"}
    assert sorted(texts) == [
        "GPU 2's PCIe link runs at gen 1 x4 of gen 4 x16 under load: copies take up to 32 times as long.",
        "GPU 7 has NVLinks down while others are up: GPUs exchange data more slowly.",
        "GPU 8's NVLinks repeat data or recover, which takes time.",
    ]


def test_one_slow_reading_or_one_on_anothers_gpu_is_not_found(samples: list[dict[str, Any]], state: Path) -> None:
    once = [sample for sample in samples if sample["index"] == SLOW and sample["t_s"] < 50]
    others = [{**sample, "index": 3} for sample in samples if sample["index"] == SLOW]
    own = [Event("device", {**sample, "of_run": sample["index"] == SLOW}) for sample in once + others]
    directory = write_run_directory({0: Training().run(40), -1: own})
    assert "slow link" not in {finding.kind for finding in read_report(directory).findings}


def test_each_link_has_its_own_evidence(state: Path) -> None:
    own = [device_event(1.0, index, nvlink_errors=errors) for index, errors in ((0, 11), (1, 22))]
    findings = read_report(write_run_directory({0: Training().run(40), -1: own})).findings
    evidence = [finding.ground for finding in findings if finding.kind == "slow link"]
    assert evidence == [f"{errors} replays and recoveries since the run's start" for errors in (11, 22)]
