"""`dpmon doctor` on this machine: a real child is traced."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.run_harness import Dpmon


def checks_of(dpmon: Dpmon, *words: object, **env: str) -> tuple[int, dict[str, Any]]:
    """Return the status, and the checks by name."""
    result = dpmon.run("doctor", "--json", *words, env=env)
    assert result.err == b""
    return result.status, {check["name"]: check for check in json.loads(result.text)["checks"]}


def test_doctor_finds_that_tracing_works(dpmon: Dpmon, tmp_path: Path) -> None:
    status, checks = checks_of(dpmon, TMPDIR=str(tmp_path))
    assert checks["tracing"]["state"] == "ok", checks
    assert "the calls of a short run are in its record" in checks["tracing"]["found"]
    assert sys.version.split()[0] in checks["Python"]["found"]
    assert checks["NVML"]["state"] in ("ok", "warning")
    assert status == int(any(check["state"] == "problem" for check in checks.values()))
    assert not list(tmp_path.glob("dpmon-doctor-*")), "nothing is left behind"
    assert not dpmon.runs(), "it makes no run"


def test_doctor_finds_a_python_that_hides_the_tracer(dpmon: Dpmon, tmp_path: Path) -> None:
    deaf = tmp_path / "python-deaf"
    deaf.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    deaf.chmod(0o755)
    status, checks = checks_of(dpmon, "--python", deaf)
    assert status == 1
    assert "nothing was traced: no Python process of the run imported torch" in checks["tracing"]["found"]
    assert "neither -I nor -E" in checks["tracing"]["remedy"]


def test_a_python_without_torch_and_no_place_for_runs(dpmon: Dpmon, tmp_path: Path) -> None:
    bare = tmp_path / "python-bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    status, checks = checks_of(dpmon, "--python", bare, XDG_STATE_HOME="/proc/self/nowhere")
    assert status == 1
    assert checks["Python"]["state"] == "problem"
    assert "No module named 'torch'" in checks["Python"]["found"]
    assert checks["state"]["state"] == "warning", "there are other places"
    assert "tracing" not in checks
