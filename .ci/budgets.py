"""Compares the lines of every package with the table of budgets in docs/architecture.md: `python .ci/budgets.py`."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_ROW = re.compile(r"^\| (?P<names>`.+?`) \| (?P<budget>[\d,]+) \|")
_TERNARIES = re.compile(r"^\| conditional expressions in 1,000 lines \| (?P<budget>\d+) \|", re.MULTILINE)


class Budget(NamedTuple):
    """A row of the table: paths of packages and modules below dpmon/, and their maximum number of lines."""

    paths: tuple[str, ...]
    lines: int


def read_budgets(text: str) -> tuple[list[Budget], int]:
    """Return the rows of the table in docs/architecture.md, and the most conditional expressions in 1,000 lines."""
    rows = [match for line in text.splitlines() if (match := _ROW.match(line))]
    budgets = [Budget(tuple(re.findall(r"`(.+?)`", row["names"])), int(row["budget"].replace(",", ""))) for row in rows]
    ternaries = _TERNARIES.search(text)
    if not budgets or ternaries is None:
        raise SystemExit("docs/architecture.md has no table of budgets")
    return budgets, int(ternaries["budget"])


def find_excess(root: Path) -> list[str]:
    """Return a sentence for each budget that the code below `root` exceeds, and for each file without a budget."""
    budgets, max_ternaries = read_budgets((root / "docs" / "architecture.md").read_text(encoding="utf-8"))
    paths = sorted((path for budget in budgets for path in budget.paths), key=len, reverse=True)
    lines_by_path: Counter[str] = Counter()
    ternaries = 0
    problems = []
    for file in sorted((root / "dpmon").rglob("*.py")):
        name, source = file.relative_to(root / "dpmon").as_posix(), file.read_text(encoding="utf-8")
        ternaries += sum(isinstance(node, ast.IfExp) for node in ast.walk(ast.parse(source)))
        # A module with a budget of its own does not count for its package.
        path = next((path for path in paths if name == path or name.startswith(f"{path}/")), None)
        if path is None:
            problems.append(f"dpmon/{name} has no budget in docs/architecture.md")
        else:
            lines_by_path[path] += len(source.splitlines())
    for budget in budgets:
        lines = sum(lines_by_path[path] for path in budget.paths)
        if lines > budget.lines:
            problems.append(f"{', '.join(budget.paths)}: {lines:,} lines, {budget.lines:,} are allowed")
    density = 1000 * ternaries / max(lines_by_path.total(), 1)
    if density > max_ternaries:
        problems.append(f"{density:.1f} conditional expressions in 1,000 lines, {max_ternaries} are allowed")
    return problems


if __name__ == "__main__":
    excess = find_excess(ROOT)
    print("\n".join(excess) or "all packages are within their budgets")
    sys.exit(bool(excess))
