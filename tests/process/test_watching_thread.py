"""The thread in the training process that answers while the training is stuck, and what nobody sees of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.run.run_directory import RunInfo
from dpmon.sanitize import sanitize_line
from dpmon.stalls import rank_inspector, stacks
from dpmon.stalls.rank_inspector import RankInspector
from dpmon.stalls.stacks import ProcessStacks
from dpmon.stalls.stall_detection import RankActivity, Stall, describe_activity
from dpmon.stalls.stall_report import build_report
from dpmon.stalls.why_text import format_report
from support.tracer_harness import TracedScript, run_traced

pytestmark = pytest.mark.slow

TRAIN = """
import os, signal, sys, threading, time, torch
model = torch.nn.Linear(2, 1)
model(torch.ones(3, 2)).sum().backward()
"""
UNSEEN = """
import builtins, signal, sys, time
callers = set()
def noted(original):
    def call(*args, **kwargs):
        callers.add(get_ident())
        return original(*args, **kwargs)
    return call
from threading import get_ident
time.sleep = noted(time.sleep)
sys._current_frames = noted(sys._current_frames)
class Ring:
    def __del__(self):
        callers.add(get_ident())
import torch
time.monotonic_ns = noted(time.monotonic_ns)
builtins.len, builtins.min, builtins.getattr = noted(len), noted(min), noted(getattr)
model = torch.nn.Linear(2, 1)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
import os, threading
end = time.monotonic() + 2.5
while time.monotonic() < end:
    ring = Ring()
    ring.itself = ring
    model(torch.ones(3, 2)).sum().backward()
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigtimedwait({signal.SIGUSR1}, 10).si_signo == signal.SIGUSR1)
print(threading.enumerate() == [threading.main_thread()], threading.active_count())
print(callers == {get_ident()})
"""


def test_the_script_sees_nothing_of_it(tmp_path: Path) -> None:
    """No call of what the script replaced, no signal of the script's, no finalizer in it, no thread in a list."""
    run = run_traced(tmp_path, UNSEEN, mode="script")
    assert (run.status, run.out, run.err) == (0, "True\nTrue 1\nTrue\n", "")
    assert run.calls()


FORKS = (
    TRAIN
    + """
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
read, write = os.pipe()
if not os.fork():
    plain = threads()
    model(torch.ones(3, 2)).sum().backward()
    os.write(write, f"{plain} {threads()}".encode())
    sys.exit(0)
os.wait()
print(before, os.read(read, 100).decode())
"""
)


def test_a_forked_child_has_a_thread_once_it_trains(tmp_path: Path) -> None:
    run = run_traced(tmp_path, FORKS)
    assert (run.status, run.out, run.err) == (0, "2 1 2\n", "")


ENDINGS = {
    "return": ("", 0),
    "exception": ("raise ValueError('over')", 1),
    "SystemExit": ("sys.exit(3)", 3),
    "_exit": ("os._exit(4)", 4),
    "interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_the_process_is_its_own(tmp_path: Path, ending: str) -> None:
    """Also in the moment in which the thread asks a process group: it is ended first."""
    text, status = ENDINGS[ending]
    begin = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
    hasten = "responder_thread.POLL_INTERVAL_S = responder_thread.MIN_IDLE_NS = 0\n"
    started = "import os, signal, sys, time, torch\nfrom dpmon.tracer import responder_thread\n" + hasten
    run = run_traced(tmp_path, f"{started}{begin}{TRAIN}print('there', flush=True)\n{text}")
    assert (run.status if ending != "interrupt" else status, run.out) == (status, "there\n")
    if ending in ("return", "SystemExit", "_exit"):
        assert run.err == ""
    else:
        assert run.err.count("Traceback") == 1


STUCK = {
    "asleep": "time.sleep(600)",
    "GIL": "import ctypes; ctypes.PyDLL(None).sleep(600)",
    "deep": "sys.setrecursionlimit(20_000)\ndef f(n):\n    return f(n - 1) if n else time.sleep(600)\nf(10_000)",
    "hostile": "exec(compile('def f():\\n time.sleep(600)\\nf()', 'a\\x1b]52;c;AAAA\\x07\\u202e.py', 'exec'))",
    "thread": "t = threading.Thread(target=lambda: 0)\nt.start(); time.sleep(600)",
}


@pytest.fixture(params=STUCK)
def stuck(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, TracedScript]]:
    """A script that is stuck."""
    script = TracedScript(tmp_path, f"{TRAIN}print('there', flush=True)\n{STUCK[request.param]}\n")
    assert script.line() == "there"
    yield request.param, script
    script.process.kill()
    script.process.wait()


def taken(script: TracedScript) -> ProcessStacks:
    """The stacks of a script."""
    look = RankInspector(script.directory, str(script.cwd))
    script.ring().close()
    look.inspect_ranks({}, time.monotonic_ns())
    found, before = ProcessStacks(), None
    while found != before:  # until it stands still
        before = found
        (found,) = look.take_stacks().values()
    look.close()
    return found


@pytest.mark.parametrize("by", ["py-spy", "the process"])
def test_the_stack_of_a_stuck_script(stuck: tuple[str, TracedScript], by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, script = stuck
    monkeypatch.setattr(stacks, "MAX_DUMP_S", 60.0)
    if name != "GIL":  # a busy machine needs more time for the answer
        monkeypatch.setattr(rank_inspector, "MAX_NOTE_WAIT_S", 60.0)
    if by == "the process":
        monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    elif stacks.find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    found = taken(script)
    if (name, by) == ("GIL", "the process"):
        assert found.stacks == ()
        assert "py-spy is not installed" in (found.reason or "")
        assert "C code holds the GIL" in (found.reason or "")
        return
    main = found.main
    assert found.reason is None
    assert main is not None
    assert main.innermost_script_frame is not None
    if name == "deep":
        assert len(main.frames) == 120
        assert main.left_out > 9_800
    if name == "hostile":
        assert "\x1b" in main.innermost_script_frame.file
    else:
        assert main.innermost_script_frame.file.endswith("script.py")
    rank = RankActivity(1, 0, since_ns=1, stack=main)
    info = RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True)
    shown = format_report(
        build_report([rank], {1: found}, Stall(1, (0,), ()), 2, info, text=describe_activity(rank, "")),
        all_threads=True,
    )
    assert all(text == sanitize_line(text) for text, _ in shown)
