"""A script in a fork of a Python with torch behaves the same as in a fresh Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from running import Dpmon, wait_for
from tracing import Script, Traced
from warm import python

from dpmon.run import proc

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


def both(place: Path, text: str, *words: str, **options: Any) -> list[tuple[Any, Traced]]:
    """Run the script in a fresh interpreter and in a fork, with a line of input; return their output."""
    found = []
    for fresh in (True, False):
        script = Script(place, text, *words, fresh=fresh, **options)
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


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("def f():\n    raise ValueError('no')\nf()", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import sys; sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import threading; threading.Thread(target=print, args=['from a thread']).start()", 0),
    ],
)
def test_a_fork_ends_as_a_fresh_python(tmp_path: Path, end: str, status: int) -> None:
    text = f"import atexit\natexit.register(print, 'at exit')\nprint('begun')\n{end}\n"
    (fresh, _), (fork, _) = both(tmp_path, text, run=False)
    assert fork == fresh
    assert fork[0] == status


def test_torch_comes_with_its_import_and_goes_through_the_tracer(tmp_path: Path) -> None:
    text = (
        "import importlib.util, sys\n"
        "print(importlib.util.find_spec('torch').name, 'torch' in sys.modules)\n"
        "from torch import nn\n"
        "import torch.nn.functional\n"
        "print(torch.__spec__.loader is torch.__loader__, type(torch.__loader__).__name__, nn is torch.nn)\n"
        "nn.Linear(2, 1)(torch.ones(3, 2))\n"
    )
    script = Script(tmp_path, text)
    run = script.end()
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert run.out == "torch False\nTrue SourceFileLoader True\n"
    assert run.stages == ("importing torch", "torch imported")
    assert [call.rows for call in run.calls()] == [3]


def test_a_fork_under_dpmon_behaves_as_a_fresh_python(dpmon: Dpmon) -> None:
    """Both use the real command, supervisor and record."""
    dpmon.script(
        "import sys, torch\nprint(sys.argv, sys.stdin.read())\ntorch.nn.Linear(2, 1)(torch.ones(3, 2))\n"
        "def f():\n    raise ValueError('no')\nf()\n"
    )
    found = []
    for options in ((), dpmon.warm()):
        result = dpmon.run(*options, "--headless", "script.py", "a b")
        calls = [(r["inputs"][0]["shape"], r["root"]) for r in dpmon.records() if r["kind"] == "call"]
        found.append((result.status, result.out, (dpmon.last() / "stderr.log").read_text(), calls))
    assert found[0] == found[1]
    assert (found[0][0], found[0][3]) == (1, [([3, 2], "Linear")])


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
        wait_for(lambda script=script: not proc.alive(script, None), what="the script's end")  # type: ignore[misc]


def test_a_client_that_ends_before_the_answer_does_no_harm(dpmon: Dpmon) -> None:
    stand_in = Path(python(dpmon.environment()))
    dpmon.script("import time\ntime.sleep(600)\n")
    request = {"argv": ["script.py"], "cwd": str(dpmon.cwd), "env": dpmon.environment(), "session": True}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, open(os.devnull, "r+b") as null:
        asking.connect(str(stand_in.with_name("socket")))
        socket.send_fds(asking, [json.dumps(request).encode()], [null.fileno()] * 3)
    process = dpmon.start(argv=[str(stand_in), str(dpmon.script("print(1)"))])
    assert process.communicate(timeout=200)[0] == b"1\n"
