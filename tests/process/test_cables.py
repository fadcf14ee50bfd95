"""Machines in network namespaces, with cables that are cut, slow or lossy: records come once each, and in time.

Needs root, ip, tc, nft and sshd.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from followed import TRAINING, Reader, ids_of
from running import Dpmon, wait_for
from sshd import Hosts, no_namespaces, sockets_of

from dpmon.mirror.hosts import machines
from dpmon.run import proc

pytestmark = pytest.mark.slow


@pytest.fixture
def host(dpmon: Dpmon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """One machine, gpu-1, with the runs of `dpmon`, which trains until `go`."""
    why = no_namespaces()
    if why is not None:
        pytest.skip(why)
    made = Hosts(tmp_path / "net", {"gpu-1": dpmon.state})
    try:
        monkeypatch.setenv("PATH", made.environment["PATH"])
        dpmon.start("--headless", dpmon.script(TRAINING), env={"PATH": os.environ["PATH"]})
        dpmon.info()
        yield made
    finally:
        made.close()


@pytest.fixture
def reader(host: Hosts, dpmon: Dpmon) -> Iterator[Reader]:
    """A reader of the run, by ssh from the namespace of the viewer."""
    (machine,) = machines(["gpu-1"])
    made = Reader(["ip", "netns", "exec", host.viewer, *machine.words], dpmon.last().name)
    yield made
    made.links.close()


def more(reader: Reader, count: int) -> None:
    """Wait for this many more rows."""
    wanted = len(reader.ids) + count
    wait_for(lambda: reader.poll() is not None and len(reader.ids) >= wanted, what="more rows")


def all_came_once(reader: Reader, dpmon: Dpmon) -> None:
    """Let the training end, and compare the rows that came with those of the history."""
    dpmon.go()
    dpmon.exit()
    wait_for(lambda: reader.poll() is not None and reader.ended, what="the end of the records")
    assert sorted(reader.ids) == ids_of(dpmon.last())


def test_a_cut_is_noticed_and_no_row_is_lost_or_doubled(host: Hosts, reader: Reader, dpmon: Dpmon) -> None:
    more(reader, 20)
    host.cut(0)  # shorter than the limit of silence
    time.sleep(1.0)
    host.mend(0)
    more(reader, 20)
    before = len(reader.closed)
    host.cut(0)
    began = time.monotonic()
    wait_for(lambda: reader.poll() is not None and len(reader.closed) > before, what="the end of the connection")
    print(f"noticed after {time.monotonic() - began:.1f} s: {reader.closed[-1].why}")
    assert reader.closed[-1].why in ("the connection was cut", "it has sent nothing for 5 s")
    assert not reader.closed[-1].for_good
    wait_for(lambda: reader.poll() is not None and len(reader.closed) > before + 1, what="a connection in vain")
    host.mend(0)
    more(reader, 20)
    all_came_once(reader, dpmon)


def test_only_ssh_talks_to_a_network_and_nobody_listens(host: Hosts, reader: Reader, dpmon: Dpmon) -> None:
    more(reader, 20)
    process = reader.links._links[0].process
    assert process is not None
    info = dpmon.info()
    ours = [os.getpid(), *proc.tree(info["supervisor_pid"]), *proc.tree(info["command_pid"])]
    exporters = [
        pid
        for pid in proc.every_process()
        if b"--follow" in (words := proc.fact(pid, "cmdline").split(b"\0")) and b"dpmon" in words[1]
    ]
    assert exporters
    assert not [socket for pid in (*ours, *exporters) for socket in sockets_of(pid)]
    children = {pid: sockets_of(pid) for pid in proc.tree(process.pid)}
    assert any(socket.startswith("tcp") for sockets in children.values() for socket in sockets)
    for pid, sockets in children.items():
        assert not sockets or os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "ssh"


def test_records_come_once_each_over_a_slow_and_lossy_cable(host: Hosts, reader: Reader, dpmon: Dpmon) -> None:
    host.slow(0, "256kbit")
    host.lose(0, 5)
    more(reader, 100)
    all_came_once(reader, dpmon)


def test_a_machine_that_is_switched_off_does_not_hold_up_another(host: Hosts, dpmon: Dpmon) -> None:
    """The end of the cable is dead, so the connection is never refused."""
    (machine,) = machines(["gpu-1"])
    words = ["ip", "netns", "exec", host.viewer, *machine.words]
    dead = [word.replace("gpu-1", host.address(0).rpartition(".")[0] + ".99") for word in words]
    reader = Reader(words, dpmon.last().name, dead)
    try:
        more(reader, 20)
        wait_for(lambda: reader.poll() is not None and reader.closed, what="the dead machine")
        assert {closed.node for closed in reader.closed} == {1}
        assert reader.closed[0].why == "it cannot be reached"
        more(reader, 20)
    finally:
        reader.links.close()
