"""A mirror of two machines: its requests; and what is killed loses or doubles nothing, while the training goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dpmon.mirror.mirror_run import find_or_create_mirror
from dpmon.run import proc
from dpmon.run.lifecycle import has_live_supervisor, run_state
from dpmon.run.mirror_state import NodeReplies
from dpmon.run.run_directory import load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.stalls.stall_report import StallReport, request_and_wait
from dpmon.store.node_table import read_node_rows
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store
from dpmon.store.tally_tables import read_tallies
from dpmon.supervise.start_supervisor import ensure_supervisor
from support.run_harness import Dpmon, wait_for

pytestmark = pytest.mark.timeout(900)

SCRIPT = """\
import pathlib, time
import torch

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
while not pathlib.Path("go").exists():
    optimizer.zero_grad()
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
    steps += 1
    time.sleep(0.01)
print(f"counted {steps}", flush=True)
"""


def steps_in(store: Store, process: int) -> int:
    return sum(tally.steps for key, tally in read_tallies(store).items() if key.process == process)


def steps_here(directory: Path) -> dict[int, int]:
    """Return the steps in the mirror by machine."""
    with open_store(directory) as store:
        return {ring.node: steps_in(store, ring.process) for ring in store.rings.values() if ring.node is not None}


def exporters(directory: Path) -> list[int]:
    """Return the children of the mirror."""
    pid = load_info(directory).supervisor_pid
    return [one.pid for one in proc.read_process_table().values() if one.parent == pid and not one.is_dead]


class Two:
    """Two machines that train, and their mirror."""

    def __init__(self, place: Path) -> None:
        self.nodes = [Dpmon(place / name, place) for name in ("a", "b")]
        self.here = Dpmon(place / "here", place)

    def begin(self) -> None:
        """Start them, and wait for their first steps."""
        script = self.here.script(SCRIPT)
        self.runs = [node.start("--headless", *node.warm(), script) for node in self.nodes]
        for node in self.nodes:
            node.info()
        words = [["env", f"XDG_STATE_HOME={node.state}", sys.executable, "-m", "dpmon"] for node in self.nodes]
        self.machines = [[f"gpu-{i}", node.last().name, *words[i]] for i, node in enumerate(self.nodes)]
        self.directory = find_or_create_mirror("mirrored", self.machines, 5.0)
        assert find_or_create_mirror("mirrored", self.machines) == self.directory
        ensure_supervisor(self.directory, self.machines)
        wait_for((self.directory / "history.sqlite").exists, what="the mirror's history")
        wait_for(lambda: min([*steps_here(self.directory).values(), 0][:2]) > 20, what="steps of both machines")

    def end(self) -> None:
        """Kill what is left."""
        for one in (self.here, *self.nodes):
            one.clean_up()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    made = Two(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(made.here.state))
    try:
        made.begin()
        yield made
    finally:
        made.end()


def test_requests_reach_all_machines_and_their_answers_come_back(two: Two) -> None:
    directory = two.directory
    with closing(RunReader(directory)) as reader:
        wait_for(lambda: len(reader.activities()) == 2, what="the processes of both machines")
        assert reader.node_replies() is None
        assert reader.pause_refusal() is None
        assert reader.request_pause(True) == 2
        wait_for(lambda: reader.pause_state().since_ns is not None, what="a pause of both machines")
        wait_for(lambda: reader.node_replies() == NodeReplies(2, 2), what="the answers of both")
        rings = [RunReader(node.last()) for node in two.nodes]
        assert all(ring.pause_state().since_ns is not None for ring in rings)
        # A machine sends the pause and the activities one after the other.
        wait_for(lambda: {what for what, _ in reader.activities().values()} == {"paused"}, what="two paused processes")
        assert reader.request_pause(False) == 2
        wait_for(lambda: not reader.pause_state().is_requested, what="the end of the pause")
        for ring in rings:
            ring.close()
        before = steps_here(directory)
        with open_store(directory) as store:
            process = next(ring.process for ring in store.rings.values() if ring.node == 1 and ring.process >= 0)
        reader.request_records([process])

        def in_a_row() -> bool:
            """Whether the last steps of this process are all here."""
            with open_store(directory) as store:
                last = store.query(f"SELECT step FROM steps WHERE process = {process} ORDER BY id DESC LIMIT 20")
            return len(last) == 20 and last[0][0] - last[-1][0] == 19

        wait_for(in_a_row, what="all steps of one process")

        # A busy machine may not answer in time.
        def both_replies() -> StallReport | None:
            reply = request_and_wait(directory)
            return reply if reply and not reply.without else None

        found = wait_for(both_replies, what="both answers")
        assert {rank.node for rank in found.ranks} == {"gpu-0", "gpu-1"}
        wait_for(lambda: all(n > before[node] for node, n in steps_here(directory).items()), what="more steps")
    result = two.here.run("stop", "mirrored")
    assert result.status == 0
    assert result.out.decode().splitlines()[-1].startswith("stopped by its nodes")
    assert [node.exit()["signal"] or node.exit()["status"] for node in two.nodes] != [0, 0]
    how = load_exit(directory)
    assert how is not None
    assert how.stopped


@pytest.mark.parametrize("kill", ["mirror", "exporter", "supervisor"])
def test_what_is_killed_goes_on_without_a_doubled_step(two: Two, kill: str) -> None:
    nodes, directory = two.nodes, two.directory
    if kill == "mirror":
        pid = load_info(directory).supervisor_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not has_live_supervisor(load_info(directory)), what="the end of the mirror")
        assert run_state(directory, load_info(directory))[0] == "unsupervised"
        assert ensure_supervisor(directory).pid is None, "run.json names the machines, and proves nothing"
        refused = two.here.run("attach", "--headless", "mirrored")
        assert (refused.status, "name its nodes again" in refused.errors) == (2, True)
        ensure_supervisor(directory, two.machines)
    elif kill == "exporter":
        for pid in exporters(directory):
            os.kill(pid, signal.SIGKILL)
    else:
        nodes[1].kill_supervisor()
    before = steps_here(directory)
    wait_for(
        lambda: all(steps > before[node] + 20 for node, steps in steps_here(directory).items()),
        what="more steps of both machines",
    )
    nodes[0].go()  # both read the same file
    assert [run.wait(100) for run in two.runs] == [0, 0]
    ends = [node.exit() for node in nodes]
    assert [end["status"] for end in ends] == [0, 0]
    how = wait_for(lambda: load_exit(directory), what="the end of the mirror's run")
    assert how is not None
    assert how.status == 0
    wait_for(lambda: not has_live_supervisor(load_info(directory)), what="the end of the mirror")
    counted = [int((node.last() / "stdout.log").read_text().split()[-1]) for node in nodes]
    with open_store(nodes[1].last()) as store:
        recorded = [counted[0], steps_in(store, 0)]
    # The step that was open when its supervisor was killed may be lost.
    assert counted[1] - recorded[1] in ((0, 1) if kill == "supervisor" else (0,))
    with open_store(directory) as store:
        assert [node.state for node in read_node_rows(store.connection)] == ["ended", "ended"]
        numbers = {ring.node: ring.process for ring in store.rings.values() if ring.process >= 0}
        medians = [read_tallies(store, process=numbers[i]) for i in range(2)]
        assert [steps_in(store, numbers[i]) for i in range(2)] == recorded
        ids = [number for (number,) in store.query("SELECT id FROM steps ORDER BY id")]
        starts = store.query("SELECT process, step FROM steps")
        last = dict(store.query("SELECT process, max(step) FROM steps GROUP BY process"))
    assert [last[numbers[i]] for i in range(2)] == recorded
    assert ids == sorted(set(ids))
    assert len(starts) == len(set(starts))
    for i, node in enumerate(nodes):
        with open_store(node.last()) as store:
            own = {key._replace(process=numbers[i]): tally for key, tally in read_tallies(store).items()}
        assert {key: tally.stats for key, tally in own.items()} == {key: t.stats for key, t in medians[i].items()}
    output = (directory / "output.log").read_text()
    assert all(f"gpu-{i}: counted {count}" in output for i, count in enumerate(counted))
    assert json.loads((directory / "exit.json").read_text())["by"] == "mirror"
