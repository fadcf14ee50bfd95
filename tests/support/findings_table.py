"""The table of findings in the documentation, which the tests of scripts with these findings compare and write."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "what-to-do.md"
_TABLE = re.compile(r"(?<=\| the finding \| from \| not for \| seconds \|\n\|---\|---\|---\|---\|\n)(?:\|.*\n)+")
_ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def check_row(pattern: str, finding: str, condition: str, silence: str, seconds: str) -> None:
    """Compare the row whose finding matches `pattern`, numbers of seconds apart; with DPMON_GOLDEN=write, write it."""
    page = _PAGE.read_text(encoding="utf-8")
    table = _TABLE.search(page)
    assert table is not None
    rows = _ROW.findall(table[0])
    (index,) = [index for index, row in enumerate(rows) if re.fullmatch(pattern, row[0])]
    if os.environ.get("DPMON_GOLDEN") == "write":
        rows[index] = finding, condition, silence, seconds
        text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        _PAGE.write_text(_TABLE.sub(lambda _: text, page), encoding="utf-8")
    _, *facts, known_seconds = rows[index]
    assert facts == [condition, silence]
    assert re.sub(r"[\d.]+", "", known_seconds) == re.sub(r"[\d.]+", "", seconds)


def saving(saves_s: float | None) -> str:
    """Return what a finding could save (s), as the table says it."""
    return "none to save" if saves_s is None else f"at most {saves_s:.1f} to save"
