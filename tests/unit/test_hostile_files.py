"""Anything in place of a run's file causes an error or missing data, never a hang, a traceback or harm elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dpmon.cli.main import main
from dpmon.record.history_rows import Row
from support.history_builders import write_run_directory
from support.hostile_inputs import FILE_TYPES, create_file_of_type
from support.record_builders import Training, host_event
from support.ring_writers import SpanTraining as spans_of

NAMES = (
    *("run.json", "exit.json", "history.sqlite", "history.sqlite-journal", "history.sqlite-wal", "history.sqlite-shm"),
    *("stdout.log", "stderr.log", "output.log", "keep", "endings.log", "warnings.log", "stages.log", "stop-asked"),
    *("spare", "supervisor.log", "supervisor.lock", "process-0.ring", "process-7.ring", "input.fifo"),
    *("process-0.jsonl", "process-1.ring", "process-1.jsonl", "process-7.jsonl", "waits-for-input"),
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
ALL_BUT_INFO = tuple(name for name in NAMES if name != "run.json")
CASES = [(kind, names) for kind in FILE_TYPES for names in (("run.json",), ALL_BUT_INFO)]


@pytest.fixture
def runs(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A run whose files are damaged, and another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # If the run's end cannot be read, each command would start a supervisor: another test does this in a process.
    monkeypatch.setattr("dpmon.supervise.start_supervisor.needs_supervisor", lambda *_: False)
    made = []
    for name in ("spoiled", "other"):
        training = Training()
        records: dict[int, list[Row]] = {0: [*training.begin(), *training.run(5)], -1: [host_event(1.0)]}
        made.append(write_run_directory(records, status=1, name=name))
        spans = spans_of(str(made[-1] / "process-1.ring"), 1)
        for _ in range(3):
            spans.step()
        for log in ("stdout.log", "stderr.log", "output.log", "stages.log", "warnings.log"):
            (made[-1] / log).write_text("1 2 torch imported\n")
    return made


def words_of(command: list[str], directory: Path) -> list[str]:
    return command if command[0] == "ls" else [*command, directory.name]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "names"), CASES, ids=lambda part: part if isinstance(part, str) else part[0])
def test_every_command_survives(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, names: tuple[str, ...]
) -> None:
    spoiled, other = runs
    for name in names:
        create_file_of_type(kind, spoiled / name)
    for command in COMMANDS:
        status = main(words_of(command, spoiled))
        found = capfd.readouterr()
        assert status in (0, 1, 2), command
        assert "Traceback" not in found.err
        if command == ["ls"]:
            assert "other" in found.out
        if status == 2 and command[0] != "attach":  # the status of attach is the run's
            assert found.err.count("\n") <= 2, found.err
    if kind != "a directory":  # a directory called "keep" cannot be removed, so the run is kept
        assert names == ("run.json",) or not spoiled.exists(), "deleted"
    assert other.exists()


def test_deleting_a_run_deletes_nothing_else(runs: list[Path], tmp_path: Path) -> None:
    spoiled, other = runs
    beyond = tmp_path / "beyond"
    beyond.mkdir()
    (beyond / "file").write_text("precious")
    (spoiled / "link").symlink_to(beyond)
    (spoiled / "inner").mkdir()
    (spoiled / "inner" / "up").symlink_to("../../..")
    os.link(beyond / "file", spoiled / "second-name")
    for name in ("keep", "output.log"):
        (spoiled / name).unlink(missing_ok=True)
        (spoiled / name).symlink_to(beyond / "file")
    os.rename(spoiled / "keep", spoiled / "kept-no-more")
    assert main(["rm", spoiled.name]) == 0
    assert not spoiled.exists()
    assert (beyond / "file").read_text() == "precious"
    assert other.exists()


HOSTILE = "\x1b]52;c;eA==\x07\x1b[2J\x9b31m\r\n\u202e\x00"
RAW = ("\x1b", "\x07", "\x9b", "\r", "\u202e", "\x00")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_text_of_a_run_controls_the_terminal(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    spoiled, _ = runs
    info = json.loads((spoiled / "run.json").read_text())
    for member in ("script", "cwd", "python", "boot_id"):
        info[member] = HOSTILE
    info["command"] = [HOSTILE] * 4
    info["versions"] = {HOSTILE: HOSTILE, "dpmon": HOSTILE, "python": HOSTILE}
    info["options"] = {"mode": HOSTILE, "devices": HOSTILE, "elsewhere": HOSTILE, HOSTILE: HOSTILE}
    (spoiled / "run.json").write_text(json.dumps(info))
    how = json.loads((spoiled / "exit.json").read_text())
    for member in ("signal", "error", "unknown", "cause", "by"):
        for chosen in ({member: HOSTILE}, {member: HOSTILE, "status": None}):
            (spoiled / "exit.json").write_text(json.dumps({**how, **chosen}))
            (spoiled / "stdout.log").write_text("")
            if command != ["rm"]:
                main(words_of(command, spoiled))
    main(words_of(command, spoiled))
    found = capfd.readouterr()
    written = [path.read_text() for path in (tmp_path / "page.html", tmp_path / "out.jsonl") if path.exists()]
    for text in (found.out, found.err, *written):
        assert not [sign for sign in RAW if sign in text], repr(text[:500])
