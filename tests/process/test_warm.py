"""A script in a fork of a Python with torch behaves the same as in a fresh Python."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dpmon.run import proc
from support.run_harness import Dpmon, wait_for
from support.tracer_harness import TracedRun, TracedScript

pytestmark = pytest.mark.slow

LOOK = """
import json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "file": __file__, "cwd": os.getcwd(), "environment": dict(os.environ),
    "globals": {name: type(value).__name__ for name, value in globals().items()},
    "torch": [name for name in sys.modules if name.partition(".")[0] == "torch"],
    "dpmon": sorted(name for name in sys.modules if name.startswith("dpmon")),
    "streams": [[repr(s), s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.fileno(), s.newlines,
                 type(s.buffer).__name__, s is s_] for s, s_ in zip(
                     (sys.stdin, sys.stdout, sys.stderr), (sys.__stdin__, sys.__stdout__, sys.__stderr__))],
    "flags": [v for n in dir(sys.flags) if n[0] != "_" and n not in ("count", "index", "unbuffered")
              for v in [getattr(sys.flags, n)] if not callable(v)],
    "hooks": [str(sys.excepthook), str(sys.displayhook), sys.gettrace(), sys.getprofile()],
    "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "threads": threading.active_count(), "input": sys.stdin.readline(), "fds": sorted(os.listdir("/proc/self/fd")),
    "leader": os.getpgrp() == os.getpid(),
}))
"""


def both(place: Path, text: str, *words: str, **options: Any) -> list[tuple[Any, TracedRun]]:
    """Run the script in a fresh interpreter and in a fork, with a line of input; return their output."""
    found = []
    for fresh in (True, False):
        script = TracedScript(place, text, *words, fresh=fresh, **options)
        with contextlib.suppress(BrokenPipeError):  # a script that does not read it may have ended
            script.go_on("a line")
        run = script.end()
        here = str(run.directory.parent)
        found.append(((run.status, run.out.replace(here, "HERE"), run.err.replace(here, "HERE")), run))
    return found


@pytest.mark.parametrize(("run", "env"), [(True, {"MINE": "1"}), (False, {"PYTHONUNBUFFERED": "1"})])
def test_a_fork_has_the_surroundings_of_a_fresh_python(tmp_path: Path, run: bool, env: dict[str, str]) -> None:
    (fresh, one), (fork, other) = both(tmp_path, LOOK, "-x", "two words", run=run, env=env)
    assert fork[0] == fresh[0] == 0, fork[2]
    seen, known = other.printed, one.printed
    for found in (seen, known):
        found["environment"].pop("DPMON_START_NS", None)
    place, expected = str(other.directory.parent), str(one.directory.parent)
    for name in known:
        assert str(seen[name]).replace(place, "HERE") == str(known[name]).replace(expected, "HERE"), name
    assert known["torch"] == []
    assert bool(known["dpmon"]) == run


def test_torch_comes_with_its_import_and_goes_through_the_tracer(tmp_path: Path) -> None:
    text = (
        "import importlib.util, sys\n"
        "print(importlib.util.find_spec('torch').name, 'torch' in sys.modules)\n"
        "from torch import nn\n"
        "import torch.nn.functional\n"
        "print(torch.__spec__.loader is torch.__loader__, type(torch.__loader__).__name__, nn is torch.nn)\n"
        "nn.Linear(2, 1)(torch.ones(3, 2))\n"
    )
    script = TracedScript(tmp_path, text)
    run = script.end()
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert run.out == "torch False\nTrue SourceFileLoader True\n"
    assert run.stages == ("importing torch", "torch imported")
    assert [call.rows for call in run.calls()] == [3]


def test_the_stand_in_for_python_forwards_signals_and_its_end_ends_the_script(dpmon: Dpmon) -> None:
    text = "import os, pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    dpmon.script(
        text + "pathlib.Path('pid.new').write_text(str(os.getpid()))\nos.rename('pid.new', 'pid')\ntime.sleep(600)\n"
    )
    for number, status in ((signal.SIGTERM, 5), (signal.SIGKILL, 128 + signal.SIGKILL)):
        process = dpmon.start(*dpmon.warm(), "--headless", "script.py")
        wait_for((dpmon.cwd / "pid").exists)
        script = int((dpmon.cwd / "pid").read_text())
        (dpmon.cwd / "pid").unlink()
        os.kill(dpmon.info()["command_pid"], number)
        assert process.wait(100) == status
        wait_for(lambda script=script: not proc.is_alive(script, None), what="the script's end")
