"""The check of the packages' budgets, on small trees."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
find_excess = runpy.run_path(str(ROOT / ".ci" / "budgets.py"))["find_excess"]
TABLE = """
| package | budget | knows |
|---|---|---|
| `store` | 1,000 | the history |
| `run`, `store/rows.py` | 3 | the run |
| conditional expressions in 1,000 lines | 250 | |
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for directory in ("docs", "dpmon/store/tables", "dpmon/run"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "docs" / "architecture.md").write_text(TABLE)
    (tmp_path / "dpmon" / "store" / "tables" / "steps.py").write_text("a = 1\n" * 1000)
    (tmp_path / "dpmon" / "store" / "rows.py").write_text("a = 1\n" * 2)
    (tmp_path / "dpmon" / "run" / "run.py").write_text("a = 1\n")
    return tmp_path


def test_a_tree_within_its_budgets(tree: Path) -> None:
    assert find_excess(tree) == []


def test_a_line_too_many_is_named_with_its_package(tree: Path) -> None:
    with (tree / "dpmon" / "store" / "tables" / "steps.py").open("a") as file:
        file.write("a = 2\n")
    assert find_excess(tree) == ["store: 1,001 lines, 1,000 are allowed"]


def test_a_package_without_a_budget_is_named(tree: Path) -> None:
    (tree / "dpmon" / "new").mkdir()
    (tree / "dpmon" / "new" / "new.py").write_text("a = 1\n")
    assert find_excess(tree) == ["dpmon/new/new.py has no budget in docs/architecture.md"]


def test_conditional_expressions_are_counted(tree: Path) -> None:
    (tree / "dpmon" / "store" / "tables" / "steps.py").write_text("a = 1 if 2 else 3 if 4 else 5\n" * 200)
    assert find_excess(tree) == ["1970.4 conditional expressions in 1,000 lines, 250 are allowed"]
