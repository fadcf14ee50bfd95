"""A Python without the GIL, or one that is too old, runs the script untraced, and a warning says why."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpmon

PROGRAM = """
import sys, types
{change}
from dpmon.tracer import torch_import_hook
torch_import_hook._install(types.ModuleType("torch"))
print("dpmon.tracer.patch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ("sys.abiflags = 't'", "a free-threaded Python cannot be traced: use a build of Python that has the GIL"),
        ("sys.version_info = (3, 10, 13)", "Python 3.10 cannot be traced: use Python 3.11 or later"),
    ],
)
def test_a_python_is_refused_with_a_sentence(tmp_path: Path, change: str, refusal: str) -> None:
    program, env = PROGRAM.format(change=change), {"DPMON_RUN": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    (line,) = (tmp_path / "warnings.log").read_text().splitlines()
    assert line.endswith(f" {refusal}")


@pytest.mark.parametrize(
    "file",
    [
        "__init__.py",
        "tracer/__init__.py",
        "tracer/note_files.py",
        "tracer/torch_import_hook.py",
        "tracer/site/sitecustomize.py",
    ],
)
def test_an_old_python_can_read_what_refuses_it(file: str) -> None:
    ast.parse((Path(dpmon.__file__).parent / file).read_text(), feature_version=(3, 8))
