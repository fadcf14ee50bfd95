"""The commands that bring lines from other machines, as real processes that behave well or badly."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpmon.mirror import node_links as module
from dpmon.mirror.disconnect_reasons import explain_disconnect
from dpmon.mirror.node_links import MAX_LINE_BYTES, LineReceived, LinkClosed, LinkOpened, NodeLinks, Report
from dpmon.run import proc
from support.run_harness import wait_for, wait_until_no_command_is_left

MARK = """echo 'dpmon-records {"run": "r", "host": "h"}'"""
Start = Callable[..., NodeLinks]


def shell(text: str) -> list[str]:
    """Return a command that runs lines of sh."""
    return ["sh", "-c", text]


def python(text: str) -> list[str]:
    """Return a command that runs lines of Python."""
    return [sys.executable, "-I", "-S", "-c", text]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that makes NodeLinks of words per machine; they are closed at the end, and leave nothing."""
    made: list[NodeLinks] = []

    def links(*commands: list[str], silent_s: float = 100.0, once: bool = False) -> NodeLinks:
        made.append(NodeLinks(len(commands), lambda node: commands[node], once=once, silent_s=silent_s))
        return made[-1]

    yield links
    for one in made:
        one.close_all()
    wait_until_no_command_is_left()


def until(links: NodeLinks, condition: Callable[[list[Report]], object]) -> list[Report]:
    """Return everything that came, up to the first time when `condition` holds for it."""
    reports: list[Report] = []

    def more() -> bool:
        reports.extend(links.poll(0.05))
        return bool(condition(reports))

    wait_for(more, what="the reports")
    return reports


def closed(reports: list[Report], node: int = 0) -> LinkClosed | None:
    """Return the first end of a machine's command."""
    return next((one for one in reports if isinstance(one, LinkClosed) and one.node == node), None)


def end_of(links: NodeLinks, node: int = 0) -> LinkClosed:
    """Return the first end of a machine's command, after waiting for it."""
    found = closed(until(links, lambda reports: closed(reports, node)), node)
    assert found is not None
    return found


def lines(reports: list[Report]) -> list[bytes]:
    """Return the texts of the lines."""
    return [one.text for one in reports if isinstance(one, LineReceived)]


def test_a_banner_comes_before_the_header_and_lines_after_it(start: Start) -> None:
    links = start(shell(f"echo Welcome; printf 'no line end: '; {MARK}; echo one; echo two; exec sleep 100"))
    reports = until(links, lambda reports: len(lines(reports)) == 2)
    assert reports == [LinkOpened(0, {"run": "r", "host": "h"}), LineReceived(0, b"one"), LineReceived(0, b"two")]


def test_a_line_that_comes_in_parts_is_one_line(start: Start) -> None:
    text = f"{MARK}; printf 'ab'; sleep 0.3; printf 'cd\\n\\nlast half'; exec sleep 100"
    reports = until(start(shell(text)), lambda reports: len(lines(reports)) == 2)
    assert lines(reports) == [b"abcd", b""]


def test_half_a_line_at_the_end_is_no_line(start: Start) -> None:
    reports = until(start(shell(f"{MARK}; echo whole; printf half")), closed)
    assert lines(reports) == [b"whole"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo hello; exit 0", "the command ended with status 0: hello"),
        ("echo hello; echo ' I am \x1b[2J\x07 bad' >&2; exit 3", "the command ended with status 3: I am �[2J� bad"),
        ("echo 'dpmon-records {\"run\":'", 'the command ended with status 0: dpmon-records {"run":'),
        ("echo 'dpmon-records {rubbish}'; sleep 100", "it does not send the records of dpmon"),
        ('echo \'dpmon-records {"a": ' + "[" * 3000 + "}'; sleep 100", "it does not send the records of dpmon"),
        ("kill -9 $$", "the command was ended by SIGKILL"),
        (f"{MARK}; exit 1", "the connection was closed"),
        (
            "echo 'ssh: connect to host x port 22: Connection refused' >&2; exit 255",
            "it refused the connection: no ssh",
        ),
        ("head -c 100000 /dev/zero | tr '\\0' x; sleep 100", "it printed more than 64 KiB before any record"),
        ("yes; sleep 100", "it printed more than 64 KiB before any record"),
        (f"{MARK}; head -c 1500000 /dev/zero; sleep 100", "it sent a line of more than 1 MiB"),
    ],
)
def test_a_command_that_may_succeed_later_is_started_again(start: Start, text: str, why: str) -> None:
    found = end_of(start(shell(text)))
    assert found.why.startswith(why)
    assert not found.for_good


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exec dpmon-that-is-not-there export", "dpmon is not there, or not in the PATH of its commands"),
        ("echo 'root@h: Permission denied (publickey,password).' >&2; exit 255", "it asks for a password, or refuses"),
        ("echo 'Host key verification failed.' >&2; exit 255", "its host key is unknown or has changed: connect to it"),
        ("echo 'srun: error: Slurm job 12 has expired' >&2; exit 1", "its Slurm job has ended: its last records may"),
        ("echo \"dpmon: there is no run 'x'; bad \x1b[1m\" >&2; exit 2", "there is no run 'x'; bad �[1m"),
        ("echo 'dpmon: unknown option --follow' >&2; exit 2", "its dpmon is of another version: update it"),
    ],
)
def test_a_command_that_cannot_succeed_is_not_started_again(start: Start, text: str, why: str) -> None:
    links = start(shell(text))
    found = end_of(links)
    assert found.why.startswith(why)
    assert found.for_good
    assert not links._idle


def test_a_program_that_is_not_here_is_named(start: Start) -> None:
    assert end_of(start(["no-such-ssh", "host"])) == LinkClosed(
        0, "no-such-ssh cannot be started: No such file or directory", True
    )


def test_what_worked_before_is_tried_again(start: Start) -> None:
    refused = "echo 'a@b: Permission denied (publickey).' >&2; exit 255"
    assert not end_of(start(shell(f"{MARK}; sleep 0.2; {refused}"))).for_good


def test_a_gigabyte_in_one_line_is_not_kept(start: Start) -> None:
    """The command is ended after the first MiB, so it is at the write that its pipe does not take."""
    text = (
        "import os, sys\nos.write(1, b'dpmon-records {}\\n')\nsent = 0\ntry:\n"
        "  while sent < 1 << 30: sent += os.write(1, bytes(1 << 16))\nfinally: open(sys.argv[1], 'w').write(str(sent))"
    )
    links = start(python(text))
    opened = until(links, lambda reports: reports)
    assert isinstance(opened[0], LinkOpened)
    assert end_of(links).why == "it sent a line of more than 1 MiB"
    assert len(links._links[0].partial_line) == 0


def test_one_long_line_of_the_allowed_length_is_passed_on(start: Start) -> None:
    text = f"import os, time\nprint('dpmon-records {{}}')\nprint('x' * {MAX_LINE_BYTES}, flush=True)\ntime.sleep(100)"
    reports = until(start(python(text)), lines)
    assert [len(line) for line in lines(reports)] == [MAX_LINE_BYTES]


def test_a_silent_command_is_ended_and_the_others_go_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONNECT_S", 5.0)
    beats = f"{MARK}; while :; do echo beat; sleep 0.1; done"
    deaf = "trap '' TERM; echo Welcome; while :; do sleep 1; done"
    links = start(shell(f"{MARK}; echo one; exec sleep 100"), shell(deaf), shell(beats), silent_s=5.0)
    reports = until(links, lambda reports: closed(reports, 0) and closed(reports, 1))
    assert closed(reports, 0) == LinkClosed(0, "it has sent nothing for 5 s", False)
    assert closed(reports, 1) == LinkClosed(1, "it did not answer within 5 s", False)
    assert closed(reports, 2) is None
    until(links, lambda reports: LineReceived(2, b"beat") in reports)
    wait_for(lambda: links.poll(0.05) is not None and not links._leaving, what="the end of the deaf command")


def test_a_stop_of_this_process_does_not_look_like_silence(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process is stopped during a wait, the wait returns without the data that came meanwhile."""
    links = start(shell(f"{MARK}; read line; echo one; exec sleep 100"), silent_s=5.0)
    until(links, lambda reports: reports)
    clock, wait, asleep_s = time.monotonic, links._selector.select, 0.0

    def stopped(timeout: float) -> list[object]:
        nonlocal asleep_s
        monkeypatch.setattr(links._selector, "select", wait)
        assert links.send(0, "go on")
        wait_for(lambda: wait(0), what="the answer")
        asleep_s = 60.0
        return []

    monkeypatch.setattr(links._selector, "select", stopped)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + asleep_s)
    assert until(links, lambda reports: reports) == [LineReceived(0, b"one")]


def test_no_command_is_left_if_this_process_was_stopped_while_it_ended_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = start(shell(f"trap '' TERM; {MARK}; while :; do sleep 1; done"))
    until(links, lambda reports: reports)
    monkeypatch.setattr(module, "_GRACE_S", 0.0)  # as if this process was stopped until the limit had passed
    links.close_all()
    monkeypatch.undo()
    wait_until_no_command_is_left()


def test_stderr_that_fills_does_not_stop_a_command(start: Start) -> None:
    text = f"{MARK}; head -c 3000000 /dev/zero | tr '\\0' e >&2; echo after; sleep 100"
    links = start(shell(text))
    assert lines(until(links, lines)) == [b"after"]
    assert len(links._links[0].stderr) <= 4096


def test_sending_never_waits(start: Start) -> None:
    links = start(shell(f"{MARK}; exec sleep 100"), shell(f"{MARK}; read line; echo got $line; exec sleep 100"))
    assert not links.send(0, "before it is open")
    until(links, lambda reports: sum(isinstance(one, LinkOpened) for one in reports) == 2)
    assert links.send(1, '{"ask": "time"}')
    assert lines(until(links, lines)) == [b'got {"ask": "time"}']
    began, sent = time.monotonic(), 0
    while links.send(0, "x" * 1000):
        sent += 1
        assert sent < 1000
    assert sent > 10  # a full pipe
    assert time.monotonic() - began < 60


def test_a_full_pipe_takes_whole_lines(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    text = f"{MARK}; until [ -e {go} ]; do sleep 0.05; done; n=0; while read l; do n=$((n + 1)); echo $n; done"
    links = start(shell(text))
    until(links, lambda reports: reports)
    sent = 0
    while links.send(0, "x" * 1000):
        sent += 1
    go.touch()
    assert lines(until(links, lambda reports: len(lines(reports)) == sent))[-1] == str(sent).encode()


def test_a_command_that_closes_its_input_cannot_be_sent_to(start: Start) -> None:
    links = start(shell(f"{MARK}; exec <&-; echo closed; exec sleep 100"))
    until(links, lines)
    assert not links.send(0, "anybody?")
    assert not links.send(0, "anybody?")
    assert not links.poll(0.3)


def test_at_most_eight_commands_start_at_a_time(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    text = f"echo > {tmp_path}/at-$$; until [ -e {go} ]; do sleep 0.05; done; {MARK}; exec sleep 100"
    links = start(*[shell(text)] * 20)
    wait_for(lambda: links.poll(0.05) is not None and len(list(tmp_path.glob("at-*"))) == 8, what="eight commands")
    assert not links.poll(0.3)
    assert len(list(tmp_path.glob("at-*"))) == 8
    go.touch()
    reports = until(links, lambda reports: len(reports) == 20)
    assert sorted(one.node for one in reports) == list(range(20))


def test_waits_between_starts_grow_and_are_not_all_alike(start: Start) -> None:
    links = start(*[shell("exit 1")] * 8)
    for failures in range(1, 8):
        for link in links._links:
            link.start_at_s = 0.0
        due: dict[int, float] = {}

        def all_ended(reports: list[Report], due: dict[int, float] = due) -> bool:
            for link in (links._links[one.node] for one in reports if one.node not in due):
                due[link.node], link.start_at_s = (
                    link.start_at_s,
                    math.inf,
                )  # none starts again before the last one has ended
            return len(due) == 8

        began = time.monotonic()
        until(links, all_ended)
        assert {link.failures for link in links._links} == {failures}
        longest = min(2 ** (failures - 1), 30)
        assert len(set(due.values())) == 8
        assert min(due.values()) - began > longest / 2
        assert max(due.values()) - time.monotonic() < longest


def test_a_machine_that_is_away_for_days_is_still_tried(start: Start) -> None:
    links = start(shell("exit 1"))
    links._links[0].failures = 5000
    end_of(links)
    assert links._links[0].start_at_s < time.monotonic() + 30


def test_a_command_that_has_ended_is_not_planned_twice(start: Start) -> None:
    links = start(shell(f"{MARK}; exec sleep 100"))
    until(links, lambda reports: reports)
    for _ in range(3):
        assert links.close_link(0, "rubbish", for_good=False) == LinkClosed(0, "rubbish", False)
    assert links._idle == [links._links[0]]
    assert links._links[0].failures == 1
    links.close_link(0, "", for_good=True)
    assert not links._idle


def test_a_connection_that_worked_is_tried_again_soon(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_STEADY_S", 0.1)
    go = tmp_path / "go"
    links = start(shell(f"{MARK}; until [ -e {go} ]; do sleep 0.05; done; exit 1"))
    links._links[0].failures = 9
    until(links, lambda reports: reports and time.monotonic() - links._links[0].start_s > 0.1)
    go.touch()
    end_of(links)
    assert links._links[0].failures == 1
    assert isinstance(until(links, lambda reports: reports)[0], LinkOpened)


def test_what_a_command_started_ends_with_it(start: Start, tmp_path: Path) -> None:
    links = start(shell(f"sleep 1000 & echo $! > {tmp_path}/pid; {MARK}; wait"))
    until(links, lambda reports: reports)
    pid = int((tmp_path / "pid").read_text())
    links.close_all()
    wait_for(lambda: not proc.is_alive(pid, None), what="the end of the child")


def test_a_command_ends_with_our_decision_and_stays_ended(start: Start) -> None:
    links = start(shell(f"{MARK}; exec sleep 100"))
    until(links, lambda reports: reports)
    assert links.close_link(0, "the run has ended", for_good=True) == LinkClosed(0, "the run has ended", True)
    assert not links.poll(0.3)
    assert not links._idle


def test_a_command_that_runs_once_needs_no_header(start: Start) -> None:
    links = start(shell("echo one; echo two >&2; printf half"), shell("sleep 100"), once=True, silent_s=5.0)
    reports = until(links, lambda reports: closed(reports, 0) and closed(reports, 1))
    assert lines(reports) == [b"one", b"half"]
    assert closed(reports, 0) == LinkClosed(0, "", True)
    assert closed(reports, 1) == LinkClosed(1, "it has sent nothing for 5 s", False)


@pytest.mark.parametrize(
    ("errors", "why"),
    [
        ("ssh: Could not resolve hostname nx: Name or service not known", "its name has no address: check the name"),
        ("ssh: connect to host h port 22: No route to host", "it cannot be reached"),
        ("Connection timed out during banner exchange", "it cannot be reached"),
        ("Timeout, server 10.0.0.2 not responding.", "the connection was cut"),
        ("client_loop: send disconnect: Broken pipe", "the connection was cut"),
        ("slurmstepd: error: execve(): dpmon: No such file or directory", "dpmon is not there, or not in the PATH"),
        ('exec failed: exec: "dpmon": executable file not found in $PATH: unknown', "dpmon is not there, or not in"),
        ("bash: line 1: dpmon: command not found", "dpmon is not there, or not in the PATH of its commands"),
        ("first\nlast words", "the command ended with status 255: last words"),
        ("x" * 5000, "the command ended with status 255: xxx"),
    ],
)
def test_messages_of_the_ways_to_a_machine_are_understood(errors: str, why: str) -> None:
    found, _ = explain_disconnect(255, errors.encode(), b"", was_open=False)
    assert found.startswith(why)
    assert len(found) < 400
