"""What each part loads in a fresh interpreter; the import contracts check only import statements."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "dpmon", ROOT / "tests"
HEAVY = {"textual", "rich", "torch", "numpy", "pynvml", "sqlite3", "asyncio"}


def loaded_by(code: str, *, isolated: bool = True, beyond: str | None = None) -> set[str]:
    """Return the names in sys.modules after `code` in a fresh interpreter, without those that `beyond` loads."""
    first = "before = set()" if beyond is None else f"{beyond}\nbefore = set(sys.modules)"
    program = f"import sys\n{first}\n{code}\nimport json\nprint('\\n' + json.dumps(sorted(set(sys.modules) - before)))"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DPMON_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, *(["-I"] if isolated else []), "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


BARE = loaded_by("")


def added_by(code: str) -> set[str]:
    """Return what `code` loads in addition to a bare interpreter (.pth files may load modules, too)."""
    return loaded_by(code) - BARE


def run_main(*words: str) -> str:
    return f"""
sys.argv = ["dpmon", *{list(words)!r}]
from dpmon.cli.main import entry
try:
    entry()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["ls"], ["attach", "--help"], ["report", "--help"], ["doctor", "--help"]]
)
def test_a_simple_command_loads_no_heavy_library(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not tops(added_by(run_main(*words))) & (HEAVY - {"asyncio"})


def test_the_training_process_loads_only_the_standard_library() -> None:
    for part in ("dpmon.record.shared_names", "dpmon.span_ring", "dpmon.tracer", "dpmon.tracer.torch_import_hook"):
        added = tops(added_by(f"import {part}")) - {"dpmon"}
        assert added <= sys.stdlib_module_names, part
        assert not added & {"sqlite3", "asyncio", "subprocess", "socket", "ssl", "logging"}, part


def test_the_tracer_loads_of_dpmon_only_itself_its_ring_and_records() -> None:
    ours = (
        "dpmon.tracer",
        "dpmon.span_ring",
        "dpmon.errors",
        "dpmon.record.span_format",
        "dpmon.record.shared_names",
    )
    added = loaded_by("import dpmon.tracer.patch", beyond="import torch")
    assert added >= set(ours)
    for name in added:
        top = name.partition(".")[0]
        assert (
            top == "torch"
            or top in sys.stdlib_module_names
            or name.startswith(ours)
            or name in ("dpmon", "dpmon.record")
        ), name


def test_a_process_without_torch_loads_almost_nothing(tmp_path: Path) -> None:
    """Only the sitecustomize is loaded into every Python that the program starts."""
    site = PACKAGE / "tracer" / "site"
    program = "import sys; print(*sorted(sys.modules))"
    loaded = []
    for extra in ({}, {"PYTHONPATH": str(site), "DPMON_RUN": str(tmp_path), "DPMON_START_NS": "0"}):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DPMON_", "PYTHON"))}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**env, **extra}, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        loaded.append(set(done.stdout.split()))
    assert loaded[1] - loaded[0] <= {
        "dpmon",
        "dpmon.tracer",
        "dpmon.tracer.note_files",
        "dpmon.tracer.torch_import_hook",
        "sitecustomize",
    }
    assert "dpmon.tracer.torch_import_hook" in loaded[1]


def all_of(*packages: str) -> str:
    """Code that imports every module of the packages, deferred ones too."""
    paths = (path for package in packages for path in (PACKAGE / package).rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    return "import " + ", ".join(sorted(name.removesuffix(".__init__") for name in names))


def test_the_supervisor_loads_neither_torch_nor_textual() -> None:
    added = added_by(all_of("supervise", "store", "run", "gpu"))
    assert {"dpmon.supervise.supervisor", "dpmon.gpu.device_sampler"} <= added
    assert not tops(added) & {"torch", "numpy", "textual", "rich"}
    above = ("dpmon.tracer", "dpmon.model", "dpmon.ui", "dpmon.cli")
    assert not [name for name in added if name.startswith(above)]
    assert "pynvml" not in added  # only when it is asked, on its own thread


def test_the_screen_loads_neither_torch_nor_pynvml_nor_the_tracer() -> None:
    added = added_by(all_of("ui", "model") + "\nimport dpmon.run.run_reader, dpmon.run.run_signals")
    assert "textual.app" in added
    assert not tops(added) & {"torch", "numpy", "pynvml"}
    assert not [name for name in added if name.startswith(("dpmon.tracer", "dpmon.gpu", "dpmon.supervise.supervisor"))]


def test_the_screen_draws_its_first_picture_before_it_loads_queries_and_the_report() -> None:
    added = added_by("import dpmon.ui.monitor")
    assert "sqlite3" not in added
    later = (
        "dpmon.assemble",
        "dpmon.store.store_queries",
        "dpmon.report.report_data",
        "dpmon.report.sections",
    )
    assert not [name for name in added if name.startswith(later)]


def test_exports_and_reports_load_neither_torch_nor_a_screen() -> None:
    added = added_by(all_of("export", "report") + "\nimport dpmon.cli.commands")
    assert not tops(added) & {"torch", "numpy", "textual", "rich", "pynvml"}
    above = ("dpmon.tracer", "dpmon.gpu", "dpmon.supervise.supervisor", "dpmon.ui")
    assert not [name for name in added if name.startswith(above)]


def test_the_command_line_loads_no_screen_until_it_starts_one() -> None:
    added = added_by(all_of("cli"))
    assert "dpmon.cli.summary" in added
    assert not tops(added) & {"torch", "textual", "rich"}
    assert not [name for name in added if name.startswith("dpmon.ui")]


def test_text_loads_nothing_above_it_and_no_library() -> None:
    added = added_by(all_of("text"))
    assert {"dpmon.text.cells", "dpmon.text.formatting"} <= added
    assert tops(added) <= {"dpmon", *sys.stdlib_module_names}
    above = ("ui", "report", "export", "cli", "run", "gpu", "tracer", "ring")
    assert not [name for name in added if name.startswith(tuple(f"dpmon.{part}" for part in above))]


def test_the_model_loads_neither_clock_nor_io() -> None:
    added = added_by(all_of("model"))
    assert not tops(added) & {"textual", "rich", "sqlite3", "threading", "socket", "subprocess"}


def test_a_class_name_means_one_thing_in_the_whole_tree() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert len(places) > 100
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_file_name_occurs_once_in_the_whole_tree() -> None:
    names = [path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))
