"""Machines in network namespaces, with cables that are cut, slow or lossy: records come once each, and in time.

Needs root, ip, tc, nft and sshd.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpmon.mirror.remote_hosts import resolve_hosts
from dpmon.run import proc
from dpmon.run.run_directory import load_info
from support.cluster_harness import (
    TRAINING_UNTIL_GO,
    FollowReader,
    NamespaceHosts,
    missing_for_namespaces,
    row_ids_of_history,
    sockets_of,
)
from support.run_harness import Dpmon, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def host(dpmon: Dpmon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamespaceHosts]:
    """One machine, gpu-1, with the runs of `dpmon`, which trains until `go`."""
    why = missing_for_namespaces()
    if why is not None:
        pytest.skip(why)
    made = NamespaceHosts(tmp_path / "net", {"gpu-1": dpmon.state})
    try:
        monkeypatch.setenv("PATH", made.environment["PATH"])
        dpmon.start("--headless", dpmon.script(TRAINING_UNTIL_GO), env={"PATH": os.environ["PATH"]})
        dpmon.info()
        yield made
    finally:
        made.close()


@pytest.fixture
def reader(host: NamespaceHosts, dpmon: Dpmon) -> Iterator[FollowReader]:
    """A reader of the run, by ssh from the namespace of the viewer."""
    (machine,) = resolve_hosts(["gpu-1"])
    made = FollowReader(["ip", "netns", "exec", host.viewer, *machine.command_prefix], dpmon.last().name)
    yield made
    made.links.close_all()


def more(reader: FollowReader, count: int) -> None:
    """Wait for this many more rows."""
    wanted = len(reader.ids) + count
    wait_for(lambda: reader.poll() is not None and len(reader.ids) >= wanted, what="more rows")


def all_came_once(reader: FollowReader, dpmon: Dpmon) -> None:
    """Let the training end, and compare the rows that came with those of the history."""
    dpmon.go()
    dpmon.exit()
    wait_for(lambda: reader.poll() is not None and reader.ended, what="the end of the records")
    assert sorted(reader.ids) == row_ids_of_history(dpmon.last())


def test_a_cut_is_noticed_and_no_row_is_lost_or_doubled(
    host: NamespaceHosts, reader: FollowReader, dpmon: Dpmon
) -> None:
    more(reader, 20)
    host.cut(0)  # shorter than the limit of silence
    time.sleep(1.0)
    host.mend(0)
    more(reader, 20)
    before = len(reader.closed)
    host.cut(0)
    began = time.monotonic()
    wait_for(lambda: reader.poll() is not None and len(reader.closed) > before, what="the end of the connection")
    print(f"noticed after {time.monotonic() - began:.1f} s: {reader.closed[before].why}")
    assert reader.closed[before].why in ("the connection was cut", "it has sent nothing for 5 s")
    assert not reader.closed[before].for_good
    wait_for(lambda: reader.poll() is not None and len(reader.closed) > before + 1, what="a connection in vain")
    host.mend(0)
    more(reader, 20)
    all_came_once(reader, dpmon)


def follows(pid: int, run: str) -> bool:
    """Return whether a process is the dpmon that prints the rows of a run."""
    with contextlib.suppress(OSError):
        words = proc.read_proc_bytes(pid, "cmdline").split(b"\0")
        return {b"--follow", run.encode()} <= set(words) and words[1].endswith(b"dpmon")
    return False


def test_only_ssh_talks_to_a_network_and_nobody_listens(
    host: NamespaceHosts, reader: FollowReader, dpmon: Dpmon
) -> None:
    def connected() -> list[tuple[str, str]]:
        """Programs and sockets of the command and its children; none while it is cut off, as on a busy machine."""
        reader.poll()
        process = reader.links._links[0].process
        pids = list(proc.process_tree(process.pid)) if process is not None else []
        sockets = [(os.readlink(f"/proc/{pid}/exe"), socket) for pid in pids for socket in sockets_of(pid)]
        return sockets if any(socket.startswith("tcp") for _, socket in sockets) else []

    more(reader, 20)
    info = dpmon.info()
    ours = [os.getpid(), *proc.process_tree(info["supervisor_pid"]), *proc.process_tree(info["command_pid"])]
    run = dpmon.last().name

    def exporting() -> list[int]:
        reader.poll()
        return [pid for pid in proc.read_process_table() if follows(pid, run)]

    exporters = wait_for(exporting)
    assert not [socket for pid in (*ours, *exporters) for socket in sockets_of(pid)]
    assert {os.path.basename(program) for program, _ in wait_for(connected, what="a connection")} == {"ssh"}


# ------------------------------------------------------------------------------------------------ a mirror


class Mirrored:
    """Two machines that train, and the run that mirrors theirs, watched from the namespace of the viewer."""

    def __init__(self, dpmon: Dpmon, states: list[Path], hosts: NamespaceHosts, *, away: bool = False) -> None:
        """`away`: the second machine cannot be reached at first."""
        self.states, self.hosts, self.dpmon = states, hosts, dpmon
        script = dpmon.script(TRAINING_UNTIL_GO)
        for state in self.states:
            env = {"XDG_STATE_HOME": str(state)}
            dpmon.start("--headless", script, env={**env, "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"})
            dpmon.info(self._run(state))
            wait_for(lambda env=env: b'"slurm"' in dpmon.run("ls", "--json", env=env).out, what="its job")
        if away:
            hosts.cut(1)
        watch = dpmon.words("attach", "script", "--headless", "--hosts", "gpu-1,gpu-2")
        self.watching = dpmon.start(
            argv=["ip", "netns", "exec", self.hosts.viewer, *watch],
            env=self.hosts.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.directory = wait_for(lambda: dpmon.runs()[-1] if dpmon.runs() else None, what="the mirror's run")

    @staticmethod
    def _run(state: Path) -> Path:
        return wait_for(lambda: next(iter((state / "dpmon" / "runs").glob("*-*")), None), what="a run")

    @property
    def runs(self) -> list[Path]:
        """The runs of the machines."""
        return [self._run(state) for state in self.states]

    def query(self, query: str, directory: Path | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a history, that of the mirror by default."""
        path = (directory or self.directory) / "history.sqlite"
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)) as history:
                return history.execute(query).fetchall()
        except sqlite3.OperationalError:  # it is being made
            return []

    def machine(self, number: int) -> tuple[str, int, int]:
        """Return state, time of the last beat, and steps of a machine."""
        rows = self.query(f"SELECT state, heard_ns FROM nodes WHERE number = {number}")
        steps = self.query(f"SELECT steps FROM rings WHERE node = {number}")
        return (rows[0][0], rows[0][1] or 0, sum(row[0] for row in steps)) if rows else ("", 0, 0)

    def going_on(self, *numbers: int) -> None:
        """Wait until these machines are connected and train."""
        before = [self.machine(number) for number in numbers]

        def more() -> bool:
            now = [self.machine(number) for number in numbers]
            return all(
                one[0] == "connected" and one[1] > old[1] and one[2] > old[2]
                for one, old in zip(now, before, strict=True)
            )

        wait_for(more, what=f"more steps of {numbers}")

    def has_everything(self) -> None:
        """End the trainings, and compare the mirror's history with those of the machines."""
        self.dpmon.go()
        wait_for((self.directory / "exit.json").exists, what="the end of the mirrored run")
        for number, run in enumerate(self.runs):
            ((steps,),) = self.query("SELECT steps FROM rings", run)
            ((there,),) = self.query("SELECT sum(steps) FROM tallies WHERE width = 1", run)
            assert there == steps
            processes = f"SELECT process FROM rings WHERE node = {number}"
            keys = f"SELECT number FROM keys WHERE process IN ({processes})"
            here = self.query(f"SELECT sum(steps) FROM tallies WHERE width = 1 AND key IN ({keys})")
            assert here == [(steps,)]
            kinds = "SELECT kind, count(*) FROM events WHERE kind != 'exit' AND {} GROUP BY kind"
            kept = self.query(kinds.format(f"(process IN ({processes}) OR process = {-1 - number})"))
            assert kept == self.query(kinds.format("true"), run)
            ids = self.query(f"SELECT step FROM steps WHERE process IN ({processes})")
            assert len(ids) == len(set(ids)) > 0


@pytest.fixture
def mirrored(dpmon: Dpmon, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mirrored]:
    """Two machines and their mirror.

    With "slow" as parameter, the cable to the first machine carries 56 kbit/s, and that to the second has a delay.
    With "away", the second machine cannot be reached at first.
    """
    why = missing_for_namespaces()
    if why is not None:
        pytest.skip(why)
    how = getattr(request, "param", "")
    bad = how == "slow"
    states = [dpmon.state / "gpu-1", dpmon.state / "gpu-2"]  # so that `dpmon` finds what is left over
    hosts = NamespaceHosts(tmp_path / "net", {state.name: state for state in states}, {"gpu-2": 0.1} if bad else {})
    try:
        if bad:
            hosts.slow(0)
        yield Mirrored(dpmon, states, hosts, away=how == "away")
    finally:
        dpmon.clean_up()
        hosts.close()


def test_a_machine_that_is_cut_off_is_told_and_catches_up(mirrored: Mirrored) -> None:
    mirrored.going_on(0, 1)
    mirrored.hosts.cut(1)
    began = time.monotonic()
    wait_for(lambda: mirrored.machine(1)[0] == "cut", what="the cut")
    print(f"told after {time.monotonic() - began:.1f} s: {mirrored.query('SELECT why FROM nodes')}")
    mirrored.going_on(0)
    time.sleep(float(os.environ.get("DPMON_CUT_S", "3")))
    mirrored.hosts.mend(1)
    mirrored.going_on(0, 1)
    mirrored.has_everything()


def test_a_killed_mirror_or_supervisor_is_replaced_and_the_others_go_on(mirrored: Mirrored) -> None:
    mirrored.going_on(0, 1)
    info = load_info(mirrored.directory)
    assert info.supervisor_pid is not None
    os.kill(info.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not proc.is_alive(info.supervisor_pid or 0, info.supervisor_started), what="the mirror's end")
    mirrored.going_on(0, 1)  # the reader has started another one
    there = load_info(mirrored.runs[0])
    assert there.supervisor_pid is not None
    os.kill(there.supervisor_pid, signal.SIGKILL)
    mirrored.going_on(1)
    mirrored.going_on(0)  # the exporter has started another one
    os.killpg(mirrored.watching.pid, signal.SIGKILL)
    mirrored.watching.wait()
    mirrored.going_on(0, 1)
    mirrored.has_everything()


def test_no_process_of_a_mirrored_run_listens(mirrored: Mirrored) -> None:
    """Only ssh has a socket of a network."""
    mirrored.going_on(0, 1)
    pid = load_info(mirrored.directory).supervisor_pid
    assert pid is not None

    def both() -> list[tuple[str, str]] | None:
        """Program and state of each socket, while both are connected: a busy one may be cut off for some time."""
        ours = set(proc.process_tree(pid)) | set(proc.process_tree(mirrored.watching.pid))
        ours |= proc.with_descendants({pid, mirrored.watching.pid}, proc.read_process_table())
        for run in mirrored.runs:
            ours |= set(proc.process_tree(load_info(run).supervisor_pid or 0))
        sockets = [(os.readlink(f"/proc/{one}/exe"), socket) for one in ours for socket in sockets_of(one)]
        return sockets if len(sockets) == 2 and all(socket.endswith(" 01") for _, socket in sockets) else None

    for program, socket in wait_for(both, what="two established connections, and no other socket"):
        assert os.path.basename(program) == "ssh"
        assert socket.startswith("tcp ")
