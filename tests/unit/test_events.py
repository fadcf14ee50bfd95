"""The events of a run: what they are, their ids, and the commands that are started for them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dpmon.model.findings.finding import Finding
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.run_analysis import RunAnalysis
from dpmon.notify.notifier import NotificationCommands, SentLog, to_cloudevent
from dpmon.notify.run_notifications import Notification, find_notifications
from dpmon.record.schema import SECOND
from dpmon.report.health import Health
from dpmon.run.lifecycle import EVENTS_FILE, take_lock
from dpmon.supervise import start_supervisor
from dpmon.supervise.start_supervisor import NotifierLauncher
from support.history_builders import make_run_info
from support.run_harness import wait_for

TRAINING = Health("training", None)
RUN = "20261125-213000-train-3f2a"


def seen(*stalls: RecordedStall, newest_s: int = 40) -> RunAnalysis:
    """A state with these stalls; `newest_s`: end of the newest step."""
    return cast(RunAnalysis, SimpleNamespace(stalls=stalls, newest_ns=newest_s * SECOND))


def stalled(end_s: int | None = None) -> RecordedStall:
    end_ns = None if end_s is None else end_s * SECOND
    return RecordedStall(40 * SECOND, 52 * SECOND, end_ns, {"text": "rank 1 in save", "ranks": [{"rank": 1}]})


def finding(kind: str, weight: float = 0.5) -> Finding:
    return Finding(kind, "text", "ground", "advice", weight)


def ended(end: str) -> Health:
    return Health("ended", 99.0, "why", None, end)


STALLED = ("dpmon.run.stalled", str(40 * SECOND), 52.0)
RESUMED = ("dpmon.run.resumed", str(40 * SECOND), 70.0)
FAILED = ("dpmon.run.failed", "", 99.0)
BEGAN = ("dpmon.run.started", "", 0.0)


@pytest.mark.parametrize(
    ("state", "now", "found", "expected"),
    [
        (seen(), TRAINING, (), [BEGAN]),
        (seen(stalled()), Health("stalled", 40.0), (), [BEGAN, STALLED]),
        (seen(stalled(70)), TRAINING, (), [BEGAN, STALLED, RESUMED]),
        (seen(stalled(70)), ended("killed"), (), [BEGAN, STALLED, FAILED]),
        (seen(stalled(70), newest_s=75), ended("killed"), (), [BEGAN, STALLED, RESUMED, FAILED]),
        (seen(), TRAINING, (finding("data"),), [BEGAN, ("dpmon.finding", "data", None)]),
        (seen(), TRAINING, (finding("drift"),), [BEGAN, ("dpmon.run.slowed", "drift", None)]),
        (seen(), TRAINING, (finding("data", 0.1), finding("quiet"), finding("failed")), [BEGAN]),
        *((seen(), ended(end), (), [BEGAN, FAILED]) for end in ("failed", "lost", "ended")),
        *((seen(), ended(end), (), [BEGAN, ("dpmon.run.ended", "", 99.0)]) for end in ("finished", "stopped")),
    ],
)
def test_what_happened(state: RunAnalysis, now: Health, found: tuple[Finding, ...], expected: list[object]) -> None:
    events = list(find_notifications(state.stalls, state.newest_ns, now, 100.0, found))
    assert [(event.type, event.key, event.at_s) for event in events] == expected
    assert all(event.data["text"] for event in events)


def test_each_way_in_which_a_training_is_wrong_is_an_event() -> None:
    def keys(*names: str) -> list[str]:
        unused = f"No gradient has ever reached {', '.join(names)} of Net."
        texts = {"a look at its use": unused, "model.train()": "Net is in eval mode while it trains."}
        findings = [Finding("wrong", text, "at 3 looks", advice, 1.0) for advice, text in texts.items()]
        return [event.key for event in find_notifications((), -1, TRAINING, 100.0, findings)][1:]

    assert len({*keys("a", "b")}) == 2
    assert keys("a", "b") == keys("b"), "the same problem"


def test_the_end_of_a_stuck_run_names_its_cause() -> None:
    for stall in (stalled(), stalled(70)):
        *_, last = find_notifications([stall], seen(stall).newest_ns, ended("stopped"), 100.0)
        assert last.type == "dpmon.run.ended"
        assert last.data["text"].endswith(" s: rank 1 in save")
        assert "; ended in a stall of " in last.data["text"]


def test_alive_is_told_once_in_its_time_and_not_after_the_end() -> None:
    def alive(at_s: float, now: Health = TRAINING) -> list[str]:
        events = find_notifications([], -1, now, at_s, alive_s=60.0)
        return [each.key for each in events if each.type == "dpmon.run.alive"]

    assert [alive(at_s) for at_s in (0.0, 59.9, 60.0, 200.0)] == [["0"], ["0"], ["1"], ["3"]]
    assert alive(300.0, ended("finished")) == []


def test_an_event_is_a_cloud_event_without_control_characters() -> None:
    info = make_run_info(id=RUN, name="train", host="box7", started_unix=1.7e9)
    event = Notification("dpmon.run.stalled", "83", {"text": "rank 1 in \x1b[2Jsave"}, 83.5)
    found = to_cloudevent(event, event.id_in(RUN), info)
    assert {name: found[name] for name in ("specversion", "id", "source", "type", "subject", "time")} == {
        "specversion": "1.0",
        "id": f"{RUN}/dpmon.run.stalled/83",
        "source": "/dpmon/box7",
        "type": "dpmon.run.stalled",
        "subject": RUN,
        "time": "2023-11-14T22:14:43.500+00:00",
    }
    assert found["data"] == {"run": RUN, "name": "train-3f2a", "script": "linear.py", **event.data}


# ------------------------------------------------------------------------------------------------ commands


class Told:
    """A run's directory with a command for events, and what the command received."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self._monkeypatch = monkeypatch
        self.log = self.opened()

    def opened(self) -> SentLog:
        """The log, with its lock."""
        fd = take_lock(self.place, EVENTS_FILE)
        assert fd is not None
        return SentLog(fd)

    def commands(self, *command: str) -> NotificationCommands:
        """The commands of a run with this command for events."""
        self._monkeypatch.setenv(start_supervisor.START_DIRECTORY, str(self.place))
        return NotificationCommands(self.place, make_run_info(id=RUN, cwd="/elsewhere"), self.log, command)

    def shell(self, text: str) -> NotificationCommands:
        """The commands of a run with a shell script for events, which runs in this directory."""
        return self.commands("/bin/sh", "-c", text)

    @property
    def received(self) -> list[str]:
        """The types of the events that the command has received."""
        return [json.loads(line)["type"] for line in (self.place / "received").read_text().splitlines()]

    @property
    def warnings(self) -> list[str]:
        """The warnings of the run."""
        path = self.place / "warnings.log"
        return [line.split(" ", 2)[2] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    made = Told(tmp_path, monkeypatch)
    yield made
    os.close(made.log._fd)


def finish(commands: NotificationCommands) -> None:
    """Look until all commands have ended."""

    def idle() -> bool:
        commands.poll()
        return not commands.is_busy

    wait_for(idle)


def events(*types: str, **data: Any) -> list[Notification]:
    return [Notification(each, "", {"text": each, **data}) for each in types]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/bin/sh", "-c", "exit 3"], "the event command /bin/sh: it ended with status 3 (one)"),
        (["/no/where"], "the event command /no/where: it cannot be started: No such file or directory"),
        (["/etc/passwd"], "the event command /etc/passwd: it cannot be started: Permission denied"),
    ],
)
def test_a_command_that_fails_is_reported_once(told: Told, command: list[str], said: str) -> None:
    commands = told.commands(*command)
    commands.notify(events("one", "two"))
    finish(commands)
    assert told.warnings == [said]


# ------------------------------------------------------------------------------------------------ the process


def test_one_process_tells_and_it_is_started_again_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def begin(directory: Path, how: str, **_: Any) -> None:
        started.append(how)

    monkeypatch.setattr(start_supervisor, "_start", begin)
    warnings: list[str] = []
    keeper = NotifierLauncher(tmp_path, warnings.append, is_enabled=True)
    for now in range(100):
        keeper.poll(float(now))
    assert len(started) == 5  # at 0, 5, 15, 35 and 75
    lock = take_lock(tmp_path, EVENTS_FILE)
    assert lock is not None, "the starter keeps no copy of the lock"
    other = NotifierLauncher(tmp_path, warnings.append, is_enabled=True)
    other.poll(0.0)
    assert len(started) == 5, "another process tells the events"
    os.close(lock)
    NotifierLauncher(tmp_path, warnings.append, is_enabled=False).poll(0.0)
    assert len(started) == 5
    assert warnings == []
