"""dp and single: bit for bit as written, toggled during the run, or refused with a reason."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.baseline_comparison import closest_baseline
from support.tracer_harness import DP, SINGLE, SteeredScript, TracedRun, TracedScript, run_traced, traced_script_text

# ------------------------------------------------------------------------------------------------ as written


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedRun]:
    """The script without dpmon, with --mode script, by default, and with one replica, in parallel."""
    place = tmp_path_factory.mktemp("exact")
    scripts = {
        "alone": TracedScript(place, traced_script_text("exact"), run=False),
        "script": TracedScript(place, traced_script_text("exact"), mode="script"),
        "default": TracedScript(place, traced_script_text("exact")),
        "one replica": TracedScript(place, traced_script_text("exact"), replicas=1),
    }
    return {name: script.end() for name, script in scripts.items()}


@pytest.mark.parametrize("name", ["script", "one replica"])
def test_results_are_bit_for_bit_the_same(exact: dict[str, TracedRun], tmp_path: Path, name: str) -> None:
    """With --mode script, and with one replica, which is the module itself."""
    found = exact[name].printed
    again = partial(TracedScript, tmp_path, traced_script_text("exact"), run=False)
    assert found == closest_baseline(found, exact["alone"].printed, lambda: again().end().printed)
    losses, _, _ = exact["alone"].printed["wrapped"]
    assert len(losses) == 110
    assert len(set(losses)) > 100


def test_mode_script_splits_nothing(exact: dict[str, TracedRun]) -> None:
    assert {call.mode for call in exact["script"].calls()} == {"single"}
    assert not any(call.virtual or call.phases for call in exact["script"].calls())


def test_a_script_without_dataparallel_is_never_changed(exact: dict[str, TracedRun], tmp_path: Path) -> None:
    found = exact["default"].printed["bare"]
    again = partial(TracedScript, tmp_path, traced_script_text("exact"), run=False)
    assert found == closest_baseline(found, exact["alone"].printed["bare"], lambda: again().end().printed["bare"])
    assert exact["default"].printed["wrapped"] != exact["alone"].printed["wrapped"]  # other dropout, other statistics


@pytest.mark.parametrize("name", ["script", "default"])
def test_every_batch_is_recorded(exact: dict[str, TracedRun], name: str) -> None:
    run = exact[name]
    assert (run.complaints, run.missed) == ([], 0)
    # After ten steps each, the script evaluates once: such a call is no step of a loop.
    numbers = [number - number // 11 if number % 11 else None for number in range(1, 221)]
    assert [step.step for step in run.steps()] == [number or 0 for number in numbers]
    assert {step.samples for step in run.steps()} == {16}
    assert [call.step for call in run.calls()] == numbers
    assert [call.via for call in run.calls()] == [None] * 110 + ["DataParallel"] * 110
    assert {call.mode for call in run.calls()[:110]} == {"single"}
    assert {call.mode for call in run.calls()[110:]} == {"dp" if name == "default" else "single"}


# ------------------------------------------------------------------------------------------------ toggled


@pytest.fixture(scope="module")
def toggled(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, dict[str, Any]]:
    """Five steps of a bare and a wrapped model after each request: single, dp, nonsense, single; return the answers."""
    steered = SteeredScript(tmp_path_factory.mktemp("toggled"), "toggled")
    noted: dict[str, Any] = {"losses": steered.step(5)}
    for name, mode in (("single", SINGLE), ("dp", DP), ("nonsense", 77), ("single again", SINGLE)):
        before = steered.answer()
        serial = steered.ask(mode)
        pending = steered.answer()
        noted["losses"] += steered.step(5)
        noted[name] = (serial, before == pending, steered.answer())
    noted["losses"] += steered.step(40)
    return steered.script.end(), noted


EXPECTED = (("dp", 5), ("single", 5), ("dp", 5), ("dp", 5), ("single", 45))
"""Modes of the wrapped model. Those of the bare one differ in the first five steps, before any request."""


def test_a_request_changes_the_mode_between_two_calls(toggled: tuple[TracedRun, dict[str, Any]]) -> None:
    run, _ = toggled
    modes = [mode for mode, count in EXPECTED for _ in range(count)]
    assert [call.mode for call in run.calls("Wrapped")] == modes
    assert [call.mode for call in run.calls("Bare")] == ["single"] * 5 + modes[5:]
    for call in run.calls():
        assert len(call.replicas) == (2 if call.mode == "dp" else 1)
        assert call.virtual == (call.mode == "dp")
        assert bool(call.phases) == (call.mode == "dp")
        assert call.rows == 30


def test_no_step_is_lost_by_a_toggle(toggled: tuple[TracedRun, dict[str, Any]]) -> None:
    run, _ = toggled
    assert [step.step for step in run.steps()] == list(range(1, 66))
    assert [call.call for call in run.calls()] == list(range(1, 131))
    assert [call.step for call in run.calls()] == [step for step in range(1, 66) for _ in range(2)]
    assert run.missed == 0
    assert run.complaints == []
    modes = [step.mode for step in run.steps()]
    assert modes == [call.mode for call in run.calls("Bare")]  # the mode of a step is that of its first call


def test_the_loss_goes_on_falling(toggled: tuple[TracedRun, dict[str, Any]]) -> None:
    run, noted = toggled
    assert run.printed == noted["losses"]
    for column in zip(*noted["losses"], strict=True):
        early, middle, late = (sum(column[start : start + 20]) for start in (0, 20, 45))
        assert early > middle > late


def test_a_request_is_acknowledged_only_when_it_is_done(toggled: tuple[TracedRun, dict[str, Any]]) -> None:
    _, noted = toggled
    assert noted["single"] == (1, True, (1, SINGLE))
    assert noted["dp"] == (2, True, (2, DP))
    assert noted["nonsense"][:2] == (3, True)
    assert noted["nonsense"][2][0] == 3
    assert noted["single again"] == (4, True, (4, SINGLE))


def test_a_toggle_is_recorded_with_its_origin(toggled: tuple[TracedRun, dict[str, Any]]) -> None:
    run, _ = toggled
    events = [event.data for event in run.events("mode")]
    assert [event["requested_by"] for event in events] == ["start"] * 2 + ["user"] * 7
    refused = [event for event in events if event["refused"]]
    assert [event["mode"] for event in refused] == [None]
    done = [event for event in events if not event["refused"]]
    assert [(e["call"], e["root"], e["mode"]) for e in done] == [
        (1, "Bare", "single"),
        (2, "Wrapped", "dp"),
        (11, "Bare", "single"),
        (12, "Wrapped", "single"),
        (21, "Bare", "dp"),
        (22, "Wrapped", "dp"),
        (41, "Bare", "single"),
        (42, "Wrapped", "single"),
    ]
    for event in done:
        call = run.calls()[event["call"] - 1]
        assert (event["step"], event["mode"]) == (call.step, call.mode)
        assert tuple(event["devices"]) == call.devices
        assert event["virtual"] == call.virtual
        assert (event["reason"] is not None) == call.virtual  # why a CPU has two


# ------------------------------------------------------------------------------------------------ refused


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """Models that cannot be split, after a request for dp."""
    steered = SteeredScript(tmp_path_factory.mktemp("refusing"), "refusing")
    before = steered.step()
    steered.ask(DP)
    after = steered.step(4)
    assert after == before * 4  # the script sees the same
    assert steered.answer()[0] == 1
    return steered.script.end()


@pytest.mark.parametrize(
    ("root", "reason", "modes"),
    [
        ("Plain", None, ["single", "dp", "dp", "dp", "dp"]),
        ("ReturnsScalar", "a scalar", ["single"] * 5),
        ("ReturnsPairs", "other lengths", ["single"] * 5),
        ("Holds", None, []),  # it is done, by what it holds
        ("HoldsAsOnlyPart", None, ["single"] * 5),
        ("Spread", "cpu, meta", ["single"] * 5),
        ("Raises", "no replica, please", ["single"] * 5),
        ("RecursiveScriptModule", "TorchScript", ["single"] * 5),
        ("Linear", "DistributedDataParallel", ["single"] * 5),  # named by what DDP wraps
    ],
)
def test_refusals_come_with_a_reason(refusing: TracedRun, root: str, reason: str | None, modes: list[str]) -> None:
    assert refusing.status == 0
    asked = [e.data for e in refusing.events("mode") if e.data["requested_by"] == "user" and e.data["root"] == root]
    refused = [event for event in asked if event["refused"]]
    if reason is None:
        assert refused == []
    else:
        assert [event["mode"] for event in refused] == ["single"]
        assert reason in refused[0]["refused"]
    calls = [call for call in refusing.calls(root) if call.via in (None, "DistributedDataParallel")]
    assert [call.mode for call in calls] == modes
    assert not any(call.failed for call in calls)


def test_each_failed_attempt_of_dp_is_reported(refusing: TracedRun) -> None:
    assert [text for text in refusing.complaints if "no replica, please" not in text] == []
    assert len(refusing.complaints) == 2  # the third time it is refused for good


def test_dp_is_not_refused_for_a_failure_that_also_occurs_on_one_device(refusing: TracedRun) -> None:
    """There is no warning (see the test above), and dp is not disabled."""
    calls = refusing.calls("Picky")
    assert [call.failed for call in calls] == [True, True, True, True, False] * (len(calls) // 5)
    assert {call.mode for call in calls if call.failed} == {"single"}
    assert [call.mode for call in calls if not call.failed] == ["single"] + ["dp"] * 4


def test_the_rank_is_in_the_record(refusing: TracedRun) -> None:
    (process,) = refusing.events("process")
    assert (process.data["rank"], process.data["world"]) == (0, 1)
    assert {call.rank for call in refusing.calls()} == {0}


TRANSFORMED = """
import torch
from torch.func import functional_call, grad
model = torch.nn.Linear(4, 2)
weights = dict(model.named_parameters())
for _ in range(3):
    grad(lambda given: functional_call(model, given, (torch.ones(6, 4),)).sum())(weights)
"""


def test_dp_is_refused_inside_a_transform(tmp_path: Path) -> None:
    run = run_traced(tmp_path, TRANSFORMED, replicas=2)
    assert [call.mode for call in run.calls()] == ["single"] * 3
    (event,) = run.events("mode")
    assert "torch.func" in event.data["refused"]
    assert len(run.complaints) == 1


def test_with_mode_script_requests_are_refused(tmp_path: Path) -> None:
    steered = SteeredScript(tmp_path, "toggled", mode="script")
    steered.step(2)
    assert steered.ask(SINGLE) == 1
    assert steered.ask(DP) == 2
    steered.step(2)
    assert steered.answer() == (2, 0)
    run = steered.script.end()
    assert {call.mode for call in run.calls()} == {"single"}
    (refused,) = [event.data for event in run.events("mode") if event.data["refused"]]
    assert "--mode script" in refused["refused"]
    assert [step.step for step in run.steps()] == [1, 2, 3, 4]


SCALAR = """
import torch
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x).pow(2).mean()

model = Model(4, 1)
for _ in range(3):
    loss = model(torch.ones(8, 4))
    loss.backward()
print(loss.dim())
"""


def test_replicas_requested_at_the_start_do_not_change_the_meaning_of_a_model(tmp_path: Path) -> None:
    """A script without DataParallel gets a loss, not a vector of losses, which has no backward."""
    run = run_traced(tmp_path, SCALAR, replicas=2)
    assert run.status == 0, run.err
    assert run.out == "0\n"


DEVICES = """
import torch
from torch import nn

class Bare(nn.Linear):
    pass

for model in (Bare(4, 1), nn.DataParallel(nn.Linear(4, 1))):
    for _ in range(2):
        print(list(model(torch.ones(7, 4)).shape))
"""


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedRun]:
    """Values of --devices and --mode, in parallel."""
    place = tmp_path_factory.mktemp("devices")
    asked: dict[str, dict[str, str]] = {
        "three": {"devices": "cpu, cpu,cpu"},
        "cuda": {"devices": "cuda:0,cuda:1"},
        "mixed": {"devices": "cpu,cuda:0"},
        "dp": {"mode": "dp"},
    }
    scripts = {name: TracedScript(place, DEVICES, **options) for name, options in asked.items()}  # type: ignore[arg-type]
    return {name: script.end() for name, script in scripts.items()}


@pytest.mark.parametrize(
    ("name", "mode", "count", "refusal"),
    [
        ("three", "dp", 3, None),
        ("cuda", "single", 1, "cuda:0"),
        ("mixed", "single", 1, "share one device"),
        ("dp", "dp", 2, None),
    ],
)
def test_requested_devices_and_modes(
    devices: dict[str, TracedRun], name: str, mode: str, count: int, refusal: str | None
) -> None:
    run = devices[name]
    assert (run.status, run.out, run.err) == (0, "[7, 1]\n" * 4, "")
    assert [(call.mode, len(call.devices), len(call.replicas)) for call in run.calls()] == [(mode, count, count)] * 4
    rows = {3: [3, 3, 1], 2: [4, 3], 1: [7]}[count]
    for call in run.calls():
        assert [share.inputs[0].shape[0] for share in call.replicas if share.inputs] == rows
        assert call.virtual == (mode == "dp")
    refused = [event.data["refused"] for event in run.events("mode")]
    assert len(refused) == 2
    assert all((reason is None) if refusal is None else refusal in reason for reason in refused)
    assert all(refusal is not None and refusal in text for text in run.complaints)
    assert len(run.complaints) == (0 if refusal is None else 2)
