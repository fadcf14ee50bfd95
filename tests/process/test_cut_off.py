"""A process that ends before its loop is known loses no call."""

from __future__ import annotations

import pytest

from support.run_harness import Dpmon, Terminal

SCRIPT = """
import os, signal, sys
import torch

model = torch.nn.Linear(4, 1)
x, y = torch.randn(10, 4), torch.randn(10, 1)
passes = 0

def closure():
    global passes
    if passes == 54:
        print(passes, flush=True)
        END
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    passes += 1
    return loss

"""
LBFGS = "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=999, tolerance_grad=0, tolerance_change=-1)\n"
LOOPS = {
    "a closure": LBFGS + "optimizer.step(closure)",
    "accumulation": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True: closure()",
}
ENDS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "an exception": "raise ArithmeticError",
    "its last line": "sys.exit()",
}


@pytest.mark.parametrize(("loop", "end"), [*zip([*LOOPS, *LOOPS], ENDS, strict=True)])
def test_the_calls_before_the_end_are_steps(dpmon: Dpmon, loop: str, end: str) -> None:
    run = dpmon.run(*dpmon.warm(), "--headless", dpmon.script(SCRIPT.replace("END", ENDS[end]) + LOOPS[loop]))
    assert run.text.split()[0] == "54"
    records = dpmon.records()
    steps = [record for record in records if record["kind"] == "step"]
    assert sum(record["kind"] == "call" for record in records) == len(steps) == 54
    assert all("backward" in step["phases"] and step["samples"] == 10 for step in steps)
    report = " ".join(dpmon.run("report").text.split())
    assert ("The last step is incomplete" in report) == (end != "its last line")
    assert "nothing was traced" not in run.errors


def test_the_screen_shows_calls_while_the_loop_is_not_known(dpmon: Dpmon) -> None:
    waits = "import time; time.sleep(300)"
    script = dpmon.script(SCRIPT.replace("END", waits) + LOOPS["accumulation"])
    terminal = Terminal(dpmon, script, size=(40, 120))
    terminal.shows("54 calls so far; the end of a step is not known yet")
    dpmon.run("stop", "last")
    terminal.shows("stopped")
    terminal.type("q")
    terminal.wait()
