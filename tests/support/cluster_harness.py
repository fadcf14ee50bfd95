"""Real clusters on this machine: Slurm with two nodes, sshd for each host, and the stream that a mirror reads."""

from __future__ import annotations

import contextlib
import getpass
import itertools
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpmon.mirror.node_links import LineReceived, LinkClosed, LinkOpened, NodeLinks, Report
from dpmon.run import proc
from support.run_harness import end_all, free_ports, wait_for

SLURM_NODES = ("n1", "n2")
_SLURM_PROGRAMS = ("slurmctld", "slurmd", "srun", "squeue", "sinfo", "scancel")
_SLURM_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/controller.pid
SlurmdPidFile={place}/%n.pid
ReturnToService=2
SelectType=select/cons_tres
SlurmdParameters=config_overrides
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=test Nodes=n1,n2 Default=YES OverSubscribe=FORCE:8 State=UP
"""
_DPMON_OF_NODE = """\
#!/bin/sh
# Two nodes of Slurm on one machine would share a state directory, as two machines never do.
[ -z "$SLURMD_NODENAME" ] || export XDG_STATE_HOME={place}/state-$SLURMD_NODENAME
exec {python} -m dpmon "$@"
"""


@dataclass
class Slurm:
    """The daemons, without munge: they believe everybody, and listen on this machine only."""

    place: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which `srun`, `squeue`, and this `dpmon` are found."""
        path = f"{self.place / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"SLURM_CONF": str(self.place / "slurm.conf"), "PATH": path}

    def state(self, node: str) -> Path:
        """The state directory of a node."""
        return self.place / f"state-{node}"

    def start(self) -> None:
        """Start the daemons, and wait until a job can run on both nodes."""
        for name in ("state", "bin", *SLURM_NODES):
            (self.place / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        config = _SLURM_CONFIG.format(host=host, ports=free_ports(3), user=getpass.getuser(), place=self.place)
        (self.place / "slurm.conf").write_text(config)
        dpmon = self.place / "bin" / "dpmon"
        dpmon.write_text(_DPMON_OF_NODE.format(place=self.place, python=sys.executable))
        dpmon.chmod(0o755)
        self._daemon("controller", "slurmctld", "-D", "-c")
        for node in SLURM_NODES:
            self._daemon(node, "slurmd", "-D", "-N", node)
        wait_for(lambda: self._ended() or self.said("sinfo", "--noheader", "--format", "%D %t") == "2 idle")
        if (ended := self._ended()) is not None:
            pytest.skip(f"Slurm does not start here: {ended}")

    def said(self, *words: str) -> str:
        """What a program of Slurm prints."""
        done = subprocess.run(words, env={**os.environ, **self.environment}, capture_output=True, timeout=60)
        return done.stdout.decode().strip()

    def _daemon(self, name: str, *words: str) -> None:
        with (self.place / f"{name}.log").open("wb") as log:
            environment: Mapping[str, str] = {**os.environ, **self.environment}
            self.processes.append(
                subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _ended(self) -> str | None:
        """The last line of the log of a daemon that has ended."""
        names = ("controller", *SLURM_NODES)
        ended = [name for name, process in zip(names, self.processes, strict=True) if process.poll() is not None]
        return (self.place / f"{ended[0]}.log").read_text().strip().rpartition("\n")[2] if ended else None

    def stop(self) -> None:
        """End the jobs and the daemons."""
        self.said("scancel", "--me", "--full")
        end_all(self.processes)


@contextmanager
def start_slurm(place: Path) -> Iterator[Slurm]:
    """Two nodes in `place`, until the end of the block. Skips the test where Slurm is missing or does not start."""
    missing = [name for name in _SLURM_PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} of Slurm is not installed")
    cluster = Slurm(place)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


# ------------------------------------------------------------------------------------------------ ssh

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
DPMON_BIN = os.path.dirname(shutil.which("dpmon", path=os.path.dirname(sys.executable)) or sys.executable)
_NAMESPACE_NUMBERS = itertools.count()


def missing_for_ssh() -> str | None:
    """Return why there can be no sshd here, or None."""
    for name in ("ssh", "ssh-keygen"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    return "sshd is not installed" if SSHD is None else None


def missing_for_namespaces() -> str | None:
    """Return why there can be no network namespaces here, or None."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for name in ("ip", "tc", "nft"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    name = f"dpmon{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=False)
        return missing_for_ssh()
    return f"no network namespace can be made: {made.stderr.strip()}"


def sockets_of(pid: int) -> list[str]:
    """Return the sockets of a process: tcp and udp with addresses and state, and unix sockets that listen."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = []
    for name, inode_at in (("tcp", 9), ("tcp6", 9), ("udp", 9), ("udp6", 9), ("unix", 6)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[inode_at] in inodes and (name != "unix" or int(words[3], 16) & 0x10000):
                    found.append(f"{name} {' '.join(words[1:4])}")
    return found


class SshServers:
    """Machines that a wrapper of `ssh`, first in PATH, reaches; `environment` has this PATH."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True)
        for name in ("client", "host", "other"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(place / name)], check=True
            )
        (place / "authorized").write_text((place / "client.pub").read_text())
        (place / "known").write_text("")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start without it
        (place / "bin").mkdir()
        wrapper = place / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {place}/config "$@"\n')
        wrapper.chmod(0o700)
        self._write("config", "")
        self.environment = {"PATH": f"{place}/bin:{os.environ['PATH']}"}

    def _write(self, name: str, text: str) -> Path:
        path = self.place / name
        path.write_text(text)
        return path

    def add(self, name: str, state: Path, *, server: str = "", client: str = "", path: str = DPMON_BIN) -> None:
        """Add a machine whose runs are in `state`, with more lines for the files of sshd and of ssh."""
        variables = [f'"XDG_STATE_HOME={state}"', f'"PATH={path}:/usr/bin:/bin"', '"PYTHONDONTWRITEBYTECODE=1"']
        config = self._write(
            f"{name}.sshd",
            f"{server}\nHostKey {self.place}/host\nAuthorizedKeysFile {self.place}/authorized\nStrictModes no\n"
            f"UsePAM no\nPidFile none\nPermitRootLogin yes\nPrintMotd no\nSetEnv {' '.join(variables)}\n",
        )
        key = (self.place / "host.pub").read_text().split()
        with (self.place / "known").open("a") as known:
            known.write(f"{name} {key[0]} {key[1]}\n")
        with (self.place / "config").open("a") as file:
            file.write(
                f"Host {name}\n{client}\nProxyCommand {SSHD} -i -f {config}\nHostKeyAlias {name}\n"
                f"IdentityFile {self.place}/client\nIdentitiesOnly yes\nGlobalKnownHostsFile /dev/null\n"
                f"UserKnownHostsFile {self.place}/known\nStrictHostKeyChecking yes\n"
            )

    def works(self, name: str) -> str | None:
        """Return why a machine cannot be reached, although everything is set up, or None."""
        tried = subprocess.run(
            [str(self.place / "bin" / "ssh"), "-o", "BatchMode=yes", name, "true"], capture_output=True, text=True
        )
        return None if tried.returncode == 0 else f"sshd lets nobody in here: {tried.stderr.strip()}"


RELAY = """\
import os, select, socket, sys, time
there = socket.create_connection((sys.argv[1], int(sys.argv[2])))
ways, ends, held = {0: there.fileno(), there.fileno(): 1}, set(), []
while len(ends) < 2 or held:
    wait = max(held[0][0] - time.monotonic(), 0) if held else None
    for fd in select.select([fd for fd in ways if fd not in ends], [], [], wait)[0]:
        data = os.read(fd, 65536)
        held.append((time.monotonic() + float(sys.argv[3]), ways[fd], data))
        ends |= {fd} if not data else set()
    while held and held[0][0] <= time.monotonic():
        _, fd, data = held.pop(0)
        while data:
            data = data[os.write(fd, data):]
        if fd == 1 and ends >= {there.fileno()}:
            sys.exit()
"""
"""A ProxyCommand that connects to a host and a port, and passes on what comes after some seconds."""


class NamespaceHosts:
    """Network namespaces with an sshd in each, all on cables to one namespace, in which `dpmon` looks at them."""

    def __init__(self, place: Path, names: Mapping[str, Path], delay_s: Mapping[str, float] | None = None) -> None:
        """`names`: each machine with the directory of its runs; `delay_s`: of each way to a machine, by name."""
        self.place = place
        self._delay_s = delay_s or {}
        self.ssh = SshServers(place)
        self.environment = self.ssh.environment
        self._mark = f"dp{os.getpid()}n{next(_NAMESPACE_NUMBERS)}"
        self.viewer = f"{self._mark}v"
        self._namespaces = [self.viewer]
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._ip("netns", "add", self.viewer)
            self._ip("-n", self.viewer, "link", "set", "lo", "up")
            for number, (name, state) in enumerate(names.items()):
                self._add(number, name, state)
        except BaseException:
            self.close()
            raise

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def _add(self, number: int, name: str, state: Path) -> None:
        namespace, here = self.namespace(number), f"h{number}"
        self._ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        self._ip("link", "add", here, "netns", self.viewer, "type", "veth", "peer", "name", "eth", "netns", namespace)
        for inside, device, end in ((self.viewer, here, 1), (namespace, "eth", 2)):
            self._ip("-n", inside, "address", "add", f"10.77.{number}.{end}/24", "dev", device)
            self._ip("-n", inside, "link", "set", device, "up")
        self._ip("-n", namespace, "link", "set", "lo", "up")
        # Machines reach each other over the viewer.
        self._ip("-n", namespace, "route", "add", "default", "via", f"10.77.{number}.1")
        self.inside(None, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        address = self.address(number)
        relay = "none"
        if name in self._delay_s:
            (self.place / "relay.py").write_text(RELAY)
            relay = f"{sys.executable} -I -S {self.place}/relay.py %h %p {self._delay_s[name]}"
        client = f"HostName {address}\nProxyCommand {relay}"
        self.ssh.add(name, state, server=f"ListenAddress {address}", client=client)
        words = ["ip", "netns", "exec", namespace, str(SSHD), "-D", "-e", "-f", str(self.place / f"{name}.sshd")]
        with (self.place / f"{name}.log").open("wb") as log:
            self._daemons.append(subprocess.Popen(words, stderr=log, start_new_session=True))
        wait_for(lambda: b"listening" in (self.place / f"{name}.log").read_bytes(), what=f"sshd on {name}")

    def namespace(self, number: int) -> str:
        """Return the namespace of a machine."""
        return f"{self._mark}h{number}"

    def address(self, number: int) -> str:
        """Return the address of a machine."""
        return f"10.77.{number}.2"

    def inside(self, number: int | None, *words: str) -> None:
        """Run a command in the namespace of a machine, or of the viewer (None)."""
        namespace = self.viewer if number is None else self.namespace(number)
        subprocess.run(["ip", "netns", "exec", namespace, *words], check=True, capture_output=True)

    def cut(self, number: int) -> None:
        """Cut the cable of a machine: nothing tells either end."""
        self._ip("-n", self.viewer, "link", "set", f"h{number}", "down")

    def mend(self, number: int) -> None:
        """Mend the cable of a machine."""
        self._ip("-n", self.viewer, "link", "set", f"h{number}", "up")

    def slow(self, number: int, rate: str = "56kbit") -> None:
        """Make the cable from a machine slow."""
        shape = f"tc qdisc add dev eth root tbf burst 1600 latency 2000ms rate {rate}"
        self.inside(number, *shape.split())

    def lose(self, number: int, percent: int) -> None:
        """Lose some of the packets from a machine."""
        rule = f"numgen random mod 100 < {percent} counter drop"
        for words in ("add table ip bad", "add chain ip bad out { type filter hook output priority 0 ; }"):
            self.inside(number, "nft", words)
        self.inside(number, "nft", f"add rule ip bad out {rule}")

    def close(self) -> None:
        """End all that was started, and delete the namespaces."""
        for daemon in self._daemons:
            for pid in proc.process_tree(daemon.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            daemon.wait()
        for namespace in self._namespaces:
            # A session of ssh is no child of the daemon any more when the daemon has ended.
            found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


# ------------------------------------------------------------------------------------------------ a mirror's stream

TRAINING_UNTIL_GO = """\
import time, pathlib, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while not pathlib.Path("go").exists():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


class FollowReader:
    """Reads the rows of a run over links as a mirror does: whole chunks, each row above what it has."""

    def __init__(self, words: list[str], run: str, *others: list[str]) -> None:
        """`others`: commands of more machines, whose rows do not count."""
        self.offset = 0
        self.ids: list[int] = []
        self.closed: list[LinkClosed] = []
        self.opened = 0
        self._chunk: list[int] = []
        self.ended = False
        ways = [words, *others]
        self.links = NodeLinks(
            len(ways), lambda node: [*ways[node], "export", run, "--follow", "--from", str(self.offset)]
        )

    def poll(self) -> list[Report]:
        """Take what has come."""
        reports = self.links.poll(0.05)
        for report in reports:
            if isinstance(report, LinkOpened) and report.node == 0:
                self.opened += 1
                self._chunk = []
            elif isinstance(report, LinkClosed):
                self.closed.append(report)
            elif isinstance(report, LineReceived) and report.node == 0:
                self._take(json.loads(report.text))
        return reports

    def _take(self, line: dict[str, Any]) -> None:
        if "beat" in line:
            self.ids += self._chunk
            self._chunk = []
            self.offset = int(str(line["offset"]))
            self.ended = "exit" in line
        elif line.get("table") in ("steps", "events", "losses"):
            columns, rows = line["columns"], line["rows"]
            assert isinstance(columns, list)
            assert isinstance(rows, list)
            self._chunk += [row[columns.index("id")] for row in rows]


def row_ids_of_history(directory: Path) -> list[int]:
    """Return the ids of all rows of a finished run, but for its end, which comes with the last chunk."""
    with closing(sqlite3.connect(directory / "history.sqlite")) as history:
        return sorted(
            number
            for table in ("steps", "events", "losses")
            for (number,) in history.execute(
                f"SELECT id FROM {table} WHERE {'kind' if table == 'events' else 0} != 'exit'"
            )
        )
