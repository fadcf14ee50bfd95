"""dpmon notes the exception that ends a script without running code of the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.tracer_harness import TracedRun, run_traced, run_untraced

pytestmark = pytest.mark.slow

SHOWS = """
import atexit
shown = []
atexit.register(lambda: print(shown, flush=True))  # it runs after what the tracer registers
import torch
class Shown:
    def __str__(self):
        shown.append("str")
        {act}
        return "shown"
    __repr__ = __str__
class Own(RuntimeError):
    __str__ = Shown.__str__
raise {error}
"""
CASES = [
    *((error, "pass") for error in ("Own('x')", "ValueError(Shown())", "KeyError(Shown())")),
    ("Own('x')", "raise KeyboardInterrupt"),
    ("Own('x')", "raise SystemExit(9)"),
    ("ValueError(Shown())", "raise KeyboardInterrupt"),
]


@pytest.mark.parametrize(("error", "act"), CASES)
def test_no_code_of_the_script_runs_to_describe_its_exception(tmp_path: Path, error: str, act: str) -> None:
    text = SHOWS.format(error=error, act=act)
    by_itself, found = run_untraced(tmp_path, text), run_traced(tmp_path, text)
    assert (found.status, found.out) == (by_itself.status, by_itself.out)
    assert without_place(found) == without_place(by_itself)
    assert found.complaints == []
    assert noted(found)["kind"] == error.partition("(")[0]


def without_place(run: TracedRun) -> str:
    return run.err.replace(str(run.directory.parent), "")


def noted(run: TracedRun) -> dict[str, Any]:
    kind, _, rest = (run.directory / "endings.log").read_text().split(" ", 2)[2].partition(" ")
    return {"kind": kind, **json.loads(rest)}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("ValueError('a', 1)", "('a', 1)"),
        ("KeyError('a')", "'a'"),
        ("OSError(2, 'no such file', 'x')", "[Errno 2] no such file: 'x'"),
        ("type('Own', (RuntimeError,), {})('of its own class')", "of its own class"),
        ("ValueError('first\\nsecond')", "first"),
        ("ValueError", ""),
    ],
)
def test_messages_of_python_itself_are_noted(tmp_path: Path, error: str, message: str) -> None:
    run = run_traced(tmp_path, f"import torch\nraise {error!s}\n".replace("first\nsecond", "first\\nsecond"))
    assert (run.status, noted(run)["message"]) == (1, message)


INTERRUPTED = """
import atexit, os, signal, sys
def late():
    print("late", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
atexit.register(late)
import torch
def early():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
atexit.register(early)
raise {error}
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError('x')", "SystemExit(4)"])
def test_an_interrupt_at_the_end_is_as_it_is_alone(tmp_path: Path, error: str) -> None:
    text = INTERRUPTED.format(error=error)
    by_itself, found = run_untraced(tmp_path, text), run_traced(tmp_path, text)
    assert (found.status, found.out) == (by_itself.status, by_itself.out)
    assert by_itself.out == "late\n"
    assert found.complaints == []


def test_a_module_that_a_script_forbids_costs_nothing(tmp_path: Path) -> None:
    """Some scripts set an entry of sys.modules to None, so that its import fails."""
    text = "import sys\nsys.modules['torch.distributed.x'] = None\nimport torch\nmodel = torch.nn.Linear(2, 2)\n"
    run = run_traced(
        tmp_path, f"{text}for _ in range(5):\n    model(torch.ones(1, 2)).sum().backward()\nraise OSError('x')\n"
    )
    assert [text for text in run.complaints if "The last step is incomplete" not in text] == []
    assert len(run.calls()) == 5
    assert noted(run)["message"] == "x"
