"""Starts the supervisor of a run, in the background and apart from everything of the caller."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dpmon

__all__ = ["start_supervisor"]

# The interpreter is isolated (-I): neither the current directory nor PYTHON* may put a user's random.py before the
# standard library's. dpmon's own place comes right after the standard library, the caller's other places last.
_BOOT = """\
import sys
directory, home, *places = sys.argv[1:]
at = next((i for i, p in enumerate(sys.path) if p.endswith("-packages")), len(sys.path))
sys.path.insert(at, home)
sys.path += [p for p in places if p not in sys.path]
from dpmon.run.supervisor import main
main(directory)
"""


def start_supervisor(directory: Path, *, stdin: bool) -> subprocess.Popen[bytes]:
    """Start the supervisor for the run in `directory`; with `stdin`, dpmon's own input is passed on to the command.

    OSError if it cannot be started.
    """
    home = str(Path(dpmon.__file__).resolve().parent.parent)
    here = os.path.realpath(os.curdir)
    places = [place for place in sys.path if place and os.path.realpath(place) != here]
    bytecode = ["-B"] if sys.dont_write_bytecode else []  # a wish that -I would not let through
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(directory / "supervisor.log", flags, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", *bytecode, "-c", _BOOT, str(directory), home, *places],
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            close_fds=False,
            start_new_session=True,
        )
    finally:
        os.close(log)
