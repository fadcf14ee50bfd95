"""The tracer is injected into a Python: program and surroundings are as without dpmon, whatever torch is installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.tracer_harness import TracedRun, run_traced, run_untraced

pytestmark = pytest.mark.slow

LOOK = """
import builtins, importlib.util, json, os, sys
import {names}
try:
    import sitecustomize
    found = [sitecustomize.__file__, sitecustomize.__name__, sitecustomize.__spec__.origin]
except ImportError as error:
    found = [type(error).__name__, str(error), error.name]
print(json.dumps({{
    "sitecustomize": found,
    "spec": getattr(importlib.util.find_spec("sitecustomize"), "origin", "none"),
    "path": sys.path,
    "argv": sys.argv,
    "globals": {{name: str(type(value)) for name, value in globals().items()}},
    "builtins": sorted(vars(builtins)),
    "modules": sorted(sys.modules),
    "environment": {{k: v for k, v in os.environ.items() if not k.startswith("DPMON_") and k != "PYTHONPATH"}},
    "hooks": [str(sys.excepthook), str(sys.displayhook), sys.gettrace(), sys.getprofile()],
    "cwd": os.path.basename(os.getcwd()) == os.path.basename(sys.path[0]),
}}))
"""


def without_places(found: dict[str, Any], run: TracedRun) -> dict[str, Any]:
    """Remove the working directory, which differs between runs."""
    text = json.dumps(found).replace(str(run.directory.parent), "HERE")
    changed: dict[str, Any] = json.loads(text)
    return changed


def traced(tmp_path: Path, text: str, *words: object, **options: Any) -> TracedRun:
    """Run a script under the tracer in a fresh interpreter, whose start is the subject of these tests."""
    return run_traced(tmp_path, text, *words, fresh=True, **options)


def both(tmp_path: Path, text: str, *words: object, **options: Any) -> tuple[TracedRun, TracedRun]:
    """Run the script with and without the tracer, in the same surroundings."""
    expected = run_untraced(tmp_path, text, *words, fresh=True, **options)
    return expected, traced(tmp_path, text, *words, **options)


def package(tmp_path: Path, name: str, text: str) -> dict[str, str]:
    """Write a package (or sitecustomize) of the user; return the environment in which it is found."""
    place = tmp_path / f"lib-{name}"
    if name == "torch":
        (place / "torch").mkdir(parents=True)
        (place / "torch" / "__init__.py").write_text(text)
    else:
        place.mkdir()
        (place / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(place)}


# ------------------------------------------------------------------------------------------------ the surroundings


@pytest.mark.parametrize("own", [False, True])
def test_a_program_without_torch_sees_what_it_sees_alone(tmp_path: Path, own: bool) -> None:
    env = package(tmp_path, "sitecustomize", "import builtins; builtins.mine = __name__\n") if own else {}
    expected, found = both(tmp_path, LOOK.format(names="json"), "-x", "two words", env=env)
    assert (found.status, found.err) == (expected.status, expected.err) == (0, "")
    known, seen = without_places(expected.printed, expected), without_places(found.printed, found)
    ours = set(seen.pop("modules")) ^ set(known.pop("modules"))
    assert ours
    assert all(name.partition(".")[0] == "dpmon" for name in ours)
    assert seen == known
    assert ("mine" in seen["builtins"]) == own
    assert seen["sitecustomize"][1] == ("sitecustomize" if own else "No module named 'sitecustomize'")


def test_a_program_without_torch_leaves_nothing(tmp_path: Path) -> None:
    run = traced(tmp_path, "print('done')\n")
    assert (run.status, run.out, run.err) == (0, "done\n", "")
    assert list(run.directory.iterdir()) == []


@pytest.mark.parametrize("flags", [("-I",), ("-E",), ("-S",), ("-s",), ("-B", "-u"), ("-O",)])
def test_flags_of_python(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """With -I, -E or -S, the tracer is not injected."""
    text = "import sys; print(any(name.startswith('dpmon') for name in sys.modules), sys.flags.isolated)\n"
    run = traced(tmp_path, text, flags=flags)
    assert run.status == 0
    outside = flags[0] in ("-I", "-E", "-S")
    assert run.out == f"{not outside} {int(flags[0] == '-I')}\n"
    assert run.err == ""


def test_python_started_by_the_program(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys\n"
        "program = 'import sys; print(sys.argv[1:], \"dpmon.tracer.torch_import_hook\" in sys.modules)'\n"
        "for how in (['-c', program, 'a'], ['-', 'b']):\n"
        "    subprocess.run([sys.executable, *how], input=program, text=True, check=True)\n"
    )
    run = traced(tmp_path, text)
    assert run.out == "['a'] True\n['b'] True\n"


def test_without_the_directory_of_its_run_python_is_unchanged(tmp_path: Path) -> None:
    """Without a directory, or with only some of the variables, Python is unchanged."""
    for env in ({"DPMON_RUN": ""}, {"DPMON_RUN": str(tmp_path / "gone")}):
        run = traced(tmp_path, "print(1)\n", env=env)
        assert (run.status, run.out, run.err) == (0, "1\n", "")


# ------------------------------------------------------------------------------------------------ torch

UNKNOWN = "__version__ = '9.9'\nprint('unknown torch')\n"


def test_an_unknown_torch_is_left_alone(tmp_path: Path) -> None:
    env = package(tmp_path, "torch", UNKNOWN)
    expected, found = both(tmp_path, "import torch; print(torch.__version__, sorted(vars(torch)))\n", env=env)
    assert (found.status, found.out, found.err) == (0, expected.out, "")
    (line,) = found.warnings
    assert "9.9" in line
    assert "cannot be traced" in line
    assert found.records == ()
    assert found.stages == ("importing torch", "torch imported")


def test_a_launcher_that_starts_ranks_on_another_machine(tmp_path: Path) -> None:
    """It copies the environment: one process there says that nothing is recorded, and all run as without dpmon."""
    text = (
        "import subprocess, sys, torch\n"
        "if not sys.argv[1:]:\n    subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
    )
    there = {**package(tmp_path, "torch", UNKNOWN), "DPMON_BOOT": "another"}
    for env, count in ((there, 1), ({**there, "LOCAL_RANK": "1"}, 0), ({**there, "SLURM_LOCALID": "0"}, 1)):
        run = traced(tmp_path, text, env=env)
        assert (run.status, run.out) == (0, "unknown torch\n" * 2)
        assert run.err.count("is not recorded, because dpmon was started on another node") == count
        assert len(run.err.splitlines()) == count
        assert list(run.directory.iterdir()) == []


def test_a_search_for_torch_before_its_import(tmp_path: Path) -> None:
    text = (
        "import importlib.util, importlib, sys\n"
        "for _ in range(2):\n"
        "    spec = importlib.util.find_spec('torch')\n"
        "    print(spec.name, spec.origin, spec.submodule_search_locations)\n"
        "    print(spec.has_location, spec.parent, spec.cached)\n"
        "    print(spec.loader.get_source('torch'), spec.loader.is_package('torch'), spec.loader.path)\n"
        "print('torch' in sys.modules, importlib.util.find_spec('no_such_thing'))\n"
        "import torch\n"
        "print(type(torch.__loader__), type(torch.__spec__.loader), torch.__spec__.origin, torch.__path__)\n"
        "print(importlib.reload(torch) is torch, importlib.util.find_spec('torch') is torch.__spec__)\n"
        "print([type(finder).__name__ for finder in sys.meta_path])\n"
    )
    expected, found = both(tmp_path, text, env=package(tmp_path, "torch", UNKNOWN))
    assert (found.status, found.out, found.err) == (expected.status, expected.out, expected.err)
    assert found.status == 0
    assert len(found.warnings) == 1


def frames(run: TracedRun) -> str:
    """Return its errors without the directory of the run."""
    return "\n".join(line for line in run.err.splitlines() if "/script.py" not in line)


LOADS = "def load():\n    raise OSError('libsomething.so: cannot open')\n\nload()\n"
CAUGHT = "try:\n    import torch\nexcept ImportError as e:\n    print(e, e.name)\n"
FAILING = {
    "a sitecustomize that raises": ("sitecustomize", "print('it ran')\nraise ValueError('mine')\n", "print(1)\n"),
    "one that lacks a module": ("sitecustomize", "print('it ran')\nimport no_such_module\n", "print(1)\n"),
    "one that lacks itself": ("sitecustomize", "raise ImportError('odd', name='sitecustomize')\n", "print(1)\n"),
    "one that is no Python": ("sitecustomize", "def broken(:", "print(1)\n"),
    "no torch": ("torch", "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n", CAUGHT),
    "a torch without its library": ("torch", LOADS, "import torch\n"),
    "a part of it": ("torch", LOADS, "import torch.nn\n"),
    "a name of it": ("torch", LOADS, "from torch import nn\n"),
    "a torch that is no Python": ("torch", "def broken(:\n", "import torch\n"),
}


@pytest.mark.parametrize(("name", "text", "script"), FAILING.values(), ids=FAILING)
def test_what_cannot_be_imported_fails_as_alone(tmp_path: Path, name: str, text: str, script: str) -> None:
    """For example, a CUDA library is missing: the traceback has no frame of dpmon."""
    expected, found = both(tmp_path, script, env=package(tmp_path, name, text))
    assert (found.status, found.out, frames(found)) == (expected.status, expected.out, frames(expected))
    assert (found.status, "libsomething.so" in found.err) == (int(name == "torch" and script != CAUGHT), text == LOADS)


def test_import_hooks_of_the_programs_own(tmp_path: Path) -> None:
    """A finder before that of dpmon, one without find_spec, and no finders at all."""
    text = """
import sys, importlib.util
class Old:
    def find_module(self, name, path=None):
        return None
class Own:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            return importlib.util.find_spec(name)
        return None
sys.meta_path.insert(0, Old())
sys.meta_path.insert(0, Own())
import torch
print(torch.__version__, "torch.nn" in sys.modules)
"""
    env = package(tmp_path, "torch", UNKNOWN)
    _, found = both(tmp_path, text, env=env)
    assert (found.status, found.out, found.err) == (0, "unknown torch\n9.9 False\n", "")
    bare = (
        "import sys, json\nsys.meta_path[:] = [f for f in sys.meta_path if 'dpmon' not in str(type(f))]\nimport torch\n"
    )
    run = traced(tmp_path, bare, env=env)
    assert (run.status, run.out, run.warnings) == (0, "unknown torch\n", ())


def test_torch_imported_by_a_sitecustomize(tmp_path: Path) -> None:
    env = package(tmp_path, "torch", UNKNOWN)
    mine = package(tmp_path, "sitecustomize", "import torch\n")
    both_places = {"PYTHONPATH": os.pathsep.join([mine["PYTHONPATH"], env["PYTHONPATH"]])}
    expected, found = both(tmp_path, "import sitecustomize; print(sitecustomize.torch)\n", env=both_places)
    assert (found.status, found.out, found.err) == (0, expected.out, "")
    assert len(found.warnings) == 1


REAL = """
import json, sys
{before}
import torch
{after}
model = torch.nn.Linear(2, 1)
print(json.dumps([sys.path, sorted(globals()), list(model(torch.ones(3, 2)).shape), sorted(vars(torch.nn.Module))]))
print([name for name in sorted(sys.modules) if not name.startswith("torch")], file=sys.stderr)
"""


def test_the_real_torch(tmp_path: Path) -> None:
    """It is found, imported and traced; the same modules of torch and of the standard library are loaded."""
    text = REAL.format(before="import importlib.util; importlib.util.find_spec('torch')", after="")
    expected, found = both(tmp_path, text)
    known, seen = without_places(expected.printed, expected), without_places(found.printed, found)
    assert seen == known
    modules = set(eval(found.err)) ^ set(eval(expected.err))
    assert {name.partition(".")[0] for name in modules} == {"dpmon"}
    (call,) = found.calls()
    assert (call.root, call.rows) == ("Linear", 3)
    assert found.complaints == []


def test_the_real_torch_in_a_run_that_is_gone(tmp_path: Path) -> None:
    text = REAL.format(before="import os", after="")
    run = traced(tmp_path, text, env={"DPMON_RUN": str(tmp_path / "gone")})
    assert run.status == 0, run.err
    assert list(run.directory.iterdir()) == []
