"""Turns the words on the command line into the program to execute: which Python, which arguments."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dpmon.errors import DpmonError

PROBE_S = 20.0
"""Seconds that a Python may take to report whether it has torch (a cold network file system is slow)."""
_PROBE = (
    "import importlib.util as u,sys;s=u.find_spec('torch');sys.exit(0 if s is not None and s.origin is not None else 9)"
)


class CommandError(DpmonError):
    """The command cannot be run as given; the text is one sentence for the user."""


class NotFoundError(CommandError):
    """No command is called `word`."""

    def __init__(self, word: str) -> None:
        super().__init__(f"command not found: {word}")
        self.word = word


@dataclass(frozen=True)
class ResolvedCommand:
    """The program to execute (`argv`), its Python (None for a launcher), the script as given, and the run's name.

    The script of a launcher is the one that it starts, if its arguments show which.
    """

    argv: tuple[str, ...]
    python: str | None
    script: str
    name: str


def resolve(
    words: Sequence[str], module: str | None, python: str | None, environ: Mapping[str, str]
) -> ResolvedCommand:
    """The command for `words` (a script or launcher and its arguments) or for `module` with arguments `words`.

    Raises CommandError if it cannot be run. Starts no process except to ask a Python whether it has torch.
    """
    if module is not None:
        if not module:
            raise CommandError("-m needs the name of a module")
        chosen = choose_python(python, environ)
        return ResolvedCommand(
            (chosen, "-m", module, *words), chosen, f"-m {module}", _run_name(_script_stem(f"-m {module}"))
        )
    if not words or not words[0]:
        raise CommandError("no script to run")
    first = words[0]
    if _is_script(first, environ):
        _check_file(first)
        chosen = choose_python(python, environ)
        return ResolvedCommand((chosen, *words), chosen, first, _run_name(Path(first).stem))
    if python is not None:
        raise CommandError(f"--python is for a script or -m, and {first} is neither")
    _check_command(first, environ)
    script = _script_of_launcher(words) or first
    return ResolvedCommand(tuple(words), None, script, _run_name(_script_stem(script)))


_TAKES_MODULE = re.compile(r"python[0-9.]*|torchrun|accelerate|deepspeed|uv")
"""Commands with an option -m for a module."""
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start a script, or the module after another -m."""


def _script_of_launcher(words: Sequence[str]) -> str | None:
    """The script, or "-m" and the module, that a launcher starts: the first one in its arguments; None if none is."""
    takes_module = False
    for word, after in pairwise((*words, "-")):
        if _TAKES_MODULE.fullmatch(os.path.basename(word)):
            takes_module = True
        elif takes_module and word == "-c":
            return None
        elif takes_module and word in ("-m", "--module"):
            if after in _LAUNCHERS:
                continue
            if not after.startswith("-"):
                return f"-m {after}"
        elif word is not words[0] and re.fullmatch(r"[^-\s=][^\s=]*\.pyw?", word):
            return word
    return None


def _script_stem(script: str) -> str:
    """The script without directories and suffix, or the last part of a module."""
    return script.split(".")[-1].removeprefix("-m ") if script.startswith("-m ") else Path(script).stem


def _run_name(text: str) -> str:
    """A run's name from the characters that a directory's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:40] or "run"


def _is_script(word: str, environ: Mapping[str, str]) -> bool:
    if not word.endswith((".py", ".pyw", ".pyc")):
        return False
    # A word that ends in .py may also be a launcher on PATH, if there is no such file here.
    return os.path.lexists(word) or os.sep in word or not shutil.which(word, path=environ.get("PATH"))


def _check_file(path: str) -> None:
    if os.path.isdir(path):
        raise CommandError(f"{path} is a directory, not a script")
    if not os.path.exists(path):
        raise CommandError(f"no such file: {path}")
    if not os.access(path, os.R_OK):
        raise CommandError(f"{path} cannot be read: permission denied")


def _check_command(word: str, environ: Mapping[str, str]) -> None:
    if os.path.isdir(word):
        raise CommandError(f"{word} is a directory, not a script")
    if shutil.which(word, path=environ.get("PATH")):
        return
    if os.path.exists(word):
        raise CommandError(f"{word} is neither a Python script (*.py) nor an executable on PATH")
    if os.sep in word:
        raise CommandError(f"no such file: {word}")
    raise NotFoundError(word)


# ------------------------------------------------------------------------------------------------ which Python


def choose_python(asked: str | None, environ: Mapping[str, str]) -> str:
    """The first Python that has torch: the one asked for, the environment's, dpmon's own, the first on PATH."""
    if asked is not None:
        found = shutil.which(asked, path=environ.get("PATH"))
        if found is None or os.path.isdir(asked):
            raise CommandError(f"--python {asked} is not an executable file")
        candidates = [os.path.abspath(found)]
    else:
        candidates = _candidates(environ)
    looked_at = []
    for candidate in candidates:
        reason = _missing_torch_reason(candidate)
        if reason is None:
            return candidate
        looked_at.append(f"{candidate} ({reason})" if reason else candidate)
    where = "" if len(candidates) == 1 else " in one of them"
    raise CommandError(
        f"torch was not found in {' or '.join(looked_at)}: install it{where} ({candidates[0]} -m pip install torch),"
        " or choose another Python with --python"
    )


def _candidates(environ: Mapping[str, str]) -> list[str]:
    found = []
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix = environ.get(variable)
        if prefix:
            found.append(os.path.join(prefix, "bin", "python"))
    found.append(sys.executable)
    # uvx puts dpmon's own environment first on PATH: the user's Python comes after it.
    path = environ.get("PATH", os.defpath)
    ours = os.path.realpath(os.path.dirname(sys.executable))
    others = os.pathsep.join(place for place in path.split(os.pathsep) if os.path.realpath(place) != ours)
    for places in (path, others):
        for name in ("python3", "python"):
            on_path = shutil.which(name, path=places)
            if on_path:
                found.append(os.path.abspath(on_path))
    unique: list[str] = []
    for python in found:
        # Keep the path unresolved: a virtual environment's python is a link to a Python without its packages.
        if os.access(python, os.X_OK) and all(not _is_same_python(python, other) for other in unique):
            unique.append(python)
    return unique


def _is_same_python(one: str, other: str) -> bool:
    """Whether two paths are the same Python: the same file in the same directory."""
    return os.path.realpath(os.path.dirname(one)) == os.path.realpath(os.path.dirname(other)) and os.path.realpath(
        one
    ) == os.path.realpath(other)


def _missing_torch_reason(python: str) -> str | None:
    """None if this Python has torch, else the reason ("" if it is simply not installed)."""
    if _is_same_python(python, sys.executable):
        spec = importlib.util.find_spec("torch")
        return None if spec is not None and spec.origin is not None else ""
    try:
        # Run it in the root directory: a folder called torch beside the script is not torch.
        done = subprocess.run(
            [python, "-c", _PROBE],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_S:.0f} s"
    except OSError as error:
        return str(error.strerror or error)
    if done.returncode == 0:
        return None
    return "" if done.returncode == 9 else f"it ended with status {done.returncode}"
