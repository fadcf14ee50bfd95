"""Relative paths in the environment do not mean different directories to the processes of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.run_harness import Dpmon

SCRIPT = "import os, sys; print(*sorted(os.listdir('.'))); sys.exit(7)"


def check_run(dpmon: Dpmon, at: Path, env: dict[str, str]) -> str:
    """Check that a run keeps the script's status and that every command finds it in `at`; return its stderr."""
    dpmon.script(SCRIPT)
    result = dpmon.run("script.py", env=env)
    assert result.status == 7, result.errors
    assert result.text.split() == ["script.py"], "nothing was made where it was started"
    (directory,) = (at / "dpmon" / "runs").iterdir()
    assert (directory / "exit.json").exists()
    assert "failed" in dpmon.run("ls", env=env, cwd="/").text
    assert dpmon.run("report", "last", env=env, cwd="/").status == 0
    return result.errors


@pytest.mark.parametrize("value", ["./relative", "~/state"])
def test_a_relative_state_directory_is_ignored(dpmon: Dpmon, tmp_path: Path, value: str) -> None:
    check_run(dpmon, tmp_path / ".local" / "state", {"XDG_STATE_HOME": value, "HOME": str(tmp_path)})


@pytest.mark.parametrize("option", [False, True])
def test_metrics_go_where_dpmon_was_started(dpmon: Dpmon, option: bool) -> None:
    dpmon.script("import os; os.chdir('/')")
    (dpmon.cwd / "place").mkdir()
    words = ("--metrics", "place/figures.prom") if option else ()
    result = dpmon.run(*words, "script.py", env={} if option else {"DPMON_METRICS": "place/figures.prom"})
    assert result.status == 0, result.errors
    assert "dpmon" in (dpmon.cwd / "place" / "figures.prom").read_text()


@pytest.mark.parametrize("words", [["-c", "print(1)"], ["-m", "this"], ["{script}"]], ids=["-c", "-m", "a script"])
def test_a_deleted_working_directory_is_no_fault_of_ours(dpmon: Dpmon, words: list[str]) -> None:
    script = dpmon.script("print(1)")
    words = [word.format(script=script) for word in words]
    shell = ["sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "sh", sys.executable, *words]
    alone = subprocess.run(shell, cwd=dpmon.cwd, env=dpmon.environment(), capture_output=True, check=False, timeout=60)
    run = dpmon.run("--headless", *shell)
    errors = [line for line in run.errors.splitlines(keepends=True) if not line.startswith("dpmon: ")]
    assert (run.status, run.out, "".join(errors)) == (alone.returncode, alone.stdout, alone.stderr.decode())
