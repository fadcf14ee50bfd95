"""A real Slurm of two nodes on this machine, for tests: its daemons, `srun`, and a state directory for each node."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from running import end_all, free_ports, wait_for

NODES = ("n1", "n2")
_PROGRAMS = ("slurmctld", "slurmd", "srun", "squeue", "sinfo", "scancel")
_CONFIG = """\
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
_DPMON = """\
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
        for name in ("state", "bin", *NODES):
            (self.place / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        config = _CONFIG.format(host=host, ports=free_ports(3), user=getpass.getuser(), place=self.place)
        (self.place / "slurm.conf").write_text(config)
        dpmon = self.place / "bin" / "dpmon"
        dpmon.write_text(_DPMON.format(place=self.place, python=sys.executable))
        dpmon.chmod(0o755)
        self._daemon("controller", "slurmctld", "-D", "-c")
        for node in NODES:
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
        names = ("controller", *NODES)
        ended = [name for name, process in zip(names, self.processes, strict=True) if process.poll() is not None]
        return (self.place / f"{ended[0]}.log").read_text().strip().rpartition("\n")[2] if ended else None

    def stop(self) -> None:
        """End the jobs and the daemons."""
        self.said("scancel", "--me", "--full")
        end_all(self.processes)


@contextmanager
def slurm(place: Path) -> Iterator[Slurm]:
    """Two nodes in `place`, until the end of the block. Skips the test where Slurm is missing or does not start."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} of Slurm is not installed")
    cluster = Slurm(place)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
