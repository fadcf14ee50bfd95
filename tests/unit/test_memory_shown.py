"""The memory of devices, from records to the screen. An unknown value is a dash with a reason, never zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpmon.model.device_memory import memory_by_device, memory_of_processes, missing_value_reasons
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_process import Process
from dpmon.record.record_types import Event
from dpmon.ui.panels import panel_devices
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.styled_rows import plain_text
from support.history_builders import Recording, snapshot_of_rows
from support.record_builders import SECOND, Training, device_event, host_event
from support.screen_states import STYLE, screen_text

NAMES = ("model", "gradients", "optimizer", "rest", "peak")
WHY = "torch keeps no statistics of this device's allocator"


def one(device: str, *sizes: int | None, **absent: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{name}_bytes": size for name, size in zip(NAMES, sizes, strict=True)}
    return {"device": device, **found, "absent": absent}


def record(process: int, *devices: dict[str, Any]) -> dict[str, Any]:
    return {"process": process, "rank": None, "t_s": 2.5, "step": 3, "devices": list(devices), "absent": {}}


MEASURED = record(0, one("cpu", 100, 100, 200, None, None))


def test_a_device_of_several_processes_is_added_up() -> None:
    first = record(0, one("cuda:0", 100, 100, 200, 50, 500), one("cuda:1", 0, 0, 0, 40, 60))
    second = record(1, one("cuda:0", 10, 10, 20, 5, 50))
    zero, other = memory_by_device([first, second])
    assert zero[:5] == ("cuda:0", 110, 110, 220, 55)
    assert (zero.label, other.label) == ("cuda:0 of 2 processes", "cuda:1")
    assert zero.peak is None
    assert "peaks" in zero.absent["peak_bytes"]
    assert other[:6] == ("cuda:1", 0, 0, 0, 40, 60)
    assert memory_by_device([first])[0].peak == 500
    unknown = memory_by_device([first, record(1, one("cuda:0", 1, 1, 1, None, None, rest_bytes=WHY))])[0]
    assert unknown.rest == 50
    assert ("rest", f"1 of 2 processes (others: {WHY})") in missing_value_reasons(unknown)


def test_a_process_without_an_optimizer_does_not_hide_the_others() -> None:
    no = "no torch optimizer was made"
    actor = record(2, one("cpu", 10, None, None, None, None, optimizer_bytes=no, gradients_bytes="no backward pass"))
    learner = [record(process, one("cpu", 100, 100, 200, None, None)) for process in (0, 1)]
    (row,) = memory_by_device([*learner, actor])
    assert row[1:4] == (210, 200, 400)
    assert ("optimizer", f"2 of 3 processes (others: {no})") in missing_value_reasons(row)
    assert missing_value_reasons(memory_by_device([actor])[0])[1] == ("optimizer", no), (
        "one process: its reason is the row's"
    )


def test_a_process_that_is_not_measured_yet_is_counted() -> None:
    processes = [
        Process(number, RunAnalysis()).with_facts(began_ns=0, seen_ns=9, memory=MEASURED if number else {})
        for number in range(2)
    ]
    (row,) = memory_of_processes(processes, processes[0])
    assert row.model == 100
    assert ("model and gradients and optimizer", "1 of 2 processes") in missing_value_reasons(row)
    assert memory_of_processes(processes[:1], processes[0]) == []


def test_processes_that_follow_one_another_are_not_added_up() -> None:
    processes = [
        Process(n, RunAnalysis()).with_facts(began_ns=10 * n, seen_ns=10 * n + 9, memory=MEASURED) for n in range(3)
    ]
    assert [memory_of_processes(processes, one)[0].model for one in processes] == [100] * 3
    both = [*processes, Process(3, RunAnalysis()).with_facts(began_ns=5, seen_ns=15, memory=MEASURED)]
    assert memory_of_processes(both, both[3])[0].model == 300, "it ran beside two of them"


def test_the_memory_is_that_of_the_process_that_trained_also_after_its_end() -> None:
    """A process that only evaluates has neither gradients nor an optimizer, and does not hide them."""
    none = {"gradients_bytes": "no backward pass", "optimizer_bytes": "no torch optimizer was made"}
    trains, evaluates = Training(process=0), Training(process=1)
    recording = Recording()
    looks = (one("cpu", 10, 10, 20, None, None), one("cpu", 10, None, None, None, None, **none))
    recording.add([*trains.begin(), *trains.run(20), Event("memory", record(0, looks[0]))], 0)
    evaluates.now = trains.now + SECOND
    evaluation = [row for _ in range(200) for row in evaluates.step(evaluates=True)]
    evaluates.now += 60 * SECOND
    evaluation += evaluates.step(evaluates=True)
    recording.add([*evaluates.begin(), *evaluation, Event("memory", record(1, looks[1]))], 1)
    for ended in ((), (0,), (0, 1)):
        (row,) = recording.state(ended=ended).device_memory
        assert (row.model, row.gradients, row.optimizer, row.processes) == (10, 10, 20, 1)


def facts_of(*devices: dict[str, Any], gpus: int = 0) -> ScreenData:
    training = Training()
    payloads = [*training.begin(), *training.run(5), Event("memory", record(0, *devices))]
    payloads += [device_event(2.0, index) for index in range(gpus)] or [host_event(2.0)]
    return ScreenData(snapshot_of_rows(payloads), 3 * SECOND, is_command_alive=True)


def test_on_the_cpu_the_rest_is_a_dash_with_its_reason() -> None:
    facts = facts_of(one("cpu", 3 << 20, 1 << 20, 2 << 20, None, None, rest_bytes=WHY, peak_bytes=WHY))
    for width in (56, 90):
        text = [
            plain_text(row)
            for row in panel_devices.render_panel(facts, width, panel_devices.preferred_height(facts), STYLE)
        ]
        at = next(number for number, line in enumerate(text) if line.startswith("cpu "))
        assert text[at - 1].split() == ["memory", "model", "gradients", "optimizer"], "no dashes"
        assert text[at].split() == ["cpu", "3.00", "MiB", "1.00", "MiB", "2.00", "MiB"]
    text = [plain_text(row) for row in panel_devices.render_full_screen(facts, 90, 20, STYLE)]
    assert any(f"rest and peak: {WHY}" in line for line in text)


def test_gpus_have_their_memory_where_there_is_room() -> None:
    facts = facts_of(*(one(f"cuda:{i}", 1 << 30, 1 << 30, 2 << 30, 5 << 30, 9 << 30) for i in range(8)), gpus=8)
    rows = screen_text(replace(facts, view=View(zoom="devices")), 200, 60).splitlines()
    assert any("cuda:7" in row and "9.00 GiB" in row for row in rows)
