"""Records with values that no tracer writes are left out or shown; they stop no reader."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from kept import keep
from spans import Training as Spans
from spoiled import DAMAGE, spoiled, spoiled_lines
from stored import state_in
from synthetic import Training, device_event, host_event

from dpmon.cli.main import main


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["history", "rings"])
@pytest.mark.parametrize("what", DAMAGE)
def test_every_reader_survives(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], what: str,
    where: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    nobody = SimpleNamespace(look=lambda: None)
    monkeypatch.setattr("dpmon.cli.commands.ensure_supervisor", lambda directory: nobody)
    training = Training()
    own = [host_event(1.0), device_event(1.0, 0), *spoiled(DAMAGE[what])]
    records = [*training.begin(), *training.run(5), *spoiled(DAMAGE[what]), *training.run(5)]
    if where == "rings":
        directory = keep({})
        training = Spans(str(directory / "process-0.ring"), 0)
        training.step()
        with open(directory / "process-0.jsonl", "ab") as lines:
            lines.write(spoiled_lines(DAMAGE[what]))
        training.step()
        training.end()
    else:
        keep({0: records, -1: own})
    for words in (
        ["ls"], ["report"], ["report", "--json"], ["report", "--html"], ["export", "-o", "out"],
        ["export", "--format", "csv", "-o", "tables"], ["export", "--format", "perfetto", "-o", "trace"],
        ["attach", "--json"], ["attach", "--headless"],
    ):  # fmt: skip
        assert main(words) == 0, words
        found = capfd.readouterr()
        assert "\x1b" not in found.out + found.err
    directory = next((state / "dpmon" / "runs").iterdir())
    for over in (False, True):
        assert state_in(directory, over=over).focus is not None
