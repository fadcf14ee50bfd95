"""The results of doctor on other machines than this one: what it says of Python, torch, GPUs and the runs' place."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli import doctor
from dpmon.cli.doctor import Check
from dpmon.run import run_registry

Usage = namedtuple("Usage", "total used free")


def test_the_directory_of_runs_is_named(state: Path) -> None:
    assert doctor._check_state_directory() == Check("state", "ok", f"runs are kept in {state}/dpmon/runs")
    assert not state.exists(), "looking makes nothing"


def test_of_an_unusable_state_directory_the_replacement_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/self/nowhere")
    monkeypatch.setattr(run_registry, "PERSISTENT_TMP", str(tmp_path))
    found = doctor._check_state_directory()
    assert (found.state, f"runs are kept in {tmp_path}/dpmon-" in found.found) == ("warning", True)
    assert "XDG_STATE_HOME" in str(found.remedy)
    assert os.listdir(tmp_path) == [], "looking makes nothing"


def test_the_place_of_runs_is_that_of_a_run(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_registry, "file_system", lambda place: "nfs4" if place.is_relative_to(state) else "ext4")
    place = run_registry.fallback_directories()[0]
    found = doctor._check_state_directory()
    assert found.state == "warning"
    assert found.found == f"{state}/dpmon/runs is on a network file system (nfs4): runs are kept in {place}"
    monkeypatch.setattr(run_registry, "file_system", lambda place: "nfs4")
    assert doctor._check_state_directory().state == "problem"
    monkeypatch.setattr(run_registry, "file_system", lambda place: "ext4")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(99 << 30, 0, 1 << 20))
    assert doctor._check_state_directory().state == "problem", "there is no room"


# ------------------------------------------------------------------------------------------------ trial, output


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (
            doctor._SelfTest(gpu_absent="no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found"),
            "warning",
            "--gpus all",
        ),
        (doctor._SelfTest(gpu_absent="the NVIDIA driver is installed but not loaded"), "warning", "modprobe"),
        (doctor._SelfTest(gpu_absent="NVML has not answered yet"), "warning", "stuck"),
        (doctor._SelfTest(gpu_absent=None, devices={1: "B", 0: "A"}), "ok", ""),
    ],
)
def test_nvml_is_reported_with_a_remedy(seen: doctor._SelfTest, state: str, words: str) -> None:
    found = doctor._check_nvml(seen)
    assert found.state == state
    assert words in (found.remedy or "")
    if not words:
        assert found.found == "0: A, 1: B"


@pytest.mark.parametrize(
    ("facts", "devices", "state", "words"),
    [
        ({"count": 2, "cuda": "13.0"}, {0: "A"}, "ok", "2 GPUs"),
        ({"count": 0, "cuda": None}, {0: "A"}, "warning", "CPUs only"),
        ({"count": 0, "cuda": "13.0"}, {0: "A"}, "warning", "sees none"),
        ({"count": 0, "cuda": "13.0"}, {}, "ok", "virtual replicas"),
    ],
)
def test_torch_and_the_gpus_are_compared(
    facts: dict[str, Any], devices: dict[int, str], state: str, words: str
) -> None:
    found = doctor._check_cuda(doctor._SelfTest(facts=facts, devices=devices))
    assert (found.state, words in found.found) == (state, True)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (doctor._SelfTest(facts={"torch": "2.13"}, untraced_reason="this torch cannot be traced"), "cannot be traced"),
        (doctor._SelfTest(failure="it ended with status 1: boom"), "boom"),
    ],
)
def test_a_child_that_was_not_traced_is_a_problem(seen: doctor._SelfTest, words: str) -> None:
    found = list(doctor._check_python("/usr/bin/python3", seen))[-1]
    assert (found.state, words in found.found) == ("problem", True)


def test_an_old_torch_is_a_warning() -> None:
    states = {
        v: list(doctor._check_python("p", doctor._SelfTest(facts={"torch": v})))[1].state
        for v in ("2.3.1", "2.4.0+cu121")
    }
    assert states == {"2.3.1": "warning", "2.4.0+cu121": "ok"}


def test_lines_are_narrow_and_harmless(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("x", "ok", "short"), Check("Python", "problem", "\x1b[31m" + "long " * 40, "try " * 30)]
    monkeypatch.setattr(doctor, "_run_checks", lambda python: iter(checks))
    from argparse import Namespace

    assert doctor.doctor(Namespace(python=None, json=False)) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1] == "1 problem; all other checks passed"
    assert doctor.doctor(Namespace(python=None, json=True)) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], [check["name"] for check in said["checks"]]) == ("problem", ["x", "Python"])
    checks[1:] = [Check("y", "warning", "z", "w")]
    assert doctor.doctor(Namespace(python=None, json=False)) == 0
