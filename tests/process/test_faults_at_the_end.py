"""A fault of dpmon while it determines and reports the end of a run: the command's status is still returned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dpmon as package
from support.run_harness import CommandResult, Dpmon

RAISES = """
def {name}(*_, **__):
    open({reached!r}, "w").close()
    raise RuntimeError('broken on purpose')
"""
FAULTS = {
    "the cause": ("supervise/supervisor.py", "find_first_failure", "exit status 5"),
    "the supervisor's last words": ("supervise/supervisor.py", "Supervisor._find_ending", "exit status 5"),
    "the summary": ("cli/summary.py", "summary_lines", "no summary: RuntimeError: broken on purpose"),
    "the line of progress": (
        "cli/status_stream.py",
        "ProgressReporter.line",
        "no line of progress: RuntimeError: broken on purpose",
    ),
}


def broken(dpmon: Dpmon, file: str, name: str) -> dict[str, str]:
    """Return the environment for a copy of dpmon in which one function raises."""
    place = dpmon.cwd / "broken"
    shutil.copytree(Path(package.__file__).parent, place / "dpmon", ignore=shutil.ignore_patterns("__pycache__"))
    # A line of progress soon, not after ten seconds.
    headless = place / "dpmon" / "cli" / "headless.py"
    headless.write_text(headless.read_text().replace("STATUS_S = 10.0", "STATUS_S = 0.1"))
    path = place / "dpmon" / file
    at_fault = RAISES.format(name="at_fault", reached=str(dpmon.cwd / "reached")) + f"{name} = at_fault\n"
    path.write_text(path.read_text() + at_fault)
    return {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}


def run(dpmon: Dpmon, env: dict[str, str], *words: object, waits: bool = True) -> CommandResult:
    """Run a script; `waits`: it goes on until the broken function has been called."""
    wait = "while not os.path.exists('reached'): time.sleep(0.01)\n" if waits else ""
    script = dpmon.script(f"import os, sys, time\n{wait}time.sleep(1)\nsys.exit(5)\n")
    return dpmon.run(argv=[dpmon.python, "-m", "dpmon", "--headless", *map(str, words), str(script)], env=env)


@pytest.mark.parametrize(("file", "name", "says"), FAULTS.values(), ids=FAULTS)
def test_the_status_is_given_whatever_raises(dpmon: Dpmon, file: str, name: str, says: str) -> None:
    result = run(dpmon, broken(dpmon, file, name), waits=name == "ProgressReporter.line")
    assert result.status == 5, result.errors
    assert says in result.errors
    assert result.errors.count("broken on purpose") <= 1, "once is enough"
    assert "Traceback" not in result.errors
    assert dpmon.exit()["status"] == 5
    if "supervisor" in file:
        assert "RuntimeError: broken on purpose" in (dpmon.last() / "supervisor.log").read_text()


def test_a_fault_in_the_lines_of_json_costs_only_these(dpmon: Dpmon) -> None:
    lines = dpmon.cwd / "lines"
    result = run(dpmon, broken(dpmon, "cli/status_stream.py", "StatusStream._write_status"), f"--json={lines}")
    assert result.status == 5, result.errors
    assert "no line of JSON: RuntimeError: broken on purpose" in result.errors
    assert '"kind":"exit"' in lines.read_text(), "the last line still says how it ended"
