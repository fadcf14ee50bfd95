"""What a mirror makes of the reports about its connections: nothing is lost or doubled by the end of one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dpmon
from dpmon.errors import HistoryError
from dpmon.mirror.mirror import MAX_NODE_BACKLOG_BYTES, Mirror
from dpmon.mirror.node_links import LineReceived, LinkClosed, LinkOpened
from dpmon.mirror.request_relay import RequestRelay
from dpmon.model.nodes import read_nodes
from dpmon.record.typed_json import to_json
from dpmon.run import proc
from dpmon.run.lifecycle import outcome_word
from dpmon.run.mirror_state import MirrorState, NodeReplies
from dpmon.run.run_directory import load_exit, load_info, write_info
from dpmon.stalls.stall_detection import NodeActivities, RankActivity
from dpmon.stalls.stall_report import ANSWER_FILE, ASKED_FILE, RankReport, StallReport, read_reply, request_reply
from dpmon.stalls.why_text import format_report
from dpmon.store.store_opening import open_store
from support.history_builders import ORIGIN_S
from support.mirror_builders import mirror_run_info, row_line

MARKER = {"run": "r", "host": "h", "version": dpmon.__version__, "origin_s": ORIGIN_S}


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    """Return the mirror of one machine, whose command is never started."""
    made = Mirror(tmp_path, mirror_run_info(1), [["gpu-0", "r", "false"]])
    yield made
    made.links.close_all()
    made.history.close()


def send(mirror: Mirror, *lines: dict[str, Any] | bytes) -> None:
    for line in lines:
        mirror._handle_report(LineReceived(0, line if isinstance(line, bytes) else json.dumps(line).encode()))


def event(number: int) -> dict[str, Any]:
    text = json.dumps({"kind": "host", "t_s": float(number)})
    return row_line("events", {"id": number, "process": -1, "kind": "host", "json": text})


def beat(begin: int, offset: int, **more: Any) -> dict[str, Any]:
    return {"beat": 1, "from": begin, "offset": offset, "seq": offset, "tallied_s": 0, **more}


def held_bytes(mirror: Mirror) -> int:
    """Return the length of the events that are not written yet."""
    lines = [line for _, chunk in mirror._chunks for line in chunk.lines]
    return sum(len(text) for line in lines for text in line.column("json"))


def events_in(mirror: Mirror) -> list[float]:
    texts = list(mirror.history._history.connection.rows("SELECT json FROM events WHERE kind = 'host' ORDER BY id"))
    return [json.loads(text)["t_s"] for (text,) in texts]


def test_what_comes_after_rubbish_is_left_out_until_the_next_connection(mirror: Mirror) -> None:
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, event(1), b"half a li", event(2), beat(0, 2))
    node = mirror.peers[0].node
    assert node.state == "cut"
    assert node.why == "it sent a line that is not JSON"
    assert mirror._commit()
    assert node.received == 0
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, event(1), event(2), beat(0, 2))
    assert mirror._commit()
    assert (node.state, node.received, events_in(mirror)) == ("connected", 2, [1.0, 2.0])


def test_the_run_has_the_version_of_dpmon_that_recorded_it(mirror: Mirror) -> None:
    mirror._handle_report(LinkOpened(0, {**MARKER, "command": ["train.py"]}))
    assert load_info(mirror.directory).versions == {"dpmon": dpmon.__version__}


def test_another_version_of_dpmon_is_refused(mirror: Mirror) -> None:
    mirror._handle_report(LinkOpened(0, {**MARKER, "version": "1.2.3"}))
    node = mirror.peers[0].node
    assert node.state == "refused"
    assert node.why == f"its dpmon is of another version (1.2.3; here {dpmon.__version__})"
    send(mirror, event(1), beat(0, 1))
    assert mirror._commit()
    assert events_in(mirror) == []


def test_much_rubbish_at_once_ends_one_connection(mirror: Mirror) -> None:
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, *[b"x"] * 3000)
    assert mirror.links._idle == [mirror.links._links[0]]


def test_what_could_not_be_written_comes_once_again(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise HistoryError("no room")

    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, event(1), beat(0, 1))
    with monkeypatch.context() as patched:
        patched.setattr(mirror.history, "write", full)
        assert not mirror._commit()
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, event(1), event(2), beat(0, 2))
    assert mirror._commit()
    assert events_in(mirror) == [1.0, 2.0]


@pytest.mark.parametrize(("texts", "state"), [([200] * 100, "connected"), ([200_000] * 6, "cut")])
def test_the_bytes_that_wait_for_a_full_disk_are_bounded(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, texts: list[int], state: str
) -> None:
    def full(*_: object) -> None:
        raise HistoryError("no room")

    mirror._handle_report(LinkOpened(0, MARKER))
    monkeypatch.setattr(mirror.history, "write", full)
    held = []
    for number, length in enumerate(texts):
        text = json.dumps({"kind": "host", "t_s": 0.0, "text": "x" * length})
        rows = [[30 * number + each, -1, "host", 0, text] for each in range(1, 31)]
        send(mirror, {**event(0), "rows": rows}, beat(30 * number, 30 * number + 30))
        mirror._commit()
        held.append(held_bytes(mirror))
    assert 500_000 < max(held) <= MAX_NODE_BACKLOG_BYTES
    node = mirror.peers[0].node
    assert (node.state, node.why) == (state, None if state == "connected" else "its records cannot be written here")
    monkeypatch.undo()
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, event(1), beat(0, 1))
    assert mirror._commit()
    assert (node.state, events_in(mirror)) == ("connected", [1.0])


def test_the_bytes_of_all_machines_that_wait_for_a_full_disk_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a hundred machines sends small chunks, but the disk may be full for an hour."""

    def full(*_: object) -> None:
        raise HistoryError("no room")

    count, most = 8, 400_000
    monkeypatch.setattr("dpmon.mirror.mirror.MAX_BACKLOG_BYTES", most)
    commands = [[f"gpu-{number}", "r", "false"] for number in range(count)]
    mirror = Mirror(tmp_path, mirror_run_info(count), commands)
    write, states = mirror.history.write, set[tuple[str, str | None]]()
    for number in range(count):
        mirror._handle_report(LinkOpened(number, MARKER))
    mirror._handle_report(LineReceived(0, json.dumps(beat(0, 0, exit={"status": 0, "seconds": 1.0})).encode()))
    monkeypatch.setattr(mirror.history, "write", full)
    for at in range(40):
        row = [at + 1, -1, "host", 0, json.dumps({"kind": "host", "t_s": float(at), "text": "x" * 4_000})]
        for machine in mirror.peers[1:]:
            if machine.node.state == "cut":
                mirror._handle_report(LinkOpened(machine.node.number, MARKER))
            for line in ({**event(0), "rows": [row]}, beat(machine.last_received_id, at + 1)):
                mirror._handle_report(LineReceived(machine.node.number, json.dumps(line).encode()))
        mirror._commit()
        assert held_bytes(mirror) <= most
        states |= {(machine.node.state, machine.node.why) for machine in mirror.peers[1:]}
    assert states == {("connected", None), ("cut", "its records cannot be written here")}
    monkeypatch.setattr(mirror.history, "write", write)
    assert mirror._commit()
    assert mirror.peers[0].node.state == "ended"  # the end of its run was not forgotten
    mirror.links.close_all()
    mirror.history.close()


def test_nothing_comes_after_the_end_of_a_run(mirror: Mirror) -> None:
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, beat(0, 0, exit={"status": 0, "seconds": 1.0}), event(1), beat(0, 1))
    assert mirror._commit()
    assert mirror.peers[0].node.state == "ended"
    assert events_in(mirror) == []
    assert not mirror.links._idle


def test_a_run_has_ended_once_its_last_records_are_written(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise HistoryError("no room")

    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, event(1), beat(0, 1, exit={"status": 0, "seconds": 1.0}))
    node = mirror.peers[0].node
    with monkeypatch.context() as patched:
        patched.setattr(mirror.history, "write", full)
        assert not mirror._commit()
    assert (node.state, mirror.peers[0].is_over, mirror.links._idle) == ("connected", False, [])
    assert mirror._commit()
    assert (list(mirror.history._history.connection.rows("SELECT state FROM nodes")), events_in(mirror)) == (
        [("ended",)],
        [1.0],
    )


INVALID = row_line("gaps", {"ns": 5}, {"ns": "much"})
UNUSABLE = row_line(
    "events", {"id": 1, "process": 0, "kind": "ddp", "json": '{"kind": "ddp", "rank": 0, "group": [0, "a"]}'}
)
"""Of the right types, but the ranks cannot be put in order."""
RING = row_line("rings", {"name": "process-0.ring"})


@pytest.mark.parametrize(
    ("line", "last", "state", "why"),
    [
        (INVALID, {}, "cut", "it sent invalid rows of the table gaps"),
        (UNUSABLE, {}, "cut", "it sent damaged records"),
        (UNUSABLE, {"exit": {"status": 0, "seconds": 1.0}}, "refused", "it sent damaged records"),
    ],
)
def test_a_machine_with_an_invalid_row_is_cut_off_and_delays_no_other_one(
    tmp_path: Path, line: dict[str, Any], last: dict[str, Any], state: str, why: str
) -> None:
    words = [[f"gpu-{number}", "r", "false"] for number in range(3)]
    mirror = Mirror(tmp_path, mirror_run_info(3), words)
    for number, sent in enumerate([line, line, event(1)]):
        mirror._handle_report(LinkOpened(number, MARKER))
        for one in (RING, sent, beat(0, 1), event(2), beat(1, 2, **(last if sent is line else {}))):
            mirror._handle_report(LineReceived(number, json.dumps(one).encode()))
    assert mirror._commit()
    assert events_in(mirror) == [1.0, 2.0]
    expected = [(state, why, 0, None), (state, why, 0, None), ("connected", None, 2, None)]
    assert (
        list(mirror.history._history.connection.rows("SELECT state, why, received, exit FROM nodes ORDER BY number"))
        == expected
    )
    assert [link.node for link in mirror.links._idle] == ([0, 1, 2] if state == "cut" else [2])
    mirror.links.close_all()
    mirror.history.close()


@pytest.mark.parametrize(
    "line",
    [
        b'{"standing": {"now_ns": 1, "ranks": [[1, 0, 0, "2"]]}, "age_s": 1}',
        b'{"standing": {"now_ns": 1e999, "ranks": []}, "age_s": 1}',
    ],
)
def test_odd_facts_of_ranks_end_the_connection_of_their_machine(mirror: Mirror, line: bytes) -> None:
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, line, beat(0, 0))
    assert mirror.peers[0].node.state == "cut"
    assert (mirror.peers[0].node.why or "").startswith("it sent invalid data: ")


@pytest.fixture
def sent(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the requests that the machine gets; it answers those for the time."""
    found: list[dict[str, Any]] = []

    def note(_: int, line: str) -> bool:
        found.append(json.loads(line))
        if found[-1]["ask"] == "time":
            send(mirror, {"answer": found[-1]["id"], "now_ns": 5})
        return True

    monkeypatch.setattr(mirror.links, "send", note)
    monkeypatch.setattr(mirror.history, "node_and_process", lambda number: (0, number - 2))
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, beat(0, 0))
    return found


def test_records_that_a_reader_wants_are_asked_for_again(mirror: Mirror, sent: list[dict[str, Any]]) -> None:
    MirrorState(mirror.directory, 0).subscribe([3])
    mirror._requests.poll(0.0)
    assert (sent[-1]["ask"], sent[-1]["processes"]) == ("records", [1])
    mirror._handle_report(LinkOpened(0, MARKER))
    assert [one["ask"] for one in sent[-2:]] == ["begin", "records"]
    assert sent[-1]["processes"] == [1]
    other = RequestRelay(mirror)  # of a mirror that takes the place of a killed one
    other.poll(0.0)
    other.send_subscription(0)
    assert sent[-1] == {"ask": "records", "processes": [1]}


def test_records_are_wanted_until_their_last_reader_has_gone(
    mirror: Mirror, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = subprocess.Popen(["sleep", "1000"])
    try:
        started = proc.start_time_s(reader.pid)
        MirrorState(mirror.directory, 0).subscribe([3])
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: reader.pid)
            MirrorState(mirror.directory, 0).subscribe([4])
        assert started is not None
        mirror._requests.poll(0.0)
        assert sent[-1]["processes"] == [1, 2]
    finally:
        reader.kill()
        reader.wait()
    mirror._requests.poll(1.0)
    assert sent[-1]["processes"] == [1, 2]
    mirror._requests.poll(10.0)
    assert sent[-1]["processes"] == [1]
    MirrorState(mirror.directory, 0).subscribe([])
    mirror._requests.poll(10.1)
    assert sent[-1]["processes"] == []
    count = len(sent)
    mirror._requests.poll(20.0)
    assert len(sent) == count


def test_a_request_that_fails_on_a_machine_is_reported(mirror: Mirror, sent: list[dict[str, Any]]) -> None:
    reader = MirrorState(mirror.directory, 0)
    for error in (None, "no training\x1b process is running"):
        reader.send_request({"ask": "mode", "mode": "dp"})
        mirror._requests.poll(0.0)
        mirror._write_state_file()
        assert reader.replies() == NodeReplies(0, 1)
        send(mirror, {"answer": sent[-1]["id"], **({"count": 1} if error is None else {"error": error})})
        mirror._write_state_file()
        assert reader.replies() == NodeReplies(
            1, 1, {} if error is None else {"gpu-0": "no training\ufffd process is running"}
        )
    reader.send_request({"ask": "stop"})
    mirror._requests.poll(0.0)
    mirror._handle_report(LinkClosed(0, "the connection was cut", False))
    mirror._write_state_file()
    assert reader.replies() == NodeReplies(1, 1, {"gpu-0": "it was disconnected before it replied"})


def test_a_machine_that_ends_when_it_is_stopped_has_not_failed(mirror: Mirror, sent: list[dict[str, Any]]) -> None:
    reader = MirrorState(mirror.directory, 0)
    reader.send_request({"ask": "stop"})
    mirror._requests.poll(0.0)
    assert sent[-1]["ask"] == "stop"
    send(mirror, beat(0, 0, exit={"status": 1, "stopped": True, "seconds": 1.0}))
    assert mirror._commit()
    mirror._write_state_file()
    assert reader.replies() == NodeReplies(1, 1)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("", "it did not answer in time"),
        ("error", "no room"),
        ("cut", "it was disconnected before it replied"),
        ("away", "it is not connected"),
    ],
)
def test_an_answer_about_a_stall_names_the_machines_without_one(
    mirror: Mirror, sent: list[dict[str, Any]], what: str, why: str
) -> None:
    cut = LinkClosed(0, "the connection was cut", False)
    if what == "away":
        mirror._handle_report(cut)
    number = request_reply(mirror.directory)
    mirror._requests.poll(0.0)
    if what == "cut":
        mirror._handle_report(cut)
    elif what:
        send(mirror, {"answer": number, "error": "no room"})
    mirror._requests.poll(8.0)
    found = read_reply(mirror.directory, number)
    assert found is not None
    assert found.without == (f"gpu-0: {why}",)
    assert (f"  gpu-0: {why}", "") in format_report(found)
    assert len(sent) > 0


def test_a_question_about_a_stall_waits_for_machines_that_were_not_tried_yet(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror.links, "send", lambda *_: True)
    number = request_reply(mirror.directory)
    mirror._requests.poll(0.0)
    assert not (mirror.directory / ANSWER_FILE).exists()
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, beat(0, 0))
    mirror._requests.poll(0.1)
    send(mirror, {"answer": number, "why": to_json(StallReport(1.0, None, None, (RankReport(pid=1),)))})
    mirror._requests.poll(0.2)
    found = read_reply(mirror.directory, number)
    assert found is not None
    assert found.without == ()


def test_a_question_that_no_machine_can_answer_is_answered(mirror: Mirror) -> None:
    number = request_reply(mirror.directory)
    long_ago = number - 4 * 10**9
    os.utime(mirror.directory / ASKED_FILE, ns=(long_ago, long_ago))
    mirror._requests.poll(0.0)
    found = read_reply(mirror.directory, long_ago)
    assert found is not None
    assert found.without == ("gpu-0: it is not connected",)
    lines = [text for text, _ in format_report(found)]
    assert lines == ["no rank has answered", "", "no stacks from:", "  gpu-0: it is not connected"]


def test_another_request_does_not_cut_off_the_answers_about_a_stall(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror.links, "send", lambda *_: True)
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, beat(0, 0))
    number = request_reply(mirror.directory)
    mirror._requests.poll(0.0)
    MirrorState(mirror.directory, 0).send_request({"ask": "sample"})
    mirror._requests.poll(0.1)
    assert not (mirror.directory / ANSWER_FILE).exists()
    send(mirror, {"answer": number, "why": to_json(StallReport(1.0, 0.5, "it waits", ()))})
    mirror._requests.poll(0.2)
    found = read_reply(mirror.directory, number)
    assert found is not None
    assert found.text == "gpu-0: it waits"


@pytest.mark.parametrize(
    ("exits", "status", "unknown"),
    [
        ([0, 0], 0, None),
        ([0, 3], 3, None),
        ([None, 3], 3, None),
        ([0, None], None, "how it ended on gpu-1 is unknown"),
    ],
)
def test_a_run_ends_well_if_it_does_on_all_machines(
    tmp_path: Path, exits: list[int | None], status: int | None, unknown: str | None
) -> None:
    words = [[f"gpu-{number}", "r", "false"] for number in range(2)]
    mirror = Mirror(tmp_path, mirror_run_info(2), words)
    for number, each in enumerate(exits):
        mirror._handle_report(LinkOpened(number, MARKER))
        line = beat(0, 0, exit={"status": each, "seconds": 1.0})
        mirror._handle_report(LineReceived(number, json.dumps(line).encode()))
    assert mirror._commit()
    mirror._record_run_exit()
    mirror.links.close_all()
    mirror.history.close()
    how = load_exit(tmp_path)
    assert how is not None
    assert (how.status, how.unknown) == (status, unknown)


def test_a_machine_that_was_never_reached_does_not_hold_up_the_end(tmp_path: Path) -> None:
    words = [["gpu-0", "r", "false"], ["gpu-1", "job=slurm:1", "ssh", "gpu-1", "dpmon"]]
    mirror = Mirror(tmp_path, mirror_run_info(2), words)
    there, away = mirror.peers
    mirror._handle_report(LinkOpened(0, MARKER))
    send(mirror, beat(0, 0, exit={"status": 0, "seconds": 1.0}))
    assert not away.is_over
    mirror._handle_report(LinkClosed(1, "it cannot be reached", False))
    assert (away.node.state, away.node.why) == ("connecting", "it cannot be reached")
    assert mirror._commit()
    assert there.is_over
    assert away.is_over
    mirror._record_run_exit()
    how = load_exit(tmp_path)
    assert how is not None
    assert how.status == 0
    assert (away.node.state, away.node.why) == ("refused", "it cannot be reached")
    mirror.links.close_all()
    mirror.history.close()


def test_a_machine_that_is_reached_at_last_is_followed_by_its_run(tmp_path: Path) -> None:
    words = [["gpu-0", "job=slurm:1", "ssh", "gpu-0", "dpmon"]]
    mirror = Mirror(tmp_path, mirror_run_info(1), words)
    machine = mirror.peers[0]
    assert mirror.links._command(0)[-4:] == ["export", "job=slurm:1", "--follow", "--rollups"]
    mirror._handle_report(LinkOpened(0, MARKER))
    assert machine.node.why == "it has not named its run"
    run = "20260101-000000-train-0001"
    mirror._handle_report(LinkOpened(0, {**MARKER, "run": run}))
    send(mirror, beat(0, 0))
    assert machine.node.state == "connected"
    mirror._handle_report(LinkClosed(0, "the connection was cut", False))
    assert (machine.node.state, machine.is_over) == ("cut", False)
    assert mirror.links._command(0)[-4:] == ["export", run, "--follow", "--rollups"]
    mirror.links.close_all()
    mirror.history.close()


@pytest.mark.parametrize(
    ("others", "word"), [({"status": 1, "stopped": True}, "stopped"), ({"status": 1, "stopped": False}, "failed")]
)
def test_a_run_that_its_user_stopped_on_the_machines_was_stopped(
    tmp_path: Path, others: dict[str, Any], word: str
) -> None:
    """A failure on another machine is no such end, whichever came first."""
    words = [[f"gpu-{number}", "r", "false"] for number in range(2)]
    mirror = Mirror(tmp_path, mirror_run_info(2), words)
    for number, how in enumerate([{"status": 1, "stopped": True}, others]):
        mirror._handle_report(LinkOpened(number, MARKER))
        line = beat(0, 0, exit={"seconds": 1.0, "cause": "SignalException", **how})
        mirror._handle_report(LineReceived(number, json.dumps(line).encode()))
    assert mirror._commit()
    mirror._record_run_exit()
    assert json.loads(mirror.peers[0].node.exit or "")["stopped"]
    mirror.links.close_all()
    mirror.history.close()
    how_ended = load_exit(tmp_path)
    assert how_ended is not None
    assert outcome_word(how_ended) == word
    write_info(tmp_path, mirror.info)
    with open_store(tmp_path) as store:
        assert [one.stopped for one in read_nodes(store)] == [True, others["stopped"]]


@pytest.mark.parametrize(("asleep_s", "state"), [(0, "connected"), (10, "connected"), (3600, "refused")])
def test_a_machine_whose_times_have_moved_is_left_out(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, asleep_s: int, state: str
) -> None:
    """This machine's clock stood still for some time, as in a suspended laptop."""
    now_ns, there_ns = 7_000 * 10**9, 5_000 * 10**9
    monkeypatch.setattr(mirror, "now_ns", lambda: now_ns)
    monkeypatch.setattr(mirror.links, "send", lambda *_: True)
    for asleep in (0, asleep_s):
        mirror._handle_report(LinkOpened(0, MARKER))
        for _ in range(3):
            answer = {"answer": mirror.peers[0].clock_request[0], "now_ns": there_ns + asleep * 10**9}
            send(mirror, answer)
        send(mirror, beat(0, 0))
    assert mirror.peers[0].node.state == state
    assert mirror.peers[0].node.shift_s == 2000


def test_a_machine_cannot_fill_the_log(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dpmon.mirror.mirror.MAX_LOG_BYTES", 3000)
    for _ in range(100):
        mirror._handle_report(LinkOpened(0, MARKER))
        send(mirror, RING, UNUSABLE, beat(0, 1))
        assert mirror._commit()
    mirror._reject_node(mirror.peers[0], "x" * 100_000)
    logged = capfd.readouterr().err
    assert "gpu-0: TypeError: " in logged
    assert 3000 <= len(logged) < 3100
    monkeypatch.setattr("dpmon.mirror.mirror.MAX_LOG_BYTES", 1 << 20)
    mirror._reject_node(mirror.peers[0], "x" * 100_000)
    assert 500 < len(capfd.readouterr().err) < 1100


def test_a_machine_cannot_fill_the_files_beside_the_history(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmon.mirror.mirror_run.MAX_OUTPUT_BYTES", 1 << 18)
    rings = [{"name": f"process-{number}.ring", "process": number, "rank": number} for number in range(1000)]
    mirror._handle_report(LinkOpened(0, {**MARKER, "command": ["x" * 100_000] * 1000, "script": "x" * 100_000}))
    send(mirror, row_line("rings", *rings), beat(0, 1))
    long = "x" * 100_000
    for number in range(1, 40):
        doing = {f"{number} {rank} {long[:100]}": {str(rank): number} for rank in range(1000)}
        ranks = tuple(RankActivity(pid=rank, rank=rank, why_no_stack=long[:500]) for rank in range(100))
        send(mirror, {"standing": to_json(NodeActivities(1, ranks)), "age_s": 1.0})
        pause = [True, True, number]
        more = {"doing": doing, "refusal": long, "stage": [long, 1], "pause": pause, "output_at": number}
        send(mirror, beat(number, number + 1, output="\n" * 100_000 if number % 2 else long, **more))
        mirror.stall_detector.poll()
        assert mirror._commit()
        mirror._write_state_file()
        own_files = [path for path in mirror.directory.iterdir() if "history" not in path.name]
        files = {path.name: path.stat().st_blocks * 512 for path in own_files}
        assert {"output.log", "nodes.json"} <= files.keys()
        assert max(files.values()) < 2 << 20, files
        assert len(files) < 10
