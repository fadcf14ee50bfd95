"""The commands in docs/getting-started.md and docs/what-to-do.md work in their order."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.baseline_comparison import run_unless_aborted
from support.run_harness import Dpmon, put_dpmon_on_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200


def commands(page: str) -> list[str]:
    """Return the lines of the page's sh blocks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def run_all(page: str, dpmon: Dpmon, tmp_path: Path) -> dict[str, str]:
    """Run the commands of a page; return what each of them prints."""
    put_dpmon_on_path(tmp_path / "bin")
    shutil.copytree(ROOT / "examples", dpmon.cwd / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    env = dpmon.environment({"TERM": "dumb"})
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"

    def run(number: int) -> subprocess.CompletedProcess[str]:
        if number:
            assert dpmon.run("rm", "last").status == 0
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            cwd=dpmon.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    printed: dict[str, str] = {}
    for command in commands(page):
        done = run_unless_aborted(run, lambda ended: ended.stdout, tries=4) if "torchrun" in command else run(0)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
        printed[command] = done.stdout
    assert {path.name for path in dpmon.cwd.iterdir()} == {"examples"}, "what the page makes it removes"
    return printed


@pytest.mark.timeout(900)
def test_every_command_of_getting_started_works_in_its_order(dpmon: Dpmon, tmp_path: Path) -> None:
    printed = run_all("getting-started.md", dpmon, tmp_path)
    assert "Rank 1 delays the others" in printed["dpmon report slow"]
    names = {directory.name.split("-", 2)[2].rpartition("-")[0] for directory in dpmon.runs()}
    assert names == {"linear", "slow"}, "the run that is stopped is deleted"


@pytest.mark.timeout(900)
def test_the_recipe_for_scripts_works(dpmon: Dpmon, tmp_path: Path) -> None:
    printed = run_all("what-to-do.md", dpmon, tmp_path)
    status, rate = next(text for command, text in printed.items() if "nightly.json'))" in command).split()
    assert status == "0"
    assert float(rate) > 0
    (states,) = [text for command, text in printed.items() if "ls --json" in command]
    assert states in ("['starting']\n", "['training']\n")
    assert dpmon.runs() == []
