"""Which options and arguments belong to dpmon, and which to the script."""

from __future__ import annotations

import pkgutil

import pytest

from dpmon.cli.main import _HANDLERS
from dpmon.cli.options import COMMANDS, MULTI_NODE_COMMANDS, UsageError, parse


@pytest.mark.parametrize(
    ("words", "module", "rest"),
    [
        (["a.py"], None, ["a.py"]),
        (["a.py", "--headless"], None, ["a.py", "--headless"]),
        (["--headless", "a.py", "--", "-m", "x"], None, ["a.py", "--", "-m", "x"]),
        (["--replicas", "2", "a.py", "--replicas", "x"], None, ["a.py", "--replicas", "x"]),
        (["--replicas=2", "a.py"], None, ["a.py"]),
        (["-m", "pkg.train", "--lr", "3"], "pkg.train", ["--lr", "3"]),
        (["-mpkg.train", "-m", "x"], "pkg.train", ["-m", "x"]),
        (["--name", "n", "-m", "pkg", "--name", "other"], "pkg", ["--name", "other"]),
        (["-m", "ls", "stop"], "ls", ["stop"]),
        (["--", "ls"], None, ["ls"]),
        (["-"], None, ["-"]),
        (["--", "-odd.py", "x"], None, ["-odd.py", "x"]),
        (["run", "ls", "-l"], None, ["ls", "-l"]),
        (["--replicas", "2", "run", "--name", "n", "a.py", "run"], None, ["a.py", "run"]),
        (["torchrun", "--nproc-per-node=2", "a.py"], None, ["torchrun", "--nproc-per-node=2", "a.py"]),
    ],
)
def test_options_after_the_script_belong_to_the_script(words: list[str], module: str | None, rest: list[str]) -> None:
    command, options = parse(words)
    assert command == "run"
    assert options.module == module
    assert options.words == rest


def test_options_before_and_after_run_add_up() -> None:
    _, options = parse(["--replicas", "2", "run", "--name", "n", "a.py"])
    assert (options.replicas, options.name, options.mode) == (2, "n", "auto")


@pytest.mark.parametrize(
    "words",
    [
        *(["--replicas=0", "a.py"], ["--mode", "dp"], ["-z", "a.py"], ["stop"], ["run"], ["try"]),
        *(["--replicas=2", "try", "a.py"], ["attach", "--metrics=x"], ["try", "--only=faster", "a.py"]),
    ],
)
def test_an_option_that_makes_no_sense_gives_one_sentence(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert "\n" not in str(caught.value)


def test_runs_are_named_for_the_commands_that_look_at_them() -> None:
    assert parse(["attach"])[1].run is None
    assert parse(["attach", "last"])[1].run == "last"
    assert parse(["export", "mine", "-o", "x"])[1].output == "x"
    assert parse(["stop", "mine"])[1].run == "mine"


def test_every_command_has_a_function() -> None:
    names = [_HANDLERS.get(command, f"dpmon.cli.commands:{command}") for command in COMMANDS]
    names += [f"dpmon.cli.multi_node:{command}" for command in MULTI_NODE_COMMANDS]
    assert all(callable(pkgutil.resolve_name(name)) for name in names)
    assert {*_HANDLERS} <= {*COMMANDS}
