"""A script's files, limits, children, threads, hooks and handlers behave as without dpmon."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_tracer_lifetimes import left
from tracing import alone, text_of, traced

TEXT = text_of("surroundings")
HELPERS = {"made", "train", "in_child"}
PIECES = [
    part.name
    for part in ast.parse(TEXT).body
    if isinstance(part, ast.FunctionDef) and part.name not in HELPERS and part.name != "Net"
]
WITHOUT_RECORD = {"small_files", "small_files_ignored", "small_files_handled", "replaced_clock"}
"""Pieces in which no ring can be made, or the script has broken what makes it."""
TIMES = re.compile(r"W\d{4} [^]]*]")


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("call", ["bare", "dp"])
def test_the_same_as_alone(tmp_path: Path, piece: str, call: str) -> None:
    expected = left(alone(tmp_path, TEXT, piece, call))
    run = traced(tmp_path, TEXT, piece, call)
    found = left(run)
    for one in (expected, found):
        one["err"] = TIMES.sub("", one["err"])  # torch's own warnings contain a time
    assert found == expected
    assert bool(run.calls()) == (piece not in WITHOUT_RECORD)
