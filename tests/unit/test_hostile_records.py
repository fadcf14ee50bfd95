"""Names and texts from a script control no terminal, page or table."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.cli.main import main
from dpmon.record.record_types import Event
from dpmon.run.run_directory import load_exit, write_info
from dpmon.store.database import DAMAGE
from dpmon.ui.screen_data import PANELS, ScreenData, View
from support.format_readers import HtmlPage, check_page_is_offline
from support.history_builders import snapshot_of_directory, write_run_directory
from support.record_builders import Training, device_event, flops_event, host_event, with_flops
from support.ring_writers import SpanTraining as Spans
from support.screen_states import screen_text

FOREIGN = '<script>alert(1)</script>\x1b]52;c;eA==\x07\x1b[31m\u202e<b onload="x">'
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["history", "rings"])
def test_no_text_of_a_record_controls_a_terminal_or_a_page(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    nobody = SimpleNamespace(start_if_needed=lambda: None)
    monkeypatch.setattr("dpmon.cli.commands.ensure_supervisor", lambda *_: nobody)
    training = Training(root=FOREIGN, devices=("cpu:0", FOREIGN))
    warning = Event("warning", {"process": 0, "t_s": 0.6, "text": FOREIGN})
    own = [host_event(1.0), device_event(1.0, 0, name=FOREIGN, throttle=[FOREIGN]), warning]
    records = [*training.begin(), *training.run(5), *training.switch("single")]
    records += [training.mode_event("user", FOREIGN), *training.run(5)]
    directory = write_run_directory(
        {} if where == "rings" else {0: records, -1: own}, script=f"{FOREIGN}.py", cwd=FOREIGN
    )
    if where == "rings":
        spans = Spans(str(directory / "process-0.ring"), 0)
        spans.step()
        with open(directory / "process-0.jsonl", "ab") as lines:
            lines.write(json.dumps({"kind": warning.kind, **warning.data}).encode() + b"\n")
        spans.step()
        spans.end()
        exit_info = load_exit(directory)
        assert exit_info is not None
        write_info(directory, replace(exit_info, drained=False))
    for words in (
        ["ls"], ["report"], ["report", "--json"], ["report", "--html", "-o", "page"], ["export", "-o", "out"],
        ["export", "--format", "csv", "-o", "tables"], ["export", "--format", "perfetto", "-o", "trace"],
        ["attach", "--json"], ["attach", "--headless"],
    ):  # fmt: skip
        assert main(words) == 0, words
        found = capfd.readouterr()
        assert not CONTROLS.search(found.out + found.err), words
        assert words != ["report"] or "alert(1)" in found.out, "what is harmless is shown"
    page = Path("page").read_text()
    assert not re.search(r"<script>alert|<b onload|\x1b|\u202e", page)
    check_page_is_offline(HtmlPage(page))
    for over in (False, True):
        shown = snapshot_of_directory(directory, over=over)
        assert shown.representative is not None
        facts = ScreenData(shown, shown.newest_ns, is_command_alive=not over)
        for zoom in (None, *PANELS):
            assert not CONTROLS.search(screen_text(replace(facts, view=View(zoom=zoom)), 120, 40)), zoom


@pytest.mark.parametrize(
    ("flops", "gpu"),
    [
        ({"by_dtype": None}, {}),
        ({"by_dtype": [1, 2]}, {}),
        ({"by_dtype": {"bfloat16": float("inf")}}, {}),
        ({"operators": 0}, {}),
        ({"operators": 10**400}, {}),
        ({"process": None}, {}),
        ({}, {"ordinals": [{"process": [1], "device": 5}]}),
        ({}, {"energy_j": "x", "sm_active_pct": "x"}),
    ],
)
def test_no_count_of_flops_ends_the_report_or_the_screen(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    flops: dict[str, Any], gpu: dict[str, Any],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    name = {"name": "NVIDIA H100 80GB HBM3", "ordinals": [{"process": 0, "device": "cuda:0"}]}
    training = Training(mode="single", devices=("cuda:0",), via=None, virtual=False)
    records = [*training.begin(), *with_flops(training.run(100), 10**13), flops_event(**flops)]
    own = [device_event(float(second), 0, **{**name, **gpu}) for second in range(30)]
    directory = write_run_directory({0: records, -1: own})
    for words in (["report"], ["attach", "--headless"]):
        assert main(words) == 0 or "the history is damaged" in capfd.readouterr().err
    shown = snapshot_of_directory(directory, over=False)
    with suppress(*DAMAGE):  # the screen goes back to its last picture then
        screen_text(ScreenData(shown, shown.newest_ns, is_command_alive=True), 120, 40)
