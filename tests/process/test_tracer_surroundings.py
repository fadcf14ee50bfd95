"""A script's files, limits, children, threads, hooks and handlers behave as without dpmon."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.baseline_comparison import run_unless_aborted
from support.tracer_harness import results_of_script, run_traced, run_untraced, traced_script_text

pytestmark = pytest.mark.slow

TEXT = traced_script_text("surroundings")
HELPERS = {"made", "train", "in_child"}
PIECES = {
    part.name: ast.unparse(part)
    for part in ast.parse(TEXT).body
    if isinstance(part, ast.FunctionDef) and part.name not in HELPERS
}
OVER_REPLICAS = (
    *(
        "numbers_used_again",
        "few_descriptors",
        "little_memory",
        "recursion",
        "children",
        "fork_while_traced",
        "threads",
    ),
    *("traces", "hooks", "collector", "replaced_builtins", "standard_streams_closed", "finalized_calls"),
)
"""Pieces in which threads and calls of replicas matter: they also run over two virtual replicas."""
WITHOUT_RECORD = {"small_files", "replaced_clock"}
"""Pieces in which no ring can be created, for example because the script broke a function that creates it."""
CRASHED = "child -11"
"""torch sometimes crashes in a forked child in which two threads compute, without dpmon too (docs/tracing.md)."""
NOISE = re.compile(r"W\d{4} [^]]*]|^.* This process .* is multi-threaded, use of fork\(\).*\n.*\n", re.MULTILINE)
"""A time in torch's own warnings. From 3.12 on, Python warns of each fork in a process with threads, which virtual
replicas have."""


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """What a piece leaves without dpmon; without GPUs, most do the same with a DataParallel."""

    @cache
    def found(piece: str, call: str) -> dict[str, Any]:
        return results_of_script(run_untraced(tmp_path_factory.mktemp(piece), TEXT, piece, call))

    return lambda piece, call: dict(found(piece, call if "SPREAD" in PIECES[piece] else "bare"))


@pytest.mark.parametrize(
    ("piece", "call"), [*((piece, "bare") for piece in PIECES), *((piece, "dp") for piece in OVER_REPLICAS)]
)
def test_the_surroundings_of_a_script_are_the_same_as_without_dpmon(
    tmp_path: Path, by_itself: Callable[[str, str], dict[str, Any]], piece: str, call: str
) -> None:
    expected = by_itself(piece, call)
    tries = 3 if (piece, call) == ("children", "dp") else 1
    run = run_unless_aborted(
        lambda _: run_traced(tmp_path, TEXT, piece, call), lambda run: run.out, sign=CRASHED, tries=tries
    )
    found = results_of_script(run)
    for one in (expected, found):
        one["err"] = NOISE.sub("", one["err"])
    assert found == expected
    assert bool(run.calls()) == (piece not in WITHOUT_RECORD)


@pytest.mark.parametrize("filters", ["always", "once a line"])
def test_warnings_blame_the_same_lines_as_without_dpmon(tmp_path: Path, filters: str) -> None:
    """The frames of the tracer do not count, so filters of the script match, and repeated warnings are shown once."""
    text = traced_script_text("warned")
    expected = run_untraced(tmp_path, text, filters)
    assert expected.status == 0, expected.err
    assert len(expected.out.splitlines()) > 100
    run = run_traced(tmp_path, text, filters, mode="script")  # no virtual replicas, which torch would not run
    assert (run.status, run.out) == (0, expected.out)
    assert (bool(run.steps()), run.complaints) == (True, [])


OPENED = """
import platform, signal, sys
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
version = platform.python_version
def interrupted():
    platform.python_version = version
    signal.raise_signal(signal.SIGINT)
    return version()
words, how = sys.argv, sys.argv[1]
if how == "argv":
    del sys.argv
else:
    platform.python_version = interrupted
for _ in range(6):
    try:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    except KeyboardInterrupt:
        print("interrupted")
sys.argv = words
"""


def test_an_interrupt_while_the_record_is_opened(tmp_path: Path) -> None:
    """The next call opens it."""
    run = run_traced(tmp_path, OPENED, "interrupt")
    assert (run.status, run.out) == (0, "interrupted\n")
    assert [step.step for step in run.steps()] == [1, 2, 3, 4, 5]
    assert (len(run.events("process")), run.complaints) == (1, [])


def test_a_process_that_cannot_be_described(tmp_path: Path) -> None:
    """Only that event is lost."""
    run = run_traced(tmp_path, OPENED, "argv")
    assert run.status == 0, run.err
    assert [step.step for step in run.steps()] == [1, 2, 3, 4, 5, 6]
    (complaint,) = run.complaints
    assert "tracer failed (description of the process): " in complaint
