"""Names of a hostile script leave dpmon only in a form that steers neither a terminal nor a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from support.run_harness import Dpmon

SCRIPT = r"""
import torch
from torch.utils.data import DataLoader, TensorDataset
name = "=1+1\x1b]52;c;aGk=\x07\u202e\nNet"
Net = type(name, (torch.nn.Module,), {"forward": lambda self, x: self.inner(x)})
Data = type("@SUM(A1)\x1b[2J\u202e", (TensorDataset,), {})
net = Net()
net.inner = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for (batch,) in DataLoader(Data(torch.randn(80, 4)), batch_size=2):
        net(batch).sum().backward()
        opt.step()
"""
SHOWN = "=1+1\N{REPLACEMENT CHARACTER}]52;c;aGk=\N{REPLACEMENT CHARACTER} Net"
EXPORTS = (
    *(["report"], ["report", "--json"], ["ls"], ["ls", "--json"], ["export"], ["export", "--format", "perfetto"]),
    *(["export", "--format", "csv", "--kind", kind] for kind in ("call", "loader", "memory", "process")),
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each export writes, by its words."""
    root = tmp_path_factory.mktemp("hostile")
    dpmon = Dpmon(root / "state", root)
    result = dpmon.run(*dpmon.warm(), "--headless", "--metrics", root / "m.prom", dpmon.script(SCRIPT))
    assert result.status == 0
    dpmon.run("report", "--html", "-o", root / "r.html")
    found = {" ".join(words): dpmon.run(*words).text for words in EXPORTS}
    page = Path(root / "r.html").read_text().partition("<body")[2]
    return {**found, "summary": result.errors, "metrics": (root / "m.prom").read_text(), "page": page}


def test_no_export_has_a_control_or_direction_character(exported: dict[str, str]) -> None:
    for words, text in exported.items():
        assert text, words
        assert not {"\x1b", "\x07", "\u202e"} & set(text), words
        if "\\u001b" in text or "\\u202e" in text:
            assert words == "page", "the code of a library in the page may name them"


def test_json_has_the_names_that_the_screen_shows(exported: dict[str, str]) -> None:
    calls = [json.loads(line) for line in exported["export"].splitlines() if '"kind":"call"' in line]
    assert {call["root"] for call in calls} == {SHOWN}
    assert json.loads(exported["report --json"])["sizes"][0]["root"] == SHOWN


def test_no_text_cell_begins_like_a_formula(exported: dict[str, str]) -> None:
    rows = [row for words, text in exported.items() if "csv" in words for row in csv.DictReader(io.StringIO(text))]
    assert "'" + SHOWN in {row.get("root") for row in rows}
    assert any((row.get("loader") or "").startswith("'@SUM(A1)") for row in rows)
    for cell in (cell for row in rows for cell in row.values()):
        assert not (cell or "").startswith(("=", "+", "@"))
        if (cell or "").startswith("-"):
            float(cell)
