"""However a training ends, the record has all that was finished, and the script ends as without dpmon."""

from __future__ import annotations

import json
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from dpmon.span_reader import SpanReader
from support.tracer_harness import TracedRun, TracedScript, run_traced, traced_script_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """About 40 children: six ways to end, and 30 kills at random times."""
    return run_traced(tmp_path_factory.mktemp("endings"), traced_script_text("endings"))


def check(run: TracedRun, pid: int, finished: int) -> None:
    """Check that all finished calls are recorded without gaps, and all their steps except perhaps the last."""
    process = run.process_of(pid)
    calls, steps = run.calls(process=process), run.steps(process)
    assert finished <= len(calls) <= finished + 1  # it may be killed between the call and its own report of it
    numbers = list(range(1, len(calls) + 1))
    assert [call.call for call in calls] == [call.step for call in calls] == numbers
    assert [step.step for step in steps] in (numbers, numbers[:-1])
    assert all(call.rows == 10 and not call.failed for call in calls)


def test_every_finished_call_is_recorded(endings: TracedRun) -> None:
    statuses = {"exit": 7, "kill": -signal.SIGKILL, "segv": -signal.SIGSEGV, "exec": 0, "close": 0, "end": 0}
    told = {name: rest for name, *rest in endings.printed}
    for how, status in statuses.items():
        for kind in ("bare", "wrapped"):
            pid, found, lines = told[f"{how}, {kind}"]
            assert found == status
            check(endings, pid, 25 if how in ("close", "end") else 20)
            assert lines == list(range(1, 26 if how == "end" else 21))
    assert (endings.missed, endings.complaints) == (0, [])


def test_the_open_step_is_recorded_if_python_ended_normally(endings: TracedRun) -> None:
    told = {name: pid for name, pid, *_ in endings.printed}
    for how, count in (("end", 25), ("close", 25), ("exit", 19), ("kill", 19), ("segv", 19), ("exec", 19)):
        for kind in ("bare", "wrapped"):
            steps = endings.steps(endings.process_of(told[f"{how}, {kind}"]))
            assert [step.step for step in steps] == list(range(1, count + 1))


def test_a_killed_training_has_recorded_all_finished_calls(endings: TracedRun) -> None:
    killed = [(pid, status, lines) for name, pid, status, lines in endings.printed if name.startswith("killed")]
    assert len(killed) == 30
    for pid, status, lines in killed:
        assert status == -signal.SIGKILL
        check(endings, pid, lines[-1])
    assert len({lines[-1] for _, _, lines in killed}) > 15


QUICKLY = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for number, x in enumerate(DataLoader(torch.randn(4000, 4), batch_size=None), 1):
    loss = model(x).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
print(number, flush=True)
os._exit(0)
"""


def test_the_last_of_many_short_steps_is_recorded(tmp_path: Path) -> None:
    """Thousands of very short steps, and a sudden end."""
    run = run_traced(tmp_path, QUICKLY, 3000)
    assert run.status == -signal.SIGKILL
    assert [step.step for step in run.steps()] == list(range(1, 3001))
    assert [call.step for call in run.calls()] == list(range(1, 3001))
    assert run.missed == 0


MIXED = """
import os, signal
import torch
from torch.utils.data import DataLoader
over = torch.nn.DataParallel(torch.nn.Linear(4, 1))
alone = torch.nn.Linear(4, 1)
for number, x in enumerate(DataLoader(torch.randn(4000, 4), batch_size=8), 1):
    if number % 3:
        loss = over(x).sum() + alone(x).sum() + over(x).sum()
    else:
        loss = alone(x).sum() + over(x).sum()
    loss.backward()
    if number == 301:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_calls_over_replicas_are_recorded(tmp_path: Path) -> None:
    """With other calls between them: in order, complete, and with the right numbers."""
    run = run_traced(tmp_path, MIXED)
    assert run.status == -signal.SIGKILL
    found = run.calls()
    in_step = [
        ("DataParallel", None, "DataParallel") if number % 3 else (None, "DataParallel") for number in range(1, 302)
    ]
    whole = [(number, via) for number, vias in enumerate(in_step, 1) for via in vias]
    assert [(call.step, call.via) for call in found] == whole
    assert [call.call for call in found] == list(range(1, len(found) + 1))
    for call in found:
        if call.via is not None:
            assert [replica.inputs[0].shape for replica in call.replicas if replica.inputs] == [(4, 4), (4, 4)]
            assert set(call.phases) == {"scatter", "replicate", "parallel_apply", "gather"}
    steps = [step.step for step in run.steps()]
    assert steps == list(range(1, len(steps) + 1))
    assert run.missed == 0
    assert len(steps) in (300, 301)


def test_a_loader_that_comes_to_its_end(tmp_path: Path) -> None:
    run = run_traced(tmp_path, QUICKLY, 0)
    assert run.status == 0
    assert len(run.calls()) == len(run.steps()) == 4000


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, TracedRun]:
    """Exceptions in many places, with and without the tracer."""
    place = tmp_path_factory.mktemp("failing")
    scripts = [TracedScript(place, traced_script_text("failing"), run=run) for run in (True, False)]
    found, expected = (script.end() for script in scripts)
    return found, expected


def tracebacks(run: TracedRun) -> dict[str, str]:
    """Return the printed tracebacks, by the place of their exception."""
    parts = run.out.replace(str(run.directory.parent), "HERE").split("===== ")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def test_tracebacks_are_the_scripts_own(failing: tuple[TracedRun, TracedRun]) -> None:
    found, expected = map(tracebacks, failing)
    assert len(expected) == 15
    assert list(found) == list(expected)
    for name, text in expected.items():
        assert found[name] == text, name


def test_an_exception_that_nobody_catches(failing: tuple[TracedRun, TracedRun]) -> None:
    found, expected = (run.err.replace(str(run.directory.parent), "HERE") for run in failing)
    assert [run.status for run in failing] == [1, 1]
    assert found.count("Traceback") == 1
    assert found == expected


def test_calls_that_failed_are_marked(failing: tuple[TracedRun, TracedRun]) -> None:
    run, _ = failing
    failed = [(call.root, call.via) for call in run.calls() if call.failed]
    bare, wrapped = ("Model bare", None), ("Model wrapped", "DataParallel")
    interrupted = ("Model interrupted", None)
    assert failed == [bare, bare, wrapped, bare, bare, bare, interrupted, ("Sequential", None), wrapped]
    assert run.missed == 0
    assert run.unreadable == ()


SPAWNS = """
import sys
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        with torch.no_grad():
            return nn.Linear(4, 4)(torch.ones(4))

def train(index):
    model = nn.Linear(4, 1)
    for x in DataLoader(Rows(), batch_size=5, num_workers=1, multiprocessing_context="spawn"):
        model(x).sum().backward()

if __name__ == "__main__":
    mp.spawn(train, nprocs=1)
    print("parent", torch.utils.data.get_worker_info())
"""


def test_a_spawned_child_and_its_spawned_worker(tmp_path: Path) -> None:
    """The child's record has its last step; the worker, which calls a model of its own, has no record."""
    run = run_traced(tmp_path, SPAWNS)
    assert (run.status, run.out) == (0, "parent None\n"), run.err
    assert run.processes == [0]
    assert [(step.step, step.samples) for step in run.steps()] == [(1, 5), (2, 5), (3, 5), (4, 5)]
    assert [call.rows for call in run.calls()] == [5] * 4
    for before, after in pairwise(run.steps()):
        assert before.start_ns + before.wall_ns <= after.start_ns
    assert run.complaints == []
    assert run.stages.count("torch imported") == 3


CHILD = """
import multiprocessing.util, sys, threading
import torch
stepped, over = threading.Event(), threading.Event()
def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        if number == 4 and sys.argv[1] == "raises":
            raise ValueError("a loss that cannot be computed")
        loss.backward()
        optimizer.step()
        if number == 1 and sys.argv[1] == "outlives":
            stepped.set()
            over.wait(100)
def target():
    if sys.argv[1] == "outlives":
        threading.Thread(target=train).start()
        stepped.wait()
        multiprocessing.util.Finalize(None, over.set, exitpriority=-100)  # after dpmon's own
        return
    train()
    if sys.argv[1] == "exits":
        sys.exit(0)
child = multiprocessing.get_context("fork").Process(target=target)
try:
    raise KeyError("handled")  # while the child starts, too
except KeyError:
    child.start()
child.join()
"""


SHUTS_DOWN_FIRST = sys.version_info >= (3, 13)
"""From 3.13 on, a child of multiprocessing runs its exit functions last: its threads and its exception are gone."""


@pytest.mark.parametrize(("how", "uncaught"), [("raises", not SHUTS_DOWN_FIRST), ("exits", False), ("ends", False)])
def test_a_child_of_multiprocessing_says_how_it_ended(tmp_path: Path, how: str, uncaught: bool) -> None:
    run = run_traced(tmp_path, CHILD, how)
    lines = map(json.loads, (run.directory / "process-0.jsonl").read_text().splitlines())
    assert [line["uncaught"] for line in lines if "end" in line] == [uncaught]
    begun = 5 if how != "raises" or SHUTS_DOWN_FIRST else 4
    assert [step.step for step in run.steps()] == list(range(1, begun + 1))


def test_a_child_of_multiprocessing_has_not_ended_while_a_thread_trains(tmp_path: Path) -> None:
    run = run_traced(tmp_path, CHILD, "outlives")
    assert [step.step for step in run.steps()] == [1, 2, 3, 4, 5]
    ring = SpanReader(str(run.directory / "process-0.ring"))
    assert ring.is_ended() is SHUTS_DOWN_FIRST
    ring.close()
