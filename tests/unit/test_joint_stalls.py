"""The verdict over the ranks of several machines, from what the supervisor of each one writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.mirror import cross_node_stalls
from dpmon.mirror.cross_node_stalls import CrossNodeStallDetector
from dpmon.record.schema import SECOND
from dpmon.run.run_directory import RunInfo
from dpmon.stalls.stacks import Frame, ProcessStacks, Stack
from dpmon.stalls.stall_detection import ProcessGroupView, RankActivity
from dpmon.stalls.stall_report import STANDING_FILE, build_report
from dpmon.stalls.why_text import format_report
from dpmon.supervise import stall_watch
from dpmon.supervise.stall_watch import StallWatch

START = 1000 * SECOND
INFO = RunInfo("", "n", ("c",), "s", "/job", None, 1e9, START, "", True)
SAVES = Stack((Frame("save", "/job/train.py", 4), Frame("<module>", "/job/train.py", 90)))
TORCH = "/env/lib/python3.11/site-packages/torch"
BACKWARD = Stack(
    (
        Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 979),
        Frame("Tensor.backward", f"{TORCH}/_tensor.py", 623),
        Frame("main", "/job/train.py", 90),
    )
)
NAMES = ("gpu-1", "gpu-2")


def rank(number: int, stack: Stack | None = BACKWARD, sequence: int = 6, **more: Any) -> RankActivity:
    """One of four ranks, two on each machine; all of them have the same process ids on both."""
    facts = RankActivity(
        pid=100 + number % 2, process=number % 2, rank=number, world=4, since_ns=START + SECOND, step=60, busy=False,
        groups=(ProcessGroupView(1, 4, sequence),), stack=stack, doing="other" if stack is SAVES else "backward",
    )  # fmt: skip
    return facts._replace(**more)


class Machines:
    """Two machines, each with a real watch over its ranks, and the judge of both."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch, before: Mapping[str, Any] | None = None) -> None:
        self.now = 0.0
        clock = SimpleNamespace(monotonic_ns=lambda: START + int(self.now * SECOND), time=lambda: 1e9 + self.now)
        patch.setattr(stall_watch, "time", clock)
        patch.setattr(cross_node_stalls, "time", clock)
        self.ranks = [[rank(0), rank(1)], [rank(2), rank(3)]]
        self.told: list[list[Mapping[str, Any]]] = [[], [], []]
        self.places = [place / name for name in (*NAMES, "mirror")]
        for each in self.places:
            each.mkdir()
        self.watches = [StallWatch(self.places[node], INFO, self.record(node)) for node in range(2)]
        for node, watch in enumerate(self.watches):
            patch.setattr(watch._inspector, "inspect_ranks", lambda steps, now, node=node: self.ranks[node])
            patch.setattr(watch, "_start_taking_stacks", lambda asked: None)
        self.joint = CrossNodeStallDetector(
            self.places[2], INFO, self.record(2, before), 2, lambda node, process: 2 * node + process
        )

    def record(self, node: int, before: Mapping[str, Any] | None = None) -> Any:
        told = self.told[node]
        emit = lambda kind, data: told.append(data)  # noqa: E731
        return SimpleNamespace(emit=emit, last_steps=dict, gpus=list, last_stall=lambda: before)

    def run(self, until: int, *, cut: int | None = None) -> None:
        """Let all look once a second."""
        while self.now < until:
            for node, watch in enumerate(self.watches):
                watch.poll()
                if node != cut:
                    self.joint.receive_rank_report(node, NAMES[node], *self.standing(node))
            self.joint.poll()
            self.now += 1

    def standing(self, node: int) -> tuple[dict[str, Any], int]:
        """What the supervisor of a machine wrote last, and its age (ns)."""
        path = self.places[node] / STANDING_FILE
        if not path.exists():
            return {"now_ns": 0, "ranks": []}, 0
        found: dict[str, Any] = json.loads(path.read_text())
        return found, START + int(self.now * SECOND) - found["now_ns"]

    def texts(self, node: int = 2) -> list[tuple[float | None, str]]:
        return [(data.get("lasted_s"), data["text"]) for data in self.told[node]]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(tmp_path, monkeypatch)


STUCK = "rank 3 (gpu-2) in save (train.py:4); the other 3 wait for it in backward (train.py:90)"


def test_a_rank_of_another_machine_is_named_with_machine_and_line(machines: Machines) -> None:
    machines.ranks[1][1] = rank(3, SAVES)
    machines.run(20)
    assert machines.texts() == [(None, STUCK)]
    assert machines.texts(0) == []  # its own supervisor blames nobody
    first, *others = machines.told[2][0]["ranks"]
    assert (first["node"], first["rank"], first["process"], first["place"]) == ("gpu-2", 3, 3, "train.py:4")
    assert [(each["node"], each["rank"], each["waits"]) for each in others] == [
        ("gpu-1", 0, True), ("gpu-1", 1, True), ("gpu-2", 2, True)
    ]  # fmt: skip
    machines.ranks = [[each._replace(since_ns=START + 20 * SECOND) for each in node] for node in machines.ranks]
    machines.run(23)
    assert machines.texts() == [(None, STUCK), (pytest.approx(19, abs=1.1), STUCK)]


def test_ranks_that_wait_for_one_that_works_are_not_stalled(machines: Machines) -> None:
    """One that saves a checkpoint for ten minutes on another machine, with a sign of life; one that moves."""
    machines.ranks[1][1] = rank(3, SAVES, busy=True)
    machines.run(600)
    machines.ranks[1] = [rank(2, since_ns=START + 600 * SECOND), rank(3, SAVES, since_ns=START + 600 * SECOND)]
    machines.run(603)
    assert [machines.texts(node) for node in range(3)] == [[], [], []]


def test_ranks_in_different_collectives_on_two_machines(machines: Machines) -> None:
    machines.ranks[1] = [rank(2, sequence=5), rank(3, sequence=5)]
    machines.run(20)
    words = "ranks 0-3 wait in backward (train.py:90): ranks 2, 3 (gpu-2) have started fewer collectives"
    assert machines.texts() == [(None, words)]
    assert machines.texts(0) == machines.texts(1) == []


def test_the_rank_that_failed_on_another_machine_is_named(machines: Machines) -> None:
    raised = "ValueError (train.py:12)"
    machines.ranks[1] = [rank(each, doing="ended", state="gone", raised=raised, stack=None) for each in (2, 3)]
    machines.watches[1]._inspector.with_exceptions = lambda ranks: ranks  # type: ignore[method-assign]
    machines.run(20)
    assert machines.texts() == [
        (None, f"ranks 2, 3 (gpu-2) ended: {raised}; ranks 0, 1 (gpu-1) wait in backward (train.py:90)")
    ]
    # Another process with the number of a rank has taken its place.
    machines.ranks[0].append(rank(2, pid=103, process=2, since_ns=START + 19 * SECOND))
    machines.ranks[0].append(rank(3, pid=104, process=3, since_ns=START + 19 * SECOND))
    machines.run(25)
    assert len(machines.texts()) == 2
    assert machines.texts()[1][0] is not None


def test_while_a_machine_does_not_answer_nobody_else_is_blamed(machines: Machines) -> None:
    machines.ranks[0][1] = rank(1, sequence=5)
    machines.joint.receive_rank_report(1, NAMES[1], {"now_ns": 0, "ranks": []}, 0)
    machines.joint.drop_node(1)
    machines.run(60, cut=1)
    assert machines.texts() == []
    machines.run(80)
    assert machines.texts() == [
        (None, "ranks 0-3 wait in backward (train.py:90): rank 1 (gpu-1) has started fewer collectives")
    ]


def test_a_stall_goes_on_while_its_machine_does_not_answer(machines: Machines) -> None:
    machines.ranks[1][1] = rank(3, SAVES)
    machines.run(20)
    machines.joint.drop_node(1)
    machines.run(60, cut=1)
    assert machines.texts() == [(None, STUCK)]
    machines.ranks[0][0] = rank(0, since_ns=START + 59 * SECOND)
    machines.ranks[0][1] = rank(1, since_ns=START + 59 * SECOND)
    machines.run(62, cut=1)
    assert machines.texts()[1:] == [(pytest.approx(59, abs=1.1), STUCK)]


def test_the_stalls_of_the_supervisors_are_kept_where_nobody_judges_all_ranks(machines: Machines) -> None:
    old = {"since_s": 4.0, "text": "t", "ranks": [{}]}
    assert machines.joint.should_store_stall(0, old)
    machines.run(10)
    assert machines.joint.should_store_stall(0, {"since_s": 4.0, "lasted_s": 2.0, "text": "t"})
    assert not machines.joint.should_store_stall(0, {"since_s": 5.0, "lasted_s": 2.0, "text": "t"})
    assert not machines.joint.should_store_stall(0, {**old, "since_s": 5.0})
    assert not machines.joint.should_store_stall(0, {**old, "since_s": []})


def test_one_answer_says_what_the_ranks_of_all_machines_do(machines: Machines) -> None:
    machines.ranks[1][1] = rank(3, SAVES)
    machines.run(20)
    dumps = {101: ProcessStacks((SAVES, Stack((Frame("run", "/job/pump.py", 1),), "pump", main=False)))}
    answers = {
        node: (NAMES[node], build_report(ranks, dumps, None, START + 20 * SECOND, INFO))
        for node, ranks in enumerate(machines.ranks)
    }
    found = machines.joint.merge_replies(answers, START + 20 * SECOND)
    assert (found.text, found.since_s, found.t_s) == (STUCK, 1.0, 20.0)
    assert [(each.node, each.rank, each.waits, each.apart) for each in found.ranks] == [
        ("gpu-2", 3, False, False), ("gpu-1", 0, True, False), ("gpu-1", 1, True, False), ("gpu-2", 2, True, False)
    ]  # fmt: skip
    assert [each.process for each in found.ranks] == [3, 0, 1, 2]
    lines = [text for text, _ in format_report(found, all_threads=True)]
    assert lines[0] == f"stalled for 19 s: {STUCK}"
    assert lines[3].split()[:3] == [">", "3", "(gpu-2)"]
    assert "rank 3 (gpu-2):" in lines or "ranks 1, 3:" in lines
    assert "  thread pump:" in lines
