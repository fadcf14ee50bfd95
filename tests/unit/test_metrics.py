"""The metrics file as Prometheus' own parser reads it."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dpmon.record.record_types import Call, Event, Step
from dpmon.record.shared_names import CALL_PHASES, Untimed
from dpmon.run.run_directory import ExitInfo, load_info, record_stop_request, write_info
from dpmon.run.run_registry import create_run
from dpmon.sanitize import strip_control_chars
from dpmon.store.step_stats import StatsWindow
from dpmon.store.store_opening import open_store
from dpmon.supervise.prometheus_file import BUCKET_BOUNDS_S, PrometheusFile, metrics_path
from support.history_builders import Recording, make_run_info, write_run_directory
from support.rank_builders import ManyNodes
from support.record_builders import SECOND, Training, device_event, host_event, records_of_rows, step_row
from support.screen_states import exit_info_of

HOSTILE = 'a "quoted" \\ back\nslash\x1b[31m\x00 ü'


def samples(path: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample by name and labels (without the label of the run)."""
    found = {}
    for family in text_string_to_metric_families(path.read_text("utf-8")):
        assert family.documentation
        assert family.type in ("gauge", "counter", "histogram"), family.name
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "run"}
            key = (sample.name.removeprefix("dpmon_"), tuple(sorted(labels.items())))
            assert key not in found, "the same twice"
            found[key] = sample.value
    return found


def written(
    directory: Path, target: Path, how: ExitInfo | None = None
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    warnings: list[str] = []
    metrics = PrometheusFile(target, directory, warnings.append)
    metrics.write()
    if how is not None:
        metrics.write(how)
    assert warnings == []
    return samples(target)


def test_the_state_of_the_run_is_one_word(state: Path, tmp_path: Path) -> None:
    training = Training()
    directory = write_run_directory({0: [*training.begin(), *training.run(40)]}, status=None)
    assert found_state(written(directory, tmp_path / "one.prom")) == "quiet"
    stalled = write_run_directory(
        {0: [*training.run(40)], -1: [Event("stall", {"t_s": 9.0, "since_s": 1.0, "ranks": []})]}, status=None
    )
    assert found_state(written(stalled, tmp_path / "two.prom")) == "stalled"
    assert found_state(written(stalled, tmp_path / "three.prom", exit_info_of(0))) == "ended"


def test_a_run_of_calls_without_steps_has_started(state: Path, tmp_path: Path) -> None:
    directory = write_run_directory({0: Training().begin()}, status=None)
    assert found_state(written(directory, tmp_path / "it.prom")) == "starting"
    with closing(sqlite3.connect(directory / "history.sqlite")) as db, db:
        db.execute("UPDATE rings SET open_calls = 11 WHERE process = 0")
    assert found_state(written(directory, tmp_path / "it.prom")) == "quiet"


def found_state(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> str:
    ((state, value),) = [
        (dict(labels)["state"], value) for (name, labels), value in found.items() if name == "run_state"
    ]
    assert value == 1
    return state


def test_the_metrics_file_has_the_figures_of_the_record(state: Path, tmp_path: Path) -> None:
    training = Training()
    own = [host_event(1.0, cpu=50.0), device_event(1.0, 0), device_event(2.0, 0, util_pct=40, power_w=None)]
    own.append(Event("warning", {"process": None, "t_s": 1.0, "text": "x"}))
    payloads = [*training.begin(), *training.run(40)]
    directory = write_run_directory({0: payloads, -1: own}, status=None)
    found = written(directory, tmp_path / "it.prom")
    who = (("mode", "dp"), ("process", "0"), ("rank", ""))
    assert found["step_duration_seconds_count", who] == 40
    assert found["samples_total", who] == 1200
    total = sum(found["step_phase_seconds_total", tuple(sorted((*who, ("phase", phase))))]
                for phase in ("data", "forward", "backward", "optimizer", "other"))  # fmt: skip
    assert found["step_duration_seconds_sum", who] == pytest.approx(total)
    took = dict.fromkeys(CALL_PHASES, 0)
    for record in records_of_rows(payloads):
        if isinstance(record, Call):
            took = {name: took[name] + record.phases[name].host_ns for name in CALL_PHASES}
    for phase, ns in took.items():
        assert found["call_phase_seconds_total", tuple(sorted((*who, ("phase", phase))))] == pytest.approx(ns / 1e9)
        assert ns > 0
    gpu = (("index", "0"), ("name", "NVIDIA H200"), ("uuid", "GPU-0000"))
    assert found["device_utilization_ratio", gpu] == 0.4, "the newest"
    assert ("device_power_watts", gpu) not in found, "what is not known is not there"
    assert found["host_cpu_ratio", ()] == 0.5
    assert found["warnings_total", ()] == 1
    assert found["run_running", ()] == 1
    assert "run_exit_status" not in {name for name, _ in found}
    assert not [name for name, _ in found if "phase_device" in name], "no device's time was looked at"


def test_device_time_is_counted_with_the_number_of_steps_that_have_it(state: Path, tmp_path: Path) -> None:
    """Nine of ten steps are timed, and the data of seven; each mean is over the timed ones."""
    training = Training(devices=("cuda:0", "cuda:1"), virtual=False)
    rows = []
    for row in training.run(10):
        if isinstance(row, Step):
            number = row.step
            calls = [call.with_device_times((number, 1.0, None, 0.0, 9.0, 9.0), Untimed.LATE) for call in row.calls]
            row = row._replace(calls=calls)
            if number > 1:
                row = row.with_device_times((None if number < 5 else 2.0, 4.0, float(number), None), Untimed.LATE)
        rows.append(row)
    found = written(write_run_directory({0: rows}, status=None), tmp_path / "it.prom")
    who = (("mode", "dp"), ("process", "0"), ("rank", ""))
    said = {
        (name.removesuffix("_total"), dict(labels)["phase"]): value
        for (name, labels), value in found.items()
        if "_device_" in name and {*who} <= {*labels}
    }
    assert said == {
        ("step_phase_device_seconds", "data"): pytest.approx(0.012),
        ("step_phase_device_known", "data"): 6,
        ("step_phase_device_seconds", "forward"): pytest.approx(0.036),
        ("step_phase_device_known", "forward"): 9,
        ("step_phase_device_seconds", "backward"): pytest.approx(0.054),
        ("step_phase_device_known", "backward"): 9,
        ("call_phase_device_seconds", "scatter"): pytest.approx(0.055),
        ("call_phase_device_known", "scatter"): 10,
        ("call_phase_device_seconds", "replicate"): pytest.approx(0.010),
        ("call_phase_device_known", "replicate"): 10,
        ("call_phase_device_seconds", "gather"): 0,
        ("call_phase_device_known", "gather"): 10,
    }, "what took no time has 0, what is not known is not there"
    assert found["step_duration_seconds_count", who] == 10


def test_the_histogram_counts_every_step_once_within_its_bounds(state: Path, tmp_path: Path) -> None:
    """A bound may be off by 0.4%: half of the steps are below one by that much, and half above one."""
    walls = [int(bound * 1e9 * (1 + side)) for bound in BUCKET_BOUNDS_S for side in (-0.0041, 0.0041)]
    steps = [step_row("single", number, 10**9, wall, -1, (-1,) * 4) for number, wall in enumerate(walls, start=1)]
    found = written(write_run_directory({0: steps}, status=None), tmp_path / "it.prom")
    who = (("mode", "single"), ("process", "0"), ("rank", ""))
    for number, bound in enumerate(BUCKET_BOUNDS_S):
        assert found["step_duration_seconds_bucket", tuple(sorted((*who, ("le", str(bound)))))] == 2 * number + 1
    assert found["step_duration_seconds_bucket", tuple(sorted((*who, ("le", "+Inf"))))] == len(walls)
    assert ("samples_total", who) not in found, "no step knew its samples"


def test_the_activities_of_a_process_add_up_to_its_time(state: Path, tmp_path: Path) -> None:
    training = Training(mode="single")
    payloads = [*training.begin(), *training.run(50)]
    for _ in range(10):
        payloads += training.step(evaluates=True)
    directory = write_run_directory({0: payloads}, status=None)
    found = written(directory, tmp_path / "it.prom")
    with open_store(directory) as store:
        whole = sum(StatsWindow(store).time_by_activity.values()) / 1e9
    spent = {dict(labels)["activity"]: value for (name, labels), value in found.items() if name == "time_seconds_total"}
    assert {"training", "evaluation"} <= set(spent)
    assert sum(spent.values()) == pytest.approx(whole)


def test_a_late_wait_for_input_makes_no_counter_decrease(state: Path, tmp_path: Path) -> None:
    training = Training(mode="single", step_ns=100_000_000)
    directory = write_run_directory({}, status=None)
    recording = Recording(0, directory)
    metrics = PrometheusFile(tmp_path / "it.prom", directory, print)
    written_before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for number in range(4):
        recording.add([*(training.begin() if not number else ()), *training.run(20)])
        if number == 2:
            recording.add([Event("input", {"pid": 4242, "t_s": training.now / SECOND - 1.5, "waited_s": 1.0})])
        metrics.write()
        found = samples(tmp_path / "it.prom")
        counters = {
            key: value for key, value in found.items() if key[0].endswith(("_total", "_bucket", "_sum", "_count"))
        }
        assert all(counters[key] >= before for key, before in written_before.items())
        written_before = counters
    recording.close()
    waited = tuple(sorted({"process": "0", "rank": "", "activity": "input"}.items()))
    assert found["time_seconds_total", waited] == pytest.approx(1.0)
    assert found["step_duration_seconds_count", (("mode", "single"), ("process", "0"), ("rank", ""))] == 80


def test_metrics_report_the_end_of_the_run(state: Path, tmp_path: Path) -> None:
    directory = write_run_directory({0: Training().run(2)}, status=None)
    found = written(directory, tmp_path / "it.prom", ExitInfo(137, "SIGKILL", 1.7e9, 1, 1.0, "supervisor"))
    assert (found["run_running", ()], found["run_exit_status", (("end", "killed"),)]) == (0, 137)
    directory = write_run_directory({0: Training().run(2)}, status=1)
    record_stop_request(directory)
    write_info(directory, how := replace(exit_info_of(1), ended_unix=time.time()))
    found = written(directory, tmp_path / "other.prom", how)
    assert found["run_exit_status", (("end", "stopped"),)] == 1, "the user asked for it"


def test_metrics_name_the_job_that_the_run_is_part_of(state: Path, tmp_path: Path) -> None:
    ranks = [
        Event("process", {"process": 0, "t_s": 0.1, "job": {"by": "slurm", "id": "12.0"}, "node": node})
        for node in (1, None)
    ]
    of_job = {"by": "slurm", "job_id": "12.0", "node": "1"}
    assert (
        written(write_run_directory({0: ranks[:1]}), tmp_path / "one.prom")["run_job_info", tuple(of_job.items())] == 1
    )
    found = written(write_run_directory({0: ranks}), tmp_path / "two.prom")
    assert found["run_job_info", tuple({**of_job, "node": ""}.items())] == 1
    assert "run_job_info" not in {name for name, _ in written(write_run_directory({}), tmp_path / "three.prom")}


def test_labels_are_escaped(state: Path, tmp_path: Path) -> None:
    directory = write_run_directory({-1: [device_event(1.0, 0, name=HOSTILE)]}, script=HOSTILE)
    found = written(directory, tmp_path / "it.prom")
    shown = strip_control_chars(HOSTILE)
    assert [dict(labels)["script"] for name, labels in found if name == "run_info"] == [shown]
    assert [dict(labels)["name"] for name, labels in found if name == "device_memory_used_bytes"] == [shown]


def test_the_file_is_replaced_and_may_be_read(state: Path, tmp_path: Path) -> None:
    directory = write_run_directory({0: Training().run(2)}, status=None)
    target = tmp_path / "it.prom"
    umask = os.umask(0o077)
    try:
        metrics = PrometheusFile(target, directory, print)
        metrics.write()
        first = target.stat()
        metrics.write()
    finally:
        os.umask(umask)
    assert target.stat().st_ino != first.st_ino
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["it.prom"]


def test_a_failure_to_write_is_reported_once(state: Path, tmp_path: Path) -> None:
    directory = write_run_directory({0: Training().run(2)}, status=None)
    said: list[str] = []
    metrics = PrometheusFile(tmp_path / "no" / "it.prom", directory, said.append)
    metrics.write()
    metrics.write()
    assert len(said) == 1
    assert "cannot be written" in said[0]
    (tmp_path / "no").mkdir()
    metrics.write()
    assert samples(tmp_path / "no" / "it.prom")


def test_a_directory_takes_a_file_a_run(state: Path, tmp_path: Path) -> None:
    info = load_info(write_run_directory({}))
    assert metrics_path(str(tmp_path), info).name == f"dpmon-linear-{info.id[-4:]}.prom"
    assert metrics_path(str(tmp_path / "x.prom"), info) == tmp_path / "x.prom"


def test_a_run_on_several_machines_names_the_machine_of_each_process(state: Path, tmp_path: Path) -> None:
    names = ("gpu-0", "gpu-1")
    directory, _ = create_run(make_run_info(nodes=names))
    run = ManyNodes(2, 2, directory=directory).run(0, 20)
    run.node(1, "cut", "the connection timed out", 15.0)
    found = written(directory, tmp_path / "it.prom")
    nodes = {(dict(labels)["rank"], dict(labels)["node"]) for name, labels in found if name == "time_seconds_total"}
    assert nodes == {(str(rank), names[rank // 2]) for rank in range(4)}
    newest = {dict(labels).get("node") for name, labels in found if name == "device_utilization_ratio"}
    assert newest == {*names}
    assert {dict(labels).get("node") for name, labels in found if name.startswith("host_")} == {*names}
    assert [found["node_connected", (("node", name),)] for name in names] == [1.0, 0.0]
