"""The training pauses between two steps on request, and goes on if dpmon's processes are killed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_types import Event, Step
from dpmon.record.schema import TRAINING
from dpmon.run import proc
from dpmon.run.lifecycle import take_lock
from dpmon.run.run_reader import RunReader
from dpmon.span_reader import SpanReader
from support.history_builders import snapshot_of_directory, snapshot_of_rows
from support.run_harness import Dpmon, wait_for
from support.script_simulator import check_numbers
from support.tracer_harness import ScriptRing, TracedRun, TracedScript, traced_script_text

LOOPS = ("with_calls_only", "with_an_optimizer", "with_a_loader")
LOOP = """\
import pathlib, sys, torch
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(1000, 4))
def train(steps=10**9):
    while steps > 0:
        for x, in torch.utils.data.DataLoader(data, batch_size=10):
            model(x).sum().backward()
            steps -= 1
            if steps <= 0 or pathlib.Path("stop").exists():
                return
"""


def supervised(directory: Path) -> None:
    """Hold the lock of the run's supervisor until the end of the tests."""
    assert take_lock(directory) is not None


def is_paused(ring: SpanReader | ScriptRing) -> bool:
    return ring.activity()[0] == "paused"


def answered(ring: SpanReader | ScriptRing) -> bool:
    asked, answer = ring.pause_requests()
    return asked == answer


def pause(ring: SpanReader | ScriptRing) -> int:
    """Request a pause and wait until it has begun; return the request."""
    asked = ring.request_pause(True)
    wait_for(lambda: answered(ring) and is_paused(ring), what="a pause")
    return asked


def go_on(ring: SpanReader | ScriptRing) -> None:
    """Request its end and wait for it."""
    ring.request_pause(False)
    wait_for(lambda: answered(ring) and not is_paused(ring), what="the end of a pause")


def pauses(run: TracedRun) -> list[dict[str, Any]]:
    return [dict(event.data) for event in run.events("pause")]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, TracedRun]:
    """Three loops without dpmon, and under --mode script with a pause requested in the sixth step of each."""
    place = tmp_path_factory.mktemp("pausing")
    alone = TracedScript(place, traced_script_text("pausing"), run=False)
    script = TracedScript(place, traced_script_text("pausing"), mode="script")
    supervised(script.directory)
    for name in LOOPS:
        assert script.line() == name
        ring = script.ring()
        asked = ring.request_pause(True)
        script.go_on()
        assert (again := pause(ring)) != asked
        assert ring.pause_requests() == (again, again)
        go_on(ring)
        ring.close()
        assert alone.line() == name
        alone.go_on()
    return alone.end(), script.end()


def test_a_pause_changes_no_number(both: tuple[TracedRun, TracedRun]) -> None:
    alone, run = both
    assert run.printed == alone.printed
    assert (run.complaints, run.missed) == ([], 0)


def test_a_pause_lies_between_two_steps_and_in_none(both: tuple[TracedRun, TracedRun]) -> None:
    """No step is lost or contains time of a pause: each pause is the gap between two steps."""
    _, run = both
    steps = run.steps()
    check_numbers(steps)
    assert len(steps) == 3 * 12
    found = pauses(run)
    assert [event["paused"] for event in found] == [True, False] * 3
    # Without loader and optimizer, a step ends where the next call begins: the pause was requested before the sixth.
    # The first loop trains nothing, and an event has the number of the last training step.
    assert [event["step"] for event in found] == [0, 0, 6, 6, 18, 18]
    assert all(event["reason"] is None and event["refused"] is None for event in found)
    for place, end in zip((5, 18, 30), found[1::2], strict=True):
        before, after = steps[place - 1 : place + 1]
        gap = after.start_ns - before.start_ns - before.wall_ns
        assert gap >= end["paused_s"] * 1e9 > 0
        assert before.start_ns + before.wall_ns <= end["t_s"] * 1e9 <= after.start_ns + after.wall_ns


def test_the_order_of_the_record(both: tuple[TracedRun, TracedRun]) -> None:
    """Everything before the pause is written first, so that a reader sees it during the pause."""
    seen, pauses = 0, 0
    for record in both[1].records:
        if isinstance(record, Step):
            seen = record.step if record.kind == TRAINING else seen
        elif getattr(record, "kind", "") == "pause":
            pauses += 1
            assert seen == record.data["step"]  # type: ignore[union-attr]
    assert pauses


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """Very short steps, asked four times: while nobody supervises, then twice with success, once left alone."""
    # Nobody reads the ring meanwhile, and it must not overflow, so a step takes 10 ms.
    slower = LOOP.replace("model(x)", "time.sleep(0.01); model(x)").replace("import pathlib", "import time, pathlib")
    script = TracedScript(tmp_path_factory.mktemp("steered"), slower + "train()\n")
    ring = script.ring()
    wait_for(lambda: ring.activity()[1] > 0, what="the training")
    ring.request_pause(True)
    wait_for(lambda: answered(ring), what="a refusal")
    supervised(script.directory)

    pause(ring)
    go_on(ring)
    wait_for(lambda: ring.activity()[0] == "backward", what="the training to go on")

    pid = script.process.pid
    os.kill(pid, signal.SIGSTOP)  # both requests are there when it looks
    wait_for(lambda: (found := proc.read_process(pid)) is not None and found.state == "T", what="the stop")
    ring.request_pause(True)
    ring.request_pause(False)
    assert not answered(ring)
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: answered(ring), what="an answer")

    pause(ring)
    elsewhere = script.cwd / "elsewhere"
    script.directory.rename(elsewhere)
    wait_for(lambda: not is_paused(ring), what="the training to go on")
    elsewhere.rename(script.directory)
    (script.cwd / "stop").touch()
    ring.close()
    return script.end()


def test_no_step_is_lost(steered: TracedRun) -> None:
    assert (steered.status, steered.err, steered.missed) == (0, "", 0)
    steps = [step.step for step in steered.steps()]
    assert steps == list(range(1, len(steps) + 1))


def test_without_a_supervisor_a_pause_is_refused(steered: TracedRun) -> None:
    first = pauses(steered)[0]
    assert first["paused"] is False
    assert first["refused"].startswith("the run's directory cannot be read")
    state = snapshot_of_rows([row for row in steered.records if isinstance(row, (Step, Event))])
    assert state.pauses[0].refused == first["refused"]
    assert len(state.pauses) == 5
    assert state.processes[0].paused_since_ns is None


def test_a_paused_training_goes_on_when_its_directory_vanishes(steered: TracedRun) -> None:
    found = [(event["paused"], (event["reason"] or "")[:20]) for event in pauses(steered)[1:]]
    assert found == [(True, ""), (False, ""), (True, ""), (False, "the run's directory ")]
    (text,) = steered.complaints
    assert text.startswith("the paused training resumed automatically")


AHEAD = """
import pathlib, queue, threading, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
batches = queue.Queue(2)
def fetch():
    while not pathlib.Path("stop").exists():
        for x in torch.utils.data.DataLoader(torch.ones(100, 4), batch_size=10):
            batches.put(x)
    batches.put(None)
threading.Thread(target=fetch).start()
while (x := batches.get()) is not None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_loop_whose_batches_another_thread_fetches_is_paused(tmp_path: Path) -> None:
    script = TracedScript(tmp_path, AHEAD)
    supervised(script.directory)
    ring = script.ring()
    for paused in (True, False):
        ring.request_pause(paused)
        wait_for(lambda: answered(ring), what="an answer to the request")
    ring.close()
    (script.cwd / "stop").touch()
    run = script.end()
    assert (run.status, run.complaints) == (0, [])
    assert [event["paused"] for event in pauses(run)] == [True, False]


def test_ranks_are_not_paused(tmp_path: Path) -> None:
    script = TracedScript(tmp_path, LOOP + "train()\n", env={"RANK": "0", "WORLD_SIZE": "2"})
    supervised(script.directory)
    ring = script.ring()
    ring.request_pause(True)
    wait_for(lambda: answered(ring), what="an answer")
    (script.cwd / "stop").touch()
    run = script.end()
    assert run.status == 0
    (found,) = pauses(run)
    assert found["paused"] is False
    assert "wait for each other" in found["refused"]


# ------------------------------------------------------------------------------------------------ whole runs


def paused_run(dpmon: Dpmon, text: str) -> tuple[Any, RunReader]:
    """Start a run and pause it."""
    dpmon.script(LOOP + text)
    process = dpmon.start(*dpmon.warm(), "script.py")
    dpmon.info()
    reader = RunReader(dpmon.last())
    wait_for(lambda: reader.request_pause(True), what="a training process")
    wait_for(lambda: reader.pause_state().since_ns, what="the pause")
    assert reader.pause_state()[:2] == (True, False)
    assert reader.pause_refusal() is None
    return process, reader


def test_a_paused_training_goes_on_when_all_of_dpmon_was_killed(dpmon: Dpmon) -> None:
    """The screen is killed first, because it would start another supervisor, and the pause would last."""
    process, reader = paused_run(dpmon, "train()\n")
    info = dpmon.info()
    process.kill()
    process.wait()
    os.kill(info["supervisor_pid"], signal.SIGKILL)
    wait_for(lambda: reader.pause_state().since_ns is None, what="the training to go on")
    assert not reader.pause_state().is_requested
    (dpmon.cwd / "stop").touch()
    wait_for(lambda: not proc.is_alive(info["command_pid"], info["command_started"]), what="the end")
    dpmon.run("attach")
    records = dpmon.records()
    texts = [record["text"] for record in records if record["kind"] == "warning"]
    assert any("resumed automatically: the supervisor has exited" in text for text in texts)
    found = [record for record in records if record["kind"] == "pause"]
    assert [record["paused"] for record in found] == [True, False]
    assert found[1]["reason"] == "the supervisor has exited"
    reader.close()


def test_an_interrupt_ends_a_pause(dpmon: Dpmon) -> None:
    """The script gets KeyboardInterrupt immediately; the pause is over, and it can train on."""
    text = "try:\n    train()\nexcept KeyboardInterrupt:\n    train(5)\n    print('interrupted')\n    sys.exit(11)\n"
    process, reader = paused_run(dpmon, text)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (11, b"interrupted\n")
    assert b"paused once, for " in err
    found = [record for record in dpmon.records() if record["kind"] in ("pause", "step")]
    at = next(n for n, record in enumerate(found) if record["kind"] == "pause" and not record["paused"])
    assert found[at]["reason"] == "interrupted"
    told = dpmon.run("report").text
    line = r"\n  00:0\d:\d\d +after step \d+ +for [\d.]+ m?s, resumed automatically: interrupted\n"
    assert re.search(line, told)
    assert len([record for record in found[at:] if record["kind"] == "step"]) == 5
    reader.close()


def test_a_screen_opened_during_a_pause_shows_it_and_can_end_it(dpmon: Dpmon) -> None:
    process, reader = paused_run(dpmon, "train()\n")
    late = RunReader(dpmon.last())

    def known() -> int | None:
        process = snapshot_of_directory(late.directory).representative
        return process.paused_since_ns if process is not None else None

    since = wait_for(known, what="the record of the pause")
    last = reader.pause_state().since_ns
    assert last is not None
    assert 0 < since <= time.monotonic_ns() - late.info.start_ns
    assert late.request_pause(False) == 1
    wait_for(lambda: not known() and not late.pause_state().is_pending, what="its end")
    # A step after the pause shows its end, too, and may be written before the record of the end.
    pauses = wait_for(
        lambda: found if len(found := snapshot_of_directory(late.directory).pauses) > 1 else None,
        what="the record of its end",
    )
    assert [change.paused for change in pauses] == [True, False]
    assert (pauses[1].paused_ns or 0) > 0
    (dpmon.cwd / "stop").touch()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    for one in (reader, late):
        one.close()
