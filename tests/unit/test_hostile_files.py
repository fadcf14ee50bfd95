"""Anything in the place of a file of a run: an error or less to read; never a hang, a traceback, or harm elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kept import keep
from places import PLACES, put
from synthetic import Training, host_event

from dpmon.cli.main import main

NAMES = (
    *("run.json", "exit.json", "history.sqlite", "history.sqlite-journal", "history.sqlite-wal", "history.sqlite-shm"),
    *("stdout.log", "stderr.log", "output.log", "keep", "endings.log", "warnings.log", "stages.log", "stop-asked"),
    *("spare", "supervisor.log", "supervisor.lock", "process-0.ring", "process-7.ring", "gpu.ring", "input.fifo"),
    "waits-for-input",
)
COMMANDS: tuple[list[str], ...] = (
    ["ls"],
    ["ls", "--json"],
    ["report"],
    ["report", "--json"],
    ["report", "--html", "-o", "page.html"],
    ["export", "-o", "out.jsonl"],
    ["export", "--format", "csv", "-o", "tables"],
    ["export", "--format", "perfetto", "-o", "out.trace"],
    ["attach", "--json"],
    ["attach", "--headless"],
    ["stop"],
    ["keep"],
    ["keep", "--not"],
    ["rm"],
)
LIMIT_S = 20


@pytest.fixture(params=["screen", "headless"])
def runs(request: pytest.FixtureRequest, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A run to be spoiled, and another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = []
    for name in ("spoiled", "other"):
        training = Training()
        records = {0: [*training.begin(), *training.run(5)], -1: [host_event(1.0)]}
        made.append(keep(records, status=1, name=name, headless=request.param == "headless"))
        for log in ("stdout.log", "stderr.log", "output.log", "stages.log", "warnings.log"):
            (made[-1] / log).write_text("1 2 torch imported\n")
    return made


def words_of(command: list[str], directory: Path) -> list[str]:
    return command if command[0] == "ls" else [*command, directory.name]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", PLACES)
def test_every_command_survives(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    spoiled, other = runs
    if (spoiled / name).is_dir():
        shutil.rmtree(spoiled / name)
    put(kind, spoiled / name)
    for command in COMMANDS:
        status = main(words_of(command, spoiled))
        found = capfd.readouterr()
        assert status in (0, 1, 2), command
        assert "Traceback" not in found.err
        if command == ["ls"]:
            assert "other" in found.out
        if status == 2 and command[0] != "attach":  # whose status is the run's
            assert found.err.count("\n") <= 2, found.err
    if kind == "a symbolic link" and name != "run.json":
        assert not (spoiled / "precious").exists(), "deleted with its run"
    assert other.exists()
