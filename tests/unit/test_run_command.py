"""The command that is executed for a command line, and its Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dpmon.supervise import command_resolver as command
from dpmon.supervise.command_resolver import choose_python, resolve


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python_at(place: Path, name: str = "python") -> str:
    """Make an executable file that looks like a Python."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def torch_in(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Set which Pythons have torch."""
    having: set[str] = set()
    monkeypatch.setattr(command, "_has_torch", having.__contains__)
    return having


def test_a_script_gets_the_python_and_its_arguments_unchanged(here: Path, torch_in: set[str]) -> None:
    torch_in.add(sys.executable)
    (here / "a b.py").write_text("")
    found = resolve(["a b.py", "--", "-m", ""], None, None, {"PATH": ""})
    assert found.argv == (sys.executable, "a b.py", "--", "-m", "")
    assert (found.python, found.script, found.name) == (sys.executable, "a b.py", "a-b")


def test_a_module_gets_the_python(torch_in: set[str]) -> None:
    torch_in.add(sys.executable)
    found = resolve(["--lr", "3"], "pkg.train", None, {"PATH": ""})
    assert found.argv == (sys.executable, "-m", "pkg.train", "--lr", "3")
    assert (found.script, found.name) == ("-m pkg.train", "train")


def test_a_launcher_is_left_alone(here: Path, torch_in: set[str]) -> None:
    python_at(here / "bin", "torchrun")
    found = resolve(["torchrun", "src/a.py"], None, None, {"PATH": str(here / "bin")})
    assert (found.argv, found.python) == (("torchrun", "src/a.py"), None)
    assert not torch_in


@pytest.mark.parametrize(
    ("words", "script", "name"),
    [
        ("torchrun --nproc-per-node 2 src/train.py --model big.py", "src/train.py", "train"),
        ("torchrun --standalone -m pkg.train x.py", "-m pkg.train", "train"),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", "train.py", "train"),
        ("python3.11 -m torch.distributed.launch -m pkg.train", "-m pkg.train", "train"),
        ("accelerate launch --config_file a.yaml train.py", "train.py", "train"),
        ("accelerate launch --module --num_processes 2 pkg.train", "accelerate", "accelerate"),
        ("deepspeed --hostfile hosts train.py --deepspeed ds.json", "train.py", "train"),
        ("python -m pkg.train", "-m pkg.train", "train"),
        ("python -u -X dev train.py", "train.py", "train"),
        ("/opt/env/bin/python train.py", "train.py", "train"),
        ("uv run train.py", "train.py", "train"),
        ("uv run -m pkg.train", "-m pkg.train", "train"),
        ("poetry run python train.py", "train.py", "train"),
        ("env A=b.py python train.py", "train.py", "train"),
        ("srun --ntasks 2 -m block python train.py", "train.py", "train"),
        ("tool --config=a.py --other", "tool", "tool"),
        ("python -c print(1) x.py", "python", "python"),
        ("/usr/bin/sleep 600", "/usr/bin/sleep", "sleep"),
    ],
)
def test_a_run_is_named_after_the_script_that_a_launcher_starts(
    monkeypatch: pytest.MonkeyPatch, words: str, script: str, name: str
) -> None:
    monkeypatch.setattr(command, "_check_program", lambda *_, **__: None)
    found = resolve(words.split(), None, None, {})
    assert (found.argv, found.python, found.script, found.name) == (tuple(words.split()), None, script, name)


def test_words_of_a_shell_name_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_check_program", lambda *_, **__: None)
    assert resolve(["bash", "-c", "python train.py"], None, None, {}).script == "bash"


def test_a_launcher_whose_name_ends_like_a_script_is_found_on_path(here: Path) -> None:
    python_at(here / "bin", "launch.py")
    assert resolve(["launch.py"], None, None, {"PATH": str(here / "bin")}).python is None


def test_the_environments_python_comes_first(here: Path, torch_in: set[str]) -> None:
    venv = python_at(here / "venv" / "bin")
    conda = python_at(here / "conda" / "bin")
    path = python_at(here / "bin", "python3")
    environ = {"VIRTUAL_ENV": str(here / "venv"), "CONDA_PREFIX": str(here / "conda"), "PATH": str(here / "bin")}
    for having, expected in (
        ({venv, conda, sys.executable, path}, venv),
        ({conda, sys.executable, path}, conda),
        ({sys.executable, path}, sys.executable),
        ({path}, path),
    ):
        torch_in.clear()
        torch_in |= having
        assert choose_python(None, environ) == expected


def test_dpmons_own_environment_on_path_hides_no_other(here: Path, torch_in: set[str]) -> None:
    """As under uvx, which puts that environment first."""
    path = python_at(here / "bin", "python3")
    torch_in.add(path)
    environ = {"PATH": os.pathsep.join([os.path.dirname(sys.executable), str(here / "bin")])}
    assert choose_python(None, environ) == path


def test_the_python_on_path_may_have_its_torch_elsewhere(here: Path, torch_in: set[str]) -> None:
    venv, path = python_at(here / "venv" / "bin"), python_at(here / "bin", "python3")
    assert venv != choose_python(None, {"VIRTUAL_ENV": str(here / "venv"), "PATH": str(here / "bin")}) == path
    assert choose_python(None, {"PATH": ""}) == sys.executable


def test_torch_is_looked_for_without_importing_it(here: Path) -> None:
    before = "torch" in sys.modules
    assert command._has_torch(sys.executable)
    assert ("torch" in sys.modules) == before
    venv = python_at(here / "venv" / "bin")
    assert not command._has_torch(venv)
    (here / "venv" / "lib" / "python3.12" / "site-packages" / "torch").mkdir(parents=True)
    assert command._has_torch(venv)


def test_a_folder_called_torch_is_not_torch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "torch").mkdir()
    monkeypatch.setattr(sys, "path", [str(here)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # where another test has imported it
    assert not command._has_torch(sys.executable)
