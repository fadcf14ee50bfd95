"""A Python without the GIL runs the script untraced, and a warning says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, types
sys.abiflags = "t"
from dpmon.tracer import torch_import_hook
torch_import_hook._install(types.ModuleType("torch"))
print("dpmon.tracer.patch" in sys.modules)
"""


def test_a_free_threaded_python_is_refused_with_a_sentence(tmp_path: Path) -> None:
    env = {"DPMON_RUN": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    (line,) = (tmp_path / "warnings.log").read_text().splitlines()
    assert line.endswith(" a free-threaded Python cannot be traced: use a build of Python that has the GIL")
