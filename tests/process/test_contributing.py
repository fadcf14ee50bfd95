"""The examples in docs/contributing.md, and a new phase, result in fields that are shown wherever steps are shown."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.format_readers import DOCS, ROOT, apply_patch, patches
from support.run_harness import Dpmon, Terminal, plain_training_script

pytestmark = pytest.mark.slow

STEPS = 60
TRAINS = plain_training_script(STEPS)
PATCHES = patches(DOCS / "contributing.md")
PHASE: tuple[tuple[str, str, str], ...] = (
    (
        "record/schema.py",
        '    Phase(\n        "other"',
        '    Phase("await", "W", "the script waits for a device", optional=True),\n    Phase(\n        "other"',
    ),
    ("record/span_format.py", "    BUCKETS = 19\n", "    BUCKETS = 19\n    AWAIT = 30\n"),
    ("record/span_format.py", "DOING = {\n", 'DOING = {\n    Kind.AWAIT: "await",\n'),
    (
        "tracer/steps/span_recorder.py",
        "                try:\n                    if thread.has_fetch_note:\n",
        "                if span_kind == Kind.BACKWARD:\n"
        "                    began = monotonic_ns()\n"
        "                    while monotonic_ns() < began + 1_000_000:\n"
        "                        pass\n"
        "                    self.put(Kind.AWAIT | thread.thread_bits, began, monotonic_ns() - began, 0)\n"
        "                try:\n                    if thread.has_fetch_note:\n",
    ),
)
"""A phase besides the examples of the page: file, old text, new text."""
TESTS = ("test_schema.py", "test_records.py", "test_ui_panel_devices.py", "test_tracer_timing.py")
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
        (root / path).write_text(apply_patch((root / path).read_text(), hunks))
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "records.py", root / "docs")
    (root / "docs" / "records.md").write_text(_python(root, "docs/records.py"))
    return root


def _python(root: Path, *words: str) -> str:
    """Run Python with the copy; return its output."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Changed(NamedTuple):
    """Runs under the copy, and its command line."""

    dpmon: Dpmon
    env: dict[str, str]
    summary: str
    """The output of the foreground at the end of the run."""

    def says(self, *words: object) -> str:
        """Return the standard output of a command."""
        result = self.dpmon.run(*words, env=self.env)
        assert result.status == 0, result.errors
        return result.text


@pytest.fixture(scope="module")
def run(changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    """A training under unpatched dpmon, then a rank and a training under the copy with the new phase."""
    where = tmp_path_factory.mktemp("run")
    (where / "cwd").mkdir()
    shutil.copytree(changed / "dpmon", where / "path" / "dpmon", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in PHASE:
        path = where / "path" / "dpmon" / name
        assert path.read_text().count(old) == 1, (name, old)
        path.write_text(path.read_text().replace(old, new))
    dpmon = Dpmon(where / "state", where / "cwd")
    env = {"PYTHONPATH": str(where / "path"), "PYTHONDONTWRITEBYTECODE": "1"}
    dpmon.script(TRAINS)
    before = dpmon.run("--headless", "--name", "before", "script.py")
    assert before.status == 0, before.errors
    dpmon.run("--headless", "--name", "rank", dpmon.script(RANK, "rank.py"), env=env)
    options = ("--headless", "--json=lines", "--metrics", "run.prom", "--name", "after")
    result = dpmon.run(*options, "script.py", env=env)
    assert result.status == 0, result.errors
    yield Changed(dpmon, env, result.errors)
    dpmon.clean_up()


def test_it_takes_few_files() -> None:
    sections = (DOCS / "contributing.md").read_text().split("\n## ")
    files = [set(re.findall(r"(?m)^\+\+\+ b/dpmon/(.*)$", section)) for section in sections]
    counts = [len(each) for each in files if each]
    assert counts == [3, 3, 2, 1], "a quantity, a fact of ranks, a column of a table, a row of a panel"
    assert len({name for name, _, _ in PHASE}) == 3


def test_other_tests_pass(changed: Path) -> None:
    words = ("-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *(f"tests/unit/{name}" for name in TESTS))
    assert " passed" in _python(changed, *words)


def _screen(run: Changed) -> str:
    """Return the screen of the finished run, after waiting for the table of its phases."""
    terminal = Terminal(run.dpmon, "attach", "after", argv=None, size=(50, 180), **run.env)
    terminal.shows("median")
    terminal.shows("await")
    terminal.shows(f"{LABEL}: ")
    picture = terminal.picture()
    terminal.type("q")
    terminal.wait()
    return picture


PLACES: tuple[tuple[str, Callable[[Changed], str]], ...] = (
    ("JSON lines", lambda run: run.says("export", "after")),
    ("CSV", lambda run: run.says("export", "after", "--format", "csv", "--kind", "step")),
    ("trace", lambda run: run.says("export", "after", "--format", "perfetto")),
    ("summary", lambda run: run.summary),
    ("report", lambda run: run.says("report", "after")),
    ("report as JSON", lambda run: run.says("report", "after", "--json")),
    ("page", lambda run: run.says("report", "after", "--html", "-o", "-").partition("<script")[0]),
    ("lines of JSON", lambda run: (run.dpmon.cwd / "lines").read_text()),
    ("metrics", lambda run: (run.dpmon.cwd / "run.prom").read_text()),
    ("screen", _screen),
)
"""Every place that shows steps, with its text."""


@pytest.mark.parametrize("text_of", [pytest.param(text_of, id=name) for name, text_of in PLACES])
def test_the_new_phase_and_quantity_are_shown_everywhere(run: Changed, text_of: Callable[[Changed], str]) -> None:
    text = " ".join(text_of(run).split())
    for name in ("await", f"(?:{NAME}|{LABEL})"):
        assert re.search(rf"(?<![a-zA-Z]){name}(?![a-zA-Z])", text), name


def test_their_values_are_those_that_were_measured(run: Changed) -> None:
    steps = [json.loads(line) for line in run.says("export", "after", "--kind", "step").splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert NAME not in steps[0], "the first backward pass has nothing to count from"
    assert all(type(step[NAME]) is int and step[NAME] >= 0 for step in steps[1:])
    for step in steps:
        assert step["phases"]["await"] >= 1
        assert sum(step["phases"].values()) == pytest.approx(step["wall_ms"])
    rows = list(csv.DictReader(io.StringIO(run.says("export", "after", "--format", "csv", "--kind", "step"))))
    assert [row[NAME] for row in rows] == [str(step.get(NAME, "")) for step in steps]
    assert [float(row["await_ms"]) for row in rows] == [step["phases"]["await"] for step in steps]
    total = sum(step.get(NAME, 0) for step in steps)
    assert f", {total:,} times total" in " ".join(run.says("report", "after").split())


@pytest.mark.parametrize("name", ["report", "report as JSON", "page", "lines of JSON", "screen"])
def test_the_new_column_is_shown_wherever_the_table_is(run: Changed, name: str) -> None:
    assert re.search(r"\bp99(_ms)?\b", dict(PLACES)[name](run))


def test_record_and_report_have_the_fact_of_ranks(run: Changed) -> None:
    facts = json.loads(run.says("export", "rank", "--kind", "ddp").splitlines()[-1])
    assert facts["dtypes"] == "float"
    assert "parameters of type float" in " ".join(run.says("report", "rank").split())
    (wrapper,) = json.loads(run.says("report", "rank", "--json"))["communication"]["wrappers"]
    assert wrapper["dtypes"] == "float"


def test_a_run_from_before_the_change_is_refused_with_a_sentence(run: Changed) -> None:
    result = run.dpmon.run("report", "before", env=run.env)
    assert (result.status, result.out) == (2, b"")
    assert "another version of dpmon recorded this run" in result.errors
    assert f" {STEPS} steps, " in run.dpmon.run("report", "before").text
