"""Files of a run that are replaced while it goes on: the script and its supervisor take no harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import put
from running import Dpmon, wait_for

from dpmon.run import proc

WAITS = """
import os, time, warnings
open("began", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
import dpmon.tracer.inject as inject  # what it calls when a ring cannot be made
inject.note("said in vain", "warnings.log")
inject.note("said in vain", "stages.log")
print("done", flush=True)
raise SystemExit(5)
"""
SPOILED = (
    *("warnings.log", "stages.log", "endings.log", "spare", "stop-asked", "waits-for-input", "history.sqlite-journal"),
    *("input.fifo", "keep", "process-3.ring", "gpu-1.ring", "exit.json"),
)


@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link", "a directory"])
def test_what_is_replaced_while_a_run_goes_on(dpmon: Dpmon, tmp_path: Path, kind: str) -> None:
    script = dpmon.script(WAITS)
    process = dpmon.start("--headless", script)
    wait_for((dpmon.cwd / "began").exists)
    info = dpmon.info()
    directory = dpmon.last()
    wait_for((directory / "history.sqlite").exists)
    for name in SPOILED:
        if kind == "a directory" and name in ("exit.json", "input.fifo"):
            continue  # in its place nothing can be put: how the run ended is told by its ring
        put(kind, directory / name)
    looked = directory / "supervisor.log"
    (directory / "precious").touch()
    (dpmon.cwd / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, b"done\n"), err
    assert json.loads((directory / "exit.json").read_text())["status"] == 5
    wait_for(lambda: not proc.alive(info["supervisor_pid"], info["supervisor_started"]), what="the supervisor's end")
    assert "Traceback" not in looked.read_text()
    assert (directory / "precious").read_text() in ("", "precious"), "nothing was written through a link"
    assert "script" in dpmon.run("ls", limit=20).text
    assert dpmon.run("report", limit=20).status == 0
