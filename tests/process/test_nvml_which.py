"""NVML's GPUs are matched with torch's by UUID, which the training process gets from torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.gpu.device_sampler import pids_are_shared
from support.fake_devices import FakeNvml, RunSamples, compile_fake_library
from support.run_harness import Dpmon

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "as_if_on_gpus.py"
GIB = 1 << 30


def test_gpus_are_matched_by_uuid_and_never_by_index(dpmon: Dpmon, tmp_path: Path) -> None:
    """CUDA's order is the reverse of NVML's. The script chose CUDA's 2 and 0 late, which are NVML's 1 and 3."""
    fake = FakeNvml(tmp_path, compile_fake_library(tmp_path))
    fake.tell("gpus 4", *(f"set {i} uuid GPU-00000000-0000-0000-0000-00000000000{i}" for i in range(4)))
    process = dpmon.start("--headless", SCRIPT, env={**fake.environment(), "CUDA_VISIBLE_DEVICES": "0"})
    ring = RunSamples.of(dpmon.last)
    wanted = {0: [], 1: [{"process": 0, "device": "cuda:0"}], 2: [], 3: [{"process": 0, "device": "cuda:1"}]}
    ring.until(lambda: {i: ring.device(i).get("ordinals") for i in range(4)} == wanted, "what torch says")
    ring.until(lambda: all(ring.device(i)["process_count"] == 0 for i in range(4)) or not pids_are_shared(), "lists")
    devices = [ring.device(i) for i in range(4)]
    (dpmon.cwd / "stop").touch()
    assert process.wait(60) == 0
    assert [device["mem_torch_bytes"] for device in devices] == [0, 3 * GIB, 0, 5 * GIB]
    otherwise = False if pids_are_shared() else None
    assert [device["of_run"] for device in devices] == [otherwise, True, otherwise, True]
    # The environment of the command does not say which GPU is CUDA's 0.
    assert [device["visible"] for device in devices] == [None] * 4


def test_figures_of_the_allocator_and_an_oom_with_the_memory_before_it(dpmon: Dpmon) -> None:
    (dpmon.cwd / "stop").touch()
    script = dpmon.script(SCRIPT.read_text().replace('while not os.path.exists("stop"):', "while steps < 40:"))
    assert dpmon.run("--headless", script).status == 0
    records = dpmon.records()
    (one,) = [one for one in next(r for r in records if r["kind"] == "memory")["devices"] if one["device"] == "cuda:1"]
    assert one["uuid"] == "00000000-0000-0000-0000-000000000003"
    assert (one["allocated_bytes"], one["reserved_bytes"], one["peak_bytes"]) == (GIB, 5 * GIB, 2 * GIB)
    assert (one["inactive_split_bytes"], one["alloc_retries"], one["ooms"]) == (1 << 20, 4, 1)
    ooms = [record for record in records if record["kind"] == "oom"]
    assert len(ooms) == 16  # bounded, because a script may try ever smaller batches
    expected = {"device": "cuda:1", "asked_bytes": 2 * GIB, "total_bytes": 80 * GIB, "free_bytes": GIB,
                "allocated_bytes": GIB, "reserved_bytes": 5 * GIB, "inactive_split_bytes": 1 << 20}  # fmt: skip
    assert {name: ooms[0][name] for name in expected} == expected
    text = next(r["text"] for r in records if r["kind"] == "warning")
    assert text == (
        "cuda:1 is out of memory: 2.00 GiB were requested, 1.00 of 80.00 GiB are free;"
        " torch holds 5.00 GiB, tensors use 1.00 GiB of that"
    )


def test_which_gpus_the_command_may_see(dpmon: Dpmon, tmp_path: Path) -> None:
    """By the order of the bus; an unknown order is looked at above."""
    fake = FakeNvml(tmp_path, compile_fake_library(tmp_path))
    fake.tell("gpus 3")
    dpmon.script("import os, time\nwhile not os.path.exists('stop'):\n    time.sleep(0.05)\n")
    chosen = {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    process = dpmon.start("--headless", "script.py", env={**fake.environment(), **chosen})
    ring = RunSamples.of(dpmon.last)
    ring.until(lambda: all(ring.device(i).get("uuid") for i in range(3)), "the GPUs")
    seen = [True, False, True]
    ring.until(lambda: [ring.device(i)["visible"] for i in range(3)] == seen, "what the command may see")
    (dpmon.cwd / "stop").touch()
    assert process.wait(60) == 0
