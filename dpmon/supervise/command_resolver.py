"""Finds out from the command line which program to execute: which Python, with which arguments."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dpmon.errors import DpmonError


class CommandError(DpmonError):
    """A command that cannot be run as given; the text is one sentence for the user."""


@dataclass(frozen=True)
class ResolvedCommand:
    """The program to execute (`argv`), its Python (None for a launcher), the script as given, and the run's name.

    For a launcher, `script` is the script that the launcher starts, if it can be seen in the arguments.
    """

    argv: tuple[str, ...]
    python: str | None
    script: str
    name: str


def resolve(
    words: Sequence[str], module: str | None, python: str | None, environ: Mapping[str, str]
) -> ResolvedCommand:
    """Return the command for `words` (a script or launcher, and its arguments), or for `module` with arguments `words`.

    Raises CommandError if it cannot be run. Starts no process.
    """
    if module is not None:
        if not module:
            raise CommandError("-m needs the name of a module")
        script, words = f"-m {module}", ("-m", module, *words)
    elif not words or not words[0]:
        raise CommandError("no script to run")
    else:
        script = words[0]
        is_script = _is_script(script, environ)
        if not is_script and python is not None:
            raise CommandError(f"--python is for a script or -m, and {script} is neither")
        _check_program(script, is_script=is_script, environ=environ)
        if not is_script:
            script = _script_of_launcher(words) or script
            return ResolvedCommand(tuple(words), None, script, _run_name(_script_stem(script)))
    python_path = choose_python(python, environ)
    return ResolvedCommand((python_path, *words), python_path, script, _run_name(_script_stem(script)))


_TAKES_MODULE = re.compile(r"python[0-9.]*|torchrun|accelerate|deepspeed|uv")
"""Commands whose option -m takes a module."""
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start a script, or the module that follows another -m."""


def _script_of_launcher(words: Sequence[str]) -> str | None:
    """Return the first script, or "-m" and the first module, in the arguments of a launcher; None if there is none."""
    takes_module = False
    for word, next_word in pairwise((*words, "-")):
        if _TAKES_MODULE.fullmatch(os.path.basename(word)):
            takes_module = True
        elif takes_module and word == "-c":
            return None
        elif takes_module and word in ("-m", "--module"):
            if next_word in _LAUNCHERS:
                continue
            if not next_word.startswith("-"):
                return f"-m {next_word}"
        elif word is not words[0] and re.fullmatch(r"[^-\s=][^\s=]*\.pyw?", word):
            return word
    return None


def _script_stem(script: str) -> str:
    """Return a script's name without directory and suffix, or the last part of a module's name."""
    if script.startswith("-m "):
        return script.split(".")[-1].removeprefix("-m ")
    return Path(script).stem


def _run_name(text: str) -> str:
    """Return a run's name that is valid as a directory's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:40] or "run"


def _is_script(word: str, environ: Mapping[str, str]) -> bool:
    if not word.endswith((".py", ".pyw", ".pyc")):
        return False
    # If there is no such file, a word that ends in .py may also be a launcher on PATH.
    return os.path.lexists(word) or os.sep in word or not shutil.which(word, path=environ.get("PATH"))


def _check_program(word: str, *, is_script: bool, environ: Mapping[str, str]) -> None:
    """Raise CommandError unless `word` is a readable script or an executable command."""
    if os.path.isdir(word):
        raise CommandError(f"{word} is a directory, not a script")
    if not is_script and shutil.which(word, path=environ.get("PATH")):
        return
    if not os.path.exists(word):
        problem = "no such file" if is_script or os.sep in word else "command not found"
        raise CommandError(f"{problem}: {word}")
    if not is_script:
        raise CommandError(f"{word} is neither a Python script (*.py) nor an executable on PATH")
    if not os.access(word, os.R_OK):
        raise CommandError(f"{word} cannot be read: permission denied")


# ------------------------------------------------------------------------------------------------ which Python


def choose_python(python: str | None, environ: Mapping[str, str]) -> str:
    """Return the path of the Python that runs a script. Raises CommandError if `python`, the user's choice, is none.

    Without a choice, it is the first one with torch: the Python of the activated environment, dpmon's own, the first
    one on PATH. If no torch is found there, the Python on PATH may have it elsewhere.
    """
    if python is not None:
        path = shutil.which(python, path=environ.get("PATH"))
        if path is None or os.path.isdir(python):
            raise CommandError(f"--python {python} is not an executable file")
        return os.path.abspath(path)
    activated = [environ[variable] for variable in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(variable)]
    # uvx puts dpmon's own environment first on PATH, before the user's Python.
    directories = environ.get("PATH", os.defpath).split(os.pathsep)
    other_path = os.pathsep.join(directory for directory in directories if not _is_own(directory))
    on_path = shutil.which("python3", path=other_path) or shutil.which("python", path=other_path) or sys.executable
    candidates = [*(os.path.join(prefix, "bin", "python") for prefix in activated), sys.executable]
    return next((candidate for candidate in candidates if _has_torch(candidate)), os.path.abspath(on_path))


def _is_own(directory: str) -> bool:
    """Return whether dpmon's own Python is in this directory."""
    return os.path.realpath(directory) == os.path.realpath(os.path.dirname(sys.executable))


def _has_torch(python: str) -> bool:
    """Return whether torch is installed with this Python, without starting it."""
    directory = os.path.dirname(python)
    if _is_own(directory):
        spec = importlib.util.find_spec("torch")
        return spec is not None and spec.origin is not None  # a folder called torch has no origin
    return os.access(python, os.X_OK) and any(Path(directory).parent.glob("lib*/python3*/*-packages/torch"))
