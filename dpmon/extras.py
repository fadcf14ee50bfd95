"""The command that installs missing optional packages, so that all messages show the same command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def how_to_plot() -> str:
    """Return the command that installs the packages for plots of a report into the Python that runs dpmon.

    In a clone, it is the command of docs/getting-started.md with the path of the clone. So it works in any directory.
    """
    clone = Path(__file__).resolve().parents[1]
    what = ["-e", f"{clone}[report]"] if (clone / "pyproject.toml").is_file() else ["plotly>=6"]
    return shlex.join([sys.executable, "-m", "pip", "install", *what])
