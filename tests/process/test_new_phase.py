"""A new phase and a new quantity take few edits, and are then shown wherever steps are shown."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from plain_training import plain_training
from running import Dpmon, Terminal

import dpmon as package

pytestmark = pytest.mark.slow

STEPS = 40
TRAINS = plain_training(STEPS)
MOST_FILES = 3
EDITS: tuple[tuple[str, str, str], ...] = (
    (
        "record/schema.py",
        '    Phase(\n        "other"',
        '    Phase("await", "W", "the script waits for a device", optional=True),\n    Phase(\n        "other"',
    ),
    (
        "record/schema.py",
        "QUANTITIES = (\n",
        'QUANTITIES = (\n    Quantity("tokens", "tokens", "tokens", "tokens_total", "none", optional=True),\n',
    ),
    ("record/spans.py", "    BUCKETS = 19\n", "    BUCKETS = 19\n    AWAIT = 30\n"),
    ("record/spans.py", "DOING = {\n", 'DOING = {\n    Kind.AWAIT: "await",\n'),
    ("record/spans.py", "COUNTED = {", 'COUNTED = {Kind.AWAIT: "tokens", '),
    (
        "tracer/steps/recorder.py",
        "                try:\n                    if me.noted:\n",
        "                if kind == Kind.BACKWARD:\n"
        "                    began = monotonic_ns()\n"
        "                    while monotonic_ns() < began + 1_000_000:\n"
        "                        pass\n"
        "                    tokens = self._tokens = getattr(self, '_tokens', 0) + 5\n"
        "                    self.put(Kind.AWAIT | me.head, began, monotonic_ns() - began, tokens)\n"
        "                try:\n                    if me.noted:\n",
    ),
)  # fmt: skip
"""File, old text, new text."""


@dataclass
class Extended:
    """A run under a copy of dpmon with the new phase and quantity, and that copy's command line."""

    dpmon: Dpmon
    env: dict[str, str]
    summary: str = ""
    """The output of the foreground at the end of the run."""

    def says(self, *words: object) -> str:
        """Return the standard output of a command."""
        result = self.dpmon.run(*words, env=self.env)
        assert result.status == 0, result.errors
        return result.text


def _screen(run: Extended) -> str:
    """Return the screen of the finished run, after waiting for the table of its phases."""
    terminal = Terminal(run.dpmon, "attach", "last", size=(50, 180), **run.env)
    terminal.shows("median")
    terminal.shows("aWait")
    picture = terminal.picture()
    terminal.type("q")
    terminal.wait()
    return picture.replace("aWait", "await")


NAMES = ("await", "tokens")
PLACES: tuple[tuple[str, Callable[[Extended], str]], ...] = (
    ("JSON lines", lambda run: run.says("export")),
    ("CSV", lambda run: run.says("export", "--format", "csv", "--kind", "step")),
    ("trace", lambda run: run.says("export", "--format", "perfetto")),
    ("summary", lambda run: run.summary),
    ("report", lambda run: run.says("report")),
    ("report as JSON", lambda run: run.says("report", "--json")),
    ("page", lambda run: run.says("report", "--html", "-o", "-").partition("<script")[0]),
    ("lines of JSON", lambda run: (run.dpmon.cwd / "lines").read_text()),
    ("metrics", lambda run: (run.dpmon.cwd / "run.prom").read_text()),
    ("screen", _screen),
)
"""Every place that shows steps, with its text, which must contain NAMES."""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Extended]:
    """A run of TRAINS under dpmon with EDITS."""
    where = tmp_path_factory.mktemp("extended")
    root = where / "path" / "dpmon"
    shutil.copytree(Path(package.__file__).parent, root, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in EDITS:
        text = (root / name).read_text()
        assert text.count(old) == 1, (name, old)
        (root / name).write_text(text.replace(old, new))
    (where / "cwd").mkdir()
    dpmon = Dpmon(where / "state", where / "cwd")
    run = Extended(dpmon, {"PYTHONPATH": str(root.parent), "PYTHONDONTWRITEBYTECODE": "1"})
    dpmon.script(TRAINS)
    result = dpmon.run("--headless", "--json=lines", "--metrics", "run.prom", "script.py", env=run.env)
    assert result.status == 0, result.errors
    run.summary = result.errors
    yield run
    dpmon.clean_up()


def test_it_takes_few_files() -> None:
    assert len({name for name, _, _ in EDITS}) <= MOST_FILES


@pytest.mark.parametrize("text_of", [pytest.param(text_of, id=name) for name, text_of in PLACES])
def test_the_new_phase_and_quantity_are_shown_everywhere(
    extended: Extended, text_of: Callable[[Extended], str]
) -> None:
    text = text_of(extended)
    for name in NAMES:
        assert re.search(rf"(?<![a-zA-Z]){name}(?![a-zA-Z])", text), name


def test_their_values_are_those_that_were_measured(extended: Extended) -> None:
    steps = [record for line in extended.says("export", "--kind", "step").splitlines() for record in [json.loads(line)]]
    assert [step["tokens"] for step in steps] == [5 * number for number in range(1, STEPS + 1)]
    for step in steps:
        assert step["phases"]["await"] >= 1
        assert sum(step["phases"].values()) == pytest.approx(step["wall_ms"])
    rows = list(csv.DictReader(io.StringIO(extended.says("export", "--format", "csv", "--kind", "step"))))
    assert [int(row["tokens"]) for row in rows] == [step["tokens"] for step in steps]
    assert [float(row["await_ms"]) for row in rows] == [step["phases"]["await"] for step in steps]
