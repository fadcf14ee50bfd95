"""Real ssh to machines that are only names: each is an sshd of the test, with keys and configuration of its own.

`Ssh` starts an sshd for each connection, as a ProxyCommand: no port, no daemon. `Hosts` makes network namespaces with
an sshd in each, and a cable to each that can be cut, slow or lossy; this needs root, `ip`, `tc` and `nft`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from running import wait_for

from dpmon.run import proc

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
BIN = os.path.dirname(shutil.which("dpmon", path=os.path.dirname(sys.executable)) or sys.executable)
_NUMBERS = itertools.count()


def no_ssh() -> str | None:
    """Return why there can be no sshd here, or None."""
    for name in ("ssh", "ssh-keygen"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    return "sshd is not installed" if SSHD is None else None


def no_namespaces() -> str | None:
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
        return no_ssh()
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


class Ssh:
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

    def add(self, name: str, state: Path, *, server: str = "", client: str = "", path: str = BIN) -> None:
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


class Hosts:
    """Network namespaces with an sshd in each, all on cables to one namespace, in which `dpmon` looks at them."""

    def __init__(self, place: Path, names: Mapping[str, Path], delay_s: Mapping[str, float] | None = None) -> None:
        """`names`: each machine with the directory of its runs; `delay_s`: of each way to a machine, by name."""
        self.place = place
        self._delay_s = delay_s or {}
        self.ssh = Ssh(place)
        self.environment = self.ssh.environment
        self._mark = f"dp{os.getpid()}n{next(_NUMBERS)}"
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
        for inside, device, address in ((self.viewer, here, 1), (namespace, "eth", 2)):
            self._ip("-n", inside, "address", "add", f"10.77.{number}.{address}/24", "dev", device)
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
