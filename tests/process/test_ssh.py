"""Machines reached by a real ssh, each an sshd of the test: what works, and each way in which it does not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.cli.main import main
from dpmon.mirror import remote_hosts
from dpmon.run import proc
from support.cluster_harness import (
    TRAINING_UNTIL_GO,
    FollowReader,
    SshServers,
    missing_for_ssh,
    row_ids_of_history,
    sockets_of,
)
from support.history_builders import write_run_directory
from support.record_builders import Training
from support.run_harness import Dpmon, wait_for, wait_until_no_command_is_left

pytestmark = pytest.mark.skipif(missing_for_ssh() is not None, reason=missing_for_ssh() or "")


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServers]:
    """Real ssh, first in PATH, without machines yet."""
    made = SshServers(tmp_path / "ssh")
    made.add("probe", tmp_path / "probe")
    why = made.works("probe")
    if why is not None:
        pytest.skip(why)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    wait_until_no_command_is_left()


def test_machines_are_listed_and_each_bad_one_has_a_sentence(
    ssh: SshServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("gpu-1", "gpu-2"):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
        write_run_directory({0: [*Training().begin(), *Training().run(5)]}, name=name)
    monkeypatch.setattr(remote_hosts, "_MAX_SILENCE_S", 100.0)
    banner = tmp_path / "banner"
    banner.write_text("Authorized \x1b[2J use only\n")
    ssh.add("gpu-1", tmp_path / "gpu-1", server=f"Banner {banner}")
    ssh.add("gpu-2", tmp_path / "gpu-2", path="/nowhere")  # found at its path here
    ssh.add("no..name", tmp_path, client="ProxyCommand none")
    ssh.add("refuses", tmp_path, client="ProxyCommand none\nHostName 127.0.0.1\nPort 1")
    ssh.add("password", tmp_path, client=f"IdentityFile {ssh.place}/other", server="AuthorizedKeysFile none")
    ssh.add("unknown", tmp_path, client="UserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null")
    ssh.add("missing", tmp_path, server="ForceCommand no-dpmon")
    ssh.add("rubbish", tmp_path, server="ForceCommand printf 'a\\033[2Jb\\n\\033[1mc'")
    ssh.add("hangs", tmp_path, server="ForceCommand sleep 1000")
    ssh.add("gigabyte", tmp_path, server="ForceCommand head -c 1000000000 /dev/zero")
    said = {
        "no..name": "its name has no address: check the name",
        "refuses": "it refused the connection: no ssh server at its port",
        "password": "it asks for a password, or refuses your key: set up a key that needs none",
        "unknown": "its host key is unknown or has changed: connect to it once by hand",
        "missing": "dpmon is not there, or not in the PATH of its commands",
        "rubbish": "it lists no run that this dpmon can read, but prints: �[1mc",
        "gigabyte": "it sent a line of more than 1 MiB",
    }
    assert main(["ls", "--hosts", ",".join(["gpu-1", *said, "gpu-2"])]) == 1
    shown = capsys.readouterr()
    assert dict(line.removeprefix("dpmon: ").split(": ", 1) for line in shown.err.splitlines()) == said
    assert [line.split()[1:4] for line in shown.out.splitlines()[1:]] == [
        ["gpu-1", shown.out.splitlines()[1].split()[2], "finished"],
        ["gpu-2", shown.out.splitlines()[2].split()[2], "finished"],
    ]
    # By itself, because the others may need some seconds on a busy computer.
    monkeypatch.setattr(remote_hosts, "_MAX_SILENCE_S", 2.0)
    assert main(["ls", "--host", "hangs"]) == 1
    assert capsys.readouterr().err == "dpmon: hangs: it has sent nothing for 2 s\n"


def test_records_come_over_ssh_and_go_on_after_it_was_killed(ssh: SshServers, dpmon: Dpmon, tmp_path: Path) -> None:
    """No row is lost or doubled. ssh is the only process with a socket of a network, and nobody listens."""
    ssh.add("gpu-1", dpmon.state)
    run = dpmon.start("--headless", dpmon.script(TRAINING_UNTIL_GO))
    dpmon.info()
    (machine,) = remote_hosts.resolve_hosts(["gpu-1"])
    reader = FollowReader(list(machine.command_prefix), dpmon.last().name)
    try:
        wait_for(lambda: reader.poll() is not None and len(reader.ids) > 20, what="some rows")
        for _ in range(2):
            # On a busy machine, the connection may also have ended because nothing came for some seconds.
            wait_for(lambda: reader.poll() is not None and reader.links._links[0].is_open, what="a connection")
            process = reader.links._links[0].process
            assert process is not None
            listening = [
                socket
                for pid in (
                    os.getpid(),
                    *proc.process_tree(process.pid),
                    *proc.process_tree(dpmon.info()["supervisor_pid"]),
                )
                for socket in sockets_of(pid)
            ]
            assert not listening
            os.kill(process.pid, signal.SIGKILL)
            before, ended = len(reader.ids), len(reader.closed)
            wait_for(
                lambda before=before, ended=ended: (
                    reader.poll() is not None and len(reader.closed) > ended and len(reader.ids) > before
                ),
                what="rows after the connection was killed",
            )
            assert reader.closed[ended].why == "the command was ended by SIGKILL"
        dpmon.go()
        assert run.wait(100) == 0
        dpmon.exit()
        wait_for(lambda: reader.poll() is not None and reader.ended, what="the end of the records")
    finally:
        reader.links.close_all()
    assert sorted(reader.ids) == row_ids_of_history(dpmon.last())


def test_a_connection_that_the_user_shares_is_used(ssh: SshServers, tmp_path: Path) -> None:
    """The master stays, and holds what it got from the first command, which must end all the same."""
    control = f"ControlMaster auto\nControlPersist 60\nControlPath {tmp_path}/c"
    ssh.add("gpu-1", tmp_path / "gpu-1", client=control)
    (machine,) = remote_hosts.resolve_hosts(["gpu-1"])
    words = [str(ssh.place / "bin" / "ssh"), "-O", "check", "gpu-1"]
    try:
        for _ in range(2):
            (printed,) = remote_hosts.run_on_hosts([machine], ("--version",))
            assert printed.why == ""
            assert printed.lines[0].startswith(b"dpmon ")
            assert subprocess.run(words, capture_output=True).returncode == 0
    finally:
        subprocess.run([*words[:2], "exit", "gpu-1"], capture_output=True)
