"""From dp to single and back, over one, two and four simulated GPUs, in a live training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_types import UNTIMED
from dpmon.record.shared_names import MODES, Untimed
from support.fake_devices import SimulatedCuda
from support.run_harness import wait_for
from support.tracer_harness import TracedScript, run_traced

pytestmark = pytest.mark.simulated

TEXT = (Path(__file__).parent / "scripts" / "toggled.py").read_text()
PHASES = {"scatter", "replicate", "parallel_apply", "gather"}
SHARES = {2: [15, 15], 4: [8, 8, 8, 6]}


@pytest.mark.parametrize(
    ("form", "count", "replicas", "asked"),
    [
        ("dp", 2, 2, {}),
        ("dp", 4, 4, {}),
        ("bare", 2, 2, {"mode": "dp"}),
        ("bare", 1, 4, {"replicas": 4}),
        ("dp", 2, 2, {"devices": "cuda:0,cuda:0"}),
    ],
    ids=["written over 2", "written over 4", "bare over 2", "4 virtual", "written, 2 virtual"],
)
def test_a_toggle_to_single_and_back_to_dp(
    tmp_path: Path, gpus: SimulatedCuda, form: str, count: int, replicas: int, asked: dict[str, Any]
) -> None:
    script = TracedScript(tmp_path, TEXT, form, env=gpus.environment(count, kernel_us=5), **asked)
    assert script.line() == "begun", script.end().err
    ring = script.ring()
    try:
        for name in ("single", "dp", "single", "dp"):
            wanted = ring.request(MODES.index(name)), MODES.index(name)
            wait_for(lambda wanted=wanted: ring.acknowledged() == wanted, what=f"{name} to be acted upon")
            more: list[bytes] = []
            wait_for(lambda more=more: more.extend(ring.read()) or len(more) >= 30, what="some steps more")
    finally:
        ring.close()
        (script.cwd / "stop").touch()
    run = script.end()
    assert run.complaints == []
    modes = [call.mode for call in run.calls()]
    assert [mode for i, mode in enumerate(modes) if i == 0 or mode != modes[i - 1]] == [
        *("dp", "single", "dp", "single", "dp")
    ]
    virtual = count < replicas or "devices" in asked
    for call in run.calls():
        assert set(call.phases) == PHASES if call.mode == "dp" else not set(call.phases) - {"scatter"}
        assert [one.inputs[0].shape[0] for one in call.replicas if one.inputs] == (
            SHARES[replicas] if call.mode == "dp" else [30]
        )
        assert call.virtual == (virtual and call.mode == "dp")
    chosen = [call for call in run.calls()[2:] if call.absent.get("device_ms") != UNTIMED[Untimed.SAMPLED]]
    timed = [call for call in chosen if call.absent == {}]
    assert len(timed) > 0.9 * len(chosen) - 8
    for call in timed:
        assert all(phase.device_ms is not None for phase in call.phases.values())
        assert all(replica.device_ms is not None for replica in call.replicas)
    # According to the replicas themselves.
    by_size = {len(sizes): (sizes, on, found) for sizes, on, found in run.printed}
    assert set(by_size) == {1, replicas}
    sizes, on, found = by_size[replicas]
    assert sizes == SHARES[replicas]
    assert on == ([0] * replicas if virtual else list(range(replicas)))
    assert found["apart"]
    assert found["shared"]
    assert found["others"]
    assert sum(one["calls"] for _, _, one in by_size.values()) == len(run.calls())
    # Neither the training nor the changes of mode waited for a device.
    truth = gpus.truth()
    (first,), (last,) = ([host for name, host in truth.marks() if name == label] for label in ("settled", "over"))
    assert [op for op in truth.of("wait") if first < op.host < last] == []


REFUSED = """
import sys
import torch


class Net(torch.nn.Linear):
    def forward(self, x):
        seen.add((len(x), x.device.index))
        return super().forward(x)


seen = set()
net = Net(4, 2).cuda()
if sys.argv[1] == "dp":
    net = torch.nn.DataParallel(net)
for _ in range(3):
    net(torch.ones(8, 4, device="cuda")).sum().backward()
print(sorted(seen))
"""


@pytest.mark.parametrize("form", ["bare", "dp"])
@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ("cuda:1,cuda:1", "--devices names cuda:1, but the module is on cuda:0"),
        ("cuda:0,cuda:2", "this process has no cuda:2: it has 2 GPUs"),
        ("cuda:1,cuda:0", "the module is on cuda:0, but the first device is cuda:1"),
        ("cuda:0,cpu", "virtual replicas share one device, but --devices names several"),
        ("cpu,cpu", "--devices names cpu, but the module is on cuda:0"),
    ],
)
def test_devices_that_are_not_available(
    tmp_path: Path, gpus: SimulatedCuda, devices: str, reason: str, form: str
) -> None:
    """It then runs on one device, but its mode is not single while it runs on its original devices."""
    run = run_traced(tmp_path, REFUSED, form, env=gpus.environment(2), devices=devices)
    assert run.out.splitlines()[-1:] == ["[(8, 0)]"], run.err
    assert {(call.mode, call.devices) for call in run.calls()} == {("single", ("cuda:0",))}
    assert run.complaints == [f"dp was requested, but Net runs on one device: {reason}"]
