"""The records of a stall: its beginning, its end, and the change of the supervisor in between."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.run_directory import RunInfo, record_stop_request
from dpmon.span_ring import HeaderWord, SpanRing
from dpmon.stalls.rank_inspector import Counters, RankInspector, newest_process_per_rank
from dpmon.stalls.stacks import Frame, Stack
from dpmon.stalls.stall_detection import RankActivity
from dpmon.stalls.stall_report import StallReport, read_reply, request_reply
from dpmon.supervise import stall_watch
from dpmon.supervise.stall_watch import StallWatch

START = 1000 * SECOND
INFO = RunInfo("", "n", ("c",), "s", "/job", None, 1e9, START, "", True)
SAVES = Stack((Frame("save", "/job/train.py", 4),))
STUCK = RankActivity(7, 0, since_ns=START + SECOND, step=3, busy=False, stack=SAVES, job=7)
TEXT = "in save (train.py:4)"


class Watched:
    """A watch over ranks that the test sets, at times that it sets."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch, before: Mapping[str, Any] | None = None) -> None:
        self.ranks = [STUCK]
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.taken = 0
        self._now = 0
        patch.setattr(time, "monotonic_ns", lambda: self._now)
        drain: Any = SimpleNamespace(
            emit=lambda kind, data: self.told.append((kind, data)),
            last_steps=dict,
            gpus=list,
            last_stall=lambda: before,
        )
        self.watch = StallWatch(place, INFO, drain, is_takeover=True)
        patch.setattr(self.watch._inspector, "inspect_ranks", lambda steps, now: self.ranks)
        patch.setattr(self.watch, "_start_taking_stacks", self._take)
        self.place = place

    def _take(self, asked: int | None) -> None:
        self.taken += 1

    def answer(self, seconds: float) -> StallReport:
        """The answer to a request, at a time in seconds since the start."""
        number = request_reply(self.place)
        self.look(seconds)
        self.watch._requested_stacks = number, {}
        self.look(seconds)
        found = read_reply(self.place, number)
        assert found is not None
        return found

    def look(self, seconds: float) -> None:
        """Look at a time in seconds since the start."""
        self._now = START + int(seconds * SECOND)
        self.watch.poll()

    def texts(self) -> list[tuple[float, float | None, str]]:
        return [(data["since_s"], data.get("lasted_s"), data["text"]) for _, data in self.told]


def test_a_stall_has_a_record_at_its_beginning_and_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(tmp_path, monkeypatch)
    for at in range(30):
        run.look(at)
    assert run.texts() == [(1.0, None, TEXT)]
    assert run.told[0][1]["t_s"] == 11.0
    assert 0 < run.taken < 5
    run.ranks = [STUCK._replace(since_ns=START + 30 * SECOND)]
    run.look(31)
    run.look(32)
    assert run.texts() == [(1.0, None, TEXT), (1.0, 30.0, TEXT)]
    for at in range(33, 300):  # it may take three times as long there now
        run.look(at)
    assert [since for since, _, _ in run.texts()] == [1.0, 1.0, 30.0]
    assert run.told[-1][1]["t_s"] == pytest.approx(30 + 3 * 29, abs=1)


def test_what_the_ranks_do_after_a_stop_ends_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank moves, raises and ends; the run still ends in its stall, with its cause."""
    run = Watched(tmp_path, monkeypatch)
    for at in range(20):
        run.look(at)
    assert run.texts() == [(1.0, None, TEXT)]
    record_stop_request(tmp_path)
    for moved in ({"since_ns": START + 20 * SECOND}, {"doing": "ended", "raised": "KeyboardInterrupt (train.py:4)"}):
        run.ranks = [STUCK._replace(**moved), STUCK._replace(pid=8)]
        for at in range(20, 25):
            run.look(at)
    assert run.texts() == [(1.0, None, TEXT)]


def test_nothing_is_named_without_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(tmp_path, monkeypatch)
    run.ranks = [STUCK._replace(stack=None)]
    for at in range(20):
        run.look(at)
    assert run.told == []
    assert run.taken > 5
    run.ranks = [STUCK._replace(stack=None, why_no_stack="py-spy is not installed")]
    run.look(20)
    assert run.texts() == [(1.0, None, "in the script")]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_new_supervisor_goes_on_with_the_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    run = Watched(tmp_path, monkeypatch, {"since_s": 1.0, "text": TEXT})
    run.ranks = [STUCK._replace(busy=None)]  # no sign of life is known yet
    for at in range(40, 45):
        run.look(at)
    assert run.told == []
    run.ranks = [STUCK._replace(since_ns=START + 45 * SECOND) if resumed else STUCK]
    run.look(46)
    assert run.texts() == ([(1.0, 45.0, TEXT)] if resumed else [])


def test_what_waited_for_another_rank_is_not_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(tmp_path, monkeypatch)
    waits = STUCK._replace(pid=8, rank=1, world=2, doing="backward", stack=None, job=0)
    works = STUCK._replace(pid=9, rank=0, world=2, job=0, busy=True)
    run.ranks = [waits, works]
    run.look(60)
    run.ranks = [each._replace(since_ns=START + 60 * SECOND) for each in run.ranks]
    run.look(61)
    assert run.watch._durations.learned_ns(waits) == 0
    assert run.watch._durations.learned_ns(works) == 3 * 59 * SECOND


@pytest.mark.parametrize("state", ["sleeping", "stopped"])
def test_the_time_of_a_stopped_process_is_not_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    run = Watched(tmp_path, monkeypatch)
    run.ranks = [STUCK._replace(state=state)]
    run.look(60)
    run.ranks = [STUCK._replace(since_ns=START + 60 * SECOND)]
    run.look(61)
    assert (run.watch._durations.learned_ns(STUCK) > 0) == (state == "sleeping")


def test_the_wait_for_the_first_batch_is_learned_before_there_is_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = [
        (7, -12, "waiting for data: the first batch of Samples"),
        (8, 0, "importing torch"),
        (7, 1, "in the script"),
    ]
    lines = [f"{pid} {START + seconds * SECOND} {text}\n" for pid, seconds, text in notes]
    (tmp_path / "stages.log").write_text("".join(lines))
    run = Watched(tmp_path, monkeypatch)
    run.look(1)
    first = STUCK._replace(doing="data", loop_begins=True)
    assert run.watch._durations.learned_ns(first) == 3 * 13 * SECOND
    assert run.watch._durations.learned_ns(first._replace(loop_begins=False)) == 0


def test_a_wait_for_a_line_of_input_is_not_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(tmp_path, monkeypatch)
    monkeypatch.setattr(stall_watch, "input_wait_start_ns", lambda directory: START)
    run.look(60)
    assert run.told == []
    run.ranks = [STUCK._replace(since_ns=START + 60 * SECOND)]
    run.look(61)
    assert run.watch._durations.learned_ns(STUCK) == 0


def test_a_fault_of_the_watch_leaves_the_supervisor_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(tmp_path, monkeypatch)
    monkeypatch.setattr(run.watch._inspector, "inspect_ranks", lambda steps, now: 1 // 0)
    for at in range(5):
        run.look(at)
    assert [(kind, data["text"]) for kind, data in run.told] == [
        ("warning", "stalls are no longer detected: ZeroDivisionError: integer division or modulo by zero")
    ]


@pytest.mark.parametrize(
    ("doing", "raised", "lasted"), [("gone", None, []), ("ended", "KeyboardInterrupt", []), ("ended", None, [49.0])]
)
def test_the_death_of_all_processes_is_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str, raised: str | None, lasted: list[float]
) -> None:
    """A launcher may live on for some seconds: the run has not resumed."""
    run = Watched(tmp_path, monkeypatch)
    run.look(30)
    monkeypatch.setattr(
        run.watch._inspector, "with_exceptions", lambda ranks: [each._replace(raised=raised) for each in ranks]
    )
    run.ranks = [STUCK._replace(doing=doing)]
    run.look(50)
    run.look(51)
    assert [data["lasted_s"] for _, data in run.told if "lasted_s" in data] == lasted


def test_a_sign_of_life_is_an_average() -> None:
    first = Counters(0, 1.0, 10, 0)
    assert not Counters(10 * SECOND, 1.3, 12, 1000).busy_since(first)
    assert Counters(10 * SECOND, 1.6, 12, 1000).busy_since(first)
    assert Counters(10 * SECOND, 1.0, 300, 1000).busy_since(first)
    assert Counters(10 * SECOND, 1.0, 12, 10 << 20).busy_since(first)


def test_another_process_with_the_same_number_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SpanRing(str(tmp_path / "process-0.ring"), process=0, slots=64)
    look = RankInspector(tmp_path, "")
    assert look.inspect_ranks({}, time.monotonic_ns())[0].state != "gone"
    me = proc.read_process(os.getpid())
    assert me is not None
    monkeypatch.setattr(proc, "read_process", lambda pid: replace(me, start_s=me.start_s + 5))
    assert look.inspect_ranks({}, time.monotonic_ns())[0].state == "gone"
    assert look.take_stacks() == {}
    look.close()


def test_a_loop_begins_until_its_second_step(tmp_path: Path) -> None:
    ring = SpanRing(str(tmp_path / "process-0.ring"), process=0, slots=64)
    look = RankInspector(tmp_path, "")
    begins = []
    for step, over in ((None, 0), (3, 0), (59, 5), (60, 5), (61, 5), (61, 9), (62, 9), (63, 9)):
        ring.words[HeaderWord.LAST_LOOP_END] = over
        begins.append(look.inspect_ranks({0: step}, time.monotonic_ns())[0].loop_begins)
    look.close()
    assert begins == [False, False, True, True, False, True, True, False]


def test_a_restarted_job_leaves_no_rank_behind() -> None:
    gone = [RankActivity(pid, pid, rank, 2, "gone") for pid, rank in ((1, 0), (2, 1))]
    new = [RankActivity(pid, pid, rank, 2) for pid, rank in ((4, 1), (3, 0))]
    assert [rank.pid for rank in newest_process_per_rank([*gone, *new])] == [3, 4]
    both = newest_process_per_rank([*(rank._replace(doing="other") for rank in gone), *new])
    assert [(rank.pid, rank.namesake) for rank in both] == [(1, True), (3, True), (2, True), (4, True)]
    alone = newest_process_per_rank([RankActivity(9, 0, doing="ended"), *new])
    assert [rank.pid for rank in alone] == [3, 4]
