"""`dpmon status`: the health of a run, its exit status, the lines for people, and the wait for a state."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli import status
from dpmon.cli.main import main
from dpmon.cli.status_stream import status_members
from dpmon.cli.summary import summary_lines
from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.record_types import Event
from dpmon.report import health
from dpmon.report.health import Health
from dpmon.run import proc
from dpmon.run.run_directory import load_exit, load_info, write_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import short_name
from dpmon.stalls.run_state import STATES
from dpmon.stalls.stall_report import build_report
from dpmon.store.database import HISTORY_FILE
from dpmon.store.store_opening import open_store
from support.history_builders import write_run_directory
from support.rank_builders import ddp_rank_rows
from support.record_builders import SECOND, Training, device_event
from support.screen_states import exit_info_of

STALL = Event("stall", {"t_s": 52.0, "since_s": 40.0, "text": "rank 1 in save (t.py:3)", "ranks": [{"rank": 1}]})
STALL_ENDED = Event("stall", {"t_s": 55.0, "since_s": 40.0, "lasted_s": 15.0, "text": "rank 1 in save (t.py:3)"})

EARLY = Event("stall", {**STALL.data, "t_s": 0.001, "since_s": 0.0})
EARLY_ENDED = Event("stall", {**STALL_ENDED.data, "t_s": 0.002, "since_s": 0.0})


def a_run(*own: Event, steps: int = 40, name: str = "linear", **about: Any) -> Path:
    """A finished run."""
    training = Training()
    return write_run_directory({0: [*training.begin(), *training.run(steps)], -1: list(own)}, name=name, **about)


def live(*own: Event, **about: Any) -> Path:
    """A run that goes on: this process plays the supervisor and the command."""
    me: dict[str, Any] = {"supervisor_pid": os.getpid(), "supervisor_started": proc.start_time_s(os.getpid())}
    me |= {"command_pid": os.getpid(), "command_started": proc.start_time_s(os.getpid())}
    now: dict[str, Any] = {
        "start_ns": time.monotonic_ns() - 60 * 10**9,
        "started_unix": time.time() - 60,
        "host": proc.host_name(),
    }
    return a_run(*own, status=None, boot_id=proc.boot_id(), **me, **now, **about)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        *((Health(state, 1.0), 0) for state in ("training", "evaluating", "waiting for data")),
        *((Health(state, 1.0), 3) for state in ("starting", "waiting for input", "paused", "quiet")),
        (Health("stalled", 1.0), 5),
        *((Health("ended", 1.0, end=end), 3) for end in ("finished", "stopped", "interrupted")),
        *((Health("ended", 1.0, end=end), 6) for end in ("failed", "killed", "lost", "ended")),
        (Health("ended", None), 3),
    ],
)
def test_each_state_has_an_exit_status(now: Health, expected: int) -> None:
    assert now.state in STATES
    assert now.exit_status == expected
    assert now.fields()["fine"] == (expected == 0)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Health("training", None), "training"),
        (Health("starting", None, "importing torch"), "starting: importing torch"),
        (Health("stalled", 40.0, "rank 1 in save"), "stalled for 20.0 s: rank 1 in save"),
        (Health("waiting for data", 59.5), "waiting for data"),
        (Health("ended", 60.0, None, None, "finished", exit_info_of(0, at_ns=60 * SECOND)), "finished in 1 min 00 s"),
        (Health("ended", 5.0, "SIGKILL", None, "killed", exit_info_of(137, "SIGKILL", 5 * SECOND)),
         "killed by SIGKILL after 5.00 s"),
        (Health("ended", None, "its end was not recorded", None, "lost"),
         "lost: its end was not recorded"),
    ],
)  # fmt: skip
def test_the_health_of_a_run_in_words(now: Health, expected: str) -> None:
    assert now.sentence(60.0) == expected


@pytest.mark.parametrize(
    ("own", "about", "expected", "says"),
    [
        ((), {}, 3, "finished in 1 min 00 s"),
        ((), {"status": 7}, 6, "failed with exit status 7 after 1 min 00 s"),
        ((STALL,), {"status": 1}, 6, "failed with exit status 1 after 1 min 00 s"),
        ((), {"status": None, "started_unix": 1.0}, 6, "lost: its end was not recorded"),
    ],
)
def test_the_status_of_a_run_that_is_over(
    state: Path, own: tuple[Event, ...], about: dict[str, Any], expected: int, says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    directory = a_run(*own, **about)
    assert main(["status", directory.name]) == expected
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"linear-{directory.name[-4:]}  {says}"
    if own:
        assert lines.pop(1) == "  ended in a stall of 20.0 s: rank 1 in save (t.py:3)"
    assert lines[1].startswith("  step 40  ")
    assert lines[1].endswith("  dp (virtual)")
    assert "samples/s" in lines[1]
    assert main(["status", ""]) == 4, "an empty name, as after a failed start, is no run"
    capsys.readouterr()
    assert main(["status", "--json"]) == expected
    found = json.loads(capsys.readouterr().out)
    assert found["health"]["fine"] is False
    assert found["state"] == "ended"
    assert 0 < found["t_s"] <= 60.0
    assert (found["stall"] is None) == (not own)


def test_ranks_are_counted(state: Path) -> None:
    ranked, seconds = ddp_rank_rows(3, slow=1, phase="data", steps=100)
    now, members = status.read_run_status(write_run_directory(ranked, seconds=seconds / 1e9))
    lines = status._status_lines(now, members)
    assert lines[1].startswith("  step 100  3 processes  ")
    assert lines[-1].startswith("  Rank 1 delays the others by ")
    assert status._status_lines(now, {**members, "findings": []})[-1].startswith("  rank 1 delays the others by ")
    ranks = [{**rank, "node": f"gpu-{rank['rank']}"} for rank in members["ranks"]]
    many = [{"index": index, "util_pct": 40 + index} for index in range(3)]
    told = {**members, "ranks": ranks, "devices": many, "nodes": []}
    assert status._status_lines(now, told)[-1] == "  3 GPUs of gpu-0: 40 to 42% used"


def test_a_stalled_run_says_which_rank_stands_where(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = live(STALL, device_event(59.0, 0))
    name = f"linear-{directory.name[-4:]}"
    assert main(["status"]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{name}  stalled for 2")
    assert lines[0].endswith(" s: rank 1 in save (t.py:3)")
    assert lines[1] == f"  try: dpmon why {name} shows the stacks"
    assert "None" not in "".join(lines)
    assert len(lines) <= 10
    assert not any("No step has ended" in line or "no step has ended" in line for line in lines)
    assert main(["status", "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == status.SCHEMA
    assert found["stall"].pop("lasted_s") == pytest.approx(found["t_s"] - 40.0, abs=0.01)
    assert found["stall"] == {"since_s": 40.0, "text": "rank 1 in save (t.py:3)", "ranks": [{"rank": 1}]}
    assert found["health"]["reason"] == "rank 1 in save (t.py:3)"
    assert found["exit"] is None
    assert main(["status", "--all"]) == 0
    assert capsys.readouterr().out.startswith(f"{name}  stalled for ")
    assert main(["status", "--all", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in every["runs"]] == [name]
    assert main(["ls"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert " stalled " in listed[1]
    assert listed[2] == "    rank 1 in save (t.py:3)"


def test_a_damaged_history_hides_no_other_run(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged, whole = (write_run_directory({0: Training().run(3)}) for _ in range(2))
    (damaged / HISTORY_FILE).write_bytes(b"no database" * 1000)
    assert main(["status", "--all"]) == 0
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()] == [short_name(load_info(whole))]
    assert output.err.startswith(f"dpmon: {damaged.name}: the history is damaged")


@pytest.mark.parametrize(
    ("own", "shown"), [((STALL,), True), ((STALL, STALL_ENDED), True), ((EARLY, EARLY_ENDED), False)]
)
def test_the_list_says_in_which_stall_a_run_ended(
    state: Path, own: tuple[Event, ...], shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(*own, status=130)
    a_run(*own, status=0)
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ended_in = f"ended in a stall of {'15' if STALL_ENDED in own else '20'}.0 s"
    assert [f"    {ended_in}: rank 1 in save (t.py:3)" in lines, len(lines)] == [shown, 3 + shown]


def test_why_says_that_a_mirror_does_not_reply(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = live()
    write_info(directory, replace(load_info(directory), nodes=("gpu-1",)))
    monkeypatch.setattr("dpmon.cli.why.ensure_supervisor", lambda _: None)
    monkeypatch.setattr("dpmon.cli.why.request_and_wait", lambda *_, **__: None)
    assert main(["why", directory.name]) == 0
    assert capsys.readouterr() == ("no stall was recorded\n", "dpmon: the mirror does not reply\n")


def test_why_needs_no_history(state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    directory = live()
    (directory / HISTORY_FILE).write_bytes(b"no database" * 1000)
    reply = replace(build_report([], {}, None, 2, load_info(directory)), text=None)
    monkeypatch.setattr("dpmon.cli.why._request_why_reply", lambda *_: reply)
    assert main(["why", directory.name]) == 0
    assert capsys.readouterr().out


def test_a_run_that_goes_on_after_a_stall_is_no_longer_stalled(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live(STALL, STALL_ENDED)
    assert main(["status", "--json"]) != 5
    assert json.loads(capsys.readouterr().out)["stall"] is None


@pytest.mark.parametrize("words", [[], ["nothing"], ["--wait", "ended"], ["nothing", "--json"]])
def test_without_such_a_run_the_exit_status_is_4(
    state: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words[:1] == ["nothing"]:
        a_run()
    for command in ("status",) if "--wait" in words else ("status", "why"):
        assert main([command, *words]) == 4
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("dpmon: there is no run")


@pytest.mark.parametrize(
    ("wanted", "about", "expected"),
    [
        ("ended", {"status": 1}, 0),
        ("failed", {"status": 1}, 0),
        ("finished", {"status": 1}, 6),
        ("training", {}, 3),
        ("finished", {}, 0),
    ],
)
def test_the_wait_for_a_run_that_is_over(
    state: Path, wanted: str, about: dict[str, Any], expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(**about)
    assert main(["status", "--wait", wanted]) == expected
    assert capsys.readouterr().out.startswith("linear-")


def test_a_wait_ends_when_the_state_is_reached_or_the_time_is_over(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = live(STALL)
    assert main(["status", "--wait", "stalled"]) == 0
    assert main(["status", "--wait", "fine", "--timeout", "0"]) == 124
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        end = load_exit(a_run())
        assert end is not None
        write_info(directory, replace(end, status=0))

    monkeypatch.setattr(time, "sleep", nap)
    assert main(["status", directory.name, "--wait", "finished", "--timeout", "60"]) == 0
    assert naps == [status.POLL_S]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--wait", "done"], ("--wait: invalid choice: 'done'", "training", "stalled", "fine", "failed")),
        (["--wait", "ended", "--timeout", "soon"], ("--timeout: expected a number of seconds, not 'soon'",)),
        (["--wait", "ended", "--timeout", "nan"], ("--timeout: expected a number of seconds, not 'nan'",)),
        (["--timeout", "3"], ("--timeout limits a wait: it needs --wait",)),
        (["--all", "--wait", "ended"], ("--all shows all runs: it excludes RUN and --wait",)),
        (["--all", "linear"], ("--all shows all runs: it excludes RUN and --wait",)),
    ],
)
def test_a_wrong_word_gets_one_sentence(
    state: Path, words: list[str], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(text in line for text in says)


def test_the_time_of_a_run_elsewhere_is_that_of_its_record(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = a_run(status=None)
    write_info(
        directory, replace(load_info(directory), boot_id="another", host="box7", start_ns=time.monotonic_ns() * 2)
    )
    now, members = status.read_run_status(directory)
    assert (now.state, now.reason, now.exit_status) == ("elsewhere", "it runs on box7", 3)
    assert 0 < members["t_s"] < 60
    assert main(["ls"]) == 0
    assert " on another node " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"host": "box7"}, "runs on another node (box7): run this command there"),
        (
            {"host": proc.host_name(), "supervisor_pid": 1, "command_pid": 1},
            "has ended: lost: its end was not recorded",
        ),
    ],
    ids=["elsewhere", "lost"],
)
def test_why_looks_at_no_process_that_has_only_the_number_of_the_runs(
    state: Path,
    about: dict[str, Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = a_run(STALL, status=None)
    write_info(directory, replace(load_info(directory), boot_id="another", **about))
    monkeypatch.setattr("dpmon.cli.why.request_and_wait", None)
    assert main(["why", directory.name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{directory.name} {sentence}\n")
    assert ("s, until its end: rank 1 in save" in said) == ("lost" in sentence)


@pytest.mark.parametrize(("exit_status", "speaks_of_stalls"), [(0, True), (1, False)])
def test_why_speaks_of_no_stalls_below_the_cause_of_a_failure(
    exit_status: int, speaks_of_stalls: bool, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = a_run(status=exit_status)
    assert main(["why", directory.name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{directory.name} has ended: {'failed' if exit_status else 'finished'}")
    assert ("no stall was recorded" in said) == speaks_of_stalls


@pytest.mark.parametrize(("own", "lasted"), [((STALL,), "20.0 s"), ((STALL, STALL_ENDED), "15.0 s")])
def test_a_stall_at_the_end_has_the_same_length_everywhere(
    state: Path, own: tuple[Event, ...], lasted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one was ended by the signal that ended the run."""
    directory = a_run(*own, status=130)
    for command, expected in (
        ("status", f"  ended in a stall of {lasted}: rank 1 in save (t.py:3)"),
        ("why", f"stalled at 00:00:40 for {lasted}, until its end: rank 1 in save (t.py:3)"),
        ("report", f"stalled at 00:00:40 for {lasted}, until its end: rank 1 in save (t.py:3)"),
    ):
        main([command, directory.name])
        assert expected in capsys.readouterr().out, command
    assert any(f" for {lasted}, until its end: " in line for line in summary_lines(directory, load_exit(directory)))
    assert status.read_run_status(directory)[1]["stall"]["lasted_s"] == float(lasted.removesuffix(" s"))


def test_why_lists_a_stall_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = a_run(EARLY, EARLY_ENDED, STALL, STALL_ENDED)
    assert main(["why", directory.name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    own = {"text": "rank 1 in save (t.py:3)", "ranks": [{"rank": 1}]}
    assert found["stalls"] == [
        {"since_s": 0.0, "end_s": 15.0, **own},
        {"since_s": 40.0, "end_s": 55.0, **own},
    ]
    assert found["now"] is None


def test_a_quiet_run_says_why(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = live()
    assert main(["status"]) == 3
    first, remedy, *rest = capsys.readouterr().out.splitlines()
    assert re.search(r"  idle for \d\d\.\d s: no call since step 40; the script does something else$", first)
    assert remedy == f"  try: dpmon why linear-{directory.name[-4:]} shows where it is"
    assert not any("o step has ended" in line for line in rest), "the first line says it"
    begun = health.read_health(directory)
    assert health._quiet_reason(RunAnalysis(), "ended") == "no recent call; the training process has ended"
    assert begun.fields()["reason"] == "no call since step 40; the script does something else"


@pytest.mark.parametrize("stands", [False, True])
def test_in_a_stall_no_time_is_left_and_no_rank_holds_the_others_up(state: Path, stands: bool) -> None:
    ranked, seconds = ddp_rank_rows(3, slow=1, phase="data", steps=100)
    directory = write_run_directory(ranked, seconds=seconds / 1e9)
    with closing(RunReader(directory)) as reader, open_store(directory) as store:
        taken = RunAnalysis(store)
        assert taken.representative is not None
        progress = replace(taken.representative.progress, epoch=1, batch=99, batches=200, left_ns=5e9, error_ns=1e8)
        process = taken.representative.with_facts(progress=progress)
        taken = taken.with_facts(processes={**taken.processes, process.process: process})
        now = Health("stalled", 1.0, "rank 1 in save (t.py:3)") if stands else Health("training", 1.0)
        members: dict[str, Any] = status_members(reader, taken, now, 60 * SECOND)
    slow, found = members["communication"]["straggler"], members["progress"]
    finding = {"kind": "straggler", "text": "Rank 1 delays the others by 6 ms per step"}
    members |= {"name": "linear", "stall": {"lasted_s": 9.0} if stands else None, "findings": [finding], "exit": None}
    text = "\n".join(status._status_lines(now, members))
    if stands:
        assert (slow, members["absent"]["straggler"]) == (None, "the run is stalled")
        assert (found["left_s"], found["absent"]["left_s"]) == (None, "the run is stalled")
        assert "left" not in text
        assert "holds the others up" not in text
        assert "epoch 1 · 99/200" in text
    else:
        assert slow["rank"] == 1
        assert found["left_s"] == 5.0
        assert "epoch 1 · 99/200 · 5 s left in the epoch" in text
        assert "Rank 1 delays the others" in text


def test_without_its_mirror_nothing_is_known_of_a_run_on_several_machines(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = live(nodes=("gpu-1", "gpu-2"))
    write_info(directory, replace(load_info(directory), supervisor_pid=None, command_pid=None))
    assert main(["status", directory.name]) == 3
    said = capsys.readouterr().out
    assert "unsupervised: its mirror has exited: what its nodes do is not known here, but they keep recording" in said
    assert "starts the mirror again" in said
    assert "supervisor " not in said
    assert main(["report", directory.name]) == 0
    assert "unsupervised: its mirror has exited" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make",
    [
        lambda: a_run(),
        lambda: a_run(status=1),
        lambda: a_run(STALL, status=None),
        lambda: a_run(*[STALL, STALL_ENDED] * 20),
        lambda: live(),
        lambda: live(STALL),
        lambda: live(steps=0),
        lambda: write_run_directory(ddp_rank_rows(2, slow=1)[0], name="linear"),
        lambda: live(*(Event("warning", {"t_s": 1.0, "process": 0, "text": f"w{i}"}) for i in range(60))),
    ],
)
def test_a_run_is_explained_in_at_most_40_lines(make: Any, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = load_info(make()).id
    without = main(["status", run_id])
    capsys.readouterr()
    assert main(["status", run_id, "--explain"]) == without
    lines = capsys.readouterr().out.splitlines()
    assert 8 <= len(lines) <= status.MAX_EXPLANATION == 40
    assert lines[0].startswith("linear")
    assert lines[1].startswith("  command: ")
    assert any(line.startswith("  dpmon export linear") for line in lines)
    assert any("dpmon report" in line for line in lines)
    main(["status", run_id, "--explain", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert any("  dpmon profile linear" in line for line in lines) == (said["health"]["end"] is None)
    assert len(said["explanation"]) == len(lines)
