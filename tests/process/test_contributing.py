"""The example in docs/contributing.md results in a working field."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import DOCS, ROOT, patched, patches
from plain_training import plain_training
from running import Dpmon, Terminal

pytestmark = pytest.mark.slow

STEPS = 60
TRAINS = plain_training(STEPS)
PATCHES = patches(DOCS / "contributing.md")
TESTS = (
    *("unit/test_schema.py", "unit/test_records.py", "unit/test_ui_panel_devices.py"),
    *("unit/test_tracer_timing.py", "process/test_new_phase.py::test_their_values_are_those_that_were_measured"),
)
"""The quick ones among the tests that the page names, and those that look at all spans or change the same code."""
NAME, LABEL = "switches", "lost the processor"
RANK = """
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for step in range(15):
    model(torch.randn(6, 4)).sum().backward()
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the patches of the page and a new reference."""
    root = tmp_path_factory.mktemp("changed")
    for part in ("dpmon", "tests"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for path, hunks in PATCHES:
        (root / path).write_text(patched((root / path).read_text(), hunks))
    (root / "docs").mkdir()
    (root / "docs" / "records.md").write_text(_python(root, "-m", "dpmon.record.reference"))
    return root


def _python(root: Path, *words: str) -> str:
    """Run Python with the copy; return its output."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dpmon, dict[str, str]]]:
    """A training under unpatched dpmon, then one and a rank under the copy; and the environment of the copy."""
    where = tmp_path_factory.mktemp("run")
    (where / "cwd").mkdir()
    dpmon = Dpmon(where / "state", where / "cwd")
    env = {"PYTHONPATH": str(changed), "PYTHONDONTWRITEBYTECODE": "1"}
    dpmon.script(TRAINS)
    before = dpmon.run("--headless", "--name", "before", "script.py")
    assert before.status == 0, before.errors
    result = dpmon.run("--headless", "--name", "after", "script.py", env=env)
    assert result.status == 0, result.errors
    (dpmon.cwd / "rank.py").write_text(RANK)
    dpmon.run("--headless", "--name", "rank", "rank.py", env=env)
    yield dpmon, env
    dpmon.clean_up()


def test_it_takes_few_files() -> None:
    sections = (DOCS / "contributing.md").read_text().split("\n## ")
    files = [set(re.findall(r"(?m)^\+\+\+ b/dpmon/(.*)$", section)) for section in sections]
    assert [len(each) for each in files if each] == [3, 3, 1], "a quantity, a fact of ranks, a row of a panel"


def test_other_tests_pass(changed: Path) -> None:
    said = _python(
        changed, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS)
    )
    assert " passed" in said


def test_json_lines_have_the_field(run: tuple[Dpmon, dict[str, str]]) -> None:
    dpmon, env = run
    steps = [json.loads(line) for line in dpmon.run("export", "after", "--kind", "step", env=env).text.splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert NAME not in steps[0], "the first backward pass has nothing to count from"
    assert all(type(step[NAME]) is int and step[NAME] >= 0 for step in steps[1:])


def test_the_report_has_the_field(run: tuple[Dpmon, dict[str, str]]) -> None:
    dpmon, env = run
    text = " ".join(dpmon.run("report", "after", env=env).text.split())
    assert f"{LABEL}: " in text
    assert f"(known in {STEPS - 1} of {STEPS} steps)" in text


def test_the_screen_has_the_field(run: tuple[Dpmon, dict[str, str]]) -> None:
    dpmon, env = run
    terminal = Terminal(dpmon, "attach", "after", size=(50, 180), **env)
    terminal.shows(f"{LABEL}: ")
    terminal.type("q")
    terminal.wait()


def test_record_and_report_have_the_fact_of_ranks(run: tuple[Dpmon, dict[str, str]]) -> None:
    dpmon, env = run
    facts = json.loads(dpmon.run("export", "rank", "--kind", "ddp", env=env).text.splitlines()[-1])
    assert facts["dtypes"] == "float"
    assert "parameters of type float" in " ".join(dpmon.run("report", "rank", env=env).text.split())
    (wrapper,) = json.loads(dpmon.run("report", "rank", "--json", env=env).text)["communication"]["wrappers"]
    assert wrapper["dtypes"] == "float"


def test_a_run_from_before_the_change_is_refused_with_a_sentence(run: tuple[Dpmon, dict[str, str]]) -> None:
    dpmon, env = run
    result = dpmon.run("report", "before", env=env)
    assert (result.status, result.out) == (2, b"")
    assert "another version of dpmon recorded this run" in result.errors
    assert f" {STEPS} steps, " in dpmon.run("report", "before").text
