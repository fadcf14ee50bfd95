"""How what is not installed is installed: in the same words wherever it is missed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def how_to_plot() -> str:
    """The command that installs what the plots of a report need into the Python that dpmon runs with.

    From a clone it is that of docs/getting-started.md, by the clone's path, so that it works in any directory.
    """
    clone = Path(__file__).resolve().parents[1]
    what = ["-e", f"{clone}[report]"] if (clone / "pyproject.toml").is_file() else ["plotly>=6"]
    return shlex.join([sys.executable, "-m", "pip", "install", *what])
