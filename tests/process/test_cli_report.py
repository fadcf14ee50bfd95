"""`dpmon report` of real runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.run_harness import Dpmon, plain_training_script


def test_text_json_and_page_of_a_real_run(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.script(plain_training_script(40, 5, wrapped=True) + "raise SystemExit(3)")
    dpmon.run(*dpmon.warm(), "--devices", "cpu,cpu,cpu,cpu", "script.py")
    text = dpmon.run("report")
    assert (text.status, text.err) == (0, b"")
    assert "\x1b" not in text.text
    assert re.match(
        r"script\.py \(script-....\): failed with exit status 3 after ", text.text.replace(f"{dpmon.cwd}/", "")
    )
    assert "1 of 4 devices receives no rows of Linear: 5 rows do not make 4 chunks of" in text.text
    said = json.loads(dpmon.run("report", "last", "--json").text)
    assert (said["steps"], said["end"]["status"], said["end"]["state"]) == (40, 3, "failed")
    assert [one["rows"] for one in said["replicas"]] == [2, 2, 1]
    made = dpmon.run("report", "--html")
    assert made.status == 0, made.errors
    page = dpmon.cwd / made.text.strip()
    assert page.read_text().startswith("<!doctype html>")
    assert dpmon.run("report", "--html", "-o", tmp_path / "no" / "place").status == 2
    assert dpmon.run("report", "--json", "-o", tmp_path / "it.json").out == b""
    assert json.loads((tmp_path / "it.json").read_text()) == said
    both = dpmon.run("report", "--json", "--html")
    assert (both.status, both.errors.count("\n")) == (2, 1)
