"""Man page and completions are up to date and complete, and leave the script's arguments alone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from dpmon.cli.options import COMMANDS, usage_lines

ROOT = Path(__file__).parents[2]
SHELL = ROOT / "docs" / "shell"
FILES = ("dpmon.1", "dpmon", "_dpmon", "dpmon.fish")


def other_tools() -> str | None:
    """Return why the files cannot be generated here, or None."""
    for name in ("shtab", "argparse-manpage"):
        pinned = re.search(rf"^{name}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert pinned is not None
        try:
            found = version(name)
        except PackageNotFoundError:
            return f"{name} is not installed"
        if found != pinned[1]:
            return f"{name} is {found}, not the {pinned[1]} of constraints.txt"
    return None


def test_the_files_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: python docs/shell/generate.py"""
    reason = other_tools()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("COLUMNS", "40")
    spec = importlib.util.spec_from_file_location("generate", SHELL / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.generated()
    assert sorted(made) == sorted(FILES)
    for name, text in made.items():
        assert (SHELL / name).read_text(encoding="utf-8") == text, name


def test_the_usage_names_every_command() -> None:
    assert {form.split()[1] for form, _ in usage_lines()} >= {*COMMANDS} - {"run"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_its_file(shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    name = {"bash": "dpmon", "zsh": "_dpmon", "fish": "dpmon.fish"}[shell]
    done = subprocess.run([path, "-n", SHELL / name], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


ASK = """\
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_dpmon 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "there", "absent"),
    [
        ([""], {"attach", "report", "train.py", "sub"}, {"notes.txt", "20260101-000000-mine-abcd"}),
        (["tr"], {"train.py"}, {"report"}),
        (["--m"], {"--mode", "--metrics"}, {"train.py"}),
        (["--mode", ""], {"auto", "script", "dp", "single"}, {"train.py", "ls"}),
        (["--mode", "=", "d"], {"dp"}, {"doctor"}),
        (["--mode", "="], {"dp"}, {"doctor"}),
        (["--mode", "=", "dp", ""], {"ls", "train.py"}, {"dp"}),
        (["--json", ""], {"ls", "train.py"}, set()),
        (["--metrics", "no"], {"notes.txt"}, set()),
        (["attach", ""], {"last", "20260101-000000-mine-abcd", "20260101-000000-temporary-abcd"}, {"train.py"}),
        (["attach", "--"], {"--headless", "--refresh"}, {"--mode"}),
        (["rm", "last", "2"], {"20260101-000000-mine-abcd"}, {"last"}),
        (["export", "--format", ""], {"jsonl", "csv", "perfetto"}, {"last"}),
        # These words are the script's.
        (["train.py", "--"], set(), {"--mode", "--headless"}),
        (["--mode", "dp", "train.py", "--m"], set(), {"--mode"}),
        (["train.py", "l"], set(), {"ls", "last"}),
        (["-m", "package", "--m"], set(), {"--mode"}),
        (["torchrun", "--"], set(), {"--mode"}),
    ],
)
def test_bash_completes_what_is_dpmons(tmp_path: Path, words: list[str], there: set[str], absent: set[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "state" / "dpmon" / "runs" / "20260101-000000-mine-abcd").mkdir(parents=True)
    elsewhere = tmp_path / f"dpmon-{os.getuid()}-12345678" / "runs"  # as if the state directory were on the network
    (elsewhere / "20260101-000000-temporary-abcd").mkdir(parents=True)
    (elsewhere / "20260101-000000-$(touch hacked)").mkdir()
    (tmp_path / "work" / "sub").mkdir(parents=True)
    for name in ("train.py", "notes.txt"):
        (tmp_path / "work" / name).touch()
    done = subprocess.run(
        [bash, "--norc", "-c", ASK, "bash", SHELL / "dpmon", "dpmon", *words],
        cwd=tmp_path / "work",
        env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    offered = set(done.stdout.splitlines())
    assert offered >= there
    assert not offered & absent
    assert not (tmp_path / "work" / "hacked").exists()
