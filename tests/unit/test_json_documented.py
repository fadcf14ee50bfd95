"""docs/records.md describes every field of `--json`, and no field that does not exist."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.commands import _make_listed_run
from dpmon.cli.main import main
from dpmon.cli.status import explain_run, read_run_status
from dpmon.cli.status_stream import StatusStream
from dpmon.model.findings.finding import Finding
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.notify.notifier import to_cloudevent
from dpmon.notify.run_notifications import find_notifications
from dpmon.record.history_rows import Definition, LossRow, Row
from dpmon.record.record_types import Event
from dpmon.report.health import Health
from dpmon.report.report_json import report_as_json
from dpmon.run.run_directory import load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.stalls.stacks import Frame, Stack
from dpmon.stalls.stall_detection import ProcessGroupView, RankActivity, Stall
from dpmon.stalls.stall_report import build_report
from support.format_readers import check_json_is_documented, documented_json_paths
from support.history_builders import make_run_info, read_report, write_run_directory
from support.rank_builders import ddp_rank_rows
from support.record_builders import SECOND, Training, device_event, host_event, pause_event, staged_calls


def event(kind: str, **data: Any) -> Event:
    return Event(kind, {"process": 0, "rank": None, **data})


@pytest.fixture
def objects(state: Path) -> list[dict[str, Any]]:
    """Reports of a run with both modes on GPUs, of ranks with a straggler, and of stages."""
    training = Training(devices=("cuda:0", "cuda:1"), step_ns=SECOND // 10)
    payloads = [*training.begin(), *training.run(60), *training.switch("single"), *training.run(60)]
    training.now += SECOND
    payloads += training.run(20)
    payloads += [
        *(pause_event(5.0, 20), pause_event(6.0, 20, 1.0)),
        event("memory", t_s=2.5, step=9, absent={}, devices=[{"device": "cuda:0", "absent": {"rest_bytes": "x"}}]),
        event("warning", t_s=1.0, text="careful"),
        event("profile", t_s=3.0, step=9, request=65539, steps=3, operators=[OPERATOR], file="profile-0.json"),
        *LOSSES,
    ]
    own = [host_event(float(t)) for t in range(15)]
    own += [device_event(float(t), 0, throttle=["power cap"]) for t in range(15)]
    own.append(Event("input", {"pid": 4242, "t_s": 7.0, "waited_s": 1.0}))
    ranked, end = ddp_rank_rows(3, slow=1, phase="data", steps=100, noise=0.0)
    runs = [
        write_run_directory({0: payloads, -1: own}, status=1, seconds=training.now / SECOND),
        write_run_directory(ranked, seconds=end / SECOND),
        write_run_directory({0: staged_calls(4, lambda n: (None, 2.0))}),
        write_run_directory({}),
    ]
    return [json.loads(json.dumps(report_as_json(read_report(directory)))) for directory in runs]


def test_every_field_of_a_report_is_described(objects: list[dict[str, Any]]) -> None:
    for each in objects:
        each["evaluations"] = ["as modes"]
    check_json_is_documented("dpmon report --json", *objects)


def test_every_field_of_a_listed_run_is_described(state: Path) -> None:
    directory = write_run_directory({0: [*Training().begin(), *Training().run(3)]})
    info = load_info(directory)
    listed = [_make_listed_run(directory, each)._asdict() for each in (info, replace(info, nodes=("gpu-1",)))]
    check_json_is_documented("dpmon ls --json", *json.loads(json.dumps(listed)))


def test_every_field_of_a_status_line_is_described(state: Path) -> None:
    ranked, _ = ddp_rank_rows(2, steps=100)
    made = [
        write_run_directory(ranked),
        write_run_directory({0: [*staged_calls(4, None), *LOSSES]}),
        write_run_directory({0: staged_calls(4, None), -1: [host_event(1.0), device_event(1.0, 0)]}),
        write_run_directory({}),
    ]
    found = []
    for directory in made:
        out = io.BytesIO()
        lines = StatusStream(RunReader(directory), lambda line, out=out: bool(out.write(line)))  # type: ignore[misc]
        lines.write_final(load_exit(directory))
        said = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [each.pop("kind") for each in said][-1] == "exit"
        assert all("skipped" in each for each in said)
        assert set(said[-1]) == {"run", "t_s", "status", "signal", "skipped"}
        found += [{key: value for key, value in each.items() if key != "skipped"} for each in said[:-1]]
    check_json_is_documented("dpmon --json", *found)


def test_every_field_of_why_is_described(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run_directory({0: Training().begin(), -1: [Event("stall", STALL)]}, status=1)
    stack = Stack((Frame("save", "t.py", 3),))
    rank = RankActivity(7, 0, 1, since_ns=1, step=3, groups=(ProcessGroupView(1, 2, 5),), stack=stack)
    gpu = {"util_pct": 3.0, "power_w": 60.0, "ordinals": [{"process": 0, "device": "cuda:0"}]}
    now = build_report([rank], {}, Stall(1, (0,), ()), 2, load_info(directory), gpus=[gpu])
    monkeypatch.setattr("dpmon.cli.why.run_state", lambda *_: ("running", load_exit(directory)))
    monkeypatch.setattr("dpmon.cli.why._read_traceback", lambda *_: (("main", "/job/train.py", 3),))
    mirrored = replace(now, without=("gpu-2: it did not answer in time",))
    monkeypatch.setattr("dpmon.cli.why._request_why_reply", lambda *_, **how: mirrored)
    assert main(["why", directory.name, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    check_json_is_documented("dpmon why --json", {**said, "explanation": ["linear-3f2a  training"]})


LOSSES: list[Row] = [
    Definition(3000, {"place": "train.py:88", "why": None}),
    *(LossRow(3000, step, 2 * SECOND + step, value) for step, value in enumerate((1.0, nan), start=1)),
]
OPERATOR = {"on": "host", "name": "aten::mm", "calls": 6, "ms": 1.5}
STALL = {"t_s": 5.0, "since_s": 1.0, "text": "rank 1 in save", "ranks": [{"rank": 1}]}


def test_every_field_of_a_status_is_described(state: Path) -> None:
    ranked, _ = ddp_rank_rows(2, steps=100)
    runs = [
        write_run_directory(ranked, status=1),
        write_run_directory({0: Training().begin(), -1: [Event("stall", STALL)]}, status=1),
        write_run_directory({}),
    ]
    found = [read_run_status(directory)[1] for directory in runs]
    found[0]["explanation"] = explain_run(runs[0], *read_run_status(runs[0]))
    assert found[1]["stall"] is not None
    assert found[0]["findings"]
    of_line = {re.split(r"[.\[]", path)[0] for path in documented_json_paths("dpmon --json")}
    check_json_is_documented(
        "dpmon status --json", *({name: each[name] for name in each.keys() - of_line} for each in found)
    )
    assert all(of_line - {"communication", "ranks", "nodes"} <= each.keys() for each in found)


def test_every_field_of_an_event_is_described() -> None:
    stalls = tuple(
        RecordedStall(SECOND * at, SECOND * (at + 10), end, STALL) for at, end in ((1, 20 * SECOND), (50, None))
    )
    found = [Finding("data", "text", "ground", "advice", 0.9)]
    events = []
    for at_s, now in ((0.0, Health("training", 1.0)), (99.0, Health("ended", 99.0, "why", None, "failed"))):
        for each in find_notifications(stalls, 0, now, at_s, found, 60.0):
            told = each._replace(data={**each.data, "health": now.fields()})
            events.append(to_cloudevent(told, told.id_in("run"), make_run_info(id="run")))
    assert len({event["type"] for event in events}) == 6
    check_json_is_documented("Events", *events)
