"""Contents of wheel and sdist; an installed dpmon does not need the clone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import dpmon as package
from support.run_harness import Dpmon

ROOT = Path(__file__).parents[2]
SHARED = {
    "share/man/man1/dpmon.1": "dpmon.1",
    "share/bash-completion/completions/dpmon": "dpmon",
    "share/zsh/site-functions/_dpmon": "_dpmon",
    "share/fish/vendor_completions.d/dpmon.fish": "dpmon.fish",
}
"""Where the files of docs/shell are installed."""
VERSION = package.__version__
BUILD = "import sys, setuptools.build_meta as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"

pytestmark = pytest.mark.slow


def outside() -> dict[str, str]:
    """Return the environment without variables that lead to the clone."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "VIRTUAL_"))}


def command(*words: object, cwd: Path) -> str:
    """Run a command, which must succeed without a warning of setuptools; return its output."""
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=outside(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Deprecat" not in done.stdout + done.stderr
    return done.stdout


def build(what: str, tree: Path, place: Path) -> Path:
    """Build `what` (sdist or wheel) of `tree` in `place`, as a frontend without build isolation does."""
    return place / command(sys.executable, "-c", BUILD, f"build_{what}", place, cwd=tree).splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files of a clone."""
    tree = tmp_path_factory.mktemp("clone") / "dpmon"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for name in ("dpmon", "docs", "examples", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the clone builds."""
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def metadata(wheel: Path) -> Message:
    """Return METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"dpmon-{VERSION}.dist-info/METADATA").decode())


def test_the_wheel_has_what_dpmon_needs_and_no_more(wheel: Path) -> None:
    assert wheel.name == f"dpmon-{VERSION}-py3-none-any.whl"
    names = set(contents(wheel))
    info, data = f"dpmon-{VERSION}.dist-info", f"dpmon-{VERSION}.data/data"
    sources = {
        f"dpmon/{path.relative_to(ROOT / 'dpmon')}"
        for path in (ROOT / "dpmon").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"dpmon/py.typed", "dpmon/tracer/site/sitecustomize.py", "dpmon/__main__.py"} <= sources
    shared = {f"{data}/{name}" for name in SHARED}
    described = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
    assert names == sources | shared | described | {f"{info}/licenses/LICENSE"}


def test_the_metadata_are_those_of_the_project(wheel: Path) -> None:
    told = metadata(wheel)
    assert told["Version"] == VERSION
    assert told["License-Expression"] == "MIT"
    assert told["Requires-Python"] == ">=3.11"
    assert told["Description-Content-Type"] == "text/markdown"
    plain = {re.split(r"[<>=; ]", line)[0] for line in told.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert plain == {"textual", "nvidia-ml-py", "psutil"}


def test_the_sdist_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", tree, tmp_path)
    assert sdist.name == f"dpmon-{VERSION}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = [Path(*Path(info.name).parts[1:]) for info in archive if info.isfile()]
        archive.extractall(tmp_path, filter="data")
    made = {Path("PKG-INFO"), Path("setup.cfg")}
    assert made <= set(names)
    in_clone = {
        path.relative_to(tree) for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name not in made and name.parts[0] != "dpmon.egg-info"} == {
        name for name in in_clone if name.parts[0] not in {"build", "dpmon.egg-info"}
    }, "all of the clone, so that the tests and the pages can be used"
    assert contents(build("wheel", tmp_path / f"dpmon-{VERSION}", tmp_path)) == contents(wheel)


@pytest.fixture
def installed(wheel: Path, dpmon: Dpmon, tmp_path: Path) -> Dpmon:
    """dpmon installed from the wheel in a new environment, with the other packages of this one."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    place = tmp_path / "environment"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    site = Path(command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    found = [importlib.util.find_spec(name) for name in ("torch", "textual")]
    others = {str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin is not None}
    # The .pth files there are not read, so the editable install of the clone has no effect.
    (site / "others.pth").write_text("".join(f"{other}\n" for other in sorted(others)))
    words = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    command(sys.executable, *words, cwd=tmp_path)
    where = command(python, "-c", "import dpmon; print(dpmon.__file__)", cwd=tmp_path).strip()
    assert Path(where) == site / "dpmon" / "__init__.py"
    shutil.copy(ROOT / "examples" / "linear.py", dpmon.cwd)
    dpmon.python = str(python)
    return dpmon


def test_the_installed_dpmon_does_the_main_job(installed: Dpmon) -> None:
    env = {"PYTHONPATH": ""}
    for start in (installed.words(), [installed.python, "-m", "dpmon"]):
        assert installed.run(argv=[*start, "--version"], env=env).text == f"dpmon {VERSION}\n"
    result = installed.run("linear.py", "--steps", "20", env=env)
    assert result.status == 0, result.errors
    assert "final loss" in result.text
    assert re.search(r"^dpmon: linear\.py .*: finished in ", result.errors, re.MULTILINE)
    assert "dpmon: one training process, 20 steps, 20 calls; dp on virtual replicas" in result.errors
    assert str(ROOT / "dpmon") not in "".join(path.read_text() for path in installed.last().glob("*.json"))
    prefix = Path(installed.python).parents[1]
    for name, source in SHARED.items():
        assert (prefix / name).read_text() == (ROOT / "docs" / "shell" / source).read_text(), name
