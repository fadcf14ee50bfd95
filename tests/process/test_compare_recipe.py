"""The gate of docs/compare.md: a script compared with itself, made 10% slower, and with other arguments."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.format_readers import DOCS, blocks
from support.run_harness import Dpmon, put_dpmon_on_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
(RECIPE,) = [text for _, text in blocks(DOCS / "compare.md") if text.startswith("#!/bin/sh")]
SCRIPT = """\
import time
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
end = time.monotonic()
for batch in torch.utils.data.DataLoader(torch.randn(640, 4), 8):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
    # The end of each step is fixed, so a busy machine does not move the mean.
    end += PACE
    time.sleep(max(end - time.monotonic(), 0))
"""


def test_the_recipe_passes_equal_scripts_and_the_gate_finds_slower_and_other_ones(dpmon: Dpmon, tmp_path: Path) -> None:
    put_dpmon_on_path(tmp_path / "bin")
    env = dpmon.environment()
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"

    def run(command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["sh", "-c", command], cwd=dpmon.cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, " ".join(done.stdout.split())

    for name, pace in (("base", 0.05), ("new", 0.05), ("slow", 0.055)):
        (dpmon.cwd / name).mkdir()
        (dpmon.cwd / name / "train.py").write_text(SCRIPT.replace("PACE", str(pace)))
    (dpmon.cwd / "speed.sh").write_text(RECIPE)
    # A run that stands still for seconds makes an attempt inconclusive: the next one has other runs.
    for attempt in range(3):
        env["XDG_STATE_HOME"] = str(tmp_path / f"state-{attempt}")
        equal = run("sh speed.sh train.py")
        made = run("cd slow && for n in 1 2 3; do dpmon --headless --name slow-$n train.py --big || exit; done")
        slower = run("dpmon compare base-1 base-2 base-3 -- slow-1 slow-2 slow-3 --fail-if-slower 5%")
        if "inconclusive" not in equal[1] + slower[1]:
            break
    assert made[0] == 0, made
    status, out = equal
    assert status == 0, out
    assert ": not slower (step, limit +5.0%): from " in out
    assert "::warning::" not in out
    assert "directory" in out, "the only difference that dpmon knows"
    status, out = slower
    assert status == 4, out
    assert ": slower (step, limit +5.0%): from " in out
    assert re.search(r"arguments none (B: )?--big", out), "other arguments are no reason not to judge"
    status, out = run("dpmon compare base-1 slow-1 --anyway")
    assert status == 2
    assert "unknown option --anyway" in out
