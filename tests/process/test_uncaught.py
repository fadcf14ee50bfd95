"""An exception in one of several processes is shown everywhere with its rank, its message and the script's line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dpmon.run.failure_cause import STATUSES, find_first_failure
from dpmon.run.process_notes import UncaughtException, trim_launcher_lines
from support.run_harness import Dpmon
from support.tracer_harness import run_traced

pytestmark = pytest.mark.slow

_INSTALLED = Path(sys.executable).with_name("torchrun")
TORCHRUN = [str(_INSTALLED)] if _INSTALLED.exists() else ["-m", "torch.distributed.run"]

SCRIPT = """\
import os, time
import torch
rank = int(os.environ["RANK"])
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if rank == 1 and step == 5:
        raise RuntimeError("rank 1 broke on purpose")
time.sleep(600)  # the launcher ends the other rank
"""
SENTENCE = "rank 1: RuntimeError: rank 1 broke on purpose (train.py:10)"


def test_a_message_is_shortened_to_its_first_line() -> None:
    gloo = (
        "[/w/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:22196: Connection reset by peer. "
    )
    raised = UncaughtException(
        7, 9, "RuntimeError", gloo + "This is typically caused by a remote worker. " * 9 + "\nMore", 0
    )
    said = raised.sentence("/")
    assert said.startswith("rank 0: RuntimeError: Read error [127.0.0.1]:22196: Connection reset by peer. This")
    assert said.endswith(" ...")
    assert len(said) <= 150


@pytest.mark.parametrize(
    ("text", "cause"), [("x = = 1", "SyntaxError: invalid syntax"), ("raise ValueError('\x07')", "ValueError: \ufffd")]
)
def test_a_script_that_fails_before_it_imports_torch(dpmon: Dpmon, text: str, cause: str) -> None:
    run = dpmon.run("--headless", dpmon.script(text))
    assert (run.status, dpmon.exit()["cause"]) == (1, cause)
    assert f"s: {cause}\n" in run.errors
    assert cause in " ".join(dpmon.run("report").text.split())


def test_a_rank_that_raises_under_torchrun(dpmon: Dpmon) -> None:
    script = dpmon.script(SCRIPT, "train.py")
    run = dpmon.run("--headless", *TORCHRUN, "--nproc-per-node", "2", script)
    assert run.status == 1
    assert "exit status 1 after" in run.errors
    assert f"s: {SENTENCE}\n" in run.errors
    assert dpmon.exit()["cause"] == SENTENCE
    assert " -15\n" in (dpmon.last() / STATUSES).read_text(), "the launcher ended rank 0 later"
    listed = dpmon.run("ls")
    assert f"\n    {SENTENCE}\n" in listed.text
    (entry,) = [json.loads(line) for line in dpmon.run("ls", "--json").text.splitlines()]
    assert (entry["state"], entry["cause"]) == ("failed", SENTENCE)
    report = json.loads(dpmon.run("report", "--json").text)
    (first, *others) = report["findings"]
    assert (first["kind"], first["text"]) == ("failed", f"An exception ended the run: {SENTENCE}.")
    assert not [one for one in others if one["kind"] == "failed"]
    text = dpmon.run("report").text
    assert "): failed with exit status 1 after " in " ".join(text.split())
    assert "RuntimeError: rank 1 broke on purpose\n" in text, "the last line of the output"
    assert SENTENCE in " ".join(text.split())
    assert "ChildFailedError" not in text
    first_line, _, lines = dpmon.run("why").out.decode().partition("\n")
    assert first_line.endswith(f": {SENTENCE}")
    assert f"traceback, innermost call first:\n  <module> ({script}:10)\n" in lines
    assert json.loads(dpmon.run("why", "--json").out)["frames"] == [["<module>", str(script), 10]]


UNUSED = """\
import torch
import torch.distributed as dist
from torch import nn

class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(16, 16){freeze}
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x, aux):
        return self.b(self.a(self.frozen(x))) if aux else self.a(x)

dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(Three())
{prepare}
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for i in range(50):
    loss = net(torch.randn(4, 16), i < 10).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("freeze", "prepare", "names"),
    [
        (".requires_grad_(False)", "", "b.weight, b.bias"),
        ("", "net.module.frozen.requires_grad_(False)", "frozen.weight, frozen.bias"),
    ],
    ids=["frozen before", "frozen after"],
)
def test_parameters_that_a_wrapper_waits_for_are_named(dpmon: Dpmon, freeze: str, prepare: str, names: str) -> None:
    """DistributedDataParallel has only their numbers. A parameter that was frozen before it was made has none."""
    script = dpmon.script(UNUSED.format(freeze=freeze, prepare=prepare))
    run = dpmon.run("--headless", *TORCHRUN, "--nproc-per-node", "2", script)
    assert run.status == 1
    report = json.loads(dpmon.run("report", "--json").text)
    (failure,) = [finding for finding in report["findings"] if finding["kind"] == "failed"]
    assert f"RuntimeError: no gradient for {names}. Expected to have finished reduction" in failure["text"]
    assert failure["advice"].startswith("find_unused_parameters=True")


ABORTED = """\
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(3, 1)
for step in range(5):
    model(torch.ones(2, 3)).sum().backward()
if dist.get_rank() == 1:
    os.abort()
dist.all_reduce(torch.ones(3))
"""


PATIENT = f"""\
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
statuses = os.path.join(os.environ["DPMON_RUN"], {STATUSES!r})
while not os.path.exists(statuses) or " -6\\n" not in open(statuses).read():
    time.sleep(0.05)
"""
"""Rank 0 ignores the SIGTERM of the launcher until the supervisor has seen the end of rank 1."""


def test_a_rank_that_ends_without_an_exception_comes_first(dpmon: Dpmon) -> None:
    """Not the exception of the other rank, which lost its connection."""
    script = dpmon.script(ABORTED.replace("dist.all_reduce", f"{PATIENT}dist.all_reduce"), "train.py")
    run = dpmon.run("--headless", *TORCHRUN, "--nproc-per-node", "2", script)
    first = "rank 1 was ended by SIGABRT"
    assert dpmon.exit()["cause"].startswith(first), "the launcher may end rank 0 before its exception"
    assert f"s: {first}" in run.errors
    assert f"\n    {first}" in dpmon.run("ls").text
    report = json.loads(dpmon.run("report", "--json").text)
    assert report["findings"][0]["text"] == f"A rank ended without an exception: {first}."


def test_the_named_line_is_one_of_the_script(dpmon: Dpmon) -> None:
    """Not the line in torch where the exception was raised."""
    script = dpmon.script("import torch\n\ntorch.ones(2) @ torch.ones(3)\n", "train.py")
    run = dpmon.run(*dpmon.warm(), "--headless", script)
    assert run.status == 1
    assert "s: RuntimeError: " in run.errors
    assert "(train.py:3)\n" in run.errors


def test_the_named_line_of_an_installed_program_is_one_of_its_package(dpmon: Dpmon) -> None:
    package = dpmon.cwd / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "train.py").write_text("import torch\n\ntorch.ones(2) @ torch.ones(3)\n")
    env = {"PYTHONPATH": str(package.parent)}
    run = dpmon.run(*dpmon.warm(env), "--headless", "-m", "trainer.train", env=env)
    assert run.status == 1
    assert "(trainer/train.py:3)\n" in run.errors


def noted(directory: Path, *lines: str) -> None:
    (directory / "endings.log").write_text("".join(f"{line}\n" for line in lines))


def of(rank: int, message: str = "") -> str:
    return json.dumps({"message": message, "rank": rank, "file": "/work/train.py", "line": 3})


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((), None),
        (("7 1 ValueError",), "ValueError"),
        (("7 9 ChildFailedError {}", f"8 5 OSError {of(1, 'second')}", f"9 4 KeyError {of(0, 'a')}"),
         "rank 0: KeyError: a (train.py:3)"),
        (("7 9 ValueError {}", f"8 5 OSError {of(1)}"), "ValueError"),
        (("7 9 CalledProcessError {}", f"8 5 OSError {of(1)}"), "rank 1: OSError (train.py:3)"),
        (("7 9 CalledProcessError {}",), "CalledProcessError"),
        (("7 9 ChildFailedError {}", "8 3 KeyboardInterrupt {}"), "ChildFailedError"),
        (("nonsense", "8 x Error", "8 5 Error [", "8 5", ""), "Error"),
        (('7 1 Error {"frames": [["f", "a.py", "x"]]}',), "Error"),
    ],
)  # fmt: skip
def test_which_exception_ended_the_run(tmp_path: Path, lines: tuple[str, ...], sentence: str | None) -> None:
    noted(tmp_path, *lines)
    found = find_first_failure(tmp_path, _Info(), 1)  # type: ignore[arg-type]
    assert (None if found is None else found.sentence("/work")) == sentence


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (("7 1 ValueError {}",), None),
        (("7 1 ValueError {}", "8 5 OSError {}"), None),
        (("8 5 OSError {}",), "OSError"),  # the command is a launcher with its own exit status
    ],
)
def test_a_noted_exception_counts_only_with_the_status_of_an_exception(
    tmp_path: Path, lines: tuple[str, ...], kind: str | None
) -> None:
    noted(tmp_path, *lines)
    found = find_first_failure(tmp_path, _Info(), 3)  # type: ignore[arg-type]
    assert (None if found is None or found.exception is None else found.exception.kind) == kind


def test_a_handled_exception_did_not_end_the_run(dpmon: Dpmon) -> None:
    """`code` and IPython leave sys.last_type behind."""
    script = dpmon.script(
        "import code, sys, torch\ncode.InteractiveInterpreter().runsource('1 / 0')\nsys.exit(3)\n", "train.py"
    )
    run = dpmon.run("--headless", script)
    assert run.status == 3
    assert "ZeroDivisionError" in (dpmon.last() / "endings.log").read_text(), "Python does remember it"
    assert "s: ZeroDivisionError" not in run.errors
    assert dpmon.exit()["cause"] is None
    assert "An exception ended the run" not in dpmon.run("report").text


INTERRUPTED = """\
import os, signal, sys, torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
ours = sys.modules["dpmon.tracer.patch"]
owners = {
    "begins": (ours.ResponderThread, "at_exit"),
    "second": (ours.CollectiveSampler, "at_exit"),
    "last": (ours, "append_note"),
}
owner, name = owners[sys.argv[1]]
original = getattr(owner, name)

def interrupted(*words):
    if getattr(owner, name) is not original:
        setattr(owner, name, original)
        print("interrupted", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
    return original(*words)

setattr(owner, name, interrupted)
raise ValueError("no data")
"""


@pytest.mark.parametrize("when", ["begins", "second", "last"])
def test_an_interrupt_while_the_tracer_ends(tmp_path: Path, when: str) -> None:
    """A launcher passes on the Ctrl-C that its ranks have got already."""
    run = run_traced(tmp_path, INTERRUPTED, when)
    assert (run.status, run.out) == (1, "interrupted\n")
    assert run.err.splitlines()[-1] == "ValueError: no data"
    assert "Exception ignored" not in run.err
    assert "ValueError" in (run.directory / "endings.log").read_text()
    assert run.complaints == []
    assert len(run.steps()) == 3


class _Info:
    command_pid = 7


def test_the_last_attempt_of_a_restarting_launcher_counts(tmp_path: Path) -> None:
    noted(tmp_path, f"8 5 OSError {of(0, 'first')}", f"9 25 KeyError {of(1, 'a')}", f"10 26 ValueError {of(0)}",
          "7 30 ChildFailedError {}")  # fmt: skip
    stages = ["7 1 importing torch", "8 2 importing torch", "9 11 importing torch", "10 12 importing torch"]
    (tmp_path / "stages.log").write_text("".join(f"{line}\n" for line in stages))
    found = find_first_failure(tmp_path, _Info(), 1)  # type: ignore[arg-type]
    assert found is not None
    assert found.sentence("/work") == "rank 1: KeyError: a (train.py:3)"


@pytest.mark.parametrize(
    ("statuses", "raised", "sentence"),
    [
        (("8 5 -6", "9 7 -15"), None, "rank 1 was ended by SIGABRT"),
        (("8 5 3",), None, "rank 1 exited with status 3"),
        (("7 5 -6", "10 5 -6"), None, "ChildFailedError"),
        (("8 5 -6", "9 8 1"), 6, "rank 1 was ended by SIGABRT; rank 0: OSError: reset (train.py:3)"),
        # The supervisor is a little late, but it sees the two ends in their order.
        (("8 5 -6", "9 8 1"), 4, "rank 1 was ended by SIGABRT; rank 0: OSError: reset (train.py:3)"),
        (("9 5 1", "8 7 -15"), 4, "rank 0: OSError: reset (train.py:3)"),
        (("8 90000000 -6", "9 99000000 1"), 4, "rank 0: OSError: reset (train.py:3)"),
    ],
)
def test_a_rank_that_ended_without_a_note(
    tmp_path: Path, statuses: tuple[str, ...], raised: int | None, sentence: str
) -> None:
    """Process 8 is rank 1, process 9 is rank 0, which may have noted an exception."""
    noted(tmp_path, "7 9 ChildFailedError {}", *([] if raised is None else [f"9 {raised} OSError {of(0, 'reset')}"]))
    joined = [f"{pid} 2 joining the process group: gloo, rank {9 - pid} of 2" for pid in (8, 9)]
    (tmp_path / "stages.log").write_text("".join(f"{line}\n" for line in ["7 1 importing torch", *joined]))
    (tmp_path / STATUSES).write_text("".join(f"{line}\n" for line in statuses))
    found = find_first_failure(tmp_path, _Info(), 1)  # type: ignore[arg-type]
    assert found is not None
    assert found.sentence("/work") == sentence


def test_a_signal_that_the_launcher_passes_on_is_its_own(tmp_path: Path) -> None:
    noted(tmp_path, "7 9 SignalException {}")
    (tmp_path / "stages.log").write_text("8 2 joining the process group: gloo, rank 1 of 2\n")
    (tmp_path / STATUSES).write_text("8 5 -15\n")
    found = find_first_failure(tmp_path, _Info(), 1)  # type: ignore[arg-type]
    assert found is not None
    assert found.sentence("/work") == "SignalException"


def test_a_rank_of_mp_spawn_that_raises(dpmon: Dpmon) -> None:
    script = dpmon.script(
        "import torch\n\n\ndef train(rank):\n    if rank == 1:\n        raise ValueError('no data')\n\n\n"
        "if __name__ == '__main__':\n    torch.multiprocessing.spawn(train, nprocs=2)\n",
        "train.py",
    )
    run = dpmon.run(*dpmon.warm(), "--headless", script)
    assert run.status == 1
    assert dpmon.exit()["cause"] == "rank 1: ValueError: no data (train.py:6)"
    assert f"innermost call first:\n  train ({script}:6)\n" in dpmon.run("why").text


def test_the_output_ends_with_the_exception() -> None:
    raised = UncaughtException(8, 5, "RuntimeError", "broke")
    lines = ["training", "[rank1]: RuntimeError: broke", "E1122 failed", "ChildFailedError: "]
    assert trim_launcher_lines(lines, raised, 7) == lines[:2]
    assert trim_launcher_lines(lines, None, 7) == lines
    assert trim_launcher_lines(lines[2:], raised, 7) == lines[2:]
    assert trim_launcher_lines(lines, raised, 8) == lines, "the script's own output, which atexit may add to"
