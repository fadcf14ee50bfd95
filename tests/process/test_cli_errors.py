"""A wrong command line: status 2, one clear sentence on stderr, nothing started, no run left behind."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dpmon.cli.main import main
from support.run_harness import Dpmon


def refused(dpmon: Dpmon, *words: str, says: str, **more: Any) -> str:
    """Run dpmon with `words`, which it must refuse with a sentence that contains `says`."""
    result = dpmon.run(*words, **more)
    assert result.status == 2, result.errors
    assert result.out == b""
    lines = result.errors.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("dpmon: ")
    assert says in lines[0]
    assert dpmon.runs() == []
    return lines[0]


def test_no_such_script(dpmon: Dpmon) -> None:
    refused(dpmon, "nowhere.py", says="no such file: nowhere.py")
    refused(dpmon, "a/b/train", says="no such file: a/b/train")


def test_a_directory(dpmon: Dpmon) -> None:
    (dpmon.cwd / "examples").mkdir()
    (dpmon.cwd / "odd.py").mkdir()
    refused(dpmon, "examples", says="examples is a directory, not a script")
    refused(dpmon, "odd.py", says="odd.py is a directory, not a script")


def test_a_script_that_may_not_be_read(dpmon: Dpmon) -> None:
    dpmon.script("pass").chmod(0o000)
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    refused(dpmon, "script.py", says="script.py cannot be read")


def test_a_dangling_link(dpmon: Dpmon) -> None:
    (dpmon.cwd / "script.py").symlink_to("gone.py")
    refused(dpmon, "script.py", says="no such file: script.py")


def test_command_not_found(dpmon: Dpmon) -> None:
    refused(dpmon, "torchrunn", "--nproc", "2", says="command not found: torchrunn")


def test_a_file_that_is_no_program(dpmon: Dpmon) -> None:
    dpmon.script("pass", "train")
    refused(dpmon, "train", says="train is neither a Python script (*.py) nor an executable")
    refused(dpmon, "./train", says="./train is neither a Python script (*.py) nor an executable")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bogus", "script.py"], "unknown option --bogus"),
        (["-x", "script.py"], "unknown option -x"),
        (["--replicas", "0", "script.py"], "--replicas: expected a number from 1 to 9999, not '0'"),
        (["--replicas", "-1", "script.py"], "--replicas: expected a number from 1 to 9999, not '-1'"),
        (["--replicas=-1", "script.py"], "not '-1'"),
        (["--replicas", "x", "script.py"], "not 'x'"),
        (["--replicas", "1.5", "script.py"], "not '1.5'"),
        (["--replicas", "٣", "script.py"], "not '٣'"),
        (["--replicas", "script.py"], "not 'script.py'"),
        (["--replicas"], "--replicas: expected one argument"),
        (["--mode", "fast", "script.py"], "--mode: invalid choice: 'fast'"),
        (["--devices", "gpu0", "script.py"], "not 'gpu0'"),
        (["--devices", "", "script.py"], "--devices"),
        (["--devices", "cpu,cuda:0", "script.py"], "must be on cpu or all on cuda"),
        (["--devices", "cpu,cpu", "--replicas", "3", "script.py"], "contradicts --devices"),
        (["--mode", "script", "--replicas", "2", "script.py"], "--mode script leaves the computation as written"),
        (["--refresh", "0", "script.py"], "--refresh"),
        (["--refresh", "nan", "script.py"], "--refresh"),
        (["--name", "a/b", "script.py"], "--name"),
        (["--name", "last", "script.py"], "--name"),
        (["--headless"], "no script to run"),
        (["run"], "no script to run"),
        (["-m"], "-m: expected one argument"),
        (["--python", "/nowhere/python", "script.py"], "--python /nowhere/python is not an executable file"),
        (["--rep", "2", "script.py"], "unknown option --rep"),
        (["--headless", "ls"], "--headless is an option of a run, not of ls"),
        (["stop"], "the following arguments are required: RUN"),
        (["ls", "x"], "x is not expected here"),
        (["export", "--format", "yaml"], "invalid choice: 'yaml'"),
        *(([f"--batch-dim={n}", "script.py"], f"expected a number from 0 to 7, not '{n}'") for n in ("-1", "8", "1.5")),
    ],
)
def test_options_that_mean_nothing(
    dpmon: Dpmon, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, because a new one for each takes longer than all of this."""
    dpmon.script("pass")
    monkeypatch.chdir(dpmon.cwd)
    assert main(words) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("dpmon: ")
    assert says in said.err
    assert dpmon.runs() == []


@pytest.mark.parametrize("command", ["attach", "stop", "export"])
def test_a_run_that_is_not_there(dpmon: Dpmon, command: str) -> None:
    assert "there is no run yet" in dpmon.run(command, "last").errors
    dpmon.script("pass")
    assert dpmon.run("script.py").status == 0
    result = dpmon.run(command, "nothing-like-it")
    assert result.status == 2
    assert "there is no run 'nothing-like-it'" in result.errors


def test_names_that_would_steer_the_terminal_do_not(dpmon: Dpmon) -> None:
    result = dpmon.run("\x1b]52;c;x\x07.py")
    assert result.status == 2
    assert b"\x1b" not in result.err
    assert b"\x07" not in result.err
