"""The results of doctor on other machines than this one."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli import doctor as command
from dpmon.cli.doctor import local_checks, self_test
from dpmon.cli.doctor.local_checks import Check, failed_check, passed_check, warning_check
from dpmon.run import run_registry

Usage = namedtuple("Usage", "total used free")


def by_name(checks: object) -> dict[str, Check]:
    return {check.name: check for check in checks}  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ terminal


def at_terminal(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int] = (120, 40), **env: str) -> dict[str, Check]:
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback: os.terminal_size(size))
    return by_name(local_checks.check_terminal(env))


def test_a_terminal_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    found = at_terminal(monkeypatch, TERM="xterm-256color", COLORTERM="truecolor")
    assert found["terminal"] == passed_check("terminal", "120x40")
    assert "16 million" in found["colors"].found
    assert "256" in at_terminal(monkeypatch, TERM="screen-256color")["colors"].found
    assert "none" in at_terminal(monkeypatch, TERM="xterm", NO_COLOR="1")["colors"].found


@pytest.mark.parametrize(
    ("name", "env", "size"),
    [
        ("terminal", {"TERM": "dumb"}, (120, 40)),
        ("terminal", {}, (120, 40)),
        ("terminal", {"TERM": "xterm-256color"}, (79, 24)),
        ("colors", {"TERM": "linux"}, (80, 24)),
    ],
)
def test_a_poor_terminal_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, name: str, env: dict[str, str], size: tuple[int, int]
) -> None:
    assert at_terminal(monkeypatch, size, **env)[name].state == "warning"


def test_without_a_terminal_dpmon_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 0)
    found = by_name(local_checks.check_terminal({"TERM": "xterm"}))
    assert (found["terminal"].state, "stdout, stderr" in found["terminal"].found) == ("ok", True)
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "ANSI_X3.4-1968")
    assert by_name(local_checks.check_terminal({}))["characters"].state == "warning"


# ------------------------------------------------------------------------------------------------ machine


def test_a_state_directory_that_is_not_there_yet_is_well(state: Path) -> None:
    found = by_name(local_checks.check_state_directory())
    assert "the first run creates it" in found["state"].found
    assert not state.exists(), "looking makes nothing"


def test_a_state_directory_open_to_others_is_a_warning(state: Path) -> None:
    runs = state / "dpmon" / "runs"
    runs.mkdir(parents=True)
    runs.chmod(0o755)
    assert by_name(local_checks.check_state_directory())["state"].state == "warning"
    runs.chmod(0o700)
    assert by_name(local_checks.check_state_directory())["state"] == passed_check("state", str(runs))
    assert os.listdir(runs) == []


def test_of_an_unwritable_state_directory_the_replacement_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/self/nowhere")
    monkeypatch.setattr(run_registry, "PERSISTENT_TMP", str(tmp_path))
    found = by_name(local_checks.check_state_directory())["state"]
    assert (found.state, f"runs are kept in {tmp_path}/dpmon-" in found.found) == ("warning", True)
    assert "XDG_STATE_HOME" in str(found.remedy)
    assert os.listdir(tmp_path) == [], "looking makes nothing"


def test_little_room_is_reported(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, how in ((100 << 20, "problem"), (1 << 30, "warning"), (9 << 30, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(99 << 30, 0, free))
        assert by_name(local_checks.check_state_directory())["disk"].state == how


def test_the_place_of_runs_is_named_if_the_usual_one_is_on_the_network(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_registry, "file_system", lambda place: "nfs4" if place.is_relative_to(state) else "ext4")
    place = run_registry.fallback_directories()[0]
    moved, there, _ = local_checks.check_state_directory()
    assert (moved.state, there) == ("warning", passed_check("state", f"{place} (the first run creates it)"))
    assert moved.found == f"{state}/dpmon/runs is on a network file system (nfs4): runs are kept in {place}"
    assert "XDG_STATE_HOME" in str(moved.remedy)
    monkeypatch.setattr(run_registry, "file_system", lambda place: "nfs4")
    assert [check.state for check in local_checks.check_state_directory()] == ["problem"]


def test_little_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 60 << 20))
    found = local_checks.check_shared_memory()
    assert (found.state, "--shm-size" in str(found.remedy)) == ("warning", True)
    monkeypatch.undo()
    assert local_checks.check_shared_memory(Path("/nowhere")).state == "warning"


@pytest.mark.parametrize(("said", "state"), [("b true", "warning"), ("b false", "ok"), (None, "ok"), ("i 7", "ok")])
def test_what_happens_at_logout(monkeypatch: pytest.MonkeyPatch, said: str | None, state: str) -> None:
    monkeypatch.setattr(local_checks, "_command_output", lambda *command: said)
    found = local_checks.check_logout()
    assert found.state == state
    assert ("enable-linger" in (found.remedy or "")) is (state == "warning")


# ------------------------------------------------------------------------------------------------ trial, output


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (
            self_test._SelfTestResults(absent="no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found"),
            "warning",
            "--gpus all",
        ),
        (self_test._SelfTestResults(absent="the NVIDIA driver is installed but not loaded"), "warning", "modprobe"),
        (self_test._SelfTestResults(absent="NVML has not answered yet"), "warning", "stuck"),
        (self_test._SelfTestResults(absent=None, devices={1: "B", 0: "A"}), "ok", ""),
    ],
)
def test_nvml_is_reported_with_a_remedy(seen: self_test._SelfTestResults, state: str, words: str) -> None:
    found = self_test._check_nvml(seen)
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
    (found,) = self_test._check_cuda(self_test._SelfTestResults(facts=facts, devices=devices))
    assert (found.state, words in found.found) == (state, True)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (self_test._SelfTestResults(facts={"torch": "2.13"}), "sitecustomize did not run"),
        (self_test._SelfTestResults(facts={"torch": "2.13"}, stage="torch imported"), "not in the record"),
        (
            self_test._SelfTestResults(facts={"torch": "2.13"}, warnings=["this torch cannot be traced"]),
            "cannot be traced",
        ),
        (self_test._SelfTestResults(failure="it ended with status 1: boom"), "boom"),
    ],
)
def test_a_child_that_was_not_traced_is_a_problem(seen: self_test._SelfTestResults, words: str) -> None:
    found = list(self_test._check_python("/usr/bin/python3", seen))[-1]
    assert (found.state, words in found.found) == ("problem", True)


def test_an_old_torch_is_a_warning() -> None:
    states = {
        v: list(self_test._check_python("p", self_test._SelfTestResults(facts={"torch": v})))[1].state
        for v in ("2.3.1", "2.4.0+cu121")
    }
    assert states == {"2.3.1": "warning", "2.4.0+cu121": "ok"}


def test_lines_are_narrow_and_harmless(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [passed_check("x", "short"), failed_check("Python", "\x1b[31m" + "long " * 40, "try " * 30)]
    monkeypatch.setattr(command, "_run_local_checks", lambda python: iter(checks))
    from argparse import Namespace

    assert command.doctor(Namespace(python=None, json=False)) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1] == "1 problem; all other checks passed"
    assert command.doctor(Namespace(python=None, json=True)) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], [check["name"] for check in said["checks"]]) == ("problem", ["x", "Python"])
    checks[1:] = [warning_check("y", "z", "w")]
    assert command.doctor(Namespace(python=None, json=False)) == 0
