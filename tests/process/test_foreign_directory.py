"""A run's directory from another person can be read; no command, file, connection or signal follows from it."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpmon.run import proc
from dpmon.span_ring import SpanRing
from dpmon.stalls.rank_inspector import RankInspector
from support.run_harness import Dpmon, wait_for, wait_until_unsupervised

READING = (["report", "old"], ["export", "old"], ["status", "old"], ["ls"], ["compare", "old", "old"])
STARTING = (["attach", "--headless", "old"], ["why", "old"], ["stop", "old"])


def planted(dpmon: Dpmon, options: dict[str, Any], **changed: Any) -> Path:
    """Return a run that seems to be live on this machine: its run.json has this boot, and there is no exit.json."""
    dpmon.script("pass")
    assert dpmon.run("--name", "old", *dpmon.warm(), "script.py").status == 0
    directory = dpmon.last()
    info = dpmon.info()
    wait_until_unsupervised(info)
    changed = {"boot_id": proc.boot_id(), "started_unix": time.time() - 100, **changed}
    (directory / "run.json").write_text(json.dumps({**info, **changed, "options": {**info["options"], **options}}))
    (directory / "exit.json").unlink()
    return directory


def supervisors(directory: Path) -> list[int]:
    """Return the background processes of dpmon for this directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(directory).encode() in words and "-I" in map(bytes.decode, words[:3]):
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("words", [*STARTING, *READING], ids=" ".join)
def test_nothing_acts_because_a_directory_says_so(
    dpmon: Dpmon, stranger: subprocess.Popen[bytes], words: list[str]
) -> None:
    acted, precious = dpmon.cwd / "acted", dpmon.cwd / "precious"
    precious.write_text("export PATH\n")
    directory = planted(
        dpmon,
        {"on_event": ["/bin/sh", "-c", f"touch {acted}"], "metrics": str(precious)},
        command_pid=stranger.pid,
        command_started=proc.start_time_s(stranger.pid),
    )
    attached = dpmon.start(*words) if words[0] == "attach" else None  # it follows a run whose command seems to live
    if attached is None:
        dpmon.run(*words)
    if words in STARTING:
        log = directory / "warnings.log"
        texts = ("took over without on_event", "took over without metrics")
        wait_for(lambda: all(text in dpmon.run("report", "old").text for text in texts), what="the warnings")
        assert not log.exists(), "a supervisor writes them into the history"
    else:
        assert supervisors(directory) == []
    assert stranger.poll() is None
    stranger.kill()  # now the run is over for its supervisor, which tells and writes the end
    stranger.wait()
    if attached is not None:
        attached.communicate(timeout=100)
    wait_for(lambda: supervisors(directory) == [], what="the end of the supervisor")
    assert precious.read_text() == "export PATH\n"
    assert not acted.exists()


@pytest.mark.parametrize("words", [*STARTING, *READING], ids=" ".join)
def test_no_connection_is_made_because_a_directory_names_machines(dpmon: Dpmon, words: list[str]) -> None:
    acted = dpmon.cwd / "acted"
    command = ["gpu-0", "20260101-000000-train-0001", "/bin/sh", "-c", f"touch {acted}"]
    directory = planted(dpmon, {"machines": [command]}, nodes=["gpu-0"], command_pid=None, command_started=None)
    result = dpmon.run(*words)
    assert "Traceback" not in result.errors
    wait_for(lambda: supervisors(directory) == [], what="the end of every background process")
    assert not acted.exists()


def test_a_command_without_its_environment_is_stopped_as_the_child_of_its_supervisor(dpmon: Dpmon) -> None:
    """`env -i` takes the proof away, and so does setproctitle, which writes over the environment."""
    words = ["env", "-i", sys.executable, "-c", "import time; open('began', 'w').close(); time.sleep(600)"]
    dpmon.run("--detach", "--name", "bare", *words)
    dpmon.begun()
    info = dpmon.info()
    result = dpmon.stop("bare")
    assert result.status == 0, result.errors
    assert not proc.is_alive(info["command_pid"], info["command_started"])


def test_a_process_that_nothing_proves_is_left_alone(dpmon: Dpmon) -> None:
    """Its supervisor was killed, and its environment does not name the run."""
    words = ["env", "-i", sys.executable, "-c", "import time; open('began', 'w').close(); time.sleep(600)"]
    dpmon.run("--detach", "--name", "bare", *words)
    dpmon.begun()
    info = dpmon.kill_supervisor()
    try:
        first, last = dpmon.stop("bare").text.splitlines()
        assert (
            first
            == f"process {info['command_pid']} is recorded as the command, but nothing proves it: no signal was sent"
        )
        assert last == "nothing runs"
        assert proc.is_alive(info["command_pid"], info["command_started"])
    finally:
        subprocess.run(["kill", "-9", str(info["command_pid"])], check=True)


def test_no_stack_is_taken_of_a_process_that_only_a_ring_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy halts a process while it reads the stack."""
    code = "import time; time.sleep(600)"
    words = [
        "sh",
        "-c",
        f"{sys.executable} -c '{code}' >&- 2>&- & echo $!",
    ]  # the shell ends, so it is no child of ours
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: another test may have made this process adopt it
    pid = int(subprocess.run(words, check=True, capture_output=True, start_new_session=True).stdout)
    try:
        with monkeypatch.context() as another:
            another.setattr(os, "getpid", lambda: pid)
            SpanRing(str(tmp_path / "process-0.ring"), process=0)
        with closing(RankInspector(tmp_path, "/")) as look:
            look.inspect_ranks({}, time.monotonic_ns())
            (taken,) = look.take_stacks().values()
            assert taken.reason is not None
            assert taken.reason.startswith("it is not proven to be a process of this run")
            # A stack that says that it waits for its loader does not lead to its children either.
            loader = {"name": "__next__", "filename": "/x/torch/utils/data/dataloader.py", "line": 5}
            forged = {"asked": 2, "threads": [{"thread_name": "MainThread", "frames": [loader]}]}
            (tmp_path / "process-0.stacks").write_text(json.dumps(forged) + "\n")
            monkeypatch.setattr(RankInspector, "_find_loader_worker", pytest.fail)
            (taken,) = look.take_stacks().values()
            assert taken.main is not None
    finally:
        os.kill(pid, signal.SIGKILL)


def test_no_file_is_deleted_that_a_rollback_journal_names(dpmon: Dpmon) -> None:
    """SQLite deletes the file that the end of a hot journal names, once a writer opens the database."""
    precious = dpmon.cwd / "precious"
    precious.write_text("mine")
    directory = planted(dpmon, {}, command_pid=999_999, command_started=1.0)
    name = os.fsencode(precious)
    record = struct.pack(">I", 0x40000000 // 4096 + 1) + name + struct.pack(">Ii", len(name), sum(name))
    (directory / "history.sqlite-journal").write_bytes(b"\1" * 512 + record + bytes.fromhex("d9d505f920a163d7"))
    dpmon.run("stop", "old")
    wait_for(lambda: supervisors(directory) == [], what="the end of the supervisor")
    assert precious.read_text() == "mine"


def test_the_current_directory_has_no_dpmon_to_run(dpmon: Dpmon) -> None:
    """`python -m dpmon`, which lists the runs of this machine like those of another one, would import it from there."""
    acted, package = dpmon.cwd / "acted", dpmon.cwd / "dpmon"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text(f"open({str(acted)!r}, 'w')\n")
    words = [str(Path(sys.executable).with_name("dpmon")), "ls", "--host", "localhost"]
    assert dpmon.run(argv=words).status == 0
    assert not acted.exists()


def test_a_run_with_the_id_of_another_one_is_not_listed(dpmon: Dpmon) -> None:
    directory = planted(dpmon, {})
    shutil.copytree(directory, directory.with_name(directory.name[:-4] + "0000"))
    result = dpmon.run("ls")
    assert "has the id of another run" in result.errors
    assert result.text.count("script.py") == 1
