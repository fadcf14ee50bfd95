"""`dpmon report` of real runs, and its page in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import Browser, find
from kept import keep
from plain_training import plain_training
from running import Dpmon
from synthetic import Training, device_event


def test_text_json_and_page_of_a_real_run(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.script(plain_training(40, 5, wrapped=True) + "raise SystemExit(3)")
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


@pytest.mark.skipif(find() is None, reason="no Chromium or Chrome on this machine")
def test_the_page_works_offline_in_a_browser(state: Path, tmp_path: Path) -> None:
    from dpmon.report import collect
    from dpmon.report.page import page
    from dpmon.report.sections import document

    evil = '</script><script>alert(1)</script><img src="http://example.invalid/x" onerror="alert(2)">'
    training = Training(root=evil, devices=("cuda:0", f"{evil}:1"), virtual=False)
    payloads = [*training.begin(), *training.run(800), *training.switch("single"), *training.run(400)]
    own = [device_event(t / 10, index, name=evil) for t in range(60) for index in (0, 1)]
    path = tmp_path / "page.html"
    path.write_text(page(document(collect(keep({0: payloads, -1: own}, script=evil)))), "utf-8")
    program = find()
    assert program is not None
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.open(path.as_uri(), "document.readyState === 'complete'")
        assert browser.value("document.querySelectorAll('svg').length") == 7
        sizes = "[...document.querySelectorAll('svg')].map(one => one.getBoundingClientRect().height)"
        assert all(height > 60 for height in browser.value(sizes))
        assert browser.value("document.querySelectorAll('[aria-label=\"Step time\"] path.line').length") == 2
        links = "[...document.querySelectorAll('nav a')].every(one => document.querySelector(one.hash))"
        assert browser.value(links)
        assert browser.value("document.querySelectorAll('img, iframe, object').length") == 0
        assert evil in browser.value("document.querySelector('h1').textContent")
        label = '[aria-label="Forward of the replicas"]'
        assert "alert(1)" in browser.value(f"document.querySelector('{label}').textContent")
        assert not any(event.get("method") == "Page.javascriptDialogOpening" for event in browser.events)
        assert browser.complaints() == [], "nothing in the console"
        assert browser.requests() == [path.as_uri()], "nothing asked of any network"
        assert browser.picture().startswith(b"\x89PNG")
    finally:
        browser.close()
