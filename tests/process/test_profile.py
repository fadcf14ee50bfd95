"""`dpmon profile`: some steps under torch.profiler in real runs, refusals, and what the script must not see of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dpmon.span_reader import SpanReader
from dpmon.span_ring import HeaderWord
from support.run_harness import Dpmon, wait_for
from support.tracer_harness import TracedScript, run_untraced

pytestmark = pytest.mark.slow

STEPS = """
import os, sys, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
BEGIN
for step in range(int(sys.argv[1])):
    loss = net(torch.rand(4, 8)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    EACH
    print(loss.item().hex())
"""


def script_text(each: str = "", begin: str = "") -> str:
    return STEPS.replace("EACH", each or "pass").replace("BEGIN", begin)


ASK = "import dpmon.span_reader, dpmon.tracer.profiling as p; p.CHECK_NS = 0"
RING = "dpmon.span_reader.SpanReader(os.environ['DPMON_RUN'] + '/process-0.ring')"


def asking(steps: int = 3, at: str = "step == 100") -> str:
    return f"if {at}: {RING}.request_profile({steps})"


def ends(run: Any) -> list[dict[str, Any]]:
    return [event.data for event in run.events("profile")]


def test_the_script_sees_nothing_of_it(tmp_path: Path) -> None:
    run = TracedScript(tmp_path, script_text(asking(), ASK), 200, mode="script", flags=("-W", "error")).end()
    plain = run_untraced(tmp_path, script_text(), 200, flags=("-W", "error"))
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert (run.out, run.err) == (plain.out, plain.err)
    (end,) = ends(run)
    assert end["steps"] == 3
    slowed = [step.step for step in run.steps() if step.is_slowed and step.step > 50]
    assert slowed == list(range(end["step"] - 2, end["step"] + 2))
    operators = end["operators"]
    assert {operator["on"] for operator in operators} == {"host"}
    assert "aten::addmm" in {operator["name"] for operator in operators}
    assert [operator["ms"] for operator in operators] == sorted(
        (operator["ms"] for operator in operators), reverse=True
    )
    names = [event.get("name") for event in json.loads((run.directory / end["file"]).read_text())["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 3


def test_the_newest_trace_is_kept(tmp_path: Path) -> None:
    run = TracedScript(tmp_path, script_text(asking(1, "step % 20 == 9"), ASK), 200, mode="script").end()
    assert len(ends(run)) == 10
    assert [path.name for path in run.directory.glob("profile-*")] == ["profile-0.json"]


OWN = """
from torch.profiler import profile, schedule
own = profile(schedule=schedule(wait=1, warmup=1, active=1)) if OWN else None
if own: own.start()
"""


@pytest.mark.parametrize(
    ("each", "begin"),
    [
        ("own.step() if step < 3 else None", OWN.replace("OWN", "True")),  # on, or waiting for its next step
        (
            "own.__exit__(None, None, None) if step == 150 else None",
            "from torch.autograd import profiler; own = profiler.profile().__enter__()",
        ),
    ],
)
def test_refused_while_the_script_profiles_itself(tmp_path: Path, each: str, begin: str) -> None:
    run = TracedScript(tmp_path, script_text(f"{each}\n    {asking()}", f"{ASK}\n{begin}"), 200, mode="script").end()
    assert run.status == 0, run.err
    (end,) = ends(run)
    assert end["refused"] == "the script uses torch.profiler itself"
    assert run.complaints == []


def test_a_profiler_that_the_script_starts_meanwhile_works(tmp_path: Path) -> None:
    begin = f"{ASK}\nfrom torch.autograd import profiler; own = profiler.profile()"
    each = f"{asking(20)}\n    if step == 105: own.__enter__()\n    if step == 110: own.__exit__(None, None, None)"
    text = script_text(each, begin) + "print(sum('addmm' in event.name for event in own.function_events))\n"
    run = TracedScript(tmp_path, text, 200, mode="script").end()
    assert run.status == 0, run.err
    assert run.out.splitlines()[-1] == "10"
    assert "disableProfiler" not in run.err
    assert ends(run)[0]["refused"] == "the script started torch.profiler itself"


@pytest.mark.parametrize("name", ["profile", "KinetoStepTracker"])
def test_a_profiler_that_fails_does_not_disturb_the_script(tmp_path: Path, name: str) -> None:
    begin = f"{ASK}\nfrom torch.autograd import profiler; profiler.{name} = None"
    run = TracedScript(tmp_path, script_text(asking(), begin), 200, mode="script").end()
    assert (run.status, run.err) == (0, "")
    assert [end["refused"] for end in ends(run)] == ["torch.profiler failed: see the warnings"]
    assert len(run.complaints) == 1


def test_flops_are_counted_after_a_profile(tmp_path: Path) -> None:
    """The profile of the first steps delays the count; both are complete."""
    run = TracedScript(tmp_path, script_text(asking(20, "step == 0"), ASK), 100, mode="script").end()
    assert (run.status, run.err, run.complaints) == (0, "", [])
    (end,) = ends(run)
    (counted,) = [event.data for event in run.events("flops")]
    assert end["steps"] == 20
    assert counted["step"] == end["step"] + 1
    assert counted["flops"] > 0


FORK = """
    if step == 110 and os.fork() == 0:
        print(torch.autograd.profiler._is_profiler_enabled, flush=True)
        os._exit(0)
"""


def test_a_fork_ends_it(tmp_path: Path) -> None:
    run = TracedScript(tmp_path, script_text(asking(50) + FORK, ASK), 200, mode="script").end()
    assert run.status == 0, run.err
    assert "False" in run.out.splitlines()
    (end,) = ends(run)
    assert 0 < end["steps"] < 50


def test_the_end_of_the_script_ends_it(tmp_path: Path) -> None:
    run = TracedScript(tmp_path, script_text(asking(50), ASK), 120, mode="script", fresh=True).end()
    assert (run.status, run.err, run.complaints) == (0, "", [])
    (end,) = ends(run)
    assert 0 < end["steps"] < 50
    assert end["file"]


def test_a_compiled_model(tmp_path: Path) -> None:
    compiled = "net = torch.compile(net, backend='eager')"
    run = TracedScript(tmp_path, script_text(asking(), f"{ASK}\n{compiled}"), 200, mode="script").end()
    plain = run_untraced(tmp_path, script_text(begin=compiled), 200)
    assert run.status == 0, run.err
    assert (run.err, run.out) == (plain.err, plain.out)
    assert [end.get("refused") for end in ends(run)] == [None]


def test_replicas_are_in_it(tmp_path: Path) -> None:
    """DataParallel runs each replica in a thread of its own, which torch's profiler sees since torch 2.6."""
    begin = f"{ASK}\nnet = nn.DataParallel(net)"
    run = TracedScript(tmp_path, script_text(asking(), begin), 200, replicas=2).end()
    assert (run.status, run.complaints) == (0, [])
    (end,) = ends(run)
    calls = {operator["name"]: operator["calls"] for operator in end["operators"]}
    threads = set()
    for event in json.loads((run.directory / end["file"]).read_text())["traceEvents"]:
        if event.get("name") == "aten::addmm":
            threads.add(event["tid"])
    assert len(threads) >= 2, calls


ENDLESS = script_text("(print('step', step, flush=True), __import__('time').sleep(0.02))", "")


def start(dpmon: Dpmon, text: str) -> None:
    dpmon.start("--headless", dpmon.script(text), 100_000)
    wait_for(lambda: b"training" in dpmon.run("status", "--json").out or None)


def test_the_command_prints_and_the_report_names_it(dpmon: Dpmon) -> None:
    start(dpmon, ENDLESS)
    done = dpmon.run("profile", "--steps", 2)
    assert done.status == 0, done.errors
    assert done.text.startswith("2 steps of process 0 up to step ")
    assert "aten::addmm" in done.text
    said = json.loads(dpmon.run("profile", "--json").text)
    assert (dpmon.last() / said["file"]).exists()
    assert said["steps"] == 3
    refused = dpmon.run("profile", "--rank", 7)
    assert (refused.status, refused.errors.count("\n")) == (2, 1)
    assert "no training process of rank 7" in refused.errors
    report = json.loads(dpmon.run("report", "--json").text)
    assert report["profiles"][-1]["file"] == said["file"]
    assert "aten::addmm" in dpmon.run("report").text
    explained = dpmon.run("status", "--explain").text.splitlines()
    assert 10 < len(explained) <= 40
    dpmon.stop("last")
    over = dpmon.run("profile", "last")
    assert (over.status, over.errors.count("\n")) == (2, 1)


def test_the_run_is_killed_while_the_profile_waits_for_a_step(dpmon: Dpmon) -> None:
    start(dpmon, script_text("if step == 200: __import__('time').sleep(10_000)"))
    wait_for(lambda: json.loads(dpmon.run("status", "--json").out)["steps"] > 200 or None)
    command = dpmon.start("profile")
    ring = SpanReader(str(dpmon.last() / "process-0.ring"))
    wait_for(lambda: ring._read_word(HeaderWord.PROFILE) or None)
    os.kill(dpmon.info()["command_pid"], signal.SIGKILL)
    _, errors = command.communicate(timeout=200)
    assert command.returncode == 2
    assert b"was not profiled: rank 0 ended no step within 60 s, or the run ended" in errors
    assert dpmon.run("report").status == 0


RANKS = """
import os, sys, time, torch, torch.distributed as dist
rank = 0 if os.fork() else 1
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"), rank=rank, world_size=2)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(100_000):
    loss = net(torch.ones(4, 64)).sum()
    time.sleep(0.02 + 0.04 * rank)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_straggler_of_two_ranks_is_profiled(dpmon: Dpmon) -> None:
    def straggler() -> Any:
        members = json.loads(dpmon.run("status", "--json").out)
        return ((members.get("communication") or {}).get("straggler") or {}).get("rank")

    dpmon.start("--headless", dpmon.script(RANKS))
    dpmon.info()
    assert wait_for(straggler, 200) == 1
    done = dpmon.run("profile", "--json")
    assert done.status == 0, done.errors
    said = json.loads(done.text)
    assert said["rank"] == 1
    dpmon.stop("last")
    steps = [one for one in dpmon.records() if one["kind"] == "step"]
    assert {step["rank"] for step in steps} == {0, 1}
    report = json.loads(dpmon.run("report", "--json").text)
    counted = {rank["rank"]: rank["steps"] for rank in report["ranks"]}
    assert counted == {rank: sum(step["rank"] == rank for step in steps) for rank in (0, 1)}
    assert {"gloo:all_reduce", "gloo:allreduce"}.isdisjoint(operator["name"] for operator in said["operators"])
